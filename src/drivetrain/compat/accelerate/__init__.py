"""Accelerate's modules with drivetrain's objects: one lookup for every import path of theirs.

``from accelerate.utils import set_seed`` and ``from accelerate.utils.random import set_seed`` find
the same name. ``drivetrain.compat.names`` holds the names.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from drivetrain.compat.names import FOLLOWED, PATHS, public_names, resolve

__version__ = FOLLOWED


class PathFinder(MetaPathFinder, Loader):
    """Makes the modules below this one, each with every name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of one of Accelerate's import paths.

        Raises:
            ModuleNotFoundError: a path below this module that is none of theirs.
        """
        if not fullname.startswith(f"{__name__}."):
            return None
        theirs = fullname.removeprefix(f"{__name__}.")
        if theirs not in PATHS:
            raise ModuleNotFoundError(
                f"accelerate.{theirs} has no counterpart in drivetrain; docs/coming-from.md says "
                "what has",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=any(p.startswith(f"{theirs}.") for p in PATHS))

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the making of a module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Give a module the one lookup."""
        prefix = module.__name__.removeprefix(f"{__name__}.")
        module.__doc__ = f"accelerate.{prefix} with drivetrain's objects."

        def lookup(name: str) -> Any:
            return _find(name, prefix)

        vars(module).update(__getattr__=lookup, __dir__=public_names)


def _find(name: str, path: str) -> Any:
    """Return the object of a name, or the module of a path below ``path``.

    Raises:
        AttributeError: Accelerate has no such name, or nothing here stands for it.
    """
    below = f"{path}.{name}" if path else name
    if name == "__all__":
        return public_names()
    if below in PATHS:
        return importlib.import_module(f"{__name__}.{below}")
    return resolve(name, path)


def __getattr__(name: str) -> Any:
    return _find(name, "")


def __dir__() -> list[str]:
    return public_names()


sys.meta_path.append(PathFinder())
