"""Where ranks go: how many, with how many threads, at which address; and the heap of each."""

import socket

import pytest

from drivetrain.config import LaunchConfig
from drivetrain.errors import ConfigError
from drivetrain_launch.ranks.placement import (
    Endpoint,
    heap_variables,
    interface_of,
    listening_address,
    local_ranks,
    threads,
)

HEAP = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def test_local_ranks():
    for launch, accelerators, ranks in (
        (LaunchConfig(), 0, 6),
        (LaunchConfig(), 4, 4),
        (LaunchConfig(device="cpu"), 4, 6),
        (LaunchConfig(nproc_per_node=3), 4, 3),
        (LaunchConfig(nproc_per_node=9), 0, 9),
        (LaunchConfig(nproc_per_node=9, device="cpu"), 4, 9),
    ):
        assert local_ranks(launch, accelerators=accelerators, cores=6) == ranks, launch

    with pytest.raises(ConfigError, match="each of the 5 ranks of this host, found 4"):
        local_ranks(LaunchConfig(nproc_per_node=5), accelerators=4, cores=8)


def test_threads_divide_the_cores(monkeypatch):
    for ranks, expected in ((1, "8"), (3, "2"), (8, "1"), (20, "1")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert threads(LaunchConfig(), ranks, cores=8) == expected, ranks
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # which the user set
    assert threads(LaunchConfig(), 2, cores=8) is None
    assert threads(LaunchConfig(threads_per_rank=3), 2, cores=8) == "3"


def test_malformed_endpoints_are_refused():
    for text in ("host", "host:", ":80", "host:0", "host:65536", "a b:80", "::1:80"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            Endpoint.parse(text)
    for text in ("host.example:29400", "10.0.0.1:1", "[::1]:65535"):
        assert str(Endpoint.parse(text)) == text, text


def test_address_is_the_one_on_the_route():
    assert interface_of("127.0.0.1").startswith("lo")
    assert interface_of("192.0.2.1") is None


def test_busy_port_is_refused_and_a_free_one_is_not(port):
    busy = pytest.raises(ConfigError, match=f"cannot listen on port {port}")
    with socket.create_server(("127.0.0.1", port)), busy:
        listening_address(Endpoint("127.0.0.1", port))
    assert listening_address(Endpoint("127.0.0.1", port)) == "127.0.0.1"


@pytest.fixture
def heap_not_set(monkeypatch):
    for name in HEAP:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("heap_not_set")
def test_freed_memory_stays_on_the_cpu_only():
    assert set(heap_variables(LaunchConfig(), accelerators=0)) == set(HEAP[:2])
    assert not heap_variables(LaunchConfig(), accelerators=2)
    assert not heap_variables(LaunchConfig(keep_memory=False), accelerators=0)


@pytest.mark.usefixtures("heap_not_set")
def test_heap_settings_of_the_user_stay_and_other_tunables_are_none(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert heap_variables(LaunchConfig(), accelerators=0)
    for name, value in ((HEAP[0], "65536"), (HEAP[1], "1"), (HEAP[2], "glibc.malloc.arena_max=1")):
        monkeypatch.setenv(name, value)
        assert not heap_variables(LaunchConfig(), accelerators=0), name
