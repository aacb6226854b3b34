"""Times restarts after losses, and how long a background save keeps training waiting."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from programs import run_program
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ProjectConfiguration

# --- survive ---


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/shared"))
from emulated_hosts import Host, Hosts, why_not

PORT, PATIENCE_S, POLL_S = 29612, 300.0, 0.02
TRAIN = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from drivetrain import Accelerator, ProjectConfiguration
folder = Path(sys.argv[1])
project = ProjectConfiguration(
    project_dir=str(folder / "run"), automatic_checkpoint_naming=True, total_limit=2
)
accelerator = Accelerator(project_config=project)
layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 7, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rows = torch.utils.data.TensorDataset(torch.randn(1, 16, 512).expand(4000, 16, 512))
loader = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
while True:
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process and accelerator.sync_gradients:
            with (folder / "steps").open("a") as file:
                file.write(f"{time.time()} {accelerator.num_processes}\\n")
        if sys.argv[2] == "storage" and accelerator.sync_gradients and optimizer.steps % 5 == 0:
            accelerator.save_state(wait=False)
"""


class Run:
    """A training on two hosts.

    Args:
        hosts: both.
        folder: for its files.
        strategy: its name.
        memory: whether checkpoints are in memory, not in storage.
    """

    def __init__(self, hosts: Hosts, folder: Path, strategy: str, *, memory: bool) -> None:
        self.hosts, self._folder, self._strategy = hosts, folder, strategy
        self._memory = memory
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "train.py").write_text(TRAIN)

    def start(self, index: int) -> None:
        """Start the launcher of a host."""
        if index in self._launchers:
            self._launchers[index].wait()
        place = ["--nnodes", "1:2", "--node-rank", str(index), "--max-restarts", "90"]
        place += ["--rdzv-endpoint", f"{self.hosts[0].address}:{PORT}"]
        command = [sys.executable, "-m", "drivetrain_launch", "launch", "--cpu"]
        command += ["--nproc-per-node", "1", "--strategy", self._strategy, *place]
        if self._memory:
            command += ["--set", "checkpoint.local=memory", "--set", "checkpoint.local_every=5"]
        script = ["train.py", ".", "memory" if self._memory else "storage"]
        with (self._folder / f"host-{index}.log").open("ab") as log:
            self._launchers[index] = subprocess.Popen(
                self.hosts[index].command([*command, *script], folder=self._folder),
                env={**os.environ, "DRIVETRAIN_SECRET": "a secret of a benchmark"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def steps(self) -> list[tuple[float, int]]:
        """Return the moment of each step, and the number of ranks that took it."""
        path = self._folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(line.split()[0]), int(line.split()[1])) for line in lines if " " in line]

    def wait(self, reached: Callable[[], bool]) -> float:
        """Wait, and return the moment."""
        end = time.monotonic() + PATIENCE_S
        while not reached():
            if time.monotonic() > end:
                logs = sorted(self._folder.glob("host-*.log"))
                raise TimeoutError("\n".join(log.read_text() for log in logs))
            time.sleep(POLL_S)
        return time.time()

    def train(self, ranks: int, steps: int = 12) -> None:
        """Wait until so many ranks have taken some steps."""
        since = len(self.steps())
        self.wait(
            lambda: (
                len(self.steps()) >= since + steps
                and all(found == ranks for _, found in self.steps()[-steps:])
            )
        )

    def measure(self, name: str, event: Callable[[], None], living: tuple[int, ...]) -> None:
        """Let something happen, and print how soon the run ends and goes on."""
        old = {pid for index in living for pid in ranks_on(self.hosts[index])}
        begin = time.time()
        event()
        ended = self.wait(
            lambda: not old & {pid for index in living for pid in ranks_on(self.hosts[index])}
        )
        self.wait(lambda: self.steps()[-1][0] > ended)
        first = next(moment for moment, _ in self.steps() if moment > ended)
        print(f"{name:22} ended {ended - begin:5.1f} s   first step {first - begin:5.1f} s")

    def end(self) -> None:
        """End all launchers."""
        for launcher in self._launchers.values():
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def ranks_on(host: Host) -> list[int]:
    """Return the processes of ranks on a host."""
    found = []
    for pid in host.processes():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"drivetrain_launch.ranks.worker" in words:
                found.append(pid)
    return found


def kill_rank(host: Host) -> None:
    """Kill the rank of a host."""
    for pid in ranks_on(host):
        os.kill(pid, signal.SIGKILL)


