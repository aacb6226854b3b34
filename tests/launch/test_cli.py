"""What the user types: help, options, configuration errors, the dry run, completion."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch import cli
from drivetrain_launch.cli import COMMANDS
from drivetrain_launch.commands import preview
from drivetrain_launch.commands.options import FLAGS, command_line_layer
from drivetrain_launch.console import show, show_table


def test_launch_help_states_default_and_yaml_key_of_every_flag(command):
    out = command.output("launch", "--help")
    text = " ".join(out.split())
    for flag in FLAGS:
        assert flag.names[0] in text
        value = f": {flag.value}" if flag.value else ""
        assert f"[YAML: {flag.key.removesuffix('.name')}{value}]" in text
    assert text.count("[default: ") >= len(FLAGS)
    for heading in ("Configuration:", "Training:", "Processes:", "Several hosts:", "Output:"):
        assert heading in text
    _, _, listed = text.partition("Strategies: ")
    lines = {name: f"{name} {strategies().load(name).summary}" for name in strategies().names}
    for line in {**lines, "toy": "toy from toy_spread"}.values():  # which has no line of its own
        assert line in listed


def test_flags_are_called_as_their_keys_but_for_words_of_other_launchers():
    names = {name: flag.key.rpartition(".")[2] for flag in FLAGS for name in flag.names}
    other = {name: key for name, key in names.items() if name[2:].replace("-", "_") != key}
    assert other == {
        "--strategy": "name",
        "--mixed-precision": "precision",
        "--cpu": "device",
        "--num-machines": "nnodes",
        "--machine-rank": "node_rank",
        "--profile": "steps",
    }


def test_help_of_each_command_has_an_example_and_one_name_per_thing(command):
    for words in (
        *("launch", "estimate", "plan", "verify", "test", "report", "schedule", "disk-bench"),
        *("config show", "config check", "hardware show", "hardware measure", "manifest slurm"),
        *("checkpoint inspect", "checkpoint verify", "checkpoint export"),
    ):
        text = " ".join(command.output(*words.split(), "--help").split())
        assert f"Example: drivetrain {words} " in text
        assert not {"--devices-per-host", "--ranks", "--device", "PATH"} & set(text.split()), words
    with_hosts = [word for word in ("plan", "test") if "--hosts" in command.output(word, "--help")]
    assert with_hosts == ["test"]  # a list of names


def test_version_and_unknown_commands(command):
    assert command("--version")[1].startswith("drivetrain, version ")
    assert "unknown command 'lunch'; did you mean 'launch'?" in command.error("lunch")
    for words in ((), ("manifest",)):  # the help alone, not as the text of an error
        assert command(*words)[2].rstrip() == command.output(*words, "--help").rstrip()


def test_ctrl_c_ends_a_command_with_the_code_of_shells(command, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.group, "main", interrupted)
    assert command("config") == (130, "", "interrupted\n")


def test_flags_become_a_layer_that_quotes_them():
    layer = command_line_layer({"nproc_per_node": "2", "cpu": True, "strategy": "x"}, ["seed=3"])
    assert layer.values == {
        "seed": 3,
        "strategy": {"name": "x"},
        "launch": {"nproc_per_node": 2, "device": "cpu"},
    }
    texts = {key: origin.text for key, origin in layer.origins.items()}
    assert texts == {
        "seed": "--set seed=3",
        "strategy.name": "--strategy x",
        "launch.nproc_per_node": "--nproc-per-node 2",
        "launch.device": "--cpu",
    }
    assert {origin.kind for origin in layer.origins.values()} == {"command line"}


def test_flag_and_set_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="'--precision bf16' and '--set precision=fp16'"):
        command_line_layer({"precision": "bf16"}, ["precision=fp16"])
    for assignment in ("strategy=flat", "strategy={name: flat}"):
        with pytest.raises(ConfigError, match=f"'--strategy toy' and '--set {assignment}'"):
            command_line_layer({"strategy": "toy"}, [assignment])


def test_dry_run_shows_origin_mesh_and_cost_and_starts_nothing(command, tmp_path, monkeypatch):
    monkeypatch.setattr(preview, "accelerators", lambda: 1)  # fewer than the file has ranks
    (tmp_path / "run.yaml").write_text("accumulation: 4\nstrategy: {name: toy, spoons: 3}\n")
    out = command.output(
        "launch", "--config", "run.yaml", "--nproc_per_node", "3", "--mixed-precision", "bf16",
        "--dry-run",
    )  # fmt: skip
    rows = {tuple(line.split()[:2]): line for line in out.splitlines() if line.split()}
    assert rows["accumulation", "4"].endswith("run.yaml:1")
    assert rows["launch.nproc_per_node", "3"].endswith("--nproc-per-node 3")
    assert rows["precision", "bf16"].endswith("--precision bf16")
    assert re.search(r"\d+ more keys at their default: drivetrain config show", out)
    assert "Mesh: dp=3 (1 x 3 ranks)" in out
    assert "0, 1, 2" in out
    # 1e9 fp32 elements: 4e9 bytes of parameters, twice that of Adam's state.
    assert rows["held:", "parameters"].split()[-2:] == ["3.7", "GiB"]
    assert rows["held:", "optimizer"].split()[-2:] == ["7.5", "GiB"]
    assert "\x1b" not in out
    out = command.output("launch", "--strategy", "toy", "--dry-run")
    assert out.startswith("The number of ranks is open, launch.nproc_per_node: auto: planned are")
    assert "Mesh: dp=1 (1 x 1 ranks)" in out


def test_bad_input_exits_with_2_and_says_why(command, tmp_path):
    (tmp_path / "x.py").write_text("")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.yaml").write_text("a: [1, }")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "keys.yaml").write_text("seed: 1\nlaunch:\n  nnode: 2\n")
    for arguments, text in (
        (["--set", "precison=bf16", "x.py"], "did you mean 'precision'"),
        (["--nproc-per-node", "0", "x.py"], "--nproc-per-node 0: launch.nproc_per_node: expected"),
        (["--nproc-per-node", "two", "x.py"], "found 'two'"),
        (["--strategy", "tooy", "x.py"], "did you mean 'toy'? installed: "),
        (["--strategy", "ZeRO-3", "x.py"], "did you mean 'zero3'? installed: "),
        (["--nnodes", "2", "x.py"], "rdzv_endpoint: expected HOST:PORT of host 0"),
        (["--node-rank", "2", "--nnodes", "2", "x.py"], "expected 0 to 1 with nnodes 2, found 2"),
        (["--rdzv-endpoint", "here", "x.py"], "expected HOST:PORT with a port"),
        (["missing.py"], "no such file"),
        ([], "expected a SCRIPT"),
        (["--no-such"], "error: no such option"),
        (["--log-dir", "a", "--log-dir", "b", "x.py"], "--log-dir is given more than once"),
        (["--set", "strategy.tp=2", "x.py"], "strategies with this option: megatron"),
        (["-m", "no_such_package.module"], "no module named 'no_such_package'"),
        (["-m", "x.py"], "expected the name of a module, such as package.train, found the file"),
        (["keys.yaml", "x.py"], "found 'keys.yaml'; give a configuration as --config keys.yaml"),
        (["--config", "missing.yaml", "x.py"], "cannot read the configuration missing.yaml"),
        (["--config", "list.yaml", "x.py"], "list.yaml:1: expected a mapping"),
        (["--config", "keys.yaml", "x.py"], "keys.yaml:3: unknown key launch.nnode; did you mean"),
        (["--config", ".", "x.py"], "cannot read the configuration .: Is a directory; write one"),
        (["--config", "bytes.yaml", "x.py"], "expected text in UTF-8, found the byte 0x"),
        (["--config", "broken.yaml", "x.py"], "broken.yaml:1: expected YAML; the parser says:"),
        (["--set", "lunch.nnodes=2", "x.py"], "--set lunch.nnodes=2: unknown key lunch; did you"),
        (["--set", "seed=1.5", "x.py"], "seed: expected a valid integer, found 1.5"),
        (["--nproc-per-node", "two", "x.py"], "expected a valid integer or 'auto', found 'two'"),
        (["--profile", "5:5", "x.py"], "expected a number of steps, such as 5, or the begin and"),
        (["--log-dir", "x.py", "x.py"], "launch.log_dir: expected a folder that exists or can be"),
        (["."], "cannot run the script '.': it is a folder;"),
    ):
        err = command.error("launch", *arguments)
        assert text in " ".join(err.split()), arguments


def test_completion_scripts_name_the_command(command):
    for shell in ("bash", "zsh", "fish"):
        assert "_DRIVETRAIN_COMPLETE" in command.output("completion", shell), shell


def test_completion_offers_commands_and_installed_strategies(completed):
    assert "launch" in completed("la")
    assert "toy" in completed("launch --strategy to")
    # Bash itself completes these.
    for words in ("launch mn", "launch --config d", "estimate m"):
        assert completed(words).startswith("file,"), words
    assert completed("launch --log-dir l").startswith("dir,")
    assert completed("launch --set acc") == "plain,accumulation=\n"
    assert completed("launch --strategy toy --set strategy.sp") == "plain,strategy.spoons=\n"
    assert completed("config explain launch.nn") == "plain,launch.nnodes\n"


def test_contradiction_is_found_in_every_spelling():
    for flags, assignments in (
        ({"strategy": "ddp"}, ["strategy=zero3"]),
        ({"strategy": "ddp"}, ["strategy.name=zero3"]),
        ({"strategy": "ddp"}, ["strategy={name: zero3}"]),
        ({}, ["strategy=zero3", "strategy.name=ddp"]),
        ({}, ["strategy.name=ddp", "strategy=zero3"]),
        ({}, ["seed=1", "seed=2"]),
        ({"nnodes": "2"}, ["launch={nnodes: 3}"]),
    ):
        said = f"{re.escape(assignments[0])}.* contradict each other"
        with pytest.raises(ConfigError, match=said):
            command_line_layer(flags, assignments)
    layer = command_line_layer({"strategy": "zero3"}, ["strategy=zero3", "strategy.prefetch=2"])
    assert layer.values == {"strategy": {"name": "zero3", "prefetch": 2}}


def test_other_systems_are_refused_with_a_sentence(monkeypatch):
    for system in ("darwin", "win32"):
        monkeypatch.setattr(cli.sys, "platform", system)
        with pytest.raises(SystemExit, match=f"expected Linux, .* found {system}; take a Linux"):
            cli.main()


# --- commands of plugins: found by entry point, imported when called, harmless when broken ---


def test_a_strangers_command_runs_and_its_exit_code_counts(command):
    assert command("toast", "--slices", "2") == (0, "2 slices\n", "")
    assert command("toast", "--slices", "0")[0] == 7
    _, help_text, _ = command("toast", "--help")
    assert "Usage: drivetrain toast" in help_text
    assert "Toast a few slices." in help_text


def test_its_errors_become_exit_codes_as_ours_do(command):
    code, _, err = command("toast", "--slices", "10")
    assert (code, err) == (3, "error: expected at most 9 slices, found 10; toast twice\n")
    err = command.error("toast", "--slices", "few")
    assert "'few' is not a valid integer" in err


IMPORTS = """
import os, signal, sys
hidden = {signal: ("SIGHUP", "SIGQUIT"), os: ("getsid", "sched_getaffinity")}
kept = {(module, name): getattr(module, name) for module in hidden for name in hidden[module]}
for module, name in kept:
    delattr(module, name)
