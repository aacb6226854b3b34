"""Two hosts, played by two threads, or by two network namespaces of this machine."""

import asyncio
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from drivetrain.config import LaunchConfig
from drivetrain.errors import CollectiveError, ConfigError, PreflightError
from drivetrain.observe.figures import RankTimes
from drivetrain.runtime.board import PREEMPTED
from drivetrain_launch.ranks import coordinator, meeting
from drivetrain_launch.ranks.channel import Channel, NotAuthenticError, greet_client, greet_server
from drivetrain_launch.ranks.coordinator import Member, late, misfit, missing, overdue
from drivetrain_launch.ranks.failure import Ending, RankEnd, RunOver
from drivetrain_launch.ranks.meeting import SeveralHosts, SingleHost
from drivetrain_launch.ranks.placement import Assignment, Endpoint, HostJob, Slot, listening_address
from drivetrain_launch.ranks.preflight import HostProbe
from forked_programs import Started
from waits import PATIENCE_S, wait_until

SECRET = {"DRIVETRAIN_SECRET": "a secret of the tests"}

SCRIPT = """
import json
import os
import subprocess
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
if attempt == "0":
    listing = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True).stdout
    open(f"listening-{rank}", "w").write(listing)
if rank == 1 and attempt == "0":
    os._exit(7)
if attempt == "0":
    while True:  # in no collective: hears of the failure from its launcher alone
        pass
dist.barrier()
print("rank", rank, "on host", os.environ["GROUP_RANK"], "sum", value.item())
print("attempt", attempt, file=__import__("sys").stderr)
"""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@contextmanager
def namespaces(names):
    """Two namespaces with a cable between them; host 0 has the higher address."""
    links = [f"dt{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            made = ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"cannot make a network namespace: {made.stderr.strip()}")
        made = ip("link", "add", links[0], "netns", names[0], "type", "veth",
                  "peer", "name", links[1], "netns", names[1])  # fmt: skip
        if made.returncode:
            pytest.skip(f"cannot make a pair of interfaces: {made.stderr.strip()}")
        for name, link, address in zip(names, links, ("10.77.0.9", "10.77.0.2"), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the command ip")
def test_two_hosts_meet_in_the_order_given_and_restart_together(sandbox):
    names = [f"dt-{os.getpid()}-{host}" for host in range(2)]
    script = sandbox.script(SCRIPT)
    with namespaces(names), ExitStack() as stack:
        hosts = [
            stack.enter_context(Started(
                "-m", "drivetrain_launch", "launch", "--strategy", "toy", "--nproc-per-node", "1",
                "--nnodes", "2", "--node-rank", str(index), "--rdzv-endpoint", "10.77.0.9:29511",
                "--max-restarts", "1", "--log-dir", "logs", script,
                folder=sandbox.folder, env=sandbox.environment(SECRET),
                namespaces=[f"/run/netns/{name}"]))
            for index, name in enumerate(names)
        ]  # fmt: skip
        done = [host.wait() for host in hosts]
    assert [each.returncode for each in done] == [0, 0], done
    # Rank 0 is on the host that the user called 0, although its address is the higher one.
    assert done[0].stdout == "[rank0]: rank 0 on host 0 sum 3.0\n"
    assert done[1].stdout == ""
    for said in (each.stderr for each in done):
        assert re.search(r"^rank 1 failed first \(host .*, exit code 7\)$", said, re.MULTILINE)
        assert said.count("starting all ranks again; 0 restarts left after this one") == 1
    logs = sandbox.folder / "logs"
    kept = sorted(str(path.relative_to(logs)) for path in logs.rglob("*.stderr.log"))
    assert kept == [f"attempt-{a}/rank-{r}.stderr.log" for a in range(2) for r in range(2)]
    for path in logs.glob("attempt-1/*.stderr.log"):
        assert path.read_text().endswith("attempt 1\n")
    for rank, own in enumerate(("10.77.0.9", "10.77.0.2")):
        lines = (sandbox.folder / f"listening-{rank}").read_text().splitlines()
        assert lines
        for line in lines:
            assert line.split()[3].rpartition(":")[0] in (own, "127.0.0.1"), lines


def party(port, index, *, count=2, secret=b"a secret of the tests", alone=False, **more):
    facts = {key: more.pop(key) for key in ("run", "software") if key in more}
    more = {"start_timeout_s": PATIENCE_S, "grace_s": PATIENCE_S, **more}
    launch = LaunchConfig(rdzv_endpoint=f"127.0.0.1:{port}", node_rank=index, nnodes=count, **more)
    job = HostJob(launch=launch, arguments=(), variables={}, private=None, config=None,
                  ranks=index + 1, slot=Slot() if alone else None, **facts)  # fmt: skip
    return SeveralHosts(job, secret)


@contextmanager
def together(port, *indices, **settings):
    """Launchers as threads of this process; each is in ``meet`` or behind it."""
    hosts = [party(port, index, **settings) for index in indices]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda host: host.join(), hosts))
            try:
                yield hosts, pool
            finally:
                for host in hosts:
                    host._lose("the test is over")  # no thread of a failed test waits on
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda host: host.leave("the test is over"), hosts))


