"""Reads a checkout by its syntax: modules, imports, circles among them, names defined twice.

``python benchmarks/source_tree.py`` prints what a launch runs.
"""

import ast
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

CHECKOUT = Path(__file__).resolve().parents[1]
ROOTS = ("src", "plugins", "launch")
"""Folders whose packages make up the distribution."""

Graph = Mapping[str, set[str]]
Function = tuple[str, int, str]
"""A function that was called: its file, its first line, its name."""


def function_of(code: CodeType) -> Function:
    """Return the function of running code; line 0 stands for the body of a module or a class."""
    if code.co_flags & CO_OPTIMIZED:
        return code.co_filename, code.co_firstlineno, code.co_name
    return code.co_filename, 0, ""


class SourceTree:
    """The modules of the distribution in one checkout.

    Args:
        root: of the checkout.

    Attributes:
        modules: the path of each module, by its dotted name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {
            module_name(path.relative_to(root / part)): path
            for part in ROOTS
            for path in sorted((root / part).rglob("*.py"))
        }

    @cached_property
    def syntax(self) -> dict[str, ast.Module]:
        """The syntax tree of each module."""
        return {
            name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.modules.items()
        }

    @property
    def lines(self) -> int:
        """Lines of all modules."""
        return sum(
            len(path.read_text(encoding="utf-8").splitlines()) for path in self.modules.values()
        )

    @cached_property
    def imports(self) -> Graph:
        """The modules that each module imports, wherever the import stands in the file.

        An import under ``TYPE_CHECKING`` or inside of a function counts as well: who reads the
        file has to follow it all the same.
        """
        return {
            name: {found for node in ast.walk(tree) for found in self._imported(node)} - {name}
            for name, tree in self.syntax.items()
        }

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in self.modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"  # a module of the package, or a name in it
                found = inner if inner in self.modules else str(node.module)
                if found in self.modules:
                    yield found

    def file_circles(self) -> list[list[str]]:
        """Return the groups of modules that reach each other by imports."""
        return circles(self.imports)

    def folder_circles(self) -> list[list[str]]:
        """Return the groups of neighbors that reach each other, at least one of them a folder.

        Neighbors are the modules and folders directly inside of one package; a folder imports
        whatever any file below it imports.
        """
        packages = {name for name, path in self.modules.items() if path.stem == "__init__"}
        found = []
        for package in sorted(packages):
            graph = self._between_children(package)
            found += [group for group in circles(graph) if packages & set(group)]
        return found

    def _between_children(self, package: str) -> Graph:
        graph: dict[str, set[str]] = defaultdict(set)
        for name, imported in self.imports.items():
            child = child_of(package, name)
            if child is not None:
                others = (child_of(package, other) for other in imported)
                graph[child] |= {other for other in others if other is not None} - {child}
        return graph

    def homonyms(self, kind: str) -> dict[str, list[str]]:
        """Return the modules of each name that several modules define at their top level.

        Args:
            kind: ``class`` or ``function``.
        """
        homes: dict[str, list[str]] = defaultdict(list)
        for module, tree in self.syntax.items():
            for name in sorted({name for node in tree.body for name in defined(node, kind)}):
                homes[name].append(module)
        return {name: found for name, found in sorted(homes.items()) if len(found) > 1}


def counts_of(met: Iterable[Function]) -> dict[str, int]:
    """Return how many of the functions that were met are ours, and in how many files.

    Ours is what the interpreter imports under the names of this checkout's packages, so an
    installed distribution is counted as well.
    """
    names = {path.parent.name for root in ROOTS for path in (CHECKOUT / root).glob("*/__init__.py")}
    specs = [spec for name in sorted(names) if (spec := find_spec(name)) is not None]
    homes = tuple(f"{home}/" for spec in specs for home in spec.submodule_search_locations or ())
    ours = {key for key in met if key[0].startswith(homes)}
    return {
        "files": len({path for path, *_ in ours}),
        "functions": sum(line > 0 for _, line, _ in ours),
    }


def code_lines(paths: Iterable[Path]) -> int:
    """Return how many lines of files are neither blank nor comments nor docstrings."""
    return sum(len(_lines_of_code(path.read_text(encoding="utf-8"))) for path in paths)


def _lines_of_code(text: str) -> set[int]:
    """Return the lines of code by their numbers; all lines of a string that is a value are code."""
    nodes = list(ast.walk(ast.parse(text)))
    written = (line.strip() for line in text.splitlines())
    code = {number for number, line in enumerate(written, 1) if line and line[0] != "#"}
    for node in nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
            code |= _lines_of(node)
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code -= _lines_of(node.body[0])
    return code


def _lines_of(node: ast.expr | ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def module_name(path: Path) -> str:
    """Return the dotted name of a module at a path below one of the roots."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def child_of(package: str, module: str) -> str | None:
    """Return the module or folder directly inside of a package that holds a module, if any."""
    if not module.startswith(package + "."):
        return None
    return f"{package}.{module[len(package) + 1 :].partition('.')[0]}"


def defined(node: ast.stmt, kind: str) -> Iterator[str]:
    """Yield the name of one kind that a statement of a module defines, if any."""
    kinds = {"class": (ast.ClassDef,), "function": (ast.FunctionDef, ast.AsyncFunctionDef)}
    if isinstance(node, kinds[kind]):
        yield node.name


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in path:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = path[path.index(node) :]
            del path[path.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def count_launch() -> None:
    """Print, as JSON, what `drivetrain launch` runs until it starts the first rank.

    A file counts that is only imported, too.
    """
    met: set[Function] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            met.add(function_of(frame.f_code))

    def first_rank(*_: Any, **__: Any) -> NoReturn:
        sys.setprofile(None)
        print(json.dumps(counts_of(met)), flush=True)
        os._exit(0)

    subprocess.Popen.__init__ = first_rank  # type: ignore[method-assign]
    sys.argv = ["drivetrain", "launch", "--nproc-per-node", "2", __file__]
    threading.setprofile(note)
    sys.setprofile(note)
    from drivetrain_launch.cli import main as drivetrain

    drivetrain()


if __name__ == "__main__":
    count_launch()
