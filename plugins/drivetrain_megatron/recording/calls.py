"""Runs a model once without values and notes how its blocks are called and its parameters used."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.parts.blocks import NamedModule, repeated_blocks
from drivetrain_megatron.recording.block_hooks import Gates
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.recorder import to_device
from drivetrain_megatron.recording.substitution import without_values

_FACTS = frozenset({Tensor.dtype.__get__, Tensor.device.__get__, Tensor.shape.__get__})  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Call:
    """How a block is called: the first activation among the arguments is what blocks pass on.

    A whole model may get none: tokens are no activation.

    Attributes:
        args: positional arguments.
        kwargs: arguments by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for one more call: blocks may change caches that they are given."""
        args, kwargs = tree_map(
            lambda x: x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x),
            (self.args, dict(self.kwargs)),
        )
        return args, kwargs


@dataclass(slots=True)
class Calls:
    """What one forward showed.

    Attributes:
        blocks: the model's repeated blocks, in the order of their first calls.
        arguments: how each was called first, by name; activations are placeholders.
        uses: how many functions of torch took each parameter outside of blocks, by its first name.
    """

    blocks: list[NamedModule] = field(default_factory=list)
    arguments: dict[str, Call] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)


def trace_calls(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Calls:
    """Run a model's forward on proxies; it is not changed, and nothing is computed in it.

    Args:
        model: the user's, also on the meta device.
        args: example inputs.
        kwargs: the same by name.
    """
    blocks = repeated_blocks(model)
    forward = model.forward
    with without_values(model) as substitutes:
        names = {id(proxy): name for name, proxy in substitutes.parameters.items()}
        tracer = _Tracer(blocks, names)
        given, named = to_device((tuple(args), dict(kwargs)), substitutes.device)
        with Gates(blocks).conducted(tracer), tracer, torch.no_grad():
            forward(*given, **named)
    return tracer.calls


class _Tracer(TorchFunctionMode):
    """Sees the calls of blocks, and every function of torch outside of them."""

    def __init__(self, blocks: Sequence[NamedModule], names: Mapping[int, str]) -> None:
        super().__init__()
        self.calls = Calls()
        self._blocks = blocks
        self._names = names
        self._depth = 0

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Note a block's call and run it."""
        name, _ = self._blocks[index]
        if name not in self.calls.arguments:
            self.calls.blocks.append(self._blocks[index])
            self.calls.arguments[name] = _placeholders(args, kwargs)
        self._depth += 1
        try:
            return compute(*args, **kwargs)
        finally:
            self._depth -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Count the parameters that a function takes."""
        result = func(*args, **(kwargs or {}))
        made = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
        if not self._depth and made and func not in _FACTS:
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._names:
                    self.calls.uses[self._names[id(leaf)]] += 1
        return result


def _placeholders(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return arguments without proxies; what can change, such as caches, is copied."""

    def placeholder(x: Any) -> Any:
        if isinstance(x, StageProxy):
            return torch.zeros(x.facts.shape, dtype=x.facts.dtype, device="cpu")
        return x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)

    given, named = tree_map(placeholder, (tuple(args), dict(kwargs)))
    return Call(given, named)
