"""The search over layouts: declared, bounded, predicted; what fits, and the order of hosts.

Bounds come first, from the work of single units: a layout whose bound does not fit is left out. The
others are played in full in the order of their bounds, until no bound beats the best. Approximate
traffic between hosts comes last, where a user allows it: the forms of a few exact layouts.

The layouts of a search: divisions that strategies declare, and their approximate forms.

The order of hosts under measured links: hosts with much to say sit beside each other.

A mesh lays axes over ranks in the order of the hosts, so that another order of the hosts is another
placement. A ring is as fast as its slowest link; stages of a pipeline follow each other in a chain.

Layouts that do not fit into memory: by how much, and the smallest changes that make them fit.

Predicts one layout: its simulated step, played against the prices of the hardware.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from drivetrain.compression.compressor import Fidelity
from drivetrain.compression.methods import AUTO, LinkMethods, permitted
from drivetrain.config.outline import BF16, EXACT, check_forward
from drivetrain.config.schema import FarConfig, LinksConfig, RecomputeConfig, RunConfig
from drivetrain.errors import ConfigError
from drivetrain.hardware.description import Hardware, HostPairs
from drivetrain.hardware.prices import GIGA, TERA, HardwarePrices
from drivetrain.hardware.sizes import GIB, size_text
from drivetrain.model.fp8 import MULTIPLE
from drivetrain.planner.layout import (
    RECOMPUTE,
    InstalledPlans,
    PlannedLayout,
    difference,
    far_method,
    layout_of,
    leaving_hosts,
    parts_of,
)
from drivetrain.runtime.mesh import lines_along
from drivetrain.simulator.contract import StepBound, UnitCosts
from drivetrain.simulator.step import (
    BF16_BYTES,
    FP8,
    STATE_BYTES,
    PlayedStep,
    SimulatedRun,
    SimulatedStep,
    SimulatedUnit,
    axis_places,
    in_fp8,
    play,
    widest,
)
from drivetrain.simulator.transformer import SimulatedModel

# --- predicts one layout ---

FRAGMENTS = 1.05
"""What an allocator takes over what it is asked for, when layouts are judged to fit (Megatron-LM,
``theoretical_memory_usage``)."""

ROUNDS = 2
"""Rounds of a pipeline that are played; from then on every round is like the one before."""


@dataclass(frozen=True, slots=True)
class Task:
    """The model, the batch and the hardware of a plan.

    Attributes:
        model: sizes alone, or a module that was looked at.
        batch: sequences of a step, of all ranks.
        hardware: see there.
        hosts: how many.
        per_host: devices of each.
    """

    model: SimulatedModel
    batch: int
    hardware: Hardware
    hosts: int
    per_host: int

    @property
    def ranks(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.per_host

    def check_precision(self, precision: str) -> None:
        """Refuse a precision that the hardware does not compute in.

        Raises:
            ConfigError: names those that it computes in.
        """
        peaks = self.hardware.device.teraflops
        if widest(precision) not in peaks:
            raise ConfigError(
                f"expected a precision that {self.hardware.name} computes in, {', '.join(peaks)}, "
                f"found {precision!r}; set precision"
            )

    def remark(self, precision: str) -> str:
        """Return what a prediction in this precision leaves out; empty: nothing."""
        if precision != FP8 or FP8 in self.hardware.device.teraflops:
            return ""
        return (
            f"precision fp8: the description of {self.hardware.name} has no teraflops for fp8: "
            "bytes are those of fp8, seconds and MFU those of bf16; add the peak to a description "
            "of your own"
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted cost of a layout.

    Attributes:
        layout: in the form that ``--layout`` takes.
        planned: see there.
        axes: the size of each axis.
        step_seconds: of an optimizer step.
        tokens_per_second: of all ranks.
        mfu: operations that the model needs over those that the devices could do.
        peak_bytes: of the worst rank.
        held: bytes between steps on that rank, by kind.
        sent: bytes that a rank sends in a step, by axis and operation.
        leaving: bytes that a host sends to other hosts in a step.
        idle: share of the step in which the busiest rank does not compute.
        parts: seconds of the busiest rank, by what they are spent for.
        micro_batches: of a step, on each data-parallel rank.
        peaks: the most bytes in use at a time, by stage.
        played: the step, perhaps with fewer micro-batches.
        stored: bytes of a rank in host memory and on a disk, by stage.
    """

    layout: str
    planned: PlannedLayout
    axes: Mapping[str, int]
    step_seconds: float
    tokens_per_second: float
    mfu: float
    peak_bytes: float
    held: Mapping[str, float]
    sent: Mapping[tuple[str, str], float]
    leaving: float
    idle: float
    parts: Mapping[str, float]
    micro_batches: int
    peaks: Sequence[float]
    played: PlayedStep
    stored: Sequence[Mapping[str, float]]

    def stored_most(self, tier: str) -> float:
        """Return the bytes in ``host`` memory or on a ``disk`` of the rank that has most there."""
        return max((each.get(tier, 0.0) for each in self.stored), default=0.0)

    def needed(self) -> float:
        """Return the memory that a device must have."""
        return self.peak_bytes * FRAGMENTS

    def against(self, best: "Prediction") -> str:
        """Return the reason why a layout is slower than the best."""
        if self is best:
            return ""
        slower = self.step_seconds / best.step_seconds - 1
        part, seconds = difference(self.parts, best.parts)
        return f"{slower:+.1%}: {part} {seconds:+.3g} s"

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for ``--json``."""
        sent: dict[str, dict[str, int]] = {}
        for (axis, operation), nbytes in self.sent.items():
            sent.setdefault(axis, {})[operation] = round(nbytes)
        return {
            "layout": self.layout,
            "strategy": self.planned.strategy,
            "fidelity": self.planned.fidelity.value,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "peak_bytes": round(self.peak_bytes),
            "held": {kind: round(nbytes) for kind, nbytes in self.held.items()},
            "stored": {tier: round(self.stored_most(tier)) for tier in ("host", "disk")},
            "sent": sent,
            "between_hosts": round(self.leaving),
            "idle": self.idle,
            "parts": dict(self.parts),
            "micro_batches": self.micro_batches,
        }


@dataclass(frozen=True, slots=True)
class _Sample:
    """A step that was played, perhaps with fewer micro-batches than the numbers are of."""

    step: SimulatedStep
    played: PlayedStep
    seconds: float
    busy: float
    peaks: Sequence[float]
    sent: Sequence[Mapping[tuple[str, str], float]]
    parts: Mapping[str, float]

    def continued(self, before: "_Sample", rounds: float) -> "_Sample":
        """Return the sample after some more rounds, each of them as the last one was."""

        def later(now: float, then: float) -> float:
            return now + rounds * (now - then)

        return replace(
            self,
            seconds=later(self.seconds, before.seconds),
            busy=later(self.busy, before.busy),
            peaks=list(map(later, self.peaks, before.peaks)),
            sent=[
                {key: later(nbytes, then.get(key, 0.0)) for key, nbytes in now.items()}
                for now, then in zip(self.sent, before.sent, strict=True)
            ],
            parts={
                name: max(0.0, later(seconds, before.parts.get(name, 0.0)))
                for name, seconds in self.parts.items()
            },
        )


class Predictor:
    """Predicts layouts of a task; common parts are computed once.

    Attributes:
        task: see there.
        installed: the strategies of its layouts.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.installed = InstalledPlans()
        self._prices: dict[tuple[str, tuple[tuple[str, int], ...]], HardwarePrices] = {}
        self._costs: dict[int, UnitCosts] = {}
        self._units = lru_cache(maxsize=64)(self._made)

    def predict(self, planned: PlannedLayout) -> Prediction:
        """Return the prediction for a layout.

        Raises:
            ConfigError: it does not divide the batch, the ranks or the model.
        """
        axes, micro_batches = self.divisions(planned)
        sample = self._sample(planned, axes, micro_batches)
        task, seconds = self.task, sample.seconds
        peak, worst = max((each, index) for index, each in enumerate(sample.peaks))
        sent = max(sample.sent, key=lambda counts: sum(counts.values()))
        # As the report of a run counts: products in fp8, too, against the peak of bf16.
        peak_flops = task.hardware.device.teraflops[widest(planned.precision)] * TERA  # type: ignore[index]
        return Prediction(
            layout=planned.text(axes["dp"]),
            planned=planned,
            axes=axes,
            step_seconds=seconds,
            tokens_per_second=task.batch * task.model.seq / seconds,
            mfu=task.model.model_flops(task.batch) / (seconds * peak_flops * task.ranks),
            peak_bytes=peak,
            held=sample.step.held[worst],
            sent=sent,
            leaving=leaving_hosts(sent, axis_places(sample.step.axes, task.per_host)),
            idle=max(0.0, 1 - sample.busy / seconds),
            parts=sample.parts,
            micro_batches=micro_batches,
            peaks=sample.peaks,
            played=sample.played,
            stored=sample.step.stored,
        )

    def bound(self, planned: PlannedLayout) -> StepBound:
        """Return a lower bound of a layout.

        Raises:
            ConfigError: as ``predict`` does.
        """
        axes, micro_batches = self.divisions(planned)
        run = self._run(planned, axes, micro_batches)
        prices = self.prices(planned, axes)
        costs = self._costs.setdefault(id(prices), UnitCosts(prices.without_latency()))
        units = self._units(planned.micro_batch, planned.recompute, planned.precision)
        return planned.kind.planning().lower_bound(planned.config, units, run, costs)

    def _sample(
        self, planned: PlannedLayout, axes: Mapping[str, int], micro_batches: int
    ) -> "_Sample":
        """Play a step: some rounds of the pipeline, and the others by the last round's length."""
        stages = len(self.step(planned, axes, 1).held)
        played = ROUNDS * stages + micro_batches % stages
        if micro_batches <= played + stages:
            return self._play(planned, axes, micro_batches)
        first = self._play(planned, axes, played)
        second = self._play(planned, axes, played + stages)
        return second.continued(first, (micro_batches - played - stages) / stages)

    def _play(
        self, planned: PlannedLayout, axes: Mapping[str, int], micro_batches: int
    ) -> "_Sample":
        step = self.step(planned, axes, micro_batches)
        prices = self.prices(planned, step.axes)
        played = play(step, prices)
        busy, parts = max(played.computing), parts_of(step, played, prices)
        return _Sample(step, played, played.seconds, busy, played.peaks, step.sent(), parts)

    def divisions(self, planned: PlannedLayout) -> tuple[Mapping[str, int], int]:
        """Return the axes and the number of micro-batches.

        Raises:
            ConfigError: ranks or batch do not divide, or the device lacks the precision.
        """
        task = self.task
        task.check_precision(planned.precision)
        axes = dict(planned.kind.axes(planned.config, task.ranks))
        recompute = RecomputeConfig(mode=planned.recompute)  # type: ignore[arg-type]
        run = RunConfig(precision=planned.precision, recompute=recompute)  # type: ignore[arg-type]
        check_forward(run, axes)
        dp = axes.setdefault("dp", 1)
        if planned.dp not in (0, dp):
            rest = " x ".join(f"{key} {size}" for key, size in axes.items() if key != "dp") or "1"
            raise ConfigError(
                f"--layout: expected dp={dp}, which {task.ranks} ranks leave beside {rest}, found "
                f"dp={planned.dp}; change dp, another axis, --nnodes or --nproc-per-node"
            )
        share, rest_of_batch = divmod(task.batch, dp * planned.micro_batch)
        if rest_of_batch:
            raise ConfigError(
                f"--layout: expected a --batch that dp x micro_batch = {dp} x "
                f"{planned.micro_batch} divides, found {task.batch}; change one of them"
            )
        return axes, share

    def step(
        self, planned: PlannedLayout, axes: Mapping[str, int], micro_batches: int
    ) -> SimulatedStep:
        """Draw a layout's step with so many micro-batches."""
        run = self._run(planned, axes, micro_batches)
        units = self._units(planned.micro_batch, planned.recompute, planned.precision)
        return planned.kind.planning().simulate(planned.config, units, run)

    def _run(
        self, planned: PlannedLayout, axes: Mapping[str, int], micro_batches: int
    ) -> SimulatedRun:
        run = SimulatedRun(axes, micro_batches, planned.precision, self.task.per_host)
        hosts = axes["dp"] // run.together("dp")
        return replace(
            run,
            far=far_method(planned.links, hosts),
            on_host=not self.task.hardware.host.runs_ahead,
            rounds_activations=planned.activations != EXACT,
        )

    def prices(self, planned: PlannedLayout, axes: Mapping[str, int]) -> HardwarePrices:
        """Return the prices for ranks laid out on these axes."""
        key = (planned.precision, tuple(axes.items()))  # their order is the order of the ranks
        if key not in self._prices:
            places = axis_places(axes, self.task.per_host)
            self._prices[key] = HardwarePrices(self.task.hardware, places, planned.precision)
        return self._prices[key]

    def _made(self, micro_batch: int, recompute: Any, precision: str) -> Sequence[SimulatedUnit]:
        fused = self.task.hardware.host.attention == "fused" and recompute != "selective"
        width = STATE_BYTES[precision].parameter
        units = self.task.model.units(micro_batch, recompute, fused=fused, width=width)
        if precision != FP8:
            return units
        # Equal ones stay the same object.
        narrow = {id(unit): in_fp8(unit, MULTIPLE) for unit in units}
        return [narrow[id(unit)] for unit in units]


