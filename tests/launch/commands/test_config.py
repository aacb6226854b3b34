"""``drivetrain config``: default, show, check, explain."""

import itertools
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from config_layers import code_layer
from drivetrain.config import RunConfig, read_file, read_sets
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.commands.options import run_line


def test_command_to_run_has_an_index_for_each_host():
    alone = run_line(Path("a b.yaml"), 1, "x.py")
    assert alone == "run: drivetrain launch --config 'a b.yaml' x.py"
    assert run_line(Path("a.yaml"), 3, "x.py") == (
        "run on each of the 3 hosts, with its own --node-rank: "
        "drivetrain launch --config a.yaml --node-rank 0 x.py"
    )


def test_default_writes_a_configuration_that_checks(command):
    out = command.output("config", "--default")
    written = yaml.safe_load(out)
    assert set(written) == {"strategy", *(field.name for field in fields(RunConfig))}
    assert command("config", "--default", "--output", "run.yaml")[:2] == (0, "wrote run.yaml\n")
    assert command("config", "check", "run.yaml")[:2] == (0, "ok\n")
    err = command.error("config", "--default", "--output", "run.yaml")
    assert "run.yaml exists" in err


def test_show_gives_value_and_origin(command, tmp_path):
    (tmp_path / "run.yaml").write_text("strategy: {name: toy}\nseed: 3\n")
    out = command.output("config", "show", "--config", "run.yaml", "--set", "accumulation=2")
    rows = [line.split() for line in out.splitlines()]
    assert ["seed", "3", "run.yaml:2"] in rows
    assert ["accumulation", "2", "--set", "accumulation=2"] in rows
    assert ["precision", "no", "default"] in rows
    assert ["strategy.spoons", "2", "default"] in rows


def test_without_a_terminal_the_wizard_says_what_to_do(command):
    err = command.error("config")
    assert "drivetrain config --default --output FILE" in err


def test_default_in_a_resolved_file_does_not_contradict_the_script(command, tmp_path):
    """The script may set what the command line left alone, though the file holds its default."""
    layer = read_sets(["strategy=toy", "launch.nnodes=1"])
    find_config = strategies().find_config
    resolved = resolve(layer, find_config=find_config)
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved.to_yaml(with_origins=True))
    script = code_layer({"strategy": {"name": "toy", "spoons": 5}})
    again = resolve(read_file(path), script, find_config=find_config)
    assert again.strategy_config.spoons == 5
    origins = {key: origin.text for key, _, origin in again.rows()}
    assert origins["launch.nnodes"] == "--set launch.nnodes=1"
    assert origins["launch.node_rank"] == "default"
    with pytest.raises(ConfigError, match="command line says 'toy'"):
        resolve(read_file(path), code_layer({"strategy": "other"}), find_config=find_config)


def test_check_is_as_strict_as_prepare(command, tmp_path):
    for text, message in (
        ("precision: no\ndtypes: {param: bf16}\n", "dtypes.param: bf16 needs precision: bf16"),
        ("strategy: {name: offload, optimizer: gpu}\n", "unknown store 'gpu'; did you mean 'cpu'"),
        ("strategy: ddp\nprecision: bf16\ndtypes: {param: bf16}\n", "ddp: expected dtypes.param"),
        ("strategy: {name: offload, optimizer: nvme}\n", "expected offload.path with the store"),
        (
            "strategy: {name: zero1, offload: {optimizer: cpu, store_options: {threads: 2}}}\n",
            "strategy.offload: expected options of the stores, found ['threads']",
        ),
        ("strategy: {name: zero1, offload: {params: cpu, optimizer: cpu}}\n", "divides parameters"),
        ("strategy: {name: fsdp, unit_classes: Block}\n", "expected unit_classes only with units"),
        ("strategy: {name: megatron, tp: 2}\nlaunch: {nproc_per_node: 3}\n", "found 3; change tp"),
        ("strategy: {name: megatron, sequence_parallel: true}\n", "expected tp above 1"),
        ("strategy: {name: megatron, tp: 2}\nprecision: bf16\ndtypes: {param: bf16}\n", "ddp: exp"),
        ("strategy: {name: ddp, hook: bf16}\nprecision: bf16\ndtypes: {reduce: bf16}\n", "both"),
        ("strategy: {name: local, inner: auto}\n", "strategy.inner: expected a strategy that"),
        ("strategy: {name: megatron, data_parallel: auto}\n", "found 'auto', which chooses one"),
        ("launch: {nnodes: 2}\n", "expected HOST:PORT of host 0"),
        (
            "strategy: {name: megatron, tp: 4}\nlaunch: {nnodes: 2, min_nnodes: 1, "
            "nproc_per_node: 2, rdzv_endpoint: '10.0.0.1:29400'}\n",
            "launch.min_nnodes: the run could not go on with 1 hosts of 2 ranks: ",
        ),
    ):
        for how in (("config", "check"), ("launch", "--cpu", "--dry-run", "--config")):
            (tmp_path / "run.yaml").write_text(f"seed: 1\n{text}")
            err = command.error(*how, "run.yaml", lines=1)
            assert message in err, text


