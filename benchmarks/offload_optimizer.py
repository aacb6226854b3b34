"""Times the tiled CPU optimizer against other ways to take an AdamW step, and a plain copy.

::

    python benchmarks/offload_optimizer.py
    python benchmarks/offload_optimizer.py --sizes 16 --threads 2 --rounds 31

fp32 masters and moments, bf16 gradients and parameters. ``whole`` casts the gradient, calls the
fused kernel and casts the parameter, each over the whole tensor; ``foreach`` is torch's foreach
AdamW between the same casts; ``copy`` moves as many bytes as the step must, 14 per parameter read
and 14 written; ``deepspeed`` is DeepSpeedCPUAdam between a cast gradient and a cast parameter,
where it can be built. Rows with ``* factor`` clip as well. All take turns, in an order that
changes; a ratio is the median over rounds of the quotient within a round. ``processor`` is the
time that the process computed, all its threads together: with one thread it does not count the
time when others had the processor. Two ratios are given: of the clock, and of the processor.
"""

import argparse
import contextlib
import io
import itertools
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch.optim import AdamW, Optimizer

from drivetrain_offload.steps.rules import Rule, update_rule
from drivetrain_offload.steps.tiles import Piece, Tiler

MI = 1 << 20
FACTOR = 0.37
Update = Callable[[], object]


class Shard:
    """What every way has for itself, so that none finds its data in the cache."""

    def __init__(self, numel: int) -> None:
        self.master = torch.randn(numel)
        self.gradient = torch.randn(numel).bfloat16()
        self.out = torch.zeros(numel, dtype=torch.bfloat16)
        self.wide = torch.zeros(numel)


def whole(shard: Shard, optimizer: Optimizer, factor: float | None = None) -> Update:
    """Return cast, step, cast; the optimizer decides how its step is computed."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = shard.wide

    def update() -> None:
        shard.wide.copy_(shard.gradient)
        if factor is not None:
            shard.wide.mul_(factor)
        optimizer.step()
        shard.out.copy_(parameter.detach())

    return update


def tiled(shard: Shard, tiler: Tiler, factor: float = 1.0) -> Update:
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    group = optimizer.param_groups[0]
    rule: Rule | None = update_rule(optimizer)
    assert rule is not None
    states = {name: torch.zeros_like(shard.master) for name in rule.states(group)}
    piece = Piece(shard.master, shard.gradient, states, shard.out)
    taken = itertools.count()
    return lambda: tiler.update_all([(rule.step(group, next(taken), factor), piece)])


def copy(numel: int) -> Update:
    source, target = (torch.ones(numel * 14 // 4) for _ in range(2))
    return lambda: target.copy_(source)


def deepspeed(numel: int) -> Update | None:
    """Return the step of DeepSpeedCPUAdam, or None where it is missing or does not build."""
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            shard = Shard(numel)
            parameter = torch.nn.Parameter(shard.master)
            update = whole(shard, DeepSpeedCPUAdam([parameter], adamw_mode=True))
            update()
    except Exception as error:  # whatever a build can fail with
        print(f"deepspeed left out: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        return None
    return update


def ways(numel: int, tiler: Tiler, *, peer: bool) -> dict[str, Update]:
    def adamw(shard: Shard, **how: bool) -> Optimizer:
        return AdamW([torch.nn.Parameter(shard.master)], **how)

    shards = [Shard(numel) for _ in range(3)]
    made = {
        "tiled": tiled(Shard(numel), tiler),
        "whole": whole(shards[0], adamw(shards[0], fused=True)),
        "tiled * factor": tiled(Shard(numel), tiler, FACTOR),
        "whole * factor": whole(shards[1], adamw(shards[1], fused=True), FACTOR),
        "foreach": whole(shards[2], adamw(shards[2], foreach=True)),
        "copy": copy(numel),
    }
    built = deepspeed(numel) if peer else None
    return made | ({"deepspeed": built} if built else {})


def measure(made: dict[str, Update], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (clock, processor) seconds of every round, for every way."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for update in made.values():  # the first touch of the memory, and the states
        update()
    for _ in range(rounds):
        for name in random.sample(list(made), len(made)):
            clock, processor = time.perf_counter(), time.process_time()
            made[name]()
            now = time.perf_counter(), time.process_time()
            seconds[name].append((now[0] - clock, now[1] - processor))
    return seconds


def quotient(above: list[tuple[float, float]], below: list[tuple[float, float]]) -> str:
    pairs = list(zip(above, below, strict=True))
    clock, processor = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
    return f"{clock:.2f} / {processor:.2f}"


def report(seconds: dict[str, list[tuple[float, float]]], numel: int, threads: int) -> None:
    mine = seconds["tiled"]
    for name, theirs in seconds.items():
        clocks, processors = zip(*theirs, strict=True)
        print(
            f"| {numel // MI} Mi | {threads} | {name} | {1e3 * statistics.median(clocks):.2f} ms "
            f"| {1e3 * min(clocks):.2f} ms | {1e3 * statistics.median(processors):.2f} ms "
            f"| {quotient(theirs, mine)} |"
        )
    clipped = quotient(seconds["whole * factor"], seconds["tiled * factor"])
    print(
        f"  tiled: {quotient(seconds['whole'], mine)} x the speed of whole (goal 1.3), "
        f"{clipped} x with a factor, {quotient(mine, seconds['copy'])} x the time of copy "
        f"(goal at most 1.5), {quotient(seconds['foreach'], mine)} x the speed of foreach "
        "(goal 1.5)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64], help="in Mi elements")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-peer", action="store_true", help="do not build DeepSpeedCPUAdam")
    options = parser.parse_args()
    print("| elements | threads | way | median | best | processor | time / tiled |")
    print("|---|---|---|---|---|---|---|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        with contextlib.closing(Tiler(threads)) as tiler:
            for size in options.sizes:
                made = ways(size * MI, tiler, peer=not options.no_peer)
                report(measure(made, options.rounds), size * MI, threads)


if __name__ == "__main__":
    main()
