"""Times our ring collectives against gloo's own: time, processor time and bytes on the wire.

::

    python benchmarks/collectives.py --ranks 2 --mib 32

The two take turns in the same processes. Wire is what the loopback interface sent per rank, as a
multiple of the tensor; headers of other traffic on the machine are in it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from drivetrain.collectives import connect
from drivetrain.runtime.mesh import Axis
from drivetrain.traffic import Traffic


def sent_bytes() -> int:
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("no loopback interface in /proc/net/dev")


def sample(operation: Callable[[], object]) -> tuple[float, float, int]:
    """Return wall seconds, this process's processor seconds, bytes of the interface."""
    dist.barrier()
    wire, start, busy = sent_bytes(), time.perf_counter(), time.process_time()
    operation()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    dist.barrier()
    return seconds, busy, sent_bytes() - wire


def work(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    ranks = options.ranks
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    group = dist.new_group(list(range(ranks)))
    axis = Axis(
        name="dp",
        size=ranks,
        rank=rank,
        ranks=tuple(range(ranks)),
        hosts=("localhost",) * ranks,
        group=group,
    )
    ring = connect(axis, Traffic(), torch.device("cpu"), timedelta(seconds=60))
    numel = options.mib * 2**20 // 4 // ranks * ranks
    flat, part = torch.ones(numel), torch.ones(numel // ranks)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scale = 1.0 / ranks
    rivals: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (
            lambda: ring.all_reduce(flat, scale=scale).wait(),
            lambda: dist.all_reduce(flat),
        ),
        "reduce_scatter": (
            lambda: ring.reduce_scatter(flat, scale=scale).wait(),
            lambda: scatter(part, flat),
        ),
        "all_gather": (lambda: ring.all_gather(flat).wait(), lambda: gather(flat, part)),
    }
    for name, pair in rivals.items():
        samples: list[list[tuple[float, float, int]]] = [[], []]
        for turn in range(options.repeats + 2):
            # Each goes first as often as the other: the second finds the tensor in the cache.
            for index in (0, 1) if turn % 2 else (1, 0):
                flat.fill_(1)
                taken = sample(pair[index])
                if turn >= 2:
                    samples[index].append(taken)
        if rank == 0:
            show(name, samples, numel * 4 * ranks)
    ring.close()
    dist.barrier()
    dist.destroy_process_group()


def show(name: str, samples: list[list[tuple[float, float, int]]], nbytes: int) -> None:
    cells = []
    for who, taken in zip(("ring", "gloo"), samples, strict=True):
        wall, busy, wire = (statistics.median(column) for column in zip(*taken, strict=True))
        cells.append(
            f"{who} {1e3 * wall:7.1f} ms, cpu {1e3 * busy:6.1f} ms, wire {wire / nbytes:.3f}"
        )
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(*samples, strict=True)]
    print(f"{name:15s} {'   '.join(cells)}   ratio {statistics.median(ratios):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in {"ranks": 2, "mib": 32, "repeats": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options, f"{folder}/rendezvous"), options.ranks)


if __name__ == "__main__":
    main()
