"""Measures the cost of watching ranks: headers and boards of operations, and the launcher's looks.

    python benchmarks/order.py
    python benchmarks/order.py --alone

Two ranks on one machine. Pairs of measurements have the same work once as it is, and once with
headers and boards that do nothing, in turns. The first table has the processor time that watching
adds to one operation and to one change of section, alone: whole steps scatter by more. Caches are
warm in a loop of operations, and cold where 32 MB are read and written before each operation, as in
a step. The second table multiplies the cold times by the numbers of a step, beside the differences
of whole steps: processor time of a rank with its 95 % interval, and the ratios of the times of
neighbouring blocks. With ``--alone`` only the first table is measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

AIM = 0.005
"""Of a step."""

OPERATIONS = {
    "64 all-reduces of 4 KB": (64, 1 << 10),
    "64 all-reduces of 256 KB": (64, 1 << 16),
    "8 all-reduces of 25 MB": (8, 6_553_600),
}
STRATEGIES = ("ddp", "zero1", "zero3", "fsdp")
STEPS_IN_BLOCK, ALONE_IN_BLOCK = 4, 50
COLD_NUMEL = 1 << 23


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


class Training:
    """A model of 1.3 million parameters, on 256 rows per step and rank.

    Args:
        strategy: its name.
    """

    def __init__(self, strategy: str) -> None:
        import torch

        from drivetrain import Accelerator

        self.accelerator = Accelerator(cpu=True, strategy=strategy)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self._rows = torch.randn(256, 256)

    def step(self) -> None:
        """Take a step."""
        self.accelerator.backward(self.model(self._rows).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counts(self) -> tuple[int, int]:
        """Return the operations and the changes of section of a step."""
        from drivetrain.runtime.board import Board

        def calls() -> int:
            return sum(entry.calls for entry in self.accelerator.traffic.entries().values())

        before = calls()
        with patch.object(Board, "enter", autospec=True) as entered:
            self.step()
        return calls() - before, entered.call_count


def ring() -> Any:
    """Return a ring over both ranks."""
    from datetime import timedelta

    import torch

    from drivetrain.collectives import connect
    from drivetrain.runtime.mesh import Mesh
    from drivetrain.runtime.world import World
    from drivetrain.traffic import Traffic

    world = World.discover(cpu=True)
    axis = Mesh.build({"dp": world.size}, world)["dp"]
    return connect(axis, Traffic(), torch.device("cpu"), timedelta(minutes=5))


def operations(count: int, numel: int) -> Callable[[], None]:
    """Return a function that submits so many all-reduces, and waits for all."""
    import torch

    communicator = ring()
    tensors = [torch.zeros(numel) for _ in range(count)]

    def run() -> None:
        for handle in [communicator.all_reduce(tensor, label="bucket 1") for tensor in tensors]:
            handle.wait()

    return run


def alone() -> dict[str, Callable[[], None]]:
    """Return an operation that sends nothing, and a change of section."""
    import torch

    from drivetrain.collectives.communicator import Request
    from drivetrain.runtime.board import board

    communicator, tensor = ring(), torch.zeros(1024)
    whole = Request("all_reduce", "bucket 1")
    layout = ((65_536, torch.float32), (256, torch.float32))
    parts = Request("all_gather", "unit 3", layout=(layout, layout))
    return {
        "an operation": lambda: communicator._submit(whole, lambda: None, tensor).wait(),
        "an operation of parts": lambda: communicator._submit(parts, lambda: None, None).wait(),
        "a change of section": lambda: board.enter("forward"),
    }


def in_pairs(measure: Callable[[], Any], pairs: int) -> list[tuple[Any, Any]]:
    """Return pairs of measurements, with and without watching, in turns."""
    found = []
    for turn in range(pairs + 1):
        first = measure() if turn % 2 else None
        with bare():
            without = measure()
        found.append((first or measure(), without))
    return found[1:]  # the first one makes buffers and connections


def measured(pairs: int, *, is_alone: bool) -> dict[str, Any]:
    """Return the figures of this rank, and of its launcher; alone: of no whole step."""
    import torch

    from drivetrain import communication

    spent, begun = processor_s(os.getppid()), time.monotonic()
    cold = torch.zeros(COLD_NUMEL)

    def added(work: Callable[[], None], *, is_cold: bool) -> float:
        """Return the processor time of a call in seconds, of all threads."""
        total = 0.0
        for _ in range(ALONE_IN_BLOCK):
            if is_cold:
                cold.add_(1)
            begin = time.process_time()
            work()
            total += time.process_time() - begin
        return total / ALONE_IN_BLOCK

    def block(work: Callable[[], None], rounds: int) -> tuple[float, float]:
        """Return seconds and processor time of a call."""
        communication.wait_for_everyone()
        begin = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            work()
        end = time.perf_counter(), time.process_time()
        return (end[0] - begin[0]) / rounds, (end[1] - begin[1]) / rounds

    found: dict[str, Any] = {"alone": {}, "whole": {}, "counts": {}}
    for name, work in alone().items():
        found["alone"][name] = [
            in_pairs(partial(added, work, is_cold=is_cold), pairs // 4) for is_cold in (False, True)
        ]
    for name, row in ({} if is_alone else OPERATIONS).items():
        run = operations(*row)
        found["whole"][name] = in_pairs(partial(block, run, 1), pairs // 4)
    for strategy in () if is_alone else STRATEGIES:
        training, name = Training(strategy), f"a step of {strategy}"
        found["whole"][name] = in_pairs(partial(block, training.step, STEPS_IN_BLOCK), pairs)
        found["counts"][name] = training.counts()
    passed = time.monotonic() - begun
    return found | {"launcher": (processor_s(os.getppid()) - spent) / passed}


def processor_s(pid: int) -> float:
    """Return the processor time of a process's threads that live, in seconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="of each strategy; others a quarter")
    parser.add_argument("--alone", action="store_true", help="no whole steps")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        import torch.distributed as dist

        found = measured(given.pairs, is_alone=given.alone)
        if dist.get_rank() == 0:
            sys.stdout.write("\n" + json.dumps(found) + "\n")
        return
    launch = [sys.executable, "-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2"]
    script = [str(Path(__file__).resolve()), "--inside", "--pairs", str(given.pairs)]
    script += ["--alone"] * given.alone
    done = subprocess.run([*launch, *script], stdout=subprocess.PIPE, text=True, check=True)
    show(json.loads(done.stdout.splitlines()[-1]))


