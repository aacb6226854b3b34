"""Times AdamW steps over states on a disk against what the disk and the processor take alone.

::

    python benchmarks/offload_pipeline.py --path DIRECTORY
    python benchmarks/offload_pipeline.py --path DIRECTORY --sizes 16 --shards 40 --rounds 5

fp32 masters and moments on the disk, bf16 gradients and parameters in memory. ``pipeline`` is a
step of the store's stepper until everything is on the disk. ``disk`` reads and writes the same
tiles of the same file through as many sets of buffers, and computes nothing. ``update`` updates
tiles in such buffers, and neither reads nor writes. All take turns, in an order that changes; a
ratio is the median over rounds of the quotient within a round, of the pipeline's time and the
longer of the two others (goal: at most 1.15).
"""

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch.optim import AdamW

from drivetrain.store import ShardSpec, ShardStep
from drivetrain_offload import NvmeConfig, NvmeStore
from drivetrain_offload.steps import pipeline as disk_steps
from drivetrain_offload.steps.pipeline import SETS, NvmeStepper, Tile, TileBuffers, cut
from drivetrain_offload.steps.rules import update_rule
from drivetrain_offload.steps.stepping import ShardBlock, ShardWork
from drivetrain_offload.steps.tiles import Tiler

MI = 1 << 20
NAMES = ("exp_avg", "exp_avg_sq", "master")
Way = Callable[[], object]


def block_of(numel: int, shards: int, optimizer: AdamW, stepper: NvmeStepper) -> list[ShardStep]:
    """Adopt one block, and return a step of it."""
    group = optimizer.param_groups[0]
    length = numel // shards
    stepper.adopt("all", [ShardSpec(length, torch.float32, True)] * shards, group)
    gradients = torch.randn(numel).bfloat16().split(length)
    outs = torch.zeros(numel, dtype=torch.bfloat16).split(length)
    return [ShardStep(i, group, gradients[i], None, outs[i], 0.37) for i in range(shards)]


def pipeline(store: NvmeStore, stepper: NvmeStepper, steps: list[ShardStep]) -> Way:
    def step() -> None:
        stepper.submit("all", steps).wait()
        store.flush()

    return step


def buffer_sets(nbytes: int) -> list[TileBuffers]:
    sets = [TileBuffers(nbytes) for _ in range(SETS)]
    for buffers in sets:
        buffers.provide(NAMES)
    return sets


def disk(store: NvmeStore, keys: dict[str, str], tiles: list[Tile], nbytes: int) -> Way:
    sets = buffer_sets(nbytes)

    def move() -> None:
        reads = sets[0].read(store, keys, tiles[0])
        for i, tile in enumerate(tiles):
            arrived = reads
            if i + 1 < len(tiles):
                reads = sets[(i + 1) % SETS].read(store, keys, tiles[i + 1])
            for read in arrived:
                read.wait()
            sets[i % SETS].write(store, keys, tile)
        store.flush()

    return move


def update(tiler: Tiler, keys: dict[str, str], tiles: list[Tile], nbytes: int) -> Way:
    sets = buffer_sets(nbytes)
    for buffers in sets:
        for name in NAMES:
            buffers._tensors[name].zero_()

    def compute() -> None:
        for i, tile in enumerate(tiles):
            tiler.update_all(sets[i % SETS].updates(keys, tile))

    return compute


def ways(numel: int, shards: int, store: NvmeStore, tiler: Tiler) -> tuple[dict[str, Way], Way]:
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    stepper = store.stepper(optimizer)
    rule = update_rule(optimizer)
    assert stepper is not None
    assert rule is not None
    steps = block_of(numel, shards, optimizer, stepper)
    block: ShardBlock = stepper._blocks["all"]
    begun = rule.step(optimizer.param_groups[0], 0.0, 0.37)
    works = [ShardWork(block.shards[step.index], step, begun, {}) for step in steps]
    nbytes = stepper._tile_bytes
    tiles = list(cut(works, nbytes))
    keys = {name: stepper._key(block, name) for name in NAMES}
    made = {
        "pipeline": pipeline(store, stepper, steps),
        "disk": disk(store, keys, tiles, nbytes),
        "update": update(tiler, keys, tiles, nbytes),
    }
    return made, stepper.close


def measure(made: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round, for every way."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for way in made.values():  # the first touch of memory and disk
        way()
        way()
    for _ in range(rounds):
        for name in random.sample(list(made), len(made)):
            start = time.perf_counter()
            made[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def report(seconds: dict[str, list[float]], numel: int, shards: int, threads: int) -> None:
    moved = {"pipeline": 24 * numel, "disk": 24 * numel, "update": 0}
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(
            f"| {numel // MI} Mi | {shards} | {threads} | {name} | {1e3 * middle:.0f} ms "
            f"| {1e3 * min(each):.0f} to {1e3 * max(each):.0f} ms "
            f"| {moved[name] / middle / MI:,.0f} MiB/s |"
        )
    rounds = zip(*(seconds[name] for name in ("pipeline", "disk", "update")), strict=True)
    ratios = sorted(ours / max(others) for ours, *others in rounds)
    print(
        f"  pipeline: {statistics.median(ratios):.2f} x the longer of disk and update "
        f"(goal at most 1.15; rounds {ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64], help="in Mi elements")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 100], help="in the block")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--tile-mib", type=float, default=disk_steps.TILE_BYTES / MI)
    parser.add_argument("--request-mib", type=float, default=NvmeConfig().request_mib)
    parser.add_argument("--requests", type=int, default=NvmeConfig().threads, help="at once")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    disk_steps.TILE_BYTES = int(options.tile_mib * MI)
    config = NvmeConfig(
        path=options.path, request_mib=options.request_mib, threads=options.requests
    )
    print("| elements | shards | threads | way | median | range | disk |")
    print("|---|---|---|---|---|---|---|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for size in options.sizes:
            for shards in options.shards:
                store = NvmeStore(config)
                with contextlib.closing(Tiler(threads)) as tiler:
                    made, close = ways(size * MI, shards, store, tiler)
                    report(measure(made, options.rounds), size * MI, shards, threads)
                close()
                store.close()


if __name__ == "__main__":
    main()
