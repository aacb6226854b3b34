"""Ray Train makes the process group; the program of the page on clusters trains in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train.torch", reason="needs 'pip install ray[train]'")

PAGE = Path(__file__).parents[2] / "docs/clusters.md"

LOOP = """
from pathlib import Path
import torch
import torch.distributed as dist
from drivetrain import Accelerator

def main():
    before = dist.group.WORLD
    assert before is not None
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rank = accelerator.process_index
    model = accelerator.prepare(torch.nn.Linear(4, 1, bias=False))
    accelerator.backward(model(torch.full((1, 4), float(rank))).sum())
    gradient = model.weight.grad.tolist()
    accelerator.end_training()
    assert dist.group.WORLD is before
    dist.barrier()
    Path(__file__).with_name(f"rank{rank}").write_text(str(gradient))
"""


@pytest.mark.exhaustive
def test_the_group_of_ray_is_adopted_and_left_alone(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "TorchTrainer" in block)
    started = "import ray\nray.init(num_cpus=2, include_dashboard=False)\n"
    on_cpu = block.replace("num_workers=8, use_gpu=True", "num_workers=2")
    assert on_cpu != block
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    (tmp_path / "start.py").write_text(started + on_cpu, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "start.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == str([[0.5] * 4])
