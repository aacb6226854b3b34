"""What plans ask of a strategy: its step on paper, a bound, its layouts, its part of a model."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from torch import nn

from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError
from drivetrain.simulator.step import (
    ARRIVALS,
    COMPUTE,
    LENT,
    PaperRun,
    PaperStep,
    PaperUnit,
    Prices,
)

Draw = Callable[[Sequence[PaperUnit], PaperRun], PaperStep]


@dataclass(frozen=True, slots=True)
class PaperBound:
    """The least time and memory of a layout.

    Attributes:
        seconds: of a step.
        nbytes: of memory, on the rank that needs most.
    """

    seconds: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The cost of a unit for its rank.

    Attributes:
        each: seconds by lane, for every micro-batch.
        once: seconds by lane, for every step.
        held: bytes between steps.
        kept: bytes of activations of a micro-batch.
        during: the most bytes of a moment.
    """

    each: Mapping[str, float]
    once: Mapping[str, float]
    held: float
    kept: float
    during: float

    @property
    def compute(self) -> float:
        """Seconds of compute of a micro-batch."""
        return self.each.get(COMPUTE, 0.0)


@dataclass
class UnitCosts:
    """The costs of units, each computed once."""

    prices: Prices
    _known: dict[Any, UnitCost] = field(default_factory=dict, repr=False)

    def of(
        self, units: Sequence[PaperUnit], key: Any, draw: Draw, run: PaperRun
    ) -> list[tuple[UnitCost, int]]:
        """Return the costs of the distinct units, and how often each one occurs.

        Args:
            units: equal ones are the same object.
            key: equal wherever ``draw`` draws the same.
            draw: draws the step of units.
            run: its number of micro-batches does not count.
        """
        found = []
        for unit, count in Counter(units).items():
            place = (unit, key, run.axes.get("dp", 1), run.precision, run.far)
            if place not in self._known:
                self._known[place] = self._computed(unit, draw, run)
            found.append((self._known[place], count))
        return found

    def _computed(self, unit: PaperUnit, draw: Draw, run: PaperRun) -> UnitCost:
        one, two = (draw([unit], replace(run, micro_batches=count)) for count in (1, 2))
        first, second = self._busy(one), self._busy(two)
        each = {lane: second[lane] - first.get(lane, 0.0) for lane in second}
        once = {lane: first[lane] - each[lane] for lane in first}
        takes = max((task.takes for task in one.tasks if task.phase == "forward"), default=0.0)
        during = max(task.during for task in one.tasks)
        # Units share some buffers, and gradients may be missing until backward: not every moment
        # of a step has them, so a bound leaves them out.
        held = sum(count for kind, count in one.held[0].items() if kind not in (LENT, ARRIVALS))
        missing = sum(min(0.0, task.takes) for task in one.tasks)
        return UnitCost(each, once, held + missing, takes, during)

    def _busy(self, step: PaperStep) -> Mapping[str, float]:
        busy: Counter[str] = Counter()
        for task in step.tasks:
            busy[task.lane] += self.prices.seconds(task)  # type: ignore[assignment]
        return busy


def stage_bound(
    costs: Sequence[tuple[UnitCost, int]], micro_batches: int, in_flight: float
) -> PaperBound:
    """Return the bound of a rank with units in sequence.

    Args:
        costs: of distinct units, with the number of each.
        micro_batches: of a step.
        in_flight: micro-batches whose activations are kept at a time.
    """
    lanes: Counter[str] = Counter()
    for cost, count in costs:
        for lane, seconds in cost.each.items():
            lanes[lane] += count * micro_batches * seconds  # type: ignore[assignment]
        for lane, seconds in cost.once.items():
            lanes[lane] += count * seconds  # type: ignore[assignment]
    held = sum(count * cost.held for cost, count in costs)
    kept = sum(count * cost.kept for cost, count in costs)
    # Backward begins with the last unit, when everything is kept.
    first, _ = costs[-1]
    at_turn = in_flight * kept + first.during
    later = (in_flight - 1) * kept + max(cost.during for cost, _ in costs)
    return PaperBound(max(lanes.values()), held + max(at_turn, later))