def show(found: dict[str, Any]) -> None:
    """Print the tables of the figures."""
    print("| watching adds to | warm caches | cold caches |\n|---|---|---|")
    each: dict[str, float] = {}
    for name, both in found["alone"].items():
        costs = [1e6 * statistics.median(one - other for one, other in pairs) for pairs in both]
        print(f"| {name} | {costs[0]:.1f} us | {costs[1]:.1f} us |")
        each[name] = costs[1]
    print(f"\nThe launcher takes {50 * found['launcher']:.2f} % of a core for each rank.\n")
    if not found["whole"]:
        return
    print("| | time | ratio to none | quartiles | processor time | of the time |")
    print("|---|---|---|---|---|---|")
    for name, pairs in found["whole"].items():
        ratios = [one[0] / other[0] for one, other in pairs]
        low, middle, high = statistics.quantiles(ratios)
        seconds = statistics.median(one[0] for one, _ in pairs)
        added, around = interval([one[1] - other[1] for one, other in pairs])
        print(
            f"| {name} | {1e3 * seconds:.2f} ms | {middle:.4f} | {low:.4f} to {high:.4f} "
            f"| {1e6 * added:+.0f} +- {1e6 * around:.0f} us "
            f"| {100 * added / seconds:+.2f} +- {100 * around / seconds:.2f} % |"
        )
    print("\n| | operations, sections | by the cold times | of the time | 0.5 % from |")
    print("|---|---|---|---|---|")
    for name, counts in found["counts"].items():
        seconds = statistics.median(one[0] for one, _ in found["whole"][name])
        operation = max(each["an operation"], each["an operation of parts"])
        total = (counts[0] * operation + counts[1] * each["a change of section"]) / 1e6
        print(
            f"| {name} | {counts[0]}, {counts[1]} | {1e6 * total:.0f} us "
            f"| {100 * total / seconds:.2f} % | {1e3 * total / AIM:.0f} ms |"
        )


def interval(values: list[float]) -> tuple[float, float]:
    """Return the median, and half of its 95 % interval, as for a normal distribution."""
    low, middle, high = statistics.quantiles(values)
    deviation = (high - low) / 1.349
    return middle, 1.96 * 1.2533 * deviation / len(values) ** 0.5


if __name__ == "__main__":
    main()
