"""Times collectives, and what it costs to watch them."""

import argparse
import gc
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from programs import run_program

from drivetrain import Accelerator
from drivetrain.collectives import connect
from drivetrain.cost import Traffic
from drivetrain.observe.figures import SECTIONS, StepFigures, WorkFile
from drivetrain.runtime.mesh import Axis

# --- ring ---


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
            ring_show(name, samples, numel * 4 * ranks)
    ring.close()
    dist.barrier()
    dist.destroy_process_group()


def ring_show(name: str, samples: list[list[tuple[float, float, int]]], nbytes: int) -> None:
    cells = []
    for who, taken in zip(("ring", "gloo"), samples, strict=True):
        wall, busy, wire = (statistics.median(column) for column in zip(*taken, strict=True))
        cells.append(
            f"{who} {1e3 * wall:7.1f} ms, cpu {1e3 * busy:6.1f} ms, wire {wire / nbytes:.3f}"
        )
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(*samples, strict=True)]
    print(f"{name:15s} {'   '.join(cells)}   ratio {statistics.median(ratios):.2f}", flush=True)


def ring_main() -> None:
    """Times our ring collectives against gloo's own: time, processor time and bytes on the wire.

    ::

        python benchmarks/collectives.py ring --ranks 2 --mib 32

    The two take turns in the same processes. Wire is what the loopback interface sent per rank, as
    a multiple of the tensor; headers of other traffic on the machine are in it.
    """
    parser = argparse.ArgumentParser(description=str(ring_main.__doc__).partition("\n")[0])
    for name, value in {"ranks": 2, "mib": 32, "repeats": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options, f"{folder}/rendezvous"), options.ranks)


# --- order ---


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
    from drivetrain.collectives.communicator import Header
    from drivetrain.runtime.board import Board, BoardRow

    class NoHeader(Header):
        """Decided at submission, as ``of`` is: an operation may run when the context has ended."""

        def checksum(self) -> int:
            return 0

    nothing = NoHeader(0, 0, 0, 0, "", "", 0, 0, (), "", "")
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
    from drivetrain.cost import Traffic
    from drivetrain.runtime.mesh import Mesh
    from drivetrain.runtime.world import World

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


def order_main() -> None:
    """Measures the cost of watching ranks: headers, boards of operations, the launcher's looks.

        python benchmarks/collectives.py order
        python benchmarks/collectives.py order --alone

    Two ranks on one machine. Pairs of measurements have the same work once as it is, and once with
    headers and boards that do nothing, in turns. The first table has the processor time that
    watching adds to one operation and to one change of section, alone: whole steps scatter by more.
    Caches are warm in a loop of operations, and cold where 32 MB are read and written before each
    operation, as in a step. The second table multiplies the cold times by the numbers of a step,
    beside the differences of whole steps: processor time of a rank with its 95 % interval, and the
    ratios of the times of neighbouring blocks. With ``--alone`` only the first table is measured.
    """
    parser = argparse.ArgumentParser(description=str(order_main.__doc__).splitlines()[0])
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
    script = [str(Path(__file__).resolve()), "order", "--inside", "--pairs", str(given.pairs)]
    script += ["--alone"] * given.alone
    done = subprocess.run([*launch, *script], stdout=subprocess.PIPE, text=True, check=True)
    order_show(json.loads(done.stdout.splitlines()[-1]))


def order_show(found: dict[str, Any]) -> None:
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


# --- watching ---


STEP_S = 0.05
"""The step of the aim: 0.5% of it are 250 us."""

WARMUP = 20
"""Steps of each run before its costs count."""