sys.modules["resource"] = None
from drivetrain_launch.cli import main, run
sys.platform = "win32"  # which lacks those names
try:
    main()
except SystemExit as refusal:
    assert "expected Linux, which alone is supported, found win32" in refusal.code
sys.platform = "linux"
del sys.modules["resource"]
for (module, name), value in kept.items():
    setattr(module, name, value)

assert run(["--help"]) == 0
imported = ("toy_", "torch", "drivetrain_")
found = [name for name in sys.modules if name.startswith(imported)]
assert found == ["drivetrain_launch", "drivetrain_launch.cli"], found
print("THE END")
for words in ("launch --help", "estimate --help", "checkpoint export --help"):
    assert run(words.split()) == 0
import drivetrain, drivetrain.config
import drivetrain.observe.page, drivetrain_launch.ranks.remote, drivetrain_launch.ranks.watch
from drivetrain.config.document import importers
from drivetrain.registry import strategies
from drivetrain_launch.commands import config
from drivetrain_launch.commands.wizard import ask_all
from drivetrain_launch.commands.wizard import Seen, Wizard
assert len(list(importers())) >= 3
wizard = Wizard(strategies(), Seen(cores=2, memory=64 << 30))
for answer in ("here", "7B", "bf16"):
    wizard.read(wizard.current, str(answer))
    wizard.answer(answer)
