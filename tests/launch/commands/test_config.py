"""``drivetrain config``: the wizard as an engine and through a terminal; default, show, check."""

import sys
from dataclasses import fields
from pathlib import Path

import pexpect
import pytest
import yaml

from config_layers import code_layer
from drivetrain.config import (
    RunConfig,
    dump_yaml,
    options_of,
    read_file,
    read_sets,
)
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.commands.config import run_line
from drivetrain_launch.commands.wizard import STRATEGY_KEY, Wizard, hint

DOWN = "\x1b[B"
UP = "\x1b[A"


def offered():
    """Return the strategies that are there for training."""
    return [name for name in strategies().names if not strategies().load(name).reference]


@pytest.fixture
def wizard(command):
    return Wizard(strategies())


def walk(wizard):
    """Take every default; return the keys in the order in which they were asked."""
    keys = []
    while (question := wizard.current) is not None:
        keys.append(question.key)
        wizard.answer(question.default)
    return keys


def test_questions_come_from_the_declarations_of_the_strategy_too(wizard):
    wizard.answer("toy")
    assert walk(wizard) == [
        "strategy.flavor",
        "strategy.spoons",
        *(knob.name for knob in options_of(RunConfig) if knob.question),
        *(f"launch.{name}" for name in ("nproc_per_node", "nnodes", "device")),
    ]


def at(wizard, key):
    """Take defaults until a question."""
    while wizard.current.key != key:
        wizard.answer(wizard.current.default)


