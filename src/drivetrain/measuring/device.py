"""Measures one device: products of matrices, passes over memory, starts of kernels, their kinds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.hardware.description import Hardware
from drivetrain.hardware.prices import MICRO, HardwarePrices, size_of
from drivetrain.measuring.clock import CACHES, Clock
from drivetrain.model.first_batch import Candidate
from drivetrain.paper import run
from drivetrain.paper.seen import LOSS, seen_model
from drivetrain.paper.work import MatrixProduct, MemoryPass, back_kind

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30

SIDES = {"cpu": (64, 128, 256, 512, 1024), "device": (128, 256, 512, 1024, 2048, 4096, 8192)}
"""Rows and columns of products, by kind of device."""

BYTES = {"cpu": (10**5, 10**6, 10**7, 10**8), "device": (10**5, 10**6, 10**7, 10**8, 10**9)}
"""Sizes of passes over memory."""

TINY = 64
"""Elements of a tensor whose kernels take no time but their start."""

LONG_S = 0.2
"""A dtype whose products take longer has no fast kernel, and is not measured with larger sides."""

PASSES, HELD = 16, 64 * 10**6
"""Passes in a row when one is timed, and the most bytes of their results."""

STARTS = 200
CALLS = 8
"""Kernels in a row when starts are timed, and products when the smallest are."""


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """Kernels of one kind: see ``KernelFacts``."""

    times: Sequence[tuple[float, float]]
    start_us: float


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """The figures of one device, while all ranks measured theirs.

    Attributes:
        teraflops: the best rate of products, by precision.
        efficiency: (rows, share of the best rate) of square products in the finest precision.
        memory_gib: of the device, or this rank's part of the host's.
        gigabytes_per_second: the best rate of a pass over memory, reads and writes together.
        memory_shares: (bytes, share of that rate).
        launch_us: from the start of a kernel to the next, without autograd.
        dispatch_us: the same with autograd.
        runs_ahead: whether the host starts kernels while earlier ones run.
        kernels: by kind; measured beside the others.
    """

    teraflops: dict[str, float]
    efficiency: list[tuple[int, float]]
    memory_gib: float
    gigabytes_per_second: float
    memory_shares: list[tuple[float, float]]
    launch_us: float
    dispatch_us: float
    runs_ahead: bool = True
    kernels: Mapping[str, KernelFigures] = field(default_factory=dict)


def measure_device(clock: Clock, ranks_beside: int) -> DeviceFigures:
    """Measure a device.

    Args:
        clock: of the device.
        ranks_beside: ranks of this host, which share its memory where they compute on processors.
    """
    device = clock.device
    kind = "cpu" if device.type == "cpu" else "device"
    rates: dict[str, float] = {}
    sweep: list[tuple[int, float]] = []
    for name, dtype in DTYPES.items():
        found = _products(clock, name, dtype, SIDES[kind])
        if found:
            rates[name] = max(rate for _, rate in found)
            sweep = sweep or found
    best = rates["no"]
    passes = [(size, _pass(clock, size)) for size in BYTES[kind]]
    memory = max(rate for _, rate in passes)
    launch, dispatch = _starts(clock)
    return DeviceFigures(
        {name: rate / 1e12 for name, rate in rates.items()},
        [(side, rate / best) for side, rate in sweep],
        _memory(device, ranks_beside) / GIB,
        memory / 1e9,
        [(float(size), rate / memory) for size, rate in passes],
        0.0 if kind == "cpu" else launch / MICRO,  # part of dispatch_us there
        dispatch / MICRO,
        kind != "cpu",
    )


def _products(
    clock: Clock, name: str, dtype: torch.dtype, sides: tuple[int, ...]
) -> list[tuple[int, float]]:
    """Return (side, operations per second) of square products; nothing without a kernel."""
    found = []
    for side in sides:
        left = torch.randn(side, side, device=clock.device).to(dtype)
        try:
            timing = clock.time(
                f"products of {side} in {name}",
                lambda left=left: left @ left,  # type: ignore[misc]
                times=1 if side > sides[len(sides) // 2] else CALLS,
            )
        except RuntimeError:  # torch has no such product for this device
            return []
        found.append((side, 2.0 * side**3 / timing.seconds))
        if timing.seconds > LONG_S:
            break
    return found


def _pass(clock: Clock, size: int) -> float:
    """Return the bytes per second that kernels read and write together, as training calls them.

    Each reads the last one's result, and writes memory that was used a while ago.
    """
    count = max(2, min(PASSES, HELD // (size // 2)))
    results = [torch.ones(size // 8, device=clock.device) for _ in range(count)]

    def work() -> None:
        for index in range(count):
            torch.add(results[index - 1], 1.0, out=results[index])

    return size * count / clock.time(f"passes of {size} bytes", work).seconds


def _starts(clock: Clock) -> tuple[float, float]:
    """Return the seconds between the starts of kernels, without and with autograd."""
    plain = torch.ones(TINY, device=clock.device)
    trained = plain.clone().requires_grad_()

    def forward_only() -> None:
        x = plain
        for _ in range(STARTS):
            x = x * plain

    def both() -> None:
        x = trained
        for _ in range(STARTS):
            x = x * plain
        x.sum().backward()  # type: ignore[no-untyped-call]

    launch = clock.time("starts of kernels", forward_only).seconds / STARTS
    return launch, clock.time("starts with autograd", both).seconds / (2 * STARTS)


def _memory(device: torch.device, ranks_beside: int) -> float:
    if device.type == "cpu":
        return psutil.virtual_memory().total / ranks_beside
    return float(torch.get_device_module(device).get_device_properties(device).total_memory)


# --- kernels by kind, beside plain products and passes of their size ---

# Each kind is a small module of which the planner's own look says the work; its time with a tiny
# input gives the host's time per start, and those with larger inputs the factors over plain ones.
# There are two factors: a pass whose data stays in caches is bound by arithmetic, not by memory.


KEPT_CALLS = 4
"""Calls within a timing, whose results all stay: training does not write into old results."""

TINY_CALLS = 16
LEAST_FACTOR = 0.05
"""The smallest factor: below it, the subtraction of starts has eaten the measurement."""

TENSORS, PARAMETERS = (64, 512 * 1024), 8
"""Elements of each parameter of the two optimizers, and the number of parameters: together their
state is larger than caches, as that of models is."""


class _Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class _Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        target = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return functional.cross_entropy(x, target)


class _Case(NamedTuple):
    """A module with an input of some shape; the word says how large it is."""

    word: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def _cases(
    make: Callable[[], nn.Module],
    tiny: tuple[int, ...],
    middle: tuple[int, ...],
    large: tuple[int, ...],
    small: Callable[[], nn.Module] | None = None,
) -> tuple[_Case, _Case, _Case]:
    """Return the cases of a kind; where no module is for the tiny input, one is for all."""
    return (
        _Case("small", small or make, tiny),
        _Case("middle", make, middle),
        _Case("large", make, large),
    )


_MIDDLE, _LARGE = (128, 512), (512, 1024)
_SUBJECTS: Mapping[str, tuple[_Case, _Case, _Case]] = {
    "linear": _cases(lambda: nn.Linear(256, 1024), (1, 8), (64, 256), (512, 256),
                     lambda: nn.Linear(8, 8)),
    "convolution": _cases(lambda: nn.Conv2d(16, 32, 3, padding=1), (1, 16, 4, 4),
                          (16, 16, 16, 16), (16, 16, 32, 32)),
    "attention": _cases(_Attention, (1, 1, 8, 8), (8, 4, 64, 48), (8, 4, 128, 64)),
    "gelu": _cases(nn.GELU, (1, 64), _MIDDLE, _LARGE),
    "relu": _cases(nn.ReLU, (1, 64), _MIDDLE, _LARGE),
    "silu": _cases(nn.SiLU, (1, 64), _MIDDLE, _LARGE),
    "tanh": _cases(nn.Tanh, (1, 64), _MIDDLE, _LARGE),
    "softmax": _cases(lambda: nn.Softmax(-1), (1, 64), _MIDDLE, _LARGE),
    "layer_norm": _cases(lambda: nn.LayerNorm(256), (1, 256), (256, 256), (2048, 256)),
    "batch_norm": _cases(lambda: nn.BatchNorm2d(16), (2, 16, 2, 2), (4, 16, 32, 32),
                         (16, 16, 32, 32)),
    "adaptive_avg_pool2d": _cases(lambda: nn.AdaptiveAvgPool2d(1), (1, 32, 2, 2),
                                  (8, 32, 16, 16), (16, 32, 32, 32)),
    "max_pool2d": _cases(lambda: nn.MaxPool2d(2), (1, 16, 4, 4), (16, 16, 16, 16),
                         (16, 16, 32, 32)),
    LOSS: _cases(_Loss, (1, 64), (64, 1024), (512, 2048)),
}  # fmt: skip


def kernel_timings() -> int:
    """Return the number of timings of ``measure_kernels``."""
    return 6 * len(_SUBJECTS) + 4


def measure_kernels(clock: Clock, hardware: Hardware) -> Mapping[str, KernelFigures]:
    """Return the figures of kernels by kind.

    Args:
        clock: of the device.
        hardware: with the measured rates of plain products and passes, and no kinds yet.
    """
    prices = HardwarePrices(hardware, {}, "no")
    found: dict[str, KernelFigures] = {}
    for name, cases in _SUBJECTS.items():
        found.update(_of_module(clock, prices, name, cases))
    for kind, fused in (("update", None), ("fused update", True)):
        found[kind] = _of_optimizer(clock, prices, kind, fused)
    return found


def _of_module(
    clock: Clock, prices: HardwarePrices, kind: str, cases: Sequence[_Case]
) -> Iterator[tuple[str, KernelFigures]]:
    """Yield the figures of forward and of backward."""
    tiny, *others = cases
    seconds = {case: _timed(clock, kind, case) for case in cases}
    for back, name in enumerate((kind, back_kind(kind))):
        least = _planned(prices, tiny, name)
        start = max(0.0, seconds[tiny][back] - least.seconds) / least.starts
        times = []
        for case in others:
            plain = _planned(prices, case, name)
            found = (seconds[case][back] - start * plain.starts) / plain.seconds
            times.append((plain.size, max(LEAST_FACTOR, found)))
        yield name, KernelFigures(sorted(times), start / MICRO)


class _Trained(nn.Module):
    """A module behind a parameter, so that gradients go back to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.shift = inner, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift)  # type: ignore[no-any-return]


