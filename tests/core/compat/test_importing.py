"""Whose modules see drivetrain where they import ``accelerate``."""

import sys
from importlib.machinery import PathFinder

import pytest

from drivetrain.compat import accelerate as ours
from drivetrain.compat.importing import ScriptFinder, ScriptLoader, import_ours

MODULE = "own_module_for_imports"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two folders on the path, one of them as installers name it, with a module each."""
    for place in (tmp_path, tmp_path / "site-packages"):
        place.mkdir(exist_ok=True)
        monkeypatch.syspath_prepend(str(place))
    (tmp_path / f"{MODULE}.py").write_text("import accelerate.utils as utils\n")
    (tmp_path / "site-packages" / "installed_for_imports.py").write_text("")
    return tmp_path


def test_modules_outside_of_site_packages_are_the_users(folder):
    finder = ScriptFinder()
    assert isinstance(finder.find_spec(MODULE, None).loader, ScriptLoader)
    for name in ("installed_for_imports", "json", "torch", "drivetrain", "sys", "no_such"):
        assert finder.find_spec(name, None) is None, name
    run = ScriptFinder(["installed_for_imports"])  # the package of a module that is run
    assert isinstance(run.find_spec("installed_for_imports", None).loader, ScriptLoader)


def test_a_module_of_the_user_imports_ours_and_others_do_not(folder, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [ScriptFinder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = __import__(MODULE)
    assert module.utils is ours.utils
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    import accelerate

    assert __import__(MODULE).utils is accelerate.utils


def test_every_form_of_import():
    assert import_ours("accelerate") is ours
    assert import_ours("accelerate.utils.random") is ours
    assert import_ours("accelerate.utils", fromlist=("set_seed",)) is ours.utils
    assert import_ours("json").__name__ == "json"
    tools = import_ours("accelerate.test_utils.training", fromlist=("RegressionDataset",))
    assert tools.__name__ == "accelerate.test_utils.training", "tools for tests stay the real ones"
