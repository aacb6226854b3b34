"""Compares the held-out loss of local steps with that of data parallelism, for the same tokens.

::

    python benchmarks/local_steps.py --steps 1500 --seeds 0 1 2
    python benchmarks/local_steps.py --steps 600 --seeds 0 --rows exact local      # a few minutes

A small GPT learns the bytes of docstrings of the installed packages; each package is trained on, or
held out. Every row sees the same batches in the same order, on two ranks that are two workers.
The loss is that of ``get_state_dict``, so of the outer weights under ``local``, in nats per byte.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import torch
from ddp_step import Gpt, loss_of
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "titles"))

RANKS = 2
SIZE = SimpleNamespace(layers=4, dim=128, heads=4, seq=128, vocab=256, batch=8)
LR, WARM_UP = 1e-3, 50
HELD_OUT, EVALUATED = 0.05, 64
"""The share of packages that is held out, and the batches of the evaluation."""

EVERY = 30
STREAMING = {"name": "local", "every": EVERY, "fragments": 3, "delay": 5, "keep": 0.5}
ROWS = {
    "exact": ({"name": "ddp"}, "exact"),
    "local": ({"name": "local", "every": EVERY}, "exact"),
    "streaming": (STREAMING, "exact"),
    "streaming, int4": (STREAMING, "int4"),
}


def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of training and of held-out packages, 1-D uint8."""
    from data import docstrings

    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for pair in docstrings():
        share = int.from_bytes(sha256(pair.group.encode()).digest()[:4]) / 2**32
        sides[share < HELD_OUT].append(f"{pair.title}\n\n{pair.text}\n\n".encode())
    train, test = (torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) for side in sides)
    return train, test


def windows(text: Tensor, generator: torch.Generator) -> Tensor:
    """Return a batch of random windows, (batch, seq + 1)."""
    starts = torch.randint(len(text) - SIZE.seq - 1, (SIZE.batch,), generator=generator)
    return torch.stack([text[start : start + SIZE.seq + 1] for start in starts.tolist()]).long()


def train(arguments: argparse.Namespace) -> None:
    """Train on this rank, and print the held-out loss on rank 0."""
    torch.set_num_threads(1)
    (row,), (seed,) = arguments.rows, arguments.seeds
    strategy, method = ROWS[row]
    if strategy["name"] == "local":
        strategy = {**strategy, "workers": "ranks"}
    links = {"far": {"gradients": method}}
    accelerator = Accelerator(config={"strategy": strategy, "links": links}, cpu=True)
    kept = torch.load(arguments.texts, weights_only=True)
    torch.manual_seed(seed)
    model = Gpt(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: rate(step, arguments.steps))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    generator = torch.Generator().manual_seed(1000 * seed + accelerator.process_index)
    for _ in range(arguments.steps):
        accelerator.backward(loss_of(model, windows(kept["train"], generator)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        print(json.dumps({"loss": held_out(weights, kept["test"])}), flush=True)
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a warm-up, then half a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP))


@torch.no_grad()
def held_out(weights: dict[str, Tensor], text: Tensor) -> float:
    """Return the mean loss of weights on held-out text."""
    model = Gpt(SIZE)
    model.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    losses = [float(loss_of(model, windows(text, generator))) for _ in range(EVALUATED)]
    return statistics.mean(losses)


def run(row: str, seed: int, steps: int, kept: Path) -> float:
    """Train a row in processes of its own, and return the held-out loss."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, "--worker", "--texts", str(kept)]
    command += ["--rows", row, "--seeds", str(seed), "--steps", str(steps)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith('{"loss"')]
    if done.returncode or not found:
        sys.exit(f"{row}, seed {seed}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[-1])["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--texts", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "texts.pt"
        training, test = texts()
        torch.save({"train": training, "test": test}, kept)
        tokens = RANKS * SIZE.batch * SIZE.seq * arguments.steps
        print(f"{len(training):,} bytes of training text, {tokens:,} tokens per run\n")
        losses = {
            row: [run(row, seed, arguments.steps, kept) for seed in arguments.seeds]
            for row in arguments.rows
        }
    print("| | held-out loss | spread | more than exact |\n|---|---|---|---|")
    base = losses.get("exact")
    for row, found in losses.items():
        mean, spread = statistics.mean(found), max(found) - min(found)
        more = f"{mean - statistics.mean(base):+.4f} nats" if base and row != "exact" else "-"
        print(f"| {row} | {mean:.4f} | {spread:.4f} | {more} |")


if __name__ == "__main__":
    main()
