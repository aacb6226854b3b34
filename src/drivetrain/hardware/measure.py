"""Measures the devices, memories, links and disks of a run's ranks.

Links are measured between every pair of ranks, in rings over hosts and inside of them. A matrix of
bandwidths shows the levels of the topology: where the rates of pairs differ by more than a factor
of two, the quick pairs belong together.

A machine is slower in some seconds than in others, so the same work is best timed in several
rounds: a clock keeps the timings of earlier rounds by name, and shows what all of them say.
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from drivetrain.collectives.communicator import Communicator
from drivetrain.collectives.facts import gather_facts
from drivetrain.data.examples import Candidate
from drivetrain.hardware.description import Hardware
from drivetrain.hardware.prices import GIGA, MICRO, TERA, HardwarePrices, size_of
from drivetrain.hardware.sizes import GIB
from drivetrain.registry import stores
from drivetrain.runtime.world import World
from drivetrain.simulator.step import STATE, STATE_BYTES, MatrixProduct, MemoryPass, back_kind
from drivetrain.simulator.traced import LOSS, traced_model
from drivetrain.store import ShardSpec, ShardStep

REPEATS = 7
"""Timings of one piece of work."""

WARM_UPS = 2
CACHES = 32 * 2**20
"""Bytes that are written between some timings: more than the caches of one processor core hold."""

LOUD = 0.2
"""Scatter from which a measurement is said to be doubtful."""


@dataclass
class Clock:
    """Times work on a device, and remembers which timings scattered.

    Attributes:
        device: whose queue must be empty before the clock is read.
        advance: called after each piece of work, for a bar.
        loud: scatter by name, where it is above ``LOUD``.
        samples: seconds of all timings so far, by name.
    """

    device: torch.device
    advance: Callable[[], object] = lambda: None
    loud: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def time(
        self,
        name: str,
        work: Callable[[], object],
        *,
        times: int = 1,
        before: Callable[[], object] = lambda: None,
    ) -> float:
        """Return the seconds of one piece of work: the median, of its earlier timings, too.

        Args:
            name: of the work, in all rounds and in the report of scatter.
            work: is called again and again.
            times: calls within one timing, for work too short for the clock.
            before: prepares each timing, and is not timed.
        """
        samples = self.samples[name]
        for index in range(WARM_UPS + REPEATS):
            before()
            self._finish()
            start = time.perf_counter()
            for _ in range(times):
                work()
            self._finish()
            if index >= WARM_UPS:
                samples.append((time.perf_counter() - start) / times)
        seconds, scatter = median_of(samples)
        self.loud.pop(name, None)
        if scatter > LOUD:
            self.loud[name] = scatter
        self.advance()
        return seconds

    def _finish(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def median_of(samples: list[float]) -> tuple[float, float]:
    """Return the median, and over it half of the range of all but the two extremes.

    The quickest timings would say too little: a step is a sum of many kernels, some of them slow.
    """
    ordered = sorted(samples)
    middle = ordered[1:-1] or samples
    median = statistics.median(ordered)
    return median, (middle[-1] - middle[0]) / 2 / median if median else 0.0


# --- measures one device ---

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

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


LEAST = 1e-3
"""Shares and times in a file are above zero."""

Section: TypeAlias = dict[str, Any]
"""A section of a description, as its file has it."""


def short(value: float) -> float:
    """Return a number of a file: three digits, above zero."""
    return max(float(f"{value:.3g}"), LEAST)


def curve(points: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Return the shares of a file by size."""
    return [[float(size), min(1.0, short(share))] for size, share in points]


def measure_device(clock: Clock, source: str, ranks: int) -> Section:
    """Return the sections ``device``, without kernels by kind, and ``host`` of a description.

    Args:
        clock: of the device.
        source: of the numbers.
        ranks: of this host, which share its memory where they compute on processors.
    """
    device = clock.device
    on_host = device.type == "cpu"
    kind = "cpu" if on_host else "device"
    rates: dict[str, float] = {}
    sweep: list[tuple[int, float]] = []
    for name, dtype in DTYPES.items():
        found = _products(clock, name, dtype, SIDES[kind])
        if found:
            rates[name] = max(rate for _, rate in found)
            sweep = sweep or found
    passes = [(size, _pass(clock, size)) for size in BYTES[kind]]
    memory = max(rate for _, rate in passes)
    launch, dispatch = _starts(clock)
    tile = 16 if on_host else 64
    if on_host:
        total = psutil.virtual_memory().total / ranks
    else:
        total = torch.get_device_module(device).get_device_properties(device).total_memory
    return {
        "device": {
            "source": source,
            "teraflops": {name: short(rate / TERA) for name, rate in rates.items()},
            "launch_us": short(0.0 if on_host else launch / MICRO),  # part of dispatch_us there
            "products": {
                "source": source,
                "processors": 1,
                "tiles": [[tile, tile, 1.0]],
                "depth": 0,
                "shares": curve((2.0 * side**3, rate / rates["no"]) for side, rate in sweep),
            },
            "memory": {
                "source": source,
                "gib": short(total / GIB),
                "gigabytes_per_second": short(memory / GIGA),
                "shares": curve((size, rate / memory) for size, rate in passes),
            },
        },
        "host": {
            "source": source,
            "devices": ranks,
            "dispatch_us": short(dispatch / MICRO),
            "attention": "fused",
            "runs_ahead": not on_host,
        },
    }


