"""Launched trainings of a small model into which tests put faults, and what is left of them.

A fault is a line of Python that runs on every rank at a point of a step: ``start`` before the first
step, ``step`` before a batch's forward, ``backward`` between forward and backward, ``update``
before the optimizer's step. ``once(name)`` is true for the first one who asks, also over restarts.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from forked_programs import Started
from waits import PATIENCE_S

STEPS = 12

ENDED_S = 5.0
"""All others have ended so soon after a rank died; see ``took``."""

SCRIPT = """
import ctypes, os, re, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator, ProjectConfiguration

STEPS, name = {steps}, sys.argv[1]
project = ProjectConfiguration(
    project_dir=name, automatic_checkpoint_naming=True, total_limit=2
)
accelerator = Accelerator(cpu=True, project_config=project)
rank, size = accelerator.process_index, accelerator.num_processes

def once(what):
    try:
        os.mkdir(f"{{name}}/{{what}}")
    except FileExistsError:
        return False
    return True

def at(point, step):
    os.makedirs(name, exist_ok=True)
{faults}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(4 * STEPS, 8))
loader = DataLoader(data, batch_size=4 // size, shuffle=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
at("start", 0)
accelerator.resume()
for (x,) in loader:
    step = optimizer.steps + 1
    at("step", step)
    loss = model(x).square().mean()
    at("backward", step)
    accelerator.backward(loss)
    at("update", step)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if rank == 0:
        with open(f"{{name}}/losses", "a") as file:
            print(step, loss.item().hex(), file=file)
    if step % {every} == 0:
        accelerator.save_state()
whole = {{key: value for key, value in accelerator.get_state_dict(model).items()}}
if rank == 0:
    Path(f"{{name}}/weights").write_bytes(b"".join(v.numpy().tobytes() for v in whole.values()))
accelerator.end_training()
"""


class FaultyTrainings:
    """A folder in which trainings are launched.

    Args:
        folder: their working directory; temporary files go to its folder ``tmp``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()

    def start(
        self,
        name: str = "run",
        *options: str,
        faults: Mapping[str, str] | None = None,
        steps: int = STEPS,
        every: int = 3,
        ranks: int = 2,
        env: Mapping[str, str] | None = None,
        namespaces: Sequence[str] = (),
        program: Sequence[str] = ("-m", "drivetrain_launch"),
    ) -> Started:
        """Launch a training whose checkpoints, losses and weights lie in a folder of this name.

        Args:
            name: of the folder.
            options: of ``drivetrain launch``.
            faults: a line of Python by point; the line knows ``rank``, ``step`` and ``once``.
            steps: of the training.
            every: steps from save to save.
            ranks: number of processes on the host.
            env: further variables.
            namespaces: to run in.
            program: that stands for ``drivetrain``.
        """
        lines = [
            f"    if point == {point!r}:\n        {fault}"
            for point, fault in (faults or {}).items()
        ]
        script = self.folder / f"{name}.py"
        text = SCRIPT.format(faults="\n".join(lines), steps=steps, every=every)
        if not script.exists() or script.read_text() != text:
            script.write_text(text)
        launch = ("launch", "--cpu", "--nproc-per-node", str(ranks), *options)
        return Started(
            *program,
            *launch,
            script.name,
            name,
            folder=self.folder,
            env={"TMPDIR": str(self.temporary), **(env or {})},
            namespaces=namespaces,
        )

    def run(self, *arguments: str, timeout: float = PATIENCE_S, **settings):
        """Launch a training, and wait for its end."""
        with self.start(*arguments, **settings) as training:
            return training.wait(timeout)

    def weights(self, name: str = "run") -> bytes:
        """Return the bytes of the final weights."""
        return (self.folder / name / "weights").read_bytes()

    def losses(self, name: str = "run") -> list[tuple[int, str]]:
        """Return each step that was taken with its loss, in the order in which they were taken."""
        path = self.folder / name / "losses"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(step), loss) for step, loss in rows]

    def checkpoints(self, name: str = "run") -> list[str]:
        """Return the names of the checkpoints, drafts and remains too."""
        folder = self.folder / name / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Return the processes that work in the folder: launchers, ranks, workers of loaders."""
        return [process for process in psutil.process_iter() if self._is_here(process)]

    def left(self) -> list[str]:
        """Return what trainings have left behind; kill it."""
        found = [f"process {process.pid}" for process in self.processes()]
        for process in self.processes():
            process.kill()
        # torch itself makes an empty cache folder when an optimizer is built.
        files = [path.name for path in self.temporary.iterdir()]
        return found + [name for name in files if not name.startswith("torchinductor")]

    def _is_here(self, process: psutil.Process) -> bool:
        try:
            here = Path(process.cwd()) == self.folder
            return here and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def signal_all(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        try:
            os.kill(pid, signal.Signals(number))
        except ProcessLookupError:
            continue