# --- the layouts of a search ---

MICRO_BATCHES = (1, 2, 4, 8, 16)


def candidates(
    task: Task, precision: str, installed: InstalledPlans, *, least: bool = False
) -> Iterator[dict[str, str]]:
    """Yield the keys of every layout that installed strategies declare.

    Args:
        task: of the search.
        precision: of all layouts.
        installed: the strategies.
        least: whether those with the fewest activations are enough.
    """
    size = task.model.layers, task.model.heads, task.ranks, task.per_host
    around: list[Mapping[str, object]] = [{}]
    for plan in installed.around.values():
        around += plan.layouts(*size)
    inner = [
        (name, keys) for name, plan in installed.planned.items() for keys in plan.layouts(*size)
    ]
    for outside, (name, inside), micro_batch, recompute in product(
        around, inner, MICRO_BATCHES[: 1 if least else None], RECOMPUTE[-1 if least else 0 :]
    ):
        own = {"micro_batch": micro_batch, "recompute": recompute, "precision": precision}
        keys = {**outside, **inside, **own, "data_parallel": name}
        yield {key: str(value).lower() for key, value in keys.items()}


# --- the approximate forms of a layout ---


SKETCHED = 5000
"""Layouts whose bounds with a method are computed, the best exact bounds first."""

APPROXIMATED = 4
"""Exact layouts of which all forms are predicted: as many by prediction, and by bound."""


