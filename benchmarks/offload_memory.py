"""Trains a model whose optimizer state is four times the memory that the process may use.

::

    python benchmarks/offload_memory.py --path DIRECTORY
    python benchmarks/offload_memory.py --path DIRECTORY --blocks 8 --without-limit

Two processes train the same model from the same seed on one rank, bf16 parameters with fp32
masters: one with everything in memory, one with parameters and optimizer state in the store
``nvme``. The second may use a quarter of the bytes of the optimizer state (masters, two moments): a
memory cgroup holds it to that, page cache included, where the machine lets one be made; its peak
resident memory is read in any case. Losses must be equal to the last bit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import Accelerator

WIDTH, HIDDEN, TOKENS = 1024, 6144, 16
STATE_BYTES = 12
"""Of AdamW, per parameter: an fp32 master and two fp32 moments."""
Found = dict[str, Any]
CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max"),
)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def train(blocks: int, steps: int, path: str) -> Found:
    """Train, and say what it took; with a path, state and parameters lie there."""
    store = {"optimizer": "nvme", "params": "nvme", "path": path}
    small = {"staging_mib": 64.0}
    offload = {"offload": {**store, "store_options": small}} if path else {}
    accelerator = Accelerator(
        strategy={"name": "zero3", "keep_below": 0, "buffers_in_flight": 2, **offload},
        mixed_precision="bf16",
        config={"dtypes": {"param": "bf16"}},
        cpu=True,
    )
    torch.manual_seed(0)
    with accelerator.building():
        model = nn.Sequential(*(Block() for _ in range(blocks)))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        inputs = torch.randn(TOKENS, WIDTH, generator=generator)
        loss = (model(inputs.bfloat16()).float() - inputs).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    accelerator.free_memory()
    return {"numel": numel, "losses": losses, "seconds": seconds, "peak": peak_bytes()}


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@contextmanager
def limited(nbytes: int) -> Iterator[Path | None]:
    """Make a memory cgroup of so many bytes; None where that is not possible."""
    for root, knob in CGROUPS:
        group = root / f"drivetrain-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / knob).write_text(str(nbytes), encoding="ascii")
            yield group
        except OSError:
            continue
        else:
            return
        finally:
            group.rmdir()
    yield None


def run(arguments: argparse.Namespace, path: str, group: Path | None) -> Found:
    """Train in a process of its own, in a cgroup if there is one."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as report:
        command = [sys.executable, __file__, "--child", report.name, "--path", path]
        command += ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

        done = subprocess.run(command, check=False, preexec_fn=enter)
        if done.returncode:
            sys.exit(f"the training {'with' if path else 'without'} a disk ended: {done}")
        found: Found = json.load(report)
        return found


def main() -> None:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--path", required=True, help="directory on a local disk")
    parser.add_argument("--blocks", type=int, default=60, help="12.6 million parameters each")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--without-limit", action="store_true", help="only look at the peak")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        report = train(arguments.blocks, arguments.steps, arguments.path)
        Path(arguments.child).write_text(json.dumps(report), encoding="utf-8")
        return
    numel = arguments.blocks * sum(p.numel() for p in Block().parameters())
    budget = STATE_BYTES * numel // 4
    with nullcontext(None) if arguments.without_limit else limited(budget) as group:
        disk = run(arguments, arguments.path, group)
    memory = run(arguments, "", None)
    same = disk["losses"] == memory["losses"]
    print(f"parameters {numel:,}; optimizer state {STATE_BYTES * numel / 2**30:.2f} GiB")
    print(f"budget {budget / 2**30:.2f} GiB, {'held by a cgroup' if group else 'not enforced'}")
    for name, found in (("disk", disk), ("memory", memory)):
        seconds = sorted(found["seconds"])[len(found["seconds"]) // 2]
        print(f"{name:8} peak {found['peak'] / 2**30:.2f} GiB, step {seconds:.1f} s")
    print(f"losses {'equal to the last bit' if same else 'DIFFER'}: {disk['losses']}")
    ratio = STATE_BYTES * numel / disk["peak"]
    print(f"optimizer state is {ratio:.2f} x the peak")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
