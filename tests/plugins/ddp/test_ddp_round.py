"""What a round of gradient averaging does in the situations that loops get into."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain.compression.compressor import Rounded
from drivetrain.config import Layer, resolve
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.registry import strategies
from drivetrain_ddp.options import DdpConfig
from drivetrain_ddp.strategy import Ddp
from stacks import Parts
from started_ddp import SMALL, start

pytestmark = pytest.mark.ranks(2)


def mlp() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)]
    return nn.Sequential(*layers).double()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def mean_grads(model: nn.Module, steps: list[int], ranks: int) -> list[Tensor]:
    """Gradients of the mean over ranks, summed over steps, in one process."""
    copy = deepcopy(model)
    copy.zero_grad()
    for step in steps:
        for rank in range(ranks):
            (loss_of(copy, batch(step, rank)) / ranks).backward()
    return [parameter.grad for parameter in copy.parameters()]


def assert_grads(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-14)


def test_no_memory_for_buckets_in_a_better_order(monkeypatch):
    """The second round lays them out anew; a script that goes on has those of before."""

    def no_memory(*_):
        raise torch.OutOfMemoryError

    model = nn.ModuleDict({"second": mlp(), "first": mlp()})
    strategy = start(model)
    rank = strategy.run.world.rank

    def backward(step: int) -> None:
        model.zero_grad()
        strategy.backward(sum(loss_of(part, batch(step, rank)) for part in [*model.values()][::-1]))

    backward(0)
    with monkeypatch.context() as patch:
        patch.setattr("drivetrain_ddp.strategy.Bucket", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            backward(1)
    for step in (2, 3):
        backward(step)
        for part in model.values():
            assert_grads(part, mean_grads(part, [step], ranks=2))


@pytest.mark.parametrize(("first", "early"), [(0.001, 53 * 8), (25.0, 0)])
def test_the_first_bucket_leaves_before_the_first_layer_has_gradients(first: float, early: int):
    """With 50 elements of 8 bytes, and a flag for each of three parameters."""
    model = mlp()
    config = DdpConfig(first_bucket_mib=first)
    strategy = start(model, config)
    rank, traffic = strategy.run.world.rank, strategy.run.traffic
    sent: list[int] = []
    model[0].weight.register_hook(lambda _: sent.append(traffic.total()))
    for step in range(2):  # the first one sends at its end, and observes the order
        model.zero_grad()
        traffic.clear()
        strategy.backward(loss_of(model, batch(step, rank)))
        assert_grads(model, mean_grads(model, [step], 2))
    assert sent == [0, early]
    if rank == 0:
        assert traffic.sent() == Ddp.cost(config, ModelSpec.of(model), strategy.run).sent


@pytest.mark.ranks(1)
def test_a_first_bucket_without_bound_is_refused():
    options = {"name": "ddp", "first_bucket_mib": float("inf")}
    with pytest.raises(ConfigError, match=r"first_bucket_mib: expected at most 4096, found inf"):
        resolve(Layer({"strategy": options}), find_config=strategies().find_config)


def test_no_memory_for_what_crosses(monkeypatch):
    """A script that goes on loses no bucket."""
    made = []

    class Tight(Rounded):
        def __init__(self, *given):
            made.append(given)
            if len(made) == 2:
                raise torch.OutOfMemoryError
            super().__init__(*given)

    monkeypatch.setattr("drivetrain_ddp.strategy.Rounded", Tight)
    model = mlp()
    strategy = start(model, replace(SMALL, hook="bf16"))
    rank = strategy.run.world.rank
    with pytest.raises(torch.OutOfMemoryError):
        strategy.backward(loss_of(model, batch(0, rank)))
    strategy.backward(loss_of(model, batch(1, rank)))
    for parameter, grad in zip(model.parameters(), mean_grads(model, [0, 1], 2), strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0.02, atol=1e-3)
    assert len(made) > 2


def test_accumulating_sends_nothing_and_then_the_mean_of_the_sum():
    """Also of a layer that the last micro-batch of a window does not reach."""
    model = nn.ModuleDict({"always": mlp(), "at first": nn.Linear(6, 2).double()})
    always, early = model.values()
    strategy = start(model)
    rank, traffic = strategy.run.world.rank, strategy.run.traffic
    for first in (0, 10, 20):
        model.zero_grad()
        traffic.clear()
        with strategy.accumulating():
            for step in (first, first + 1):
                strategy.backward(sum(loss_of(part, batch(step, rank)) for part in model.values()))
            with strategy.accumulating(False):
                assert strategy.rounds.synchronizing
        assert not traffic.entries()
        for parameter in early.parameters():
            parameter.grad = parameter.grad.clone()  # of the script
        strategy.backward(loss_of(always, batch(first + 2, rank)))
        assert traffic.sent()
        assert_grads(always, mean_grads(always, [first, first + 1, first + 2], 2))
        assert_grads(early, mean_grads(early, [first, first + 1], 2))
    with pytest.raises(ZeroDivisionError), strategy.accumulating():
        raise ZeroDivisionError
    assert strategy.rounds.synchronizing


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def test_an_exception_in_backward_good_steps_and_a_loss_that_misses_the_model_on_one_rank():
    model = mlp()
    strategy = start(model)
    rank = strategy.run.world.rank
    other = torch.ones((), dtype=torch.float64, requires_grad=True)
    for step in range(3):
        with pytest.raises(ArithmeticError):
            strategy.backward(model[2:](Failing.apply(model[:2](batch(9, rank)))).sum())
        model.zero_grad()
        strategy.backward(loss_of(model, batch(step, rank)))
        assert_grads(model, mean_grads(model, [step], 2))
        model.zero_grad()
        strategy.backward(other * 1 if rank else loss_of(model, batch(step, 0)))
        assert_grads(model, [grad / 2 for grad in mean_grads(model, [step], 1)])
    model.zero_grad()
    with strategy.accumulating():
        strategy.backward(loss_of(model, batch(0, rank)))
    strategy.backward(loss_of(model[2:], torch.ones(4, 16, dtype=torch.float64)))  # not model[0]
    assert_grads(model[0], mean_grads(model, [0], 2)[:2])
    # Both forwards come first: no forward ends what the exception has cut short.
    model.zero_grad()
    kept = loss_of(model, batch(0, rank)), loss_of(model, batch(1, rank))
    expected = mean_grads(model, [0], 2)
    with pytest.raises(ArithmeticError):
        strategy.backward(loss_of(model[2:], Failing.apply(model[:2](batch(9, rank)))))
    strategy.backward(kept[0])
    cut = mean_grads(model, [9], 2)
    assert_grads(
        model, expected[:2] + [one + two for one, two in zip(expected, cut, strict=True)][2:]
    )
    with pytest.raises(ArithmeticError):
        strategy.backward(loss_of(model[2:], Failing.apply(model[:2](batch(9, rank)))))
    with pytest.raises(UsageError, match="after a backward that an exception has ended"):
        kept[1].backward()


def recomputing():
    """Return one layer inside two reentrant checkpoints and outside of them: three gradients."""

    def compute(m, inputs):
        hidden = m.layer(inputs)
        for _ in range(2):
            part = m.part if not m.recompute else partial(checkpoint, m.part, use_reentrant=True)
            hidden = part(m, hidden)
        return m.last(hidden)

    return Parts(
        compute,
        layer=nn.Linear(6, 6).double(),
        last=nn.Linear(6, 2).double(),
        part=lambda m, hidden: torch.tanh(m.layer(hidden)),
        recompute=True,
    )


@pytest.mark.parametrize("late", [False, True])
def test_reentrant_checkpoints_of_a_shared_layer(late):
    """On all ranks from the first step on, or late: on one rank, from the second."""
    torch.manual_seed(1)
    model = recomputing()
    strategy = start(model)
    rank = strategy.run.world.rank
    for step in range(3):
        model.zero_grad()
        model.recompute = False
        with strategy.accumulating():
            strategy.backward(loss_of(model, batch(10 + step, rank)))
        model.recompute = not late or (step > 0 and rank == 1)
        loss = loss_of(model, batch(step, rank))
        loss.backward() if step == 1 and not late else strategy.backward(loss)
        plain = deepcopy(model)
        plain.recompute = False
        assert_grads(model, mean_grads(plain, [10 + step, step], 2))


def test_freezing_and_unfreezing_and_replaced_gradients():
    model = mlp()
    model[0].requires_grad_(False)
    strategy = start(model)
    rank = strategy.run.world.rank
    strategy.backward(loss_of(model, batch(0, rank)))
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    model[4].requires_grad_(False)
    model.zero_grad()
    for step in (1, 2):
        model.zero_grad()
        strategy.backward(loss_of(model, batch(step, rank)))
        copy = deepcopy(model)
        copy[4].requires_grad_(True)
        expected = mean_grads(copy, [step], 2)
        assert_grads(model[0], expected[:2])
        assert model[4].weight.grad is None
    # The user puts other gradients in place: they take part in the next mean.
    model.zero_grad()
    for parameter in model[:3].parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    strategy.backward(loss_of(model, batch(3, rank)))
    expected = [grad + 0.5 for grad in mean_grads(copy, [3], 2)[:4]]
    assert_grads(model[:3], expected)


@pytest.mark.parametrize("name", ["ddp", "plain"])
def test_gradients_that_wait_are_averaged_though_a_layer_is_frozen_within_a_window(name):
    accelerator = Accelerator(cpu=True, strategy=name, gradient_accumulation_steps=2)
    expected, rank = mlp(), accelerator.process_index
    model = accelerator.prepare(mlp())
    for step in (0, 1):
        for each in (model, expected):
            each[0].requires_grad_(step == 0)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch(step, rank)))
        for each in (0, 1):
            (loss_of(expected, batch(step, each)) / 4).backward()
    assert_grads(model, [parameter.grad for parameter in expected.parameters()])
    accelerator.end_training()


def test_copies_and_closed_models_send_nothing():
    model = mlp()
    strategy = start(model)
    rank, traffic = strategy.run.world.rank, strategy.run.traffic
    strategy.backward(loss_of(model, batch(1, rank)))
    traffic.clear()
    average = deepcopy(model).train()
    loss_of(average, batch(1, rank)).backward()
    assert not traffic.entries()
    strategy.close()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    traffic.clear()
    loss_of(model, batch(2, rank)).backward()
    assert not traffic.entries()
    assert not torch.equal(kept[0], next(model.parameters()).grad)


@pytest.mark.parametrize("detached", [False, True])
def test_views_of_gradients_that_are_cleared_within_a_window_stay_what_they_were(detached):
    model = mlp()
    strategy = start(model)
    rank, cleared = strategy.run.world.rank, list(model.parameters())[::2]
    for _ in range(2):
        with strategy.accumulating():
            strategy.backward(loss_of(model, batch(1, rank)))
            gradients = [parameter.grad for parameter in cleared]
            kept = [each.detach().view(-1) if detached else each[0] for each in gradients]
            del gradients
            expected = [each.clone() for each in kept]
            for parameter in cleared:
                parameter.grad = None
            strategy.backward(loss_of(model, batch(2, rank)))
        strategy.backward(loss_of(model, batch(3, rank)))
        assert all(map(torch.equal, kept, expected))
        cleared_ones, others = mean_grads(model, [2, 3], 2), mean_grads(model, [1, 2, 3], 2)
        assert_grads(model, [*chain(*zip(cleared_ones[::2], others[1::2], strict=True))])
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_and_sparse_ones_are_refused():
    model = mlp()
    strategy = start(model)
    with pytest.raises(UsageError, match="part of a graph"):
        strategy.backward(loss_of(model, batch(0, 0)), create_graph=True)
    words = nn.Embedding(5, 2, sparse=True)
    strategy = start(words)
    with pytest.raises(UsageError, match="sparse=False"):
        strategy.backward(words(torch.tensor([1])).sum())
    words.weight.grad = None


@pytest.mark.ranks(3)
def test_cost_is_what_the_ledger_counts_and_what_is_held():
    for hook in ("none", "bf16", "fp16", "powersgd", "powersgd in fp16"):
        for buckets in (0.001, 25.0):
            check_cost(hook, buckets)


def check_cost(hook: str, buckets: float) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 30))
    optimizer = Adam(model.parameters())
    config = DdpConfig(
        bucket_mib=buckets,
        first_bucket_mib=buckets,
        hook=hook.removesuffix(" in fp16"),
        powersgd_dtype="fp16" if hook.endswith("in fp16") else "same",
        powersgd_rank=2,
        powersgd_start_step=0,
    )
    strategy = start(model, config, (optimizer,))
    cost = Ddp.cost(config, ModelSpec.of(model), strategy.run)
    for _ in range(2):
        strategy.run.traffic.clear()
        optimizer.zero_grad()
        strategy.backward(model(torch.randn(8, 40)).square().mean())
        optimizer.step()
    if strategy.run.world.rank == 0:
        assert strategy.run.traffic.sent() == cost.sent
    state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    assert cost.held["optimizer"] == state
    assert cost.held["parameters"] == sum(p.nbytes for p in model.parameters())
    assert cost.held["buffers"] == sum(b.nbytes for b in model.buffers())
    storages = {p.grad.untyped_storage().data_ptr(): p.grad for p in model.parameters()}
    flats = sum(grad.untyped_storage().nbytes() for grad in storages.values())
    if hook == "none":
        assert cost.held["gradients"] == flats
    else:
        assert cost.held["gradients"] > flats


@pytest.mark.ranks(1)
def test_only_an_optimizer_of_two_states_is_promised_to_count_steps():
    for momentum, states in ((0.0, 0), (0.9, 1)):
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
        strategy = start(model, SMALL, (optimizer,))
        strategy.backward(loss_of(model, batch(0, 0)))
        optimizer.step()
        kept = [value for entry in optimizer.state.values() for value in entry.values()]
        held = Ddp.cost(SMALL, ModelSpec.of(model, states=states), strategy.run).held
        assert held["optimizer"] == sum(value.nbytes for value in kept if value is not None)


@pytest.mark.parametrize("hook", ["bf16", "fp16", "powersgd in bf16"])
def test_compressed_training_still_learns_and_ranks_agree(hook: str):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    words = {"powersgd_dtype": "bf16"} if hook.endswith("in bf16") else {}
    kind = hook.removesuffix(" in bf16")
    config = DdpConfig(hook=kind, powersgd_rank=2, powersgd_start_step=2, **words)
    optimizer = SGD(model.parameters(), lr=0.5)
    strategy = start(model, config, (optimizer,))
    rank = strategy.run.world.rank
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(32, 16, generator=generator)
    targets = inputs.roll(1, 1).tanh()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        strategy.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    total = sum(parameter.double().sum() for parameter in model.parameters()).detach()
    both = torch.stack([total, -total])
    strategy.ranks.all_reduce(both, reduction="max").wait()
    assert both[0] == -both[1]


def test_powersgd_sends_later_what_it_could_not_send_at_once():
    """The mean over steps of what ranks get tends to the mean of their gradients.

    Every other step no rank has a gradient: what is kept must wait.
    """
    model = nn.Linear(12, 12, bias=False).double()
    other = nn.Linear(1, 1).double()
    config = DdpConfig(hook="powersgd", powersgd_rank=1, powersgd_start_step=0)
    strategy = start(nn.ModuleList([model, other]), config)
    seeds = [torch.Generator().manual_seed(rank) for rank in range(2)]
    gradients = [torch.randn(12, 12, generator=seed, dtype=torch.float64) for seed in seeds]
    mean, total, steps = sum(gradients) / 2, torch.zeros_like(model.weight), 60
    for _ in range(steps):
        model.zero_grad()
        strategy.backward((model.weight * gradients[strategy.run.world.rank]).sum())
        total += model.weight.grad
        model.zero_grad()
        strategy.backward(other.weight.sum())
        assert model.weight.grad is None
    assert (total / steps - mean).norm() < 0.2 * mean.norm()


# --- what rank 0 broadcasts: buffers ---


@pytest.mark.parametrize("policy", ["broadcast", "none"])
@pytest.mark.ranks(2)
def test_buffers_follow_rank_zero_after_a_backward(policy: str):
    model = nn.Sequential(nn.Embedding(20, 8), nn.BatchNorm1d(8))
    model.register_buffer("cache", torch.ones(3), persistent=False)
    strategy = start(model, DdpConfig(buffers=policy))
    world, traffic = strategy.run.world, strategy.run.traffic
    with torch.no_grad():
        model[1].running_mean.fill_(float(world.rank))
        model.cache.fill_(float(world.rank))
    traffic.clear()
    with torch.no_grad():
        model(torch.arange(4))  # no gradients are wanted: nothing is sent
    model.eval()(torch.arange(4))
    with strategy.accumulating():
        model.train()(torch.arange(4))
        loss, other = ((model(torch.arange(4)) * model.cache[:1]).sum() for _ in range(2))
    assert not traffic.entries()
    strategy.backward(loss)
    expected = 0.0 if policy == "broadcast" else float(world.rank)
    assert model.cache[0].item() == expected
    sent = sum(buffer.nbytes for buffer in model.buffers())
    after = {("dp", "broadcast"): sent} if policy == "broadcast" and world.rank == 0 else {}
    found = traffic.sent()
    assert {key: found[key] for key in found if key[1] == "broadcast"} == after
    strategy.backward(other)  # its graph has saved a buffer
