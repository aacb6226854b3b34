"""The user's own modules see drivetrain where they import ``accelerate``; libraries do not.

Libraries such as transformers and peft read much of the real package, so it stays as it is. A
module of the user gets builtins of its own, whose ``__import__`` takes ``accelerate`` for ours. The
user's modules are the script, and modules that were not installed: those outside of Python's own
folders and of site-packages. Packages that ``--as-accelerate=PACKAGE`` names, and under ``-m`` the
package of the module, are the user's, too, wherever they lie.

Nothing here imports torch. A change of Python's ``builtins`` while the script runs does not reach
the user's modules.
"""

import builtins
import importlib
import runpy
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

THEIRS = "accelerate"
OURS = "drivetrain.compat.accelerate"
REAL_PATHS = frozenset({"commands", "test_utils"})
"""Paths of the real package that take an Accelerator from their caller, or none."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders into which installers put packages."""


def import_ours(
    name: str,
    variables: Mapping[str, Any] | None = None,
    scope: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import as Python's ``__import__`` does, with drivetrain in place of ``accelerate``."""
    top, *below = name.split(".")
    if level or top != THEIRS or not REAL_PATHS.isdisjoint(below[:1]):
        return builtins.__import__(name, variables, scope, fromlist or (), level)
    module = importlib.import_module(OURS + name.removeprefix(THEIRS))
    return module if fromlist else importlib.import_module(OURS)


class ScriptLoader(SourceFileLoader):
    """Executes a module of the user, whose imports are ``import_ours``."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with builtins of its own."""
        vars(module)["__builtins__"] = script_builtins()
        super().exec_module(module)


class ScriptFinder(MetaPathFinder):
    """Finds modules as Python does, and gives those of the user another loader.

    Args:
        packages: top packages that are the user's wherever they lie.
    """

    def __init__(self, packages: Collection[str] = ()) -> None:
        self._packages = frozenset(packages)
        paths = sysconfig.get_paths()
        self._python = tuple({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")})

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module of the user; None leaves others to Python."""
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return None
        if not self._is_users(fullname.partition(".")[0], Path(spec.origin)):
            return None
        spec.loader = ScriptLoader(fullname, spec.origin)
        return spec

    def _is_users(self, package: str, file: Path) -> bool:
        if package in self._packages:
            return True
        if package.startswith("drivetrain") or not INSTALLED.isdisjoint(file.parts):
            return False
        return not any(file.resolve().is_relative_to(folder) for folder in self._python)


def script_builtins() -> dict[str, Any]:
    """Return Python's builtins with our ``__import__``."""
    return {**vars(builtins), "__import__": import_ours}


def run_script(arguments: Sequence[str], packages: Sequence[str] = ()) -> None:
    """Run ``SCRIPT ARGS`` or ``-m MODULE ARGS`` as Python does, with our ``accelerate``.

    Args:
        arguments: of the command line; they become ``sys.argv``.
        packages: top packages that are the user's wherever they lie.
    """
    own = {"__builtins__": script_builtins()}
    if arguments[0] == "-m":
        name = arguments[1]
        sys.meta_path.insert(0, ScriptFinder([name.partition(".")[0], *packages]))
        sys.argv = list(arguments[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(name, init_globals=own, run_name="__main__", alter_sys=True)
        return
    sys.meta_path.insert(0, ScriptFinder(packages))
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], init_globals=own, run_name="__main__")
