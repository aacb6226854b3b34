"""Commands of plugins: found by entry point, imported when called, harmless when broken."""

import json
import subprocess
import sys

from drivetrain_launch.cli import COMMANDS


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
