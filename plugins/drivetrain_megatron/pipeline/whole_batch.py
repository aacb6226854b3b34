"""A call of the model whose output is that of the whole batch, made of micro-batches.

All forwards come first, then all backwards (GPipe). Where the outputs of micro-batches are no parts
of the whole batch's, whatever follows the blocks, such as a head and a loss, runs on the joined
tensors of the blocks: the result is right for every function of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from drivetrain_megatron.pipeline.batch_trial import Division
from drivetrain_megatron.pipeline.batches import Dims, MicroBatch, join
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.loss import (
    LossOrigin,
    behind_inputs,
    mark_elsewhere,
    refuse,
    wrong_in,
)
from drivetrain_megatron.pipeline.worker import LossOf, StageWorker
from drivetrain_megatron.recording.proxy import StageProxy

Made: TypeAlias = Mapping[int, Mapping[int, tuple[Tensor, ...]]]
"""The tensors of blocks, by micro-batch and block."""

LeafOf: TypeAlias = Callable[[int, Tensor], Tensor]
"""Gives the tensor that takes the place of a micro-batch's in the graph of the whole batch."""


def joined_blocks(made: Made, division: Division, leaf_of: LeafOf) -> dict[int, list[Tensor]]:
    """Return the tensors of each block, by index, for the whole batch."""
    first, *_ = made.values()
    return {
        block: [
            join(
                [leaf_of(number, tensors[block][place]) for number, tensors in made.items()],
                division.join_of(block, place),
            )
            for place in range(len(tensors))
        ]
        for block, tensors in first.items()
    }


def joined_outputs(outputs: Mapping[int, Any], dims: Dims, leaf_of: LeafOf) -> Any:
    """Return the output of the whole batch, made of those of micro-batches by number.

    A single micro-batch needs no dims.
    """
    flat = {number: tree_leaves(output) for number, output in outputs.items()}
    firsts = next(iter(flat.values()))
    along = dims if len(flat) > 1 else (None,) * len(firsts)
    found = [
        join([leaf_of(number, leaves[place]) for number, leaves in flat.items()], dim)
        if isinstance(first, Tensor)
        else first
        for place, (first, dim) in enumerate(zip(firsts, along, strict=True))
    ]
    return tree_unflatten(found, tree_structure(next(iter(outputs.values()))))


@dataclass(frozen=True, slots=True)
class _Seam:
    """A leaf of the graph of the whole batch, and the tensor of a micro-batch behind it."""

    number: int
    part: Tensor
    leaf: Tensor