class Approximations:
    """The approximate forms of layouts.

    Args:
        predictor: of the task.
        allow: how far training may be from exact training, at most.

    Attributes:
        methods: the permitted ones for gradients.
    """

    def __init__(self, predictor: Predictor, allow: Fidelity) -> None:
        self._predictor = predictor
        self._rounds = Fidelity.ROUNDING.within(allow)
        self.methods = permitted_methods(
            LinkMethods.configured(LinksConfig(far=FarConfig(gradients=AUTO), allow=allow.value))
        )

    def lightest(
        self, sketches: Sequence[tuple[float, PlannedLayout]], room: float
    ) -> list[PlannedLayout]:
        """Return the exact layouts that are the quickest by bounds with the fewest bytes.

        Args:
            sketches: exact layouts with their bounds, the best first.
            room: bytes of memory of a device.
        """
        hosts = self._predictor.task.hosts
        if hosts == 1 or not self.methods:
            return []
        light = min(self.methods, key=lambda name: _sent(name, hosts))
        found: list[tuple[float, int]] = []
        for index, (_, planned) in enumerate(sketches[:SKETCHED]):
            with suppress(ConfigError):
                bound = self._predictor.bound(self._form(planned, {"links": light}))
                if bound.nbytes * FRAGMENTS <= room:
                    found.append((bound.seconds, index))
        return [sketches[index][1] for _, index in sorted(found)[:APPROXIMATED]]

    def of(self, planned: PlannedLayout) -> Iterator[PlannedLayout]:
        """Yield the approximate forms that a layout can have."""
        axes, _ = self._predictor.divisions(planned)
        sums = self._predictor.prices(planned, axes).axes["dp"].spans_hosts
        stages = self._rounds and "activations" in planned.kind.channels(planned.config)
        longer = STATE_BYTES[planned.precision].parameter > BF16_BYTES  # others cross as they are
        for links in (EXACT, *self.methods) if sums else (EXACT,):
            for activations in (EXACT, BF16) if stages and longer else (EXACT,):
                if (links, activations) == (EXACT, EXACT):
                    continue
                with suppress(ConfigError):  # the strategy or the precision cannot take it
                    yield self._form(planned, {"links": links, "activations": activations})

    def _form(self, planned: PlannedLayout, methods: dict[str, str]) -> PlannedLayout:
        named = {key: name for key, name in methods.items() if name != EXACT}
        return layout_of({**planned.keys, **named}, self._predictor.installed)


