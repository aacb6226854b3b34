"""Measures one device: products of matrices, passes over memory, starts of kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
import torch

from drivetrain.measuring.clock import Clock
from drivetrain.measuring.kernels import KernelFigures

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB, MICRO = 2**30, 1e-6

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
