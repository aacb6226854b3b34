"""Plans a model on each rank by itself, and goes on only if all ranks have made the same plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from torch import nn

from drivetrain.collectives import Communicator
from drivetrain.collectives.facts import differing, gather_facts
from drivetrain.data.examples import ExampleBatch
from drivetrain.errors import RankMismatchError
from drivetrain.parts.naming import named_parameters
from drivetrain.strategy import Run
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.dropout import Dropout
from drivetrain_megatron.pipeline.build import PipelineBuilder
from drivetrain_megatron.plan.model import ModelPlan, TensorParallel, describe
from drivetrain_megatron.plan.whole_trial import confirmed
from drivetrain_megatron.recording.calls import batches_for, inputs_for

PlanT = TypeVar("PlanT")

LayerPlan: TypeAlias = tuple[TensorParallel | None, ModelPlan | None]
"""How layers are divided; nothing on one rank of the axis ``tp``."""

_SHOWN = 300
"""Characters of a rank's reasons in a message."""


class ComparedPlan(NamedTuple):
    """The description of a plan for other ranks.

    Attributes:
        facts: lines that must be equal on all ranks.
        reasons: lines that say why the plan is as it is.
    """

    facts: Sequence[str]
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans dropout masks, stages and layers; ``ranks`` are those of the axis ``tp``."""

    run: Run
    config: MegatronConfig
    dropout: Dropout
    builder: PipelineBuilder | None
    ranks: Communicator

    def plan(self, model: nn.Module) -> LayerPlan:
        """Return how the layers of a model are divided, alike on all ranks. Collective.

        Raises:
            RankMismatchError: as ``same_on_all_ranks``.
        """
        examples = batches_for(self.run, model)
        found = same_on_all_ranks(
            self.run, lambda: self._own(model, examples), lambda plan: self._described(model, *plan)
        )
        if self.builder is not None:
            self.builder.agree()
        return found

    def _own(self, model: nn.Module, examples: Sequence[ExampleBatch]) -> LayerPlan:
        """Return the plan of this rank."""
        inputs = inputs_for(self.config, model, examples)
        self.dropout.find(model, inputs, examples)
        if self.builder is not None and inputs is not None:  # without any, inputs_for has raised
            self.builder.plan(model, inputs)
        if self.ranks.size == 1:
            return None, None
        tensor = TensorParallel.of(self.config, model, self.ranks)
        return tensor, confirmed(model, inputs, tensor.plan(model, inputs), self.config)

    def _described(
        self, model: nn.Module, tensor: TensorParallel | None, plan: ModelPlan | None
    ) -> ComparedPlan:
        """Describe a plan for other ranks: the blocks of stages, the share of each parameter."""
        blocks = [name for name, _ in self.builder.blocks] if self.builder is not None else []
        if tensor is None or plan is None:
            return ComparedPlan(blocks, ())
        facts = tensor.facts(model, plan)
        sizes = {name: parameter.nbytes for name, parameter in named_parameters(model).items()}
        shares = [
            f"{name} {'whole' if known.partition is None else f'divided: {known.partition}'}"
            for name, known in facts.items()
        ]
        return ComparedPlan([*blocks, *shares], [*describe(plan, facts, sizes, self.ranks.size)])


def same_on_all_ranks(
    run: Run, make: Callable[[], PlanT], described: Callable[[PlanT], ComparedPlan]
) -> PlanT:
    """Return a plan of this rank, if all ranks have made the same plan. Collective.

    Args:
        run: of the ranks that compare.
        make: makes the plan, and does not communicate.
        described: of a plan.

    Raises:
        RankMismatchError: ranks have made different plans, or only some of them one; on each rank.
        Exception: whatever ``make`` has raised here, where no rank has made a plan.
    """
    plans: list[PlanT] = []
    failure: Exception | None = None
    try:
        plans.append(make())
        mine = described(plans[0])
    except Exception as error:  # the other ranks must hear of it before this one ends
        failure, mine = error, ComparedPlan(["no plan"], [f"{type(error).__name__}: {error}"])
    if run.world.size > 1 and differing(mine.facts, doing="the comparison of plans"):
        plans_of_all = gather_facts(mine, ComparedPlan, doing="the comparison of plans")
        raise RankMismatchError(_message(plans_of_all)) from failure
    if failure is not None:
        raise failure
    return plans[0]


def _message(plans: Sequence[ComparedPlan]) -> str:
    """Return the first difference between two ranks, and the reasons that differ."""
    first = plans[0]
    rank, other = next((r, plan) for r, plan in enumerate(plans) if plan.facts != first.facts)
    mine, theirs = (
        "; ".join(line for line in one.reasons if line not in two.reasons)[:_SHOWN]
        for one, two in ((first, other), (other, first))
    )
    return (
        "expected every rank to divide the model in the same way, found that rank 0 has "
        f"{_unlike(first, other)} ({mine}), and rank {rank} {_unlike(other, first)} ({theirs}): "
        "each rank finds its plan by running the model's code. Let this code do the same on all "
        "ranks (no choice by rank or environment), or give the rank what it lacks, such as memory"
    )


def _unlike(one: ComparedPlan, other: ComparedPlan) -> str:
    return next((line for line in one.facts if line not in other.facts), "nothing more")
