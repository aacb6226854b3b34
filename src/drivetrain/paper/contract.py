"""What plans ask of a strategy: its step on paper, a bound, its layouts, its part of a model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import nn

from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError
from drivetrain.paper.bounds import PaperBound, UnitCosts, stage_bound
from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import PaperStep
from drivetrain.paper.work import PaperUnit


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
