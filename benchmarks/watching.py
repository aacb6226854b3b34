"""Measures the costs of watching a run: its live view, its records, ranges while it has no profile.

    python benchmarks/watching.py

Two runs in one process take a step in turn, one with the view and one without. A step computes for
about a millisecond and sleeps up to 50 ms, so caches are as cold as after real work. The cost is
the mean difference of processor time of the main thread, and all processor time of other threads,
such as the one that draws the bar on a pseudo-terminal. The row "bar and recording" is the
difference to a run that keeps no records.
"""

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from pathlib import Path
from typing import Any

import torch

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
    from drivetrain.ranges import collective_range

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
    seconds = timeit.timeit(lambda: collective_range("all_reduce", 1, "x", "dp"), number=calls)
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
    command = [sys.executable, __file__, "--inside", "--steps", str(steps)]
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


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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


if __name__ == "__main__":
    main()
