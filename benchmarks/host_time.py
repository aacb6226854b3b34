"""Times what the library itself does on the host: facade, record, policies, look, prepare()."""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import forget_peak, resident
from programs import run_program
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drivetrain import Accelerator
from drivetrain.model import valueless as results
from drivetrain.model.trace import trace_model
from drivetrain.model.valueless import ValuelessTensor
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.cost import CellLayout

# --- facade ---


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.GELU()]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def bare_loop(steps: int) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    bare, bare_optimizer = build()
    model, optimizer = accelerator.prepare(*build())
    x = torch.randn(64, 512)

    def plain() -> Tensor:
        loss = bare(x).square().mean()
        loss.backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()
        return loss

    def facade() -> Tensor:
        with accelerator.accumulate(model):
            loss: Tensor = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    ratios, times = [], []
    for i in range(steps):
        seconds = {}
        for step in (plain, facade) if i % 2 else (facade, plain):
            start = time.perf_counter()
            step()
            seconds[step.__name__] = time.perf_counter() - start
        ratios.append(seconds["facade"] / seconds["plain"])
        times.append(seconds["plain"])
    print(
        f"facade / bare loop: {statistics.median(ratios):.4f} "
        f"(median of {steps} pairs, step {1e3 * statistics.median(times):.2f} ms)"
    )


def prepare(rounds: int) -> None:
    accelerator = Accelerator(cpu=True)
    times = []
    for _ in range(rounds):
        model = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(1000))
        start = time.perf_counter()
        accelerator.prepare(model)
        times.append(time.perf_counter() - start)
        accelerator.free_memory()
    print(f"prepare() of 1,000 parameters: {1e3 * statistics.median(times):.1f} ms (median)")


def facade_main() -> None:
    """Times the facade against a bare loop in one process, and prepare() of many parameters.

    ::

        python benchmarks/host_time.py facade

    The same model is trained by a bare torch loop and through the Accelerator, a step of each in
    turn; the median of the ratios of neighboring steps is the facade's price.
    """
    bare_loop(400)
    prepare(9)


# --- recording ---


STEPS = 3000
STEP_MS = 50.0
"""The step that the price is a share of."""


