"""The strategy of docs/writing-a-plugin.md trains right, installed as a stranger's distribution."""

import re
import tomllib
from pathlib import Path

import pytest

from forked_programs import run_python

PAGE = (Path(__file__).parents[2] / "docs/writing-a-plugin.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the blocks of a language of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def installed(tmp_path):
    """A folder in which the page's package lies installed, from the page's blocks alone."""
    project = tomllib.loads(blocks("toml")[0])["project"]
    package = tmp_path / project["name"].replace("-", "_")
    package.mkdir()
    config, strategy = (
        text for text in blocks("python") if re.search(r"class Flat(Config)?\b", text)
    )
    (package / "__init__.py").write_text(config + strategy)
    info = tmp_path / f"{package.name}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )
    return tmp_path


def python(folder: Path, *arguments: str) -> str:
    """Run Python in a folder whose packages it finds; return the output of a run that ends well."""
    env = {"PYTHONPATH": str(folder)}
    done = run_python(*arguments, folder=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_equals_one_process(installed):
    said = python(installed, "-m", "drivetrain_launch", "test", "--cpu", "--strategy", "flat")
    assert said.startswith("ok: 2 ranks on cpu and one process differ by")


@pytest.mark.exhaustive
def test_it_passes_the_conformance_tests(installed):
    (conformance,) = (text for text in blocks("python") if "StrategyConformance" in text)
    (installed / "test_flat.py").write_text(conformance)
    python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "test_flat.py")
