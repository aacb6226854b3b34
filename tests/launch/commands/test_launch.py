"""A launch that ends well: arguments, environment, output; and what is said of odd options."""

import json
import tempfile

from drivetrain import registry
from drivetrain.config import LaunchConfig, Layer, resolve
from drivetrain.runtime.world import memory_kept_mark
from drivetrain_launch.commands.launch import (
    LAUNCHERS_OWN,
    memory_folder,
    temporary_folder,
    without_effect,
)
from drivetrain_launch.commands.options import misplaced
from drivetrain_launch.ranks.placement import heap_variables, interface_of

COLLECT = """
import json, os, random, shutil, sys
config = os.environ["DRIVETRAIN_CONFIG"]
modes = [os.stat(path).st_mode & 0o777 for path in (config, os.path.dirname(config))]
facts = {"argv": sys.argv, "path": sys.path[0], "env": dict(os.environ), "name": __name__}
open(f"facts-{os.environ['RANK']}.json", "w").write(json.dumps({**facts, "modes": modes}))
shutil.copy(config, "seen.yaml")
print("out of rank", os.environ["RANK"])
print("err of rank", os.environ["RANK"], file=sys.stderr)
"""


def test_script_gets_its_arguments_variables_and_config(sandbox, command):
    (sandbox.folder / "elsewhere").mkdir()
    script = sandbox.script(COLLECT, "elsewhere/train.py")
    sandbox.script("raise SystemExit('hides a module of the standard library')", "random.py")
    awkward = ["a b", "line\nbreak", "'quoted\"", "$HOME ${local_rank} $$", "", "--cpu", "-m", "ü"]
    threads = ("--set", "launch.threads_per_rank=3")
    done = sandbox.launch(
        "--cpu", "--nproc-per-node", "2", "--set", "seed=7", *threads, script, *awkward,
        env={"HF_TOKEN": "canary"},
    )  # fmt: skip
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
        found = json.loads((sandbox.folder / f"facts-{rank}.json").read_text())
        assert found["argv"] == [script, *awkward]
        assert found["name"] == "__main__"
        assert found["path"] == str(sandbox.folder.resolve() / "elsewhere")
        wanted = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        wanted |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3", "MASTER_ADDR": "127.0.0.1"}
        wanted |= {"GLOO_SOCKET_IFNAME": interface_of("127.0.0.1")}
        wanted |= heap_variables(LaunchConfig(device="cpu"), accelerators=0)
        assert found["env"].items() >= wanted.items()
        assert ("TQDM_DISABLE" in found["env"]) == (rank > 0)
        assert found["env"]["DRIVETRAIN_CONFIG"].startswith(str(sandbox.temporary))
        assert found["modes"] == [0o600, 0o700]
    _, out, _ = command("config", "show", "--config", "seen.yaml")
    assert ["seed", "7", "--set", "seed=7"] in [line.split() for line in out.splitlines()]


def test_options_of_the_launcher_behind_the_script_are_named():
    words = ("train.py", "--lr", "1", "--cpu", "--config", "a.yaml")
    assert misplaced(words, LAUNCHERS_OWN, "launch") == ""
    words = ("-m", "train", "--nproc_per_node=2", "--nnodes", "2")
    text = misplaced(words, LAUNCHERS_OWN, "launch")
    assert "--nproc-per-node, --nnodes stands after the script" in text


def test_one_rank_without_settings_hears_nothing():
    resolved = resolve(Layer({}, {}), find_config=registry.strategies().find_config)
    assert without_effect(resolved, 1) == ""
    assert "joined nothing between its 2 ranks" in without_effect(resolved, 2)


# --- a launcher's private folders: whose are swept, and which stay ---


def test_folders_of_other_launchers_stay_while_these_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as first:
        with temporary_folder() as second:
            assert first.is_dir()
        assert not second.exists()
        (first / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_ranks_want_to_keep_stays_until_the_next_launcher(tmp_path):
    with memory_folder(tmp_path) as kept:
        (kept / "0").mkdir()
        memory_kept_mark(kept / "0").touch()
    assert kept.is_dir()
    with memory_folder(tmp_path):
        assert not kept.exists()
