"""The pages of the API reference: for each public name a directive that mkdocstrings fills.

Which names are public is read from the code: the table of ``drivetrain``, the topics of
``Accelerator``, the options of installed strategies, and the names in "Writing a plugin".
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import registry
from drivetrain.config import RunConfig
from drivetrain.config.schema import Option, options_of

ROOT = Path(__file__).parents[2]
TOPIC = re.compile(r"^ {4}# --- (.+) ---$", re.MULTILINE)
PROMISED = re.compile(r"`((?:model|collectives|parallel)\.\w[\w.]*)")

HOMES_BY_TOPIC = {
    "Processes": ("processes", "notebook"),
    "Collectives": ("communication",),
    "Local SGD": ("local_sgd",),
    "Data": ("data", "data.division", "nested"),
    "Options of an Accelerator": ("facade.settings",),
    "Log and progress": ("log",),
    "Random numbers": ("runtime.rng", "data.loader"),
    "Memory": ("memory",),
    "Losses": ("losses",),
    "Files": ("checkpoint.encoding", "checkpoint.export"),
    "Trainer and Fabric": ("integrations.transformers", "integrations.fabric"),
    "Errors": ("errors",),
    "Names of Accelerate": ("aliases", "runtime.gradient_state"),
    "Available packages": ("availability",),
    "The contract of plugins": (
        *("strategy", "cost", "shards", "runtime.parts", "store", "config"),
        *("registry", "observe.trackers", "testing.conformance"),
    ),
}
"""Modules of ``drivetrain`` whose public names the pages list, in the order of the pages."""

FOR_PLUGINS = "The contract of plugins"
OUTSIDE_OF_THE_TABLE = {
    "drivetrain.integrations.transformers": ("Trainer", "use_drivetrain"),
    "drivetrain.integrations.fabric": ("DrivetrainStrategy", "register"),
    "drivetrain.losses": ("linear_cross_entropy",),
    "drivetrain.config": ("NestedStrategy", "mapping", "nested_strategy"),
    "drivetrain.registry": ("strategies", "stores"),
    "drivetrain.store": ("SteppingStore", "ShardStepper", "ShardSpec", "ShardStep", "Pending"),
    "drivetrain.testing.conformance": ("StrategyConformance",),
}
"""Public names that are imported from their own module."""


def pages() -> dict[str, str]:
    """Return the Markdown of each page of the reference by its path."""
    return {
        "reference/index.md": _overview(),
        "reference/accelerator.md": _accelerator(),
        "reference/names.md": _names(),
        "reference/options.md": _options(),
        "reference/plugins.md": _plugins(),
    }


def identifiers() -> dict[str, str]:
    """Return the full path of each public name, as texts name it: ``accelerator.prepare``."""
    found = {name: f"{home}.{name}" for home, names in homes().items() for name in names}
    for members in topics().values():
        found |= {f"accelerator.{path.rpartition('.')[2]}": path for path in members}
    return found


def homes() -> dict[str, tuple[str, ...]]:
    """Return the public names by the module that defines them."""
    found: dict[str, tuple[str, ...]] = dict(OUTSIDE_OF_THE_TABLE)
    for name in drivetrain.__all__:
        if home := drivetrain._HOME_OF.get(name):
            found[home] = (*found.get(home, ()), name)
    return found


def topics() -> dict[str, list[str]]:
    """Return the full paths of the members of Accelerator by topic, in the order of the class."""
    source = (ROOT / "src/drivetrain/accelerator.py").read_text()
    starts = [(source.count("\n", 0, m.start()), m[1]) for m in TOPIC.finditer(source)]
    found: dict[str, list[str]] = {title: [] for _, title in starts}
    for line, name in _members(source, "Accelerator"):
        title = [title for start, title in starts if start < line][-1]
        found[title].append(f"drivetrain.accelerator.Accelerator.{name}")
    processes = (ROOT / "src/drivetrain/processes.py").read_text()
    found["processes"] = [
        f"drivetrain.processes.Processes.{name}" for _, name in _members(processes, "Processes")
    ]
    return {title: paths for title, paths in found.items() if paths}


def promised() -> list[str]:
    """Return the full paths of the mechanisms that "Writing a plugin" names, in its order."""
    text = (ROOT / "docs/writing-a-plugin.md").read_text()
    return [f"drivetrain.{name}" for name in dict.fromkeys(PROMISED.findall(text))]


def _members(source: str, cls: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each public method and property of a class."""
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == cls)
    seen = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name not in seen:
            seen.add(item.name)
            if not item.name.startswith("_"):
                yield item.lineno, item.name


