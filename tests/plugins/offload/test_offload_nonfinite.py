"""An infinite or NaN loss of one rank, whose optimizer lies in a store: all ranks do the same."""

import math

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, NonFiniteError, ProjectConfiguration

ROW = torch.ones(1, 2)


class Trained:
    """A model whose optimizer state lies in a store, with a policy."""

    def __init__(self, strategy, policy, folder=None):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.accelerator = Accelerator(
            cpu=True,
            config={"on_nonfinite": policy, "strategy": strategy},
            project_config=ProjectConfiguration(
                project_dir=folder, automatic_checkpoint_naming=folder is not None
            ),
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)

    def step(self, *, bad, clip):
        odd = bad and self.accelerator.process_index == 1
        self.accelerator.backward(self.model(ROW * math.nan if odd else ROW).sum())
        if clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        found = self.accelerator.get_state_dict(self.model)
        return {name: values.clone() for name, values in found.items()}


def same(before, after):
    return all(torch.equal(values, after[name]) for name, values in before.items())


@pytest.mark.complete
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "kind", "clip"), [("zero2", "cpu", True), ("zero3", "nvme", False)]
)
def test_the_policies_hold_with_state_in_a_store(tmp_path, name, kind, clip):
    (tmp_path / "store").mkdir(exist_ok=True)
    strategy = {"name": name, "offload": {"optimizer": kind}}
    if kind == "nvme":
        strategy["offload"]["path"] = str(tmp_path / "store")
        strategy["keep_below"] = 0
    run = Trained(strategy, "skip")
    run.step(bad=False, clip=clip)
    before = run.weights()
    run.step(bad=True, clip=clip)
    assert run.accelerator.optimizer_step_was_skipped
    assert same(before, run.weights())
    run.step(bad=False, clip=clip)
    assert not same(before, run.weights())
    assert all(bool(values.isfinite().all()) for values in run.weights().values())
    run.accelerator.free_memory()

    run = Trained(strategy, "rollback", tmp_path / "run")
    run.step(bad=False, clip=clip)
    run.accelerator.save_state()
    before = run.weights()
    run.step(bad=False, clip=clip)
    run.step(bad=True, clip=True)
    assert run.optimizer.steps == 1
    assert same(before, run.weights())
    run.accelerator.free_memory()

    run = Trained(strategy, "stop")
    run.step(bad=False, clip=clip)
    before = run.weights()
    with pytest.raises(NonFiniteError, match="rank 1: in step 2 the loss of micro-batch 1 is nan"):
        run.step(bad=True, clip=True)
    assert same(before, run.weights())
    run.accelerator.free_memory()