# --- what plans ask of a strategy ---


class StrategyPick(NamedTuple):
    """A strategy that was chosen at ``prepare``.

    Attributes:
        section: its name and options, as the configuration has them.
        settings: further keys of the configuration that belong to the choice.
        reason: a line for the log.
        seconds: of a step, as predicted.
    """

    section: Mapping[str, Any]
    settings: Mapping[str, Any]
    reason: str
    seconds: float


class Planning:
    """The answers of a strategy to ``drivetrain plan``; by default there is no plan.

    Attributes:
        layout_keys: keys of ``--layout`` that are about this strategy, with the option that each
            one sets. Data-parallel strategies that need none have none.
        inner_option: the option that holds a data-parallel strategy inside of this one, or "".

    Args:
        kind: the strategy's class.
    """

    layout_keys: ClassVar[Mapping[str, str]] = {}
    inner_option: ClassVar[str] = ""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def step(self, config: Any, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Draw the step of the ranks of one replica.

        Args:
            config: the strategy's options.
            units: of the whole model, for one micro-batch, in the order of forward.
            run: sizes of axes, micro-batches, bytes per element.

        Raises:
            ConfigError: the strategy draws no step, or the model cannot be divided so.
        """
        raise ConfigError(
            f"{self.kind.__name__} draws no step on paper, so it cannot be planned; choose another "
            "strategy, or write a step() for its planning()"
        )

    def bound(
        self, config: Any, units: Sequence[PaperUnit], run: PaperRun, costs: UnitCosts
    ) -> PaperBound:
        """Return a lower bound of a step, quickly: a search asks thousands of times.

        By default the sums over the units, each of whose steps is drawn once.

        Args:
            config: the strategy's options.
            units: as for ``step``.
            run: as for ``step``.
            costs: what single units cost.

        Raises:
            ConfigError: as ``step`` does.
        """

        def draw(some: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
            return self.step(config, some, run)

        found = costs.of(units, (self.kind, repr(config)), draw, run)
        return stage_bound(found, run.micro_batches, 1)

    def choose(
        self, config: Any, model: nn.Module, run: Any, recompute: Sequence[str]
    ) -> StrategyPick | None:
        """Return another strategy to prepare a model in place of this strategy; by default none.

        Collective: all ranks return the same, over the same axes.

        Args:
            config: the strategy's options.
            model: as the script passes it to ``prepare``.
            run: the ``Run``, with the loaders that the script prepares.
            recompute: the modes of activation recompute that may be chosen.

        Raises:
            ConfigError: nothing can be chosen.
        """
        return None

    def part(self, config: Any, model: ModelSpec, run: Any) -> ModelSpec:
        """Return the tensors of a model as a rank's modules have them: by default all of it.

        Another shape than in the model is that of a part which this rank trains by itself.

        Args:
            config: the strategy's options.
            model: the whole one.
            run: the ``Run``.
        """
        return model

    def stepped(self, config: Any, model: ModelSpec, run: Any) -> Mapping[str, tuple[int, int]]:
        """Return the elements that a rank's optimizers step: by default all of ``part``.

        Args:
            config: the strategy's options.
            model: the whole one.
            run: the ``Run``.

        Returns:
            By name of a trainable parameter: first element and one past the last, in the order of
            memory of the part.
        """
        here = self.part(config, model, run)
        return {spec.name: (0, spec.numel) for spec in here.parameters if spec.trainable}

    @property
    def draws_steps(self) -> bool:
        """Whether the strategy has a ``step`` of its own."""
        return type(self).step is not Planning.step

    def options_of_layout(self, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options that some of ``layout_keys`` stand for."""
        return {self.layout_keys[key]: value for key, value in keys.items()}

    def layouts(
        self, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return the values of ``layout_keys`` that a search tries; the empty ones by default.

        Args:
            blocks: repeated blocks of the model.
            heads: heads of attention.
            ranks: of all hosts.
            per_host: ranks of a host.
        """
        return ({},)
