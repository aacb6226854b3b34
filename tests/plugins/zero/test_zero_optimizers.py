"""Optimizers under ZeRO: which ones, made when, over what, and who else reads what they train.

The conformance suite covers groups with their own rates and decay under a scheduler made before
``prepare``, one optimizer over a subset, two models with one optimizer each. Here are the
optimizers themselves, what is added or made after ``prepare``, and models that share a step.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import (
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR, StepLR

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import Twins, adamw, momentum, weights
from drivetrain.testing.models import CASES

SMALL = {"bucket_mib": 0.001}
SHARDED = {"name": "zero3", "keep_below": 0}
STAGES = {
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "sharded": SHARDED,
}


def each(strategies):
    return pytest.mark.parametrize("strategy", list(strategies.values()), ids=list(strategies))


def start(strategy, **options):
    return Accelerator(strategy=strategy, cpu=True, **options)


def train(twins, steps):
    for step in steps:
        twins.backward(step)
        twins.step()
    twins.check()


class Lion(Optimizer):
    """A stranger's element-wise optimizer."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_(torch.sign(kept * one + p.grad * (1 - one)), alpha=-group["lr"])
                kept.lerp_(p.grad, 1 - two)


class Whitening(Optimizer):
    """A toy Shampoo: preconditions a matrix by the rows' second moments."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad.reshape(p.shape[0], -1) if p.dim() else p.grad.reshape(1, 1)
                rows = self.state[p].setdefault("rows", torch.eye(len(g), dtype=p.dtype))
                rows.add_(g @ g.T)
                values, vectors = torch.linalg.eigh(rows)
                whitened = vectors @ torch.diag(values**-0.25) @ vectors.T @ g
                p.sub_(whitened.reshape(p.shape), alpha=group["lr"])


def over_all(make):
    return lambda model: make(model.parameters())


ELEMENTWISE = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_dampened": lambda p: SGD(p, lr=0.1, momentum=0.5, dampening=0.5, foreach=True),
    "adam_tensor_rate": lambda p: Adam(p, lr=torch.tensor(0.02, dtype=torch.float64)),
    "amsgrad": lambda p: AdamW(p, lr=0.02, amsgrad=True, foreach=False),
    "fused": lambda p: AdamW(p, lr=0.02, fused=True),
    "maximize": lambda p: AdamW(p, lr=0.02, maximize=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
    "adagrad_with_start": lambda p: Adagrad(p, lr=0.05, initial_accumulator_value=0.3),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: NAdam(p, lr=0.02),
    "radam": lambda p: RAdam(p, lr=0.02),
    "adamax": lambda p: Adamax(p, lr=0.02),
    "adadelta": lambda p: Adadelta(p, lr=0.5),
    "rprop": lambda p: Rprop(p, lr=0.01),
    "lion": Lion,
}


@each(STAGES)
@pytest.mark.ranks(2)
def test_elementwise_optimizers_step_flat_ranges(strategy):
    """State of odd cuts, also of transposed parameters and of those that no rank has whole."""
    for name, make in ELEMENTWISE.items():
        for case in ("odd_shapes", "transposed") if name in ("sgd", "nadam") else ("mlp",):
            accelerator = start(strategy)
            twins = Twins(accelerator, CASES[case], over_all(make))
            train(twins, range(3))
            accelerator.free_memory()


def muon_and_adamw(model):
    """Return Muon over matrices in fp32, which it asks for by its rounding, and AdamW over rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return Muon(matrices, lr=0.02), AdamW(rest, lr=0.02, weight_decay=0.0)


WHOLE = {
    "adafactor": lambda model: (Adafactor(model.parameters(), lr=0.02),),
    "muon": muon_and_adamw,
    "whitening": lambda model: (Whitening(model.parameters()),),
}


def alone(case, make):
    """Return one process's weights after four steps on the batches of three ranks."""
    twin = case.build()
    optimizers = make(twin)
    for step in range(4):
        for rank in range(3):
            (case.loss(twin, case.batch(step, rank)) / 3).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in twin.named_parameters()}


