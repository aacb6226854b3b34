"""Times a training step and counts its activations, without and with activation recompute.

::

    python benchmarks/recompute.py

The model is the GPT of examples/train_gpt.py in one process, with its fused attention and with
attention written out. The modes take turns, a step of each, and the median of the ratios of
neighboring steps is the price. Bytes are what the allocator was asked for, gradients apart:
``kept`` is alive when forward has ended, ``peak`` is the most at any moment of the step.
"""

import argparse
import importlib.util
import statistics
import time
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drivetrain.recompute import Mode, attach, choose_blocks

MODES: tuple[Mode | None, ...] = (None, "selective", "full")
MB = 1e6


def load_example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples/train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written_out(block: nn.Module, x: Tensor) -> Tensor:
    """Compute the example's block with attention in separate operations."""
    batch, length, dim = x.shape
    qkv = block.qkv(block.norm1(x)).view(batch, length, 3, block.heads, dim // block.heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    attended = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    x = x + block.out(attended.transpose(1, 2).reshape(batch, length, dim))
    return x + block.down(F.gelu(block.up(block.norm2(x))))


def build(example: ModuleType, options: argparse.Namespace, *, fused: bool) -> nn.Module:
    torch.manual_seed(0)
    if not fused:
        example.Block.forward = written_out
    model: nn.Module = example.GPT(options.dim, options.layers, options.heads, options.length)
    return model


def step(model: nn.Module, window: Tensor) -> None:
    loss_of(model, window).backward()
    model.zero_grad(set_to_none=False)


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def allocations(recorded: profile) -> list[int]:
    """Return the bytes in use after each allocation and release, counted from the start."""
    assert recorded.profiler is not None
    results = recorded.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    used, totals = 0, [0]
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        totals.append(used)
    return totals


def count(model: nn.Module, window: Tensor) -> tuple[int, int]:
    """Return (kept after forward, peak of the step) in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = loss_of(model, window)
    kept = allocations(recorded)[-1]
    loss.backward()
    model.zero_grad(set_to_none=False)
    del loss
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(model, window)
    return kept, max(allocations(recorded))


def compare(options: argparse.Namespace, *, fused: bool) -> None:
    example = load_example()
    models = {}
    for mode in MODES:
        models[mode] = build(example, options, fused=fused)
        if mode is not None:
            attach(choose_blocks(models[mode]), mode)
    window = torch.randint(256, (options.batch, options.length + 1))
    seconds: dict[Mode | None, list[float]] = {mode: [] for mode in MODES}
    for i in range(options.steps + 1):
        for mode in MODES if i % 2 else reversed(MODES):
            start = time.perf_counter()
            step(models[mode], window)
            seconds[mode].append(time.perf_counter() - start)
    name = "fused" if fused else "written out"
    for mode in MODES:
        kept, peak = count(models[mode], window)
        pairs = zip(seconds[mode][1:], seconds[None][1:], strict=True)  # the first warms up
        ratio = statistics.median(mine / plain for mine, plain in pairs)
        median = statistics.median(seconds[mode][1:])
        print(
            f"| {name} | {mode or 'none'} | {1e3 * median:.0f} ms | {ratio:.2f} "
            f"| {kept / MB:.1f} MB | {peak / MB:.1f} MB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="activation recompute: time and bytes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| attention | mode | step | x none | kept after forward | peak |\n"
        "|---|---|---|---|---|---|"
    )
    for fused in (True, False):
        compare(options, fused=fused)


if __name__ == "__main__":
    main()
