"""Measures a training step on a GPU: strategies beside a bare loop, DDP, FSDP2 and Accelerate.

::

    python benchmarks/gpu.py --minutes 8 --out build/gpu
    python benchmarks/gpu.py --only A,B/zero3 --out build/gpu
    python benchmarks/gpu.py --resume --out build/gpu          # what is missing there
    python benchmarks/gpu.py --pairs 20                        # compile: blocks, here and now
    drivetrain launch --nproc-per-node 2 benchmarks/gpu.py --pairs 20

=== ================================================================================================
row what
=== ================================================================================================
A   1.3 B parameters, 4 x 2048 tokens: the step of each system against the bare loop's
B   0.2 B, 1 x 1024 tokens, bound by the host: the same, with kernels and host time of a step
C   compiled blocks, 1.3 B with 8 x 2048 tokens and 1.9 B with 6 x 2048: MFU
D   compiled blocks under each strategy, the shape of A: speed-up, and the same loss
E   products in fp8 (those of torchao's own conversion, too), compiled blocks, 2.7 B parameters
F   a vocabulary of 152,000, 1.2 B parameters: the loss in pieces against the loss of logits
G   4.2 B and 8.0 B parameters, blocks recomputed, the state of AdamW in host memory (of 8.0 B three
    quarters of it): tokens and operations per second, and bytes of the host
H   the largest model whose promise fits into both memories: the peak against the promise
I   the longest sequence: 1.3 B, blocks recomputed from host memory, the loss in pieces
J   a checkpoint of 1.3 B that the loop does not wait for: seconds that it costs, and a resume
K   two ranks on one card over NCCL, 0.2 B: bytes between steps against ``cost()``, the peak, the
    collectives of a step, and how much of their time lies beside compute
P   ``drivetrain hardware measure``; with its prices the time that ``drivetrain plan`` predicts for
    ``fsdp bf16`` of A, over the measured one
=== ================================================================================================

Each case (a row, a system) has processes of its own, with a time limit; a case that fails costs
only itself. The processes of the next case load their modules while a case runs, and touch the
device after it. Results are written as they come, to ``OUT/results.jsonl`` and ``OUT/table.md``.
Without a GPU the same program runs every case with a tiny model.

A model is a Llama shape (rotary positions, RMSNorm, gated MLP, causal attention of torch) that
returns its loss. All systems run forward under autocast to bf16 over fp32 parameters, clip to norm
1 and step by fused AdamW; those named ``bf16`` read parameters in bf16 over fp32 masters, and those
named ``early`` do not clip: their updates begin in backward (``offload.in_backward``). The time
of a step is the median over steps between two events of the device. ``host`` is the time until the
calls of a step have returned, with the device idle before. MFU is

    operations of a step / (time of a step x published peak of the device in bf16)

also where products are in fp8, of which the catalog has no peaks,
where a token costs 6 operations for each weight of a product (the embedding is none), and
attention 12 x layers x width x tokens of the sequence (``full``), half of it for causal attention
(``causal``), in forward and backward together.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.hardware.description import published_peak
from drivetrain.losses import linear_cross_entropy

OURS = ("ddp", "zero1", "zero2", "zero3", "fsdp")
LOW = ("zero3 bf16", "fsdp bf16")


@dataclass(frozen=True)
class Shape:
    """A decoder and its batch."""

    layers: int
    dim: int
    inner: int
    batch: int
    seq: int
    vocab: int = 32_000
    head: int = 128

    @property
    def options(self) -> SimpleNamespace:
        return SimpleNamespace(**vars(self), heads=self.dim // self.head)

    def operations(self, *, causal: bool) -> int:
        """Return the operations of a step."""
        weights = self.layers * (4 * self.dim**2 + 3 * self.dim * self.inner)
        weights += self.dim * self.vocab
        attention = 12 * self.layers * self.dim * self.seq // (2 if causal else 1)
        return self.batch * self.seq * (6 * weights + attention)


TINY = Shape(layers=2, dim=32, inner=48, batch=1, seq=16, vocab=64, head=16)


@dataclass(frozen=True)
class Row:
    """Cases of one shape, by system."""

    name: str
    shape: Shape
    systems: tuple[str, ...]
    steps: int = 12
    compiled: bool = False
    ranks: int = 1
    traced: bool = False
    limit_s: int = 60
    warm: int = 5
    ratio: float = 1.0
    recompute: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """Options of drivetrain for this row."""
        mode, _, keep = self.recompute.partition(" ")
        return {"recompute": {"mode": mode} | ({"keep": keep} if keep else {})} if mode else {}


SMALL = Shape(layers=12, dim=1024, inner=2816, batch=1, seq=1024)
MIDDLE = Shape(layers=24, dim=2048, inner=5504, batch=4, seq=2048)
ROWS = (
    Row("A", MIDDLE, ("bare", *OURS, "fsdp2", "accelerate", "torch ddp", *LOW, "fsdp2 bf16")),
    Row("B", SMALL, ("bare", *OURS, "fsdp2", "accelerate", "torch ddp"), steps=50, traced=True),
    Row(
        "C 1.3B",
        Shape(layers=24, dim=2048, inner=5504, batch=8, seq=2048),
        ("bare", "ddp", "fsdp bf16", "fsdp2 bf16"),
        compiled=True,
        limit_s=90,
    ),
    Row("D", MIDDLE, ("bare", "ddp", "zero2", "zero3", "fsdp", "fsdp2"), compiled=True, limit_s=90),
    Row(
        "E",
        Shape(layers=32, dim=2560, inner=6912, batch=4, seq=2048),
        ("bare", "bare fp8", "ddp fp8", "fsdp bf16", "fsdp bf16 fp8", "fsdp bf16 rowwise fp8"),
        compiled=True,
        limit_s=100,
    ),
    Row(
        "F",
        Shape(layers=12, dim=2048, inner=5504, batch=4, seq=2048, vocab=152_000),
        ("bare", "bare chunked", "fsdp bf16", "fsdp bf16 chunked"),
    ),
    Row(
        "G 4B",
        Shape(layers=32, dim=3072, inner=9728, batch=16, seq=2048),
        ("zero2 bf16 offload", "zero2 bf16 offload early", "fsdp2 bf16 offload"),
        steps=3,
        warm=1,
        recompute="full",
        limit_s=150,
    ),
    Row(
        "K",
        Shape(layers=12, dim=1024, inner=2816, batch=1, seq=512),
        (*OURS, "fsdp2", "torch ddp"),
        steps=4,
        ranks=2,
        traced=True,
        limit_s=80,
    ),
    Row(
        "C 1.9B",
        Shape(layers=22, dim=2560, inner=6912, batch=6, seq=2048),
        ("bare", "ddp", "fsdp bf16", "fsdp2 bf16"),
        compiled=True,
        limit_s=90,
    ),
    Row(
        "G 8B",
        Shape(layers=32, dim=4096, inner=14336, batch=16, seq=2048),
        ("zero2 bf16 offload",),
        steps=3,
        warm=1,
        ratio=0.75,
        recompute="full",
        limit_s=200,
    ),
    Row("J", MIDDLE, ("zero1 save", "fsdp bf16 save"), warm=2, limit_s=120),
    Row("P", MIDDLE, ("plan",), limit_s=200),
    *(
        Row(
            f"I {tokens}",
            Shape(layers=24, dim=2048, inner=5504, batch=1, seq=tokens),
            ("ddp chunked",),
            steps=1,
            warm=1,
            recompute="full cpu",
            limit_s=150,
        )
        for tokens in (65_536, 131_072, 262_144)
    ),
    Row(
        "H",
        Shape(layers=0, dim=5120, inner=17_920, batch=1, seq=2048),
        ("zero2 bf16 offload",),
        steps=1,
        warm=1,
        recompute="full",
        limit_s=300,
    ),
    Row("A more", MIDDLE, ("accelerate fsdp2",)),
)
"""In the order of importance."""


def chosen(only: str) -> list[tuple[Row, str]]:
    """Return the cases that ``--only`` names: rows by the first letter, or row/system."""
    wanted = [each.strip() for each in only.split(",") if each.strip()]
    cases = [(row, system) for row in ROWS for system in row.systems]
    known = {
        name for row, system in cases for name in (row.name[0], row.name, f"{row.name}/{system}")
    }
    if unknown := [each for each in wanted if each not in known]:
        sys.exit(
            f"gpu.py: known are {sorted(known)}; expected rows or row/system in --only, found "
            f"{unknown}"
        )
    return [
        (row, system)
        for row, system in cases
        if not wanted or {row.name[0], row.name, f"{row.name}/{system}"} & set(wanted)
    ]


# --- a case, in its own process ---


class LossHead(nn.Linear):
    """A head that computes the loss in pieces where its matrix is: no logits exist whole."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.weight, targets)


