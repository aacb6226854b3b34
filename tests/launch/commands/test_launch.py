"""Real launches that end well: arguments, environment, output, restarts, other launchers."""

import json
import stat
import subprocess
import sys

from drivetrain import registry
from drivetrain.config import Layer, resolve
from drivetrain_launch.commands.launch import misplaced, without_effect
from drivetrain_launch.ranks.placement import interface_of

COLLECT = """
import json, os, sys
facts = {"argv": sys.argv, "path": sys.path[0], "env": dict(os.environ), "name": __name__}
open(f"facts-{os.environ['RANK']}.json", "w").write(json.dumps(facts))
print("out of rank", os.environ["RANK"])
print("err of rank", os.environ["RANK"], file=sys.stderr)
"""

REDUCE = """
import os, sys, time
import torch, torch.distributed as dist
size = int(os.environ.get("WORLD_SIZE", 1))
if size > 1:
    dist.init_process_group("gloo")
value = torch.ones(4) * (int(os.environ.get("RANK", 0)) + 1)
if size > 1:
    dist.all_reduce(value)
if int(os.environ.get("RANK", 0)) == 0:
    print("sum", value.tolist())
time.sleep(0.3)  # gloo's thread must let go of the last tensors before the interpreter ends
"""


def facts(sandbox, rank):
    return json.loads((sandbox.folder / f"facts-{rank}.json").read_text())


