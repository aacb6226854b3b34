"""Trains a byte-level GPT on the source of this interpreter's own standard library.

    drivetrain launch --nproc-per-node 2 examples/train_gpt.py
    drivetrain launch --nproc-per-node 2 examples/train_gpt.py --resume
    drivetrain launch --nproc-per-node 2 examples/train_gpt.py --data my_corpus.txt

Real text that every machine has, so nothing is downloaded. It shows tokens per second and the
held-out loss while it trains, leaves checkpoints that it can resume from, and ends with a sample.
"""

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from drivetrain import Accelerator, ProjectConfiguration, set_seed

HELD_OUT_WINDOWS = 384
"""Windows of text that training never sees, on which the held-out loss is measured."""


class Windows(Dataset[Tensor]):
    """Consecutive windows of ``length + 1`` bytes: a target is the byte after its input."""

    def __init__(self, text: bytes, length: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, i: int) -> Tensor:
        start = i * self.length
        return self.data[start : start + self.length + 1].long()


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, dim / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT over bytes; the output layer shares its weight with the embedding."""

    def __init__(self, dim: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> (batch, length, 256)
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Counter:
    """Optimizer steps taken, kept in every checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def read_text(path: Path | None, limit: int) -> bytes:
    """Return the text of a file, or of the standard library's modules in order of their names."""
    if path is not None:
        return path.read_bytes()[:limit]
    library = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    for module in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        if "site-packages" not in module.parts and sum(map(len, parts)) < limit:
            parts.append(module.read_bytes())
    return b"\n".join(parts)[:limit]


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    """Return the mean held-out loss in nats per byte, over the samples of all ranks."""
    model.eval()
    losses = []
    for window in loader:
        logits = model(window[:, :-1])
        each = F.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none").mean(dim=1)
        losses.append(accelerator.gather_for_metrics(each))
    model.train()
    mean = float(torch.cat(losses).mean())
    accelerator.report(held_out_loss=mean)
    return mean


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, context: int, device: torch.device) -> str:
    """Continue a prompt byte by byte."""
    model.eval()
    generator = torch.Generator(device).manual_seed(0)  # every rank draws the same
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        probabilities = model(tokens[:, -context:])[0, -1].div(0.8).softmax(dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="a text file; default: the standard library")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="how much text is read")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=24, help="windows per rank and micro-batch")
    parser.add_argument("--length", type=int, default=64, help="bytes per window")
    parser.add_argument("--dim", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--output", type=Path, default=Path("runs/gpt"), help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    return parser.parse_args()


def build(args: argparse.Namespace, accelerator: Accelerator) -> tuple[Any, ...]:
    """Return model, optimizer, scheduler, training loader and held-out loader, all prepared."""
    text = read_text(args.data, args.max_bytes)
    split = int(len(text) * 0.98)
    held_out = Windows(text[split:], args.length)
    part = Subset(held_out, range(min(len(held_out), HELD_OUT_WINDOWS)))
    model = GPT(args.dim, args.layers, args.heads, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / args.steps)),
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(f"{accelerator!r}\n{size:,} parameters, {len(text):,} bytes of text")
    return accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(Windows(text[:split], args.length), args.batch, shuffle=True),
        DataLoader(part, args.batch),
    )


def epochs(loader: Any) -> Iterator[Tensor]:
    """Yield the batches of one epoch after another; each has its own order."""
    while True:
        yield from loader


def main() -> None:
    args = arguments()
    project = ProjectConfiguration(
        project_dir=args.output, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    model, optimizer, scheduler, loader, held_out_loader = build(args, accelerator)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if args.resume:
        accelerator.load_state()
        accelerator.print(f"resumed at step {counter.step}")

    todo = (args.steps - counter.step) * accelerator.gradient_accumulation_steps
    for window in accelerator.progress(epochs(loader), total=todo, every=100):
        if counter.step >= args.steps:
            break
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, window))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        tokens = window.shape[0] * args.length  # of this rank
        accelerator.report(tokens=tokens * accelerator.gradient_accumulation_steps)
        counter.step += 1
        if counter.step % args.eval_every == 0:
            held_out = evaluate(accelerator, model, held_out_loader)
            accelerator.print(f"step {counter.step}: held-out loss {held_out:.3f} nats per byte")
        if counter.step % args.save_every == 0:
            accelerator.save_state()

    final = evaluate(accelerator, model, held_out_loader)
    accelerator.print(f"held-out loss {final:.3f} nats per byte after {counter.step} steps")
    # On every rank: under some strategies a forward needs them all.
    accelerator.print("sample:\n" + sample(model, b"def ", 200, args.length, accelerator.device))
    accelerator.end_training()


if __name__ == "__main__":
    main()
