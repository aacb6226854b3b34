"""A strategy inside of a strategy, by name with its options; knobs with the user's own keys."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from config_layers import code_layer
from drivetrain.config import (
    NestedStrategy,
    mapping,
    nested_strategy,
    option,
    read_file,
    read_sets,
    resolve,
)
from drivetrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    stage: int = option(1, help="Stage.", minimum=0, maximum=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    depth: int = option(2, help="Depth.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    width: int = option(1, help="Width.")
    plan: Mapping[str, str] = mapping(help="Plan.")
    inside: NestedStrategy = nested_strategy(help="What it is built on.")


def find(name):
    kinds = {"outer": Outer, "inner": Inner, "other": Other}
    return name or "inner", kinds[name or "inner"]


def read(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_file(path)


def outer(*layers):
    return resolve(*layers, find_config=find).strategy_config


def test_a_name_a_mapping_or_nothing(tmp_path):
    for text, expected in {
        "strategy: outer": NestedStrategy("inner", Inner()),
        "strategy: {name: outer, inside: other}": NestedStrategy("other", Other()),
        "strategy: {name: outer, inside: {name: other}}": NestedStrategy("other", Other()),
        "strategy: {name: outer, inside: {name: inner, stage: 2}}": NestedStrategy(
            "inner", Inner(stage=2)
        ),
    }.items():
        config = outer(read(tmp_path, text))
        assert (config.inside, config.plan) == (expected, {})
    below = read(tmp_path, "strategy: {name: outer, inside: other}")
    config = outer(below, read_sets(["strategy.inside.depth=7"]))
    assert config.inside == NestedStrategy("other", Other(depth=7))


def test_what_a_launch_hands_on(tmp_path):
    """The file for the ranks keeps what somebody chose, a strategy by its name alone, too."""
    for layer in (
        read(tmp_path, "strategy: {name: outer, inside: other}"),
        read(tmp_path, "strategy: {name: outer, inside: {name: other, depth: 5}}"),
        read_sets(["strategy.name=outer", "strategy.inside=other"]),
        code_layer({"strategy": {"name": "outer", "inside": "other"}}),
    ):
        resolved = resolve(layer, find_config=find)
        again = resolve(read(tmp_path, resolved.to_yaml(with_origins=True)), find_config=find)
        assert again.strategy_config == resolved.strategy_config
        assert again.strategy_config.inside.name == "other"


def test_what_is_refused_inside(tmp_path):
    layer = read(tmp_path, "strategy:\n  name: outer\n  inside: {name: inner, stage: 9, stag: 1}\n")
    with pytest.raises(ConfigError) as caught:
        outer(layer)
    message = str(caught.value)
    assert "run.yaml:3: strategy.inside.stage: expected at most 3, found 9" in message
    assert "unknown key strategy.inside.stag; did you mean 'stage'?" in message
    for value in ("3", "[inner]", "{name: 3}"):
        layer = read(tmp_path, f"strategy: {{name: outer, inside: {value}}}")
        with pytest.raises(ConfigError, match="strategy.inside: expected a name or a mapping"):
            outer(layer)
    with pytest.raises(ConfigError, match="strategy.plan"):
        outer(read(tmp_path, "strategy: {name: outer, plan: {a: [1]}}"))


def test_yaml_and_back(tmp_path):
    text = 'strategy: {name: outer, plan: {"blocks.*.up": wide}, inside: {name: other, depth: 3}}'
    resolved = resolve(read(tmp_path, text), find_config=find)
    again = resolve(read(tmp_path, resolved.to_yaml()), find_config=find)
    assert again.strategy_config == resolved.strategy_config
    assert again.strategy_config.plan == {"blocks.*.up": "wide"}
    assert ("strategy.inside.depth", 3) in [(key, value) for key, value, _ in again.rows()]
