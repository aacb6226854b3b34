"""Layers merge by precedence, remember their origin, and refuse what is wrong, all at once."""

import re
from dataclasses import dataclass
from typing import Literal

import pytest

from config_layers import code_layer
from drivetrain.config import (
    LaunchConfig,
    Layer,
    option,
    options_of,
    read_file,
    read_sets,
    resolve,
    section,
)
from drivetrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    depth: int = option(1, help="Depth.", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    bucket_mib: float = option(25.0, help="Bucket size in MiB.", minimum=0.1, maximum=100)
    mode: Literal["fast", "exact"] = option("exact", help="Mode.")
    inner: Inner = section(Inner, help="Inner.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    stage: int = option(1, help="Stage.")


def find(name: str) -> tuple[str, type]:
    return {"": ("mine", Config), "mine": ("mine", Config), "other": ("other", Other)}[name]


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_later_layers_win_and_origins_are_kept(tmp_path):
    text = "strategy: {name: mine, bucket_mib: 50}\naccumulation: 2\n"
    text += "links:\n  far:\n    warmup_steps: 3\nlaunch: {max_restarts: 3}\n"
    path = write(tmp_path, text)
    sets = read_sets(["accumulation=8", "launch={max_restarts: 2}"])
    resolved = resolve(read_file(path), sets, find_config=find)
    rows = {key: (value, origin.text) for key, value, origin in resolved.rows()}
    assert rows["accumulation"] == (8, "--set accumulation=8")
    assert rows["strategy.bucket_mib"] == (50.0, f"{path}:1")
    assert rows["links.far.warmup_steps"] == (3, f"{path}:5")
    assert rows["launch.max_restarts"] == (2, "--set launch={max_restarts: 2}")
    assert rows["precision"] == ("no", "default")


def test_code_beats_the_file_but_contradicting_the_command_line_is_an_error(tmp_path):
    path = write(tmp_path, "accumulation: 2\n")
    found = resolve(read_file(path), code_layer({"accumulation": 4}), find_config=find)
    assert found.run.accumulation == 4
    with pytest.raises(ConfigError, match=r"Accelerator\(accumulation=4\).*--set accumulation=8"):
        resolve(read_sets(["accumulation=8"]), code_layer({"accumulation": 4}), find_config=find)
    same = resolve(read_sets(["accumulation=4"]), code_layer({"accumulation": 4}), find_config=find)
    assert same.run.accumulation == 4


def test_every_error_at_once_with_line_and_nearest_key(tmp_path):
    path = write(
        tmp_path,
        "strategy:\n  name: mine\n  bucket_mb: 3\n  mode: slow\n  inner: {depth: -1}\n"
        "accumulation: 0\nprecison: bf16\nlaunch:\n  nnodes: two\n",
    )
    with pytest.raises(ConfigError) as caught:
        resolve(read_file(path), find_config=find)
    expected = (
        "3: unknown key strategy.bucket_mb; did you mean 'bucket_mib'?",
        "4: strategy.mode:",
        "5: strategy.inner.depth: expected at least 0, found -1",
        "6: accumulation: expected at least 1, found 0",
        "7: unknown key precison; did you mean 'precision'?",
        "9: launch.nnodes:",
    )
    places = [str(caught.value).index(f"{path}:{line}") for line in expected]
    assert places == sorted(places)
    assert "'fast' or 'exact'" in str(caught.value)
    with pytest.raises(ConfigError, match="links.mbit_per_s: expected at least 0, found nan"):
        resolve(read_sets(["links.mbit_per_s=.nan"]), find_config=find)


def test_valid_keys_are_listed_once(tmp_path):
    path = write(tmp_path, "launch:\n  foo: 1\n  bar: 2\n")
    with pytest.raises(ConfigError, match=":3: unknown key launch.bar; valid keys: as listed") as e:
        resolve(read_file(path), find_config=find)
    assert str(e.value).count("nproc_per_node") == 1


def test_a_dotted_key_in_a_file_is_to_be_nested(tmp_path):
    path = write(tmp_path, "strategy.bucket_mib: 3\n")
    with pytest.raises(ConfigError, match=r"write it nested, as strategy: {bucket_mib: VALUE}"):
        resolve(read_file(path), find_config=find)


def test_a_key_that_belongs_elsewhere_is_sent_there(tmp_path):
    for text, hint in (
        ("nproc_per_node: 2", "did you mean 'launch: {nproc_per_node: VALUE}'?"),
        ("launch: {cpu: true}", "did you mean 'device: cpu'?"),
        ("tp: 2", "this option: megatron; write it as strategy: {name: NAME, tp: VALUE}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(hint)):
            resolve(read_file(write(tmp_path, text)))


def test_knobs_that_take_another_ones_value():
    found = LaunchConfig(nnodes=4, timeout_s=20.0)
    assert (found.least_nnodes, found.start_s) == (4, 20.0)
    found = LaunchConfig(nnodes=4, min_nnodes=2, timeout_s=20.0, start_timeout_s=5.0)
    assert (found.least_nnodes, found.start_s) == (2, 5.0)
    choices = {knob.name: knob.choices for knob in options_of(LaunchConfig)}
    assert (choices["nproc_per_node"], choices["device"]) == (("auto",), ("auto", "cpu"))
    assert choices["nnodes"] == ()


def test_another_strategy_drops_the_options_of_the_one_below(tmp_path):
    path = write(tmp_path, "strategy: {name: mine, bucket_mib: 50}\n")
    resolved = resolve(read_file(path), read_sets(["strategy.name=other"]), find_config=find)
    assert resolved.strategy_config == Other()
    assert set(resolved.origins) == {"strategy.name"}
    least_and_most = read_sets(["strategy.bucket_mib=100", "strategy.inner.depth=0"])
    assert resolve(least_and_most, find_config=find).strategy_config.bucket_mib == 100
    path = write(tmp_path, "strategy: other\n")  # a bare name is one, too
    resolved = resolve(read_file(path), read_sets(["strategy.stage=3"]), find_config=find)
    assert (resolved.strategy, resolved.strategy_config.stage) == ("other", 3)


def test_resolved_file_stands_for_the_command_and_hides_no_weaker_choice(tmp_path):
    resolved = resolve(read_sets(["accumulation=8"]), find_config=find)
    path = write(tmp_path, resolved.to_yaml(with_origins=True))
    weaker = Layer({"precision": "bf16"})
    again = resolve(weaker, read_file(path), find_config=find)
    assert (again.run.accumulation, again.run.precision) == (8, "bf16")
    with pytest.raises(ConfigError, match="--set accumulation=8"):
        resolve(read_file(path), code_layer({"accumulation": 2}), find_config=find)


def test_wrong_files(tmp_path):
    for text, message in {
        "- a\n- b\n": "run.yaml:1: expected a mapping",
        "just text\n": "expected a mapping",
        "precision: bf16\nprecision: no\n": "run.yaml:2: precision is given twice",
        "precision: [\n": "run.yaml:2: expected YAML",
        "precision: !!python/object/apply:os.system ['true']\n": "line 1",
        "launch: 3\n": "run.yaml:1: launch: expected a mapping",
        "accumulation: true\n": "run.yaml:1: accumulation: expected a valid integer, found True",
        "strategy: [a]\n": "expected a name or a mapping",
    }.items():
        with pytest.raises(ConfigError) as caught:
            resolve(read_file(write(tmp_path, text)), find_config=find)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="drivetrain config"):
        read_file(tmp_path / "absent.yaml")
    for text in ("accumulation", "=3", "a..b=1", "a b=1"):
        with pytest.raises(ConfigError, match="KEY=VALUE"):
            read_sets([text])


def test_yaml_scalars_are_those_of_yaml_1_2(tmp_path):
    path = write(tmp_path, "a: no\nb: 1e-4\nc: 010\nd: 12:30\ne: true\nf: ~\ng: -.5\n")
    assert read_file(path).values == {
        "a": "no", "b": 1e-4, "c": 10, "d": "12:30", "e": True, "f": None, "g": -0.5,
    }  # fmt: skip
