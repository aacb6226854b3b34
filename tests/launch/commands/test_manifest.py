"""``drivetrain manifest``: job files that their schedulers take, and what follows an exit code."""

import os
import shlex
import subprocess

import pytest
import yaml
from kubeflow_trainer_api import models

from drivetrain_launch.commands.manifest import arguments_of, name_from
from drivetrain_launch.commands.options import resolve_command_line

HOSTS = ("--set", "launch.nnodes=2", "--set", "strategy=zero2", "--set", "precision=no")
FAKE_SRUN = '#!/bin/bash\nprintf "%s\\n" "${#DRIVETRAIN_SECRET}" "$@" >> "$SEEN"\nexit "$CODE"\n'
FAKE_SCONTROL = '#!/bin/bash\nprintf "scontrol %s\\n" "$*" >> "$SEEN"\n'


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def cluster(tmp_path):
    """Run a batch script where srun ends with a code; return what srun and scontrol were told."""
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)

    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(batch, code):
        seen = tmp_path / f"seen-{code}"
        env = paths | {"SEEN": str(seen), "CODE": str(code), "SLURM_JOB_ID": "17"}
        ended = subprocess.run(["bash", "-u", "-c", batch], env=env, check=False)
        return ended.returncode, seen.read_text().splitlines()

    return run


def test_a_batch_script_requeues_a_run_that_saved(command, script, cluster):
    given = ("devices=8", "time=1:00:00", "partition=p", "account=a", "sbatch=--exclusive")
    asked = (*(f"--{each}" for each in given), script, "--tag", "a b")
    batch = command.output("manifest", "slurm", *HOSTS, *asked)
    directives = "job-name=train nodes=2 ntasks-per-node=1 gpus-per-node=8 signal=USR1@120 requeue"
    directives += " open-mode=append time=1:00:00 partition=p account=a exclusive"
    for directive in directives.split():
        assert f"#SBATCH --{directive}\n" in batch
    ended, seen = cluster(batch, 75)
    launch = ["drivetrain", "launch", "--set", "strategy.name=zero2", "--set", "precision='no'"]
    launch += ["--set", "launch.grace_s=110"]  # of the 120 s between the notice and the kill
    secret, option, *started, requeue = seen
    assert (ended, secret, requeue) == (75, "64", "scontrol requeue 17")
    assert [option, *started] == ["--kill-on-bad-exit=0", *launch, script, "--tag", "a b"]
    ended, seen = cluster(batch, 6)
    assert ended == 6
    assert not any("scontrol" in line for line in seen)


