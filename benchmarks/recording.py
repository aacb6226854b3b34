"""Times what the recorder of a run adds to a step: pairs with and without it, in one process.

::

    python benchmarks/recording.py

Two Accelerators train equal models of a few parameters, a step of each in turn; one has
``report: false``, the other one writes its records to a folder. The model is so small that nearly
all of the time is the library's own, so the medians of the differences are the price of recording.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

STEPS = 3000
STEP_MS = 50.0
"""The step that the price is a share of."""


def steps(accelerator: Accelerator) -> Iterator[float]:
    """Yield the seconds of one step after another."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8 * STEPS, 16))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
    batches: Any = iter(loader)
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        accelerator.backward(model(batch[0]).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.report(accuracy=0.5)
        yield time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        without = Accelerator(cpu=True, config={"report": False})
        recorded = Accelerator(cpu=True, project_dir=folder)
        pairs = list(zip(steps(without), steps(recorded), strict=True))[STEPS // 10 :]
        added = sorted(second - first for first, second in pairs)
        recorded.end_training()
    middle, late = statistics.median(added) * 1e6, added[int(0.99 * len(added))] * 1e6
    mean = statistics.mean(added) * 1e6
    print(f"{len(pairs)} pairs of steps of {statistics.median(a for a, _ in pairs) * 1e6:.0f} us")
    print(f"recording adds {middle:.0f} us (median), {mean:.0f} us (mean), {late:.0f} us (99th)")
    print(f"of a step of {STEP_MS:g} ms: {middle / STEP_MS / 10:.2f}% (median)")


if __name__ == "__main__":
    main()
