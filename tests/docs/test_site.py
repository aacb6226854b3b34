"""The site: its navigation has every page but those left out, the reference every public name."""

import inspect
import os
import subprocess
import sys

import pytest
import yaml

import drivetrain
import pictures
import reference
from doc_pages import PAGES, ROOT
from drivetrain import registry
from drivetrain.config import options_of


class Configuration(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of the builder."""


Configuration.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Configuration)


def leaves(entry) -> list[str]:
    """Return the files of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [leaf for part in parts for leaf in leaves(part)]


def test_navigation_has_every_page_once():
    committed = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    made = {*reference.pages(), "index.md", "changelog.md", "contributing.md"}
    left_out = tuple(path.lstrip("/") for path in SITE["not_in_nav"].split())
    pages = {page for page in committed | made if not page.startswith(left_out)}
    assert sorted(leaves(SITE["nav"])) == sorted(pages)


def test_every_public_name_and_mechanism_has_an_entry():
    pages = reference.pages()
    directives = [
        line.split()[1]
        for text in pages.values()
        for line in text.splitlines()
        if line.startswith("::: ")
    ]
    assert sorted(set(directives)) == sorted(directives)
    public = {
        path for home, names in reference.homes().items() for path in (f"{home}.{n}" for n in names)
    }
    assert public | set(reference.promised()) <= set(directives)
    assert "drivetrain.collectives.connect" in reference.promised()
    assert {path.rpartition(".")[2] for path in public} >= set(drivetrain.__all__) - {"__version__"}


def test_every_member_of_the_accelerator_has_an_entry():
    public = {name for name, _ in inspect.getmembers(drivetrain.Accelerator) if name[0] != "_"}
    shown = {path.rpartition(".")[2] for paths in reference.topics().values() for path in paths}
    assert shown == public


def test_every_option_has_a_row():
    page = reference.pages()["reference/options.md"]
    for name in registry.strategies().names:
        part = page.split(f"## Strategy {name}\n")[1].split("\n## ")[0]
        for knob in options_of(registry.strategies().load(name).Config):
            assert f"| `{knob.name}" in part, (name, knob.name)


def test_every_entry_has_a_docstring():
    paths = reference.identifiers().values()
    assert len(paths) > 150
    assert [path for path in paths if not reference.docstring(path)] == []
    assert reference.docstring("drivetrain.accelerator.Accelerator.prepare").startswith(
        "Prepare models"
    )
    assert reference.docstring("drivetrain.config.option").startswith("Declare a knob")
    assert reference.docstring("drivetrain.accelerator.Accelerator._assembled") == ""


def test_every_picture_is_shown():
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in pictures.pictures() if f"pictures/{name})" not in text] == []


@pytest.mark.exhaustive  # .ci/run builds the site, too
def test_the_site_builds(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    reference_page = (tmp_path / "reference/accelerator.html").read_text()
    guide = (tmp_path / "quickstart.html").read_text()
    assert 'id="drivetrain.accelerator.Accelerator.load_state"' in reference_page
    assert (
        'href="reference/accelerator.html#drivetrain.accelerator.Accelerator.load_state"' in guide
    )
