"""A call of a torch function, as ``__torch_function__`` sees it, and the tensors it writes into."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from drivetrain.parts.guard import name_of, writes_first


class TorchCall(NamedTuple):
    """A call of torch's, as ``__torch_function__`` gets it."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the function or method; for access to an attribute, the attribute's."""
        return name_of(self.func)

    @property
    def written(self) -> Any:
        """The argument that the call writes into: tensors in any nesting, or None."""
        if writes_first(self.func) or self.replaces or self._asks_in_place:
            return next(iter((*self.args, *self.kwargs.values())), None)
        return self.kwargs.get("out")

    @property
    def replaces(self) -> bool:
        """Whether it changes more than values (storage, graph), or fills a buffer by sending."""
        # Collectives of torch.distributed fill their first argument.
        is_collective = str(getattr(self.func, "__module__", "")).startswith("torch.distributed")
        return is_collective or self.name in _REPLACING or self.name.endswith(" =")

    @property
    def is_recorded(self) -> bool:
        """Whether autograd would have to know of the writing."""
        return torch.is_grad_enabled() and any(
            isinstance(each, Tensor) and each.requires_grad
            for each in tree_leaves((tuple(self.args), dict(self.kwargs)))
        )

    @property
    def is_by_element(self) -> bool:
        """Whether each element of the first argument becomes a function of itself alone."""
        return self.name in _BY_ELEMENT and self.has_only_numbers

    @property
    def rest(self) -> Sequence[Any]:
        """The positional arguments behind the first."""
        return self.args[1:]

    @property
    def has_only_numbers(self) -> bool:
        """Whether the arguments behind the first are numbers."""
        return all(isinstance(each, int | float) for each in self.rest) and not self.kwargs

    @property
    def _asks_in_place(self) -> bool:
        # With gradients, what such a function returns is all that its callers go on with.
        return self.kwargs.get("inplace") is True and not self.is_recorded


# fmt: off
_REPLACING = frozenset({"set_", "detach_", "share_memory_", "rename_"})
_BY_ELEMENT = frozenset({
    "add_", "sub_", "mul_", "multiply_", "div_", "divide_", "true_divide_", "__iadd__", "__isub__",
    "__imul__", "__itruediv__", "fill_", "zero_", "neg_", "tanh_",
})