class _Plain(NamedTuple):
    """Kernels of a kind in a module: seconds if they were plain, starts, size of the largest."""

    seconds: float
    starts: int
    size: float


def _planned(prices: HardwarePrices, case: _Case, kind: str) -> _Plain:
    """Return the kernels of a kind that a plan counts in a module."""
    candidate = Candidate("example", (torch.zeros(*case.shape),), {})
    units = seen_model(_Trained(case.make()), [candidate]).units(
        case.shape[0], "none", fused=True, width=4
    )
    found = [
        each
        for unit in units
        for each in (*unit.forward, *unit.backward)
        if isinstance(each, MatrixProduct | MemoryPass) and each.kind == kind
    ]
    launches = (each.launches if isinstance(each, MemoryPass) else 1 for each in found)
    return _Plain(sum(map(prices.plain, found)), sum(launches), max(map(size_of, found)))


def _timed(clock: Clock, kind: str, case: _Case) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward; no two calls share a tensor.

    As in training, the input of a call was just written, and all else left the caches long ago.
    """
    word, make, shape = case
    calls = TINY_CALLS if word == "small" else KEPT_CALLS
    modules = [make().to(clock.device) for _ in range(calls)]
    inputs = [torch.randn(*shape, device=clock.device).requires_grad_() for _ in modules]
    sources = [*inputs, *(each for module in modules for each in module.parameters())]
    kept: list[Tensor] = []
    gradients: list[Tensor] = []
    other = torch.zeros(CACHES // 4, device=clock.device)

    def forward() -> None:
        kept.extend(module(x) for module, x in zip(modules, inputs, strict=True))

    @torch.no_grad()
    def cold() -> None:
        kept.clear()
        other.add_(1)
        for x in inputs:
            x.mul_(1)

    def filled() -> None:
        kept.clear()
        forward()
        other.add_(1)
        gradients[:] = map(torch.ones_like, kept)

    there = clock.time(f"{word} {kind}", forward, before=cold)
    back = clock.time(
        f"{word} {kind} backward",
        lambda: torch.autograd.grad(kept, sources, gradients),
        before=filled,
    )
    return there.seconds / calls, back.seconds / calls


def _of_optimizer(
    clock: Clock, prices: HardwarePrices, kind: str, fused: bool | None
) -> KernelFigures:
    seconds = []
    for elements in TENSORS:
        parameters = [
            nn.Parameter(torch.zeros(elements, device=clock.device)) for _ in range(PARAMETERS)
        ]
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer = torch.optim.AdamW(parameters, fused=fused)
        timing = clock.time(f"{kind} of {elements} elements", optimizer.step)
        seconds.append(timing.seconds / PARAMETERS)
    update = MemoryPass(PARAMETERS * TENSORS[1] * run.BYTES["no"].update, 0)
    times = PARAMETERS * (seconds[1] - seconds[0]) / prices.plain(update)
    return KernelFigures([(size_of(update), max(LEAST_FACTOR, times))], seconds[0] / MICRO)