def permitted_methods(links: LinkMethods) -> list[str]:
    """Return the methods for gradients that ``auto`` may choose; none under other words."""
    auto = links.auto
    if auto is None or "gradients" not in auto.uses:
        return []
    return list(permitted(auto.methods, "gradients", auto.allow))


def _sent(name: str, hosts: int) -> float:
    method = far_method(name, hosts)
    return method.sent if method is not None else 1.0


# --- the order of hosts under measured links ---

MOST_EXHAUSTIVE = 7
"""Hosts of which every order is tried; more are put in a chain of best links, then swapped."""


@dataclass(frozen=True, slots=True)
class HostOrder:
    """An order of hosts, and its costs.

    Attributes:
        hosts: indices of the given hosts; the first one is host 0.
        seconds: of a step's known messages over the slowest link of each line, one after the other.
        chain: seconds per gigabyte over all links between neighbors.
    """

    hosts: tuple[int, ...]
    seconds: float
    chain: float


@dataclass(frozen=True)
class HostPlacement:
    """Hosts and the messages of their ranks.

    Attributes:
        names: of the hosts, as given.
        slots: ranks of each.
        sizes: of the mesh's axes, the closest first.
        sent: bytes that a rank sends in a step by axis, as far as they are known.
        pairs: measured rates between hosts.
    """

    names: Sequence[str]
    slots: Sequence[int]
    sizes: Mapping[str, int]
    sent: Mapping[str, float]
    pairs: HostPairs

    def __post_init__(self) -> None:
        """Refuse hosts that were not measured.

        Raises:
            ConfigError: names them.
        """
        missing = sorted(set(self.names) - set(self.pairs.hosts))
        if missing:
            raise ConfigError(
                f"expected measured links of every host, found none of {', '.join(missing)}; "
                f"measured are {', '.join(self.pairs.hosts)}: run `drivetrain hardware measure` on "
                "all hosts"
            )

    def given(self) -> HostOrder:
        """Return the order in which the hosts were given."""
        return self.judged(tuple(range(len(self.names))))

    def best(self) -> HostOrder:
        """Return the best order; the given one where none is better."""
        first = self.given()
        if len(self.names) <= MOST_EXHAUSTIVE:
            orders: Iterator[tuple[int, ...]] = itertools.permutations(first.hosts)
            return min([first, *map(self.judged, orders)], key=_key)
        starts = map(self._chained, range(len(self.names)))
        found = min([first, *map(self.judged, starts)], key=_key)
        while True:
            better = min(map(self.judged, _swapped(found.hosts)), key=_key)
            if _key(better) >= _key(found):
                return found
            found = better

    def judged(self, order: tuple[int, ...]) -> HostOrder:
        """Return an order with its costs."""
        of_rank = [host for host in order for _ in range(self.slots[host])]
        seconds = chain = 0.0
        for name in self.sizes:
            slowest, total = math.inf, 0.0
            for line in lines_along(name, self.sizes):
                rates = list(self._rates([of_rank[rank] for rank in line], ring=name in self.sent))
                slowest = min([slowest, *rates])
                total += sum(1 / rate for rate in rates)
            seconds += self.sent.get(name, 0.0) / (slowest * GIGA)
            chain += total
        return HostOrder(order, seconds, chain)

    def _rates(self, hosts: Sequence[int], *, ring: bool) -> Iterator[float]:
        """Yield the rates between neighbors on different hosts; a ring comes back to its start."""
        ends = [*hosts, hosts[0]] if ring else hosts
        for one, other in itertools.pairwise(ends):
            if one != other:
                yield self._rate(one, other)

    def _rate(self, one: int, other: int) -> float:
        return self.pairs.rate(self.names[one], self.names[other])

    def _chained(self, start: int) -> tuple[int, ...]:
        """Return the chain from a host on that always takes the best link."""
        chain, left = [start], set(range(len(self.names))) - {start}
        while left:
            near = max(left, key=lambda host: (self._rate(chain[-1], host), -host))
            chain.append(near)
            left.remove(near)
        return tuple(chain)