def test_script_gets_its_arguments_variables_and_config(sandbox):
    script = sandbox.script(COLLECT)
    awkward = ["a b", "line\nbreak", "'quoted\"", "$HOME ${local_rank} $$", "", "--cpu", "-m", "ü"]
    done = sandbox.launch(
        "--nproc-per-node", "2", "--set", "seed=7", script, *awkward, env={"HF_TOKEN": "canary"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out of rank 0\n"
    unused = (
        "drivetrain: the script made no Accelerator, so strategy.name = toy, seed = 7 had no "
        "effect and drivetrain joined nothing between its 2 ranks; make an Accelerator() and "
        "prepare() the model with it"
    )
    lines = ["[rank1]: err of rank 1", unused, "err of rank 0"]
    assert sorted(done.stderr.splitlines()) == lines
    assert "canary" not in done.stdout + done.stderr
    for rank in range(2):
        found = facts(sandbox, rank)
        assert found["argv"] == [script, *awkward]
        assert found["name"] == "__main__"
        assert found["path"] == str(sandbox.folder.resolve())
        wanted = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        wanted |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        wanted |= {"GLOO_SOCKET_IFNAME": interface_of("127.0.0.1")}
        assert found["env"].items() >= wanted.items()
        assert found["env"]["DRIVETRAIN_CONFIG"].startswith(str(sandbox.temporary))


def test_options_of_the_launcher_behind_the_script_are_named():
    assert misplaced(("train.py", "--lr", "1", "--cpu", "--config", "a.yaml")) == ""
    text = misplaced(("-m", "train", "--nproc_per_node=2", "--nnodes", "2"))
    assert "--nproc-per-node, --nnodes stands after the script" in text


def test_a_script_with_an_accelerator_hears_nothing_of_settings_without_effect(sandbox):
    script = sandbox.script("from drivetrain import Accelerator\nAccelerator(cpu=True)\n")
    done = sandbox.launch("--nproc-per-node", "1", "--set", "seed=7", script)
    assert done.returncode == 0, done.stderr
    assert "made no Accelerator" not in done.stderr


def test_one_rank_without_settings_hears_nothing():
    resolved = resolve(Layer({}, {}), find_config=registry.strategies().find_config)
    assert without_effect(resolved, 1) == ""
    assert "joined nothing between its 2 ranks" in without_effect(resolved, 2)


def test_config_file_of_the_ranks_is_private_and_remembers_origins(sandbox):
    script = sandbox.script(
        "import os, pathlib, shutil\n"
        "path = pathlib.Path(os.environ['DRIVETRAIN_CONFIG'])\n"
        "print(oct(path.stat().st_mode), oct(path.parent.stat().st_mode))\n"
        "shutil.copy(path, 'seen.yaml')\n"
    )
    done = sandbox.launch("--nproc-per-node", "1", "--set", "seed=7", script)
    assert done.returncode == 0, done.stderr
    modes = [int(mode, 8) for mode in done.stdout.split()]
    assert [stat.S_IMODE(mode) for mode in modes] == [0o600, 0o700]
    seen = sandbox.run("config", "show", "--config", "seen.yaml").stdout.splitlines()
    assert any(line.split()[:2] == ["seed", "7"] and "--set seed=7" in line for line in seen)


def test_threads_per_rank_of_the_configuration_reach_the_rank(sandbox):
    script = sandbox.script("import os; print(os.environ['OMP_NUM_THREADS'])")
    done = sandbox.launch(
        "--nproc-per-node", "1", "--set", "launch.threads_per_rank=3", script,
        env={"OMP_NUM_THREADS": ""},
    )  # fmt: skip
    assert done.stdout == "3\n"


def test_log_dir_keeps_one_file_per_rank_and_stream(sandbox):
    script = sandbox.script(COLLECT)
    done = sandbox.launch("--nproc-per-node", "2", "--log-dir", "logs", script)
    assert done.returncode == 0, done.stderr
    assert "out of rank 0" in done.stdout
    assert "out of rank 1" not in done.stdout
    kept = sandbox.folder / "logs" / "attempt-0"
    assert sorted(path.name for path in kept.iterdir()) == [
        "rank-0.stderr.log",
        "rank-0.stdout.log",
        "rank-1.stderr.log",
        "rank-1.stdout.log",
    ]
    assert (kept / "rank-1.stdout.log").read_text() == "out of rank 1\n"
    assert (kept / "rank-1.stderr.log").read_text() == "err of rank 1\n"


def test_module_runs_like_python_m(sandbox):
    package = sandbox.folder / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "run.py").write_text("import sys; print(__package__, sys.argv[1:])")
    done = sandbox.launch("--nproc-per-node", "1", "-m", "mine.run", "--lr", "1")
    assert done.stdout == "mine ['--lr', '1']\n", done.stderr


def test_modules_in_the_working_directory_do_not_hide_the_standard_library(sandbox):
    sandbox.script("raise SystemExit('the wrong module')", "random.py")
    sandbox.script("print('fine')", "scripts.py")
    folder = sandbox.folder / "elsewhere"
    folder.mkdir()
    (folder / "train.py").write_text("import random; print('fine')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "drivetrain_launch", "launch", "--strategy", "toy",
         "--nproc-per-node", "1", "elsewhere/train.py"],
        cwd=sandbox.folder, env=sandbox.environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr


def test_failed_attempt_is_reported_and_restarted(sandbox):
    script = sandbox.script(
        "import os\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    raise RuntimeError('only once')\n" + REDUCE
    )
    done = sandbox.launch("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum [3.0, 3.0, 3.0, 3.0]\n"
    assert "rank 1 failed first" in done.stderr
    assert "RuntimeError: only once" in done.stderr
    assert "starting all ranks again; 0 restarts left" in done.stderr


def test_same_script_runs_under_launch_torchrun_and_python(sandbox):
    script = sandbox.script(REDUCE)
    env = sandbox.environment()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", script]
    two = subprocess.run(
        torchrun, cwd=sandbox.folder, env=env, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    one = subprocess.run(
        [sys.executable, script], cwd=sandbox.folder, env=env, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    ours = sandbox.launch("--nproc-per-node", "2", script)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == two.stdout == "sum [3.0, 3.0, 3.0, 3.0]\n"
    assert one.stdout == "sum [1.0, 1.0, 1.0, 1.0]\n"
    # torchrun leaves its log folder behind; the sandbox looks for ours only.
    for folder in sandbox.temporary.glob("torchelastic_*"):
        subprocess.run(["rm", "-r", str(folder)], check=True)
