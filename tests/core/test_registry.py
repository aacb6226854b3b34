"""Roles of plugins, which entry points give; and strategies of earlier versions."""

from importlib.metadata import EntryPoint

import pytest

from drivetrain import registry
from drivetrain.errors import ConfigError, UnknownPluginError, UsageError
from drivetrain.saved_state import StateAround, TrainingState
from drivetrain.strategy import Planning, Strategy

ENTRIES = {
    group: [EntryPoint(name, value, group) for name, value in found]
    for group, found in {
        registry.STRATEGIES: [("mine", "mine:Mine"), ("yours", "yours:Yours"), ("exact", "e:E")],
        registry.ROLES: [
            ("default", "mine:Mine"),
            ("default", "yours:Yours"),
            ("reference", "e:E"),
        ],
    }.items()
}


def test_roles_need_no_import_and_the_reference_is_not_for_training(monkeypatch, tmp_path):
    with pytest.raises(UnknownPluginError, match="did you mean 'ddp'"):
        registry.strategies().load("DDP")
    monkeypatch.syspath_prepend(tmp_path)
    before = registry.trackers().names
    (tmp_path / "late-1.0.dist-info").mkdir()
    entries = "[drivetrain.trackers]\nlate = late:Late\n"
    (tmp_path / "late-1.0.dist-info" / "entry_points.txt").write_text(entries)
    assert registry.trackers().names == sorted([*before, "late"])
    monkeypatch.setattr(registry, "_installed", lambda path: ENTRIES)
    strategies = registry.strategies()
    assert strategies.reference() == "exact"
    assert strategies.choices == ["mine", "yours"]
    with pytest.raises(ConfigError, match=r"one default strategy, found \['mine', 'yours'\]"):
        strategies.default()
    first = {group: found[:1] for group, found in ENTRIES.items()}
    monkeypatch.setattr(registry, "_installed", lambda path: first)
    assert registry.strategies().default() == "mine"
    with pytest.raises(ConfigError, match="one reference strategy, found none"):
        registry.strategies().reference()


def test_a_strategy_with_a_method_that_nobody_calls_any_more_is_refused():
    with pytest.raises(UsageError, match=r"Old\.shards, which nobody calls: see state"):
        type("Old", (Strategy,), {"shards": None})
    with pytest.raises(UsageError, match=r"OldPlans\.step, which nobody calls: see simulate"):
        type("OldPlans", (Planning,), {"step": None})
    # All but these does the state of a strategy around another one leave to that one.
    own = {"shards", "check", "load", "gathered", "whole", "dtensors"}
    methods = {name for name in vars(TrainingState) if not name.startswith("_")}
    assert methods - vars(StateAround).keys() == own | {"divided"}
