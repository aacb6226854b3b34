"""Two hosts, played by two network namespaces of this machine."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

SCRIPT = """
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