def _overview() -> str:
    lines = [
        "# Reference",
        "",
        "Every public name, from its docstring. `from drivetrain import NAME` imports a name "
        "without dots; the others are imported from their own module.",
        "",
        "- [Accelerator](accelerator.md): the object that a training loop talks to, by topic",
        "- [Functions and classes](names.md) for scripts",
        "- [Options](options.md) of the configuration and of each strategy",
        "- [For plugins](plugins.md): the contract, and the mechanisms to build on",
        "- [The command](../cli.md)",
        "- [Changelog](../changelog.md) and [contributing](../contributing.md)",
        "",
    ]
    for title, modules in HOMES_BY_TOPIC.items():
        lines += [f"## {title}", "", "| name | |", "|---|---|"]
        for path in _paths(modules):
            name = path.rpartition(".")[2]
            shown = name if name in drivetrain.__all__ else path
            lines.append(f"| [`{shown}`][{path}] | {_first_sentence(path)} |")
        lines.append("")
    return "\n".join(lines)


def _accelerator() -> str:
    lines = ["# Accelerator", "", "::: drivetrain.accelerator.Accelerator"]
    lines += ["    options: {members: [], show_root_heading: false}", ""]
    for title, paths in topics().items():
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        lines += [line for path in paths for line in (f"::: {path}", "")]
    return "\n".join(lines)


def _names() -> str:
    lines = ["# Functions and classes", ""]
    for title, modules in HOMES_BY_TOPIC.items():
        if title != FOR_PLUGINS:
            lines += [f"## {title}", ""]
            lines += [line for path in _paths(modules) for line in (f"::: {path}", "")]
    return "\n".join(lines)


def _plugins() -> str:
    lines = ["# For plugins", "", "[Writing a plugin](../writing-a-plugin.md) shows their use.", ""]
    lines += ["## The contract", ""]
    for path in _paths(HOMES_BY_TOPIC[FOR_PLUGINS]):
        lines += [f"::: {path}", ""]
    lines += ["## Mechanisms", ""]
    for path in promised():
        lines += [f"::: {path}", "    options: {show_root_full_path: true}", ""]
    return "\n".join(lines)


def _options() -> str:
    lines = ["# Options", "", "The keys of a YAML file, and of `--set KEY=VALUE`.", ""]
    lines += ["## The run", "", *_table(RunConfig)]
    found = registry.strategies()
    for name in found.names:
        kind = found.load(name)
        lines += [f"## Strategy {name}", "", f"{kind.summary[0].upper()}{kind.summary[1:]}.", ""]
        lines += _table(kind.Config)
    return "\n".join(lines)


def _table(config: type) -> list[str]:
    rows = [*_rows(config)]
    if not rows:
        return ["No options.", ""]
    return ["| key | default | meaning |", "|---|---|---|", *rows, ""]


def _rows(config: type) -> Iterator[str]:
    for key, knob in knobs(config):
        choices = f" One of {', '.join(f'`{c}`' for c in knob.choices)}." if knob.choices else ""
        yield f"| `{key}` | `{default_of(knob)}` | {knob.help}{choices} |".replace("\n", " ")


def knobs(config: type, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Yield the dotted key of every option of a configuration, and the option."""
    for knob in options_of(config):
        if knob.is_section:
            yield from knobs(knob.type, f"{prefix}{knob.name}.")
        else:
            yield prefix + knob.name, knob


def default_of(knob: Option) -> str:
    """Return the default of an option as a YAML file has it, and a page shows it."""
    default: Any = knob.default
    if knob.is_section:
        return "none"
    if knob.is_strategy:
        return default.name or "default strategy"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, bool) or default is None:
        return json.dumps(default)
    return str(default) or '""'


def _paths(modules: tuple[str, ...]) -> Iterator[str]:
    public = homes()
    for module in modules:
        home = f"drivetrain.{module}"
        for name in public.get(home, ()):
            yield f"{home}.{name}"


def docstring(path: str) -> str:
    """Return the docstring of a name, by the source of its module; "" where there is none."""
    module, _, name = path.rpartition(".")
    base = ROOT / "src" / module.replace(".", "/")
    source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not source.exists():  # a member of a class
        module, _, cls = module.rpartition(".")
        source = ROOT / "src" / f"{module.replace('.', '/')}.py"
        (scope,) = (n for n in _definitions(ast.parse(source.read_text())) if n.name == cls)
    else:
        scope = ast.parse(source.read_text())
    for node, after in zip(scope.body, [*scope.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name:
            text = after.value if isinstance(after, ast.Expr) else None
            return str(text.value) if isinstance(text, ast.Constant) else ""
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return docstring(f"{node.module}.{alias.name}")
    return ""


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _definitions(scope: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    return (n for n in scope.body if isinstance(n, ast.ClassDef | ast.FunctionDef))


def _first_sentence(path: str) -> str:
    text = docstring(path).partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
