"""Measures how long a save in the background keeps the training loop waiting, per GB.

    python benchmarks/async_saves.py
    python benchmarks/async_saves.py --ranks 2 --strategy zero1 --gigabytes 0.5 --saves 5
    python benchmarks/async_saves.py --to memory

Ranks train a model of large layers with Adam for a few steps between saves: with ``wait=False``, or
with ``checkpoint.local: memory`` on one host. The blocking time of a save is that of the slowest
rank, with the next batch; the bytes are those of the whole checkpoint. Then the loop waits for the
end of the save, whose time is the second figure: so soon the next one can begin. The first save
also makes the threads and the buffers that later saves use again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ProjectConfiguration

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


def main() -> None:
    """Start the ranks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        script = [str(Path(__file__).resolve()), "--rank", folder]
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
    main()
