"""The modules between whose calls a pipeline may cut: repeated blocks, or modules called in turn.

A model without repeated blocks, such as a Sequential of unlike layers, is taken apart along its
modules, the costliest first, until the pieces are small against a stage. A module that is called
several times is several pieces.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from drivetrain.model.look import Look
from drivetrain.model.recorder import look_at
from drivetrain.parts.blocks import NamedModule, repeated_blocks
from drivetrain.parts.naming import clean_name

_PIECES = 2
"""Pieces per stage: no piece that can be taken apart has more than this part of a stage's work."""


def blocks_for(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], stages: int
) -> list[NamedModule]:
    """Return the modules that count as blocks, under the names of the user's uncompiled model.

    Args:
        model: uncompiled, not changed.
        args: example inputs.
        kwargs: example inputs by name.
        stages: how many the pipeline has.
    """
    repeated = repeated_blocks(model)
    if len(repeated) >= stages:
        return repeated
    look = look_at(model, args, kwargs, blocks=(), training=True)
    return _Pieces(model, look).chosen(stages) or repeated


def named_blocks(look: Look, model: nn.Module) -> list[NamedModule]:
    """Return the modules that counted as blocks in a look at a model, called or not."""
    modules = modules_by_name(model)
    return [(name, modules[name]) for name in look.candidates]


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules under the names of the uncompiled model; of a compiled one the outside."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        found.setdefault(clean_name(name), module)
    return found


class _Pieces:
    """The modules of a model that are called, by the work of their costliest call."""

    def __init__(self, model: nn.Module, look: Look) -> None:
        self._modules = dict(model.named_modules())
        self._total = look.work
        self._work: dict[str, int] = {}
        for call in look.modules:
            work = sum(operation.work for operation in look.inside(call))
            self._work[call.name] = max(self._work.get(call.name, 0), work)

    def chosen(self, stages: int) -> list[NamedModule]:
        """Return as few modules as stages can be made of evenly."""
        pieces = self._parts("")
        limit = self._total / (_PIECES * stages)
        while True:
            large = [p for p in pieces if self._work[p] > limit or len(pieces) < stages]
            divisible = [piece for piece in large if len(self._parts(piece)) > 1]
            if not divisible:
                return [(clean_name(piece), self._modules[piece]) for piece in pieces]
            costliest = max(divisible, key=self._work.__getitem__)
            place = pieces.index(costliest)
            pieces[place : place + 1] = self._parts(costliest)

    def _parts(self, name: str) -> list[str]:
        """Return the outermost called modules with parameters inside of a module."""
        module = self._modules[name]
        is_layer = type(module).__module__.startswith("torch.nn.") and name in self._work
        if is_layer and not isinstance(module, nn.Sequential):
            return []  # whatever it is made of
        found: list[str] = []
        for child in module._modules:
            full = f"{name}.{child}" if name else child
            if full not in self._modules or not any(True for _ in self._modules[full].parameters()):
                continue  # registered under another name before, or without parameters
            found += [full] if full in self._work else self._parts(full)
        return found
