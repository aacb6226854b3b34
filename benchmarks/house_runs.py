"""Counts and times that ``house.py`` takes on ranks: calls of a step, its host time, passes.

::

    torchrun --nproc-per-node 2 benchmarks/house_runs.py trace
    torchrun --nproc-per-node 2 benchmarks/house_runs.py host --steps 60
    torchrun --nproc-per-node 2 benchmarks/house_runs.py passes
    torchrun --nproc-per-node 2 benchmarks/house_runs.py walks

Rank 0 prints one line of JSON. Only the public interface of drivetrain is used, so that an older
checkout can be measured by the same file.
"""

import argparse
import functools
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from source_tree import Function, counts_of, function_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import drivetrain
from drivetrain import Accelerator

Step = Callable[[], Tensor]

STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3", "keep_below": 0},  # by default, it divides no parameter so small
    "fsdp": {"name": "fsdp"},
}
PEER = "torch FSDP2"
WARMUP = 6
"""Steps before anything is counted: units record their order, rings and buffers are made."""

WORDS = 64


class Block(nn.Module):
    """Two small products, a norm and a residual: next to no work, six parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Equal blocks between an embedding and a head."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def training(side: str, options: argparse.Namespace) -> Step:
    """Return a training step of the net under a strategy of ours, or under torch's FSDP2."""
    torch.manual_seed(0)
    net = Net(options.blocks, options.width)
    if side == PEER:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (net.token, *net.blocks, net.head):
            fully_shard(module, mesh=mesh)
        model: nn.Module = fully_shard(net, mesh=mesh)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        backward = Tensor.backward
    else:
        accelerator = Accelerator(strategy=STRATEGIES[side], cpu=True)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        backward = accelerator.backward
    tokens = torch.randint(WORDS, (2, 4))

    def step() -> Tensor:
        loss = model(tokens).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# --- what a step meets ---


AROUND = (
    "accelerator.py",
    "facade/",
    "processes.py",
    "runtime/",
    "collectives/",
    "parts/collectives/",
    "traffic.py",
    "parts/traffic.py",
)
"""What lies around a strategy in the core, before and after it was laid out anew."""


