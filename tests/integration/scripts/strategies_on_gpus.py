"""A rank that trains a model by each configuration, and prints losses, norms and weights.

::

    python strategies_on_gpus.py ddp zero3          # on the GPU where there is one
    python strategies_on_gpus.py --cpu ddp zero3
"""

import json
import os
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3", "keep_below": 0},
    "fsdp": {"name": "fsdp"},
    "offload": {"name": "offload", "optimizer": "cpu"},
    "tp": {"name": "megatron", "tp": 2},
    "pp": {"name": "megatron", "pp": 2},
    "pp-zb": {"name": "megatron", "pp": 2, "schedule": "zb-h1"},
    "plain": {"name": "plain"},
}
"""Trainings that equal that of one process."""

LOCAL = {"name": "local", "every": 3, "fragments": 2, "delay": 1}
BETWEEN_HOSTS = {
    "int8": ({"name": "ddp"}, {"gradients": "int8"}),
    "momenta": (
        {"name": "ddp", "exchange": "momentum"},
        {"gradients": "onebit", "warmup_steps": 3},
    ),
    "updates": ({"name": "zero2"}, {"gradients": "topk", "parameters": "int4"}),
    "values": ({"name": "zero3", "keep_below": 0}, {"gradients": "bf16", "parameters": "int8"}),
    "secondary": (
        {"name": "fsdp", "secondary": "host"},
        {"gradients": "powersgd", "parameters": "powersgd", "warmup_steps": 1},
    ),
    "local": ({**LOCAL, "inner": "zero1"}, {"gradients": "int4"}),
    "local, stores": ({**LOCAL, "inner": {"name": "offload", "optimizer": "cpu"}}, {}),
}
"""Trainings on hosts, each strategy with its section ``links.far``."""

WINDOW, EPOCHS, ROWS, TOKENS, WORDS, WIDTH = 4, 3, 4, 12, 64, 32


class Block(nn.Module):
    """Mixing over time by a causal mean, and over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(torch.tanh(self.up(self.norm(past))))


class Words(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def trained(strategy: dict[str, object], far: dict[str, object], *, cpu: bool) -> list[float]:
    """Return the losses and norms of a training, a loss of evaluation, and the weights' sum."""
    torch.manual_seed(0)
    config = {"strategy": strategy, "links": {"far": far}}
    accelerator = Accelerator(config=config, cpu=cpu, gradient_accumulation_steps=WINDOW)
    clips = strategy.get("exchange") != "momentum"  # clipping by norm is refused there
    model = Words().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    words = torch.randint(0, WORDS, (32, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(words[:, :-1], words[:, 1:])
    loader = DataLoader(data, ROWS // accelerator.mesh["dp"].size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found, window = [], []
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        with accelerator.accumulate(model):
            loss = model(*batch)
            window.append(loss.detach())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found += [accelerator.reduce(each, "mean").item() for each in window]
                if clips:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    found.append(accelerator.reduce(norm, "mean").item())
                window.clear()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        rows = (tensor[:ROWS].to(accelerator.device) for tensor in data.tensors)
        found.append(accelerator.reduce(model(*rows), "mean").item())
    state = accelerator.get_state_dict(model)
    found.append(sum(float(value.abs().sum()) for value in state.values()))
    accelerator.free_memory()
    return found


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--cpu"]
    on_cpu = "--cpu" in sys.argv or not torch.cuda.is_available()
    known = {**BETWEEN_HOSTS, **{name: (each, {}) for name, each in STRATEGIES.items()}}
    results = {name: trained(*known[name], cpu=on_cpu or name == "plain") for name in names}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(results))
