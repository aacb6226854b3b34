"""Probes on addresses of this machine's loopback: what they measure, and whom they answer."""

import asyncio
import json
import platform
import secrets
import socket
import time
from contextlib import suppress
from itertools import combinations

import pytest

from drivetrain_launch.ranks.preflight import (
    CheckedHost,
    HostCheck,
    HostProbe,
    Peer,
    chosen_address,
    differences,
    machine_id,
    rounds,
    script_digest,
    software_facts,
    transport_of,
)

SKEW_S = 120.0


@pytest.fixture
def probes():
    """The probes of three hosts; the clock of the last one is ahead."""
    made = [HostProbe(), HostProbe(), HostProbe(clock=lambda: time.time() + SKEW_S)]
    yield made
    for probe in made:
        probe.close()


@pytest.fixture
def hosts():
    return [CheckedHost(index=i, name=f"n{i}", address=f"127.0.0.{i + 1}") for i in range(3)]


def opened(probe, token, address="127.0.0.1", index=0):
    return Peer(index, address, probe.open(address, token))


def test_latency_clock_and_bandwidth_of_another_host(probes):
    token = secrets.token_hex(16)
    peer = opened(probes[2], token)
    probes[0].open("127.0.0.1", token)
    latency_s, clock_s = probes[0].ask_time(peer)
    assert 0 < latency_s < 0.1
    assert clock_s == pytest.approx(SKEW_S, abs=0.1)
    assert probes[0].receive(peer, 0.2) > 1e7


def test_who_lacks_the_token_gets_no_answer(probes):
    peer = opened(probes[1], secrets.token_hex(16))
    probes[0].open("127.0.0.1", secrets.token_hex(16))
    with pytest.raises(ConnectionError):
        probes[0].ask_time(peer)
    with socket.create_connection(peer[1:], timeout=5) as stranger:
        stranger.sendall(b"x" * 64)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


def test_closed_probe_listens_no_longer(probes):
    peer = opened(probes[1], secrets.token_hex(16))
    probes[1].close()
    probes[0].open("127.0.0.1", secrets.token_hex(16))
    with pytest.raises(OSError, match="refused"):
        probes[0].ask_time(peer)


def test_rounds_have_every_pair_once_and_no_host_twice():
    for count in (2, 3, 6, 7):
        seen = []
        for pairs in rounds(range(count)):
            together = [*pairs, *pairs.values()]
            assert len(set(together)) == len(together), count
            seen += [tuple(sorted(pair)) for pair in pairs.items()]
        assert sorted(seen) == list(combinations(range(count), 2)), count


def run_check(probes, hosts, *, extent="short", broken=()):
    """Check; in ``broken`` are ways that end at a port where nobody listens."""

    async def ask(index, order):
        peers = [
            (peer, address, 1 if (index, peer) in broken else port)
            for peer, address, port in order.get("peers", ())
        ]
        reply = await asyncio.to_thread(probes[index].carry_out, {**order, "peers": peers})
        return json.loads(json.dumps(reply))  # as the connection between launchers does

    return checked(HostCheck(hosts=hosts, ask=ask, extent=extent))


def checked(check):
    asyncio.run(check.run())
    return check


def test_full_check_fills_the_table_of_all_pairs(probes, hosts):
    found = run_check(probes, hosts, extent="full")
    assert not found.refusal
    ways = {(a, b) for a in range(3) for b in range(3) if a != b}
    assert set(found.pairs) == set(found.latencies) == ways
    assert set(found.inside) == {(0, 0), (1, 1), (2, 2)}
    assert set(found.ring) == {(2, 0), (0, 1), (1, 2)}
    assert found.link == min(found.ring.values())
    columns, rows = found.matrix()
    assert columns == ("from", "to n0", "to n1", "to n2")
    for place, row in enumerate(rows):
        for column, cell in enumerate(row[1:]):
            assert "B/s" in cell
            assert ("," in cell) == (place != column)
    summary, clock = [line for line in found.lines() if "slow link" not in line]
    assert "3 hosts, every pair connects; between hosts" in summary
    assert "(gloo over TCP)" in summary
    assert clock.startswith("preflight: the clock of host 2 (n2) is 120.0 s ahead of host 0's;")


def test_short_check_measures_within_three_seconds_and_no_pairs(probes, hosts):
    found = run_check(probes, hosts)
    assert found.pairs == {}
    assert len(found.ring) == 3
    assert found.seconds < 3


def test_ways_that_are_closed_are_named_and_nothing_is_measured(probes, hosts):
    found = run_check(probes, hosts, broken={(1, 2)})
    assert found.failures == {(1, 2): "Connection refused"}
    assert found.refusal.startswith(
        "host 1 (n1) cannot reach host 2 (n2) at 127.0.0.3: Connection refused; ranks connect"
    )
    assert found.ring == {}