def steps(accelerator: Accelerator) -> Iterator[float]:
    """Yield the seconds of one step after another."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8 * STEPS, 16))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
    batches: Any = iter(loader)
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        accelerator.backward(model(batch[0]).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.report(accuracy=0.5)
        yield time.perf_counter() - start


def recording_main() -> None:
    """Times what the recorder of a run adds to a step: pairs with and without it, in one process.

    ::

        python benchmarks/host_time.py recording

    Two Accelerators train equal models of a few parameters, a step of each in turn; one has
    ``report: false``, the other one writes its records to a folder. The model is so small that
    nearly all of the time is the library's own, so the medians of the differences are the price of
    recording.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        without = Accelerator(cpu=True, config={"report": False})
        recorded = Accelerator(cpu=True, project_dir=folder)
        pairs = list(zip(steps(without), steps(recorded), strict=True))[STEPS // 10 :]
        added = sorted(second - first for first, second in pairs)
        recorded.end_training()
    middle, late = statistics.median(added) * 1e6, added[int(0.99 * len(added))] * 1e6
    mean = statistics.mean(added) * 1e6
    print(f"{len(pairs)} pairs of steps of {statistics.median(a for a, _ in pairs) * 1e6:.0f} us")
    print(f"recording adds {middle:.0f} us (median), {mean:.0f} us (mean), {late:.0f} us (99th)")
    print(f"of a step of {STEP_MS:g} ms: {middle / STEP_MS / 10:.2f}% (median)")


# --- policies ---


WARMUP = 5
POLICIES_ROWS = {
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
    for name, (settings, clip) in POLICIES_ROWS.items():
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


def policies_main() -> None:
    """Measures the costs of looking for bad numbers, and of comparing replicas, over whole steps.

        python benchmarks/host_time.py policies
        python benchmarks/host_time.py policies --strategy zero3 --blocks 6 --steps 60

    Two ranks train two copies of one model in the same processes, a step of each in turn: one with
    the setting, one without. Each row is the median of the ratios of neighbouring steps, and the
    spread of its middle half: what else the machine does hits both.
    """
    parser = argparse.ArgumentParser(description=str(policies_main.__doc__).splitlines()[0])
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
        [*command, "2", str(Path(__file__).resolve()), "policies", "--rank", *map(str, arguments)],
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


# --- look ---


ROUNDS, CALLS = 9, 30
LOOK_ROWS, LOOK_TOKENS, WIDTH, HEADS = 2, 64, 128, 4
CPU = torch.device("cpu")

Operation = Callable[..., object]
X = (LOOK_ROWS, LOOK_TOKENS, WIDTH)
Q = (LOOK_ROWS, HEADS, LOOK_TOKENS, WIDTH // HEADS)
OPERATIONS: dict[str, tuple[Operation, Sequence[tuple[int, ...]]]] = {
    "linear": (F.linear, [X, (WIDTH, WIDTH)]),
    "gelu": (F.gelu, [X]),
    "add": (torch.add, [X, X]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (WIDTH,), w, w), [X, (WIDTH,)]),
    "view, transpose": (lambda x: x.view(LOOK_ROWS, LOOK_TOKENS, HEADS, -1).transpose(1, 2), [X]),
    "split": (lambda x: x.split(WIDTH // HEADS, -1), [X]),
    "attention": (F.scaled_dot_product_attention, [Q, Q, Q]),
    "softmax": (lambda x: F.softmax(x, -1), [Q]),
    "embedding": (lambda w: F.embedding(torch.zeros(X[:2]).long(), w), [(1000, WIDTH)]),
    "cross entropy": (
        lambda x: F.cross_entropy(x, torch.zeros(LOOK_TOKENS).long()),
        [(LOOK_TOKENS, 1000)],
    ),
}


def microseconds(call: Callable[[], object], calls: int) -> float:
    started = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - started) / calls * 1e6


def on_fakes(operation: Operation, tensors: Sequence[Tensor]) -> Callable[[], object]:
    def given(tensor: Tensor) -> results.GivenTensor:
        places.append(tensor)
        return results.GivenTensor(len(places) - 1, results.facts_of(tensor))

    places: list[Tensor] = []
    frozen = results.freeze(tuple(tensors), given)
    surroundings = (False, torch.get_default_dtype())
    empty = results.freeze({}, given)
    return lambda: results.computed(operation, frozen, empty, surroundings)


def look_main() -> None:
    """Times one trace of a model: what an operation costs on fake tensors, and remembered.

    ::

        python benchmarks/host_time.py look

    Times are CPU times of one thread in microseconds, the least of several rounds. ``first`` is an
    operation on fake tensors in a process that has never met it, ``fake`` the same operation on
    fake tensors later, and ``remembered`` an operation on tensors without values whose result is
    known.
    """
    torch.set_num_threads(1)
    print(f"{'microseconds':16}{'first':>10}{'fake':>10}{'remembered':>12}")
    sums = [0.0, 0.0, 0.0]
    for name, (operation, shapes) in OPERATIONS.items():
        fake = on_fakes(operation, [torch.empty(shape) for shape in shapes])
        empty = [ValuelessTensor.like(shape, torch.float32, CPU) for shape in shapes]
        first = microseconds(fake, 1)
        later = min(microseconds(fake, CALLS) for _ in range(ROUNDS))
        again = min(microseconds(lambda: operation(*empty), CALLS) for _ in range(ROUNDS))  # noqa: B023
        sums = [a + b for a, b in zip(sums, (first, later, again), strict=True)]
        print(f"{name:16}{first:>10.0f}{later:>10.0f}{again:>12.0f}")
    print(
        f"{'mean':16}" + "{:>10.0f}{:>10.0f}{:>12.0f}".format(*(s / len(OPERATIONS) for s in sums))
    )
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=WIDTH, n_head=HEADS, vocab_size=1000))
    inputs = {"input_ids": torch.zeros(LOOK_ROWS, LOOK_TOKENS, dtype=torch.long)}
    for when in ("first", "later"):
        started = time.thread_time()
        trace = trace_model(model, (), inputs)
        taken = time.thread_time() - started
        count = len(trace.operations)
        print(f"a trace at GPT-2, {when}: {count} operations, {taken * 1e3:.0f} ms, ", end="")
        print(f"{taken / count * 1e6:.0f} us each")


# --- megatron ---


RANKS, MEGATRON_TOKENS = 2, 2048
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
SIZES: dict[str, dict[str, int]] = {
    "7b-block": {**LLAMA_7B, "num_hidden_layers": 1},
    "7b-plan": {**LLAMA_7B, "num_hidden_layers": 32},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


def measured(name: str) -> dict[str, Any]:
    """Prepare one model on this rank; return parameters, seconds and bytes."""
    torch.set_num_threads(1)
    accelerator = Accelerator(strategy={"name": "megatron", "tp": RANKS}, cpu=True)
    planned = name.endswith("plan")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[name])).to(torch.bfloat16)
    if not planned:
        model = in_memory(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.arange(4 * MEGATRON_TOKENS).view(4, MEGATRON_TOKENS) % 32000
    loader = DataLoader(TensorDataset(tokens, tokens), 2, collate_fn=as_text)
    forget_peak()
    before = resident("VmRSS")
    started = time.perf_counter()
    if planned:
        CellLayout.of(MegatronConfig(tp=RANKS), model, accelerator.run)
    else:
        accelerator.prepare(model, loader)
    seconds = time.perf_counter() - started
    return {"parameters": count, "seconds": seconds, "bytes": resident("VmHWM") - before}


def in_memory(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model with zeros, which make no difference to a plan."""
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model


def as_text(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """Return rows as a script for a language model has them."""
    tokens, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def on_ranks(name: str) -> list[dict[str, Any]]:
    """Measure on all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(RANKS):
        given = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        command = [sys.executable, __file__, "megatron", "--rank", name]
        environment = {**os.environ, **{key: str(value) for key, value in given.items()}}
        children.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]


def megatron_main() -> None:
    """Times ``prepare()`` of large decoders over two tensor-parallel ranks, and its memory.

    ::

        python benchmarks/host_time.py megatron
        python benchmarks/host_time.py megatron --only 7b-block

    The loader has rows of 2048 tokens, and the model is looked at with two of them. ``7b-block`` is
    one block of Llama 7B, embeddings and head; ``1b`` is a whole model of 1.1 billion parameters;
    both have bf16 weights, and both ranks hold the whole model before ``prepare()``, as a script
    that builds it does. ``7b-plan`` is all of Llama 7B on the meta device, of which only the plan
    is made. Times are wall times of the slower rank; memory is the peak of resident memory over the
    model itself.
    """
    parser = argparse.ArgumentParser(description=str(megatron_main.__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(measured(arguments.rank)), flush=True)
        return
    for name in arguments.only:
        found = on_ranks(name)
        seconds, memory = (max(rank[key] for rank in found) for key in ("seconds", "bytes"))
        billions = found[0]["parameters"] / 1e9
        print(f"{name}: {billions:.2f} billion parameters, {seconds:.1f} s, ", end="")
        print(f"{memory / 2**20:.0f} MiB over the model")


if __name__ == "__main__":
    run_program(
        {
            "facade": facade_main,
            "recording": recording_main,
            "policies": policies_main,
            "look": look_main,
            "megatron": megatron_main,
        }
    )