class WholeBatch:
    """A call of the model whose backward has not come.

    Attributes:
        output: the result of the call: real on the last stage, proxies before it.
        origin: the call, as its output knows it.
    """

    def __init__(
        self,
        stages: LocalStages,
        batches: Sequence[MicroBatch],
        numbers: range,
        whole: MicroBatch,
        division: Division,
        outputs: Dims | None,
    ) -> None:
        """Run the forwards.

        Args:
            stages: of this rank.
            batches: the micro-batches.
            numbers: of these in the step.
            whole: the batch.
            division: how it was cut.
            outputs: the dims along which the model's outputs for micro-batches are joined; None
                where all that follows the blocks must see the whole batch.
        """
        self._stages, self._numbers = stages, numbers
        for worker in stages.workers.values():
            worker.batches |= dict(zip(numbers, batches, strict=True))
        self._seams: list[_Seam] = []
        if stages.last is None:
            stages.act(stages.forwards(numbers))
            self.output = stages.outline(whole)
        else:
            self.output = behind_inputs(self._real(stages.last, whole, division, outputs), whole)
        self.origin = LossOrigin()
        self._nodes = self.origin.mark(self.output)
        mark_elsewhere(self.output, stages.last_blocks)

    def share(self) -> None:
        """Give the output its values on every stage; backward still begins on the last one.

        The other stages get tensors that know their call, so that a loss made of them is known,
        too: the ranks make it of equal values.
        """
        leaves, tree = tree_flatten(self.output)
        lacking = [isinstance(leaf, StageProxy) for leaf in leaves]
        at_last = [self._stages.last is not None and not lacks for lacks in lacking]
        agreed = self._stages.agree([*lacking, *at_last])
        wanted = [lacks and known for lacks, known in zip(*_halves(agreed), strict=True)]
        shared = {place: self._shared(leaves[place]) for place, wants in enumerate(wanted) if wants}
        if self._stages.last is None:
            self._nodes = self.origin.mark(list(shared.values()))
        self.output = tree_unflatten(
            [shared.get(place, leaf) for place, leaf in enumerate(leaves)], tree
        )

    def _shared(self, leaf: Tensor) -> Tensor:
        """Return a tensor of the output with the values of the last stage."""
        if not isinstance(leaf, StageProxy):
            self._stages.broadcast(leaf.detach().contiguous(), "outputs of the last stage")
            return leaf
        values = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._stages.device)
        self._stages.broadcast(values, "outputs of the last stage")
        # A view: the script may change it in place.
        return values.requires_grad_(leaf.requires_grad).view_as(values)

    def loss(self, targets: Any, loss_of: LossOf, dtype: torch.dtype) -> Tensor:
        """Return the loss that a function makes of the output: real on the last stage.

        Raises:
            UsageError: on all stages: something else goes into it.
        """
        wrong = 0
        if self._stages.last is None:
            loss: Tensor = StageProxy.like((), dtype, self._stages.device, requires_grad=True)
            self.origin.mark(loss)
        else:
            with self._stages.telling():
                loss = loss_of(self.output, targets).to(dtype)
            wrong = wrong_in(loss) if loss.requires_grad else 0
        refuse(self._stages.agree([wrong])[0])
        return loss

    def begin(self, loss: Tensor) -> None:
        """Run backward of a loss down to the blocks' tensors of this call and of others."""
        if self._stages.last is not None:
            with self._stages.inner.accumulating():
                self._stages.inner.backward(loss)

    def backward(self, synchronize: bool) -> None:
        """Run the backward of every micro-batch; to synchronize averages gradients over dp."""
        if self._stages.last is not None:
            self._seed(self._stages.last)
        actions = self._stages.backwards(self._numbers)
        self._stages.mark_final(actions if synchronize else ())
        self._stages.act(actions)

    def _real(
        self, last: StageWorker, whole: MicroBatch, division: Division, outputs: Dims | None
    ) -> Any:
        """Run the forwards; begin a graph of the whole batch at leaves."""
        last.kept = division.kept if outputs is None else None
        try:
            self._stages.act(self._stages.forwards(self._numbers))
        finally:
            last.kept = None
        if outputs is not None:
            found = {number: last.outputs.pop(number) for number in self._numbers}
            return joined_outputs(found, outputs, self._leaf)
        made = {number: last.made.pop(number) for number in self._numbers}
        given = joined_blocks(made, division, self._leaf)
        # Views, so that what the rest changes in place is no leaf.
        views = {block: [x.view_as(x) for x in tensors] for block, tensors in given.items()}
        return self._stages.finish(last.stage, whole, views)

    def _leaf(self, number: int, part: Tensor) -> Tensor:
        leaf = part.detach().requires_grad_(part.requires_grad)
        self._seams.append(_Seam(number, part, leaf))
        return leaf

    def _seed(self, last: StageWorker) -> None:
        """Let each micro-batch's backward begin at the gradients that the loss gave its tensors."""
        seams: dict[int, list[_Seam]] = {number: [] for number in self._numbers}
        for seam in self._seams:
            if seam.leaf.grad is not None:
                seams[seam.number].append(seam)
        for number, some in seams.items():
            gradients = [seam.leaf.grad for seam in some if seam.leaf.grad is not None]
            last.begin_at(number, [seam.part for seam in some], gradients)
        self._seams.clear()


def _halves(values: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]
