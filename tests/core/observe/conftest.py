"""Modules in the place of those of trackers: they note their calls."""

import sys

import pytest

NOTES = """
calls = []

class Noting:
    def __init__(self, name, /, *args, **kwargs):
        self._name = name
        if name.endswith("Text"):
            self.text = args[0]
        else:
            calls.append((name, *args, *kwargs.items()))

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return Noted(f"{self._name}.{name}")

class Noted:
    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **kwargs):
        return None if self._name == "Task.current_task" else Noting(self._name, *args, **kwargs)

    def __getattr__(self, name):
        return Noted(f"{self._name}.{name}")

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Noted(name)
"""


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Put a module of a name on the path; the modules that were put there alone are installed."""
    folder, names = tmp_path / "modules", set()
    folder.mkdir()

    def put(name, before="", after=""):
        (folder / f"{name}.py").write_text(NOTES.replace(before, after))
        names.add(name)
        monkeypatch.delitem(sys.modules, name, raising=False)

    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("drivetrain.observe.trackers.is_installed", names.__contains__)
    yield put
    for name in names:
        sys.modules.pop(name, None)
