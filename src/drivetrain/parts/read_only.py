"""Copies in the place of views: what a script writes into them would be lost, and is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError
from drivetrain.parts.torch_calls import writes_first


class CopyInstead(Tensor):
    """A copy that a script got in the place of a view: its writes there would be lost.

    Views of it are such tensors too; whatever is computed from it is an ordinary tensor.
    """

    _refusal: UsageError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a tensor that the script may change."""
        memo[id(self)] = own = self.detach().clone()
        return own

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, as an ordinary tensor."""
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse writes, and run everything else.

        Raises:
            UsageError: the function writes into the copy.
        """
        kwargs = kwargs or {}
        copies = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        first = tree_leaves([*args, *kwargs.values()][:1])
        if writes_first(func) and any(isinstance(leaf, cls) for leaf in first):
            raise copies[0]._refusal
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            storages = {copy.untyped_storage()._cdata: copy._refusal for copy in copies}
            return tree_map(lambda leaf: _read_only_view(leaf, storages), result)


def _read_only_view(leaf: Any, storages: Mapping[int, UsageError]) -> Any:
    """Refuse writes into a tensor that lies in the memory of a copy."""
    if type(leaf) is Tensor and leaf.layout is torch.strided:
        refused = storages.get(leaf.untyped_storage()._cdata)
        if refused is not None:
            return read_only(leaf, refused)
    return leaf


def read_only(copy: Tensor, refused: UsageError) -> Tensor:
    """Make a tensor refuse writes with an error."""
    copy.__class__ = CopyInstead
    copy._refusal = refused  # type: ignore[attr-defined]
    return copy
