"""Records one forward of a model on proxies: its blocks in order, and what is used where.

The model's repeated blocks divide a forward into phases: phase 0 is what happens before the first
block, phase ``k`` the rest up to and with block ``k``, phase ``n`` what follows the last of ``n``
blocks. Every proxy knows the phases that its values come from. A stage holds whole phases and gets
the output of the block before them; whatever else reaches over a boundary is a dependency that
keeps phases together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from drivetrain.errors import UsageError
from drivetrain.parts.blocks import NamedModule, repeated_blocks
from drivetrain.parts.naming import clean_name
from drivetrain_megatron.recording.block_hooks import Gates
from drivetrain_megatron.recording.proxy import StageProxy, proxy_of
from drivetrain_megatron.recording.structure import Structure, describe, everywhere, named_leaves
from drivetrain_megatron.recording.substitution import Substitutes, without_values

_BLANK = frozenset({torch.zeros, torch.empty, torch.zeros_like, Tensor.new_zeros})
"""Functions whose result a block may go on to fill, so that in a recording it is a proxy."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block as it was called.

    Attributes:
        name: of the module, as in the user's uncompiled model.
        arguments: names of the leaves of its arguments.
        output: what it returned.
        like: for each carried tensor of the output, the argument that has the same shape and
            dtype, by its place; None for one that has none.
        work: floating point operations of its matrix products, for the recorded inputs.
    """

    name: str
    arguments: tuple[str, ...]
    output: Structure
    like: tuple[int | None, ...]
    work: int


@dataclass(frozen=True, slots=True)
class Dependency:
    """Something that a phase needs of an earlier one, besides what the block before it returns.

    Attributes:
        source: the phase that it comes from.
        consumer: the phase that needs it.
        what: the block and its argument, in words.
    """

    source: int
    consumer: int
    what: str


@dataclass(frozen=True, slots=True)
class Use:
    """Where a parameter or buffer is used.

    Attributes:
        names: all its names in the model; the first is the one in checkpoints.
        phases: where it is used; a parameter of a block is used in the phase of the block. Empty
            when nothing uses it.
        ambient: whether outside of blocks something follows from it that needs no parameter, so
            that every stage computes it; only for buffers.
    """

    names: tuple[str, ...]
    phases: frozenset[int]
    ambient: bool = False


@dataclass(frozen=True, slots=True)
class Recording:
    """What one forward of a model showed.

    Attributes:
        blocks: in the order in which they are called.
        parameters: the distinct parameters by their first name.
        buffers: the buffers by name.
        between: floating point operations outside of blocks, for each phase.
        dependencies: what keeps phases together.
    """

    blocks: tuple[Block, ...]
    parameters: Mapping[str, Use]
    buffers: Mapping[str, Use]
    between: tuple[int, ...]
    dependencies: tuple[Dependency, ...]

    @property
    def tied(self) -> dict[str, Use]:
        """The parameters that are used in several phases."""
        return {name: use for name, use in self.parameters.items() if len(use.phases) > 1}

    def costs(self) -> list[float]:
        """Return the estimated cost of each block, with what happens between it and the one before.

        The cost before the first block and after the last is in ``between[0]`` and ``between[-1]``.
        """
        n = len(self.blocks)
        return [
            float(block.work + (self.between[k] if 0 < k < n else 0))
            for k, block in enumerate(self.blocks)
        ]


def record(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
    """Run a model's forward once on proxies; nothing is computed in it and it is not changed.

    Args:
        model: the user's model, also one on the meta device, in train or eval mode.
        args: example inputs as in training.
        kwargs: the same by name.

    Raises:
        UsageError: the model has no repeated blocks, calls one twice, or depends on values.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            f"expected a model with repeated blocks, such as the layers of a transformer in an "
            f"nn.ModuleList, found none in {type(model).__name__}: a pipeline cuts between blocks; "
            "put what repeats, modules of several layers, into an nn.ModuleList or nn.Sequential"
        )
    forward = model.forward
    with without_values(model) as substitutes:
        recorder = _Recorder(blocks, substitutes)
        inputs = to_device((tuple(args), dict(kwargs)), substitutes.device)
        with Gates(blocks).conducted(recorder), recorder, torch.enable_grad():
            output = forward(*inputs[0], **inputs[1])
        recorder.finish(output)
        return recorder.recording(model)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return inputs with their tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def block_order(recording: Recording, model: nn.Module) -> list[NamedModule]:
    """Return a model's blocks in the order in which they are called."""
    modules = dict(repeated_blocks(model))
    return [(block.name, modules[block.name]) for block in recording.blocks]


