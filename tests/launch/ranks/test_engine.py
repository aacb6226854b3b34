"""Launches that end badly: whose error is shown, which exit code, and that nothing is left."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from waits import wait_until

GLOO = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1)
dist.all_reduce(value)
"""

LOOP = GLOO + "open(f'ready-{rank}', 'w').close()\nwhile True:\n    dist.all_reduce(value)\n"


def root(done):
    """Return the report's first line: who failed first, and how."""
    found = re.findall(r"^rank \d+ failed first .*$", done.stderr, flags=re.MULTILINE)
    assert len(found) == 1, done.stderr
    return found[0]


def test_exception_on_one_rank_ends_all_and_is_shown(sandbox):
    script = sandbox.script(
        GLOO + "if rank == 1:\n    raise ValueError('the cause')\ndist.all_reduce(value)\n"
    )
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.returncode == 1
    assert "rank 1" in root(done)
    assert "exit code 1" in root(done)
    report = done.stderr[done.stderr.index("rank 1 failed first") :]
    assert "ValueError: the cause" in report
    assert 'train.py", line' in report
    assert "runpy" not in done.stderr
    assert "stopped with it: rank 0" in report
    assert "elastic" not in done.stderr


def test_script_that_does_not_compile_is_shown_without_our_frames(sandbox):
    script = sandbox.script("def x(:\n    pass\n")
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.returncode == 1
    assert "SyntaxError" in root(done) + done.stderr
    assert 'train.py", line 1' in done.stderr
    assert "runpy" not in done.stderr
    assert "worker.py" not in done.stderr


def test_rank_that_lost_its_peer_does_not_hide_the_peer_that_was_killed(sandbox):
    script = sandbox.script(
        GLOO + "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while True:\n    dist.all_reduce(value)\n"
    )
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.returncode == 6
    assert "rank 1" in root(done)
    assert "SIGKILL" in root(done)
    assert "out of memory" in root(done)


@pytest.mark.alone  # a rank that lost a peer waits a second for the peer's own end
def test_slow_traceback_still_wins_over_the_lost_connection(sandbox):
    # The process group is gone a second before the error reaches the launcher.
    script = sandbox.script(
        GLOO + "if rank == 1:\n"
        "    try:\n"
        "        raise KeyError('the cause')\n"
        "    finally:\n"
        "        dist.destroy_process_group()\n"
        "        time.sleep(0.5)\n"
        "dist.all_reduce(value)\n"
    )
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.returncode == 1
    assert "rank 1" in root(done)
    assert "KeyError: 'the cause'" in done.stderr


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


def test_a_failure_is_printed_once_and_kept_in_the_ranks_log(sandbox):
    script = sandbox.script(GLOO + "if rank == 1:\n    raise ValueError('the cause')\n")
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.stderr.count("ValueError: the cause") == 1
    sandbox.launch("--nproc-per-node", "2", "--log-dir", "logs", script)
    log = sandbox.folder / "logs" / "attempt-0" / "rank-1.stderr.log"
    assert "ValueError: the cause" in log.read_text()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a message')", 1),
        ("import sys; sys.exit()", 0),
        ("from drivetrain.errors import CheckpointError as E; raise E('bad checkpoint')", 4),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os._exit(9)", 9),
        ("raise KeyboardInterrupt", 130),
        ("def f(:", 1),
        ("import atexit; atexit.register(print, 'cleaned'); raise ValueError", 1),
    ],
)
def test_rank_exits_as_its_script_does(sandbox, line, code):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "drivetrain_launch.ranks.worker"),
            *(str(os.getpid()), sandbox.script(line)),
        ],
        cwd=sandbox.folder, env=sandbox.environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("cleaned" in done.stdout) == ("cleaned" in line)


@pytest.mark.parametrize(
    ("line", "code", "shown"),
    [
        ("from drivetrain.errors import CheckpointError as E; raise E('bad')", 4, "exit code 4"),
        ("import os; os.abort()", 6, "SIGABRT"),
    ],
)
def test_exit_code_of_the_launcher_is_the_failures(sandbox, line, code, shown):
    done = sandbox.launch("--nproc-per-node", "1", sandbox.script(line))
    assert done.returncode == code, done.stderr
    assert shown in root(done)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_every_rank_quietly(sandbox, number, code):
    script = sandbox.script(LOOP)
    process = sandbox.start("launch", "--strategy", "toy", "--nproc-per-node", "2", script)
    wait_until((sandbox.folder / "ready-1").exists)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert sandbox.alive() == []


def test_ranks_end_when_the_launcher_is_killed(sandbox):
    process = sandbox.start(
        "launch", "--strategy", "toy", "--nproc-per-node", "2", sandbox.script(LOOP)
    )
    wait_until((sandbox.folder / "ready-1").exists)
    process.kill()
    process.communicate()
    wait_until(lambda: not sandbox.alive())
    for folder in sandbox.temporary.iterdir():
        shutil.rmtree(folder)


