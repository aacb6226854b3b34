"""Measures how soon a run ends and goes on after the loss of a rank, of a host, and of a link.

    python benchmarks/restarts.py
    python benchmarks/restarts.py --memory

Two hosts of network namespaces, so it needs root, each with one rank of a transformer with 23
million parameters, which is saved every 5 steps in the background, or with ``--memory`` in the
memory of the hosts alone. Host 0 goes on alone while host 1 is away. Printed are the seconds from
the event until no rank of before is left on a living host, and until the first step after it has
ended.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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


def main() -> None:
    """Train on two hosts, and disturb them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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


if __name__ == "__main__":
    main()
