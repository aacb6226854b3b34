"""What the user types: help, options, configuration errors, the dry run, completion."""

import os
import re
import subprocess
import sys

import pytest

from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch import cli
from drivetrain_launch.commands.options import FLAGS, command_line_layer


def test_help_imports_little_and_takes_little_of_the_processor(sandbox):
    code = (
        "import sys\n"
        "from drivetrain_launch.cli import run\n"
        "assert run(['--help']) == 0\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=sandbox.environment())
    seconds = []
    for _ in range(3):
        begin = os.times()
        assert sandbox.run("--help").returncode == 0
        end = os.times()
        seconds.append(end.children_user + end.children_system)
        seconds[-1] -= begin.children_user + begin.children_system
    assert min(seconds) < 0.6  # of the processor; it takes 0.08 s


def test_launch_help_does_not_import_torch(sandbox):
    code = (
        "import sys\n"
        "from drivetrain_launch.cli import run\n"
        "assert run(['launch', '--help']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True, env=sandbox.environment(), capture_output=True, text=True,
    )  # fmt: skip
    _, _, listed = done.stdout.partition("Strategies:\n")
    text = " ".join(listed.split())
    assert "toy from toy_spread" in text
    for name in strategies().names:
        assert f"{name} {strategies().load(name).summary}" in text


def test_launch_help_states_default_and_yaml_key_of_every_flag(sandbox):
    text = " ".join(sandbox.run("launch", "--help").stdout.split())
    for flag in FLAGS:
        assert flag.names[0] in text
        value = f": {flag.value}" if flag.value else ""
        assert f"[YAML: {flag.key.removesuffix('.name')}{value}]" in text
    assert text.count("[default: ") >= len(FLAGS)
    for heading in ("Configuration:", "Training:", "Processes:", "Several hosts:", "Output:"):
        assert heading in text


def test_version(sandbox):
    assert sandbox.run("--version").stdout.startswith("drivetrain, version ")


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


def test_dry_run_shows_origin_mesh_and_cost_and_starts_nothing(sandbox):
    sandbox.script("accumulation: 4\nstrategy: {name: toy, spoons: 3}\n", "run.yaml")
    done = sandbox.run(
        "launch", "--config", "run.yaml", "--nproc_per_node", "3", "--mixed-precision", "bf16",
        "--dry-run", "no-such-script.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {tuple(line.split()[:2]): line for line in done.stdout.splitlines() if line.split()}
    assert rows["accumulation", "4"].endswith("run.yaml:1")
    assert rows["launch.nproc_per_node", "3"].endswith("--nproc-per-node 3")
    assert rows["precision", "bf16"].endswith("--precision bf16")
    assert re.search(r"\d+ more keys at their default: drivetrain config show", done.stdout)
    assert "Mesh: dp=3 (1 x 3 ranks)" in done.stdout
    assert "0, 1, 2" in done.stdout
    # 1e9 fp32 elements: 4e9 bytes of parameters, twice that of Adam's state.
    assert rows["held:", "parameters"].split()[-2:] == ["3.7", "GiB"]
    assert rows["held:", "optimizer"].split()[-2:] == ["7.5", "GiB"]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--set", "precison=bf16", "x.py"], "did you mean 'precision'"),
        (["--nproc-per-node", "0", "x.py"], "--nproc-per-node 0: launch.nproc_per_node: expected"),
        (["--nproc-per-node", "two", "x.py"], "found 'two'"),
        (["--strategy", "tooy", "x.py"], "did you mean 'toy'? installed: "),
        (["--nnodes", "2", "x.py"], "rdzv_endpoint: expected HOST:PORT of host 0"),
        (["--node-rank", "2", "--nnodes", "2", "x.py"], "expected 0 to 1 with nnodes 2, found 2"),
        (["--rdzv-endpoint", "here", "x.py"], "expected HOST:PORT with a port"),
        (["missing.py"], "no such file"),
        ([], "expected a SCRIPT"),
        (["-m", "no_such_package.module"], "no module named 'no_such_package'"),
        (["--config", "missing.yaml", "x.py"], "cannot read the configuration missing.yaml"),
        (["--config", "list.yaml", "x.py"], "list.yaml:1: expected a mapping"),
        (["--config", "keys.yaml", "x.py"], "keys.yaml:3: unknown key launch.nnode; did you mean"),
        (["--config", ".", "x.py"], "cannot read the configuration .: Is a directory; write one"),
        (["--config", "bytes.yaml", "x.py"], "bytes.yaml: expected a text in UTF-8"),
        (["--config", "broken.yaml", "x.py"], "broken.yaml:1: expected YAML; the parser says:"),
        (["--set", "lunch.nnodes=2", "x.py"], "--set lunch.nnodes=2: unknown key lunch; did you"),
        (["--set", "seed=1.5", "x.py"], "seed: expected a valid integer, found 1.5"),
        (["--nproc-per-node", "two", "x.py"], "expected a valid integer or 'auto', found 'two'"),
        (["--profile", "5:5", "x.py"], "expected a number of steps, such as 5, or the begin and"),
        (["--log-dir", "x.py", "x.py"], "launch.log_dir: expected a folder that exists or can be"),
        (["."], "cannot run the script '.': it is a folder;"),
        (["--wrong-option", "x.py"], "No such option"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(command, tmp_path, arguments, text):
    (tmp_path / "x.py").write_text("")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.yaml").write_text("a: [1, }")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "keys.yaml").write_text("seed: 1\nlaunch:\n  nnode: 2\n")
    code, _, err = command("launch", "--strategy", "toy", *arguments)
    assert code == 2
    assert text in " ".join(err.split())


def test_unknown_command_names_the_nearest(command):
    code, _, err = command("lunch")
    assert code == 2
    assert "unknown command 'lunch'; did you mean 'launch'?" in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(sandbox, shell):
    done = sandbox.run("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "_DRIVETRAIN_COMPLETE" in done.stdout


def test_completion_offers_commands_and_installed_strategies(sandbox):
    def complete(words, position):
        return sandbox.run(
            env={
                "_DRIVETRAIN_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(position),
            }
        ).stdout

    assert "launch" in complete("drivetrain la", 1)
    assert "toy" in complete("drivetrain launch --strategy to", 3)
    # Bash itself completes these.
    for words in ("launch mn", "launch --config d", "estimate m"):
        assert complete(f"drivetrain {words}", len(words.split())).startswith("file,"), words
    assert complete("drivetrain launch --log-dir l", 3).startswith("dir,")
    assert complete("drivetrain launch --set acc", 3) == "plain,accumulation=\n"
    assert complete("drivetrain launch --strategy toy --set strategy.sp", 5) == (
        "plain,strategy.spoons=\n"
    )
    assert complete("drivetrain config explain launch.nn", 3) == "plain,launch.nnodes\n"


@pytest.mark.parametrize(
    ("flags", "assignments"),
    [
        ({"strategy": "ddp"}, ["strategy=zero3"]),
        ({"strategy": "ddp"}, ["strategy.name=zero3"]),
        ({"strategy": "ddp"}, ["strategy={name: zero3}"]),
        ({}, ["strategy=zero3", "strategy.name=ddp"]),
        ({}, ["strategy.name=ddp", "strategy=zero3"]),
        ({}, ["seed=1", "seed=2"]),
        ({"nnodes": "2"}, ["launch={nnodes: 3}"]),
    ],
)
def test_contradiction_is_found_in_every_spelling(flags, assignments):
    with pytest.raises(ConfigError, match=f"{re.escape(assignments[0])}.* contradict each other"):
        command_line_layer(flags, assignments)


def test_options_that_agree_are_no_contradiction():
    layer = command_line_layer({"strategy": "zero3"}, ["strategy=zero3", "strategy.prefetch=2"])
    assert layer.values == {"strategy": {"name": "zero3", "prefetch": 2}}


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_with_a_sentence(monkeypatch, system):
    monkeypatch.setattr(cli.sys, "platform", system)
    with pytest.raises(SystemExit, match=f"expected Linux, .* found {system}; take a Linux"):
        cli.main()


def test_refusal_needs_no_name_that_another_system_lacks(sandbox):
    """Windows has no signal.SIGHUP, os.getsid and resource; the sentence comes all the same."""
    code = (
        "import os, signal, sys\n"
        "del signal.SIGHUP, signal.SIGQUIT, os.getsid, os.sched_getaffinity\n"
        "sys.modules['resource'] = None\n"
        "from drivetrain_launch.cli import main\n"
        "sys.platform = 'win32'\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=sandbox.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: expected Linux, which alone is supported, found win32; take a Linux machine, a "
        "container or, on Windows, WSL 2"
    ]
