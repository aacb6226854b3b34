"""An infinite or NaN loss of a divided model: all ranks stop, skip the step or go back."""

import math

import pytest
import torch

from drivetrain import Accelerator, NonFiniteError, ProjectConfiguration
from drivetrain.testing.conformance.twins import everyone
from stacks import Residual, Stack

DIVISIONS = {
    "tp": {"name": "megatron", "tp": 2},
    "pp": {"name": "megatron", "pp": 2, "micro_batches": 2},
}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Trained:
    """A model under a division, with a policy."""

    def __init__(self, division, policy, folder=None):
        torch.manual_seed(3)
        module = Stack([Residual(8), Residual(8)], first=torch.nn.Linear(8, 8))
        self.accelerator = Accelerator(
            cpu=True,
            config={"on_nonfinite": policy, "strategy": DIVISIONS[division]},
            project_config=ProjectConfiguration(
                project_dir=folder, automatic_checkpoint_naming=folder is not None
            ),
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)

    def step(self, factor=1.0, *, clip):
        self.accelerator.pipeline_step(
            self.model, X, X, loss_fn=lambda output, _: factor * output.square().mean()
        )
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
@pytest.mark.parametrize(("division", "clip"), [("tp", False), ("pp", True)])
def test_the_policies_hold_under_a_divided_model(tmp_path, division, clip):
    run = Trained(division, "skip")
    run.step(clip=clip)
    before = run.weights()
    run.step(math.nan, clip=clip)
    assert run.accelerator.optimizer_step_was_skipped
    assert same(before, run.weights())
    run.step(clip=clip)
    assert not same(before, run.weights())
    run.accelerator.free_memory()

    run = Trained(division, "rollback", tmp_path)
    run.step(clip=clip)
    run.accelerator.save_state()
    before = run.weights()
    run.step(clip=clip)
    run.step(math.inf, clip=True)
    assert run.optimizer.steps == 1
    assert same(before, run.weights())
    run.accelerator.free_memory()

    run = Trained(division, "stop")
    run.step(clip=clip)
    before = run.weights()
    with pytest.raises(NonFiniteError, match=r"rank \d: in step 2 .* nan"):
        run.step(math.nan, clip=True)
    assert same(before, run.weights())
    everyone(None)
    run.accelerator.free_memory()
