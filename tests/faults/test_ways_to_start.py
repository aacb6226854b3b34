"""Every way to start a run over two hosts, with the real programs: the same losses as one host.

SLURM, sshd and Open MPI run on emulated hosts, which all tests here share. What hosts refuse leaves
nothing behind on any of them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster_packages import cluster, fetched, slurm_variables, wait_for_slurm
from emulated_hosts import Hosts, why_not
from waits import PATIENCE_S

pytestmark = [pytest.mark.alone, pytest.mark.exhaustive]

RATE, RATE_MB_S = "400mbit", 50
PORT = 29611
SCRIPT = """
import json
import os
import torch
from torch import nn
from drivetrain import Accelerator, DataLoaderConfiguration, gather_object

torch.manual_seed(0)
width = int(os.environ.get("WIDTH", "16"))
model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)).double()
rows = torch.randn(48, 8).double()
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for (batch,) in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
world = accelerator.run.world
local = gather_object([[world.local_rank, world.local_size]])
levels = accelerator.mesh.levels("dp", world)
if accelerator.is_main_process:
    found = {"losses": losses, "hosts": len(set(world.hosts)), "local": local}
    print(json.dumps(found | {"near": levels.near.size if levels else 0}), flush=True)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    packages = tmp_path_factory.mktemp("packages")
    if reason := fetched(packages):
        pytest.skip(reason)
    with cluster(packages, tmp_path_factory.mktemp("hosts"), rate=RATE) as made:
        wait_for_slurm(made)
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder that all hosts share, with the script."""
    made = tmp_path_factory.mktemp("run")
    (made / "train.py").write_text(SCRIPT)
    return made


@pytest.fixture(scope="module")
def expected(folder) -> list[float]:
    """The losses of two ranks on this machine alone."""
    command = [*drivetrain("launch"), "--cpu", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return figures(done.stdout)["losses"]


@pytest.fixture(autouse=True)
def nothing_is_left(request) -> Iterator[None]:
    yield
    if "hosts" in request.fixturenames:
        made: Hosts = request.getfixturevalue("hosts")
        for host in made:
            assert ours_on(host) == [], f"left on {host.name}"


def ours_on(host) -> list[str]:
    """Return the command lines of our processes on a host."""
    found = []
    for pid in host.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        text = b" ".join(words).decode()
        found += [text] if "drivetrain" in text or "train.py" in text else []
    return found


def drivetrain(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "drivetrain_launch", *words]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment of a user without settings, in which this interpreter is found."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("DRIVETRAIN_", "TORCHELASTIC_", "GLOO_", "SLURM_", "PET_"))
    }
    path = f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin:/bin:/sbin"
    secret = {"DRIVETRAIN_SECRET": "a secret of the tests"}
    return kept | secret | {"PATH": path, "OMP_NUM_THREADS": "1"} | dict(more or {})


def figures(text: str) -> dict:
    """Return the figures that the script printed, whatever stands in front of them."""
    found = re.findall(r"\{\"losses\".*\}", text)
    assert len(found) == 1, text
    return json.loads(found[0])


def on_both(hosts, folder, command, variables=lambda index: {}):
    """Start a command on both hosts; return exit codes and texts."""
    started = [
        host.start(command(index) if callable(command) else command, folder=folder,
                   env=environment(variables(index)))
        for index, host in enumerate(hosts)
    ]  # fmt: skip
    texts = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    return [process.returncode for process in started], texts


# --- six ways ---


def test_srun(hosts, folder, expected):
    env = environment(slurm_variables(hosts)) | {"OMP_NUM_THREADS": "1"}
    words = ["srun", "-N2", "--ntasks-per-node=1", *drivetrain("launch")]
    words += ["--cpu", "--nproc-per-node", "1", "train.py"]
    code, text = hosts[0].run(words, folder=folder, env=env, timeout=PATIENCE_S)
    assert code == 0, text
    assert figures(text) == {
        "losses": expected, "hosts": 2, "local": [[0, 1], [0, 1]], "near": 0
    }  # fmt: skip
    preflight = re.search(r"^preflight \((\S+) s\): 2 hosts, every pair connects; .*$", text, re.M)
    assert float(preflight[1]) < 3, text
    rate = re.search(r"between hosts (\S+) MB/s, \S+ [mu]s \(gloo over TCP, eth0\)", preflight[0])
    assert 0.5 * RATE_MB_S < float(rate[1]) < 1.5 * RATE_MB_S


def test_hostfile_over_ssh(hosts, folder, expected):
    (folder / "hostfile").write_text("n1 slots=1\nn2 slots=1  # the other one\n")
    words = drivetrain("launch", "--hostfile", "hostfile", "--cpu", "train.py")
    code, text = hosts[0].run(words, folder=folder, env=environment(), timeout=PATIENCE_S)
    assert code == 0, text
    assert figures(text)["losses"] == expected
    assert re.search(r'^n1: \{"losses"', text, re.MULTILINE)
    assert "n1: preflight (" in text


def test_mpirun_with_two_ranks_per_host_that_it_starts_one_by_one(hosts, folder, expected):
    (folder / "machines").write_text("n1 slots=2\nn2 slots=2\n")
    words = ["mpirun", "--allow-run-as-root", "--hostfile", "machines", "-np", "4"]
    for layer in ("btl_tcp_if_include", "oob_tcp_if_include"):
        words += ["--mca", layer, "eth0"]
    for name in ("PATH", "DRIVETRAIN_SECRET", "OMP_NUM_THREADS"):
        words += ["-x", name]
    words += ["-x", "MASTER_ADDR=n1", *drivetrain("launch"), "--cpu", "train.py"]
    code, text = hosts[0].run(words, folder=folder, env=environment(), timeout=PATIENCE_S)
    assert code == 0, text
    found = figures(text)
    assert found["losses"] == pytest.approx(expected, rel=1e-12)
    # Two ranks share a host: the collectives know it, and go in levels.
    assert (found["hosts"], found["near"]) == (2, 2)
    assert found["local"] == [[0, 2], [1, 2]] * 2
    assert "preflight" in text


def test_torchrun(hosts, folder, expected):
    def command(index: int) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "1", "--node-rank", str(index)),
            *("--master-addr", "n1", "--master-port", str(PORT + 1), "train.py"),
        ]

    eth0 = {"GLOO_SOCKET_IFNAME": "eth0"}
    codes, texts = on_both(hosts, folder, command, lambda index: eth0)
    assert codes == [0, 0], texts
    assert figures(texts[0])["losses"] == expected


def test_plain_ranks_and_more_than_one_on_a_machine_are_one_host(hosts, folder, expected):
    """Only RANK and WORLD_SIZE are set: the launchers find out who shares a machine."""

    def rank(index: int) -> dict[str, str]:
        return {"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "RANK": str(index)}

    processes = [
        hosts[0].start(drivetrain("launch", "--cpu", "train.py"), folder=folder,
                       env=environment(rank(index)))
        for index in range(2)
    ]  # fmt: skip
    texts = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    found = figures("".join(texts))
    assert found["losses"] == expected
    assert (found["hosts"], found["local"]) == (1, [[0, 2], [1, 2]])


# --- links ---


def test_strategy_that_needs_more_than_the_link_gives_is_named(hosts, folder):
    words = drivetrain("launch", "--hosts", "n1:1,n2:1", "--export", "WIDTH=65536", "--cpu")
    try:
        for host in hosts:
            host.limit("80mbit")
        code, text = hosts[0].run(
            [*words, "train.py"], folder=folder, env=environment(), timeout=PATIENCE_S
        )
    finally:
        for host in hosts:
            host.limit(RATE)
    assert code == 0, text
    warning = re.search(
        r"n1: .*the link between hosts is too slow for this strategy: a step sends 5\.2 MB from "
        r"each host, (\S+) s at the measured (\S+) MB/s, and works for (\S+) s;",
        text,
    )
    assert warning, text
    link_s, rate, working_s = map(float, warning.groups())
    assert 5 < rate < 15
    assert link_s == pytest.approx(5.24 / rate, rel=0.1)
    assert working_s < link_s


def test_the_command_test_fills_a_table_of_the_links(hosts, folder):
    words = drivetrain("test", "--hosts", "n1:1,n2:1", "--cpu")
    code, text = hosts[0].run(words, folder=folder, env=environment(), timeout=PATIENCE_S)
    assert code == 0, text
    rows = [line.split() for line in text.splitlines() if re.match(r"n1:\s+n[12]\s", line)]
    assert [row[1] for row in rows] == ["n1", "n2"], text
    link = re.compile(r"n1:\s+n[12]\s.*?(\d+(?:\.\d+)?) MB/s, \S+ [mu]s")
    rates = [float(found[1]) for line in text.splitlines() if (found := link.match(line))]
    assert len(rates) == 2, text
    assert all(0.5 * RATE_MB_S < rate < 1.5 * RATE_MB_S for rate in rates)
    assert "n1: ok: 2 ranks on cpu and one process differ by" in text


# --- what is refused ---


@contextmanager
def mounted(host, source: Path, target: Path):
    """Let a host see another file or folder in a place."""
    assert host.run(["mount", "--bind", str(source), str(target)])[0] == 0
    try:
        yield
    finally:
        host.run(["umount", str(target)])


def refused(hosts, folder, *words: str) -> str:
    """Return the one line with which a launch over ssh ends with exit code 2."""
    script = folder / "touch.py"
    script.write_text("open('started', 'w')\n")
    code, text = hosts[0].run(
        drivetrain("launch", *words, "--cpu", script.name),
        folder=folder,
        env=environment(),
        timeout=PATIENCE_S,
    )
    assert code == 2, text
    assert not (folder / "started").exists()
    return text


def test_host_that_nobody_knows(hosts, folder):
    text = refused(hosts, folder, "--hosts", "n1:1,n9:1")
    assert text.startswith("error: cannot start the run on n9: n9: ssh: Could not resolve hostname")
    assert text.count("\n") == 1


def test_key_that_the_host_does_not_accept(hosts, folder, tmp_path):
    (tmp_path / "none").write_text("")
    keys = hosts.folder / "cluster/ssh/user.pub"
    kept = keys.read_bytes()
    try:
        keys.write_bytes(b"")
        text = refused(hosts, folder, "--hosts", "n1:1,n2:1")
    finally:
        keys.write_bytes(kept)
    assert text.startswith("error: cannot start the run on n2: n2: ")
    assert "Permission denied (publickey" in text
    assert text.count("\n") == 1


def test_host_without_the_package(hosts, folder, tmp_path):
    import drivetrain_launch

    package = Path(drivetrain_launch.__file__).parent
    with mounted(hosts[1], tmp_path, package):
        text = refused(hosts, folder, "--hosts", "n1:1,n2:1")
    assert text.startswith("error: cannot start the run on n2: n2: ")
    assert "drivetrain_launch" in text
    assert text.count("\n") == 1
