"""Times a step of each strategy by two versions of drivetrain, in pairs.

::

    python benchmarks/before_after.py BEFORE/bin/python AFTER/bin/python
    python benchmarks/before_after.py BEFORE/bin/python AFTER/bin/python --only zero3 --pairs 40

Each version is installed in an environment of its own, named by its interpreter. Both train the
same decoder on two ranks of this machine, in processes that live as long as the comparison. A turn
is a few steps of one version while the other one waits for its next order; whoever goes first
changes from pair to pair. Printed are medians of a turn's mean step, and the median of the pairs'
ratios with its quartiles. ``thin`` is a model that computes next to nothing, 24 blocks of width 32:
the host's own time.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RANKS, TURN = 2, 5
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp": "fsdp",
    "megatron-tp": {"name": "megatron", "tp": 2},
    "megatron-pp": {"name": "megatron", "pp": 2, "micro_batches": 4},
    "offload": {"name": "offload", "optimizer": "cpu"},
}
THIN = ("ddp", "zero2", "zero3", "fsdp")
SIZES = {"layers": 6, "dim": 384, "heads": 6, "inner": 1024, "vocab": 4096, "seq": 64, "batch": 4}


# --- one rank of one version ---


def decoder_step(strategy: str) -> Callable[[], None]:
    from peers import Decoder, adamw, loss_of, random_batches

    from drivetrain import Accelerator

    torch.manual_seed(0)
    sizes = argparse.Namespace(**SIZES)
    accelerator = Accelerator(strategy=STRATEGIES[strategy], cpu=True)
    model = Decoder(sizes)
    model, optimizer = accelerator.prepare(model, adamw(model))
    # Ranks that share one replica get the same batch.
    shares = STRATEGIES[strategy] if isinstance(STRATEGIES[strategy], dict) else {}
    together = "tp" in shares or "pp" in shares
    batches = random_batches(sizes, 0 if together else accelerator.process_index)

    def step() -> None:
        tokens = next(batches)
        if strategy == "megatron-pp":
            accelerator.pipeline_step(model, tokens[:, :-1], tokens[:, 1:], loss_fn=loss_of)
        else:
            accelerator.backward(loss_of(model(tokens[:, :-1]), tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()

    return step


def thin_step(strategy: str) -> Callable[[], None]:
    from torch import nn

    from drivetrain import Accelerator

    torch.manual_seed(0)
    options: Any = {"name": strategy}
    if strategy == "zero3":
        options["keep_below"] = 0
    accelerator = Accelerator(strategy=options, cpu=True)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(24))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.randn(4, 32)

    def step() -> None:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_main(model: str, strategy: str) -> None:
    """Do a turn for each line that comes; write down its seconds per step."""
    torch.set_num_threads(1)
    step = (thin_step if model == "thin" else decoder_step)(strategy)
    print("ready", flush=True)
    for line in sys.stdin:
        steps = int(line)
        started = time.perf_counter()
        for _ in range(steps):
            step()
        print((time.perf_counter() - started) / steps, flush=True)


# --- both versions ---


class Version:
    """The ranks of one version."""

    def __init__(self, python: str, model: str, strategy: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._ranks = [
            subprocess.Popen(
                [python, str(Path(__file__).resolve()), "rank", model, strategy],
                env={**os.environ, **_environment(rank, port)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self._answers()

    def turn(self, steps: int) -> float:
        """Return the seconds per step of the slowest rank."""
        for rank in self._ranks:
            print(steps, file=rank.stdin, flush=True)
        return max(map(float, self._answers()))

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def _answers(self) -> list[str]:
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout]
        if not all(answers):
            self.end()
            raise SystemExit("a rank ended by itself: run its command to see why")
        return answers


def _environment(rank: int, port: int) -> dict[str, str]:
    given = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return {key: str(value) for key, value in given.items()}


def compare(pythons: tuple[str, str], model: str, strategy: str, pairs: int) -> str:
    """Return a line of the table."""
    versions = [Version(python, model, strategy) for python in pythons]
    times: list[list[float]] = [[], []]
    for index in range(pairs + 1):
        for side in (0, 1) if index % 2 else (1, 0):
            seconds = versions[side].turn(TURN)
            if index:  # the first turns warm up
                times[side].append(seconds)
    for version in versions:
        version.end()
    before, after = (1e3 * statistics.median(each) for each in times)
    low, middle, high = statistics.quantiles(
        [b / a for a, b in zip(*times, strict=True)], n=4, method="inclusive"
    )
    return (
        f"| {model} | {strategy} | {before:.2f} ms | {after:.2f} ms | "
        f"{middle:.3f} [{low:.3f} .. {high:.3f}] |"
    )


def main() -> None:
    """Compare two versions, or be a rank of one."""
    if sys.argv[1:2] == ["rank"]:
        rank_main(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="interpreter of the version before")
    parser.add_argument("after", help="interpreter of the version after")
    parser.add_argument("--only", nargs="*", help="strategies")
    parser.add_argument("--models", nargs="*", default=["decoder", "thin"])
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    print("| model | strategy | before | after | after / before |\n|---|---|---|---|---|")
    for model in given.models:
        for strategy in THIN if model == "thin" else STRATEGIES:
            if not given.only or strategy in given.only:
                pythons = (given.before, given.after)
                print(compare(pythons, model, strategy, given.pairs), flush=True)


if __name__ == "__main__":
    main()