def test_several_hosts_are_asked_where_they_meet(wizard):
    at(wizard, "launch.nnodes")
    wizard.answer(2)
    assert wizard.current.key == "launch.rdzv_endpoint"
    for wrong in ("", "10.0.0.1"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            wizard.read(wizard.current, wrong)
    wizard.answer("10.0.0.1:29400")
    wizard.back()
    wizard.back()
    wizard.answer(1)
    assert wizard.current.key == "launch.device"
    assert "rdzv_endpoint" not in wizard.values()["launch"]


def test_a_store_of_files_is_asked_for_its_directory(wizard):
    wizard.answer("offload")
    wizard.answer("nvme")
    with pytest.raises(ConfigError, match=r"expected offload\.path with the store nvme"):
        wizard.read(wizard.current, "")
    wizard.answer("/mnt/nvme")
    assert wizard.current.key == "precision"


def test_enter_leaves_a_text_empty(wizard):
    wizard.answer("offload")
    wizard.answer("cpu")
    assert wizard.read(wizard.current, "") == ""


def test_command_to_run_has_an_index_for_each_host():
    assert (
        run_line(Path("a b.yaml"), 1, "x.py") == "run: drivetrain launch --config 'a b.yaml' x.py"
    )
    assert run_line(Path("a.yaml"), 3, "x.py") == (
        "run on each of the 3 hosts, with its own --node-rank: "
        "drivetrain launch --config a.yaml --node-rank 0 x.py"
    )


def test_default_path_is_short_and_the_default_strategy_stands_first(wizard):
    question = wizard.current
    assert question.choices[0].value == question.default == strategies().default()
    assert {choice.value for choice in question.choices} == set(offered())
    assert strategies().reference() not in offered()
    assert "toy: averages each gradient by itself" in {c.title for c in question.choices}
    assert len(walk(wizard)) <= 8


def test_answers_become_a_configuration(wizard):
    wizard.answer("toy")
    wizard.answer("salted")
    wizard.answer(9)
    walk(wizard)
    assert wizard.values()["strategy"] == {"name": "toy", "flavor": "salted", "spoons": 9}
    assert wizard.values()["launch"]["nnodes"] == 1


def test_file_says_the_meaning_of_each_key(wizard):
    wizard.answer("toy")
    walk(wizard)
    text = dump_yaml(wizard.values(), wizard.comments())
    assert "name: toy  # averages each gradient by itself\n" in text
    assert "accumulation: 1  # Micro-batches per optimizer step.\n" in text
    assert max(map(len, text.splitlines())) <= 80
    assert yaml.safe_load(text) == wizard.values()


def test_hints_break_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "auto takes the accelerators of the host; cpu leaves them alone."
    assert hint(text).split() == text.split()
    assert [len(line) <= 40 for line in hint(text).splitlines()] == [True, True]


def test_back_keeps_the_answer_as_the_default(wizard):
    wizard.answer("toy")
    wizard.answer("salted")
    wizard.back()
    assert (wizard.current.key, wizard.current.default) == ("strategy.flavor", "salted")
    wizard.back()
    wizard.back()
    assert wizard.current.key == STRATEGY_KEY
    assert not wizard.can_go_back


def test_another_strategy_drops_the_options_of_the_first(wizard):
    wizard.answer("toy")
    wizard.answer("salted")
    wizard.back()
    wizard.back()
    wizard.answer(strategies().default())
    assert wizard.answers == {STRATEGY_KEY: strategies().default()}


@pytest.mark.parametrize(
    ("text", "message"),
    [("0", "at least 1, found 0"), ("10", "at most 9, found 10"), ("many", "found 'many'")],
)
def test_typed_answers_are_held_to_the_limits(wizard, text, message):
    wizard.answer("toy")
    wizard.answer("plain")
    with pytest.raises(ConfigError, match=f"^strategy.spoons: .*{message}"):
        wizard.read(wizard.current, text)
    assert wizard.read(wizard.current, "7") == 7


def test_default_writes_a_configuration_that_checks(command):
    code, out, _ = command("config", "--default")
    assert code == 0
    written = yaml.safe_load(out)
    assert set(written) == {"strategy", *(field.name for field in fields(RunConfig))}
    assert command("config", "--default", "--output", "run.yaml")[:2] == (0, "wrote run.yaml\n")
    assert command("config", "check", "run.yaml")[:2] == (0, "ok\n")
    code, _, err = command("config", "--default", "--output", "run.yaml")
    assert code == 2
    assert "run.yaml exists" in err


def test_show_gives_value_and_origin(command, tmp_path):
    (tmp_path / "run.yaml").write_text("strategy: {name: toy}\nseed: 3\n")
    code, out, _ = command("config", "show", "--config", "run.yaml", "--set", "accumulation=2")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["seed", "3", "run.yaml:2"] in rows
    assert ["accumulation", "2", "--set", "accumulation=2"] in rows
    assert ["precision", "no", "default"] in rows
    assert ["strategy.spoons", "2", "default"] in rows


def test_check_reports_every_error(command, tmp_path):
    (tmp_path / "bad.yaml").write_text("strategy: toy\nprecison: bf16\nlaunch:\n  nnodes: 0\n")
    code, _, err = command("config", "check", "bad.yaml")
    assert code == 2
    assert "bad.yaml:2: unknown key precison; did you mean 'precision'?" in err
    assert "bad.yaml:4: launch.nnodes: expected at least 1, found 0" in err


def test_without_a_terminal_the_wizard_says_what_to_do(sandbox):
    done = sandbox.run("config")
    assert done.returncode == 2
    assert "drivetrain config --default --output FILE" in done.stderr


class Terminal:
    """The wizard on a real pseudo-terminal."""

    def __init__(self, sandbox, *arguments):
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "drivetrain_launch", "config", *arguments],
            cwd=str(sandbox.folder),
            env=sandbox.environment({"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}),
            timeout=60,
            encoding="utf-8",
            dimensions=(40, 160),
        )

    def answer(self, question, keys):
        self.child.expect_exact(question)
        self.child.send(keys)

    def end(self):
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


def test_wizard_through_a_terminal(sandbox):
    sandbox.script("an old file\n", "drivetrain.yaml")
    terminal = Terminal(sandbox)
    toy = strategies_below_the_default("toy")
    terminal.answer("How is the training step", DOWN * toy + "\r")
    terminal.answer("Which flavor?", DOWN + "\r")
    terminal.answer("How many spoons?", "\x7f99\r")
    terminal.answer("expected at most 9, found 99", "\x7f\x7f<\r")
    terminal.answer("Which flavor?", "\r")
    terminal.answer("How many spoons?", "\x7f4\r")
    terminal.answer("Which precision?", DOWN + "\r")
    terminal.answer("How many micro-batches", "\r")
    terminal.answer("How many processes", "\r")
    terminal.answer("How many hosts?", "\r")
    terminal.answer("Which devices?", UP + "\r")  # upwards from the first is "back"
    terminal.answer("How many hosts?", "\r")
    terminal.answer("Which devices?", "\r")
    terminal.answer("Write it to which file?", "\r")
    terminal.answer("drivetrain.yaml exists. Replace it?", "n")
    terminal.answer("Write it to which file?", "\x15new.yaml\r")
    terminal.child.expect_exact("run: drivetrain launch --config new.yaml train.py")
    assert terminal.end() == 0
    assert (sandbox.folder / "drivetrain.yaml").read_text() == "an old file\n"
    written = yaml.safe_load((sandbox.folder / "new.yaml").read_text())
    assert written["strategy"] == {"name": "toy", "flavor": "salted", "spoons": 4}
    assert written["precision"] == "bf16"
    assert written["launch"]["nproc_per_node"] == "auto"


def test_ctrl_c_in_the_wizard_writes_nothing(sandbox):
    terminal = Terminal(sandbox)
    terminal.answer("How is the training step", "\x03")
    assert terminal.end() == 130
    assert list(sandbox.folder.iterdir()) == [sandbox.temporary]


def strategies_below_the_default(name):
    """Return how often to press Down to get from the default to another strategy."""
    installed = strategies()
    others = sorted({*offered(), "toy"} - {installed.default()})
    return others.index(name) + 1


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precision: no\ndtypes: {param: bf16}\n", "dtypes.param: bf16 needs precision: bf16"),
        (
            "strategy: {name: offload, optimizer: gpu}\n",
            "unknown store 'gpu'; did you mean 'cpu'",
        ),
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
        ("launch: {nnodes: 2}\n", "expected HOST:PORT of host 0"),
    ],
)
@pytest.mark.parametrize("how", [("config", "check"), ("launch", "--cpu", "--dry-run", "--config")])
def test_check_is_as_strict_as_prepare(command, tmp_path, how, text, message):
    (tmp_path / "run.yaml").write_text(f"seed: 1\n{text}")
    code, out, err = command(*how, "run.yaml")
    assert (code, out) == (2, ""), out
    assert message in err
    assert len(err.splitlines()) == 1


def test_unknown_strategy_hides_no_other_mistake(command, tmp_path):
    (tmp_path / "run.yaml").write_text("strategy: zero4\nprecison: bf16\naccumulation: 0\n")
    code, _, err = command("config", "check", "run.yaml")
    assert code == 2
    assert "run.yaml:1: unknown strategy 'zero4'; did you mean" in err
    assert "run.yaml:2: unknown key precison" in err
    assert "run.yaml:3: accumulation: expected at least 1, found 0" in err
