"""FSDP: every parameter cut by rows among ranks, and gathered unit by unit when it is used.

Paper: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
after ZeRO stage 3 (Rajbhandari et al., SC 2020, section 5.3). The idea in five lines:

1. A unit is a module whose parameters are used together, such as a transformer block.
2. Every rank keeps some rows of every parameter, and the optimizer steps just these.
3. Before a unit's forward, and again before its backward, one all-gather makes it whole.
4. After its backward one reduce-scatter leaves each rank the mean gradient of its rows.
5. Hybrid: groups of ranks do so among themselves, and add the gradients of their rows up.

With P elements, N ranks and f = (N-1)/N a rank sends 3 f P elements per step and holds P/N of
parameters, gradients and states each, and whole units in use. With R groups of S ranks: 3 f_S P
inside of a group and 2 f_R P/S between groups.

===========  ===================================================================================
options.py   the options, and the units and groups that follow from them
fsdp.py      the strategy: its step as a table, units, rows, and the groups of ranks; the shards as
             torch's DTensors
===========  ===================================================================================

The step in its order, and the mechanisms that it calls, are ``drivetrain.parallel``.
"""
