"""Launches that end badly: whose error is shown, which exit code, and that nothing is left."""

import re
import shutil
import signal
import time
from types import SimpleNamespace

import psutil
import pytest

from drivetrain.runtime.world import reader_mark, saved_mark
from drivetrain_launch.ranks.engine import _saved
from forked_programs import Started, launch
from waits import wait_until

TWO = ("--nproc-per-node", "2")
GLOO = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1)
dist.all_reduce(value)
"""

LOOP = GLOO + "open(f'ready-{rank}', 'w').close()\nwhile True:\n    dist.all_reduce(value)\n"


def test_exception_on_one_rank_ends_all_and_is_shown(sandbox):
    """Then all start again; a rank that lost its peer does not hide the peer that was killed."""
    script = sandbox.script(
        GLOO + "if rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    raise ValueError('the cause')\n"
        "dist.all_reduce(value)\nprint('sum', value.item(), flush=True)\n"
        "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while True:\n    dist.all_reduce(value)\n"
    )
    words = ("--strategy", "toy", *TWO, "--max-restarts", "1", script)
    done = launch(*words, folder=sandbox.folder, env=sandbox.environment())
    assert done.returncode == 6, done.stderr
    assert done.stdout == "sum 4.0\n"
    first, second = re.findall(r"^rank \d failed first .*$", done.stderr, re.MULTILINE)
    assert re.fullmatch(r"rank 1 .*exit code 1\)", first)
    report = done.stderr[done.stderr.index(first) : done.stderr.index(second)]
    assert 'train.py", line' in report
    assert "stopped with it: rank 0" in report
    assert report.count("starting all ranks again; 0 restarts left after this one") == 1
    assert done.stderr.count("ValueError: the cause") == 1
    assert "runpy" not in done.stderr
    assert "elastic" not in done.stderr
    assert second.startswith("rank 1 ")
    assert "killed by SIGKILL; the system kills a process like this when it is out of mem" in second


@pytest.mark.exhaustive
@pytest.mark.alone  # a rank that lost a peer waits a second for the peer's own end
def test_collective_on_one_rank_alone_says_that_the_other_has_ended(sandbox):
    script = sandbox.script(
        "import torch\n"
        "from drivetrain import Accelerator\n"
        "accelerator = Accelerator()\n"
        "if accelerator.is_main_process:\n"
        "    accelerator.gather(torch.ones(1))\n"
    )
    done = sandbox.launch("--nproc-per-node", "2", script, code=5)
    assert "rank 1 ended too early (host " in done.stderr
    assert "exit code 0): rank 0 waited for it and failed" in done.stderr
    said = r"CollectiveError: gather on rank 0 .*: rank 1 ended \d+\.\d s ago; "
    assert re.search(said, done.stderr), done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "gloo" not in done.stderr
    assert "communication.py" not in done.stderr
    assert "other hosts" not in done.stderr


def test_ctrl_c_stops_quietly_ranks_that_listen_on_loopback_alone(sandbox):
    words = ("-m", "drivetrain_launch", "launch", "--strategy", "toy", *TWO, sandbox.script(LOOP))
    with Started(*words, folder=sandbox.folder, env=sandbox.environment()) as process:
        wait_until(lambda: len([*sandbox.folder.glob("ready-*")]) == 2)
        launcher = psutil.Process(process.pid)
        mine = {process.pid, *(each.pid for each in launcher.children(recursive=True))}
        found = [each for each in psutil.net_connections("tcp") if each.pid in mine]
        launcher.send_signal(signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert not any(map(psutil.pid_exists, mine))
    # The launcher's store, and one listener of gloo in each rank.
    listening = [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]
    assert listening == 3 * ["127.0.0.1"]


def test_ranks_end_when_the_launcher_is_killed(sandbox):
    """Also one that was stopped."""
    text = "import os, time\nopen(f'ready-{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(3600)\n"
    process = sandbox.begun(text, 2, *TWO)
    max(sandbox.alive(), key=lambda member: member.create_time()).suspend()
    process.kill()
    process.communicate()
    wait_until(lambda: not sandbox.alive())
    for folder in sandbox.temporary.iterdir():
        shutil.rmtree(folder)


@pytest.mark.exhaustive
def test_script_without_a_handler_goes_on_after_sigusr1(sandbox):
    text = "import os, time\nopen('ready-0', 'w').close()\n"
    text += "while not os.path.exists('go'): time.sleep(0.01)\n"
    process = sandbox.begun(text, 1, "--nproc-per-node", "1")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert process.poll() is None
    (sandbox.folder / "go").touch()
    process.communicate()
    assert process.returncode == 0


@pytest.mark.exhaustive
def test_start_has_a_timeout_of_its_own(sandbox):
    script = sandbox.script(
        "import os, time\n"
        "import torch\n"
        "from drivetrain import Accelerator\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(4)\n"
        "accelerator = Accelerator(cpu=True)\n"
        "accelerator.print('all are there', flush=True)\n"
        "begin = time.monotonic()\n"
        "if accelerator.is_main_process:\n"
        "    try:\n"
        "        accelerator.gather(torch.ones(1))\n"
        "    finally:\n"
        "        accelerator.print('after', time.monotonic() - begin)\n"
        "time.sleep(3600)\n"
    )
    settings = ("--set", "launch.timeout_s=2", "--set", "launch.start_timeout_s=3600")
    done = sandbox.launch("--nproc-per-node", "2", *settings, script, code=5)
    assert "all are there" in done.stdout
    assert "CollectiveError" in done.stderr
    assert float(done.stdout.split()[-1]) > 1


@pytest.mark.exhaustive
def test_rank_that_ignores_sigterm_and_its_children_are_stopped(sandbox):
    script = sandbox.script(
        "import os, signal, subprocess, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('ready'): time.sleep(0.05)\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        "    raise ValueError('the cause')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(3600)\n"
    )
    done = sandbox.launch("--nproc-per-node", "2", script, code=1)
    assert "rank 1 failed first" in done.stderr
    assert sandbox.alive() == []


def test_the_newest_checkpoint_of_an_attempt_in_storage_or_memory(tmp_path):
    job = SimpleNamespace(config=tmp_path / "config.yaml")
    assert _saved(job) is None
    reader_mark(job.config).touch()  # as an Accelerator does
    assert _saved(job) == -1
    for memory, steps in ((False, 30), (True, 40)):
        saved_mark(job.config, memory=memory).write_text(str(steps))
        assert _saved(job) == steps


# --- a scheduler's notice at a moment at which no rank can hear it: it waits for the ranks ---


SLOW_START = """
import os, sys, time
if "drivetrain_launch.ranks.worker" in sys.orig_argv:
    open(f"starting-{os.environ['RANK']}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)
"""
"""A module that Python imports before a program; a rank waits in it, without a handler."""


@pytest.fixture
def slow_start(sandbox):
    """Variables with which ranks wait for the file ``go`` before they have a handler."""
    folder = sandbox.folder / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW_START)
    return {"PYTHONPATH": f"{folder}:{sandbox.environment()['PYTHONPATH']}"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["", "print('SIGUSR1 ended nobody')"], ids=["hears", "ends"])
def test_sigusr1_waits_for_ranks_that_are_being_started(sandbox, slow_start, hears, script):
    script = script or hears
    words = ("launch", "--strategy", "toy", "--nproc-per-node", "1", sandbox.script(script))
    process = sandbox.start(*words, env=slow_start)
    wait_until((sandbox.folder / "starting-0").exists)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    (sandbox.folder / "go").touch()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.startswith("SIGUSR1")


@pytest.mark.exhaustive
def test_sigusr1_holds_for_the_attempt_after_the_one_that_failed_with_it(sandbox, hears):
    script = sandbox.script(
        "import os, signal, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\n"
        "    open('ready', 'w').close()\n"
        "    time.sleep(600)\n" + hears
    )
    words = ("--nproc-per-node", "1", "--max-restarts", "1", script)
    process = sandbox.start("launch", "--strategy", "toy", *words)
    wait_until((sandbox.folder / "ready").exists)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == "SIGUSR1\n"
    assert "starting all ranks again" in err


@pytest.mark.exhaustive
def test_sigusr1_waits_while_hosts_meet(sandbox, port, hears):
    script = sandbox.script(hears)
    hosts = []
    for index in range(2):
        words = ("--nproc-per-node", "1", "--nnodes", "2", "--node-rank", str(index))
        words += ("--rdzv-endpoint", f"127.0.0.1:{port}")
        secret = {"DRIVETRAIN_SECRET": "a secret of the tests"}
        hosts.append(sandbox.start("launch", "--strategy", "toy", *words, script, env=secret))
        if not index:
            said = hosts[0].stderr.readline()
            assert said.startswith("waiting for 1 of 2 hosts")
            hosts[0].send_signal(signal.SIGUSR1)
            time.sleep(0.3)
    done = [host.communicate() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], done
    assert done[0][0] == "SIGUSR1\n"


# --- a scheduler signals a rank with the workers of its loader: the run saves, and says so ---


TRAIN = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator, ProjectConfiguration

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)

def main():
    project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(2, 1)
    loader = DataLoader(Slow(torch.ones(2000, 2)), batch_size=2, num_workers=2, prefetch_factor=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (rows,) in enumerate(loader):
        accelerator.backward(model(rows).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and accelerator.process_index == 1:
            os.killpg(os.getpgrp(), signal.SIGTERM)
    raise SystemExit("the whole dataset was read")

main()
"""


def test_workers_outlive_the_notice_and_the_run_saves(sandbox):
    done = sandbox.run("launch", "--cpu", "--nproc-per-node", "2", sandbox.script(TRAIN), code=75)
    assert "exit code 75 asks to be started again" in done.stderr
    for word in ("Traceback", "made no Accelerator"):
        assert word not in done.stderr
    saved = sandbox.folder / "run" / "checkpoints"
    assert [path.name for path in saved.iterdir()] == ["checkpoint_0"]
    assert (saved / "checkpoint_0" / "manifest.json").exists()
    assert sandbox.alive() == []
