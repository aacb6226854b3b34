"""How often units are gathered in a forward and its backward, told from the model beforehand.

A forward usually uses modules in the order in which they are registered, each once, and backward
the other way round. What actually happens is up to the model; the gatherer follows it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from drivetrain.parts.naming import clean_name, named_parameters
from drivetrain.sharding.layout import ROOT, UnitLayout

_LOOKUPS = nn.Embedding | nn.EmbeddingBag
"""Layers whose backward reads no values."""


class Use(NamedTuple):
    """A module that needs a unit in forward.

    Attributes:
        key: the unit's.
        read_back: whether its backward reads values again.
    """

    key: str
    read_back: bool


def gathers_again(
    units: Sequence[UnitLayout], model: nn.Module | None, spared: int
) -> Counter[str]:
    """Return how often each unit is gathered after its first time in a forward with its backward.

    Args:
        units: the plan; those that stay whole, and what is left of the model, are not freed.
        model: says which layers are tied, and which only look values up; None: none.
        spared: how many units are not freed because forward ends and backward begins with them.
    """
    uses = usual_uses(units, model)
    last = list(dict.fromkeys(use.key for use in reversed(uses)))[:spared]
    gathers: Counter[str] = Counter(dict.fromkeys((use.key for use in uses), -1))
    for use in uses:
        gathers[use.key] += 1
    live = set(last)
    for use in reversed(uses):
        if not use.read_back:
            continue
        if use.key in live:
            live.discard(use.key)  # freed when its backward is over
        else:
            gathers[use.key] += 1
    return gathers


def usual_uses(units: Sequence[UnitLayout], model: nn.Module | None) -> list[Use]:
    """Return which units a forward needs, in order; those that are freed after it only.

    Backward reads a layer's values if the layer's inputs need gradients, and those of a module
    with layers inside also if one of these is trained.
    """
    freed = [unit for unit in reversed(units) if unit.sharded and unit.key != ROOT]
    return _of_names(freed, units) if model is None else _of_modules(freed, model)


def _of_names(freed: Sequence[UnitLayout], units: Sequence[UnitLayout]) -> list[Use]:
    elsewhere = any(unit.trainable for unit in units if unit not in freed)
    flows, uses = False, []  # whether gradients flow back to here
    for unit in freed:
        trained = bool(unit.trainable)
        inside = trained and not _is_layer(unit.key, freed)
        uses.append(Use(unit.key, read_back=flows or inside))
        flows = flows or trained or elsewhere
    return uses


def _of_modules(units: Sequence[UnitLayout], model: nn.Module) -> list[Use]:
    parameters = named_parameters(model)
    owner = {id(parameters[place.name]): unit.key for unit in units for place in unit.places}
    keys = {unit.key for unit in units}
    flows = waits = False  # whether gradients flow back to here
    uses = []
    for name, module in model.named_modules():
        own = clean_name(f"{name}.")[:-1]
        tied = {owner.get(id(parameter)) for parameter in module._parameters.values()}
        outside = {key for key in tied if key is not None and not f"{own}.".startswith(f"{key}.")}
        for key in sorted(outside | ({own} & keys)):
            inside = key == own and not _is_layer(key, units) and _trains(module)
            read_back = (flows or inside) and not isinstance(module, _LOOKUPS)
            uses.append(Use(key, read_back))
        # What a module around others has for itself, it usually uses after the first of them.
        waits = waits or _trains(module, inside=False)
        flows = flows or (waits and next(module.children(), None) is None)
    return uses


def _trains(module: nn.Module, *, inside: bool = True) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=inside))


def _is_layer(key: str, units: Sequence[UnitLayout]) -> bool:
    """Return whether a unit is one layer: a module with nothing inside but parameters."""
    names = [place.name for unit in units if unit.key == key for place in unit.places]
    return all(name.rpartition(".")[0] == key for name in names)
