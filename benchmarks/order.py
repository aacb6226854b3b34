"""Measures the cost of the order check and of the board on each operation, and in a training step.

    python benchmarks/order.py

Two ranks on one machine. Each pair of measurements has the same operations once as they are, and
once with headers and boards that do nothing, in turns. The table has medians of ratios of pairs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

ROWS = {
    "64 all-reduces of 4 KB": (64, 1 << 10),
    "64 all-reduces of 256 KB": (64, 1 << 16),
    "8 all-reduces of 25 MB": (8, 6_553_600),
}


@contextmanager
def bare() -> Iterator[None]:
    """Context in which operations have no headers, and the board shows nothing."""
    from drivetrain.collectives.order import Header
    from drivetrain.runtime.board import Board, BoardRow

    class NoHeader(Header):
        """Decided at submission, as ``of`` is: an operation may run when the context has ended."""

        def checksum(self) -> int:
            return 0

    nothing = NoHeader(0, 0, 0, 0, "", "", 0, 0, "", "")
    with ExitStack() as stack:
        stack.enter_context(patch.object(Header, "of", lambda *given: nothing))
        for name in ("submit", "begin", "end"):
            stack.enter_context(patch.object(BoardRow, name, lambda self, *given: None))
        stack.enter_context(patch.object(Board, "enter", lambda self, section: None))
        yield


def training(strategy: str) -> Callable[[], None]:
    """Return a step of a model of 1.3 million parameters."""
    import torch

    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.randn(128, 256)

    def step() -> None:
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def operations(count: int, numel: int) -> Callable[[], None]:
    """Return a function that submits so many all-reduces, and waits for all."""
    from datetime import timedelta

    import torch

    from drivetrain.collectives import connect
    from drivetrain.runtime.mesh import Mesh
    from drivetrain.runtime.world import World
    from drivetrain.traffic import Traffic

    world = World.discover(cpu=True)
    axis = Mesh.build({"dp": world.size}, world)["dp"]
    ring = connect(axis, Traffic(), torch.device("cpu"), timedelta(minutes=5))
    tensors = [torch.zeros(numel) for _ in range(count)]

    def run() -> None:
        for handle in [ring.all_reduce(tensor, label="bucket 1") for tensor in tensors]:
            handle.wait()

    return run


def measure(pairs: int) -> None:
    """Write the seconds of all pairs, as JSON, on rank 0."""
    import torch.distributed as dist

    from drivetrain import communication

    works = {name: operations(*row) for name, row in ROWS.items()}
    works |= {f"a step of {name}": training(name) for name in ("ddp", "zero1", "zero3", "fsdp")}
    found: dict[str, list[tuple[float, float]]] = {}
    for name, work in works.items():
        rounds = 3 if "MB" in name else 20

        def timed(work: Callable[[], None] = work, rounds: int = rounds) -> float:
            communication.wait_for_everyone()
            begun = time.perf_counter()
            for _ in range(rounds):
                work()
            return (time.perf_counter() - begun) / rounds

        timed()
        for turn in range(pairs):
            first = timed() if turn % 2 else 0.0
            with bare():
                other = timed()
            found.setdefault(name, []).append((first or timed(), other))
    if dist.get_rank() == 0:
        sys.stdout.write("\n" + json.dumps(found) + "\n")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        measure(given.pairs)
        return
    launch = [sys.executable, "-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2"]
    script = [str(Path(__file__).resolve()), "--inside", "--pairs", str(given.pairs)]
    done = subprocess.run([*launch, *script], stdout=subprocess.PIPE, text=True, check=True)
    print("| | median | ratio to none | quartiles |\n|---|---|---|---|")
    for name, pairs in json.loads(done.stdout.splitlines()[-1]).items():
        ratios = sorted(one / other for one, other in pairs)
        low, _, high = statistics.quantiles(ratios)
        print(
            f"| {name} | {1e3 * statistics.median(one for one, _ in pairs):.2f} ms | "
            f"{statistics.median(ratios):.4f} | {low:.4f} to {high:.4f} |"
        )


if __name__ == "__main__":
    main()
