"""A short training run on every rank, compared with the same run in one process.

``drivetrain test`` launches this module. Rank r of N takes its share of each global batch through
the library; rank 0 then repeats the whole batches with plain torch. Losses and weights must agree.
"""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

STEPS = 6
BATCH = 4
"""Samples per rank and step."""

TOLERANCE = 1e-4
"""Largest difference of losses and weights; summation order alone explains about 1e-7 in fp32."""

FEATURES = 16

LOSSES = "losses"
"""The name of the mean losses of the global batches, (STEPS,), beside those of the weights."""


def main() -> None:
    """Train both ways, print the verdict on rank 0, and exit with 1 when they differ."""
    accelerator = Accelerator()
    spread = train_spread(accelerator)
    difference = 0.0
    if accelerator.is_main_process:
        difference = compare(spread, train_alone(accelerator.num_processes, accelerator.device))
        agree = difference <= TOLERANCE
        print(
            f"{'ok' if agree else 'MISMATCH'}: {accelerator.num_processes} ranks on "
            f"{accelerator.device.type} and one process differ by {difference:.1e} after {STEPS} "
            f"steps (allowed: {TOLERANCE:.0e})"
        )
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if not difference <= TOLERANCE:
        sys.exit(1)


def train_spread(accelerator: Accelerator) -> dict[str, Tensor]:
    """Train on all ranks through the library; return the losses and the weights."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(accelerator.num_processes), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().cpu())
    return {LOSSES: torch.stack(losses), **accelerator.get_state_dict(model)}


def train_alone(ranks: int, device: torch.device) -> dict[str, Tensor]:
    """Train on the same global batches in this process, with plain torch."""
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in DataLoader(data(ranks), batch_size=BATCH * ranks):
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return {LOSSES: torch.stack(losses), **model.state_dict()}


def compare(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the largest difference; infinite when the runs cannot be compared."""
    if first.keys() != second.keys() or len(first[LOSSES]) != len(second[LOSSES]):
        return float("inf")
    pairs = [(first[name].float().cpu(), second[name].cpu()) for name in first]
    largest = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return largest if largest == largest else float("inf")  # noqa: PLR0124 - NaN is no agreement


def build() -> nn.Module:
    """Build the model, equal on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def data(ranks: int) -> TensorDataset:
    """Make the samples of STEPS global batches."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(STEPS * BATCH * ranks, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


if __name__ == "__main__":
    main()
