"""Local steps: hosts train apart, and exchange weights now and then.

Papers: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
(arXiv 2311.08105), algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping
communication", 2025 (arXiv 2501.18512), algorithm 2. The idea in five lines:

1. A worker is a host; its ranks train by a strategy of their own, with their own optimizer.
2. All workers start a round with the same outer weights, and take H steps on their own data.
3. The difference between outer weights and its own is a worker's outer gradient.
4. The mean of all outer gradients steps the outer weights, by SGD with Nesterov's momentum.
5. Each worker goes on from the outer weights. Parts of the model do so in turn, beside training.

With P parameters of b bytes, K workers: sent per step, host to host, 2 (K-1)/K P b / H, where data
parallelism sends H times as much; held more: outer weights and momentum, 2 P b. Where the ranks of
a worker divide a replica, each steps its parts, and exchanges them with the ranks at its place of
the other workers. The trajectory is one of its own: experiments have found it as good as data
parallelism, and nobody has proved that.

============ ==========================================================================
options.py   the knobs, and what may be set together
strategy.py  ``Local``: the contract, what the strategy inside of a worker does alone, costs
outer.py     the outer steps: DiLoCo, Streaming DiLoCo; their messages; the warm-up
sync.py      who takes part in an exchange: the agreement, late workers, communicators
state.py     the state of all workers in one checkpoint, and whole outer weights
============ ==========================================================================
"""
