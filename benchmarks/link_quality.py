"""Compares the held-out loss of methods for slow links with exact training, for the same tokens.

::

    python benchmarks/link_quality.py --results quality.jsonl --figure quality.png
    python benchmarks/link_quality.py --model ten --results ten.jsonl   # 15 minutes per run
    python benchmarks/link_quality.py --model ten --gpu --at-once 8 --results ten.jsonl
    python benchmarks/link_quality.py --rows exact int8 --seeds 0 --steps 300   # a few minutes

A GPT learns the bytes of docstrings of the installed packages; each package is trained on, or held
out. Every row sees the same batches in the same order, on two ranks that count as two hosts. The
loss is that of ``get_state_dict``, so of the outer weights under ``local``, in nats per byte. A run
whose line is in the file of results is not run again, so the command can be interrupted.

With ``--gpu`` all ranks share one GPU, and exchange through the host's memory. ``--texts`` names a
file for the text: another machine, with other packages, then trains on the same.
"""

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from hashlib import sha256
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ddp_step import Gpt, loss_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "titles"))

RANKS = 2
SIZES = {
    "small": SimpleNamespace(layers=4, dim=128, heads=4, seq=128, vocab=256, batch=8),
    "ten": SimpleNamespace(layers=6, dim=384, heads=6, seq=128, vocab=256, batch=4),
}
"""0.87 and 10.9 million parameters."""

RATES = {"small": 2e-3, "ten": 6e-4}
"""Learning rates. With twice its rate the small model ends better, but then a change of any kind,
however small, moves its loss by 3%. With 2e-3 the larger model learns little for 700 steps."""

WARM_UP = 50

HELD_OUT, EVALUATED, EVERY_STEPS = 0.05, 64, 100
"""The share of packages that is held out, batches of an evaluation, steps between two of them."""

ROUND = 30
WARM_STEPS = 300
"""Exact steps before those of a method: a fifth of 1,500 steps."""

STREAMING = {"name": "local", "every": ROUND, "fragments": 3, "delay": 5, "keep": 0.5}
STREAMING_15 = {**STREAMING, "every": 15, "delay": 4, "warmup_steps": WARM_STEPS}
DDP: dict[str, Any] = {"name": "ddp"}
MOMENTUM: dict[str, Any] = {"name": "ddp", "exchange": "momentum"}
HYBRID_MOMENTUM: dict[str, Any] = {"name": "fsdp", "sharding": "hybrid", "exchange": "momentum"}
CHANCE: dict[str, Any] = {"rounding": "stochastic"}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": (DDP, {}),
    "bf16": (DDP, {"gradients": "bf16"}),
    "int8": (DDP, {"gradients": "int8"}),
    "int4": (DDP, {"gradients": "int4"}),
    "int8 by chance": (DDP, {"gradients": "int8", "options": {**CHANCE, "feedback": False}}),
    "int4 by chance": (DDP, {"gradients": "int4", "options": {**CHANCE, "feedback": False}}),
    "int4 by chance, feedback": (DDP, {"gradients": "int4", "options": CHANCE}),
    "onebit": (DDP, {"gradients": "onebit", "warmup_steps": 50}),
    "onebit adam": (MOMENTUM, {"gradients": "onebit", "warmup_steps": 300}),
    "onebit adam, fsdp": (HYBRID_MOMENTUM, {"gradients": "onebit", "warmup_steps": 300}),
    "exact, unclipped": (DDP, {}),
    "powersgd": (DDP, {"gradients": "powersgd", "warmup_steps": 50}),
    **{
        f"powersgd, rank {rank}": (
            DDP,
            {"gradients": "powersgd", "warmup_steps": 50, "options": {"rank": rank}},
        )
        for rank in (16, 32)
    },
    **{
        f"powersgd, rank {rank}, warmed": (
            DDP,
            {"gradients": "powersgd", "warmup_steps": WARM_STEPS, "options": {"rank": rank}},
        )
        for rank in (16, 32, 96)
    },
    "int4, blocks of 64": (DDP, {"gradients": "int4", "options": {"block": 64}}),
    "int4, warmed": (DDP, {"gradients": "int4", "warmup_steps": WARM_STEPS}),
    "int4, warmed, blocks of 64": (
        DDP,
        {"gradients": "int4", "warmup_steps": WARM_STEPS, "options": {"block": 64}},
    ),
    "topk": (DDP, {"gradients": "topk", "warmup_steps": 50}),
    "zero2, int8, updates int8": ({"name": "zero2"}, {"gradients": "int8", "parameters": "int8"}),
    "zero3, int8, values bf16": ({"name": "zero3"}, {"gradients": "int8", "parameters": "bf16"}),
    "local": ({"name": "local", "every": ROUND}, {}),
    "streaming": (STREAMING, {}),
    "streaming, int4": (STREAMING, {"gradients": "int4"}),
    "local, warmed": ({"name": "local", "every": ROUND, "warmup_steps": WARM_STEPS}, {}),
    "streaming, warmed": ({**STREAMING, "warmup_steps": WARM_STEPS}, {}),
    "streaming of 15, warmed": (STREAMING_15, {}),
    "streaming of 15, warmed, int4": (STREAMING_15, {"gradients": "int4"}),
    "streaming of 15, warmed, topk": (STREAMING_15, {"gradients": "topk"}),
    "streaming of 15, warmed, topk, no outer momentum": (
        {**STREAMING_15, "outer_momentum": 0.0, "outer_lr": 1.0},
        {"gradients": "topk"},
    ),
}