class LossDecoder(peers.Decoder):
    """A decoder with its cross entropy, of logits or in pieces."""

    def __init__(self, options: SimpleNamespace, *, chunked: bool) -> None:
        super().__init__(options)
        if chunked:
            self.head.__class__ = LossHead

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if not isinstance(self.head, LossHead):
            return peers.loss_of(super().forward(tokens), targets)
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), targets)


@dataclass
class Trained:
    """A step of a system; the model, its optimizer and the Accelerator where it is drivetrain's."""

    step: Callable[..., Any]
    spec: ModelSpec
    model: Any = None
    optimizer: Any = None
    accelerator: Any = None

    @property
    def promise(self) -> dict[str, int]:
        """The bytes that drivetrain says it holds between steps."""
        if self.accelerator is None:
            return {}
        strategy = self.accelerator.strategy_of(self.model)
        promised = type(strategy).cost(strategy.config, self.spec, strategy.run)
        parameters = sum(each.numel for each in self.spec.parameters)
        return {"promised_bytes": promised.total_held, "parameters": parameters}


def adamw(module: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)


def trained_by(row: Row, system: str, make: Callable[[], Any], device: Any) -> Trained:
    """Return how the system trains the model that is made."""
    offload = "offload" in system.split()
    if system.partition(" ")[0] in OURS:
        low = {"param": "bf16", "reduce": "fp32"} if "bf16" in system else {}
        recipe = {"fp8": "rowwise"} if "rowwise" in system else {}
        strategy: dict[str, Any] = {"name": system.partition(" ")[0]}
        early = system.endswith("early")
        if offload:
            strategy["offload"] = {"optimizer": "cpu", "ratio": row.ratio, "in_backward": early}
        accelerator: Any = Accelerator(
            strategy=strategy,
            mixed_precision="fp8" if system.endswith("fp8") else "bf16",
            cpu=device.type == "cpu",
            config={"dtypes": low | recipe} | row.config,
        )
        with accelerator.building() if offload else contextlib.nullcontext():
            model = make()
        spec = ModelSpec.of(model)
        prepared = accelerator.prepare(model, adamw(model, fused=not offload))
        step = with_accelerator(accelerator, *prepared, clips=not early)
        return Trained(step, spec, *prepared, accelerator)
    model = make()
    spec = ModelSpec.of(model)
    if row.recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if system.startswith("accelerate"):
        import accelerate

        plugins: dict[str, Any] = {}
        if system == "accelerate fsdp2":
            plugins["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
            )
        theirs = accelerate.Accelerator(mixed_precision="bf16", cpu=device.type == "cpu", **plugins)
        return Trained(with_accelerator(theirs, *theirs.prepare(model, adamw(model))), spec)
    wrapped = bare(system, model)
    return Trained(plain(wrapped, adamw(model), device), spec)