def _products(
    clock: Clock, name: str, dtype: torch.dtype, sides: tuple[int, ...]
) -> list[tuple[int, float]]:
    """Return (side, operations per second) of square products; nothing without a kernel."""
    found = []
    for side in sides:
        left = torch.randn(side, side, device=clock.device).to(dtype)
        try:
            seconds = clock.time(
                f"products of {side} in {name}",
                lambda left=left: left @ left,  # type: ignore[misc]
                times=1 if side > sides[len(sides) // 2] else CALLS,
            )
        except RuntimeError:  # torch has no such product for this device
            return []
        found.append((side, 2.0 * side**3 / seconds))
        if seconds > LONG_S:
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

    return size * count / clock.time(f"passes of {size} bytes", work)


def _starts(clock: Clock) -> tuple[float, float]:
    """Return the seconds between the starts of kernels, without and with autograd."""
    plain = torch.ones(TINY, device=clock.device)
    trained = plain.clone().requires_grad_()

    def chained(x: Tensor) -> Tensor:
        for _ in range(STARTS):
            x = x * plain
        return x

    def both() -> None:
        chained(trained).sum().backward()  # type: ignore[no-untyped-call]

    launch = clock.time("starts of kernels", lambda: chained(plain)) / STARTS
    return launch, clock.time("starts with autograd", both) / (2 * STARTS)


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


def _cases(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> list[_Case]:
    """Return the cases of a kind, the smallest first."""
    words = ("small", "middle", "large")
    return [_Case(word, make, shape) for word, shape in zip(words, shapes, strict=True)]


_MIDDLE, _LARGE = (128, 512), (512, 1024)
_SUBJECTS: Mapping[str, Sequence[_Case]] = {
    "linear": [_Case("small", lambda: nn.Linear(8, 8), (1, 8)),
               _Case("middle", lambda: nn.Linear(256, 1024), (64, 256)),
               _Case("large", lambda: nn.Linear(256, 1024), (512, 256))],
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


def measure_kernels(clock: Clock, hardware: Hardware) -> Section:
    """Return the section of kernels by kind.

    Args:
        clock: of the device.
        hardware: with the measured rates of plain products and passes, and no kinds yet.
    """
    prices = HardwarePrices(hardware, {}, "no")
    found: Section = {}
    for name, cases in _SUBJECTS.items():
        found.update(_of_module(clock, prices, name, cases))
    for kind, fused in (("update", None), ("fused update", True)):
        found[kind] = _of_optimizer(clock, prices, kind, fused)
    return found


def _of_module(
    clock: Clock, prices: HardwarePrices, kind: str, cases: Sequence[_Case]
) -> Iterator[tuple[str, Section]]:
    """Yield the sections of forward and of backward."""
    tiny, *others = cases
    seconds = {case: _timed(clock, kind, case) for case in cases}
    for back, name in enumerate((kind, back_kind(kind))):
        least = _planned(prices, tiny, name)
        start = max(0.0, seconds[tiny][back] - least.seconds) / least.starts
        times = []
        for case in others:
            plain = _planned(prices, case, name)
            found = (seconds[case][back] - start * plain.starts) / plain.seconds
            times.append((plain.size, found))
        yield name, _kernel(sorted(times), start)


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
    found = [each for each in _kernels(case) if each.kind == kind]
    launches = (each.launches if isinstance(each, MemoryPass) else 1 for each in found)
    return _Plain(sum(map(prices.plain, found)), sum(launches), max(map(size_of, found)))


@cache  # a look takes longer than most timings
def _kernels(case: _Case) -> Sequence[MatrixProduct | MemoryPass]:
    """Return the kernels that a plan counts in a module."""
    candidate = Candidate("example", (torch.zeros(*case.shape),), {})
    units = traced_model(_Trained(case.make()), [candidate]).units(
        case.shape[0], "none", fused=True, width=4
    )
    each = (kernel for unit in units for kernel in (*unit.forward, *unit.backward))
    return [kernel for kernel in each if isinstance(kernel, MatrixProduct | MemoryPass)]


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
    return there / calls, back / calls


def _of_optimizer(clock: Clock, prices: HardwarePrices, kind: str, fused: bool | None) -> Section:
    seconds = []
    for elements in TENSORS:
        parameters = [
            nn.Parameter(torch.zeros(elements, device=clock.device)) for _ in range(PARAMETERS)
        ]
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer = torch.optim.AdamW(parameters, fused=fused)
        timing = clock.time(f"{kind} of {elements} elements", optimizer.step)
        seconds.append(timing / PARAMETERS)
    update = MemoryPass(PARAMETERS * TENSORS[1] * STATE_BYTES["no"].update, 0)
    times = PARAMETERS * (seconds[1] - seconds[0]) / prices.plain(update)
    return _kernel([(size_of(update), times)], seconds[0])


def _kernel(times: Sequence[tuple[float, float]], start: float) -> Section:
    points = [[float(f"{size:.3g}"), short(max(LEAST_FACTOR, factor))] for size, factor in times]
    return {"times": points, "start_us": short(start / MICRO)}


# --- measures links ---

SMALL, LARGE = 8, 4 * 2**20
"""Bytes of the messages of pairs: one for the latency, one for the rate."""

RINGS = (2**17, 2**20, 2**23, 2**25)
"""Bytes of each rank in the all-reduces of rings."""

SLOW_BYTES_PER_S = 50e6
"""Rate of pairs below which the longest rings are left out, to end in time."""

LAYERS = 4
"""Linear layers that are trained beside a ring."""

QUICK_BYTES_PER_S = 1e9
"""Rate of pairs from which rings run in rounds: slower ones take long, and scatter less."""

SHORT = 8
"""Short trainings in a row, each beside a ring of its own."""

MOST_STEPS = 100
"""Trainings beside a ring: a slow link is not waited for longer than these take."""

MOST_PAIRS = 66
"""Pairs that are measured: all of 12 ranks; of more, those with one rank per host and rank 0's."""

GAP = 2.0
"""Factor between two rates from which they are two levels."""

DISK = (10**5, 10**6, 32 * 10**6)


def measured_pairs(world: World) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose links are measured."""
    every = list(combinations(range(world.size), 2))
    if len(every) <= MOST_PAIRS:
        return every
    first = {host: world.hosts.index(host) for host in dict.fromkeys(world.hosts)}
    chosen = set(first.values()) | set(range(world.local_size))
    return [pair for pair in every if set(pair) <= chosen][:MOST_PAIRS]


def measure_pairs(clock: Clock, world: World) -> Mapping[tuple[int, int], tuple[float, float]]:
    """Return (latency in seconds, bytes per second) of pairs of ranks, one after the other.

    Collective; every rank gets all of them.
    """
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in measured_pairs(world):
        dist.barrier()
        if world.rank in pair:
            other = pair[1] if world.rank == pair[0] else pair[0]
            seconds = [
                _there_and_back(clock, world.rank < other, other, size) / 2
                for size in (SMALL, LARGE)
            ]
            rate = LARGE / max(seconds[1] - seconds[0], 1e-9)
            found[pair] = (seconds[0], rate)
    rows = [(*pair, *figures) for pair, figures in found.items()]
    kind = list[tuple[int, int, float, float]]
    everyone = gather_facts(rows, kind, doing="the figures of pairs")
    return {row[:2]: row[2:] for part in everyone for row in part}


def _there_and_back(clock: Clock, first: bool, other: int, size: int) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=clock.device)

    def work() -> None:
        if first:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)

    return clock.time(f"messages of {size} bytes to rank {other}", work)


def measure_ring(clock: Clock, ranks: Communicator, slowest: float, beside: int = 1) -> Section:
    """Return the section of a link, without source, by all-reduces. Collective.

    Args:
        clock: of this rank's device.
        ranks: of the line.
        slowest: bytes per second of the slowest pair in it.
        beside: lines that are measured at the same time, whose rates add up.
    """
    steps = 2 * (ranks.size - 1)
    sizes = [size for size in RINGS if slowest > SLOW_BYTES_PER_S or size < RINGS[-1]]
    points: list[tuple[float, float]] = []
    halves: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": []}
    tiny = torch.zeros(ranks.size, device=clock.device)
    other = torch.zeros(CACHES // 4, device=clock.device)

    def apart() -> None:
        """Begin as in training: ranks computed a while, and threads of messages slept."""
        ranks.all_reduce(tiny).wait()
        other.add_(1)

    def timed(name: str, work: Callable[[], object]) -> float:
        # Lines inside of hosts and between them have timings of their own.
        return clock.time(f"{name} on {ranks.axis.name}", work, before=apart)

    alone = timed("the smallest ring", lambda: ranks.all_reduce(tiny).wait())
    half_alone = timed("the smallest all_gather", lambda: ranks.all_gather(tiny).wait())
    hop = min(alone / steps, max(0.0, 2 * (alone - half_alone) / steps))
    for size in sizes:
        tensor = torch.zeros(size // 4 * ranks.size, device=clock.device)
        seconds = timed(
            f"rings of {size} bytes",
            lambda t=tensor: ranks.all_reduce(t).wait(),  # type: ignore[misc]
        )
        # A noisy smallest ring must not make the others seem to take no time at all.
        points.append((float(size), steps * size / max(seconds - alone, seconds / 2)))
        for name, found in halves.items():
            run = getattr(ranks, name)
            half = timed(f"{name} of {size} bytes", lambda t=tensor, f=run: f(t).wait())  # type: ignore[misc]
            found.append(2 * half / seconds)
    best = max(rate for _, rate in points)
    return {
        "latency_us": short((alone - hop * steps) / MICRO),
        "hop_us": short(hop / MICRO),
        "gigabytes_per_second": short(beside * best / GIGA),
        "shares": curve((size, rate / best) for size, rate in points),
        "operations": {name: short(statistics.median(found)) for name, found in halves.items()},
    }


def measure_beside(clock: Clock, ranks: Communicator, slowest: float) -> Section:
    """Return the cost of an all-reduce beside the training of layers, for all links. Collective.

    Both take about as long, because a short one tells nothing beside the scatter of a long one.

    Args:
        clock: of this rank's device.
        ranks: of the line.
        slowest: bytes per second of the slowest pair in it.
    """
    train = _training(clock)
    size = RINGS[-2] if slowest > SLOW_BYTES_PER_S else RINGS[0]
    tensor = torch.zeros(size // 4 * ranks.size, device=clock.device)
    message = clock.time("a ring alone", lambda: ranks.all_reduce(tensor).wait())
    once = clock.time("a training alone", lambda: train(1))
    mine = torch.tensor([min(MOST_STEPS, max(1, round(message / once)))], device=clock.device)
    ranks.all_reduce(mine, reduction="max").wait()
    count = int(mine)
    alone = clock.time(f"{count} trainings alone", lambda: train(count))

    def beside() -> None:
        handle = ranks.all_reduce(tensor)
        train(count)
        handle.wait()

    together = clock.time(f"{count} trainings beside a ring", beside)
    hidden = min(alone, message)
    lost = (together - max(alone, message)) / hidden if hidden else 0.0
    return {
        "in_training": short(max(1.0, (together - alone) / message)),
        "slowdown": short(min(1.0, lost)) if lost > 0 else 0,
    }


def measure_waiting(clock: Clock, ranks: Communicator) -> float:
    """Return the seconds that the smallest ring beside a short training costs more than alone.

    Collective, over ranks of one host. Between hosts this wait hides behind the link: predictions
    that added it there were too long.

    Args:
        clock: of this rank's device.
        ranks: of a line inside of a host.
    """
    train = _training(clock)
    tiny = torch.zeros(ranks.size, device=clock.device)

    def beside() -> None:
        for _ in range(SHORT):
            handle = ranks.all_reduce(tiny)
            train(1)
            handle.wait()

    ring = clock.time("a smallest ring alone", lambda: ranks.all_reduce(tiny).wait())
    alone = clock.time("short trainings alone", lambda: train(SHORT))
    together = clock.time("short trainings beside smallest rings", beside)
    return max(0.0, (together - alone) / SHORT - ring)


def _training(clock: Clock) -> Callable[[int], None]:
    """Return a function that trains some layers so many times."""
    side = 256 if clock.device.type == "cpu" else 4096
    layers = nn.Sequential(*(nn.Linear(side, side, device=clock.device) for _ in range(LAYERS)))
    x = torch.randn(side, side, device=clock.device)

    def train(times: int) -> None:
        for _ in range(times):
            layers(x).sum().backward()

    return train


def measure_disk(clock: Clock, folder: str | None = None) -> Section:
    """Return the section of a disk's link, without source, by synced writes.

    Rates never fall with the size: a slower longer write is noise.
    """
    points: list[tuple[float, float]] = []
    best = 0.0
    for size in DISK:
        block = os.urandom(size)

        def work(block: bytes = block) -> None:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())

        best = max(best, size / clock.time(f"files of {size} bytes", work))
        points.append((float(size), best))
    return {
        "latency_us": 1.0,
        "hop_us": 1.0,
        "gigabytes_per_second": short(best / GIGA),
        "shares": curve((size, rate / best) for size, rate in points),
    }


UPDATED = 2**24
"""Parameters of an update in host memory: their states are larger than all caches."""

BUS = (2**17, 2**20, 2**24, 2**27)
"""Sizes of copies between host and device."""


def measure_update(clock: Clock, ranks: int) -> Section:
    """Return the memory of a host, without source, as the steps of AdamW in its store reach it.

    They read and write what a step with offload does under bf16: masters and moments, a gradient
    that was summed in fp32, and the new parameter.

    Args:
        clock: of any device.
        ranks: of this host, which step at the same time.
    """
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    group = optimizer.param_groups[0]
    stepper = stores().load("cpu")().stepper(optimizer)
    stepper.adopt("measured", [ShardSpec(UPDATED, torch.float32, kept=True)], group)
    gradient, out = torch.ones(UPDATED), torch.empty(UPDATED, dtype=torch.bfloat16)
    step = ShardStep(0, group, gradient, None, out)
    seconds = clock.time(
        "updates in host memory", lambda: stepper.submit("measured", [step]).wait()
    )
    stepper.close()
    nbytes = UPDATED * (2 * STATE + 4 + 2)
    return {
        "gib": short(psutil.virtual_memory().total / GIB),
        "gigabytes_per_second": short(nbytes * ranks / seconds / GIGA),
    }


def measure_bus(clock: Clock) -> Section:
    """Return the bus of a device, without source: of its two directions the slower one."""
    locked = clock.device.type != "cpu"
    times = []
    for size in (SMALL, *BUS):
        here = torch.empty(size, dtype=torch.uint8, pin_memory=locked)
        there = torch.empty_like(here, device=clock.device)
        times.append(
            max(
                clock.time(f"copies of {size} bytes {words}", work)
                for words, work in (
                    ("to the device", partial(there.copy_, here, non_blocking=True)),
                    ("to the host", partial(here.copy_, there, non_blocking=True)),
                )
            )
        )
    latency, *long = times
    # A copy that is not longer than the smallest one is all latency.
    rates = [size / max(time - latency, time / 10) for size, time in zip(BUS, long, strict=True)]
    return {
        "latency_us": short(latency / MICRO),
        "hop_us": 1.0,
        "gigabytes_per_second": short(max(rates) / GIGA),
        "shares": curve((size, rate / max(rates)) for size, rate in zip(BUS, rates, strict=True)),
    }


def host_pairs(
    rates: Mapping[tuple[int, int], float], hosts: Sequence[str]
) -> Mapping[str, Any] | None:
    """Return the rates between hosts as a description has them; None on one host.

    Args:
        rates: bytes per second by pair of ranks.
        hosts: of all ranks.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    rows = [[0.0] * len(names) for _ in names]
    for pair, rate in rates.items():
        one, other = (names.index(hosts[rank]) for rank in pair)
        if one != other:
            rows[one][other] = rows[other][one] = max(rows[one][other], float(f"{rate / 1e9:.3g}"))
    return {"hosts": names, "gigabytes_per_second": rows}


def levels_of(rates: Mapping[tuple[int, int], float], ranks: int) -> list[list[tuple[int, ...]]]:
    """Return the groups of ranks at each level of the topology, the closest level first.

    Args:
        rates: bytes per second by pair of ranks.
        ranks: of the run.
    """
    ordered = sorted(rates.values(), reverse=True)
    bounds = [slow for quick, slow in pairwise(ordered) if quick / slow > GAP]
    levels: list[list[tuple[int, ...]]] = []
    for bound in [*bounds, 0.0]:
        groups = [{rank} for rank in range(ranks)]
        for (one, other), rate in rates.items():
            if rate > bound:
                mine, theirs = (next(g for g in groups if each in g) for each in (one, other))
                if mine is not theirs:
                    mine |= theirs
                    groups.remove(theirs)
        level = [tuple(sorted(group)) for group in groups]
        if not levels or level != levels[-1]:
            levels.append(level)
    return levels