def survive_main() -> None:
    """Measures how soon a run ends and goes on after the loss of a rank, of a host, and of a link.

        python benchmarks/restarts.py survive
        python benchmarks/restarts.py survive --memory

    Two hosts of network namespaces, so it needs root, each with one rank of a transformer with 23
    million parameters, which is saved every 5 steps in the background, or with ``--memory`` in the
    memory of the hosts alone. Host 0 goes on alone while host 1 is away. Printed are the seconds
    from the event until no rank of before is left on a living host, and until the first step after
    it has ended.
    """
    parser = argparse.ArgumentParser(description=str(survive_main.__doc__).splitlines()[0])
    parser.add_argument("--strategy", default="zero1")
    parser.add_argument("--memory", action="store_true", help="checkpoints in memory alone")
    given = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no host and no rank is left
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(Path(folder) / "hosts", setup="mount -t tmpfs tmpfs /dev/shm") as hosts,
    ):
        run = Run(hosts, Path(folder), given.strategy, memory=given.memory)
        try:
            for index in range(hosts.count):
                run.start(index)
            run.train(2)
            run.measure("a rank is killed", lambda: kill_rank(hosts[1]), (0,))
            run.train(2)
            run.measure("a host is lost", hosts[1].lose, (0,))
            run.train(1)
            hosts[1].mend()
            run.measure("a host comes back", lambda: run.start(1), (0,))
            run.train(2)
            run.measure("a link is cut", hosts[1].cut, (0, 1))
            run.train(1)
            run.measure("a link comes back", hosts[1].mend, (0,))
        finally:
            run.end()


# --- saves ---


WIDTH, GB = 2048, 1e9
STEPS_BETWEEN = 2


def measure(folder: str, gigabytes: float, saves: int) -> None:
    """Print as JSON, for each save, the seconds until it returns and ends, and bytes; on a rank."""
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    memory = accelerator.config.run.checkpoint.local == "memory"
    layers = max(1, round(gigabytes * GB / (12 * WIDTH * WIDTH)))  # fp32 weight and two moments
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    rows = torch.randn(1, WIDTH).expand(4000, WIDTH)
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    batches, found = iter(loader), []
    (batch,) = next(batches)
    while len(found) <= saves:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        due = optimizer.steps % STEPS_BETWEEN == 0
        accelerator.wait_for_checkpoint()
        accelerator.wait_for_everyone()
        begin = time.perf_counter()
        if due and not memory:
            accelerator.save_state(wait=False)
        (batch,) = next(batches)
        blocked = time.perf_counter() - begin
        accelerator.wait_for_checkpoint()
        times = torch.tensor([[blocked, time.perf_counter() - begin]])
        slowest = accelerator.gather(times).amax(0).tolist()
        if due:
            root = os.environ["DRIVETRAIN_MEMORY"] if memory else f"{folder}/checkpoints"
            newest = max(Path(root).glob("checkpoint_*"), key=lambda path: path.stat().st_mtime)
            found.append((*slowest, sum(path.stat().st_size for path in newest.iterdir())))
    if accelerator.is_main_process:
        print(json.dumps(found))
    accelerator.end_training()


def saves_main() -> None:
    """Measures how long a save in the background keeps the training loop waiting, per GB.

        python benchmarks/restarts.py saves
        python benchmarks/restarts.py saves --ranks 2 --strategy zero1 --gigabytes 0.5 --saves 5
        python benchmarks/restarts.py saves --to memory

    Ranks train a model of large layers with Adam for a few steps between saves: with
    ``wait=False``, or with ``checkpoint.local: memory`` on one host. The blocking time of a save is
    that of the slowest rank, with the next batch; the bytes are those of the whole checkpoint. Then
    the loop waits for the end of the save, whose time is the second figure: so soon the next one
    can begin. The first save also makes the threads and the buffers that later saves use again.
    """
    parser = argparse.ArgumentParser(description=str(saves_main.__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="zero1")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the whole checkpoint")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--to", choices=("storage", "memory"), default="storage")
    parser.add_argument("--folder", default="", help="of the checkpoints; default: a temporary one")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        measure(given.rank, given.gigabytes, given.saves)
        return
    with tempfile.TemporaryDirectory(dir=given.folder or None) as folder:
        command = [sys.executable, "-m", "drivetrain_launch", "launch", "--cpu"]
        command += ["--nproc-per-node", str(given.ranks), "--strategy", given.strategy]
        if given.to == "memory":
            every = f"checkpoint.local_every={STEPS_BETWEEN}"
            command += ["--set", "checkpoint.local=memory", "--set", every]
        script = [str(Path(__file__).resolve()), "saves", "--rank", folder]
        chosen = ["--gigabytes", str(given.gigabytes), "--saves", str(given.saves)]
        done = subprocess.run(
            [*command, *script, *chosen], stdout=subprocess.PIPE, text=True, check=True
        )
    saved = json.loads(done.stdout.splitlines()[-1])
    rates = [blocked / (size / GB) for blocked, _, size in saved]
    whole = [seconds / (size / GB) for _, seconds, size in saved]
    print(f"{given.strategy} on {given.ranks} ranks to {given.to}, seconds per GB:")
    print(f"  first save    waits {rates[0]:.3f}, ends after {whole[0]:.3f}")
    print(
        f"  later saves   wait {statistics.median(rates[1:]):.3f} (to {max(rates[1:]):.3f}), "
        f"end after {statistics.median(whole[1:]):.3f}"
    )


if __name__ == "__main__":
    run_program({"survive": survive_main, "saves": saves_main})
