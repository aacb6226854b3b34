"""ZeRO: the states of data-parallel training divided among the ranks that would all hold the same.

Paper: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020 (sections 5 and 7). The idea in five lines:

1. Parameters lie side by side in flat units; every rank owns 1/N of every unit.
2. In backward a unit's gradients are reduce-scattered: each rank gets the mean of its share.
3. The user's optimizer steps this rank's fragments only: its state is 1/N (stage 1).
4. Gradients outside of the owned range are given up as soon as they are sent (stage 2).
5. So are parameters: a unit is gathered before use and freed after (stage 3).

With P elements, N ranks and f = (N-1)/N a rank sends f P for the reduction and f P for the
updated parameters per step, as much as data parallelism does; stage 3 gathers once more for
backward: 3 f P.

The step in its order, and the mechanisms that it calls, are ``drivetrain.parallel``.
"""