@contextmanager
def running(port, *indices, **settings):
    """Launchers that have met."""
    with together(port, *indices, **settings) as (hosts, pool):
        list(pool.map(SeveralHosts.meet, hosts))
        yield hosts, pool


@contextmanager
def joined(port, index, **settings):
    """Another launcher, which has joined."""
    host = party(port, index, **settings)
    try:
        host.join()
        yield host
    finally:
        host.leave("")


def fail(rank, code=1, **more):
    return Ending(failures=(RankEnd(rank=rank, host="n", pid=1, code=code, time=0, **more),))


def test_every_host_gets_its_place_and_one_verdict_per_attempt(port):
    with together(port, 1, 0, max_restarts=1) as (hosts, pool):
        for attempt in range(2):
            places = {place.index: place for place in pool.map(SeveralHosts.meet, hosts)}
            assert [places[i].attempt for i in range(2)] == [attempt, attempt]
            assert [places[i].first_rank for i in range(2)] == [0, 1]
            assert places[0].world_size == 3
            # Both ports lead to one store; host 1's is a door to it.
            assert places[0].port != places[1].port
            stores = [TCPStore("127.0.0.1", places[i].port, is_master=False) for i in range(2)]
            stores[1].set("key", str(attempt))
            assert stores[0].get("key") == str(attempt).encode()
            assert stores[0].num_keys() == 1  # of this attempt alone
            failing, other = hosts
            verdict = pool.submit(failing.conclude, fail(1, summary="ValueError: the cause"))
            wait_until(other.stop_asked)
            verdicts = [other.conclude(Ending(stopped=(0,))), verdict.result(PATIENCE_S)]
            assert verdicts[0] == verdicts[1]
            assert verdicts[0].again == (attempt == 0)
            assert verdicts[0].code == 1
            assert "ValueError: the cause" in verdicts[0].text
            assert "stopped with it: rank 0" in verdicts[0].text


def test_host_with_another_secret_does_not_join(port, capsys):
    with together(port, 0) as (hosts, _):
        for _ in range(2):
            stranger = party(port, 1, secret=b"another secret of tests")
            said = "secret is not the secret of host 0.*; set DRIVE"
            with pytest.raises(ConfigError, match=said):
                stranger.join()
            stranger.leave("")
        with joined(port, 1) as other:
            assert [host.meet().index for host in (hosts[0], other)] == [0, 1]
    said = capsys.readouterr().err
    assert said.count("a connection from 127.0.0.1 was refused: wrong secret") == 1


def test_who_does_not_know_the_secret_reaches_neither_the_store_nor_a_pickle(port):
    with running(port, 0, 1) as (hosts, _):
        with pytest.raises(RuntimeError):  # the store of the ranks is not behind this port
            TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=0.5))
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"nonce proof\n" + pickle.dumps({"kind": "store"}) + b"\n")
            received = b""
            while chunk := stranger.recv(1000):
                received += chunk
        assert received.splitlines()[1:] == [b"refused"]
        assert not any(host.stop_asked() for host in hosts)


