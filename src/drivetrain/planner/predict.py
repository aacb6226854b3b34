"""Predicts one layout: its step on paper, played against the prices of the hardware."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from drivetrain.compression.methods import EXACT
from drivetrain.errors import ConfigError
from drivetrain.hardware.description import Hardware
from drivetrain.hardware.prices import HardwarePrices, axis_places
from drivetrain.planner.layout import (
    InstalledPlans,
    PlannedLayout,
    difference,
    far_method,
    leaving_hosts,
    parts_of,
)
from drivetrain.simulator.contract import PaperBound, UnitCosts
from drivetrain.simulator.step import BYTES, PaperRun, PaperStep, PaperUnit, PlayedStep, play
from drivetrain.simulator.transformer import PaperModel

TERA = 1e12
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

    model: PaperModel
    batch: int
    hardware: Hardware
    hosts: int
    per_host: int

    @property
    def ranks(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.per_host


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
        return f"{slower:+.1%}: {seconds:.3g} s more for {part}"

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for ``--json``."""
        sent: dict[str, dict[str, int]] = {}
        for (axis, operation), nbytes in self.sent.items():
            sent.setdefault(axis, {})[operation] = round(nbytes)
        return {
            "layout": self.layout,
            "strategy": self.planned.strategy,
            "honesty": self.planned.honesty.value,
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

    step: PaperStep
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
        return self._prediction(planned, axes, micro_batches, sample)

    def bound(self, planned: PlannedLayout) -> PaperBound:
        """Return a lower bound of a layout.

        Raises:
            ConfigError: as ``predict`` does.
        """
        axes, micro_batches = self.divisions(planned)
        run = self._run(planned, axes, micro_batches)
        prices = self.prices(planned, axes)
        costs = self._costs.setdefault(id(prices), UnitCosts(prices.without_latency()))
        units = self._units(planned.micro_batch, planned.recompute, planned.precision)
        return planned.kind.planning().bound(planned.config, units, run, costs)

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

    def _prediction(
        self,
        planned: PlannedLayout,
        axes: Mapping[str, int],
        micro_batches: int,
        sample: "_Sample",
    ) -> Prediction:
        task, seconds = self.task, sample.seconds
        peak, worst = max((each, index) for index, each in enumerate(sample.peaks))
        sent = max(sample.sent, key=lambda counts: sum(counts.values()))
        peak_flops = task.hardware.device.teraflops[planned.precision] * TERA  # type: ignore[index]
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

    def divisions(self, planned: PlannedLayout) -> tuple[Mapping[str, int], int]:
        """Return the axes and the number of micro-batches.

        Raises:
            ConfigError: ranks or batch do not divide, or the device lacks the precision.
        """
        task = self.task
        peaks = task.hardware.device.teraflops
        if planned.precision not in peaks:
            raise ConfigError(
                f"expected a precision that {task.hardware.name} computes in, {', '.join(peaks)}, "
                f"found {planned.precision!r}; set precision"
            )
        axes = dict(planned.kind.axes(planned.config, task.ranks))
        dp = axes.setdefault("dp", 1)
        if planned.dp not in (0, dp):
            rest = " x ".join(f"{key} {size}" for key, size in axes.items() if key != "dp") or "1"
            raise ConfigError(
                f"--layout: expected dp={dp}, which {task.ranks} ranks leave beside {rest}, found "
                f"dp={planned.dp}; change dp, another axis, --hosts or --devices-per-host"
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
    ) -> PaperStep:
        """Draw a layout's step with so many micro-batches."""
        run = self._run(planned, axes, micro_batches)
        units = self._units(planned.micro_batch, planned.recompute, planned.precision)
        return planned.kind.planning().step(planned.config, units, run)

    def _run(self, planned: PlannedLayout, axes: Mapping[str, int], micro_batches: int) -> PaperRun:
        run = PaperRun(axes, micro_batches, planned.precision, self.task.per_host)
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

    def _made(self, micro_batch: int, recompute: Any, precision: str) -> Sequence[PaperUnit]:
        fused = self.task.hardware.host.attention == "fused" and recompute != "selective"
        width = BYTES[precision].parameter
        return self.task.model.units(micro_batch, recompute, fused=fused, width=width)
