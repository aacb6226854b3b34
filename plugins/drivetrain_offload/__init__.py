"""Offload: optimizer state and parameters kept in host memory or on a disk between their uses.

Papers: Ren et al., "ZeRO-Offload", USENIX ATC 2021; Rajbhandari et al., "ZeRO-Infinity", SC 2021
(section 5, the infinity offload engine). The idea in five lines:

1. A store keeps tensors by key; code that uses a store does not know where the tensors lie.
2. ``cpu`` keeps them in host memory, page-locked, so that copies overlap with computation.
3. ``nvme`` keeps them in one preallocated file per rank, so a full disk is known before step one.
4. A stepper updates shards where they lie, in the background: tiles in the cache, on own threads.
5. Shards on a disk pass through three sets of buffers: one is read, one updated, one written.

An Adam step over P parameters of a rank reads 12 P bytes from its store (master and two moments in
fp32) and writes as many; the device's bus carries 2 P bytes of bf16 gradients out and 2 P bytes of
new parameters back.

=======================  =========================================================================
tiers.py                 the bytes of each tier, compared with the room of the machine
options.py               the options, and the strategy that ``offload`` stands for
strategy.py              the strategy ``offload``: another strategy by name, with stores chosen;
                         its engine submits an update per unit, forward waits per unit
disk_bench.py            the command ``drivetrain disk-bench``
tiles.py                 the states of torch's optimizers, and updates in tiles that fit the cache:
                         aligned and page-locked memory, threads that serve as long as the process
stepping.py              the steps of both stores; on a disk: read i + 1, update i, write tile i - 1
host.py                  the store ``cpu``, and the stepper in host memory
nvme.py                  the store ``nvme``: a file without a name, and the sums of its blocks
=======================  =========================================================================
"""
