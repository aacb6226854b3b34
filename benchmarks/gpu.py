"""Measures a training step on a GPU: strategies beside a bare loop, DDP, FSDP2 and Accelerate.

::

    python benchmarks/gpu.py --minutes 8 --out build/gpu
    python benchmarks/gpu.py --only A,B/zero3 --out build/gpu
    python benchmarks/gpu.py --resume --out build/gpu          # what is missing there

=== ================================================================================================
row what
=== ================================================================================================
A   1.3 B parameters, 4 x 2048 tokens: the step of each system against the bare loop's
B   0.2 B, 1 x 1024 tokens, bound by the host: the same, with kernels and host time of a step
C   compiled blocks, 1.3 B with 8 x 2048 tokens and 1.9 B with 6 x 2048: MFU
D   compiled blocks under each strategy, the shape of A: speed-up, and the same loss
F   a vocabulary of 152,000, 1.2 B parameters: the loss in pieces against the loss of logits
K   two ranks on one card over NCCL, 0.2 B: bytes between steps against ``cost()``, the peak, the
    collectives of a step, and how much of their time lies beside compute
=== ================================================================================================

Each case (a row, a system) has processes of its own, with a time limit; a case that fails costs
only itself. The processes of the next case load their modules while a case runs, and touch the
device after it. Results are written as they come, to ``OUT/results.jsonl`` and ``OUT/table.md``.
Without a GPU the same program runs every case with a tiny model.

A model is a Llama shape (rotary positions, RMSNorm, gated MLP, causal attention of torch) that
returns its loss. All systems run forward under autocast to bf16 over fp32 parameters, clip to norm
1 and step by fused AdamW; those named ``bf16`` read parameters in bf16 over fp32 masters. The time
of a step is the median over steps between two events of the device. ``host`` is the time until the
calls of a step have returned, with the device idle before. MFU is

    operations of a step / (time of a step x published peak of the device)

where a token costs 6 operations for each weight of a product (the embedding is none), and
attention 12 x layers x width x tokens of the sequence (``full``), half of it for causal attention
(``causal``), in forward and backward together.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

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
        "F",
        Shape(layers=12, dim=2048, inner=5504, batch=4, seq=2048, vocab=152_000),
        ("bare", "bare chunked", "fsdp bf16", "fsdp bf16 chunked"),
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
            f"gpu.py: expected rows or row/system in --only, found {unknown}; known are "
            f"{sorted(known)}"
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


def trained_by(system: str, model: Any, device: Any) -> tuple[Callable[..., Any], Any]:
    """Return a step of the system, and the strategy where it is drivetrain's."""

    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    if system.partition(" ")[0] in OURS:
        dtypes = {"dtypes": {"param": "bf16", "reduce": "fp32"}} if "bf16" in system else {}
        accelerator: Any = Accelerator(
            strategy=system.partition(" ")[0],
            mixed_precision="bf16",
            cpu=device.type == "cpu",
            config=dtypes,
        )
        prepared = accelerator.prepare(model, adamw(model))
        return with_accelerator(accelerator, *prepared), accelerator.strategy_of(prepared[0])
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
        return with_accelerator(theirs, *theirs.prepare(model, adamw(model))), None
    wrapped = bare(system, model)
    return plain(wrapped, adamw(model), device), None


def bare(system: str, model: Any) -> Any:
    """Return the model, wrapped as a user of torch would."""
    if system == "torch ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if system.startswith("fsdp2"):
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": low} if system.endswith("bf16") else {}
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


def with_accelerator(accelerator: Any, model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(*batch: Any) -> Any:
        loss = model(*batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measured(row: Row, system: str) -> dict[str, Any]:
    """Train the row's model by the system; return figures of a step."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    shape = row.shape if gpu else TINY
    if not gpu:
        torch.set_num_threads(1)
    if system in {"torch ddp", "fsdp2", "fsdp2 bf16", "accelerate fsdp2"}:
        dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    with device:
        model = LossDecoder(shape.options, chunked=system.endswith("chunked"))
    if row.compiled:
        for block in model.blocks:
            block.compile()
    spec = ModelSpec.of(model)
    step, strategy = trained_by(system, model, device)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    words = torch.randint(shape.vocab, (8, shape.batch, shape.seq + 1), generator=generator)
    batches = itertools.cycle([(each[:, :-1], each[:, 1:]) for each in words.to(device)])
    found = timed(lambda: step(*next(batches)), row.steps if gpu else 2, gpu=gpu)
    if gpu:
        found["device"] = torch.cuda.get_device_name()
        found |= utilisation(shape, found["step_s"], found["device"])
    if strategy is not None:
        promised = type(strategy).cost(strategy.config, spec, strategy.run)
        found["promised_bytes"] = promised.total_held
    if row.traced:
        found |= traced(lambda: step(*next(batches)), gpu=gpu)
    return found


def timed(step: Callable[[], Any], steps: int, *, gpu: bool) -> dict[str, Any]:
    """Take steps; return their time and that of the host, the last loss and the bytes in use."""
    clock = Clock(gpu)
    for _ in range(5):
        step()
        clock.wait()
    found: dict[str, Any] = {"torch": torch.__version__}
    if gpu:
        found["held_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    found["step_s"] = statistics.median(clock.between(step for _ in range(steps)))
    host = []
    for _ in range(5):
        clock.wait()
        begin = time.perf_counter()
        loss = step()
        host.append(time.perf_counter() - begin)
    found |= {"host_s": statistics.median(host), "loss": float(loss)}
    if gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


class Clock:
    """Times of steps: by events of the GPU, or by the processor's clock."""

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu

    def wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def between(self, steps: Iterable[Callable[[], Any]]) -> list[float]:
        """Return the seconds of each step; steps follow each other without a wait."""
        marks = [self._mark()]
        for step in steps:
            step()
            marks.append(self._mark())
        self.wait()
        if self._gpu:
            pairs: Any = itertools.pairwise(marks)
            return [torch.cuda.Event.elapsed_time(a, b) / 1e3 for a, b in pairs]
        return [b - a for a, b in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        if not self._gpu:
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


def traced(step: Callable[[], object], *, gpu: bool) -> dict[str, Any]:
    """Return the kernels and collectives of a step, and the communication beside compute."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if gpu else [])
    with profile(activities=kinds) as profiler:
        step()
        Clock(gpu).wait()
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
    if gpu:
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
        print("\n" + json.dumps(measured(row, system)), flush=True)
        os._exit(0)  # the groups of a process that ends are not worth waiting for


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
                        command, env=env, stdin=-1, stdout=-1, stderr=stderr, text=True
                    )
                )

    def _places(self, rank: int, port: int) -> dict[str, str]:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if self.row.ranks == 1 and self.system.partition(" ")[0] in (*OURS, "bare", "accelerate"):
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
            process.kill()
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
        lines += ["", f"Row {row.name}, {dict(vars(row.shape))}", ""]
        heads = [
            "system",
            "ms",
            "x first",
            "host ms",
            "tokens/s",
            "MFU causal",
            "full",
            "peak GB",
            "held/promised",
            "loss",
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
                str(case.get("kernels", "")),
                _number(case.get("beside_compute"), 3),
                ", ".join(f"{k} {v}" for k, v in case.get("collectives", {}).items()),
            ]
            lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="no case starts later")
    parser.add_argument("--only", default="", help="rows (A) or cases (A/zero3), with commas")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of results")
    parser.add_argument("--resume", action="store_true", help="leave out what OUT has results of")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
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