def bare(system: str, model: Any) -> Any:
    """Return the model, wrapped as a user of torch would."""
    if system == "bare fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=not torch.cuda.is_available())
        for block in model.blocks:
            convert_to_float8_training(block, config=config)
    if system == "torch ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if system.startswith("fsdp2"):
        options: dict[str, Any] = {}
        if "bf16" in system:
            low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options["mp_policy"] = low
        if system.endswith("offload") and torch.cuda.is_available():
            options["offload_policy"] = CPUOffloadPolicy()
        for module in (model.token, *model.blocks):
            fully_shard(module, **options)
        fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
        fully_shard(model, **options)
    return model


def plain(model: Any, optimizer: Any, device: Any) -> Callable[..., Any]:
    def step(*batch: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_accelerator(
    accelerator: Any, model: Any, optimizer: Any, *, clips: bool = True
) -> Callable[..., Any]:
    def step(*batch: Any) -> Any:
        loss = model(*batch)
        accelerator.backward(loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measured(row: Row, system: str) -> dict[str, Any]:
    """Train the row's model by the system; return figures of a step."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    if not gpu:
        torch.set_num_threads(1)
    shape = (row.shape if row.shape.layers else largest(row.shape)) if gpu else TINY
    if system.startswith(("torch ddp", "fsdp2", "accelerate fsdp2")):
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")

    def make() -> nn.Module:
        torch.manual_seed(0)
        with device:
            model = LossDecoder(shape.options, chunked="chunked" in system)
        if row.compiled:
            for block in model.blocks:
                block.compile()
        return model

    trained, batches = trained_by(row, system, make, device), batches_of(shape, device)

    def step() -> Any:
        return trained.step(*next(batches))

    clock = Clock(gpu)
    found = timed(step, row.steps if gpu else 2, row.warm, clock)
    found["host_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if gpu:
        found["device"] = torch.cuda.get_device_name()
        found |= utilisation(shape, found["step_s"], found["device"])
    found |= trained.promise
    if row.traced:
        found |= traced(step, clock)
    if system.endswith("save"):
        found |= saved(trained, step, clock)
    return found


def batches_of(shape: Shape, device: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield words and the words that follow them, again and again."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    words = torch.randint(shape.vocab, (8, shape.batch, shape.seq + 1), generator=generator)
    return itertools.cycle([(each[:, :-1], each[:, 1:]) for each in words.to(device)])


def largest(shape: Shape) -> Shape:
    """Return the deepest shape whose state fits, with the optimizer's in host memory.

    In bf16 a parameter takes 2 bytes of the device and 14 of the host (docs/planning.md). A tenth
    of the device is left for what a step needs, and a fifth of the free memory of the host.
    """
    device = 0.9 * torch.cuda.mem_get_info()[0]
    host = 0.8 * psutil.virtual_memory().available
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            host = min(host, 0.8 * int(Path(limit).read_text(encoding="ascii")))
    layer = 4 * shape.dim**2 + 3 * shape.dim * shape.inner
    return replace(shape, layers=int(min(device / 2, host / 14) / layer))


def planned(shape: Shape) -> dict[str, Any]:
    """Measure the hardware, and return the step that the planner predicts with it."""
    gpu = torch.cuda.is_available()
    shape = shape if gpu else TINY
    command = [sys.executable, "-m", "drivetrain_launch"]
    with tempfile.TemporaryDirectory() as folder:
        prices = str(Path(folder) / "hardware.yaml")
        measure = ["hardware", "measure", "--nproc-per-node", "1", *([] if gpu else ["--cpu"])]
        subprocess.run([*command, *measure, prices], check=True, stdout=subprocess.DEVNULL)
        model = (
            f"layers={shape.layers},hidden={shape.dim},heads={shape.options.heads},seq={shape.seq},"
            f"vocab={shape.vocab},ffn={shape.inner},gated=true,tied=false"
        )
        layout = f"dp=1,micro_batch={shape.batch},data_parallel=fsdp,precision=bf16"
        options = ["--gpt", model, "--batch", str(shape.batch), "--layout", layout, "--json"]
        plan = subprocess.run(
            [*command, "plan", *options, "--hardware", prices, "--nproc-per-node", "1"],
            check=True,
            capture_output=True,
            text=True,
        )
        predicted, described = json.loads(plan.stdout), Path(prices).read_text(encoding="utf-8")
    return {
        "step_s": predicted["step_seconds"],
        "peak_bytes": predicted["peak_bytes"],
        "host_s": 0.0,
        "loss": math.nan,
        "prices": described,
    }


def saved(trained: Trained, step: Callable[[], Any], clock: "Clock") -> dict[str, Any]:
    """Save beside steps; return what that costs the loop, and what is read again."""

    def seconds(call: Callable[[], object]) -> float:
        clock.wait()
        begin = time.perf_counter()
        call()
        clock.wait()
        return time.perf_counter() - begin

    def weights() -> dict[str, Tensor]:
        found = trained.accelerator.get_state_dict(trained.model)
        return {name: values.clone() for name, values in found.items()}

    alone, before = statistics.median(seconds(step) for _ in range(3)), weights()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        waited = seconds(lambda: trained.accelerator.save_state(path, wait=False))
        waited += sum(seconds(step) - alone for _ in range(3))
        writing = seconds(trained.accelerator.wait_for_checkpoint)
        nbytes = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        trained.accelerator.load_state(path)
    return {
        "save_waited_s": waited,
        "save_written_s": waited + 3 * alone + writing,
        "save_bytes": nbytes,
        "resumed_exactly": all(torch.equal(before[name], w) for name, w in weights().items()),
    }


def timed(step: Callable[[], Any], steps: int, warm: int, clock: "Clock") -> dict[str, Any]:
    """Take steps; return their time and that of the host, the last loss and the bytes in use."""
    for _ in range(warm):
        step()
        clock.wait()
    found: dict[str, Any] = {"torch": torch.__version__}
    if clock.gpu:
        found["held_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    found["step_s"] = statistics.median(clock.between(step for _ in range(steps)))
    host = []
    for _ in range(warm):
        clock.wait()
        begin = time.perf_counter()
        loss = step()
        host.append(time.perf_counter() - begin)
    found |= {"host_s": statistics.median(host), "loss": float(loss)}
    if clock.gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


class Clock:
    """Times of steps: by events of the GPU, or by the processor's clock."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def between(self, steps: Iterable[Callable[[], Any]]) -> list[float]:
        """Return the seconds of each step; steps follow each other without a wait."""
        marks = [self._mark()]
        for step in steps:
            step()
            marks.append(self._mark())
        self.wait()
        if self.gpu:
            pairs: Any = itertools.pairwise(marks)
            return [torch.cuda.Event.elapsed_time(a, b) / 1e3 for a, b in pairs]
        return [b - a for a, b in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def utilisation(shape: Shape, seconds: float, device: str) -> dict[str, float]:
    """Return tokens per second, and MFU where the peak of the device is published."""
    found = {"tokens_per_s": shape.batch * shape.seq / seconds}
    peak = published_peak(device, torch.bfloat16)
    if peak is not None:
        for name in ("causal", "full"):
            rate = shape.operations(causal=name == "causal") / seconds
            found[f"mfu_{name}"] = rate / peak.operations_per_second
    return found


def traced(step: Callable[[], object], clock: "Clock") -> dict[str, Any]:
    """Return the kernels and collectives of a step, and the communication beside compute."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.gpu else [])
    with profile(activities=kinds) as profiler:
        step()
        clock.wait()
    collectives: Counter[str] = Counter()
    kernels: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiler.events():
        if event.device_type == DeviceType.CPU:
            if event.name.startswith("c10d::"):
                collectives[event.name.removeprefix("c10d::")] += 1
        elif (
            not event.name.startswith(("Memcpy", "Memset", "nccl:"))
            and not event.is_user_annotation
        ):
            span = (event.time_range.start, event.time_range.end)
            kernels["nccl" in event.name.lower()].append(span)
            if "nccl" in event.name.lower():
                collectives[event.name.partition("(")[0]] += 1
    found: dict[str, Any] = {"collectives": dict(sorted(collectives.items()))}
    if clock.gpu:
        found["kernels"] = sum(map(len, kernels.values()))
        communication = united(kernels[True])
        total = sum(end - start for start, end in communication)
        if total:
            beside = overlap(communication, united(kernels[False]))
            found |= {"communication_s": total / 1e6, "beside_compute": beside / total}
    return found


def united(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint spans in order that cover what the given ones cover."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def overlap(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Return the time that both cover; each is disjoint and in order."""
    total, here, there = 0.0, 0, 0
    while here < len(left) and there < len(right):
        start = max(left[here][0], right[there][0])
        end = min(left[here][1], right[there][1])
        total += max(0.0, end - start)
        if left[here][1] < right[there][1]:
            here += 1
        else:
            there += 1
    return total


def work(name: str) -> None:
    """Be a process of a case, with its modules loaded: wait for a line, measure, print."""
    ((row, system),) = chosen(name)
    if sys.stdin.readline():
        found = planned(row.shape) if system == "plan" else measured(row, system)
        print("\n" + json.dumps(found), flush=True)
        os._exit(0)  # the groups of a process that ends are not worth waiting for


# --- compile: blocks, in one process ---

PAIRED = Shape(layers=4, dim=256, inner=704, batch=2, seq=128, vocab=1000, head=64)


def paired(pairs: int) -> None:
    """Print the time of a compiled step against the eager one before it, by strategy.

    First comes a loop of torch alone whose blocks are compiled: what there is to gain. On more
    ranks than one (``drivetrain launch``) each runs that loop, and ``tp`` comes with the others.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = torch.randint(PAIRED.vocab, (PAIRED.batch, PAIRED.seq + 1))
    print("| strategy | eager, ms | compiled, ms | compiled / eager |\n|---|---|---|---|")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    divided = [{"name": "megatron", "tp": ranks}] if ranks > 1 else []
    for strategy in ("bare", *OURS, *divided):
        steps = []
        for mode in ("none", "blocks"):
            torch.manual_seed(0)
            model: Any = LossDecoder(PAIRED.options, chunked=False)
            model.example_inputs = (words[:, :-1], words[:, 1:])
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            if strategy == "bare":
                for block in model.blocks if mode == "blocks" else ():
                    block.compile()
                step = plain(model, optimizer, torch.device("cpu"))
            else:
                accelerator = Accelerator(
                    strategy=strategy, mixed_precision="bf16", cpu=True, config={"compile": mode}
                )
                step = with_accelerator(accelerator, *accelerator.prepare(model, optimizer))
            steps.append(lambda step=step: step(words[:, :-1], words[:, 1:]))
        times = [[seconds(step) for step in steps] for _ in range(pairs + 2)][2:]
        eager, blocks = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        ratio = statistics.median(after / before for before, after in times)
        name = strategy if isinstance(strategy, str) else "tp"
        if os.environ.get("RANK", "0") == "0":
            print(f"| `{name}` | {eager:.1f} | {blocks:.1f} | {ratio:.3f} |", flush=True)


def seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


# --- the program ---


class Case:
    """The processes of a row and system."""

    def __init__(self, row: Row, system: str, logs: Path) -> None:
        self.row, self.system = row, system
        self.name = f"{row.name}/{system}"
        self._logs = [
            logs / f"{self.name.replace('/', '-').replace(' ', '_')}.{rank}"
            for rank in range(row.ranks)
        ]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        command = [sys.executable, str(Path(__file__)), "--worker", self.name]
        self._started = []
        for rank, log in enumerate(self._logs):
            env = os.environ | self._places(rank, port)
            with log.open("w") as stderr:
                self._started.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=-1,
                        stdout=-1,
                        stderr=stderr,
                        text=True,
                        start_new_session=True,
                    )
                )

    def _places(self, rank: int, port: int) -> dict[str, str]:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        alone = (*OURS, "bare", "accelerate", "plan")
        if self.row.ranks == 1 and self.system.partition(" ")[0] in alone:
            return (
                {}
                if self.system != "accelerate fsdp2"
                else _strings(
                    meeting
                    | {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "ACCELERATE_USE_FSDP": "true"}
                )
            )
        places = {"RANK": rank, "WORLD_SIZE": self.row.ranks, "LOCAL_RANK": 0}
        # NCCL wants a GPU for each rank of a host: each rank says that it is on a host of its own.
        hosts = {"LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "NCCL_HOSTID": f"host-{rank}"}
        return _strings(
            meeting | places | hosts | {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
        )

    def result(self, limit_s: float) -> dict[str, Any]:
        """Let the processes measure; return rank 0's figures, or the error."""
        end = time.monotonic() + limit_s
        for process in self._started:
            with contextlib.suppress(BrokenPipeError):  # it has ended with an error
                process.stdin.write("go\n")
                process.stdin.flush()
        try:
            printed = [
                p.communicate(timeout=max(0.1, end - time.monotonic()))[0] for p in self._started
            ]
        except subprocess.TimeoutExpired:
            return {"error": f"more than {limit_s:.0f} s"}
        finally:
            self.close()
        if any(process.returncode for process in self._started):
            lines = [
                line for log in self._logs for line in log.read_text().splitlines() if line.strip()
            ]
            return {"error": " | ".join(lines[-3:])[-800:]}
        return json.loads(printed[0].splitlines()[-1])

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):  # with the commands that it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # what it did not read
                    pipe.close()


def _strings(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as Markdown, each row's times against its bare loop's."""
    lines = []
    for row in ROWS:
        cases = {s: results[f"{row.name}/{s}"] for s in row.systems if f"{row.name}/{s}" in results}
        if not cases:
            continue
        against = next((cases[s]["step_s"] for s in cases if "step_s" in cases[s]), None)
        base = results.get(f"{'A' if row.name == 'A more' else row.name}/bare", {}).get(
            "step_s", against
        )
        if row.name == "P":  # against what was measured: the error of the prediction
            base = results.get("A/fsdp bf16", {}).get("step_s")
        lines += ["", f"Row {row.name}, {dict(vars(row.shape))}", ""]
        heads = [
            "system",
            "ms",
            "x first",
            "host ms",
            "tokens/s",
            "MFU of bf16, causal",
            "full",
            "peak GB",
            "held/promised",
            "loss",
            "host GB",
            "saved",
            "kernels",
            "beside compute",
            "collectives",
        ]
        lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for system, case in cases.items():
            if "error" in case:
                lines.append(f"| {system} | failed: {case['error']} |" + " |" * (len(heads) - 2))
                continue
            ratio = case["step_s"] / base if base else None
            held = case.get("held_bytes"), case.get("promised_bytes")
            cells = [
                f"{1e3 * case['step_s']:.2f}",
                _number(ratio, 3),
                f"{1e3 * case['host_s']:.2f}",
                _number(case.get("tokens_per_s"), 0),
                _number(case.get("mfu_causal"), 3),
                _number(case.get("mfu_full"), 3),
                _number(case.get("peak_bytes", 0) / 1e9, 2),
                _number(held[0] / held[1], 3) if all(held) else "",
                f"{case['loss']:.5f}",
                _number(case.get("host_bytes", 0) / 1e9, 1),
                _saved(case),
                str(case.get("kernels", "")),
                _number(case.get("beside_compute"), 3),
                ", ".join(f"{k} {v}" for k, v in case.get("collectives", {}).items()),
            ]
            lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _saved(case: dict[str, Any]) -> str:
    if "save_bytes" not in case:
        return ""
    equal = "equal" if case["resumed_exactly"] else "DIFFERENT"
    return (
        f"{case['save_bytes'] / 1e9:.2f} GB, waited {case['save_waited_s']:.2f} s, written after "
        f"{case['save_written_s']:.2f} s, read again {equal}"
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="no case starts later")
    parser.add_argument("--only", default="", help="rows (A) or cases (A/zero3), with commas")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of results")
    parser.add_argument("--resume", action="store_true", help="leave out what OUT has results of")
    parser.add_argument(
        "--pairs", type=int, default=0, help="so many steps eager and with compile: blocks, on CPU"
    )
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pairs:
        paired(options.pairs)
        return
    if options.worker:
        work(options.worker)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "results.jsonl"
    results: dict[str, dict[str, Any]] = {}
    if options.resume and record.exists():
        results = {
            each["case"]: each
            for each in map(json.loads, record.read_text().splitlines())
            if "error" not in each
        }
    end = time.monotonic() + 60 * options.minutes
    left = [
        (row, system)
        for row, system in chosen(options.only)
        if f"{row.name}/{system}" not in results
    ]
    coming = Case(*left[0], options.out) if left else None
    while coming is not None and time.monotonic() < end:
        case, left = coming, left[1:]
        coming = Case(*left[0], options.out) if left else None
        found = {"case": case.name, **case.result(min(case.row.limit_s, end - time.monotonic()))}
        results[case.name] = found
        with record.open("a") as out:
            out.write(json.dumps(found) + "\n")
        (options.out / "table.md").write_text(table(results))
        seconds = found.get("step_s")
        print(f"{case.name:24} {found.get('error') or f'{1e3 * seconds:9.2f} ms'}", flush=True)
    if coming is not None:
        coming.close()
    print(table(results))


if __name__ == "__main__":
    main()
