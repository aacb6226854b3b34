"""Tensors that hooks collect inside of blocks, such as router logits for an auxiliary loss.

A forward hook on a module inside of a block may keep the module's result for code after the block.
On a stage where the block does not run, the hook is called with the tensors that this stage has
received, or with proxies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.parts.wrapping import hooks_of_script
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.structure import PLAIN, TensorMeta, changed

Modules: TypeAlias = Mapping[str, nn.Module]


class SeenCall(NamedTuple):
    """A call of a module inside of a block: its name there, its arguments, its result."""

    name: str
    given: Any
    result: Any


@dataclass(frozen=True, slots=True)
class HookedCall:
    """The facts of a call of a module with hooks.

    Attributes:
        name: of the module inside of its block.
        given: its arguments (args, kwargs), with a ``TensorMeta`` in the place of a tensor.
        result: likewise.
        leaf: the place of its first tensor among those that the block makes.
    """

    name: str
    given: Any
    result: Any
    leaf: int

    @property
    def metas(self) -> list[TensorMeta]:
        """The facts of the tensors in its result, in order."""
        return [leaf for leaf in tree_leaves(self.result, _is_meta) if _is_meta(leaf)]

    @property
    def leaves(self) -> range:
        """The places of the tensors in its result among all tensors of the block."""
        return range(self.leaf, self.leaf + len(self.metas))

    def tell_hooks(self, block: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Call the script's hooks with given tensors in the result, and proxies as arguments."""
        module, waiting = block.get_submodule(self.name), iter(tensors)
        args, kwargs = _filled(self.given, lambda meta: StageProxy.like(*meta[:2], device))
        result = _filled(self.result, lambda _: next(waiting))
        for number, hook in hooks_of_script(module).items():
            named = (kwargs,) if number in module._forward_hooks_with_kwargs else ()
            hook(module, args, *named, result)


def hooked_modules(block: nn.Module) -> Modules:
    """Return the modules inside of a block on which the script has put forward hooks."""
    return {
        name: module for name, module in block.named_modules() if name and hooks_of_script(module)
    }


@contextmanager
def calls_of(modules: Modules) -> Iterator[list[SeenCall]]:
    """Context that yields the calls of modules, in the order of their ends."""
    seen: list[SeenCall] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, result: seen.append(SeenCall(name, (args, kwargs), result))

    handles = [
        module.register_forward_hook(noted(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def facts_of_calls(seen: Sequence[SeenCall], first: int) -> list[HookedCall]:
    """Return the facts of a block's calls, whose tensors follow those of the block's result."""
    found: list[HookedCall] = []
    for call in seen:
        given, result = tree_map(_fact, (call.given, call.result))
        found.append(HookedCall(call.name, given, result, first))
        first += len(found[-1].metas)
    return found


def run_with_hooks(
    name: str, block: nn.Module, expected: Sequence[HookedCall], compute: Callable[[], Any]
) -> tuple[Any, list[Tensor]]:
    """Return the result of a block, and the tensors that hooks collect inside, in order.

    Raises:
        UsageError: modules with hooks were called in another way than expected.
    """
    with calls_of({call.name: block.get_submodule(call.name) for call in expected}) as seen:
        result = compute()
    found = [[leaf for leaf in tree_leaves(c.result) if isinstance(leaf, Tensor)] for c in seen]
    calls = [(call.name, len(tensors)) for call, tensors in zip(seen, found, strict=True)]
    if calls != (wanted := [(call.name, len(call.metas)) for call in expected]):
        what = "results (module, tensors) for hooks to collect"
        raise changed(name, f"{what} {calls}", f"{what} {wanted}")
    return result, [tensor for tensors in found for tensor in tensors]


def tell_hooks(
    block: nn.Module, calls: Sequence[HookedCall], tensors: Sequence[Tensor], device: torch.device
) -> None:
    """Call the script's hooks inside of a block with given tensors in the results, in order."""
    waiting = iter(tensors)
    for call in calls:
        call.tell_hooks(block, [next(waiting) for _ in call.leaves], device)


def _fact(leaf: Any) -> Any:
    """Return the facts of a tensor, and plain values as they are: objects are not kept alive."""
    if isinstance(leaf, Tensor):
        return TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, PLAIN) else None


def _filled(tree: Any, make: Callable[[TensorMeta], Tensor]) -> Any:
    return tree_map(lambda leaf: make(leaf) if _is_meta(leaf) else leaf, tree, is_leaf=_is_meta)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, TensorMeta)
