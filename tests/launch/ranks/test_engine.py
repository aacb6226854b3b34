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
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.returncode == 5, done.stderr
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
    done = sandbox.launch("--nproc-per-node", "2", *settings, script)
    assert done.returncode == 5, done.stderr
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
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.returncode == 1
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