def _swapped(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which two hosts have changed places, or a flat_slice is turned round."""
    for first, last in itertools.combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[first], swapped[last] = swapped[last], swapped[first]
        yield tuple(swapped)
        yield (*order[:first], *reversed(order[first : last + 1]), *order[last + 1 :])


def _key(order: HostOrder) -> tuple[float, float]:
    """Round, so that sums in another order are not better."""
    return round(order.seconds, 9), round(order.chain, 9)


# --- layouts that do not fit into memory ---

MOST_HOSTS = 64
"""Times the hosts at hand that are looked at."""

PREDICTED = 12
"""Layouts on more hosts that are predicted in full, the smallest bounds first."""


RESERVED_GIB = 2.0
"""Of a device beside its host: the driver's context and the buffers of communication; an estimate
for some communicators, each of which takes some hundreds of MiB."""

DOUBT_OF_CELLS, DOUBT_OF_STORES = 1.03, 1.10
"""Factors on predicted times when layouts are ordered. A simpler layout is first where a cell of
ranks promises less than 3% more, or offloaded state less than 10%: predictions are off by more
(docs/planning.md), and those of stores were compared with no measurement."""

DOUBT_OF_METHODS = 1.03
"""The same factor for each class of fidelity between a layout and an exact one: the time to encode
is an estimate, and nobody gives up exact training for less."""


def room_of(task: Task) -> float:
    """Return the bytes of memory of a device that a run may use."""
    reserved = RESERVED_GIB if task.hardware.host.runs_ahead else 0.0
    return (task.hardware.device.memory.gib - reserved) * GIB


def judged(prediction: Prediction) -> float:
    """Return the seconds by which a layout is compared with others."""
    stored = any(map(prediction.stored_most, ("host", "disk")))
    cell = bool(prediction.planned.kind.planning().inner_option)
    return (
        prediction.step_seconds
        * (DOUBT_OF_STORES if stored else 1.0)
        * (DOUBT_OF_CELLS if cell else 1.0)
        * DOUBT_OF_METHODS ** list(Fidelity).index(prediction.planned.fidelity)
    )


def fits(task: Task, prediction: Prediction) -> bool:
    """Whether a layout fits into the memory of the device, and into its host's."""
    memory = task.hardware.host.memory
    there = prediction.stored_most("host") * task.per_host
    return prediction.needed() <= room_of(task) and (memory is None or there <= memory.gib * GIB)


def remedies(predictor: Predictor, planned: PlannedLayout) -> list[str]:
    """Return changes of a layout, each of which alone makes it fit; the smallest of each kind."""
    found: list[str] = []
    for change in _changes(planned, predictor.installed):
        key = next(iter(change))
        if any(line.startswith(f"{key}=") for line in found):
            continue
        with suppress(ConfigError):
            changed = layout_of({**planned.keys, **change}, predictor.installed)
            if fits(predictor.task, predictor.predict(changed)):
                found.append(",".join(f"{key}={value}" for key, value in change.items()))
    return [*found, more_hosts(predictor.task, planned.precision)]


def _changes(planned: PlannedLayout, installed: InstalledPlans) -> Iterator[dict[str, str]]:
    """Yield changes of keys, the smallest of each kind first."""
    for recompute in RECOMPUTE[RECOMPUTE.index(planned.recompute) + 1 :]:
        yield {"recompute": recompute}
    micro_batch = planned.micro_batch // 2
    while micro_batch:
        yield {"micro_batch": str(micro_batch)}
        micro_batch //= 2
    for name in installed.planned:
        yield {"data_parallel": name}
    for keys in installed.every[planned.keys["data_parallel"]].layouts(1, 1, 1, 1):
        if keys:
            yield {key: str(value) for key, value in keys.items()}


def _smallest(predictor: Predictor, layouts: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the smallest layouts by their bounds, where the bounds fit."""
    bounds: list[tuple[float, dict[str, str]]] = []
    for keys in layouts:
        with suppress(ConfigError):
            nbytes = predictor.bound(layout_of(keys, predictor.installed)).nbytes
            if nbytes * FRAGMENTS <= room_of(predictor.task):
                bounds.append((nbytes, keys))
    yield from (keys for _, keys in sorted(bounds, key=lambda each: each[0])[:PREDICTED])


def more_hosts(task: Task, precision: str) -> str:
    """Return the fewest hosts, in steps of two, on which some layout fits, with that layout."""
    factor = 2
    while factor <= MOST_HOSTS:
        larger = replace(task, hosts=task.hosts * factor, batch=task.batch * factor)
        predictor = Predictor(larger)
        least = candidates(larger, precision, predictor.installed, least=True)
        for keys in _smallest(predictor, least):
            if fits(larger, predictor.predict(layout_of(keys, predictor.installed))):
                text = ",".join(f"{key}={value}" for key, value in keys.items())
                return f"{larger.hosts} hosts (with a batch of {larger.batch}: {text})"
        factor *= 2
    return f"more than {task.hosts * MOST_HOSTS} hosts"


# --- the search ---

PLAYED = 10
"""Layouts that are played in full at least, the most promising bounds first."""

MOST_PLAYED = 40
"""Layouts that are played in full at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: predictions in the order of ``judged``; never empty.
        tried: layouts that were looked at.
        left_out: how many were not played, by reason.
    """

    best: Sequence[Prediction]
    tried: int
    left_out: Mapping[str, int]


def search(task: Task, precision: str, allow: Fidelity = Fidelity.EXACT) -> Found:
    """Return the best layouts for a task.

    Args:
        task: see there.
        precision: of the layouts.
        allow: how far training may be from exact training, by methods between hosts.

    Raises:
        ConfigError: no layout fits, or none divides the batch and the ranks.
    """
    task.check_precision(precision)
    predictor = Predictor(task)
    room = room_of(task)
    left_out: Counter[str] = Counter()
    sketches: list[tuple[float, PlannedLayout]] = []
    smallest: tuple[float, PlannedLayout] | None = None
    tried = 0
    for keys in candidates(task, precision, predictor.installed):
        tried += 1
        try:
            planned = layout_of(keys, predictor.installed)
            bound = predictor.bound(planned)
        except ConfigError as error:
            left_out[_reason(str(error))] += 1
            continue
        needed = bound.nbytes * FRAGMENTS
        if smallest is None or needed < smallest[0]:
            smallest = needed, planned
        if needed > room:
            left_out["do not fit into memory, by their bound"] += 1
        else:
            sketches.append((bound.seconds, planned))
    sketches.sort(key=lambda each: each[0])
    best = _played(predictor, sketches, left_out)
    if allow is not Fidelity.EXACT:
        forms = Approximations(predictor, allow)
        exact = [each.planned for each in best[:APPROXIMATED]]
        exact += [each for each in forms.lightest(sketches, room) if each not in exact]
        approximate = [form for each in exact for form in forms.of(each)]
        tried += len(approximate)
        best = _with_approximate(predictor, best, approximate, left_out)
    if not best:
        raise ConfigError(_nowhere(predictor, smallest, room, precision))
    return Found(best, tried, {reason: count for reason, count in left_out.items() if count})


def _played(
    predictor: Predictor,
    sketches: Sequence[tuple[float, PlannedLayout]],
    left_out: Counter[str],
) -> list[Prediction]:
    """Play the most promising layouts, until enough of them fit."""
    best: list[Prediction] = []
    for index, (seconds, planned) in enumerate(sketches):
        enough = len(best) >= PLAYED
        if enough and seconds >= judged(best[0]):
            left_out["are slower, by their bound, than the best"] += len(sketches) - index
            break
        if len(best) >= MOST_PLAYED:
            left_out[f"have a later bound than the {MOST_PLAYED} that were played"] += (
                len(sketches) - index
            )
            break
        prediction = predictor.predict(planned)
        if not fits(predictor.task, prediction):
            left_out["do not fit into memory"] += 1
            continue
        best.append(prediction)
        best.sort(key=judged)
    return best


def _with_approximate(
    predictor: Predictor,
    exact: Sequence[Prediction],
    approximate: Sequence[PlannedLayout],
    left_out: Counter[str],
) -> list[Prediction]:
    """Return all exact layouts, and the approximate layouts that are quicker than all of these."""
    best = list(exact)
    quickest = min((each.step_seconds for each in exact), default=math.inf)
    for planned in approximate:
        if predictor.bound(planned).seconds >= quickest:
            left_out["are approximate, and slower than an exact one"] += 1
            continue
        prediction = predictor.predict(planned)
        if not fits(predictor.task, prediction):
            left_out["do not fit into memory"] += 1
        elif prediction.step_seconds >= quickest:
            left_out["are approximate, and slower than an exact one"] += 1
        else:
            best.append(prediction)
    return sorted(best, key=judged)


def _reason(text: str) -> str:
    """Return why a layout cannot be, without its numbers, so that reasons can be counted."""
    if "--batch" in text:
        return "do not divide the batch"
    if "simulate" in text:
        return "are of strategies whose time is not drawn"
    return "do not divide the model or the ranks"


def _nowhere(
    predictor: Predictor, smallest: tuple[float, PlannedLayout] | None, room: float, precision: str
) -> str:
    task = predictor.task
    if smallest is None:
        return (
            f"no layout divides a batch of {task.batch} and {task.ranks} ranks; take a batch that "
            "is a multiple of the ranks"
        )
    needed, planned = smallest
    text = planned.text(predictor.divisions(planned)[0]["dp"])
    return (
        f"no layout fits: the smallest, {text}, needs {size_text(needed)} of "
        f"{size_text(room)} on its worst rank, {size_text(needed - room)} too much; "
        f"take {more_hosts(task, precision)}, or devices with more memory"
    )