def test_stopped_rank_ends_when_the_launcher_is_killed(sandbox):
    script = sandbox.script("open('ready', 'w').close()\nimport time; time.sleep(3600)\n")
    process = sandbox.start("launch", "--strategy", "toy", "--nproc-per-node", "1", script)
    wait_until((sandbox.folder / "ready").exists)
    rank = max(sandbox.alive(), key=lambda member: member.create_time())
    rank.suspend()
    process.kill()
    process.communicate()
    wait_until(lambda: not sandbox.alive())
    for folder in sandbox.temporary.iterdir():
        shutil.rmtree(folder)


NOTICED = """
import os, signal, subprocess, sys, time
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: heard.append(number))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
rank = os.environ["RANK"]
open(f"ready-{rank}", "w").close()
while not heard:
    time.sleep(0.01)
time.sleep(0.5 + int(rank))
assert worker.poll() is None, "the worker heard the notice"
worker.kill()
open(f"saved-{rank}", "w").write(str(heard))
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_notice_reaches_ranks_and_not_their_workers(sandbox, number):
    process = sandbox.start(
        "launch", "--strategy", "toy", "--nproc-per-node", "2", sandbox.script(NOTICED)
    )
    wait_until(lambda: all((sandbox.folder / f"ready-{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 75, err
    assert "the ranks ended with exit code 75: saved" in err
    # Rank 1 had its time, although rank 0 was ready a second before.
    for rank in range(2):
        assert (sandbox.folder / f"saved-{rank}").read_text() == f"[{number.value}]"


def test_script_without_a_handler_goes_on_after_sigusr1(sandbox):
    script = sandbox.script(
        "import os, time\nopen('ready', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    process = sandbox.start("launch", "--strategy", "toy", "--nproc-per-node", "1", script)
    wait_until((sandbox.folder / "ready").exists)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert process.poll() is None
    (sandbox.folder / "go").touch()
    process.communicate()
    assert process.returncode == 0


def test_errors_of_other_ranks_take_no_room_on_the_disk(sandbox):
    script = sandbox.script(
        "import os, pathlib, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    for line in range(2000):\n"
        "        print('x' * 1000, file=sys.stderr)\n"
        "    files = pathlib.Path(os.environ['TMPDIR']).rglob('*')\n"
        "    print('held', sum(f.stat().st_size for f in files if f.is_file()), file=sys.stderr)\n"
    )
    done = sandbox.launch("--nproc-per-node", "2", script)
    assert done.returncode == 0
    assert done.stderr.count("[rank1]: " + "x" * 1000 + "\n") == 2000
    assert int(re.search(r"\[rank1\]: held (\d+)", done.stderr)[1]) < 20_000


def test_an_error_that_cannot_heal_uses_no_restart(sandbox):
    script = sandbox.script(
        "from drivetrain.errors import CheckpointError\n"
        "print('begun', flush=True)\nraise CheckpointError('damaged')\n"
    )
    done = sandbox.launch("--nproc-per-node", "1", "--max-restarts", "3", script)
    assert done.returncode == 4
    assert done.stdout == "begun\n"
    assert "no restart: an error with exit code 4 would only come again" in done.stderr


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
    assert "rank 1" in root(done)
    assert sandbox.alive() == []


def test_store_and_ranks_listen_on_loopback_alone(sandbox):
    if shutil.which("ss") is None:
        pytest.skip("needs the command ss")
    process = sandbox.start(
        "launch", "--strategy", "toy", "--nproc-per-node", "2", sandbox.script(LOOP)
    )
    wait_until((sandbox.folder / "ready-1").exists)
    mine = {member.pid for member in sandbox.alive()}
    listing = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    process.send_signal(signal.SIGTERM)
    process.communicate()
    addresses = [
        line.split()[3]
        for line in listing.splitlines()
        if mine & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
    ]
    # The launcher's store, and one listener of gloo in each rank.
    assert len(addresses) == 3, listing
    assert all(address.startswith("127.0.0.1:") for address in addresses), addresses


def test_busy_port_is_named(sandbox, port):
    with socket.create_server(("127.0.0.1", port)):
        done = sandbox.launch("--rdzv-endpoint", f"127.0.0.1:{port}", sandbox.script(""))
    assert done.returncode == 2
    assert f"cannot listen on port {port}" in done.stderr


IDLE = """
import os, sys
from pathlib import Path
config = Path(os.environ["DRIVETRAIN_CONFIG"])
config.with_suffix(".read").touch()  # as an Accelerator does
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt < 2:
    config.with_suffix(".saved").write_text(str(10 * attempt))
print("attempt", attempt)
sys.exit(7)
"""


def test_attempts_that_save_nothing_new_end_before_the_restarts_do(sandbox):
    script = sandbox.script(IDLE)
    done = sandbox.launch("--nproc-per-node", "1", "--max-restarts", "9", script)
    assert done.returncode == 93, done.stderr
    assert done.stdout.splitlines() == [f"attempt {number}" for number in range(5)]
    assert "no restart: 3 attempts in a row have failed and saved no newer" in done.stderr
