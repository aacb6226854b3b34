"""Finds which linear layers of a block feed which: the structure that a plan is made from.

Each tensor remembers the linear layers whose outputs have gone into it since the last linear layer.
A layer's own output also remembers what becomes of its features: into how many heads they are
reshaped, into which packed parts (query, key and value in one matrix) they are cut.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

from torch import nn

from drivetrain.model.look import Look, ModelOperation, ModuleCall
from drivetrain.model.results import Facts
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


def linear_uses(
    look: Look, model: nn.Module, block: nn.Module, operations: range
) -> dict[str, LinearUse]:
    """Return the linear layers of a block by name, in the order of their first calls.

    Args:
        look: at the model.
        model: the user's.
        block: of the model, or the model itself.
        operations: of one call of the block.
    """
    names = {id(module): name for name, module in model.named_modules()}
    linear = {names[id(m)]: name for name, m in block.named_modules() if is_linear(m)}
    ends: dict[int, list[ModuleCall]] = defaultdict(list)
    for call in look.modules:
        if call.name in linear:
            ends[call.operations.stop].append(call)
    notes = _Notes(look)
    for index in operations:
        notes.follow(look.operations[index])
        for call in ends[index + 1]:
            notes.linear(linear[call.name], block.get_submodule(linear[call.name]), call)
    return notes.uses


class _Notes:
    """Carries tags of tensors, known by their numbers, through the operations of a look."""

    def __init__(self, look: Look) -> None:
        self.uses: dict[str, LinearUse] = {}
        self._look = look
        self._sources: dict[int, frozenset[str]] = {}
        self._features: dict[int, _Features] = {}

    def linear(self, name: str, module: nn.Module, call: ModuleCall) -> None:
        """Note a call of a linear layer."""
        given, made = call.inputs[0], call.outputs[0]
        if name in self.uses:
            self.uses[name].calls += 1
        else:
            inputs, outputs = features_of(module)
            sources = self._sources.get(given, frozenset())
            self.uses[name] = LinearUse(name, inputs, outputs, sources)
        self._sources[made] = frozenset([name])
        self._features[made] = _Features(name, 0, self._facts(made).shape[-1])

    def follow(self, operation: ModelOperation) -> None:
        """Tag what an operation returns."""
        given = operation.inputs
        sources = frozenset[str]().union(*(self._sources.get(n, frozenset()) for n in given))
        if sources:
            for made in operation.outputs:
                self._sources[made] = self._sources.get(made, frozenset()) | sources
                for source in given:
                    self._reshape(source, made, operation)

    def _facts(self, number: int) -> Facts:
        return self._look.tensors[number].facts

    def _reshape(self, source: int, made: int, operation: ModelOperation) -> None:
        """Note what an operation did to features: kept, cut, or reshaped to heads."""
        features = self._features.get(source)
        if features is None or made == source:
            return
        width = features.stop - features.start
        use = self.uses[features.name]
        before, after = self._facts(source), self._facts(made)
        kept = len(before.shape) - 1
        equal = prod(after.shape) == prod(before.shape)
        if after.shape == before.shape:
            self._features.setdefault(made, features)
        elif len(after.shape) > len(before.shape) and equal:
            became = after.shape[kept:]
            if after.shape[:kept] == before.shape[:-1] and prod(became) == width:
                use.heads = use.heads or became
        elif equal and after.shape[-1] == width:
            self._features.setdefault(made, features)
        elif after.shape[:-1] == before.shape[:-1]:
            for view in operation.views:
                if (view.made, view.base) == (made, source):
                    start = features.start + view.offset // before.stride[-1]
                    part = (start, start + after.shape[-1])
                    if part not in use.parts:
                        use.parts.append(part)
                    self._features[made] = _Features(features.name, *part)
