"""Two hosts, played by two threads, or by two network namespaces of this machine."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from drivetrain.config import LaunchConfig
from drivetrain.errors import ConfigError
from drivetrain_launch.ranks import rendezvous as meeting
from drivetrain_launch.ranks.rendezvous import HostOrderRendezvous

SCRIPT = """
import json
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
if rank == 1 and attempt == "0":
    os._exit(7)
dist.barrier()
print("rank", rank, "on host", os.environ["GROUP_RANK"], "sum", value.item())
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
    with namespaces(names):
        hosts = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *sandbox.command(
                    "launch", "--strategy", "toy", "--nproc-per-node", "1", "--nnodes", "2",
                    "--node-rank", str(index), "--rdzv-endpoint", "10.77.0.9:29511",
                    "--max-restarts", "1", script)],
                cwd=sandbox.folder, env=sandbox.environment(), stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
            for index, name in enumerate(names)
        ]  # fmt: skip
        done = [host.communicate(timeout=90) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], done
    # Rank 0 is on the host that the user called 0, although its address is the higher one.
    assert done[0][0] == "rank 0 on host 0 sum 3.0\n"
    assert done[1][0] == ""
    assert "rank 1 failed first" in done[1][1]
    assert "exit code 7" in done[1][1]


HYBRID = """
import json
from pathlib import Path
import torch
from torch import nn
from drivetrain import Accelerator, wait_for_everyone

def sent_by_host():
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}
    return sum(count for name, count in counts.items() if name != "lo")

accelerator = Accelerator(strategy={"name": "fsdp", "sharding": "hybrid"}, cpu=True)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))
elements = sum(parameter.numel() for parameter in model.parameters())
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
torch.manual_seed(accelerator.process_index)

def step():
    accelerator.backward(model(torch.randn(4, 512)).square().mean())
    optimizer.step()
    optimizer.zero_grad()

step()
wait_for_everyone()
before, ledger = sent_by_host(), accelerator.traffic.sent()
for _ in range(3):
    step()
wait_for_everyone()
far = ("dp.far", "all_reduce")
accelerator.print(json.dumps({
    "hosts": len(set(accelerator.strategy_of(model).run.world.hosts)),
    "elements": elements,
    "sent": (sent_by_host() - before) / 3,
    "far": (accelerator.traffic.sent()[far] - ledger[far]) / 3,
}))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the command ip")
def test_hybrid_sharding_sends_between_hosts_what_replicas_add_up(sandbox):
    """Two hosts of two ranks: shards stay inside of a host, which the strategy finds by itself."""
    names = [f"dth-{os.getpid()}-{host}" for host in range(2)]
    script = sandbox.script(HYBRID)
    with namespaces(names):
        hosts = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *sandbox.command(
                    "launch", "--cpu", "--nproc-per-node", "2", "--nnodes", "2",
                    "--node-rank", str(index), "--rdzv-endpoint", "10.77.0.9:29512", script)],
                cwd=sandbox.folder, env=sandbox.environment(), stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
            for index, name in enumerate(names)
        ]  # fmt: skip
        done = [host.communicate(timeout=120) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], done
    found = json.loads(done[0][0])
    assert found["hosts"] == 2
    # A rank's half of the gradients, added up over 2 replicas: 2 (R-1)/R times half of them.
    assert found["far"] == 4 * found["elements"] / 2
    # Two ranks of the host send that; frames and their acknowledgements are not in the formula.
    assert 1.0 <= found["sent"] / (2 * found["far"]) < 1.1


@pytest.fixture
def port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(port, index, hosts=2):
    """Meet as one host; threads of a process share the store of host 0."""
    launch = LaunchConfig(
        nnodes=hosts, node_rank=index, rdzv_endpoint=f"127.0.0.1:{port}", timeout_s=20
    )
    handler = HostOrderRendezvous.meet(launch, "127.0.0.1")
    try:
        return handler.next_rendezvous()
    finally:
        handler.shutdown()


def test_every_host_says_that_two_have_the_same_index(port):
    with ThreadPoolExecutor() as pool:
        hosts = [pool.submit(meet, port, index, 3) for index in (0, 1, 0)]
        for host in hosts:
            with pytest.raises(ConfigError, match="2 hosts were started with --node-rank 0; give"):
                host.result(timeout=20)


def test_waiting_host_says_for_how_many(port, capsys, monkeypatch):
    monkeypatch.setattr(meeting, "FIRST_REMINDER_S", 0.2)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, port, 0)
        time.sleep(1.0)
        second = pool.submit(meet, port, 1)
        assert [each.result(timeout=20).rank for each in (first, second)] == [0, 1]
    said = capsys.readouterr().err.splitlines()
    assert said
    for line in said:
        assert re.fullmatch(rf"waiting for 1 of 2 hosts at 127\.0\.0\.1:{port} \(\d+ s\)", line)


def test_host_that_waits_for_host_0_says_so_and_stops_at_once(sandbox, port):
    endpoint = f"127.0.0.1:{port}"
    host = sandbox.start(
        "launch", "--strategy", "toy", "--nproc-per-node", "1", "--nnodes", "2",
        "--node-rank", "1", "--rdzv-endpoint", endpoint, sandbox.script("print()"),
    )  # fmt: skip
    with host:
        said = host.stderr.readline()
        assert re.fullmatch(rf"waiting for host 0 of 2 at {re.escape(endpoint)} \(\d s\)\n", said)
        begin = time.monotonic()
        host.send_signal(signal.SIGTERM)
        host.communicate(timeout=20)
    assert host.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 5
