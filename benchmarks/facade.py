"""Times the facade against a bare loop in one process, and prepare() of many parameters.

::

    python benchmarks/facade.py

The same model is trained by a bare torch loop and through the Accelerator, a step of each in turn;
the median of the ratios of neighboring steps is the facade's price.
"""

import statistics
import time

import torch
from torch import Tensor, nn

from drivetrain import Accelerator


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.GELU()]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def bare_loop(steps: int) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    bare, bare_optimizer = build()
    model, optimizer = accelerator.prepare(*build())
    x = torch.randn(64, 512)

    def plain() -> Tensor:
        loss = bare(x).square().mean()
        loss.backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()
        return loss

    def facade() -> Tensor:
        with accelerator.accumulate(model):
            loss: Tensor = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    ratios, times = [], []
    for i in range(steps):
        seconds = {}
        for step in (plain, facade) if i % 2 else (facade, plain):
            start = time.perf_counter()
            step()
            seconds[step.__name__] = time.perf_counter() - start
        ratios.append(seconds["facade"] / seconds["plain"])
        times.append(seconds["plain"])
    print(
        f"facade / bare loop: {statistics.median(ratios):.4f} "
        f"(median of {steps} pairs, step {1e3 * statistics.median(times):.2f} ms)"
    )


def prepare(rounds: int) -> None:
    accelerator = Accelerator(cpu=True)
    times = []
    for _ in range(rounds):
        model = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(1000))
        start = time.perf_counter()
        accelerator.prepare(model)
        times.append(time.perf_counter() - start)
        accelerator.free_memory()
    print(f"prepare() of 1,000 parameters: {1e3 * statistics.median(times):.1f} ms (median)")


if __name__ == "__main__":
    bare_loop(400)
    prepare(9)
