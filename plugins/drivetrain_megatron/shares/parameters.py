"""The parameters of one model of which ranks have shares: who finds shares in them, and when."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.parts.norms import norms_of_each
from drivetrain.parts.rounds import after_backward, in_backward
from drivetrain.parts.wrapping import UninheritedHook
from drivetrain_megatron.shares.share import Share, ShareParameter
from drivetrain_megatron.tensor.behavior import (
    Own,
    attach,
    behavior_of,
    computing,
    know_shares,
)
from drivetrain_megatron.tensor.partition import Partition

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_TOUCHING = ("zero_grad", "train", "eval")
"""Methods of optimizers that look at each parameter, or write into it, beside their steps."""


class Shares:
    """The parameters of one model of which ranks have shares.

    Args:
        ranks: the axis ``tp``.

    Attributes:
        ranks: as given.
        steps: changes of values by optimizers and loads so far.
        closed: whether nobody can gather values any more.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks
        self.steps = 0
        self.closed = False
        self._all: list[Share] = []
        self._depth = 0
        self._forwards = 0
        self._backward = False
        self._handles: list[RemovableHandle] = []
        self._taken: list[tuple[dict[str, Any], str, Any]] = []
        self._norms: dict[float, dict[Share, Tensor]] = {}

    def add(
        self, name: str, parameter: nn.Parameter, partition: Partition, shape: tuple[int, ...]
    ) -> None:
        """Know one more parameter, and let hooks that a script has registered see the whole."""
        share = Share(name, parameter, partition, shape, self)
        share.wrap_hooks()
        self._all.append(share)

    def cover(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Let the parameters stand for the whole wherever the model does not compute."""
        if not self._all:
            return
        mine = {share.parameter for share in self._all}
        for module in model.modules():
            if know_shares(module, mine) and behavior_of(module) is None:
                attach(module, Own())  # its forward computes with the share, however it is called
        begin, end = UninheritedHook(self._begin_forward), UninheritedHook(self._end_forward)
        self._handles.append(model.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(model.register_forward_hook(end, always_call=True))
        for optimizer in optimizers:
            self.follow(optimizer)
        for share in self._all:
            share.cover()

    def follow(self, optimizer: Optimizer) -> None:
        """Let one more optimizer step shares."""
        if not self._all:
            return
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for name in _TOUCHING:
            given = getattr(optimizer, name, None)
            if callable(given):  # in __dict__, which copies and pickles of optimizers leave out
                self._taken.append((optimizer.__dict__, name, optimizer.__dict__.get(name)))
                optimizer.__dict__[name] = self._opened(given)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context in which parameters are shares."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def without(self, parameters: Collection[nn.Parameter]) -> Iterator[None]:
        """Context, inside of ``open``, in which these parameters alone are as they are."""
        known, chosen = self._all, set(parameters)
        self._all = [share for share in known if share.parameter not in chosen]
        self._leave()
        try:
            yield
        finally:
            self._enter()
            self._all = known

    def close(self) -> None:
        """Take hooks off; parameters go on to show facts of the whole, and refuse their values."""
        for handle in self._handles:
            handle.remove()
        for members, name, before in reversed(self._taken):
            members.pop(name, None)
            if before is not None:
                members[name] = before
        self._handles, self._taken = [], []
        self.closed = True

    def norm(self, share: Share, norm_type: float) -> Tensor:
        """Return the norm of a whole gradient; those of all are measured together. Collective."""
        together = self._all if share in self._all else [share]
        if share not in self._norms.get(norm_type, {}):
            counted = [each.place.counted() for each in together]
            device = share.parameter.device
            norms = norms_of_each(counted, norm_type, over=[self.ranks], device=device)
            self._norms[norm_type] = dict(zip(together, norms.unbind(), strict=True))
        return self._norms[norm_type][share]

    def forget_norms(self) -> None:
        """Forget norms: gradients have changed."""
        self._norms.clear()

    def open_until_backward_ends(self) -> None:
        """Let parameters be shares: a backward runs that no strategy has begun."""
        if not self._backward:
            self._backward = True
            self._uncover()
            after_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self._backward:
            self._backward = False
            self._cover()

    def _enter(self) -> None:
        computing.depth += 1
        if self._backward and not in_backward():
            self._end_backward()  # an exception has cut it short
        self._uncover()

    def _leave(self) -> None:
        computing.depth -= 1
        self._cover()

    def _uncover(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._norms.clear()
            for share in self._all:
                share.parameter.__class__ = share.beneath

    def _cover(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            for share in self._all:  # twice in each forward, backward and step: no calls
                parameter = share.parameter
                if (kind := type(parameter)) is not ShareParameter:
                    share.beneath, parameter.__class__ = kind, ShareParameter

    def _begin_forward(self, *_: Any) -> None:
        self._forwards += 1
        self._enter()

    def _end_forward(self, *_: Any) -> None:
        if self._forwards:  # not if a hook before the first of these raised
            self._forwards -= 1
            self._leave()

    def _before_step(self, *_: Any) -> None:
        self._enter()

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        self._leave()

    def _opened(self, given: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any, **kwargs: Any) -> Any:
            with self.open():
                return given(*args, **kwargs)

        return opened


def on_shares(method: MethodT) -> MethodT:
    """Let a method of a strategy, which has ``_shares``, find shares in the parameters."""

    @functools.wraps(method)
    def opened(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._shares.open():
            return method(self, *args, **kwargs)

    return cast(MethodT, opened)
