"""An infinite or NaN loss of divided models and of state in a store: all ranks do the same."""

import math

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, NonFiniteError, ProjectConfiguration
from drivetrain.testing.conformance.suite import everyone
from stacks import Residual, Stack

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
STRATEGIES = {
    "tp": {"name": "megatron", "tp": 2},
    "pp": {"name": "megatron", "pp": 2, "micro_batches": 2},
    "cpu": {"name": "zero2", "offload": {"optimizer": "cpu"}},
    "nvme": {"name": "zero3", "keep_below": 0, "offload": {"optimizer": "nvme", "path": "."}},
}


class Trained:
    """A model under a strategy, with a policy: of replicas, the second has the bad loss."""

    def __init__(self, strategy, policy, folder=None):
        torch.manual_seed(3)
        module = Stack([Residual(8), Residual(8)], first=nn.Linear(8, 8))
        self.accelerator = Accelerator(
            cpu=True,
            config={"on_nonfinite": policy, "strategy": STRATEGIES[strategy]},
            project_config=ProjectConfiguration(
                project_dir=folder, automatic_checkpoint_naming=folder is not None
            ),
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.is_bad = strategy in {"tp", "pp"} or self.accelerator.process_index == 1

    def step(self, bad=1.0, *, clip):
        factor = bad if self.is_bad else 1.0
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
@pytest.mark.parametrize(
    ("strategy", "clip"), [("tp", False), ("pp", True), ("cpu", True), ("nvme", False)]
)
def test_the_policies_hold(tmp_path, monkeypatch, strategy, clip):
    monkeypatch.chdir(tmp_path)
    run = Trained(strategy, "skip")
    run.step(clip=clip)
    before = run.weights()
    run.step(math.nan, clip=clip)
    assert run.accelerator.optimizer_step_was_skipped
    assert same(before, run.weights())
    run.step(clip=clip)
    assert not same(before, run.weights())
    assert all(bool(values.isfinite().all()) for values in run.weights().values())
    run.accelerator.free_memory()

    run = Trained(strategy, "rollback", tmp_path / "run")
    run.step(clip=clip)
    run.accelerator.save_state()
    before = run.weights()
    run.step(clip=clip)
    run.step(math.inf, clip=True)
    assert run.optimizer.steps == 1
    assert same(before, run.weights())
    run.accelerator.free_memory()

    run = Trained(strategy, "stop")
    run.step(clip=clip)
    before = run.weights()
    place = r"rank \d: in step 2 .* nan"
    if strategy in {"cpu", "nvme"}:
        place = "rank 1: in step 2 the loss of micro-batch 1 is nan"
    with pytest.raises(NonFiniteError, match=place):
        run.step(math.nan, clip=True)
    assert same(before, run.weights())
    everyone(None)
    run.accelerator.free_memory()


def of_its_head(steps, bad, accelerator=None):
    """Train the last layer, with a NaN in a batch; return its weights, and which steps it took."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # nobody clears the first layer
    if accelerator:
        model, optimizer = accelerator.prepare(model, optimizer)
    taken = []
    for step in range(steps):
        batch = torch.full((2, 3), 1.0 + step, dtype=torch.float64)
        if step == bad and (not accelerator or accelerator.process_index == 1):
            batch[0, 0] = math.nan
        loss = model(batch).mean()
        if accelerator:
            accelerator.backward(loss)
            optimizer.step()
            taken.append(not optimizer.step_was_skipped)
        else:
            loss.backward()
            taken.append(all(bool(each.grad.isfinite().all()) for each in model[2].parameters()))
            if taken[-1]:
                optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model) if accelerator else model.state_dict()
    return [weights[f"2.{name}"] for name in ("weight", "bias")], taken


@pytest.mark.parametrize("strategy", ["ddp", {"name": "zero3", "keep_below": 0}])
@pytest.mark.ranks(2)
def test_a_step_is_skipped_for_gradients_of_its_own_optimizer_alone(strategy):
    accelerator = Accelerator(cpu=True, config={"on_nonfinite": "skip", "strategy": strategy})
    found, taken = of_its_head(4, 1, accelerator)
    expected, taken_by_one = of_its_head(4, 1)
    assert taken == taken_by_one == [True, False, True, True]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