class _Recorder(TorchFunctionMode):
    """Sees every function of torch and every call of a block in one forward.

    Args:
        candidates: the blocks in the order of registration.
        substitutes: what stands in place of parameters and buffers.
    """

    def __init__(self, candidates: Sequence[NamedModule], substitutes: Substitutes) -> None:
        super().__init__()
        self._candidates = candidates
        self._substitutes = substitutes
        self._names = {id(proxy): name for name, proxy in substitutes.parameters.items()}
        self._buffers = {id(buffer): name for name, buffer in substitutes.buffers.items()}
        self._used: dict[str, set[int]] = {name: set() for name in substitutes.parameters}
        self._buffer_used: dict[str, set[int]] = {name: set() for name in substitutes.buffers}
        self._ambient: set[str] = set()
        self._order: list[int] = []
        self._blocks: list[Block] = []
        self._dependencies: dict[tuple[int, int], Dependency] = {}
        self._work = [0]
        self._inside: str | None = None
        self._begin_phase()

    @property
    def phase(self) -> int:
        """The phase that runs."""
        return len(self._blocks)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note which parameters and buffers a function uses, and its work."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._inside is not None and func in _BLANK and not isinstance(result, StageProxy):
            return proxy_of(result)
        made = [leaf for leaf in _tensors(result) if isinstance(leaf, StageProxy)]
        self._work[-1] += sum(proxy.work for proxy in made if id(proxy) not in self._names)
        if result is None or made or any(isinstance(leaf, Tensor) for leaf in _tensors(result)):
            for tensor in _tensors((args, kwargs)):
                self._note(tensor, func, any(proxy.phases for proxy in made))
        return result

    def _note(self, tensor: Tensor, func: Any, dependent: bool) -> None:
        name = self._names.get(id(tensor))
        if name is not None:
            self._used[name].add(self.phase)
        buffer = self._buffers.get(id(tensor))
        if buffer is not None:
            self._buffer_used[buffer].add(self.phase)
            if self._inside is None and not dependent:
                self._ambient.add(buffer)
        if self._inside is not None and isinstance(tensor, StageProxy):
            what = f"{getattr(func, '__name__', func)} in block {self._inside!r}"
            self._depend(tensor, f"a tensor that {what} uses and that is no argument of the block")

    def _depend(self, leaf: Any, what: str) -> None:
        """Note a tensor that comes from an earlier phase."""
        if isinstance(leaf, StageProxy) and leaf.phases and min(leaf.phases) < self.phase:
            key = (min(leaf.phases), self.phase)
            self._dependencies.setdefault(key, Dependency(*key, what))

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a block on proxies and note its arguments and its output."""
        name = self._candidates[index][0]
        self._check_call(index, name)
        named = named_leaves(args, kwargs)
        for argument, leaf in named:
            self._depend(leaf, f"argument {argument!r} of block {name!r}")
        self._work.append(0)
        self._inside = name
        result = compute(*args, **kwargs)
        self._inside = None
        leaves = [leaf for _, leaf in named]
        output = describe(name, leaves, result)
        work = self._work.pop()
        arguments = tuple(argument for argument, _ in named)
        like = _like(output, leaves)
        self._order.append(index)
        self._blocks.append(Block(name, arguments, output, like, work))
        self._work.append(0)
        self._begin_phase()
        return output.build(name, self._as_carried(output.carried(name, result)), leaves)

    def _check_call(self, index: int, name: str) -> None:
        if self._inside is not None:
            raise UsageError(
                f"expected blocks one after another, found {name!r} called by {self._inside!r}: a "
                "pipeline cuts between blocks that do not call each other"
            )
        if index in self._order:
            raise UsageError(
                f"expected every repeated block to be called once in a forward, found {name!r} "
                "called twice: its weights would be needed on several stages at different times. "
                "Use a model whose layers have their own weights, or no pipeline (pp: 1)"
            )

    def _as_carried(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors that come from this phase, as they will when another stage sends them."""
        carried: list[Tensor] = []
        for tensor in tensors:
            proxy = proxy_of(tensor)
            proxy.phases = frozenset({self.phase})
            carried.append(proxy)
        return carried

    def _begin_phase(self) -> None:
        for proxy in self._substitutes.parameters.values():
            proxy.phases = frozenset({self.phase})

    def finish(self, output: Any) -> None:
        """Check the order of calls and the model's output.

        Raises:
            UsageError: a block was not called.
        """
        missing = [name for i, (name, _) in enumerate(self._candidates) if i not in self._order]
        if missing:
            raise UsageError(
                f"expected every repeated block to be called in a forward, found that "
                f"{', '.join(missing[:3])} and {max(len(missing) - 3, 0)} more were not: blocks "
                "must not be skipped, also not at random (LayerDrop)"
            )
        for name, leaf in named_leaves((output,), {}):
            if not everywhere(leaf) and max(leaf.phases) == self.phase:
                self._depend(leaf, f"the model's output {name!r}")

    def recording(self, model: nn.Module) -> Recording:
        """Return what was seen."""
        aliases = self._substitutes.aliases
        for phase, index in enumerate(self._order):
            prefix = self._candidates[index][0] + "."
            for first, names in aliases.items():
                if any(clean_name(name).startswith(prefix) for name in names):
                    self._used[first].add(phase)
            for name in self._buffer_used:
                if clean_name(name).startswith(prefix):
                    self._buffer_used[name].add(phase)
        parameters = {
            first: Use(names, frozenset(self._used[first])) for first, names in aliases.items()
        }
        buffers = {
            name: Use((name,), frozenset(phases), name in self._ambient)
            for name, phases in self._buffer_used.items()
        }
        dependencies = tuple(self._dependencies.values())
        return Recording(tuple(self._blocks), parameters, buffers, tuple(self._work), dependencies)


def _like(output: Structure, arguments: Sequence[Any]) -> tuple[int | None, ...]:
    """Return for each carried tensor the first carried argument of its shape and dtype."""
    found: list[int | None] = []
    for shape, dtype, _ in output.metas:
        same = [
            place
            for place, leaf in enumerate(arguments)
            if isinstance(leaf, Tensor) and tuple(leaf.shape) == shape and leaf.dtype == dtype
        ]
        same.sort(key=lambda place: everywhere(arguments[place]))
        found.append(same[0] if same else None)
    return tuple(found)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in _tensors(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _tensors(item)]
    return []
