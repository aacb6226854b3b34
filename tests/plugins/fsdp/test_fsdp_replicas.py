"""Hybrid FSDP: rows inside of a group of ranks, replicas between groups, gradients in windows.

The conformance suite trains 2 x 2 ranks. Here windows are watched: what crosses between groups, and
when; what is forgotten, clipped, or there on one replica only; and replicas are equal bit by bit.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Accelerator
from drivetrain.testing.conformance.twins import Twins, adamw, everyone, momentum
from drivetrain.testing.models import OUT, WIDTH, Case, linear, numbers, squared_error
from towers import Block

HYBRID = {"name": "fsdp", "sharding": "hybrid", "shard_size": 2, "unit_from": 10}
WINDOW = 3


class Head(nn.Module):
    """A layer with a second bias, which only some ranks' losses reach."""

    def __init__(self):
        super().__init__()
        self.layer = linear(WIDTH, OUT)
        self.some = nn.Parameter(torch.randn(OUT, dtype=torch.float64))

    def forward(self, x, reached):
        x = self.layer(x)
        return x + self.some if reached else x


class Net(nn.Module):
    """Three blocks, a frozen layer, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.fixed = linear(WIDTH, WIDTH).requires_grad_(False)
        self.heads = nn.ModuleList([Head()])

    def forward(self, x, reached=True):
        for block in self.blocks:
            x = block(x)
        return self.heads[0](self.fixed(x), reached)


def on_replica(ranks):
    """Return a loss that reaches the second bias on some ranks only."""

    def loss(model, batch):
        return F.mse_loss(model(batch.inputs, batch.rank in ranks), batch.targets)

    return loss


def net(loss=squared_error):
    return Case(name="net", factory=Net, batch=numbers, loss=loss)


def start(window=1, **options):
    others = {name: options.pop(name) for name in ("config", "mixed_precision") if name in options}
    return Accelerator(
        strategy={**HYBRID, **options}, cpu=True, gradient_accumulation_steps=window, **others
    )


def sent(accelerator, axis):
    return sum(n for (name, _), n in accelerator.traffic.sent().items() if name == axis)


def gradients_of(twins):
    """Return this rank's gradients by name, with the same rows of the twin's gradient."""
    strategy = twins.accelerator.strategy_of(twins.model)
    found = {}
    for slot in strategy.placement:
        theirs = twins.twin.get_parameter(slot.name).grad
        fragment = strategy.placement.fragment_of(slot)
        if fragment is None or not slot.owned_numel:
            continue
        rows = None
        if theirs is not None:
            rows = slot.in_memory_order(theirs)[slice(*slot.owned)].view(fragment.shape)
        found[slot.name] = fragment.grad, rows
    return found


def check_gradients(twins):
    for name, (ours, theirs) in gradients_of(twins).items():
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)


def check_replicas(twins):
    """Ranks that own the same rows own the same bits, of states too."""
    strategy = twins.accelerator.strategy_of(twins.model)
    shards = [flat.shard.tensor.clone() for unit in strategy.placement.units for flat in unit.flats]
    states = [
        value
        for state in twins.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    told = everyone((strategy.ranks.sharing.rank, shards + states))
    for rank, (index, tensors) in enumerate(told):
        first = next(t for i, t in told if i == index)
        equal = [torch.equal(a, b) for a, b in zip(first, tensors, strict=True)]
        assert all(equal), f"rank {rank} differs from its replica"


def finish_window(twins, micros):
    """Check the gradients of a whole window, clip, and step both."""
    for parameter in twins.twin.parameters():
        if parameter.grad is not None:
            parameter.grad /= micros
    check_gradients(twins)
    norm = twins.accelerator.clip_grad_norm_(twins.model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-9, atol=0.0)
    assert len(set(everyone(norm.item()))) == 1, "ranks have different norms"
    twins.step()


@pytest.mark.parametrize("accumulate", ["reduce", "local"])
@pytest.mark.ranks(4)
def test_replicas_hear_of_whole_windows_only(accumulate):
    accelerator = start(WINDOW, accumulate=accumulate)
    twins = Twins(accelerator, net(), adamw)
    for step in range(3):
        for micro in range(WINDOW):
            before = sent(accelerator, "dp.far")
            with accelerator.accumulate(twins.model):
                twins.backward(WINDOW * step + micro)
                crossed = sent(accelerator, "dp.far") - before
                if accelerator.sync_gradients:
                    assert crossed > 0
                    finish_window(twins, WINDOW)
                else:
                    assert crossed == 0, f"{crossed} bytes crossed inside of the window"
                    given = accelerator.strategy_of(twins.model).gradients()
                    assert not list(given), "there are gradients before the window is over"
                    twins.optimizer.step()
                    twins.optimizer.zero_grad()
    twins.check()
    check_replicas(twins)
    accelerator.free_memory()


@pytest.mark.parametrize("accumulate", ["reduce", "local"])
@pytest.mark.ranks(4)
def test_gradients_on_one_replica_only(accumulate):
    """On one group of ranks, in one micro-batch of a window; and on none: it does not move.

    Inside of a group ranks need each other, so what they reduce must be the same.
    """
    for ranks in ({0, 1}, {2, 3}, set()):
        accelerator = start(2, accumulate=accumulate)
        twins = Twins(accelerator, net(on_replica(ranks)), adamw)
        plain = net(on_replica(set()))
        for step in range(4):
            for micro in range(2):
                case = twins.case if micro == step % 2 else plain
                with accelerator.accumulate(twins.model):
                    loss = case.loss(twins.model, numbers(2 * step + micro, twins.axis.rank))
                    accelerator.backward(loss)
                    for rank in range(4):
                        theirs = case.loss(twins.twin, numbers(2 * step + micro, rank))
                        torch.autograd.backward(theirs / 4)
                    if accelerator.sync_gradients:
                        finish_window(twins, 2)
        twins.check()
        check_replicas(twins)
        accelerator.free_memory()


@pytest.mark.ranks(4)
def test_what_waits_is_forgotten_or_scaled():
    """``zero_grad`` inside of a window, of all or some parameters; two backwards before a step."""
    for accumulate in ("reduce", "local"):
        accelerator = start(accumulate=accumulate)
        twins = Twins(accelerator, net(), momentum)
        for clear in (
            lambda model, optimizer: optimizer.zero_grad(),
            lambda model, optimizer: model.zero_grad(),
            lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        ):
            with accelerator.no_sync(twins.model):
                twins.backward(0)
            clear(twins.model, twins.optimizer)
            clear(twins.twin, twins.twin_optimizer)
            with accelerator.no_sync(twins.model):
                twins.backward(1)
            twins.backward(2)
            check_gradients(twins)
            twins.backward(3)  # once more, synchronized, onto gradients that are there
            check_gradients(twins)
            with accelerator.no_sync(twins.model):
                twins.backward(4)
            twins.backward(5)
            check_gradients(twins)
            finish_window(twins, 1)
        twins.check()
        check_replicas(twins)
        accelerator.free_memory()


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.ranks(4)
def test_gradients_cross_in_low_precision(low):
    """Half the bytes between groups, sums of windows in fp32, and replicas with the same bits."""
    crossed = {}
    for reduce in (low, "fp32"):
        others = {"mixed_precision": "fp16"} if low == "fp16" else {}  # which has a loss scale
        accelerator = start(2, config={"dtypes": {"reduce": reduce}}, **others)
        case = Case(
            name="float",
            factory=lambda: Net().float(),
            batch=lambda step, rank: numbers(step, rank)._replace(
                inputs=numbers(step, rank).inputs.float()
            ),
            loss=squared_error,
        )
        twins = Twins(accelerator, case)
        twins.tolerance = 2e-2 if others or reduce == low else 1e-5
        for step in range(3):
            for micro in range(2):
                with accelerator.accumulate(twins.model):
                    twins.backward(2 * step + micro)
                    if accelerator.sync_gradients:
                        for parameter in twins.twin.parameters():
                            if parameter.grad is not None:
                                parameter.grad /= 2
                        twins.step()
        twins.check()
        check_replicas(twins)
        crossed[reduce] = accelerator.traffic.sent()["dp.far", "all_reduce"]
        dtypes = {gradient.dtype for _, gradient in _with_gradients(twins)}
        assert dtypes == {torch.float32}
        accelerator.free_memory()
    assert 2 * crossed[low] == crossed["fp32"]


def _with_gradients(twins):
    twins.backward(9)
    placement = _slots(twins)
    for slot in placement:
        fragment = placement.fragment_of(slot)
        if fragment is not None and fragment.grad is not None:
            yield slot.name, fragment.grad


@pytest.mark.ranks(4)
def test_groups_of_one_and_of_all():
    """Pure replicas gather nothing and hold everything; one group is ``sharding: full``."""
    for size, axes in ((1, {"dp", "dp.far"}), (4, {"dp"})):
        accelerator = start(2, shard_size=size)
        twins = Twins(accelerator, net(), adamw)
        for step in range(2):
            for micro in range(2):
                with accelerator.accumulate(twins.model):
                    twins.backward(2 * step + micro)
                    if accelerator.sync_gradients:
                        finish_window(twins, 2)
        twins.check()
        check_replicas(twins)
        used = {name for (name, _), count in accelerator.traffic.sent().items() if count}
        assert used == axes
        held = {slot.name: slot.owned_numel for slot in _slots(twins)}
        whole = {name: p.numel() for name, p in twins.twin.named_parameters()}
        assert (held == whole) == (size == 1)
        assert not [unit for unit in _units(twins) if unit.live_bytes]
        accelerator.free_memory()


def _slots(twins):
    return twins.accelerator.strategy_of(twins.model).placement


def _units(twins):
    return _slots(twins).units
