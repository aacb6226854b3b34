"""A rank that trains a model under each strategy, and prints losses, norms and weights."""

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
WINDOW, ROWS, TOKENS, WORDS, WIDTH = 4, 4, 12, 64, 32


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


def trained(strategy: dict[str, object], *, cpu: bool) -> list[float]:
    """Return the losses and norms of a training, a loss of evaluation, and the weights' sum."""
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy, cpu=cpu, gradient_accumulation_steps=WINDOW)
    model = Words().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    words = torch.randint(0, WORDS, (32, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(words[:, :-1], words[:, 1:])
    loader = DataLoader(data, ROWS // accelerator.mesh["dp"].size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found, window = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(*batch)
            window.append(loss.detach())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                found += [accelerator.reduce(each, "mean").item() for each in window]
                found.append(float(norm))
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
    names = sys.argv[1:]
    results = {
        name: trained(STRATEGIES[name], cpu=name == "plain" or not torch.cuda.is_available())
        for name in names
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(results))
