"""The actions of a pipeline, as data: forward, backward, and the two halves of backward.

A model is cut into stages. Rank ``r`` of ``p`` holds the stages ``r``, ``r + p``, ``r + 2p``, …:
one stage each, or several when stages are interleaved (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2). A schedule is one list of actions per rank. Sends and receives are not listed: the
neighbor of a stage that produces something always needs it, so they follow from the actions.
"""

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """The kind of an action; its value is the letter that drawings and traces show."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of inputs and of weights."""
    INPUT = "I"
    """Only the gradient of the stage's input, which the stage before waits for."""
    WEIGHT = "W"
    """Only the gradients of weights, which nobody waits for."""

    @property
    def returns(self) -> bool:
        """Whether the action makes the gradient for the stage before."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUT)

    @property
    def frees(self) -> bool:
        """Whether nothing of the micro-batch is kept afterwards."""
        return self in (ActionKind.BACKWARD, ActionKind.WEIGHT)


@dataclass(frozen=True, slots=True, order=False)
class Action:
    """One computation of one stage for one micro-batch.

    Attributes:
        kind: what is computed.
        stage: index of the stage among all stages.
        micro_batch: index of the micro-batch.
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank of a pipeline in one step.

    Attributes:
        name: of the kind of schedule.
        stages: how many stages the model is cut into, a multiple of the number of ranks.
        micro_batches: how many micro-batches the step has.
        ranks: the actions of each rank, in order.
    """

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart."""
        return any(action.kind is ActionKind.WEIGHT for actions in self.ranks for action in actions)


def needs(action: Action, stages: int) -> list[Action]:
    """Return the actions, of this stage and of its neighbors, that must end before one begins.

    Args:
        action: the action.
        stages: how many stages there are.

    Returns:
        Actions; where backward may be whole or in halves (``BACKWARD`` or ``INPUT``), the kind is
        that of the action.
    """
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind is ActionKind.FORWARD:
        return [Action(kind, stage - 1, micro_batch)] if stage else []
    if kind is ActionKind.WEIGHT:
        return [Action(ActionKind.INPUT, stage, micro_batch)]
    own = Action(ActionKind.FORWARD, stage, micro_batch)
    return [own, Action(kind, stage + 1, micro_batch)] if stage + 1 < stages else [own]
