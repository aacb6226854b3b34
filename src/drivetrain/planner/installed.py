"""The installed strategies as plans see them, loaded once: a search reads thousands of layouts.

A registry looks at the import path each time, so that it sees a plugin as soon as it is installed.
"""

from collections.abc import Mapping
from typing import Any

from drivetrain.registry import strategies
from drivetrain.strategy import Strategy

Kinds = Mapping[str, type[Strategy[Any]]]


class InstalledKinds:
    """The classes of strategies, by name.

    Attributes:
        registry: from which they come.
        every: all of them.
        around: those that hold a data-parallel strategy.
        inner: those that hold none.
        planned: of these, the ones that a search tries.

    Raises:
        ConfigError: one of them cannot be imported.
    """

    def __init__(self) -> None:
        self.registry = registry = strategies()
        self.every: Kinds = {name: registry.load(name) for name in registry.names}
        self.around: Kinds = {name: kind for name, kind in self.every.items() if kind.inner_option}
        self.inner: Kinds = {
            name: kind for name, kind in self.every.items() if not kind.inner_option
        }
        self.planned: Kinds = {
            name: kind
            for name, kind in self.inner.items()
            if name in registry.choices and kind.draws_steps()
        }
