"""Where units are gathered and freed: hooks on the modules whose forward uses their parameters."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.parts.naming import clean_name
from drivetrain.sharding.absent import shares_memory
from drivetrain.sharding.hooks import is_compiled
from drivetrain.sharding.layout import ROOT
from drivetrain.sharding.unit import Unit

if TYPE_CHECKING:
    from drivetrain.sharding.gathering import Gatherer


def users(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Return which units each module needs whole while its forward runs.

    Those are the unit that is named after it, and units of parameters that are tied to its own.
    """
    if is_compiled(model):
        # Its inside is one graph, which hooks on parts of it would break.
        return {model: list(units)} if units else {}
    modules = {clean_name(name): module for name, module in model.named_modules()}
    found: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        key = unit.layout.key
        if key == ROOT:
            continue
        own = [modules[key]] if key in modules else []
        for module in (*own, *_tied(modules, unit)):
            found.setdefault(module, []).append(unit)
    return found


def _tied(modules: dict[str, nn.Module], unit: Unit) -> Iterator[nn.Module]:
    """Yield the modules outside of a unit's own that hold one of its parameters."""
    inside = f"{unit.layout.key}."
    held = {id(parameter) for parameter in unit.parameters}
    for name, module in modules.items():
        outside = name != unit.layout.key and not name.startswith(inside)
        if outside and any(id(p) in held for p in module._parameters.values()):
            yield module


class ModuleUnits:
    """The units of one module: what its hooks do.

    Args:
        gatherer: gathers and frees.
        units: the units, those of several dtypes apart.
    """

    def __init__(self, gatherer: "Gatherer", units: Sequence[Unit]) -> None:
        self._gatherer = gatherer
        self._units = units

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather before forward; free when backward has passed through the inputs."""
        self._gatherer.enter_forward(self)
        for unit in self._units:
            self._gatherer.fetch(unit)
        if torch.is_grad_enabled():
            inputs = [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf
            ]
            hook = CountedHook(len(inputs), self._passed)
            for leaf in inputs:
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # dies with the graph

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Free after forward; after an exception the model's own hook does."""
        if outputs is not None:
            for unit in self._units:
                if shares_memory(outputs, unit):  # such as rows of a table of positions
                    self._gatherer.keep_views(unit)
                else:
                    self._gatherer.leave_unit(unit)
        self._gatherer.leave_forward(self)

    def _passed(self) -> None:
        for unit in self._units:
            self._gatherer.release(unit)


class CountedHook:
    """A hook of several tensors' gradients that acts when all of them have come.

    It holds nothing of the graph: autograd's nodes keep their hooks, and a hook that keeps nodes
    makes a cycle that is never freed. (``register_multi_grad_hook`` does.)

    Args:
        count: how many gradients there are.
        action: what to do then.
    """

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._count = count
        self._action = action
        self._seen = 0

    def __call__(self, gradient: Tensor) -> None:
        """Count one gradient."""
        self._seen += 1
        if self._seen % self._count == 0:
            self._action()
