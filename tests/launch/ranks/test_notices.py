"""A scheduler's notice at a moment at which no rank can hear it: it waits for the ranks."""

import signal
import time

import pytest

from waits import wait_until

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
