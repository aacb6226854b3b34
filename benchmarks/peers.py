"""What the comparisons with PyTorch's own parallelism share: a decoder, and steps in turn.

Two copies of the decoder with equal weights train on the same batches in the same processes, a step
of each in turn, so what else the machine does hits both. Per side: the median of a step's time,
from a barrier to a barrier; the processor time of a rank, all threads; the bytes that a rank wrote
to its connections (``wchar`` of ``/proc/self/io``; gloo writes with system calls that count there);
the loss after the last step. Ratios are medians over neighboring steps.
"""

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[Tensor], Tensor]
WARMUP = 2
SIZES = {"layers": 12, "dim": 768, "heads": 12, "inner": 2048, "vocab": 16384, "seq": 128}
"""110 million parameters."""


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int, head: int, length: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        turns = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, head, 2) / head)
        self.register_buffer("cos", turns.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", turns.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, self.head).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return x * cos + torch.cat((-second, first), -1) * sin


class Mlp(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.dim
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, width // options.heads, options.seq)
        self.mlp = Mlp(width, options.inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Blocks between an embedding and a head; without the two, a stage of a pipeline."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocab, options.dim)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.dim)
        self.head = nn.Linear(options.dim, options.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.token is None else self.token(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both sides: with the fused kernel, unless options say otherwise."""
    kinds = [[], []]  # the fused step takes no group of plain and distributed tensors
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    options = options or {"fused": True}
    return torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=3e-4, **options)


class Sample(NamedTuple):
    """One step: seconds by the clock, seconds of the processor, bytes written, loss."""

    seconds: float
    busy: float
    sent: int
    loss: float


def written() -> int:
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise RuntimeError("no wchar in /proc/self/io")


def measured(step: Step, tokens: Tensor) -> Sample:
    dist.barrier()
    sent, start, busy = written(), time.perf_counter(), time.process_time()
    loss = step(tokens)
    dist.barrier()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return Sample(seconds, busy, written() - sent, loss.item())


def over_ranks(sides: list[list[Sample]]) -> list[list[Sample]]:
    """Return the samples with the means over ranks in place of this rank's."""
    values = torch.tensor(sides, dtype=torch.float64)
    dist.all_reduce(values)
    values /= dist.get_world_size()
    return [[Sample(*sample) for sample in side] for side in values.tolist()]


def report(sides: list[list[Sample]]) -> None:
    """Print both sides, drivetrain's first, and their ratios."""
    print("| | step | processor | sent per rank | loss |\n" + "|---" * 5 + "|")
    for name, samples in zip(("drivetrain", "torch"), sides, strict=True):
        middle = [statistics.median(values) for values in zip(*samples, strict=True)]
        print(
            f"| {name} | {1e3 * middle[0]:.0f} ms | {1e3 * middle[1]:.0f} ms | "
            f"{middle[2] / 1e6:.2f} MB | {samples[-1].loss:.6f} |"
        )
    apart = max(abs(a.loss - b.loss) for a, b in zip(*sides, strict=True))
    print(f"losses at most {apart:.1e} apart")
    for what in ("seconds", "busy"):
        ratios = [getattr(a, what) / getattr(b, what) for a, b in zip(*sides, strict=True)]
        print(
            f"{what}: drivetrain / torch {statistics.median(ratios):.3f} "
            f"[{min(ratios):.3f} .. {max(ratios):.3f}] over {len(ratios)} pairs"
        )


def in_turn(
    steps: Sequence[Step], batches: Iterator[Tensor], pairs: int, *, warmup: int = WARMUP
) -> list[list[Sample]]:
    """Step each side in turn on the same batches; return the means over ranks, by side."""
    samples: list[list[Sample]] = [[] for _ in steps]
    for index in range(warmup + pairs):
        tokens = next(batches)
        order = range(len(steps)) if index % 2 else reversed(range(len(steps)))
        for side in order:  # each goes first as often as the other
            samples[side].append(measured(steps[side], tokens))
    return over_ranks([side[warmup:] for side in samples])


def random_batches(options: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """Yield tokens, of shape (batch, seq + 1): the last of them is only predicted."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(options.vocab, (options.batch, options.seq + 1), generator=generator)


def add_sizes(parser: argparse.ArgumentParser, **sizes: int) -> None:
    """Add an option for each size of the decoder and the batch."""
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)


@contextmanager
def ranks() -> Iterator[None]:
    """Join the other ranks over gloo, with one thread each and equal random numbers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    yield
    dist.barrier()
    dist.destroy_process_group()


class LiveParameters(TorchDispatchMode):
    """Counts at every operator the bytes of storages that parameters have, had, or arrive in.

    A sharded parameter's storage stays and gives its memory back, so one that was seen once is
    watched on. FSDP2 gathers into a buffer and copies from there: it counts while it is alive.

    Args:
        model: its parameters are looked at anew each time: FSDP2 exchanges them.
        shards: what the optimizer updates.

    Attributes:
        shards: bytes of the shards.
        peak: the largest sum so far.
    """

    def __init__(self, model: nn.Module, shards: Iterable[Tensor]) -> None:
        super().__init__()
        self._model = model
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._buffers: list[tuple[StorageWeakRef, int]] = []
        for tensor in shards:
            self._watch(tensor)
        self.shards = self._bytes()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for parameter in self._model.parameters():
            self._watch(parameter)
        if func is torch.ops.c10d._allgather_base_.default:
            storage = args[0].untyped_storage()
            if storage._cdata not in self._storages:
                self._buffers.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self._bytes())
        return func(*args, **(kwargs or {}))

    def _watch(self, tensor: Tensor) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
        self._storages[storage._cdata] = storage

    def _bytes(self) -> int:
        self._buffers = [(held, size) for held, size in self._buffers if not held.expired()]
        arriving = sum(size for _, size in self._buffers)
        return arriving + sum(storage.nbytes() for storage in self._storages.values())


class _Mallinfo(ctypes.Structure):
    """The numbers of ``mallinfo2`` of the C library, in bytes."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def allocated() -> int:
    """Return the bytes that the process has got from the C library and not given back."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


class AllocatedPeak(TorchDispatchMode):
    """Looks behind every operator how much memory the process has allocated, of every kind.

    Attributes:
        peak: the most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, allocated())
        return result


def forget_peak() -> None:
    """Hand back what the C library keeps, and count the peak of resident memory from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident(key: str) -> int:
    """Return resident memory in bytes: now (``VmRSS``) or at its peak (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")
