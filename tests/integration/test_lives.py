"""Accelerators one after the other in the same processes, as for cross-validation."""

import pytest

from forked_programs import Started, run_python
from reserved_ports import reserved_port

SCRIPT = """
from functools import partial
import torch
from torch import nn
from drivetrain import Accelerator, gather_object
from drivetrain.errors import UsageError

def weights(strategy):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
                          nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    model.example_inputs = (torch.zeros(2, 4),)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(4, 4)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.gather(torch.ones(1)).sum() == accelerator.mesh["dp"].size
    found, ranks = accelerator.get_state_dict(model), accelerator.num_processes
    accelerator.end_training()
    if ranks > 1:
        mean, gather = partial(accelerator.metric_mean, 1.0, 1), partial(gather_object, [1])
        for shared in (accelerator.wait_for_everyone, accelerator.check_trigger, mean, gather):
            try:
                shared()
            except UsageError as error:
                assert "before end_training()" in str(error)
            else:
                raise AssertionError(f"{shared} in a rank that has left the others")
    return found, ranks

first, ranks = weights("ddp")
pipeline = [{"name": "megatron", "pp": 2}] * (ranks - 1)
for strategy in ("ddp", "zero3", *pipeline, "fsdp"):
    for name, found in weights(strategy)[0].items():
        torch.testing.assert_close(found, first[name], rtol=1e-4, atol=1e-5)
print("right")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "folds.py"
    path.write_text(SCRIPT)
    return str(path)


def test_under_the_launcher_whose_store_outlives_each(script, tmp_path):
    launch = ("-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node")
    for ranks in ("1", "2"):
        done = run_python(*launch, ranks, script, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "right"


def test_with_the_variables_of_torchrun(script, tmp_path):
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with reserved_port() as port:
        common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            Started(script, folder=tmp_path, env=common | {"RANK": str(i), "LOCAL_RANK": str(i)})
            for i in range(2)
        ]
    with ranks[0] as first, ranks[1] as second:
        for done in (first.wait(), second.wait()):
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == "right"
