"""One stage at work: forward and backward of micro-batches, and the tensors kept between."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from drivetrain.strategy import Strategy
from drivetrain_megatron.dropout import Dropout
from drivetrain_megatron.marks import absent_like, is_absent
from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.pipeline.other_stages import SharedParameters
from drivetrain_megatron.pipeline.stages import Stage
from drivetrain_megatron.pipeline.transfer import Meta
from drivetrain_megatron.tensor.linear import WeightGradients

LossOf = Callable[[Any, Any], Tensor]
"""Makes the loss of what the model returned and of the micro-batch's targets."""


Send = Callable[[Sequence[Tensor]], None]
"""Sends the gradients of a stage's inputs to the stage before."""


@dataclass(slots=True)
class _InFlight:
    """The tensors of a micro-batch that are kept until its backward, which begins at the roots."""

    received: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]


class StageWorker:
    """A stage during one step.

    Each forward runs in a context ``besides``, where an earlier stage of the rank has run the code
    around blocks, too.

    Attributes:
        outputs: of the model, by micro-batch: real on the last stage only.
        kept: indices of blocks whose tensors are kept in ``made``, by micro-batch and block: the
            rest of the model then runs on those of the whole batch. None on ordinary passes.
        final: the micro-batch whose backward is the rank's last and synchronises gradients; None
            while gradients stay local.
        final_weight: the same, where the half for the weights is the last.
    """

    def __init__(
        self,
        stage: Stage,
        inner: Strategy[Any],
        shared: SharedParameters,
        weights: WeightGradients,
        dropout: Dropout,
        device: torch.device,
        besides: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.stage = stage
        self._besides = besides
        self._inner = inner
        self._shared = shared
        self._weights = weights
        self._dropout = dropout
        self._device = device
        self._kept: dict[int, _InFlight] = {}
        self._returned: dict[int, list[Meta]] = {}
        self.batches: dict[int, MicroBatch] = {}
        self.outputs: dict[int, Any] = {}
        self.kept: Collection[int] | None = None
        self.made: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        self.losses: dict[int, Tensor] = {}
        self.final: int | None = None
        self.final_weight: int | None = None
        self.loss_of: LossOf | None = None
        self.seeds: dict[int, Tensor] = {}
        self.losses_to_run: dict[int, Tensor] = {}
        self._begin: dict[int, list[Tensor]] = {}

    # --- what the interpreter asks ---

    def input_metas(self, micro_batch: int) -> list[Meta]:
        """Return the facts of the tensors that come from the stage before."""
        batch = self.batches[micro_batch]
        return [Meta(m.shape, m.dtype) for m in self.stage.receives(batch.args, batch.kwargs)]

    def output_metas(self, micro_batch: int) -> list[Meta]:
        """Return the facts of the gradients that come back."""
        if micro_batch in self._returned:
            return self._returned[micro_batch]
        batch = self.batches[micro_batch]
        sent = self.stage.sends(batch.args, batch.kwargs)
        return [Meta(m.shape, m.dtype) for m in sent if m.requires_grad]

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage; keep its graph for backward."""
        batch = self.batches[micro_batch]
        metas = self.stage.receives(batch.args, batch.kwargs)
        grad = torch.is_grad_enabled()
        received = tuple(
            tensor.requires_grad_(grad and meta.requires_grad)
            for tensor, meta in zip(inputs, metas, strict=True)
        )
        # A view, so that what the block changes in place is not the leaf itself.
        views = tuple(t.view_as(t) if t.requires_grad else t for t in received)
        with self._besides(), self._dropout.forward(batch.number), self._inner.running():
            found = self.stage.run(batch.args, batch.kwargs, views, self.kept)
        self.outputs[micro_batch], roots = found.output, found.sent
        if self.kept is not None:
            made = {self.stage.blocks.start - 1: received, **found.made}
            self.made[micro_batch] = {i: made[i] for i in self.kept if i in made}
        if self.stage.is_last and self.loss_of is not None:
            loss = self.loss_of(found.output, batch.targets)
            self.losses[micro_batch] = loss.detach()
            self.outputs[micro_batch] = None
            roots = (loss,)
        if grad:
            # Dtypes depend on autocast, and backward runs outside of it.
            self._returned[micro_batch] = self.output_metas(micro_batch)
            self._kept[micro_batch] = _InFlight(received, roots)
        return found.sent

    def backward(self, micro_batch: int, gradients: Sequence[Tensor], send: Send) -> None:
        """Run backward of a micro-batch; gradients of inputs are sent as soon as they are there."""
        if micro_batch in self.losses_to_run:
            self._backward_from(self.losses_to_run.pop(micro_batch), micro_batch, send)
            return
        kept = self._taken(micro_batch)
        roots = [root for root in kept.roots if root.requires_grad]
        given = list(gradients)
        if self.stage.is_last:
            roots, given = self._last_roots(micro_batch, roots)
        else:
            reached = [not is_absent(gradient) for gradient in given]
            roots, given = list(compress(roots, reached)), list(compress(given, reached))
        sender = _Sender(kept.received, send)
        self._run_backward(roots, given, synchronize=self.final == micro_batch)
        sender.finish()

    def _last_roots(
        self, micro_batch: int, roots: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return where backward of the last stage begins, and with which gradients."""
        if micro_batch in self._begin:
            return roots, self._begin.pop(micro_batch)
        if micro_batch not in self.seeds:
            return [], []  # its loss does not count, and may be no number
        return roots, [self.seeds[micro_batch].to(root.dtype) for root in roots]

    def begin_at(
        self, micro_batch: int, roots: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Say where the backward of a micro-batch of the last stage begins."""
        self._kept[micro_batch].roots = tuple(roots)
        self._begin[micro_batch] = list(gradients)

    def _backward_from(self, loss: Tensor, micro_batch: int, send: Send) -> None:
        """Run backward of the last stage from a loss that the script made of its output."""
        kept = self._taken(micro_batch)
        sender = _Sender(kept.received, send)
        final = self.final == micro_batch
        with nullcontext() if final else self._inner.accumulating():
            self._inner.backward(loss)
        if final:
            self._shared.send_gradients()
        sender.finish()

    def backward_input(self, micro_batch: int, gradients: Sequence[Tensor], send: Send) -> None:
        """Run the half of backward that makes the gradients of the inputs."""
        with self._weights.collecting(micro_batch):
            self.backward(micro_batch, gradients, send)

    def backward_weight(self, micro_batch: int) -> None:
        """Run the other half."""
        final = self.final_weight == micro_batch
        roots = self._weights.roots(micro_batch)
        self._run_backward(roots, [torch.ones_like(root) for root in roots], synchronize=final)

    # --- inside ---

    def clear(self) -> None:
        """Forget micro-batches whose backward nobody asked for."""
        for kept in (self._kept, self.batches, self.outputs, self.made, self.losses, self.seeds):
            kept.clear()
        self._begin.clear()
        self._returned.clear()
        self.final = self.final_weight = None
        self._weights.clear()

    def _taken(self, micro_batch: int) -> _InFlight:
        self._returned.pop(micro_batch, None)
        return self._kept.pop(micro_batch)

    def _run_backward(
        self, roots: Sequence[Tensor], gradients: list[Tensor], *, synchronize: bool
    ) -> None:
        """Run backward from tensors with given gradients; the list of these is emptied."""
        tensors = list(roots)
        if synchronize:
            # Copies' gradients enter this very backward: the data-parallel strategy then meets each
            # gradient once, and whole.
            parameters, summed = self._shared.receive_gradients()
            tensors += parameters
            gradients += summed
        with nullcontext() if synchronize else self._inner.accumulating():
            if tensors or synchronize:
                self._inner.backward(seeded(tensors, gradients, self._device))
        if synchronize:
            self._shared.send_gradients()


class _Sender:
    """Sends the gradients of received leaves when the last has come."""

    def __init__(self, leaves: Sequence[Tensor], send: Send) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._send = send
        self._missing = len(self._leaves)
        for leaf in self._leaves:
            leaf.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Send the gradients that have not been sent."""
        if self._missing:
            self._missing = 0
            self._send_all()

    def _arrived(self, leaf: Tensor) -> None:
        # Inside of backward: the stage before begins while weights' gradients are computed here.
        self._missing -= 1
        if not self._missing:
            self._send_all()

    def _send_all(self) -> None:
        gradients = [absent_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        self._send(gradients)


def find_loss(output: Any) -> Tensor | None:
    """Return the loss in a model's output, ``output.loss`` or a 0-d output; else None."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        loss = leaves[0] if len(leaves) == 1 else None
    is_loss = isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point()
    return loss if is_loss else None


def seeded(tensors: Sequence[Tensor], gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return a 0-d loss whose backward gives these tensors these gradients.

    A data-parallel strategy runs backward from a loss; a stage has the gradients of its outputs.
    Without any tensors the loss reaches nothing. The list of gradients is emptied in backward,
    since a gradient that nobody else holds becomes a parameter's own instead of being copied.
    """
    if not tensors:
        return torch.zeros((), device=device, requires_grad=True)
    loss: Tensor = _Seeded.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return loss


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given
