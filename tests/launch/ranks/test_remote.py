"""Runs started over ssh, with a program in its place that runs the command on this machine."""

import io
import json
import os
import signal
import stat
import time

import pytest

from drivetrain.errors import ConfigError
from drivetrain_launch.commands.options import without_hosts
from drivetrain_launch.ranks.remote import (
    RemoteHost,
    RemoteJob,
    _obey,
    _orders,
    read_hostfile,
    read_hosts,
    select,
)
from waits import wait_until

SSH = """#!/bin/sh
if [ "$1" = -G ]; then echo "hostname 127.0.0.1"; exit 0; fi
echo "$@" >> {log}
while [ "$1" != -- ]; do shift; done
[ "$2" = off ] && {{ echo "ssh: connect to host off port 22: No route to host" >&2; exit 255; }}
shift 2
exec sh -c "$*"
"""


@pytest.fixture
def ssh(sandbox):
    """A folder for the path with an ssh that reaches every host but ``off``."""
    folder = sandbox.folder / "bin"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(SSH.format(log=sandbox.folder / "ssh.log"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "HF_TOKEN": "canary"}


def test_hosts_of_a_list_run_together_and_each_line_has_its_host(sandbox, ssh):
    script = sandbox.script(
        "import os, socket, sys, time\n"
        "rank, *place = (os.environ[name] for name in ('RANK', 'MASTER_ADDR', 'MASTER_PORT'))\n"
        "socket.create_connection(place).close()\n"
        "if rank == '0':\n"
        "    print('of', os.environ['WORLD_SIZE'], sys.argv[1:], sys.stdin.read())\n"
        "    print([os.environ.get(name) for name in 'ABCD'], flush=True)\n"
        "    open('printed', 'w').close()\n"
        "while not os.path.exists('printed'): time.sleep(0.01)\n"
        "sys.exit(7 * int(rank))\n"
    )
    awkward = ["a b", "$HOME", "it's", ""]
    (sandbox.folder / "vars").write_text("# of the project\nA=of the file\nB=two words  \n\n")
    words = ["--export", "C", "--export=A=$HOME 'x'", "--env-file", "vars"]
    env = ssh | {"C": "set here", "D": "not asked for"}
    done = sandbox.launch("--hosts", "h1:1,me@h2:1", *words, script, *awkward, env=env, code=7)
    # The stand-in for ssh hands on its own environment, and with it D.
    variables = ["$HOME 'x'", "two words", "set here", "not asked for"]
    assert done.stdout == f"h1: of 2 {awkward} \nh1: {variables}\n"
    for name in ("h1", "h2"):
        assert f"{name}: rank 1 failed first" in done.stderr
    log = (sandbox.folder / "ssh.log").read_text()
    assert "-o BatchMode=yes" in log
    assert "-- me@h2 " in log
    for hidden in ("canary", "two words"):
        assert hidden not in log
    assert "train.py" not in log


@pytest.mark.filterwarnings("ignore:unclosed file")  # the command ends here with its process
def test_a_host_that_cannot_be_reached_is_named(command, sandbox, ssh, monkeypatch):
    monkeypatch.setenv("PATH", ssh["PATH"])
    err = command.error("launch", "--hosts", "off:1", sandbox.script(""), lines=1)
    assert err.startswith(
        "error: cannot start the run on off: off: ssh: connect to host off port 22: No route to "
        "host; nothing was started; expected a login by ssh without a password"
    )
    assert "try 'ssh -o BatchMode=yes off " in err


def test_variables_that_are_malformed_or_not_set(command, sandbox):
    (sandbox.folder / "bad").write_text("A=1\ntwo words\n")
    for words, message in (
        (["--export", "NO_SUCH"], "--export NO_SUCH: the variable NO_SUCH is not set here; set"),
        (["--export", "a-b=1"], "--export a-b=1: expected NAME or NAME=TEXT, found 'a-b=1'"),
        (["--env-file", "none"], "--env-file: cannot read 'none': No such file or directory;"),
        (["--env-file", "bad"], "bad:2: expected NAME or NAME=TEXT, found 'two words'"),
    ):
        err = command.error("launch", "--hosts", "a,b", *words, sandbox.script(""), lines=1)
        assert message in err, words


def test_bad_hostfile_or_selection_is_one_line(command, sandbox):
    for lines, words, message in (
        ("n1 slots=2\nn1 slots=2\n", [], "n1 is there twice; name each host once"),
        ("n1 slot=2\n", [], ":1: expected 'HOST slots=N', found 'n1 slot=2'"),
        ("n1 slots=2\n", ["--include", "n2"], "--include: no host n2; hosts: n1"),
        ("n1 slots=2\n", ["--exclude", "n1"], "--exclude n1: no host is left; leave out fewer"),
        ("n1 slots=2\n", ["--include", "n1:5"], "device 5 of n1: expected an index below"),
        ("n1 slots=2\n", ["--include", ""], "--include: expected HOST:0,1@HOST, found ''; without"),
        ("n1 slots=2\n", ["--include", "@"], "--include: expected HOST:0,1@HOST, found ''"),
        ("n1 slots=2\n", ["--include", "n1:"], "--include: expected HOST:0,1@HOST, found 'n1:'"),
        ("n1 slots=2\n", ["--exclude", ""], "--exclude: expected HOST:0,1@HOST, found ''; without"),
        ("n1 slots=2\n", ["--include", "n1:0@n1:1"], "--include: n1 is there twice; name each"),
    ):
        (sandbox.folder / "hostfile").write_text(lines)
        script = sandbox.script("")
        err = command.error("launch", "--hostfile", "hostfile", *words, script, lines=1)
        assert message in err, message


TWO = ("--hosts", "h1:1,h2:1")


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_reaches_the_ranks_of_all_hosts_which_save(sandbox, ssh, noticed, number):
    process = sandbox.begun(noticed, 2, *TWO, env=ssh)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 75, err
    for rank in range(2):  # rank 1 had its time, although rank 0 was ready two seconds before
        assert (sandbox.folder / f"saved-{rank}").read_text() == f"[{number.value}]"
        assert f"h{rank + 1}: the ranks ended with exit code 75: saved" in err
    assert sandbox.alive() == []


@pytest.mark.exhaustive
def test_ranks_that_go_on_after_sigterm_end_after_the_grace(sandbox, ssh, noticed):
    text = noticed.replace("while not heard", "while True")
    process = sandbox.begun(text, 2, *TWO, "--set", "launch.grace_s=1", env=ssh)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 143, err
    assert time.monotonic() - begin > 1
    assert sandbox.alive() == []


@pytest.mark.exhaustive
def test_a_notice_before_the_hosts_have_their_orders_is_kept(sandbox, ssh, hears):
    folder = sandbox.folder / "bin"
    real = folder / "ssh-at-once"
    (folder / "ssh").rename(real)
    (folder / "ssh").write_text(
        f'#!/bin/sh\n[ "$1" = -G ] || {{ touch asked; while [ ! -e go ]; do sleep 0.05; done; }}\n'
        f'exec {real} "$@"\n'
    )
    (folder / "ssh").chmod(0o700)
    script = sandbox.script(hears)
    process = sandbox.start("launch", "--strategy", "toy", "--hosts", "h1:1", script, env=ssh)
    wait_until((sandbox.folder / "asked").exists)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    (sandbox.folder / "go").touch()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == "h1: SIGUSR1\n"


@pytest.mark.exhaustive
def test_hosts_run_to_their_end_when_nobody_reads_the_output(sandbox, ssh):
    text = (
        "import os\nrank = os.environ['RANK']\nopen('ready-' + rank, 'w').close()\n"
        "while not os.path.exists('go'): pass\n"
        "for number in range(3000): print('x' * 100, flush=True)\n"
        "open('done-' + rank, 'w').close()\n"
    )
    process = sandbox.begun(text, 2, *TWO, env=ssh)
    process.stdout.close()  # as head does
    (sandbox.folder / "go").touch()
    code = process.wait()
    assert code == 0, process.stderr.read()
    process.stderr.close()
    assert (sandbox.folder / "done-0").exists()
    assert sandbox.alive() == []


@pytest.mark.exhaustive
def test_interrupt_while_hosts_end_with_one_that_failed_ends_the_wait(sandbox, ssh):
    text = (
        "import os, sys, time\nrank = os.environ['RANK']\nopen('ready-' + rank, 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
        "time.sleep(3600)\n"
    )
    process = sandbox.begun(text, 2, *TWO, "--set", "launch.grace_s=3600", env=ssh)
    agent = "drivetrain_launch.ranks.remote"
    agents = [each for each in sandbox.alive() if agent in each.cmdline()]
    assert len(agents) == 2
    agents[1].suspend()  # a host that takes no part
    agents[0].send_signal(signal.SIGQUIT)
    agents[0].wait()
    time.sleep(0.5)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate()
    assert process.returncode == 130
    agents[1].resume()  # the host sees that its connection is gone
    wait_until(lambda: not sandbox.alive())


def test_without_ssh_the_error_names_the_way_out(command, sandbox, monkeypatch):
    monkeypatch.setenv("PATH", str(sandbox.folder))
    words = ("launch", "--hosts", "h1:1,h2:1")
    for more in ([], ["--rdzv-endpoint", "h1:29400"]):
        err = command.error(*words, *more, sandbox.script(""), lines=1)
        assert err.startswith("error: --hosts and --hostfile start the hosts over ssh, and"), more
        assert "install an ssh client, or type the command on each host with --nnodes" in err


def test_orders_of_a_host_are_signals_and_its_end_is_an_interrupt(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *order: sent.append(order))
    orders = [{"signal": signal.SIGTERM}, {"signal": signal.SIGUSR1}]
    _obey(io.BytesIO(b"".join(json.dumps(order).encode() + b"\n" for order in orders)))
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    assert sent == [(os.getpid(), number) for number in numbers]


def test_malformed_lists_of_hosts():
    for text, message in (
        ("n1:2,n1:2", "n1 is there twice"),
        ("-oProxyCommand=touch x", "expected a host such as n1"),
        ("a;touch x:1", "expected a host such as n1"),
        ("$(touch x)", "expected a host such as n1"),
        ("n1:0", "expected a number of ranks from 1"),
        ("n1,,n2", "expected a host such as n1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_hosts(text)


def test_hostfile_and_selection(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two hosts\nn1 slots=4\nme@n2 slots=2  # small\n\nn3\n")
    hosts = read_hostfile(path)
    assert hosts == [RemoteHost("n1", 4), RemoteHost("me@n2", 2), RemoteHost("n3")]
    assert select(hosts, "n1:0,2@n2") == [
        RemoteHost("n1", 2, (0, 2)), RemoteHost("me@n2", 2),
    ]  # fmt: skip
    assert select(hosts, exclude="n1:0@n2") == [RemoteHost("n1", 3, (1, 2, 3)), RemoteHost("n3")]
    assert select(hosts[:1], exclude="n1:3,1") == [RemoteHost("n1", 2, (0, 2))]
    for include, exclude, message in (
        ("n9", None, "no host n9; hosts: n1, n2, n3"),
        (None, "n1@n2@n3", "no host is left"),
        ("n1", "n2", "expected one of them, found both"),
        ("n1:4", None, "device 4 of n1: expected an index below the host's slots, found 4"),
        ("n1:x", None, "expected HOST:0,1@HOST"),
    ):
        with pytest.raises(ConfigError, match=message):
            select(hosts, include, exclude)
    path.write_text("# nobody")
    with pytest.raises(ConfigError, match="found no host"):
        read_hostfile(path)


def test_options_about_hosts_do_not_reach_the_hosts(command, sandbox):
    words = ["--hosts", "a,b", "--cpu", "--hostfile=x", "--rdzv_endpoint", "h:1", "--set", "seed=1"]
    assert without_hosts(words) == ["--cpu", "--set", "seed=1"]
    script = sandbox.script("")
    for extra in (["--nnodes", "2"], ["--standalone"], ["--hostfile", "x"]):
        command.error("launch", "--hosts", "a,b", *extra, script, lines=1)


def test_each_host_gets_its_place_its_devices_and_one_secret(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    hosts = [RemoteHost("n1", 2, (0, 2)), RemoteHost("n2")]
    variables = {"OMP_NUM_THREADS": "5"}
    job = RemoteJob(hosts=hosts, words=["train.py"], grace_s=1.0, variables=variables)
    first, second = _orders(job, "n1:20000")
    common = ["--rdzv-endpoint", "n1:20000"]
    assert first["words"] == [
        *("--nnodes", "2", "--node-rank", "0", *common, "--nproc-per-node", "2", "train.py")
    ]
    assert second["words"] == ["--nnodes", "2", "--node-rank", "1", *common, "train.py"]
    assert first["variables"].pop("CUDA_VISIBLE_DEVICES") == "0,2"
    assert first["variables"] == second["variables"]
    assert first["variables"]["OMP_NUM_THREADS"] == "5"  # asked for, so it wins
    assert len(first["variables"]["DRIVETRAIN_SECRET"]) >= 16
