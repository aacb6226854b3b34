"""Measures the costs of looking for bad numbers, and of comparing replicas, over whole steps.

    python benchmarks/policies.py
    python benchmarks/policies.py --strategy zero3 --blocks 6 --steps 60

Two ranks train two copies of one model in the same processes, a step of each in turn: one with the
setting, one without. Each row is the median of the ratios of neighbouring steps, and the spread of
its middle half: what else the machine does hits both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain import Accelerator

WARMUP = 5
ROWS = {
    "on_nonfinite: stop, with a norm": ({"on_nonfinite": "stop"}, True),
    "on_nonfinite: stop, without": ({"on_nonfinite": "stop"}, False),
    "on_nonfinite: skip, with a norm": ({"on_nonfinite": "skip"}, True),
    "on_nonfinite: skip, without": ({"on_nonfinite": "skip"}, False),
    "check_replicas_every: 1": ({"check_replicas_every": 1}, False),
    "check_replicas_every: 100": ({"check_replicas_every": 100}, False),
}
"""Settings of the configuration, and whether the step clips gradients, by the name of the row."""


class Trained:
    """A model with one configuration.

    Args:
        strategy: its name.
        settings: of the configuration.
        clip: whether gradients are clipped by their norm.
        blocks: layers of the model.
    """

    def __init__(self, strategy: str, settings: dict[str, object], clip: bool, blocks: int) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        module = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        base = {"on_nonfinite": "ignore", "strategy": strategy}
        self.accelerator = Accelerator(cpu=True, config={**base, **settings})
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self._clip = clip

    def step(self, batch: Tensor) -> float:
        """Take a step, and return its seconds."""
        begin = time.perf_counter()
        self.accelerator.backward(self.model(batch).square().mean())
        if self._clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.accelerator.wait_for_everyone()
        return time.perf_counter() - begin


def measure(strategy: str, blocks: int, steps: int) -> None:
    """Print the ratios of all rows as JSON; on each rank."""
    found = {}
    for name, (settings, clip) in ROWS.items():
        pair = [Trained(strategy, chosen, clip, blocks) for chosen in (settings, {})]
        batch = torch.randn(2, 64, 512)
        ratios = []
        for index in range(WARMUP + steps):
            order = (0, 1) if index % 2 else (1, 0)
            seconds = {place: pair[place].step(batch) for place in order}
            ratios.append(seconds[0] / seconds[1])
        found[name] = ratios[WARMUP:]
        is_main = pair[0].accelerator.is_main_process
        for trained in pair:
            trained.accelerator.free_memory()
    if is_main:
        print(json.dumps(found))


def main() -> None:
    """Start two ranks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--blocks", type=int, default=6, help="3.2 million parameters each")
    parser.add_argument("--steps", type=int, default=60, help="of each pair")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        measure(given.strategy, given.blocks, given.steps)
        return
    command = [sys.executable, "-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node"]
    arguments = ["--strategy", given.strategy, "--blocks", given.blocks, "--steps", given.steps]
    done = subprocess.run(
        [*command, "2", str(Path(__file__).resolve()), "--rank", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name, ratios in json.loads(done.stdout.splitlines()[-1]).items():
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:34} {100 * (middle - 1):+6.2f} %  "
            f"({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})"
        )


if __name__ == "__main__":
    main()
