"""Where ranks go: how many, with how many threads, at which address; and who failed first."""

import socket
from types import SimpleNamespace

import pytest

from drivetrain.config import LaunchConfig
from drivetrain.errors import ConfigError, PreflightError
from drivetrain_launch.failure import Failure, first, report
from drivetrain_launch.place import (
    Endpoint,
    address_towards,
    check_port,
    interface_of,
    local_ranks,
    threads,
)


@pytest.mark.parametrize(
    ("launch", "accelerators", "ranks"),
    [
        (LaunchConfig(), 0, 6),
        (LaunchConfig(), 4, 4),
        (LaunchConfig(device="cpu"), 4, 6),
        (LaunchConfig(nproc_per_node=3), 4, 3),
        (LaunchConfig(nproc_per_node=9), 0, 9),
        (LaunchConfig(nproc_per_node=9, device="cpu"), 4, 9),
    ],
)
def test_local_ranks(launch, accelerators, ranks):
    assert local_ranks(launch, accelerators=accelerators, cores=6) == ranks


def test_more_ranks_than_accelerators_are_refused():
    with pytest.raises(PreflightError, match="each of the 5 ranks of this host, found 4"):
        local_ranks(LaunchConfig(nproc_per_node=5), accelerators=4, cores=8)


@pytest.mark.parametrize(("ranks", "expected"), [(1, "8"), (3, "2"), (8, "1"), (20, "1")])
def test_threads_divide_the_cores(monkeypatch, ranks, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(LaunchConfig(), ranks, cores=8) == expected


def test_threads_that_the_user_set_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(LaunchConfig(), 2, cores=8) is None
    assert threads(LaunchConfig(threads_per_rank=3), 2, cores=8) == "3"


@pytest.mark.parametrize(
    "text", ["host", "host:", ":80", "host:0", "host:65536", "a b:80", "::1:80"]
)
def test_malformed_endpoints_are_refused(text):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Endpoint.parse(text)


@pytest.mark.parametrize("text", ["host.example:29400", "10.0.0.1:1", "[::1]:65535"])
def test_endpoints_read_and_write_the_same(text):
    assert str(Endpoint.parse(text)) == text


def test_address_is_the_one_on_the_route():
    assert address_towards(Endpoint("127.0.0.1", 1)) == "127.0.0.1"
    interface = interface_of("127.0.0.1")
    assert interface is not None
    assert interface.startswith("lo")
    assert interface_of("192.0.2.1") is None


def test_busy_port_is_refused_and_a_free_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PreflightError, match=f"cannot listen on port {port}"):
            check_port(Endpoint("127.0.0.1", port))
    check_port(Endpoint("127.0.0.1", port))


def failure(rank, time, *, collateral=False, code=1):
    return Failure(rank=rank, pid=1, code=code, time=time, collateral=collateral)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, 10.0), failure(1, 9.5)], 1),
        ([failure(0, 10.0, collateral=True), failure(1, 10.5)], 1),
        ([failure(0, 10.0, collateral=True), failure(1, 100.0)], 0),
        ([failure(0, 10.0, collateral=True), failure(1, 9.0, collateral=True)], 1),
    ],
)
def test_first_failure(failures, rank):
    assert first(failures).rank == rank


def test_rank_that_the_agent_stopped_is_not_the_first():
    stopped = SimpleNamespace(message="Signal 15", exitcode=-15, pid=10, timestamp=5)
    error = {"message": "ValueError: x", "extraInfo": {"py_callstack": "TB", "time": 6.5}}
    raised = SimpleNamespace(message=error, exitcode=1, pid=11, timestamp=6)
    text, code = report({0: stopped, 1: raised})
    assert text.startswith("rank 1 failed first")
    assert "\n  TB\n" in text
    assert text.endswith("stopped with it: rank 0")
    assert code == 1
