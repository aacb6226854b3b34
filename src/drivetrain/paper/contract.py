"""The part of a strategy's contract that draws its step on paper, and lists its layouts."""

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


class OnPaper:
    """The questions of ``drivetrain plan`` to a strategy; without answers there is no plan.

    Attributes:
        layout_keys: keys of ``--layout`` that are about this strategy, with the option that each
            one sets. Data-parallel strategies that need none have none.
        inner_option: the option that holds a data-parallel strategy inside of this one, or "".
    """

    layout_keys: ClassVar[Mapping[str, str]] = {}
    inner_option: ClassVar[str] = ""

    @classmethod
    def step(cls, config: Any, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Draw the step of the ranks of one replica.

        Args:
            config: the strategy's options.
            units: of the whole model, for one micro-batch, in the order of forward.
            run: sizes of axes, micro-batches, bytes per element.

        Raises:
            ConfigError: the strategy draws no step, or the model cannot be divided so.
        """
        raise ConfigError(
            f"{cls.__name__} draws no step on paper, so it cannot be planned; choose another "
            "strategy, or write its method step()"
        )

    @classmethod
    def bound(
        cls, config: Any, units: Sequence[PaperUnit], run: PaperRun, costs: UnitCosts
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
            return cls.step(config, some, run)

        found = costs.of(units, (cls, repr(config)), draw, run)
        return stage_bound(found, run.micro_batches, 1)

    @classmethod
    def choose(
        cls, config: Any, model: nn.Module, run: Any, recompute: Sequence[str]
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

    @classmethod
    def part(cls, config: Any, model: ModelSpec, run: Any) -> ModelSpec:
        """Return the tensors of a model as a rank's modules have them: by default all of it.

        Another shape than in the model is that of a part which this rank trains by itself.

        Args:
            config: the strategy's options.
            model: the whole one.
            run: the ``Run``.
        """
        return model

    @classmethod
    def stepped(cls, config: Any, model: ModelSpec, run: Any) -> Mapping[str, tuple[int, int]]:
        """Return the elements that a rank's optimizers step: by default all of ``part``.

        Args:
            config: the strategy's options.
            model: the whole one.
            run: the ``Run``.

        Returns:
            By name of a trainable parameter: first element and one past the last, in the order of
            memory of the part.
        """
        here = cls.part(config, model, run)
        return {spec.name: (0, spec.numel) for spec in here.parameters if spec.trainable}

    @classmethod
    def draws_steps(cls) -> bool:
        """Whether the strategy has a ``step`` of its own."""
        return cls.step.__func__ is not OnPaper.step.__func__  # type: ignore[attr-defined]

    @classmethod
    def options_of_layout(cls, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options that some of ``layout_keys`` stand for."""
        return {cls.layout_keys[key]: value for key, value in keys.items()}

    @classmethod
    def layouts(
        cls, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return the values of ``layout_keys`` that a search tries; the empty ones by default.

        Args:
            blocks: repeated blocks of the model.
            heads: heads of attention.
            ranks: of all hosts.
            per_host: ranks of a host.
        """
        return ({},)