def test_changed_message_ends_the_connection():
    async def exchange():
        ends = asyncio.Queue()

        async def serve(reader, writer):
            ends.put_nowait(await greet_client(reader, writer, b"secret"))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        place = server.sockets[0].getsockname()
        client = await greet_server(*await asyncio.open_connection(*place), b"secret")
        served = await ends.get()
        client.send("one", value=1)
        assert await served.receive() == {"kind": "one", "value": 1}
        client.send("two")
        client._sent -= 1  # sends a number again, as who repeats a message does
        client.send("two")
        assert await served.receive() == {"kind": "two"}
        with pytest.raises(NotAuthenticError):
            await served.receive()
        for end in (client, served):
            end.close()
            await end.writer.wait_closed()
        server.close()

    asyncio.run(exchange())


def test_a_lost_host_is_named_and_its_replacement_joins_the_next_attempt(port):
    with running(port, 0, 1, max_restarts=1) as (hosts, pool), ExitStack() as stack:
        replacement = stack.enter_context(joined(port, 1, max_restarts=1))  # waits for the place
        hosts[1]._background.call(cut(hosts[1]))
        wait_until(hosts[0].stop_asked)
        assert hosts[1].stop_asked() or wait_until(hosts[1].stop_asked) is None
        verdict = hosts[0].conclude(fail(0, code=5, collateral=True))
        assert verdict.again
        assert verdict.code == 5
        assert verdict.text.startswith("host 1 (")
        assert "is lost: its launcher has ended, or the connection is closed" in verdict.text
        places = list(pool.map(SeveralHosts.meet, (hosts[0], replacement)))
        assert [place.attempt for place in places] == [1, 1]


def test_host_0_names_a_slow_rank_of_another_host(port, capsys):
    with together(port, 0, 1) as (hosts, pool):
        places = list(pool.map(SeveralHosts.meet, hosts))
        for _ in range(2):
            for rank, seconds in enumerate((0.2, 0.2, 0.9)):
                host = min(rank, 1)
                facts = {"host": f"{host}@n{host}", "sections": {"backward": seconds}}
                work = RankTimes(rank=rank, steps=1, seconds=1.0, **facts)
                hosts[host].tell_work(places[host], [work])
        said = wait_for_line(capsys, ".*slower.*")
    (named,) = [line for line in said if "slower" in line]
    assert named == (
        "rank 2 on host n1 is slower than the others: 900 ms of work in a step against 200 ms; "
        "most of the difference is in backward, 900 ms against 200 ms"
    )


async def cut(host):
    host._channel.writer.transport.abort()


def set_silence(monkeypatch, seconds):
    """Let a host that says nothing for so long be lost; the shortest is for silent ones alone."""
    for module in (coordinator, meeting):
        monkeypatch.setattr(module, "BEAT_S", 0.1)
        monkeypatch.setattr(module, "LOST_S", seconds)


def test_a_silent_host_is_lost_on_both_sides(port, monkeypatch):
    set_silence(monkeypatch, PATIENCE_S)
    with running(port, 0, 1) as (hosts, _):
        monkeypatch.setattr(Channel, "send", lambda *_, **__: None)
        assert not any(host.stop_asked() for host in hosts)
        set_silence(monkeypatch, 0.6)
        for host in hosts:
            wait_until(host.stop_asked)
        monkeypatch.undo()
        verdict = hosts[1].conclude(fail(1, code=5, collateral=True))
        assert verdict.code == 5
        assert f"host 0 at 127.0.0.1:{port} is lost: " in verdict.text


SAVED = Ending(ended=(RankEnd(rank=0, host="n", pid=1, code=PREEMPTED, time=0),))


