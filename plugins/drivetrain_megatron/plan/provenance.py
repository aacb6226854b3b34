"""Runs one block and notes which linear layers feed which: the structure that a plan is made from.

Each tensor remembers the linear layers whose outputs have gone into it since the last linear layer.
A layer's own output also remembers what becomes of its features: into how many heads they are
reshaped, into which packed parts (query, key and value in one matrix) they are cut.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_megatron.tensor.linear import features_of, is_linear


@dataclass(slots=True)
class LinearUse:
    """One linear layer of a block, in the order of first calls.

    Attributes:
        name: of the module, inside of the block.
        inputs: its input features.
        outputs: its output features.
        fed_by: the linear layers whose outputs have gone into its input.
        heads: the dims that its output's features, or those of one part, are reshaped to, such as
            (heads, features of one) or (3, heads, features of one); empty when they are not.
        parts: (start, stop) of the parts that its output is cut into; empty when it is not.
        calls: how often it is called in one forward of the block.
    """

    name: str
    inputs: int
    outputs: int
    fed_by: frozenset[str]
    heads: tuple[int, ...] = ()
    parts: list[tuple[int, int]] = field(default_factory=list)
    calls: int = 1


@dataclass(frozen=True, slots=True)
class _Features:
    """Says that a tensor's last dim is a range of a linear layer's output features, in order."""

    name: str
    start: int
    stop: int


def trace_linears(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, LinearUse]:
    """Run a block and return its linear layers by name, in the order of their first calls.

    Args:
        block: with values; its forward runs once, without gradients.
        args: what it is called with.
        kwargs: likewise.
    """
    notes = _Notes()
    handles = []
    for name, module in block.named_modules():
        if is_linear(module):
            handles.append(module.register_forward_hook(_hook(notes, name)))
    try:
        with torch.no_grad(), notes:
            block(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return notes.uses


def _hook(notes: "_Notes", name: str) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        notes.linear(name, module, inputs[0], output)

    return note


class _Notes(TorchFunctionMode):
    """Carries the tags of tensors through every function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[str, LinearUse] = {}
        # torch's mapping by identity has no types.
        by_identity: Any = WeakIdKeyDictionary
        self._sources: MutableMapping[Tensor, frozenset[str]] = by_identity()
        self._features: MutableMapping[Tensor, _Features] = by_identity()

    def linear(self, name: str, module: nn.Module, given: Tensor, output: Tensor) -> None:
        """Note a call of a linear layer."""
        if name in self.uses:
            self.uses[name].calls += 1
        else:
            inputs, outputs = features_of(module)
            self.uses[name] = LinearUse(
                name, inputs, outputs, frozenset(self._sources.get(given, ()))
            )
        self._sources[output] = frozenset([name])
        self._features[output] = _Features(name, 0, output.shape[-1])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch and tag what it returns."""
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources: frozenset[str] = frozenset().union(*(self._sources.get(t, ()) for t in given))
        if sources:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for tensor in made:
                self._sources[tensor] = self._sources.get(tensor, frozenset()) | sources
                for source in given:
                    self._follow(source, tensor)
        return result

    def _follow(self, source: Tensor, made: Tensor) -> None:
        """Note what a function did to features: kept, cut, or reshaped to heads."""
        features = self._features.get(source)
        if features is None or made is source:
            return
        width = features.stop - features.start
        use = self.uses[features.name]
        if made.shape == source.shape:
            self._features.setdefault(made, features)
        elif made.dim() > source.dim() and made.numel() == source.numel():
            became = tuple(made.shape[source.dim() - 1 :])
            if made.shape[: source.dim() - 1] == source.shape[:-1] and prod(became) == width:
                use.heads = use.heads or became
        elif made.numel() == source.numel() and made.shape[-1] == width:
            self._features.setdefault(made, features)
        elif made.shape[:-1] == source.shape[:-1] and _is_view(made, source):
            offset = made.storage_offset() - source.storage_offset()
            start = features.start + offset // source.stride(-1)
            part = (start, start + made.shape[-1])
            if part not in use.parts:
                use.parts.append(part)
            self._features[made] = _Features(features.name, *part)


def _is_view(made: Tensor, source: Tensor) -> bool:
    return bool(made.untyped_storage()._cdata == source.untyped_storage()._cdata)
