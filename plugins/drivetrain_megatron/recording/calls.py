"""How the blocks of a model are called, and what uses its parameters outside of them."""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from drivetrain.model.look import Look, SeenTensor
from drivetrain.parts.blocks import NamedModule, repeated_blocks


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


def calls_in(look: Look, model: nn.Module) -> Calls:
    """Return what a look shows of a model's blocks.

    Args:
        look: at the model.
        model: the user's, as it was before it was compiled.
    """
    modules = dict(repeated_blocks(model))
    calls = Calls()
    for name, call in look.first_calls().items():
        calls.blocks.append((name, modules[name]))
        calls.arguments[name] = Call(*look.example(call, _placeholder))
    names = {number: name for name, number in look.parameters.items()}
    for operation in look.operations:
        if operation.block is None and operation.outputs:
            calls.uses.update(names[number] for number in operation.inputs if number in names)
    return calls


def _placeholder(seen: SeenTensor) -> Tensor:
    return torch.zeros(seen.facts.shape, dtype=seen.facts.dtype, device="cpu")