def test_a_batch_script_of_an_elastic_run_keeps_the_nodes_that_are_left(command, script, cluster):
    asked = ("--nnodes", "1:2", "--nproc-per-node", "8", script)
    batch = command.output("manifest", "slurm", *HOSTS, *asked)
    assert "#SBATCH --gpus-per-node=8\n" in batch
    assert "#SBATCH --no-kill\n" in batch
    ended, seen = cluster(batch, 93)
    assert (ended, seen[1:3]) == (93, ["--no-kill", "--kill-on-bad-exit=0"])
    assert "launch.min_nnodes=1" in seen
    assert not any(line.startswith("scontrol") for line in seen)  # 93: do not start again
    _, batch, _ = command("manifest", "slurm", *HOSTS, "--devices", "8", script)
    assert "--no-kill" not in batch


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_kubernetes_takes_the_objects_and_knows_the_exit_codes(command, kind):
    asked = ("--image", "registry/image:1", "--kind", kind, "--namespace", "ml", "--devices", "8")
    device = "nvidia.com/gpu"
    if kind == "jobset":
        asked, device = (*asked, "--device-name", "amd.com/gpu"), "amd.com/gpu"
    text = command.output("manifest", "kubernetes", *HOSTS, *asked, "train.py", "--lr=1")
    assert "create secret generic train --namespace ml --from-literal=secret=" in text
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        assert each["metadata"] == {"name": "train", "namespace": "ml"}
        prefix = "JobsetV1alpha2" if each["kind"] == "JobSet" else "TrainerV1alpha1"
        # A field that the schema does not know would be lost on the way.
        read = getattr(models, prefix + each["kind"]).from_dict(each)
        assert read.to_dict() == each
    spec = objects[0]["spec"] if kind == "jobset" else objects[0]["spec"]["template"]["spec"]
    indexed = spec["replicatedJobs"][0]["template"]["spec"]
    exits = [rule for rule in indexed["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in exits for code in rule["onExitCodes"]["values"]}
    assert actions == {75: "Ignore"} | dict.fromkeys([2, 4, 9, 93], "FailJob")
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert indexed["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    container = indexed["template"]["spec"]["containers"][0]
    assert container["command"][-2:] == ["train.py", "--lr=1"]
    assert container["resources"]["limits"] == {device: 8}
    assert (indexed["completions"], indexed["parallelism"]) == (2, 2)
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert "DRIVETRAIN_SECRET" in values
    if kind == "jobset":
        pet = {"NNODES": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "train-node-0-0.train"}
        assert {f"PET_{name}": value for name, value in pet.items()}.items() <= values.items()
    else:
        assert objects[1]["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 8}
        assert "PET_MASTER_ADDR" not in values


def test_skypilot_gets_a_task_for_spot_hosts(command, script):
    asked = ("--accelerators", "H100:8", "--spot", "--restarts", "5", script, "a b")
    text = command.output("manifest", "skypilot", *HOSTS, *asked)
    task = yaml.safe_load(text)
    assert (task["num_nodes"], task["secrets"]) == (2, {"DRIVETRAIN_SECRET": None})
    assert task["resources"] == {
        "accelerators": "H100:8",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 5, "recover_on_exit_codes": [75]},
    }
    assert shlex.split(task["run"])[-2:] == [script, "a b"]
    assert "setup" not in task
    assert "--install WHEEL|URL" in text
    text = command.output("manifest", "skypilot", "--install", "a b.whl", script)
    assert yaml.safe_load(text)["setup"] == "pip install 'a b.whl'"
    assert "secret" not in text, "of one host alone"


def test_the_arguments_are_the_configuration(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "strategy: {name: ddp, bucket_mib: 3}\nprecision: 'no'\naccumulation: 4\n"
        "recompute: {blocks: 'a.*,b: c'}\nlaunch: {nnodes: 2, node_rank: 1, rdzv_endpoint: 'h:1'}\n"
    )
    assert "launch.grace_s=1" in arguments_of(resolve_command_line(None, ()), 5)
    before = resolve_command_line(str(file), ())
    sets = arguments_of(before, 120)[1::2]
    assert not any("nnodes" in each or "h:1" in each for each in sets)
    after = resolve_command_line(None, (*sets, "launch.nnodes=2", "launch.rdzv_endpoint=h:1"))
    expected = before.to_dict()
    expected["launch"] |= {"node_rank": 0, "grace_s": 110.0}
    assert after.to_dict() == expected


def test_a_job_is_named_after_its_script():
    for script, name in (("runs/My_train 2.py", "my-train-2"), ("9.py", "train"), ("a.b", "a-b")):
        assert name_from(script) == name, script


def test_a_wrong_request_is_one_line(command, script):
    for arguments, message in (
        (("slurm", "train.py"), "launch.nproc_per_node: auto"),
        (("slurm", "--devices", "-1", "train.py"), "'--devices': -1 is not in the range x>=0"),
        (("slurm", "--devices", "0", "--notice", "0", "train.py"), "'--notice': 0 is not in"),
        (("slurm", "--devices", "0", "--name", "A_b", "train.py"), "found 'A_b'"),
        (("slurm", "--devices", "0", "--sbatch", "x", "train.py"), "an option of sbatch"),
        (("slurm", "--devices", "0", "--time", "1\n2", "train.py"), "in one line"),
        (("slurm", "--devices", "0", "other.py"), "cannot run the script 'other.py'"),
        (("slurm", "--devices", "0", "-m", "other.run"), "no module named 'other'"),
        (("slurm", "--devices", "0", "--output", "train.py", "train.py"), "train.py exists"),
        (("kubernetes", "--image", "i", "--devices", "1"), "expected a SCRIPT"),
    ):
        err = command.error("manifest", *arguments, lines=1)
        assert message in err, arguments