def test_hosts_that_are_left_go_on_and_one_that_comes_back_joins_after_a_save(port, monkeypatch):
    monkeypatch.setattr(coordinator, "BEAT_S", 0.1)
    monkeypatch.setattr(coordinator, "SETTLE_S", 0.5)
    settings = {"count": 3, "min_nnodes": 2, "max_restarts": 1}
    with together(port, 0, 1, 2, **settings) as (hosts, pool), ExitStack() as stack:
        assert [p.sizes for p in pool.map(SeveralHosts.meet, hosts)] == 3 * [(1, 2, 3)]
        hosts[1]._background.call(cut(hosts[1]))
        wait_until(hosts[2].stop_asked)
        left = [hosts[0], hosts[2]]
        stopped = [Ending(stopped=(0,)), Ending(stopped=(1,))]
        verdicts = list(pool.map(SeveralHosts.conclude, left, stopped))
        assert all(verdict.again for verdict in verdicts)
        places = list(pool.map(SeveralHosts.meet, left))
        found = [(p.attempt, p.index, p.sizes, p.first_rank) for p in places]
        assert found == [(1, place, (1, 3), place) for place in range(2)]
        back = stack.enter_context(joined(port, 1, **settings))
        wait_until(lambda: any(host.notice_asked() for host in left))
        assert not any(host.stop_asked() for host in left)  # the ranks may save
        verdicts = list(pool.map(SeveralHosts.conclude, left, 2 * [SAVED]))
        assert all(verdict.again for verdict in verdicts)  # although no restart is left
        places = list(pool.map(SeveralHosts.meet, [hosts[0], back, hosts[2]]))
        found = [(p.attempt, p.index, p.sizes) for p in places]
        assert found == [(2, place, (1, 2, 3)) for place in range(3)]
        verdicts = list(pool.map(SeveralHosts.conclude, [hosts[0], back, hosts[2]], 3 * [SAVED]))
        assert [(v.again, v.code) for v in verdicts] == 3 * [(False, PREEMPTED)]


def test_scheduler_that_ends_the_run_is_not_taken_for_a_host_that_came(port, monkeypatch):
    monkeypatch.setattr(coordinator, "BEAT_S", 0.1)
    monkeypatch.setattr(coordinator, "SETTLE_S", 0.0)
    monkeypatch.setattr(coordinator, "LAST_CALL_S", 0.2)
    with together(port, 0, count=2, min_nnodes=1) as (hosts, _):
        assert hosts[0].meet().sizes == (1,)
        with joined(port, 1, count=2, min_nnodes=1) as second:
            wait_until(hosts[0].notice_asked)
            verdict = hosts[0].conclude(replace(SAVED, noticed=True))
            assert (verdict.again, verdict.code) == (False, PREEMPTED)
            with pytest.raises(RunOver, match="the run has ended") as caught:
                second.meet()
            assert caught.value.code == PREEMPTED  # requeued as the others are


WELL = Ending(ended=(RankEnd(rank=0, host="n", pid=1, code=0, time=0),))


