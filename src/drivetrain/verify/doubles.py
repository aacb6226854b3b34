"""A run computed in fp64, and without dropout: rounding shrinks to 1e-16, an error stays.

Models, buffers and floating inputs are cast. Where code asks for fp32, bf16 or fp16 by name, as
norms of language models do, it gets fp64 as well: a cast to fp32 in the middle of a forward would
bring the rounding back.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.nested import is_tensor, recursively_apply

_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward})


class Doubles(TorchFunctionMode):
    """While active, every dtype of fewer bits that torch is asked for is fp64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        if func in _CASTS:
            return Tensor.double(args[0])
        if func in _BACKWARDS:
            with self:  # functions of torch run without it, and backward may run a forward again
                return _backward(*args, **(kwargs or {}))
        given = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **given)


def _backward(
    outputs: Tensor | Sequence[Tensor],
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **named: Any,
) -> None:
    """Run backward as the functions of torch do, which would leave the mode again."""
    given = named.get("gradient", named.get("grad_tensors", gradients))
    tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    upstream = (given,) * len(tensors) if given is None or isinstance(given, Tensor) else given
    leaves = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    torch.autograd.graph._engine_run_backward(
        tensors,
        tuple(
            torch.ones_like(tensor) if gradient is None and tensor.requires_grad else gradient
            for tensor, gradient in zip(tensors, upstream, strict=True)
        ),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        leaves,
        allow_unreachable=True,
        accumulate_grad=True,
    )


@cache
def compute_in_doubles() -> None:
    """Let this process make and compute all floating point values in fp64 from now on."""
    torch.set_default_dtype(torch.float64)
    Doubles().__enter__()  # type: ignore[no-untyped-call]


def in_doubles(data: Any) -> Any:
    """Return nested data with every floating point tensor in fp64."""
    return recursively_apply(
        lambda tensor: tensor.to(torch.float64),
        data,
        test_type=lambda item: is_tensor(item) and item.dtype in _NARROW,
    )


def without_dropout(model: nn.Module) -> int:
    """Set the probabilities of all dropouts of a model to 0, and return how many there were.

    They are the numbers between 0 and 1 that modules keep under a name with "drop" in it, and the
    ``p`` of torch's own modules.
    """
    changed = 0
    for module in model.modules():
        own = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(module).items()):
            named = "drop" in name or (own and name == "p")
            if named and isinstance(value, float) and 0 < value <= 1:
                setattr(module, name, 0.0)
                changed += 1
    return changed


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