assert "torch" not in sys.modules
assert wizard.current.key == "strategy.name" and "torch" in sys.modules
"""
"""What is imported by a new interpreter, which this one is not."""


def test_help_lists_commands_of_plugins_without_importing_any(sandbox):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=sandbox.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text, _, _ = done.stdout.partition("THE END")
    ours, _, added = text.partition("Commands of plugins:")
    listed = {line.split()[0]: line.strip() for line in added.splitlines() if line.strip()}
    assert {"bread", "burnt", "lost", "schedule", "toast", "twice"} <= set(listed)
    assert listed["toast"].endswith("  Toasts a few slices, not too dark.")
    assert listed["schedule"].endswith(
        "  Draw the work of each rank of a pipeline, and the waiting."
    )
    assert listed["burnt"].endswith("  from toy_burnt")
    assert listed["twice"].endswith("  from toy_commands and toy_rival")
    # Nobody takes the place of one of ours.
    assert "launch" not in listed
    shown = ours.partition("Train:\n")[2].splitlines()
    listed = [line.split()[0] for line in shown if line.startswith("  ")]
    assert sorted(listed) == sorted(COMMANDS)


def test_a_broken_command_is_an_error_of_its_own(command):
    for name, text in (
        (
            "burnt",
            "error: the command 'burnt' (toy_burnt.command:burnt) cannot be imported: "
            "RuntimeError: the toaster is on fire; reinstall the distribution that provides it",
        ),
        ("lost", "the command 'lost' (toy_commands:lost) cannot be imported: AttributeError"),
        ("bread", "the command 'bread' of toy_commands: expected a click.Command, found int"),
        ("twice", "two distributions provide the command 'twice': toy_commands:slices and"),
    ):
        for arguments in ((), ("--help",)):
            err = command.error(name, *arguments)
            assert text in err, name
            assert "Traceback" not in err, name


def test_ours_run_beside_broken_ones(command):
    assert command("completion", "bash")[0] == 0
    assert "Usage: drivetrain launch [OPTIONS] SCRIPT" in command.output("launch", "--help")


def test_unknown_names_are_compared_with_those_of_plugins(command):
    err = command.error("tost")
    assert "unknown command 'tost'; did you mean 'toast'?" in err
    _, _, err = command("zzz")
    assert "commands: launch, config, " in err
    assert err.count("launch") == 1
    assert ", toast" in err


def test_completion_offers_them_without_importing_them(completed):
    assert completed("b").split() == ["plain,bread", "plain,burnt"]
    assert "--slices" in completed("toast --s")
    assert "--version" in completed("--v")


def test_env_names_them(command):
    out = command.output("env", "--json")
    assert "toast" in json.loads(out)["plugins"]["drivetrain.commands"].split(", ")


# --- a console that is gone: the run goes on, and nobody waits for its lines ---


def test_a_console_without_a_reader_is_silent_from_then_on():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as console:
        for number in range(3):
            show(f"line {number}", console)
        console.write("a line of somebody else")  # and no error when the file is closed
    with pytest.raises(BrokenPipeError):  # the same without the silence
        broken = os.pipe()
        os.close(broken[0])
        os.write(broken[1], b"a line")
    os.close(broken[1])


def test_a_line_that_does_not_fit_on_the_disk_is_lost_and_the_next_one_tried():
    console = Path("/dev/full").open("w")  # noqa: SIM115 - its end fails, too
    show("a line", console)
    place = Path(f"/proc/self/fd/{console.fileno()}")
    assert str(place.readlink()) == "/dev/full"
    with pytest.raises(OSError, match="No space left"):
        console.close()


def test_a_table_has_the_width_of_the_terminal_and_no_word_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "38")
    show_table(
        "title", ("layout", "time", "note"),
        [("dp=2,tp=2", "12 ms", "one of two, by a mean")], folds=True,
    )  # fmt: skip
    assert capsys.readouterr().out == (
        "title\n"
        "  layout     time   note\n"
        "  dp=2,tp=2  12 ms  one of two, by a\n"
        "                    mean\n\n"
    )
    monkeypatch.setenv("COLUMNS", "20")
    show_table("", ("layout", "time"), [("dp=2,tp=2,pp=20000000000", "1,234 s")], folds=True)
    assert capsys.readouterr().out.splitlines()[2:-1] == [
        "  dp=2,tp=2,      1,234 s",
        "  pp=20000000000",
    ]
