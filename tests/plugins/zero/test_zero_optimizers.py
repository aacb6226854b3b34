"""Optimizers under ZeRO: which ones, made when, over what, and who else reads what they train.

The conformance suite covers groups with their own rates and decay under a scheduler made before
``prepare``, one optimizer over a subset, two models with one optimizer each. Here are the
optimizers themselves, what is added or made after ``prepare``, and models that share a step.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import LBFGS, Adafactor, Adagrad, Adam, AdamW, NAdam, Rprop
from torch.optim.lr_scheduler import LambdaLR, StepLR

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.suite import Twins, adamw, momentum, weights
from drivetrain.testing.models import CASES
from zero_stages import each, start, train

pytestmark = pytest.mark.ranks(2)

ELEMENTWISE = {
    "adam_tensor_rate": lambda p: Adam(p, lr=torch.tensor(0.02, dtype=torch.float64)),
    "fused": lambda p: AdamW(p, lr=0.02, amsgrad=True, fused=True),
    "adagrad_with_start": lambda p: Adagrad(p, lr=0.05, initial_accumulator_value=0.3),
    "nadam": lambda p: NAdam(p, lr=0.02),
    "rprop": lambda p: Rprop(p, lr=0.01),
}


@each("sharded", "zero1")
def test_elementwise_optimizers_step_flat_ranges(strategy):
    """State of odd cuts, also of transposed parameters and of those that no rank has whole."""
    for name, make in ELEMENTWISE.items():
        for case in ("odd_shapes", "transposed") if name == "nadam" else ("mlp",):
            accelerator = start(strategy)
            over_all = functools.partial(lambda make, model: make(model.parameters()), make)
            train(Twins(accelerator, CASES[case], over_all), range(2))


@each("sharded", "zero1")
@pytest.mark.ranks(3)
def test_matrix_optimizers_need_whole_parameters(strategy):
    """Flat ranges are refused with the way out; closures are refused in any case."""

    def adafactor(model):
        return Adafactor(model.parameters(), lr=0.02)

    accelerator = start(strategy)
    model = CASES["mlp"].build()
    with pytest.raises(UsageError, match="found Adafactor, .*partition: parameter"):
        accelerator.prepare(model, adafactor(model))
    accelerator.free_memory()
    accelerator = start({**strategy, "partition": "parameter"})
    with pytest.raises(UsageError, match="found LBFGS.*closure"):
        accelerator.prepare(model, LBFGS(model.parameters()))
    train(Twins(accelerator, CASES["tied"], adafactor), range(3))


@each("sharded", "zero1")
def test_groups_and_schedules_after_prepare(strategy):
    """A group added, a schedule made, and rates set by hand after ``prepare`` do what they say."""

    def make(model):
        return AdamW(model[4].parameters(), lr=0.05, weight_decay=0.1)

    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], make)
    train(twins, range(1))
    pairs = (twins.optimizer, twins.model), (twins.twin_optimizer, twins.twin)
    for optimizer, model in pairs:
        # Gradients of what nobody trained were added up so far; the new group clears them.
        rate = torch.tensor(0.01).double()
        rest = {"params": list(model[0].parameters()), "lr": rate, "betas": (0.8, 0.9)}
        optimizer.add_param_group(rest)
        optimizer.zero_grad()
    twins.scheduler = accelerator.prepare(StepLR(twins.optimizer, step_size=1, gamma=0.5))
    twins.twin_scheduler = StepLR(twins.twin_optimizer, step_size=1, gamma=0.5)
    train(twins, range(1, 3))
    found = [float(group["lr"]) for group in twins.optimizer.param_groups]
    assert found == pytest.approx([0.05 / 4, 0.01 / 4])


@each("sharded", "zero1", "fsdp")
def test_a_group_added_just_before_a_load_gets_its_state(strategy, tmp_path):
    """From a checkpoint, and from a state dict."""
    found = []
    for way in ("trained", "checkpoint", "state dict"):
        accelerator = start(strategy)
        model = CASES["mlp"].build()
        model, optimizer = accelerator.prepare(model, AdamW(model[4].parameters(), lr=0.05))
        optimizer.add_param_group({"params": list(model[0].parameters())})
        if way == "trained":
            batch = CASES["mlp"].batch(0, accelerator.process_index)
            accelerator.backward(CASES["mlp"].loss(model, batch))
            optimizer.step()
            accelerator.save_state(tmp_path / "state")
        elif way == "checkpoint":
            accelerator.load_state(tmp_path / "state")
        else:
            optimizer.load_state_dict(found[0])
        found.append(optimizer.state_dict())
    assert len(found[0]["state"]) == 4
    for state in found[1:]:
        torch.testing.assert_close(state, found[0], rtol=0, atol=0)


@each("sharded", "zero1", "fsdp")
def test_optimizers_made_at_any_time(strategy):
    """After ``prepare``, with state from before it, and two over disjoint parts of one model."""
    case = CASES["mlp"]
    accelerator = start(strategy)
    model, twin = case.build(), case.build()
    early = Adam(model[0].parameters(), lr=0.01)
    their_early = Adam(twin[0].parameters(), lr=0.01)
    for one, optimizer in ((model, early), (twin, their_early)):  # a warm-up in plain torch
        case.loss(one, case.batch(50, 0)).backward()
        optimizer.step()
        one.zero_grad()
    model, early = accelerator.prepare(model, early)
    late = accelerator.prepare(momentum(model[2]))
    later = accelerator.prepare(AdamW(model[4].parameters(), lr=0.02))
    schedule = accelerator.prepare(LambdaLR(late, lambda step: 1.0 / (step + 1)))
    their_late, their_later = momentum(twin[2]), AdamW(twin[4].parameters(), lr=0.02)
    their_schedule = LambdaLR(their_late, lambda step: 1.0 / (step + 1))
    for step in range(4):
        accelerator.backward(case.loss(model, case.batch(step, accelerator.process_index)))
        for rank in range(2):
            (case.loss(twin, case.batch(step, rank)) / 2).backward()
        # One of them steps every second time only and adds gradients up in between.
        ours, theirs = [early, late], [their_early, their_late]
        if step % 2:
            ours.append(later)
            theirs.append(their_later)
        for optimizer in [*ours, *theirs]:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        their_schedule.step()
    found = weights(accelerator, model)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-10, atol=1e-10)


@each("sharded", "zero1")
def test_copies_and_references(strategy):
    """A copy made right after a step is whole and plain; a prepared reference is never trained."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["tied"], adamw)
    given = CASES["tied"].build().requires_grad_(False)
    reference = accelerator.prepare(copy.deepcopy(given))
    twins.backward(0)
    twins.step()
    average = copy.deepcopy(twins.model)  # while updated parameters are on their way
    assert all(type(p) is nn.Parameter for p in average.parameters())
    assert average.head.weight is average.embedding.weight
    torch.testing.assert_close(
        [*average.parameters()], [*twins.twin.parameters()], rtol=1e-10, atol=1e-10
    )
    batch = twins.case.batch(1, twins.axis.rank)
    with torch.no_grad():
        wanted = reference(batch.inputs)
    accelerator.backward(F.mse_loss(twins.model(batch.inputs), wanted))
    twins.optimizer.step()
    before = accelerator.traffic.total()
    twins.case.loss(average, twins.case.batch(9, 0)).backward()  # trains by itself
    assert average.body.weight.grad is not None
    assert accelerator.traffic.total() == before
    for name, tensor in weights(accelerator, reference).items():
        assert torch.equal(tensor, given.get_parameter(name))
