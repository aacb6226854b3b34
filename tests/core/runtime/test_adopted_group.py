"""A process group that a script, or Ray Train, has made is adopted: used, and left as it was."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forked_programs import run_python

SCRIPT = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from drivetrain import Accelerator

rank, folder, owner = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if owner == "script":
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2,
        timeout=timedelta(seconds=77),
    )
before = dist.group.WORLD
accelerator = Accelerator(cpu=True)
assert (accelerator.process_index, accelerator.num_processes) == (rank, 2)
assert before is None or dist.group.WORLD is before
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.full((1, 4), float(rank))).sum())
optimizer.step()
assert model.weight.tolist() == [[0.5] * 4]  # the mean of the gradients 0 and 1 was subtracted
accelerator.end_training()
assert dist.is_initialized() == (owner == "script")
if owner == "script":
    assert dist.group.WORLD is before
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0
    dist.destroy_process_group()
print("done", rank)
"""


@pytest.mark.parametrize("owner", ["script", "accelerator"])
def test_who_has_made_the_group_destroys_it(tmp_path: Path, owner: str, port: int):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def ended(rank: int):
        env = meeting | {"RANK": str(rank)} if owner == "accelerator" else {}
        words = ("train.py", str(rank), str(tmp_path), owner)
        return run_python(*words, folder=tmp_path, env=env)

    with ThreadPoolExecutor(2) as threads:
        for rank, found in enumerate(threads.map(ended, range(2))):
            assert found.returncode == 0, found.stderr
            assert found.stdout.endswith(f"done {rank}\n")