def whole_parameters(strategy, case, make, folder, *, resumed):
    """Return the weights after four steps; half of them after a load, or with a save in between."""
    accelerator = start({**strategy, "partition": "parameter"})
    built = case.build()
    model, *optimizers = accelerator.prepare(built, *make(built))
    if resumed:
        accelerator.load_state(folder)
    for step in range(2 if resumed else 0, 4):
        if step == 2 and not resumed:
            accelerator.save_state(folder)
        accelerator.backward(case.loss(model, case.batch(step, accelerator.process_index)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    result = weights(accelerator, model)
    accelerator.free_memory()
    return result


@each(STAGES)
@pytest.mark.ranks(3)
def test_matrix_optimizers_need_whole_parameters(strategy, tmp_path):
    """Flat ranges are refused with the way out; whole parameters give one process's results."""
    for kind, make in WHOLE.items():
        accelerator = start(strategy)
        model = CASES["mlp"].build()
        optimizers = make(model)
        found = type(optimizers[0]).__name__
        with pytest.raises(UsageError, match=f"found {found}, .*partition: parameter"):
            accelerator.prepare(model, *optimizers)
        accelerator.free_memory()
        case = CASES["transposed" if kind == "whitening" else "tied"]
        first, second = (
            whole_parameters(strategy, case, make, tmp_path / kind, resumed=resumed)
            for resumed in (False, True)
        )
        # Muon orthogonalizes in bf16: the order of additions shows in its third digit.
        tolerance = 2e-3 if kind == "muon" else 1e-9
        for name, expected in alone(case, make).items():
            torch.testing.assert_close(first[name], expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(first[name], second[name]), f"{kind}: {name} differs after load"


@each(STAGES)
@pytest.mark.ranks(2)
def test_optimizers_that_need_a_closure_are_refused(strategy):
    for partition in ("flat", "parameter"):
        accelerator = start({**strategy, "partition": partition})
        model = CASES["mlp"].build()
        with pytest.raises(UsageError, match="found LBFGS.*closure"):
            accelerator.prepare(model, LBFGS(model.parameters()))
        accelerator.free_memory()


@each(STAGES)
@pytest.mark.ranks(2)
def test_groups_and_schedules_after_prepare(strategy):
    """A group added, a schedule made, and rates set by hand after ``prepare`` do what they say."""

    def make(model):
        return AdamW(model[4].parameters(), lr=0.05, weight_decay=0.1)

    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], make)
    train(twins, range(1))
    for optimizer, model in (
        (twins.optimizer, twins.model),
        (twins.twin_optimizer, twins.twin),
    ):
        # Gradients of what nobody trained were added up so far; the new group clears them.
        rest = {
            "params": list(model[0].parameters()),
            "lr": torch.tensor(0.01).double(),
            "betas": (0.8, 0.9),
        }
        optimizer.add_param_group(rest)
        optimizer.zero_grad()
    twins.scheduler = accelerator.prepare(StepLR(twins.optimizer, step_size=1, gamma=0.5))
    twins.twin_scheduler = StepLR(twins.twin_optimizer, step_size=1, gamma=0.5)
    train(twins, range(1, 3))
    found = [float(group["lr"]) for group in twins.optimizer.param_groups]
    assert found == pytest.approx([0.05 / 4, 0.01 / 4])
    for optimizer in (twins.optimizer, twins.twin_optimizer):
        optimizer.add_param_group({"params": twins_bias(twins, optimizer)})
        optimizer.param_groups[0].update(lr=0.2, weight_decay=0.0)
    twins.scheduler = twins.twin_scheduler = None
    train(twins, range(3, 5))
    assert [len(g["params"]) > 0 for g in twins.twin_optimizer.param_groups] == [True] * 3
    accelerator.free_memory()


def twins_bias(twins, optimizer):
    model = twins.model if optimizer is twins.optimizer else twins.twin
    model.zero_grad()
    return [model[2].bias]


@each(STAGES)
@pytest.mark.ranks(2)
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
    accelerator.free_memory()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 13, dtype=torch.float64), nn.Tanh(), nn.Linear(13, 5, dtype=torch.float64)
        )

    def forward(self, noise):
        return self.layers(noise)


