"""Measures the costs of watching a run: of the live view, and of ranges while no profile is taken.

    python benchmarks/watching.py

A step computes for about a millisecond and sleeps up to 50 ms, so that the processor time of all
threads of the process, which is steadier than the clock, shows the costs. The bar runs on a
pseudo-terminal. Each row is the median of differences to a loop without a view in the same round.
"""

import argparse
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
from pathlib import Path

STEP_S = 0.05
"""The step of the aim: 0.5% of it are 250 us."""

VIEWS = ("none", "bar", "lines")


def measure(steps: int, rounds: int) -> None:
    """Write processor microseconds per step of each view in this process, as JSON."""
    import torch

    from drivetrain import Accelerator
    from drivetrain.ranges import collective_range

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(4 * steps, 64))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch(view: str) -> float:
        shown = loader
        if view != "none":
            shown = accelerator.progress(loader, desc="epoch", every=10 * (view == "lines"))
        begun, due = time.process_time(), time.perf_counter()
        for (rows,) in shown:
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            due += STEP_S
            time.sleep(max(0.0, due - time.perf_counter()))
        return 1e6 * (time.process_time() - begun) / steps

    views = ("none", "bar") if sys.stderr.isatty() else ("none", "lines")
    epoch(views[1])
    found = {view: [] for view in views}
    for _ in range(rounds):
        for view in views:
            found[view].append(epoch(view))
    calls = 100_000
    seconds = timeit.timeit(lambda: collective_range("all_reduce", 1, "x", "dp"), number=calls)
    found["range"] = [1e6 * seconds / calls]
    sys.stdout.write(json.dumps(found))


def child(steps: int, rounds: int, *, terminal: bool) -> dict[str, list[float]]:
    """Return the measurements of a process of its own, perhaps on a pseudo-terminal."""
    master, slave = pty.openpty()

    def drain() -> None:
        try:
            while os.read(master, 1 << 16):
                pass
        except OSError:
            return

    threading.Thread(target=drain, daemon=True).start()
    command = [sys.executable, __file__, "--inside", "--steps", str(steps), "--rounds", str(rounds)]
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
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        measure(given.steps, given.rounds)
        return
    print("| | processor time per step | of a step of 50 ms |\n|---|---|---|")
    for view, terminal in (("bar", True), ("lines", False)):
        found = child(given.steps, given.rounds, terminal=terminal)
        pairs = zip(found[view], found["none"], strict=True)
        cost = statistics.median(one - other for one, other in pairs)
        print(f"| {view} | {cost:.0f} us | {cost / STEP_S / 1e4:.2f}% |")
    print(f"| one range without a profile | {found['range'][0]:.2f} us | |")


if __name__ == "__main__":
    main()