class Run:
    """A small model in training, a step at a time.

    Args:
        steps: that it can take.
        shown: whether it has the live view; ``every`` is the number of steps between its lines.
        options: of its Accelerator.
    """

    def __init__(self, steps: int, *, shown: bool = False, every: int = 0, **options: Any) -> None:
        from drivetrain import Accelerator

        self.accelerator = Accelerator(cpu=True, **options)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.utils.data.TensorDataset(torch.randn(4 * (steps + 1), 64))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        progress = self.accelerator.progress
        self.batches = iter(progress(loader, desc="run", every=every) if shown else loader)

    def step(self) -> float:
        """Take a step, and return the processor time of this thread in seconds."""
        begun = time.thread_time()
        (rows,) = next(self.batches)
        self.accelerator.backward(self.model(rows).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.thread_time() - begun


def cost(steps: int, view: Run, base: Run) -> float:
    """Return the seconds of processor time that a view adds to a step."""
    added, due = 0.0, time.perf_counter()
    for index in range(WARMUP + steps):
        if index == WARMUP:
            added, others = 0.0, time.process_time() - time.thread_time()
        for run in (view, base) if index % 2 else (base, view):
            seconds = run.step()
            added += seconds if run is view else -seconds
            due += STEP_S / 2  # so that the view has a step in each 50 ms
            time.sleep(max(0.0, due - time.perf_counter()))
    return (added + time.process_time() - time.thread_time() - others) / steps


def measure(steps: int) -> None:
    """Write the costs of views in this process in microseconds, as JSON."""
    from drivetrain.runtime.ranges import COLLECTIVE, named_range

    count = WARMUP + steps
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if sys.stderr.isatty():
            found["bar"] = 1e6 * cost(steps, Run(count, shown=True), Run(count))
            recorded = Run(count, shown=True, project_dir=folder)
            alone = Run(count, config={"report": False})
            found["bar and recording"] = 1e6 * cost(steps, recorded, alone)
            recorded.accelerator.report.finish()
        else:
            found["lines"] = 1e6 * cost(steps, Run(count, shown=True, every=10), Run(count))
    calls = 100_000
    seconds = timeit.timeit(lambda: named_range(COLLECTIVE, "x"), number=calls)
    found["range"] = 1e6 * seconds / calls
    sys.stdout.write(json.dumps(found))


def child(steps: int, *, terminal: bool) -> dict[str, float]:
    """Return the measurements of a process of its own, perhaps on a pseudo-terminal."""
    master, slave = pty.openpty()

    def drain() -> None:
        try:
            while os.read(master, 1 << 16):
                pass
        except OSError:
            return

    threading.Thread(target=drain, daemon=True).start()
    command = [sys.executable, __file__, "watching", "--inside", "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=slave if terminal else log,
            env=os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"},
            text=True,
            check=True,
        )
    os.close(slave)
    return dict(json.loads(done.stdout))


def watching_main() -> None:
    """Measures the costs of watching a run: live view, records, ranges without a profile.

        python benchmarks/collectives.py watching

    Two runs in one process take a step in turn, one with the view and one without. A step computes
    for about a millisecond and sleeps up to 50 ms, so caches are as cold as after real work. The
    cost is the mean difference of processor time of the main thread, and all processor time of
    other threads, such as the one that draws the bar on a pseudo-terminal. The row "bar and
    recording" is the difference to a run that keeps no records.
    """
    parser = argparse.ArgumentParser(description=str(watching_main.__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        measure(given.steps)
        return
    print("| | processor time per step | of a step of 50 ms |\n|---|---|---|")
    found = child(given.steps, terminal=False) | child(given.steps, terminal=True)
    for view in ("bar", "lines", "bar and recording"):
        print(f"| {view} | {found[view]:.0f} us | {found[view] / STEP_S / 1e4:.2f}% |")
    print(f"| one range without a profile | {found['range']:.2f} us | |")


# --- work ---


HEADER = {"rank": 0, "host": "here", "peers": ""}


def microseconds(work: Callable[[], object], times: int) -> float:
    """Return the processor time of one call, the least of five rounds."""
    rounds = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - begin) / times * 1e6)
    return min(rounds)


def work_main() -> None:
    """The cost of telling a rank's times to its launcher, and of one collection of garbage.

    Processor time, so that other programs on the machine count little: ``python
    benchmarks/collectives.py work``.
    """
    figures = StepFigures(
        step=1, seconds=1e-9, sections=dict.fromkeys(SECTIONS, 0.01), waiting={"dp": 0.01}
    )
    with tempfile.TemporaryDirectory() as folder:
        quiet = WorkFile(Path(folder, "quiet"), 60.0, HEADER)
        busy = WorkFile(Path(folder, "busy"), 1e-9, HEADER)
        busy.take(figures)  # the first record is left out
        step, write = (
            microseconds(lambda: quiet.take(figures), 20_000),
            microseconds(lambda: busy.take(figures), 200),
        )
    print(f"adding the times of a step: {step:.1f} us; writing them, once a minute: {write:.0f} us")
    accelerator = Accelerator(cpu=True)
    print(f"a collection on {accelerator.device}: {microseconds(gc.collect, 5) / 1e3:.0f} ms")
    print(f"objects: {len(gc.get_objects()):,}; torch {torch.__version__}")


if __name__ == "__main__":
    run_program(
        {"ring": ring_main, "order": order_main, "watching": watching_main, "work": work_main}
    )
