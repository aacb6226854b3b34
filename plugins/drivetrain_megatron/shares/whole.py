"""Whole values of a tensor of which each rank has a share, copied for a script.

The copy stands for the tensor's own memory: whatever is written into it, or into a view of it, goes
to the shares, and values of before a step are not given out.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError
from drivetrain.parts.guard import (
    Arguments,
    Function,
    Keywords,
    asks_facts,
    targets,
    writes_first,
)


class WholeCopy:
    """A copy of whole values, and its tie to what it was copied from.

    Args:
        name: of the parameter.
        values: whole.
        put: takes this rank's share of the values over; None when the tie is cut.
        moment: tells one state of the shares from another.
    """

    def __init__(
        self, name: str, values: Tensor, put: Callable[[Tensor], None], moment: Callable[[], Any]
    ) -> None:
        self._name = name
        self._values = values
        self._put: Callable[[Tensor], None] | None = put
        self._moment = moment
        self._seen = moment()

    def refresh(self, values: Tensor) -> None:
        """Take the values of now."""
        self._values.copy_(values)
        self._seen = self._moment()

    def shown(self) -> "WholeTensor":
        """Return the values for a script."""
        return self.view(self._values.detach())

    def view(self, view: Tensor) -> "WholeTensor":
        """Let a view of the values be one whose writes reach the shares."""
        shown: Any = view
        shown.__class__ = WholeTensor
        shown._copy = self
        return shown  # type: ignore[no-any-return]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the values."""
        dense = tensor.layout is torch.strided and not tensor.is_meta
        mine = self._values.untyped_storage()._cdata
        return dense and tensor.untyped_storage()._cdata == mine

    def check(self) -> None:
        """Refuse values of before a step.

        Raises:
            UsageError: names the parameter.
        """
        if self._put is not None and self._seen != self._moment():
            raise UsageError(
                f"expected values of {self._name!r} as they are now, found a copy from before they "
                "changed: ranks hold shares of them; read the parameter, or state_dict(), again, "
                "or keep a clone()"
            )

    def written(self) -> None:
        """Let the shares follow."""
        if self._put is not None:
            self._put(self._values)
            self._seen = self._moment()

    def cut(self) -> None:
        """Go on as ordinary memory: the tensor has got another one."""
        self._put = None


class WholeTensor(Tensor):
    """What a script gets of a copy: the copy itself, or a view of it."""

    _copy: WholeCopy

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Run a function; let shares follow what it writes, and its views be such tensors."""
        if any(issubclass(kind, nn.Parameter) for kind in types):
            return NotImplemented  # one of which this rank has a share: it brings its values first
        kwargs = kwargs or {}
        copies = {leaf._copy for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)}
        if asks_facts(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for one in copies:
            one.check()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for one in _written(func, args, kwargs):
            one.written()
        return tree_map(lambda leaf: _viewed(leaf, copies), result)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def plain(self) -> Tensor:
        """Return an ordinary tensor with the same memory, for files and copies."""
        self._copy.check()
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()


def _written(func: Function, args: Arguments, kwargs: Keywords) -> set[WholeCopy]:
    first = [*args, *kwargs.values()][:1] if writes_first(func) else targets("", args, kwargs)
    return {leaf._copy for leaf in tree_leaves(first) if isinstance(leaf, WholeTensor)}


def _viewed(leaf: Any, copies: set[WholeCopy]) -> Any:
    """Return a view of a copy as such, and everything else as it is."""
    if type(leaf) is Tensor:
        return next((one.view(leaf) for one in copies if one.holds(leaf)), leaf)
    return leaf