def test_silent_host_is_said_not_to_be_checked(hosts):
    async def ask(index, order):
        await asyncio.sleep(60)

    found = checked(HostCheck(hosts=hosts[:2], ask=ask, limit_s=0.05))
    assert not found.refusal
    assert [line for line in found.lines() if "was not checked: no reply" in line]
    assert found.link == 0

    async def fail(index, order):
        return {"error": "no such address"} if index else {"port": 1, "answers": {}}

    found = checked(HostCheck(hosts=hosts[:2], ask=fail))
    assert "preflight: host 1 (n1) was not checked: no such address" in list(found.lines())


def test_slow_links_are_named(hosts):
    found = HostCheck(hosts=hosts, ask=None, ring={(2, 0): 1e9, (0, 1): 1.1e9, (1, 2): 2e7})
    slow = [line for line in found.lines() if "slow link" in line]
    assert slow == [
        "preflight: slow link: from host 1 (n1) to host 2 (n2) 20 MB/s, less than half of the "
        "usual 1 GB/s"
    ]


def test_the_rate_of_tcp_says_nothing_about_another_transport(hosts):
    ring = {(1, 0): 1e9, (0, 1): 2e9}
    assert HostCheck(hosts=hosts[:2], ask=None, ring=ring).link == 1e9
    other = CheckedHost(index=1, name="n1", address="127.0.0.2", measured=False)
    assert HostCheck(hosts=[hosts[0], other], ask=None, ring=ring).link == 0


def test_transport_of_nccl_is_not_measured_where_it_has_adapters(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    assert transport_of("gloo", tmp_path) == ("gloo over TCP", True)
    assert transport_of("nccl", tmp_path) == ("NCCL over TCP", True)
    (tmp_path / "mlx5_0").mkdir()
    assert transport_of("nccl", tmp_path) == ("NCCL over mlx5_0, not measured", False)
    assert transport_of("gloo", tmp_path) == ("gloo over TCP", True)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert transport_of("nccl", tmp_path) == ("NCCL over TCP", True)


def test_address_of_the_interface_that_the_user_names(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert chosen_address("gloo", "10.1.2.3") == "127.0.0.1"
    assert chosen_address("nccl", "10.1.2.3") == "10.1.2.3"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such,lo")
    assert chosen_address("gloo", "10.1.2.3") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such")
    assert chosen_address("gloo", "10.1.2.3") == "10.1.2.3"


def test_machine_is_the_same_for_all_of_its_processes():
    assert machine_id() == machine_id()
    assert machine_id().startswith(socket.gethostname())


# --- the facts that hosts compare: versions and the script ---


def test_digest_follows_the_content_of_the_script(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("print(1)")
    second.write_text("print(1)")
    digest = script_digest((str(first), "--lr", "1"))
    assert len(digest) == 12
    assert digest == script_digest(("--as-accelerate", str(second)))
    second.write_text("print(2)")
    assert digest != script_digest((str(second),))
    assert script_digest(()) == script_digest((str(tmp_path / "none.py"),)) == ""


def test_digest_of_a_module_that_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("raise SystemExit")
    assert script_digest(("-m", "no_such_module_anywhere")) == ""
    names = {"one": "one.py", "pack": "pack/__main__.py", "pack.two": "pack/two.py"}
    for name, file in names.items():
        (tmp_path / file).write_text("raise SystemExit('imported')")
        digest = script_digest(("-m", name))
        assert len(digest) == 12, name
        (tmp_path / file).write_text("another text")
        assert script_digest(("-m", name)) != digest, name


def test_difference_names_all_hosts_with_each_value(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    facts = software_facts((str(script),))
    assert list(facts) == [
        "drivetrain's version", "torch's version", "Python's version", "the script"
    ]  # fmt: skip
    assert all(facts.values())
    assert facts["Python's version"] == platform.python_version().rpartition(".")[0]
    hosts = {f"host {i} (n{i})": facts for i in range(4)}
    assert differences(hosts) == ""
    hosts["host 2 (n2)"] = facts | {"torch's version": "2.0.0"}
    usual = facts["torch's version"]
    assert differences(hosts) == (
        f"the hosts differ in torch's version: {usual!r} on "
        "host 0 (n0), host 1 (n1), host 3 (n3); '2.0.0' on host 2 (n2); install the same versions "
        "on every host, and start the run again"
    )
    del hosts["host 2 (n2)"]
    hosts["host 3 (n3)"] = facts | {"the script": "0" * 12}
    assert "copy the same file to every host" in differences(hosts)