@pytest.mark.exhaustive
def test_a_host_that_waits_ends_as_the_run_does(sandbox, port):
    words = ("--nproc-per-node", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    script = sandbox.script("print()")
    with running(port, 0, 1, count=2, min_nnodes=1) as (hosts, pool):
        words = ("--strategy", "toy", *words, "--node-rank", "1", script)
        late = sandbox.start("launch", *words, env=SECRET)
        wait_until(lambda: hosts[0]._coordinator._waiting)
        verdicts = list(pool.map(SeveralHosts.conclude, hosts, 2 * [WELL]))
        assert [(verdict.again, verdict.code) for verdict in verdicts] == 2 * [(False, 0)]
        out, err = late.communicate()
    assert (late.returncode, out, err) == (0, "", "the run has ended\n")


def test_what_comes_right_behind_the_place_is_not_forgotten(port):
    with together(port, 0, 1, preflight="none") as (hosts, _):
        wait_until(lambda: hosts[0]._coordinator._phase == "running")
        hosts[0]._background.call(tell(hosts[0], "notice"))
        hosts[1]._background.call(cut(hosts[1]))
        wait_until(hosts[0].stop_asked)
        assert hosts[0].meet().attempt == 0  # only now does the main thread read the place
        assert hosts[0].stop_asked()
        assert hosts[0].notice_asked()


async def tell(host, kind):
    host._coordinator._members[0].channel.send(kind)


def test_ranks_of_other_hosts_have_time_to_save_after_a_signal(port, monkeypatch):
    monkeypatch.setattr(coordinator, "BEAT_S", 0.1)
    over = threading.Event()
    monkeypatch.setattr(coordinator, "overdue", lambda _, grace: grace == 3 and over.is_set())
    with running(port, 0, 1, grace_s=3) as (hosts, pool):
        saved = (replace(SAVED.ended[0], time=time.time()),)
        told = Ending(ended=saved, signal=signal.SIGTERM, noticed=True)
        first = pool.submit(hosts[1].conclude, told)
        wait_until(lambda: hosts[0]._coordinator._members[1].ending)
        assert not hosts[0].stop_asked()  # its ranks may be in the middle of the save
        over.set()
        wait_until(hosts[0].stop_asked)
        second = hosts[0].conclude(replace(told, ended=(), stopped=(0,)))
        assert (second.again, second.code) == (False, 128 + signal.SIGTERM)
        assert first.result(PATIENCE_S) == second


def wait_for_line(capsys, expected):
    """Wait for a line on the error stream, and return all that came until then."""
    said = []

    def is_said():
        said.append(capsys.readouterr().err)
        return re.search(rf"^{expected}$", "".join(said), re.MULTILINE)

    wait_until(is_said)
    return "".join(said).splitlines()


def test_who_waits_for_ranks_of_another_host_says_so(port, capsys, monkeypatch):
    for module in (coordinator, meeting):
        monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(meeting, "FIRST_REMINDER_S", 0.5)
    with running(port, 0, 1) as (hosts, pool):
        first = pool.submit(hosts[1].conclude, WELL)
        name = re.escape(socket.gethostname())
        wait_for_line(capsys, rf"waiting for the ranks of host 0 \({name}\) to end \(\d+ s\)")
        assert hosts[0].conclude(WELL) == first.result(PATIENCE_S)


def test_the_first_attempt_waits_for_more_hosts_than_the_fewest(port, monkeypatch):
    monkeypatch.setattr(coordinator, "BEAT_S", 0.1)
    monkeypatch.setattr(coordinator, "LAST_CALL_S", PATIENCE_S)
    with together(port, 0, 2, count=4, min_nnodes=2) as (hosts, pool):
        met = [pool.submit(host.meet) for host in hosts]
        time.sleep(0.5)
        assert not any(each.done() for each in met)
        with joined(port, 1, count=4, min_nnodes=2) as third:
            monkeypatch.setattr(coordinator, "LAST_CALL_S", 0.0)
            places = [each.result(PATIENCE_S) for each in met]
            assert [(p.index, p.sizes) for p in places] == [(0, (1, 2, 3)), (2, (1, 2, 3))]
            assert third.meet().index == 1


def test_a_host_that_lost_host_0_for_a_while_joins_again(port, monkeypatch):
    set_silence(monkeypatch, PATIENCE_S)
    with running(port, 0, 1, max_restarts=2) as (hosts, pool):
        for silent in (hosts[1]._channel, hosts[0]._coordinator._members[1].channel):
            silent.send = lambda *_, **__: None
        set_silence(monkeypatch, 0.6)
        for host in hosts:
            wait_until(host.stop_asked)
        set_silence(monkeypatch, PATIENCE_S)
        verdicts = list(pool.map(SeveralHosts.conclude, hosts, [fail(0, 5), fail(1, 5)]))
        assert [verdict.again for verdict in verdicts] == [True, True]
        assert "is lost: " in verdicts[1].text
        assert verdicts[1].text.endswith("; trying to reach it again")
        places = list(pool.map(SeveralHosts.meet, hosts))
        assert [(p.attempt, p.index, p.sizes) for p in places] == [(1, 0, (1, 2)), (1, 1, (1, 2))]


def test_a_host_that_lost_host_0_for_good_ends_with_the_code_of_a_lost_host(port):
    async def die():
        hosts[0]._server.close()
        for joined in hosts[0]._coordinator._members.values():
            joined.channel.writer.transport.abort()

    with running(port, 0, 1, max_restarts=2) as (hosts, _):
        hosts[0]._background.call(die())
        wait_until(hosts[1].stop_asked)
        verdict = hosts[1].conclude(fail(1, 5))
        assert (verdict.again, verdict.code) == (True, 5)  # the link may come back
        with pytest.raises(CollectiveError, match="host 0 at .* is lost: .*start the run again"):
            hosts[1].meet()


def test_hosts_that_differ_are_refused_with_both_values(port):
    refused = pytest.raises(ConfigError, match="differ in the job: found '4711' there, '' on host")
    with together(port, 0), joined(port, 1, run="4711") as other, refused:
        other.meet()


def test_every_host_ends_with_the_same_line_about_other_software(port):
    old, new = ({"torch's version": version} for version in ("2.12", "2.13"))
    hosts = [party(port, i, count=3, software=old if i == 2 else new) for i in range(3)]
    texts = set()
    with ThreadPoolExecutor() as pool:
        list(pool.map(SeveralHosts.join, hosts))
        for met in [pool.submit(host.meet) for host in hosts]:
            with pytest.raises(ConfigError, match="the hosts differ in torch's version") as caught:
                met.result(PATIENCE_S)
            texts.add(str(caught.value))
        list(pool.map(lambda host: host.leave(""), hosts))
    (text,) = texts
    name = socket.gethostname()
    assert f"'2.13' on host 0 ({name}), host 1 ({name}); '2.12' on host 2 ({name}); install" in text


def test_replacement_with_other_software_leaves_alone(port):
    with running(port, 0, 1, software={"the script": "a"}) as (hosts, _):
        refused = pytest.raises(ConfigError, match="the hosts differ in the script: 'a' on host 0")
        with joined(port, 1, software={"the script": "b"}) as other, refused:
            other.meet()
        assert not any(host.stop_asked() for host in hosts)


def test_hosts_check_their_ways_before_the_first_attempt_or_not_at_all(port, capsys):
    with together(port, 0, 1, software={"the script": "a"}) as (hosts, pool):
        places = list(pool.map(SeveralHosts.meet, hosts))
    said = capsys.readouterr().err
    assert re.match(r"preflight \(\d+\.\d s\): 2 hosts, every pair connects; between hosts ", said)
    assert places[0].link == places[1].link > 0
    with together(port, 0, 1, preflight="none") as (hosts, pool):
        places = list(pool.map(SeveralHosts.meet, hosts))
    assert capsys.readouterr().err == ""
    assert places[0].link == 0


def test_launchers_of_single_ranks_on_one_machine_are_one_host(port, capsys):
    with together(port, 0, 1, 2, count=3, alone=True) as (hosts, pool):
        places = {place.index: place for place in pool.map(SeveralHosts.meet, hosts)}
    assert [places[i].node for i in range(3)] == [0, 0, 0]
    assert places[1].neighbors == [0, 1, 2]
    assert capsys.readouterr().err == ""  # one host has no ways to check


def test_a_host_that_leaves_during_the_check_is_waited_for(port, monkeypatch):
    slow = threading.Event()
    monkeypatch.setattr(HostProbe, "carry_out", lambda *_: {"waited": slow.wait(PATIENCE_S)})
    with together(port, 0, 1) as (hosts, pool):
        wait_until(lambda: hosts[0]._coordinator._phase == "checking")
        hosts[1]._background.call(cut(hosts[1]))
        wait_until(lambda: hosts[0]._coordinator._phase == "meeting")
        monkeypatch.undo()
        slow.set()
        with joined(port, 1) as second:
            places = pool.map(SeveralHosts.meet, (hosts[0], second))
            assert [place.index for place in places] == [0, 1]


def test_every_host_says_that_two_have_the_same_index(port):
    """Also one that comes after the refusal."""
    said = "were started with --node-rank 1; give each of"
    with together(port, 0, 1, 1, count=3) as (hosts, pool):
        wait_until(lambda: hosts[0]._coordinator._phase == "over")
        with joined(port, 2, count=3) as late, pytest.raises(ConfigError, match=said):
            late.meet()
        for met in [pool.submit(host.meet) for host in hosts]:
            with pytest.raises(ConfigError, match=said):
                met.result(PATIENCE_S)


def test_end_of_the_run_reports_no_cancelled_connection(port, caplog):
    with together(port, 0) as (hosts, _), socket.create_connection(("127.0.0.1", port)) as stranger:
        assert stranger.recv(1000)
        hosts[0].leave("the run is over")
    assert caplog.records == []


def test_endpoint_of_another_host_is_refused():
    with pytest.raises(ConfigError, match="is no address of this host, which has --node-rank 0"):
        listening_address(Endpoint("192.0.2.7", 29400))


def test_hosts_do_not_wait_longer_than_the_start_timeout(port):
    said = r"1 of 2 hosts \(host 1\) did not come within 1 s"
    refused = pytest.raises(PreflightError, match=said)
    with together(port, 0, start_timeout_s=1.0) as (hosts, _), refused:
        hosts[0].meet()


def test_waiting_host_says_for_which(port, capsys, monkeypatch):
    monkeypatch.setattr(meeting, "FIRST_REMINDER_S", 0.5)
    with together(port, 0, preflight="none") as (hosts, pool):
        first = pool.submit(hosts[0].meet)
        place = rf"at 127\.0\.0\.1:{port} \(\d+ s\)"
        said = wait_for_line(capsys, rf"waiting for 1 of 2 hosts \(host 1\) {place}")
        assert len(said) == 1
        with joined(port, 1) as second:
            assert [first.result(PATIENCE_S).index, second.meet().index] == [0, 1]


@pytest.mark.exhaustive
def test_host_that_waits_for_host_0_says_so_and_stops_at_once(sandbox, port):
    endpoint = f"127.0.0.1:{port}"
    host = sandbox.start(
        "launch", "--strategy", "toy", "--nproc-per-node", "1", "--nnodes", "2",
        "--node-rank", "1", "--rdzv-endpoint", endpoint, sandbox.script("print()"), env=SECRET,
    )  # fmt: skip
    with host:
        said = host.stderr.readline()
        assert re.fullmatch(rf"waiting for host 0 of 2 at {re.escape(endpoint)} \(\d s\)\n", said)
        host.send_signal(signal.SIGTERM)
        host.communicate()
    assert host.returncode == 128 + signal.SIGTERM


# --- how launchers agree: places, whom others wait for, and restarts ---


def member(index, ending=None):
    return Member(
        index=index, name=f"n{index}", ranks=1, channel=None, software={}, machine="", network={},
        ending=ending,
    )  # fmt: skip


def saved(seconds_ago, signal=15):
    end = RankEnd(rank=0, host="n", pid=1, code=75, time=1000.0 - seconds_ago)
    return Ending(ended=(end,), signal=signal)


def test_places_of_launchers_that_share_machines():
    place = Assignment(attempt=0, sizes=(2, 1, 1), index=2, port=1, nodes=(0, 1, 1))
    assert (place.first_rank, place.size, place.world_size) == (3, 1, 4)
    assert (place.node, place.neighbors) == (1, [1, 2])
    assert Assignment(attempt=0, sizes=(2, 2), index=1, port=1).neighbors == [1]


def test_hosts_that_others_wait_for():
    assert missing((3, 3), [0, 2]) == "1 of 3 hosts (host 1)"
    assert missing((3, 3), [0, 1, 2]) == ""
    assert missing((2, 4), [0]) == "further hosts (1 came; 2 to 4 are wanted)"
    members = {0: member(0, Ending()), 1: member(1), 2: member(2)}
    assert late(members) == "the ranks of host 1 (n1), host 2 (n2) to end"
    assert late({1: member(1)}) == ""


def test_ranks_have_the_grace_from_the_last_one_that_saved_on(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    members = {0: member(0, saved(60)), 1: member(1, saved(5)), 2: member(2)}
    assert not overdue(members, 30)
    assert overdue(members, 1)
    assert not overdue({0: member(0, saved(60, signal=0)), 1: member(1)}, 30)


def test_a_newcomer_of_another_run_or_without_a_place_is_refused():
    message = {"index": 2, "host": "n2", "facts": {"the command": "a"}}
    assert misfit(message, 3, {"the command": "a"}) == ""
    assert "expected an index from 0 to 1" in misfit(message, 2, {"the command": "a"})
    assert "differ in the command: found 'a' there, 'b'" in misfit(message, 3, {"the command": "b"})


def test_restarts_of_a_host_are_counted():
    failure = RankEnd(rank=0, host="n", pid=1, code=1, time=1.0)
    job = HostJob(launch=LaunchConfig(max_restarts=2), arguments=(), ranks=1, variables={},
                  private=None, config=None)  # fmt: skip
    host = SingleHost(job)
    again = [host.conclude(Ending(failures=(failure,))).again for _ in range(3)]
    assert again == [True, True, False]