UNCLIPPED = ("onebit adam", "onebit adam, fsdp", "exact, unclipped")
"""Momenta are not clipped. ``exact, unclipped`` tells what exact training does without clipping."""


def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of training and of held-out packages, 1-D uint8."""
    from data import docstrings

    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for pair in docstrings():
        share = int.from_bytes(sha256(pair.group.encode()).digest()[:4]) / 2**32
        sides[share < HELD_OUT].append(f"{pair.title}\n\n{pair.text}\n\n".encode())
    train, test = (torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) for side in sides)
    return train, test


def windows(text: Tensor, size: SimpleNamespace, generator: torch.Generator) -> Tensor:
    """Return a batch of random windows, (batch, seq + 1)."""
    starts = torch.randint(len(text) - size.seq - 1, (size.batch,), generator=generator)
    return torch.stack([text[start : start + size.seq + 1] for start in starts.tolist()]).long()


def train(arguments: argparse.Namespace) -> None:
    """Train on this rank, and print the held-out losses on rank 0."""
    torch.set_num_threads(1)
    (row,), (seed,), size = arguments.rows, arguments.seeds, SIZES[arguments.model]
    strategy, far = ROWS[row]
    dist.init_process_group("gloo")  # NCCL refuses ranks that share a GPU
    config = {"strategy": strategy, "links": {"far": far}}
    accelerator = Accelerator(config=config, cpu=not arguments.gpu)
    device = accelerator.device
    kept = load_file(arguments.texts)
    torch.manual_seed(seed)
    model = Gpt(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: rate(step, arguments.steps))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    generator = torch.Generator().manual_seed(1000 * seed + accelerator.process_index)
    losses = {}
    for step in range(1, 1 + arguments.steps):
        batch = windows(kept["train"], size, generator).to(device)
        accelerator.backward(loss_of(model, batch))
        if row not in UNCLIPPED:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVERY_STEPS == 0 or step == arguments.steps:
            weights = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                losses[step] = held_out(weights, size, kept["test"], device)
            accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses}), flush=True)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    dist.destroy_process_group()


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a warm-up, then half a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP))


@torch.no_grad()
def held_out(
    weights: dict[str, Tensor], size: SimpleNamespace, text: Tensor, device: torch.device
) -> float:
    """Return the mean loss of weights on held-out text."""
    model = Gpt(size).to(device)
    model.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    batches = (windows(text, size, generator).to(device) for _ in range(EVALUATED))
    losses = [float(loss_of(model, batch)) for batch in batches]
    return statistics.mean(losses)


def run(row: str, seed: int, arguments: argparse.Namespace, kept: Path) -> dict[str, Any]:
    """Train a row in processes of its own, each a host, and return its held-out losses.

    In place of ``losses`` there is an ``error`` if a rank failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", "--texts", str(kept), "--rows", row]
    command += ["--seeds", str(seed), "--steps", str(arguments.steps), "--model", arguments.model]
    command += ["--lr", str(arguments.lr), *(["--gpu"] if arguments.gpu else [])]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ, "RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0",
                "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        error = f"{row}, seed {seed}:\n" + "\n".join(err[-3000:] for _, err in said)
        return {"row": row, "seed": seed, "error": error}
    lines = [line for line in said[0][0].splitlines() if line.startswith('{"losses"')]
    return {"row": row, "seed": seed, **json.loads(lines[-1])}


