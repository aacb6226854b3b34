"""Gradients of a piece that count once all of it is computed, since memory may run out before.

They are taken from autograd's graph beside ``grad``, without hooks and without other ranks, so that
a try leaves nothing behind that would have to be undone. One backward sends their sum the usual
way, when the activations are gone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.errors import UsageError
from drivetrain.facade.prepared import PreparedModel
from drivetrain.runtime import rng


class Before:
    """The generators, the buffers and the gradients of models, as they are before a try.

    Args:
        models: those that may run.
    """

    def __init__(self, models: Sequence[PreparedModel]) -> None:
        self._random = rng.Snapshot()
        modules = [module for entry in models for module in entry.module.modules()]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules]
        self._values = {
            buffer: buffer.clone()
            for _, kept in self._buffers
            for buffer in kept.values()
            if buffer is not None
        }
        self._parameters = [parameter for entry in models for parameter in entry.parameters]
        self._gradients = self._present()

    def _present(self) -> list[tuple[Tensor | None, int]]:
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter would be gathered
            gradients = [parameter.grad for parameter in self._parameters]
            return [(each, 0 if each is None else each._version) for each in gradients]

    def check_gradients(self) -> None:
        """Refuse what the function did to gradients: it would count, or be lost, with the try.

        Raises:
            UsageError: they are no longer what they were.
        """
        for (now, version), (before, earlier) in zip(self._present(), self._gradients, strict=True):
            if now is not before or version != earlier:
                raise UsageError(
                    "expected a function of each_piece() that leaves .grad to "
                    "accelerator.backward(), found one that changed it: loss.backward(), a "
                    "backward within backward, or gradients cleared or clipped; clear and clip "
                    "after each_piece(), or take micro_batches(), where memory may not run out"
                )

    @torch.no_grad()
    def restore(self) -> None:
        """Put generators and buffers back."""
        rng.restore(self._random.packed())
        for holder, kept in self._buffers:
            holder.clear()
            holder.update(kept)
        for buffer, values in self._values.items():
            buffer.copy_(values)


class PieceGradients:
    """What the backwards of a piece bring: the weighted sum over its losses."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._weight = 0.0
        self._gradients: dict[Tensor, Tensor] = {}  # in the order in which they come

    def add(self, loss: Tensor, scaled: Tensor, weight: float, options: Mapping[str, Any]) -> None:
        """Compute the gradients of one more backward.

        Args:
            loss: its value counts, times the weight.
            scaled: the loss as it enters backward.
            weight: how much it counts; 0: nothing, whatever its value.
            options: those of ``Tensor.backward``.

        Raises:
            UsageError: options that ask for more than gradients, or a reentrant checkpoint.
        """
        if options.keys() - {"retain_graph"}:
            raise UsageError(
                "expected backward() with retain_graph alone in each_piece(), found "
                f"{', '.join(options)}; take micro_batches(), where memory may not run out"
            )
        leaves = _leaves(scaled)
        found: Sequence[Tensor | None] = ()
        if leaves:
            with _without_hooks(leaves), _explained_checkpoints():
                found = torch.autograd.grad(scaled, leaves, allow_unused=True, **options)
        value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        counted = value * weight if weight else torch.zeros_like(value)
        came = {leaf: each for leaf, each in zip(leaves, found, strict=False) if each is not None}
        if not weight:
            came = {leaf: torch.zeros_like(each) for leaf, each in came.items()}
        self._join(counted, weight, came)

    @property
    def is_empty(self) -> bool:
        """Whether no backward came yet."""
        return self._loss is None

    def join(self, other: "PieceGradients") -> None:
        """Add what another part of the piece brings."""
        if other._loss is not None:
            self._join(other._loss, other._weight, other._gradients)

    def _join(self, loss: Tensor, weight: float, gradients: Mapping[Tensor, Tensor]) -> None:
        self._loss = loss if self._loss is None else self._loss + loss
        self._weight += weight
        for leaf, gradient in gradients.items():
            earlier = self._gradients.get(leaf)
            # Sums of narrow gradients are rounded once, when the backward takes them.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._gradients[leaf] = gradient if earlier is None else earlier.to(wide) + gradient

    def send(self, backward: Callable[[Tensor, float], None]) -> None:
        """Run the backward of the whole piece, with the mean loss and its weight."""
        if self._loss is None:
            return
        loss = (self._loss / (self._weight or 1.0)).requires_grad_()
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter would be gathered
            while self._gradients:
                loss = _Given.apply(loss, *self._gradients.popitem())  # type: ignore[no-untyped-call]
        backward(loss, self._weight)


class _Given(torch.autograd.Function):
    """A loss whose backward gives a parameter a gradient that was computed before."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None  # autograd may take its memory
        return above, gradient, None


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors that a backward would give gradients, in the order in which they come."""
    last: dict[Any, float] = {}
    found, seen = [loss.grad_fn], {loss.grad_fn}
    with torch._C.DisableTorchFunctionSubclass():
        while found:
            node: Any = found.pop()
            for following, _ in node.next_functions if node is not None else ():
                if hasattr(following, "variable"):
                    number = node._sequence_nr()
                    last[following] = min(last.get(following, inf), number)
                elif following not in seen:
                    seen.add(following)
                    found.append(following)
        return [each.variable for each in sorted(last, key=lambda each: -last[each])]


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Take hooks off, which are for what the backward of the whole piece brings."""
    # The very dicts, which the handles of the hooks know.
    taken = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in taken:
            hooks.update(kept)


@contextmanager
def _explained_checkpoints() -> Iterator[None]:
    """Context in which a checkpoint that only ``Tensor.backward`` can run says what to change."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise UsageError(
            "expected checkpoints with use_reentrant=False in each_piece(), found use_reentrant="
            "True, whose backward writes .grad itself; change it, or take micro_batches(), where "
            "memory may not run out"
        ) from error
