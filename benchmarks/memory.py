"""Compares memory with its formula: shards that train in a cgroup, and activation recompute."""

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from offload import limited
from peers import Decoder, adamw, forget_peak, loss_of, resident
from programs import run_program
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.model.recompute import Mode, attach, choose_blocks

# --- sharded ---


RANKS, VOCAB, SEQ = 2, 8192, 64
STRATEGIES: dict[str, Any] = {"zero3": {"name": "zero3", "keep_below": 0}, "fsdp": "fsdp"}
MIB = 2**20


def train(strategy: str, layers: int, steps: int) -> dict[str, Any]:
    """Train one rank; return what it took, in bytes and seconds."""
    torch.set_num_threads(1)
    accelerator = Accelerator(strategy=STRATEGIES[strategy], cpu=True)
    sizes = {"layers": layers, "dim": 768, "heads": 12, "inner": 2048, "vocab": VOCAB}
    forget_peak()
    before = resident("VmRSS")
    torch.manual_seed(0)
    with accelerator.building():
        model = Decoder(argparse.Namespace(**sizes, seq=SEQ, batch=1))
    spec = ModelSpec.of(model)
    model, optimizer = accelerator.prepare(model, adamw(model))
    seconds, losses, saved = [], [], 0
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (1, SEQ + 1))
        started = time.perf_counter()
        with activations(model) if not losses else nullcontext([0]) as found:
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        saved = saved or found[0]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    return {
        "formula": {**formula(accelerator.strategy_of(model), spec), "activations": saved},
        "before": before,
        "peak": resident("VmHWM") - before,
        "seconds": statistics.median(seconds),
        "losses": losses,
    }


def formula(strategy: Any, spec: ModelSpec) -> dict[str, int]:
    """Return the bytes that one rank is to hold, but for activations."""
    config = strategy.config
    whole = [sum(flat.layout.nbytes for flat in unit.flats) for unit in strategy.placement.units]
    live = (config.max_live or 1 + config.ahead) * max(whole)
    if config.max_live:
        live += sum(
            size
            for size, unit in zip(whole, strategy.placement.units, strict=True)
            if not unit.layout.key  # the rest of the model is whole during a whole step
        )
    return {
        "held": type(strategy).cost(config, spec, strategy.run).total_held,
        "units": live,
        "lent": config.lent_buffers * max(whole),
    }


@contextmanager
def activations(model: torch.nn.Module) -> Iterator[list[int]]:
    """Count the bytes that autograd saves, each storage once; parameters are none of them."""
    seen = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    total = [0]

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield total


def ranks(arguments: argparse.Namespace, strategy: str, group: Path | None) -> list[Any]:
    """Train on all ranks, in a cgroup if there is one; of a rank that died, None is returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    children = []
    for rank in range(RANKS):
        given = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        command = [
            sys.executable,
            __file__,
            "sharded",
            "--rank",
            strategy,
            "--steps",
            str(arguments.steps),
        ]
        children.append(
            subprocess.Popen(
                [*command, "--layers", str(arguments.layers)],
                env={**os.environ, **{name: str(value) for name, value in given.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                preexec_fn=enter,  # noqa: PLW1509 (this process has no threads)
            )
        )
    said = [child.communicate()[0] for child in children]
    return [json.loads(lines.splitlines()[-1]) if "{" in lines else None for lines in said]


def peak_of(group: Path | None) -> int:
    """Return the most bytes that a cgroup has had, page cache included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with contextlib.suppress(OSError, AttributeError):
            return int((group / name).read_text(encoding="ascii"))  # type: ignore[operator]
    return 0


def sharded_main() -> None:
    """Trains with zero3 and fsdp in a memory cgroup of little more than their formula.

    ::

        python benchmarks/memory.py sharded
        python benchmarks/memory.py sharded --only zero3 --share 1.1 --layers 24

    Two ranks train a decoder that is built in ``building()``. A first training has all the memory
    it wants: each rank says how much the formula gives it (the bytes that ``cost()`` promises, the
    units that are whole at once, the lent gradient buffers, the activations that autograd saves),
    how much the process had before, and its peak of resident memory. The second training runs in a
    memory cgroup of ``--share`` times the formula for each rank, on top of the memory that the
    processes had before.
    """
    parser = argparse.ArgumentParser(description=str(sharded_main.__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--share", type=float, default=1.15, help="of the formula, for each rank")
    parser.add_argument("--layers", type=int, default=16, help="of 7.1 million parameters each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(train(arguments.rank, arguments.layers, arguments.steps)), flush=True)
        return
    failed = False
    for strategy in arguments.only:
        free = ranks(arguments, strategy, None)
        if None in free:
            raise SystemExit(f"{strategy}: a rank ended by itself")
        sums = [sum(rank["formula"].values()) for rank in free]
        budget = int(sum(rank["before"] for rank in free) + arguments.share * sum(sums))
        parts = ", ".join(f"{kind} {n / MIB:.0f}" for kind, n in free[0]["formula"].items())
        print(f"{strategy}: formula {sums[0] / MIB:.0f} MiB on rank 0: {parts}")
        print(f"  without a limit: peak {free[0]['peak'] / MIB:.0f} MiB")
        with limited(budget) as group:
            held = ranks(arguments, strategy, group)
            peak = peak_of(group)
        if group is None:
            print("  this machine lets no cgroup be made")
        elif None in held:
            failed = True
            print(f"  in {budget / MIB:.0f} MiB for both ranks: killed")
        else:
            same = held[0]["losses"] == free[0]["losses"]
            above = (peak - sum(rank["before"] for rank in held)) / sum(sums)
            print(
                f"  in {budget / MIB:.0f} MiB for both ranks: trained, peak {above:.3f} x the "
                f"formula, losses {'equal' if same else 'DIFFER'}, "
                f"step {held[0]['seconds']:.2f} s (without a limit {free[0]['seconds']:.2f} s)"
            )
            failed |= not same
    sys.exit(failed)


# --- recompute ---


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
    window_loss(model, window).backward()
    model.zero_grad(set_to_none=False)


def window_loss(model: nn.Module, window: Tensor) -> Tensor:
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
        loss = window_loss(model, window)
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


def recompute_main() -> None:
    """Times a training step and counts its activations, without and with activation recompute.

    ::

        python benchmarks/memory.py recompute

    The model is the GPT of examples/train_gpt.py in one process, with its fused attention and with
    attention written out. The modes take turns, a step of each, and the median of the ratios of
    neighboring steps is the price. Bytes are what the allocator was asked for, gradients apart:
    ``kept`` is alive when forward has ended, ``peak`` is the most at any moment of the step.
    """
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
    run_program({"sharded": sharded_main, "recompute": recompute_main})
