"""A real cluster on emulated hosts: SLURM, ssh and Open MPI, unpacked from Debian's packages.

Nothing is installed: each host sees the unpacked packages as a layer over its own ``/usr``.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

from emulated_hosts import Hosts

PACKAGES = (
    *("munge", "libmunge2", "slurm-wlm-basic-plugins", "slurm-client", "slurmctld", "slurmd"),
    *("libhwloc15", "openssh-server", "libwrap0", "libnl-3-200", "libnl-route-3-200"),
    *("libibverbs1", "libevent-core-2.1-7", "libevent-pthreads-2.1-7", "libpsm-infinipath1"),
    *("libpsm2-2", "librdmacm1", "libfabric1", "libpmix2", "libucx0", "libopenmpi3"),
    *("openmpi-common", "openmpi-bin"),
)
"""As Debian 12 names them."""

READY_S = 300.0

CREDENTIALS_EXPIRE_S = 10
"""Life of a job's credential. SLURM starts a requeued job one second after its end, and not before:
nodes refuse a credential of the second in which they ended the job's first life."""

FOLDER = Path(__file__).with_name("cluster")
SLURM_CONF, SETUP = (FOLDER.joinpath(name).read_text() for name in ("slurm.conf", "setup.sh"))


def fetched(folder: Path) -> str:
    """Fetch and unpack the packages once; return the reason why that is impossible, or ""."""
    if (folder / "complete").exists():
        return ""
    for tool in ("apt-get", "dpkg", "ssh-keygen"):
        if shutil.which(tool) is None:
            return f"the cluster's packages need {tool}"
    debs, root = folder / "debs", folder / "root"
    for each in (debs, root):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    download = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *PACKAGES]
    got = subprocess.run(download, cwd=debs, capture_output=True, text=True, check=False)
    if got.returncode:
        return f"the cluster's packages cannot be fetched: {got.stderr.strip().splitlines()[-1:]}"
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    if (root / "lib").is_dir():
        shutil.copytree(root / "lib", root / "usr/lib", dirs_exist_ok=True, symlinks=True)
    links = {f"sbin/{name}": f"{name}-wlm" for name in ("slurmctld", "slurmd", "slurmstepd")}
    for name, target in (links | {"bin/mpirun": "mpirun.openmpi"}).items():
        path = root / "usr" / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    (folder / "complete").touch()
    return ""


def cluster(packages: Path, folder: Path, *, count: int = 2, rate: str = "1gbit") -> Hosts:
    """Return hosts, not yet made, on which SLURM and ssh run; ``n1`` is SLURM's controller."""
    state = folder / "cluster"
    for name in ("controller", "munge", "ssh", *(f"spool.n{i + 1}" for i in range(count))):
        (state / name).mkdir(parents=True, mode=0o700)
    hosts = Hosts(
        folder, count=count, rate=rate, setup=SETUP.format(root=packages / "root", state=state)
    )
    _write_slurm(state, hosts)
    _write_ssh(state / "ssh")
    kept = Path("/etc/passwd").read_text().splitlines()
    users = [line for line in kept if not line.startswith("sshd:")]
    users.append("sshd:x:65530:65534::/run/sshd:/usr/sbin/nologin")
    (state / "passwd").write_text("\n".join([*users, ""]))
    return hosts


def wait_for_slurm(hosts: Hosts) -> None:
    """Wait until SLURM finds all hosts idle.

    Raises:
        RuntimeError: they are not after ``READY_S`` seconds.
    """
    end = time.monotonic() + READY_S
    states = ""
    while time.monotonic() < end:
        _, states = hosts[0].run(["sinfo", "-N", "-h", "-o", "%t"], env=slurm_variables(hosts))
        if states.split() == ["idle"] * hosts.count:
            return
        time.sleep(0.2)
    raise RuntimeError(f"SLURM's hosts are not ready: {states}")


def slurm_words(hosts: Hosts) -> str:
    """Return what SLURM's daemons have written, for the message of a test that failed."""
    logs = sorted((hosts.folder / "cluster").glob("slurm*.log"))
    return "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)


def slurm_variables(hosts: Hosts) -> dict[str, str]:
    """Return an environment for programs on the hosts that talk to SLURM."""
    return dict(os.environ) | {"SLURM_CONF": str(hosts.folder / "cluster/slurm.conf")}


def _write_slurm(state: Path, hosts: Hosts) -> None:
    (state / "munge/key").write_bytes(os.urandom(1024))
    (state / "munge/key").chmod(0o600)
    nodes = [
        f"NodeName={name} NodeAddr={address} CPUs={os.cpu_count()} State=UNKNOWN"
        for name, address in hosts.addresses().items()
    ]
    text = SLURM_CONF.format(state=state, expire=CREDENTIALS_EXPIRE_S)
    (state / "slurm.conf").write_text("\n".join([text, *nodes, ""]))


def _write_ssh(folder: Path) -> None:
    for key in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    server = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "UsePAM": "no",
    }
    (folder / "server").write_text("".join(f"{key} {value}\n" for key, value in server.items()))
    client = {
        "User": "root",
        "IdentityFile": folder / "user",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    lines = "".join(f" {key} {value}\n" for key, value in client.items())
    (folder / "client").write_text(f"Host *\n{lines}")
