"""The dependency rule: the core knows no plugin, plugins know no other plugin, by syntax tree."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.saving import Save
from drivetrain.registry import strategies
from drivetrain.runtime.world import World

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.name for path in (ROOT / "plugins").iterdir() if path.is_dir())


@cache
def names_in(path: Path) -> Mapping[str, set[str]]:
    """Return the top-level packages that a file imports, its strings, and its attributes."""
    found = defaultdict(set)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found["imports"].update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found["imports"].add(str(node.module).split(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found["strings"].add(node.value)
        elif isinstance(node, ast.Attribute):
            found["attributes"].add(node.attr)
    return found


def offenders(folder: Path, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in sorted(names_in(path)["imports"] & forbidden)
    ]


def test_core_imports_neither_plugins_nor_launch():
    assert not offenders(ROOT / "src", {*PLUGINS, "drivetrain_launch"})


def test_launch_imports_no_plugin():
    assert not offenders(ROOT / "launch", set(PLUGINS))


def test_plugins_import_no_other_plugin():
    for plugin in PLUGINS:
        others = {*PLUGINS, "drivetrain_launch"} - {plugin}
        assert not offenders(ROOT / "plugins" / plugin, others)


OTHER_MEANINGS = {"options.py": {"local"}, "estimate.py": {"offload"}}
"""A value of the option accumulate of units: gradients stay local. And the section of units that
names stores, which is a key of layouts, too."""


def test_core_and_launch_name_no_strategy():
    names = {
        entry.name
        for entry in entry_points(group="drivetrain.strategies")
        if entry.value.split(":")[0].split(".")[0] in PLUGINS
    }
    assert names
    for folder in ("src", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = names & names_in(path)["strings"] - OTHER_MEANINGS.get(path.name, set())
            assert not found, f"{path.relative_to(ROOT)} holds the strategy name {found}"


def test_only_world_and_launch_read_the_environment():
    allowed = {"runtime/world.py", "availability.py", "processes.py"}
    for path in sorted((ROOT / "src" / "drivetrain").rglob("*.py")):
        relative = path.relative_to(ROOT / "src" / "drivetrain").as_posix()
        if relative in allowed or relative.startswith("testing/"):
            continue
        assert not names_in(path)["attributes"] & {"environ", "getenv"}, relative


ORDINARY = """
import sys
import torch
from drivetrain import Accelerator
accelerator = Accelerator(strategy="ddp")
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
print(*sys.modules)
"""

IDLE = {
    "pydantic",
    "drivetrain.checkpoint.export",
    "drivetrain.checkpoint.local",
    "drivetrain.hardware.measure",
    "drivetrain.hardware.description",
    "drivetrain.model.valueless",
    "drivetrain.observe.history",
    "drivetrain.observe.modules",
    "drivetrain.observe.trace",
    "drivetrain.simulator.step",
    "drivetrain.verify",
}
"""What an ordinary run has no use for, and what takes long to load."""


def test_an_ordinary_run_loads_nothing_that_it_has_no_use_for():
    command = [sys.executable, "-c", ORDINARY]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "drivetrain_ddp.strategy" in loaded
    assert not IDLE.intersection(loaded)


TORCHLESS = """
import sys
from drivetrain_launch.cli import run
for line in sys.argv[1:]:
    assert run(line.split(",")) == 0, line
    assert "torch" not in sys.modules, line
"""


def test_commands_about_files_import_no_torch(tmp_path):
    Save(tmp_path / "saved", World()).finish(Contents(models=[], state={"steps": []}))
    lines = [f"checkpoint,inspect,{tmp_path / 'saved'}", "config,explain,strategy.buffers"]
    lines += ["hardware,show,h100"]
    for name in strategies().names:
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"strategy: {name}\nlaunch: {{nproc_per_node: 2}}\n")
        commands = ("check", file), ("show", "--config", file), ("explain", name)
        lines += [",".join(("config", *map(str, words))) for words in commands]
    subprocess.run([sys.executable, "-c", TORCHLESS, *lines], check=True, stdout=subprocess.DEVNULL)