def known(results: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of a file of results under the same conditions."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [each for each in map(json.loads, lines) if setting.items() <= each.items()]


def by_seed(found: list[dict[str, Any]], row: str) -> dict[int, dict[int, float]]:
    """Return the held-out losses of a row by seed, each by step."""
    return {
        each["seed"]: {int(step): loss for step, loss in each["losses"].items()}
        for each in found
        if each["row"] == row
    }


def table(found: list[dict[str, Any]], rows: list[str]) -> None:
    """Print the last losses of each row, and how far they are above exact ones of equal seeds."""
    print("| row | seeds | held-out loss | more than exact, each seed | mean | spread |")
    print("|---|---|---|---|---|---|")
    exact = {seed: losses[max(losses)] for seed, losses in by_seed(found, "exact").items()}
    for row in rows:
        last = {seed: losses[max(losses)] for seed, losses in by_seed(found, row).items()}
        if not last:
            continue
        line = f"| {row} | {len(last)} | {statistics.mean(last.values()):.4f} |"
        more = [last[seed] / exact[seed] - 1 for seed in sorted(last) if seed in exact]
        if row == "exact" or not more:
            each = ", ".join(f"{last[seed]:.4f}" for seed in sorted(last))
            print(f"{line} {each} | - | {max(last.values()) - min(last.values()):.4f} |")
            continue
        each, spread = ", ".join(f"{one:+.1%}" for one in more), max(more) - min(more)
        print(f"{line} {each} | {statistics.mean(more):+.1%} | {spread:.1%} |")


def draw(found: list[dict[str, Any]], rows: list[str], target: Path) -> None:
    """Draw the mean curves of all rows, and below how far each is above exact, equal seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True)
    exact = by_seed(found, "exact")
    for row in rows:
        runs = {seed: losses for seed, losses in by_seed(found, row).items() if seed in exact}
        if not runs:
            continue
        steps = sorted(next(iter(runs.values())))
        means = [statistics.mean(run[step] for run in runs.values()) for step in steps]
        label = f"{row} ({len(runs)})"
        (line,) = curves.plot(steps, means, label=label, linewidth=1.2)
        if row == "exact":
            continue
        more = [
            statistics.mean(100 * (run[step] / exact[seed][step] - 1) for seed, run in runs.items())
            for step in steps
        ]
        apart.plot(steps, more, color=line.get_color(), label=label, linewidth=1.2)
    curves.set_ylabel("held-out loss, nats per byte")
    apart.set_ylabel("more than exact, %")
    apart.axhline(0.0, color="black", linewidth=0.8)
    apart.set_xlabel("optimizer steps")
    curves.legend(fontsize=8, title="row (seeds)")
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, help="by default that of the model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--results", type=Path, default=Path("link_quality.jsonl"))
    parser.add_argument("--figure", type=Path, help="a PNG of the curves; needs matplotlib")
    parser.add_argument("--gpu", action="store_true", help="ranks share the GPU")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--texts", type=Path, help="safetensors of the text; made if absent")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("expected a GPU for --gpu, found none; leave it out")
    arguments.lr = arguments.lr or RATES[arguments.model]
    if arguments.worker:
        train(arguments)
        return
    size = SIZES[arguments.model]
    with tempfile.TemporaryDirectory() as folder, ThreadPool(arguments.at_once) as pool:
        kept = arguments.texts or Path(folder) / "texts.safetensors"
        if not kept.exists():
            training, test = texts()
            save_file({"train": training, "test": test}, kept)
        text = load_file(kept)["train"]
        tokens = RANKS * size.batch * size.seq * arguments.steps
        parameters = sum(p.numel() for p in Gpt(size).parameters())
        print(f"{parameters:,} parameters, {len(text):,} bytes of training text, {tokens:,} "
              "tokens per run\n", flush=True)  # fmt: skip
        # Losses are compared under the same conditions alone.
        setting = {key: getattr(arguments, key) for key in ("model", "steps", "lr", "gpu")}
        setting["text"] = sha256(text.numpy().tobytes()).hexdigest()[:12]
        found = known(arguments.results, setting)
        done = {(each["row"], each["seed"]) for each in found}
        left = [(row, seed) for seed in arguments.seeds for row in arguments.rows
                if (row, seed) not in done]  # fmt: skip
        errors = []
        for line in pool.imap_unordered(lambda each: run(*each, arguments, kept), left):
            if "error" in line:
                errors.append(line["error"])
                continue
            found.append(setting | line)
            with arguments.results.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    if errors:
        sys.exit("\n".join(errors))
    table(found, arguments.rows)
    if arguments.figure:
        draw(found, arguments.rows, arguments.figure)


if __name__ == "__main__":
    main()