def test_check_reports_every_error_also_beside_an_unknown_strategy(command, tmp_path):
    for strategy in ("toy", "zero4"):
        text = f"strategy: {strategy}\nprecison: bf16\naccumulation: 0\nlaunch:\n  nnodes: 0\n"
        (tmp_path / "bad.yaml").write_text(text)
        err = command.error("config", "check", "bad.yaml")
        assert "bad.yaml:2: unknown key precison; did you mean 'precision'?" in err
        assert "bad.yaml:3: accumulation: expected at least 1, found 0" in err
        assert "bad.yaml:5: launch.nnodes: expected at least 1, found 0" in err
    assert "bad.yaml:1: unknown strategy 'zero4'; did you mean" in err


def test_explain_gives_meaning_values_default_and_flag(command):
    out = command.output("config", "explain", "launch.nproc_per_node")
    assert out.splitlines() == [
        "launch.nproc_per_node: Processes per host; auto: one per accelerator, or per CPU",
        "core without one.",
        "  values   a whole number or auto, at least 1 and at most 4096",
        "  default  auto",
        "  flag     --nproc-per-node",
    ]
    assert "values   true, false or null" not in out
    _, out, _ = command("config", "explain", "launch.log_dir")
    assert '  default  ""\n' in out


def test_explain_lists_a_section_and_the_options_of_a_strategy(command):
    _, out, _ = command("config", "explain", "dtypes")
    assert "  master (auto): Copy that the optimizer updates." in out
    _, out, _ = command("config", "explain", "toy")
    assert out.splitlines()[0] == "toy: averages each gradient by itself."
    assert "  spoons (2): Spoons per bowl." in out
    _, out, _ = command("config", "explain", "strategy.spoons")
    assert "a whole number, at least 1 and at most 9" in out
    assert "  of       toy" in out
    _, out, _ = command("config", "explain", "launch.max_restarts")
    assert "a whole number, at least 0" in out
    _, out, _ = command("config", "explain", "strategy")
    listed = {f"  {name}: {strategies().summary(name)}" for name in strategies().names}
    assert listed <= set(out.splitlines())


def test_explain_joins_strategies_that_mean_the_same(command):
    _, out, _ = command("config", "explain", "strategy.offload.optimizer")
    assert re.search(r"  of       fsdp, .*zero1, zero2, zero3$", out, re.MULTILINE), out


def test_explain_names_the_nearest_key(command):
    for key, message in (
        ("launch.nnode", "unknown key 'launch.nnode'; did you mean 'launch.nnodes'?"),
        ("spoons", "unknown key 'spoons'; did you mean 'strategy.spoons'?"),
        ("strategy.spoon", "has an option 'spoon'; did you mean 'strategy.spoons'?"),
        ("zzz", "unknown key 'zzz'; 'drivetrain config show' lists all keys"),
    ):
        err = command.error("config", "explain", key)
        assert message in err, key


def test_times_that_no_clock_counts_are_refused(command, tmp_path):
    values = (".inf", "-.inf", ".nan", "-1", "0", "1e30", "forever")
    cases = [*itertools.product(("timeout_s", "start_timeout_s"), values)]
    cases += itertools.product(("straggler_every_s", "straggler_margin"), (".inf", ".nan", "-1"))
    for key, value in cases:
        (tmp_path / "bad.yaml").write_text(f"launch:\n  {key}: {value}\n")
        for words in (("config", "check", "bad.yaml"), ("launch", "--config", "bad.yaml", "x.py")):
            err = command.error(*words)
            assert f"bad.yaml:2: launch.{key}: expected" in err, value
            assert "Traceback" not in err, value
        (tmp_path / "good.yaml").write_text(f"launch:\n  {key}: 0.5\n")
        assert command("config", "check", "good.yaml")[0] == 0, key
