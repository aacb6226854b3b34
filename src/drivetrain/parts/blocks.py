"""The repeated blocks of a model, such as transformer layers: found, and conducted in a pass."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from torch import nn

from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain.parts.naming import clean_name, uncompiled
from drivetrain.parts.wrapping import unwrap_forward, wrap_forward

_LISTS = nn.ModuleList | nn.Sequential
_NEVER_CALLED = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict

_ORIGINAL = "_forward_before_hooks"

COMPILED_CALL = "_compiled_call_impl"
"""Where ``module.compile()`` keeps the compiled call of a module, hooks and forward in one."""

NamedModule: TypeAlias = tuple[str, nn.Module]


def repeated_blocks(model: nn.Module) -> list[NamedModule]:
    """Return the blocks that a model repeats, under the names of the user's uncompiled model.

    A block stands in a ``ModuleList`` or ``Sequential`` together with another of its class, holds
    parameters, and is more than one layer of ``torch.nn``. The outermost lists count: blocks inside
    of blocks are not looked for. A list inside a list is a block only if it holds no blocks.

    Returns:
        (name, module) of each block in the order of registration; a module that stands in several
        places comes once, under its first name. Empty when nothing repeats.
    """
    distinct: dict[int, NamedModule] = {}
    for name, block in _search(model, ""):
        distinct.setdefault(id(block), (clean_name(name), block))
    return list(distinct.values())


def model_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model in their order, by the names of its modules.

    These are the repeated blocks, and the largest modules beside them that hold parameters. Where
    nothing repeats, they are the model's children; a model without children is one part.
    """
    plain = uncompiled(model)
    blocks = {id(block) for _, block in repeated_blocks(model)}
    found: dict[int, NamedModule] = {}
    for name, part in _parts(plain, "", blocks):
        found.setdefault(id(part), (clean_name(name), part))
    return dict(found.values())


def _parts(module: nn.Module, prefix: str, blocks: set[int]) -> Iterator[NamedModule]:
    for name, child in module.named_children():
        opened = any(id(inner) in blocks for inner in child.modules())
        opened = opened or isinstance(child, _NEVER_CALLED)
        if id(child) not in blocks and opened:
            yield from _parts(child, f"{prefix}{name}.", blocks)
        elif next(iter(child.parameters()), None) is not None:
            yield prefix + name, child
    if not prefix and next(module.children(), None) is None:
        yield type(module).__name__, module


def _search(module: nn.Module, prefix: str) -> list[NamedModule]:
    children = [
        (prefix + name, child) for name, child in module._modules.items() if child is not None
    ]
    if not isinstance(module, _LISTS):
        return [block for name, child in children for block in _search(child, f"{name}.")]
    counts = Counter(_kind(child) for _, child in children)
    found = []
    for name, child in children:
        inside = _search(child, f"{name}.")
        repeated = _is_block(child) and counts[_kind(child)] > 1
        if repeated and not (inside and isinstance(child, nn.Sequential)):
            found.append((name, child))
        else:
            found += inside
    return found


def _kind(module: nn.Module) -> type[nn.Module]:
    return type(uncompiled(module))


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _NEVER_CALLED) or next(iter(module.parameters()), None) is None:
        return False
    whole = next(module.children(), None) is not None
    return whole or not type(module).__module__.startswith("torch.nn.")


class BlockConductor(Protocol):
    """Decides about the calls of blocks during one pass."""

    def call(self, index: int, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Return the block's result; ``compute`` is the block's own forward."""


class BlockHooks:
    """Takes the place of the blocks' ``forward``, in their own ``__dict__``, until ``close``.

    Outside of a pass, as when activations are computed again in backward, blocks are as they were.
    The conductor of a block that ``block.compile()`` compiled stands around the compiled call:
    compiled code cannot hold decisions that differ from pass to pass.

    Attributes:
        blocks: the modules, in order; none after ``close``.
    """

    def __init__(self, blocks: Sequence[NamedModule]) -> None:
        self._conductor: BlockConductor | None = None
        self.blocks = [block for _, block in blocks]
        self._compiled: list[tuple[nn.Module, Function]] = []
        for index, block in enumerate(self.blocks):
            self._stand_before(index, block)

    @contextmanager
    def conducted(self, conductor: BlockConductor) -> Iterator[None]:
        """Context of a pass in which a conductor decides; the conductor of an outer pass waits."""
        outer, self._conductor = self._conductor, conductor
        try:
            yield
        finally:
            self._conductor = outer

    def close(self) -> None:
        """Give the blocks their forward back."""
        for block in self.blocks:
            unwrap_forward(block, _ORIGINAL)
        for block, compiled in self._compiled:
            block.__dict__[COMPILED_CALL] = compiled
        self.blocks.clear()
        self._compiled.clear()

    def _stand_before(self, index: int, block: nn.Module) -> None:
        def around(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
            if self._conductor is None or module is not block:  # a copy computes as it is
                return compute(*args, **kwargs)
            return self._conductor.call(index, compute, args, kwargs)

        compiled = block.__dict__.get(COMPILED_CALL)
        if compiled is None:
            wrap_forward(block, _ORIGINAL, around)
        else:  # copies and pickles of the block do not inherit a compiled call
            self._compiled.append((block, compiled))
            block.__dict__[COMPILED_CALL] = lambda *args, **kwargs: around(
                block, compiled, args, kwargs
            )
