"""The modules of a model, found by the names of its parameters: which modules run a forward.

A unit is gathered by the hooks of a module, and they run only where something calls the module.
Nothing calls a ``ModuleList``, nor the output projection inside of ``nn.MultiheadAttention``, which
reads that projection's weights itself. Where the model is not there, its names tell.
"""

import itertools
from collections.abc import Iterable, Iterator

from torch import nn

from drivetrain.parts.naming import clean_name

ROOT = ""
"""The model itself, and the unit of all parameters outside of the other units."""

_ATTENTION = {"in_proj_weight", "q_proj_weight"}
"""Every ``nn.MultiheadAttention`` has a parameter of such a name, and so has every copy."""

_PARAMETRIZED = "parametrizations"
"""The place where ``torch.nn.utils.parametrize`` keeps the sources of a layer's weight."""


def parent(name: str) -> str:
    """Return the name of the module around a module or parameter; the model is ROOT."""
    return name.rpartition(".")[0]


def upwards(name: str) -> Iterator[str]:
    """Yield a module's name and the names of the modules around it, the model last."""
    while name:
        yield name
        name = parent(name)
    yield ROOT


def holds(module: str, name: str) -> bool:
    """Return whether a module equals or contains another module, or a parameter, by names."""
    return module in (ROOT, name) or name.startswith(f"{module}.")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once with its clean name; a compiled one before its inside, with one name.

    A module that stands in several places comes under its first name.
    """
    for name, module in model.named_modules():
        yield clean_name(f"{name}.")[:-1], module


class Tree:
    """The modules of a model that hold parameters.

    Args:
        parameters: clean names of parameters.
        model: knows which modules have no forward; None leaves the question to the names.
    """

    def __init__(self, parameters: Iterable[str], model: nn.Module | None = None) -> None:
        self._own: dict[str, set[str]] = {ROOT: set()}  # names of parameters right in a module
        self._inside: dict[str, set[str]] = {ROOT: set()}  # names of all that is right in it
        for name in parameters:
            for inner, outer in itertools.pairwise(upwards(name)):
                self._own.setdefault(outer, set())
                self._inside.setdefault(outer, set()).add(inner.rpartition(".")[2])
            self._own[parent(name)].add(name.rpartition(".")[2])
        self._silent = set() if model is None else _without_forward(model)

    @property
    def modules(self) -> list[str]:
        """Names of the modules, none before one around it."""
        return sorted(self._own, key=lambda name: len(list(upwards(name))))

    def is_called(self, module: str) -> bool:
        """Return whether something calls a module, as far as can be known."""
        return module == ROOT or not (
            module in self._silent
            or any(own.isdecimal() for own in self._own.get(module, ()))  # a ParameterList
            or _PARAMETRIZED in module.split(".")
            or any(_ATTENTION & self._own.get(outer, set()) for outer in upwards(parent(module)))
        )

    def is_list(self, module: str) -> bool:
        """Return whether a module is a list by its names: a ``ModuleList`` or ``Sequential``."""
        inside = self._inside.get(module, set())
        return bool(inside) and all(name.isdecimal() for name in inside)

    def user(self, around: Iterable[str]) -> str:
        """Return the first of some modules, from the inside out, that is called and is no list."""
        called = (name for name in around if self.is_called(name) and not self.is_list(name))
        return next(called, ROOT)


def _without_forward(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in named_modules(model)
        if getattr(getattr(module, "forward", None), "__func__", None) is nn.Module.forward
    }
