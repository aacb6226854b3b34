"""The cost of telling a rank's times to its launcher, and of one collection of garbage.

Processor time, so that other programs on the machine count little: ``python
benchmarks/times_of_ranks.py``.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch  # the objects of torch are among those that a collection looks at

from drivetrain import Accelerator
from drivetrain.telemetry.figures import SECTIONS, StepFigures
from drivetrain.telemetry.work import WorkFile

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


def main() -> None:
    """Measure, and print a line each."""
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
    main()
