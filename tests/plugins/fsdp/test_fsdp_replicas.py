"""Hybrid FSDP: rows inside of a group of ranks, replicas between groups, gradients in windows.

The conformance suite trains 2 x 2 ranks. Here windows are watched: what crosses between groups, and
when; what is forgotten, clipped, or there on one replica only; and replicas are equal bit by bit.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.testing.conformance.loops import in_fp32
from drivetrain.testing.conformance.suite import Twins, adamw, everyone, momentum
from drivetrain.testing.models import OUT, Case, numbers, squared_error
from stacks import Tower
from zero_stages import assert_freed, start

pytestmark = pytest.mark.ranks(4)

WINDOW = 3


class Net(Tower):
    """A tower with a frozen layer, and a second bias of the head, which some losses reach."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.requires_grad_(False)
        self.some = nn.Parameter(torch.randn(OUT, dtype=torch.float64))

    def forward(self, x, reached=True):
        x = super().forward(x)
        return x + self.some if reached else x


def net(ranks=range(4)):
    """Return a case whose loss reaches the second bias on some ranks only."""

    def loss(model, batch):
        return F.mse_loss(model(batch.inputs, batch.rank in ranks), batch.targets)

    return Case("net", Net, loss=loss)


def hybrid(window=1, *, config=None, mixed_precision=None, **options):
    strategy = {"name": "fsdp", "sharding": "hybrid", "shard_size": 2, "unit_from": 10, **options}
    others = {"config": config or {}, "mixed_precision": mixed_precision}
    return start(strategy, gradient_accumulation_steps=window, **others)


def placement_of(twins):
    return twins.accelerator.strategy_of(twins.model).placement


def sent(accelerator, axis):
    return sum(n for (name, _), n in accelerator.traffic.sent().items() if name == axis)


def check_gradients(twins):
    """Compare this rank's gradients with the same rows of the twin's gradient."""
    placement = placement_of(twins)
    for slot in placement:
        fragment = placement.fragment_of(slot)
        if fragment is None or not slot.owned_numel:
            continue
        theirs = twins.twin.get_parameter(slot.name).grad
        assert (fragment.grad is None) == (theirs is None), slot.name
        if theirs is not None:
            rows = slot.in_memory_order(theirs)[slice(*slot.owned)].view(fragment.shape)
            torch.testing.assert_close(
                fragment.grad, rows, rtol=1e-10, atol=1e-10, msg=f"gradient of {slot.name}"
            )


def check(twins):
    """Compare weights with the twin's; ranks that own the same rows own the same bits."""
    twins.check()
    shards = [flat.shard.tensor for unit in placement_of(twins).units for flat in unit.flats]
    states = [value for state in twins.optimizer.state.values() for value in state.values()]
    tensors = [value.clone() for value in shards + states if isinstance(value, torch.Tensor)]
    index = twins.accelerator.strategy_of(twins.model).ranks.sharing.rank
    told = everyone((index, tensors))
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


def test_replicas_hear_of_whole_windows_only():
    """Groups of two, of one, which hold everything and gather nothing, and of all ranks."""
    for options in ({}, {"accumulate": "local"}, {"shard_size": 1}, {"shard_size": 4}):
        accelerator = hybrid(WINDOW, **options)
        twins = Twins(accelerator, net(), adamw)
        far = options.get("shard_size") != 4
        for step in range(2):
            for micro in range(WINDOW):
                before = sent(accelerator, "dp.far")
                with accelerator.accumulate(twins.model):
                    twins.backward(WINDOW * step + micro)
                    crossed = sent(accelerator, "dp.far") - before
                    if accelerator.sync_gradients:
                        assert (crossed > 0) is far, options
                        finish_window(twins, WINDOW)
                    else:
                        assert crossed == 0, f"{crossed} bytes crossed inside of the window"
                        given = list(accelerator.strategy_of(twins.model).gradients())
                        assert not given or not far, "gradients before the window is over"
                        twins.optimizer.step()
                        twins.optimizer.zero_grad()
        assert_freed(twins)
        if "shard_size" in options:
            used = {name for (name, _), count in accelerator.traffic.sent().items() if count}
            assert used == ({"dp"} if not far else {"dp", "dp.far"})
            held = {slot.name: slot.owned_numel for slot in placement_of(twins)}
            whole = {name: p.numel() for name, p in twins.twin.named_parameters()}
            assert (held == whole) is far
        check(twins)


def test_gradients_on_one_replica_only():
    """On one group of ranks, in one micro-batch of a window; and on none: it does not move.

    Inside of a group ranks need each other, so what they reduce must be the same.
    """
    plain = net(())
    for ranks, accumulate in (({0, 1}, "reduce"), ({2, 3}, "local"), (set(), "reduce")):
        accelerator = hybrid(2, accumulate=accumulate)
        twins = Twins(accelerator, net(ranks), adamw)
        for micro in range(6):
            case = twins.case if micro in (0, 3, 4) else plain
            with accelerator.accumulate(twins.model):
                accelerator.backward(case.loss(twins.model, numbers(micro, twins.axis.rank)))
                for rank in range(4):
                    theirs = case.loss(twins.twin, numbers(micro, rank))
                    torch.autograd.backward(theirs / 4)
                if accelerator.sync_gradients:
                    finish_window(twins, 2)
        check(twins)


def test_what_waits_is_forgotten_or_scaled():
    """``zero_grad`` inside of a window, of all or some parameters; two backwards before a step."""
    for accumulate in ("reduce", "local"):
        accelerator = hybrid(accumulate=accumulate)
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
        check(twins)


def test_gradients_cross_in_low_precision():
    """Half the bytes between groups, sums of windows in fp32, and replicas with the same bits."""
    for low in ("bf16", "fp16"):
        crossed = {}
        for reduce in (low, "fp32"):
            others = {"mixed_precision": "fp16"} if low == "fp16" else {}  # which has a loss scale
            accelerator = hybrid(2, config={"dtypes": {"reduce": reduce}}, **others)
            twins = Twins(accelerator, in_fp32(Case("float", Net, loss=squared_error)))
            twins.tolerance = 2e-2 if others or reduce == low else 1e-5
            for micro in range(4):
                with accelerator.accumulate(twins.model):
                    twins.backward(micro)
                    if accelerator.sync_gradients:
                        for parameter in twins.twin.parameters():
                            if parameter.grad is not None:
                                parameter.grad /= 2
                        twins.step()
            crossed[reduce] = accelerator.traffic.sent()["dp.far", "all_reduce"]
            accelerator.backward(twins.loss(9))
            fragments = map(placement_of(twins).fragment_of, placement_of(twins))
            gradients = [f.grad for f in fragments if f is not None and f.grad is not None]
            assert {gradient.dtype for gradient in gradients} == {torch.float32}
            check(twins)
        assert 2 * crossed[low] == crossed["fp32"]