def trace(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count the functions and files that one step meets on the main thread.

    ``all`` are those below the folder of the checkout. ``functions`` leaves out the facade and the
    collectives, as those of FSDP2 are in ``torch.distributed.fsdp`` alone, and neither the loop nor
    ``torch.distributed``. Functions are told apart by file, first line and name, so lambdas and
    comprehensions count as well.
    """
    package = Path(drivetrain.__file__).parents[2]
    core = package / "src" / "drivetrain"
    around = tuple(f"{core}/{path}" for path in AROUND)
    peer = Path(torch.__file__).parent / "distributed" / "fsdp"
    counts = {}
    for side in (*STRATEGIES, PEER):
        met = functions_met(training(side, options))
        home = peer if side == PEER else package
        everything = {key for key in met if key[0].startswith(f"{home}/")}
        ours = {key for key in everything if not key[0].startswith(around)}
        plugin = {key for key in ours if key[0].startswith(f"{package}/plugins/")}
        kinds = {"": ours, " in the plugin": plugin, " in all": everything}
        counts[side] = {
            f"{what}{kind}": number
            for kind, keys in kinds.items()
            for what, number in (
                ("functions", len(keys)),
                ("files", len({path for path, *_ in keys})),
            )
        }
        if options.verbose and dist.get_rank() == 0:
            for path, line, name in sorted(ours):
                print(f"{side} {path}:{line} {name}", file=sys.stderr)
    return counts


def functions_met(step: Step) -> set[Function]:
    """Return the functions that a step calls after some others."""
    for _ in range(WARMUP):
        step()
    met: set[Function] = set()
    with noted(met):
        step()
    return {key for key in met if key[0] != __file__}


@contextmanager
def noted(met: set[Function]) -> Iterator[None]:
    """Add the functions to a set that are called on this thread."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            met.add(function_of(frame.f_code))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


# --- what a reader follows ---


def walks(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count the files and functions of ours that two walks meet on the main thread.

    The walks are ``Accelerator()`` and a backward of zero3 with the gradients it exchanges. The
    bodies of modules do not count: what was imported before, and by whom, makes no difference.
    """
    constructor: set[Function] = set()
    backward: set[Function] = set()
    torch.manual_seed(0)
    net = Net(options.blocks, options.width)
    with noted(constructor):
        accelerator = Accelerator(strategy=STRATEGIES["zero3"], cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    tokens = torch.randint(WORDS, (2, 4))
    for step in range(WARMUP + 1):
        loss = model(tokens).square().mean()
        with noted(backward if step == WARMUP else set()):
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return {
        name: counts_of(key for key in met if key[1])
        for name, met in {"Accelerator()": constructor, "zero3 backward": backward}.items()
    }


# --- host time ---


def host(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Time steps of each side, in turn: milliseconds, medians of this rank.

    ``wall`` is the clock's; ``main thread`` is the processor time of the thread that the training
    loop runs on, ``process`` that of all threads, those of collectives too.
    """
    sides = {side: training(side, options) for side in (*STRATEGIES, PEER)}
    clocks = {
        "wall": time.perf_counter,
        "main thread": time.thread_time,
        "process": time.process_time,
    }
    series: dict[str, list[list[float]]] = {side: [] for side in sides}
    names = list(sides)
    for turn in range(WARMUP + options.steps):
        for side in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            before = [clock() for clock in clocks.values()]
            sides[side]()
            after = [clock() for clock in clocks.values()]
            series[side].append([b - a for a, b in zip(before, after, strict=True)])
    return {
        side: {
            name: 1e3 * statistics.median(times)
            for name, times in zip(clocks, zip(*rows[WARMUP:], strict=True), strict=True)
        }
        for side, rows in series.items()
    }


# --- passes over the user's model ---


def passes(_: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count how often ``prepare()`` of megatron runs through the user's model, per model.

    The forward of the class of the root module and of the class of its blocks are wrapped before
    ``prepare()``, so copies count, and passes without values. A pass is a call of the root's
    forward, or of a block's outside of one, on the main thread; ``trials`` are calls of a block's
    on other threads, which emulate ranks to try a plan. Two ranks are ``tp``, more add ``pp``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=32, **words)
    llama = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        **words,
    )
    models = {"GPT-2": GPT2LMHeadModel(gpt2), "Llama": LlamaForCausalLM(llama)}
    return {name: passes_of(model) for name, model in models.items()}


def passes_of(model: nn.Module) -> dict[str, int]:
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    strategy = {"name": "megatron", "tp": 2, "pp": dist.get_world_size() // 2}
    accelerator = Accelerator(strategy=strategy, cpu=True)
    with counted(type(model), type(blocks[0])) as counts:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return dict(counts)


@contextmanager
def counted(root: type[nn.Module], block: type[nn.Module]) -> Iterator[Counter[str]]:
    """Count calls of the forwards of two classes of modules, as ``passes`` tells."""
    counts: Counter[str] = Counter(passes=0, trials=0)
    depth = 0

    def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)  # the signature stays: it is read for the model's arguments
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if threading.current_thread() is not threading.main_thread():
                counts["trials"] += 1
                return forward(self, *args, **kwargs)
            counts["passes"] += not depth
            depth += 1
            try:
                return forward(self, *args, **kwargs)
            finally:
                depth -= 1

        return run

    before = {kind: kind.forward for kind in (root, block)}
    for kind, forward in before.items():
        kind.forward = counting(forward)
    try:
        yield counts
    finally:
        for kind, forward in before.items():
            kind.forward = forward


# --- the command ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = {"trace": trace, "host": host, "passes": passes, "walks": walks}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60, help="of each side, of host")
    parser.add_argument("--verbose", action="store_true", help="list the functions, of trace")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = kinds[options.what](options)
    if dist.get_rank() == 0:
        root = Path(drivetrain.__file__).resolve().parents[2]
        print(json.dumps({"root": str(root), "rows": result}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