def critic():
    return nn.Sequential(
        nn.Linear(5, 11, dtype=torch.float64), nn.Tanh(), nn.Linear(11, 1, dtype=torch.float64)
    )


def pair():
    torch.manual_seed(11)
    return Generator(), critic()


def adversarial_step(models, optimizers, batches, backward, *, freeze):
    """One step of both players on this process's batches; ``backward`` gets a mean over them."""
    generator, judge = models
    for_generator, for_judge = optimizers
    for noise, real in batches:
        fake = generator(noise).detach()
        loss = F.softplus(judge(fake)).mean() + F.softplus(-judge(real)).mean()
        backward(loss / len(batches))
    for_judge.step()
    for_judge.zero_grad()
    if freeze:
        judge.requires_grad_(False)
    for noise, _ in batches:
        backward(F.softplus(-judge(generator(noise))).mean() / len(batches))
    for_generator.step()
    for_generator.zero_grad()
    judge.requires_grad_(True)
    for_judge.zero_grad()  # the generator's loss went through the judge


@each(STAGES)
@pytest.mark.parametrize("freeze", [False, True], ids=["discarded", "frozen"])
@pytest.mark.ranks(2)
def test_two_players(strategy, freeze):
    """A GAN: steps interleave, and one loss runs through both models for the sake of one."""
    accelerator = start(strategy)
    ours, theirs = pair(), pair()

    def make(models):
        return Adam(models[0].parameters(), lr=0.01), SGD(models[1].parameters(), 0.1, 0.9)

    *models, one, two = accelerator.prepare(*ours, *make(ours))
    their_optimizers = make(theirs)
    for step in range(3):
        batches = [
            (CASES["mlp"].batch(step, r).inputs, CASES["mlp"].batch(step, r).targets)
            for r in range(2)
        ]
        mine = [batches[accelerator.process_index]]
        adversarial_step(models, (one, two), mine, accelerator.backward, freeze=freeze)
        adversarial_step(
            theirs, their_optimizers, batches, lambda loss: loss.backward(), freeze=freeze
        )
    for model, twin in zip(models, theirs, strict=True):
        found = weights(accelerator, model)
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-10, atol=1e-10)
    accelerator.free_memory()


@each(STAGES)
@pytest.mark.ranks(2)
def test_averages_and_references(strategy):
    """A copy made right after a step is whole and plain; a prepared reference is never trained."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["tied"], adamw)
    reference = CASES["tied"].build().requires_grad_(False)
    given = {name: p.clone() for name, p in reference.named_parameters()}
    reference = accelerator.prepare(reference)
    twins.backward(0)
    twins.step()
    average = copy.deepcopy(twins.model)  # while updated parameters are on their way
    expected = copy.deepcopy(twins.twin)
    assert all(type(p) is nn.Parameter for p in average.parameters())
    assert average.head.weight is average.embedding.weight
    for step in (1, 2):
        batch = twins.case.batch(step, twins.axis.rank)
        with torch.no_grad():
            wanted = reference(batch.inputs)
        loss = F.mse_loss(twins.model(batch.inputs), wanted)
        accelerator.backward(loss)
        for rank in range(2):
            inputs = twins.case.batch(step, rank).inputs
            start_again = CASES["tied"].build()
            (F.mse_loss(twins.twin(inputs), start_again(inputs).detach()) / 2).backward()
        twins.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), twins.model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
            for kept, new in zip(expected.parameters(), twins.twin.parameters(), strict=True):
                kept.lerp_(new, 0.1)
    twins.check()
    for name, parameter in expected.named_parameters():
        mine = average.get_parameter(name)
        torch.testing.assert_close(mine, parameter, rtol=1e-10, atol=1e-10)
    before = accelerator.traffic.total()
    case = twins.case
    case.loss(average, case.batch(9, 0)).backward()  # an ordinary model: trains by itself
    assert average.body.weight.grad is not None
    assert accelerator.traffic.total() == before
    for name, tensor in weights(accelerator, reference).items():
        assert torch.equal(tensor, given[name])
    accelerator.free_memory()
