"""Hosts that are lost, links that are cut or slow, clocks that differ, on emulated hosts."""

import shutil
import time
from contextlib import ExitStack, contextmanager

import pytest

from emulated_hosts import Hosts, why_not
from faulty_trainings import FaultyTrainings
from waits import wait_until

pytestmark = [pytest.mark.alone, pytest.mark.exhaustive]

PORT = 29500
SECRET = {"DRIVETRAIN_SECRET": "a secret of the tests"}
SLOW = {"step": "time.sleep(0.15)"}
LOST_S, CUT_S = 10.0, 20.0
"""All have ended so soon after a host was lost, or a link was cut; see ``took``."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The weights of a run on one host that nothing disturbs."""
    trainings = FaultyTrainings(tmp_path_factory.mktemp("calm"))
    done = trainings.run()
    assert done.returncode == 0, done.stderr
    return trainings.weights()


@contextmanager
def launched(trainings, hosts, *options, **settings):
    """Launchers of one rank on each host, in the order of the hosts."""
    words = ("--nnodes", "2", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", *options)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                trainings.start(
                    *("run", "--node-rank", str(index), *words),
                    ranks=1,
                    env=SECRET,
                    namespaces=(f"/run/netns/{host.namespace}", f"/proc/{host.holder.pid}/ns/uts"),
                    **settings,
                )
            )
            for index, host in enumerate(hosts)
        ]


def wait_for_steps(trainings, launchers, count):
    def reached():
        return len(trainings.losses()) >= count

    try:
        wait_until(reached, "training")
    except AssertionError:
        pytest.fail("\n".join(launcher.said() for launcher in launchers))


def test_a_host_that_is_gone_is_named_and_ends_the_run(trainings, hosts, took):
    with launched(trainings, hosts, faults=SLOW, steps=400) as launchers:
        wait_for_steps(trainings, launchers, 4)
        begin = time.monotonic()
        hosts[1].lose()
        done = launchers[0].wait()
        seconds = time.monotonic() - begin
    hosts[1].mend()
    assert done.returncode == 5, done.stderr
    assert "host 1 (n2) is lost" in done.stderr
    took("F22", "all have ended", seconds, bar=LOST_S)
    assert trainings.checkpoints() == ["checkpoint_0"]
    (private,) = trainings.temporary.glob("drivetrain-*")  # of the launcher that was killed
    shutil.rmtree(private)


def test_a_link_that_is_cut_ends_both_sides(trainings, hosts, took):
    with launched(trainings, hosts, faults=SLOW, steps=400) as launchers:
        wait_for_steps(trainings, launchers, 4)
        begin = time.monotonic()
        hosts[1].cut()
        done = [launcher.wait() for launcher in launchers]
        seconds = time.monotonic() - begin
        saved = trainings.checkpoints()
    hosts[1].mend()
    assert [each.returncode for each in done] == [5, 5], done
    assert "host 1 (n2) is lost" in done[0].stderr
    assert "host 0 at " in done[1].stderr
    assert "is lost" in done[1].stderr
    took("F23", "both sides have ended", seconds, bar=CUT_S)
    assert saved == ["checkpoint_0"]  # neither side went on alone


def test_a_slow_link_that_is_cut_for_two_seconds_changes_nothing(trainings, hosts, calm):
    for host in hosts:
        host.limit("2mbit")
    try:
        with launched(trainings, hosts, faults=SLOW) as launchers:
            wait_for_steps(trainings, launchers, 4)
            hosts[1].cut()
            time.sleep(2)
            hosts[1].mend()
            done = [launcher.wait() for launcher in launchers]
    finally:
        for host in hosts:
            host.limit(hosts.rate)
    assert [each.returncode for each in done] == [0, 0], done
    assert trainings.weights() == calm


@pytest.mark.parametrize("skew", [-120, 120])
def test_a_host_with_another_time_trains_like_the_others(trainings, calm, skew, port):
    program = f"import time\nreal = time.time\ntime.time = lambda: real() + {skew}\n"
    program += "import runpy\nrunpy.run_module('drivetrain_launch', run_name='__main__')\n"
    (trainings.folder / "skewed.py").write_text(program)
    words = ("run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    with (
        trainings.start(*words, "--node-rank", "0", ranks=1, env=SECRET) as first,
        trainings.start(
            *words, "--node-rank", "1", ranks=1, env=SECRET, program=("skewed.py",)
        ) as second,
    ):
        done = [first.wait(), second.wait()]
    assert [each.returncode for each in done] == [0, 0], done
    assert trainings.weights() == calm
