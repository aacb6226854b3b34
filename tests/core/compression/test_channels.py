"""Channels between hosts: sums and gathers within each method's bound, what is kept back, bytes."""

from collections import Counter
from functools import partial
from math import prod

import pytest
import torch
from torch import Tensor

from drivetrain.collectives.communicator import ReduceChannel
from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.compression.communicator import LinkedCommunicator, route_linked
from drivetrain.cost import Traffic
from drivetrain.runtime.mesh import Mesh
from link_channels import (
    NUMEL,
    ROWS,
    TABLE,
    WEIGHT,
    WHOLE,
    are_equal,
    connected,
    flat_slices_of,
    gathered,
    gradients,
    kept_back,
    links_of,
    parts_of,
    state_of,
    total,
    world_of,
)

pytestmark = pytest.mark.ranks(4)

HALF_STEP = {"bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
"""The largest error of one rounding, in units of the largest number of a block (or of itself)."""


BY_CHANCE = {"rounding": "stochastic", "feedback": False}
"""Options with which nothing but a count is kept."""

METHODS = ("bf16", "int8", "int4", "onebit", "powersgd", "topk")


def alike(flat: Tensor) -> bool:
    return all(torch.equal(flat, other) for other in gathered(flat))


def test_sums_over_hosts_of_several_ranks_and_over_four_hosts():
    for hosts, method in [*(("aabb", each) for each in METHODS), ("abcd", "int4")]:
        communicator = connected(hosts, links_of(method))
        channel = communicator.gradients_summed(WHOLE, "test")
        far, results = torch.zeros(NUMEL), torch.zeros(NUMEL)
        for step in range(3):
            flat, exact = gradients(step, communicator.rank), total(step, 4)
            channel(flat).wait()
            assert alike(flat)
            for small in (slice(3500, 3533), slice(-3, None)):
                assert torch.allclose(flat[small], exact[small], rtol=1e-6, atol=1e-6)
            far += exact
            results += flat
            if step == 0 and method in HALF_STEP:
                levels = 1 + len(set(hosts))
                bound = HALF_STEP[method] * levels * 1.01 * exact.abs().max() * 2
                assert 0 < (flat - exact).abs().max() < bound, method
        if method != "bf16":  # what did not come is kept for the next step, down to rounding
            kept = kept_back(communicator)
            torch.testing.assert_close(results + kept, far, rtol=0, atol=2e-5)
            assert kept[:3500].abs().max() > 0
        communicator.close()


def test_parts_are_summed_and_gathered_within_the_bound_and_alike():
    communicator = connected("aabb", links_of("int8", "int8"))
    reduce = communicator.gradients_scattered(lambda: flat_slices_of(communicator), "test")
    gather = communicator.parameters_gathered(lambda: flat_slices_of(communicator), "test")
    start, stop = communicator.chunk(NUMEL)[communicator.rank]
    results, exact = torch.zeros(NUMEL), sum(total(step, 4) for step in range(3))
    for step in range(3):
        flat = gradients(step, communicator.rank)
        reduce(parts_of(communicator, flat)).wait()
        results[start:stop] += flat[start:stop]
    assert (results - exact)[start:stop].abs().max() > 0
    kept = kept_back(communicator)
    found = torch.stack(gathered(results)).sum(0) + kept
    torch.testing.assert_close(found, exact, rtol=0, atol=2e-5)
    mine = gradients(9, 0)
    flat = torch.full_like(mine, -1)
    flat[start:stop] = mine[start:stop]
    gather(parts_of(communicator, flat), None).wait()
    assert 0 < (flat - mine).abs().max() < 1.01 * HALF_STEP["int8"] * mine.abs().max()
    assert torch.equal(flat[3500:3533], mine[3500:3533])
    assert alike(flat)
    communicator.close()


def test_updates_of_parameters_lose_nothing_for_good():
    for method in ("int8", "onebit", "powersgd", "topk", "bf16"):
        communicator = connected("aabb", links_of("exact", method))
        slices = flat_slices_of(communicator)
        update = communicator.parameters_updated(lambda each=slices: each, "test")
        before, after = gradients(0, 0), gradients(1, 0)
        flat, apart = before.clone(), []
        mine = slice(*communicator.chunk(NUMEL)[communicator.rank])

        def step(flat=flat, mine=mine, after=after):
            flat[mine].copy_(after[mine])

        for _ in range(3):  # the same new values: each gather sends what the last one left out
            update(parts_of(communicator, flat), step).wait()
            apart.append(float((flat - after).abs().mean()))
            assert torch.equal(flat[3500:3533], after[3500:3533])
            assert alike(flat)
        start = float((before - after).abs().mean())
        assert 0 < apart[2] < apart[1] < apart[0] < start, method
        communicator.close()


def test_bytes_are_those_of_the_route():
    for hosts, method, options in (
        *(("aabb", name, {}) for name in METHODS),
        ("aabb", "int4", {"rounding": "stochastic"}),
        ("aabb", "int4", BY_CHANCE),
        ("abcd", "int8", {}),
        ("abcd", "powersgd", {}),
    ):
        parameters = "exact" if method in ("onebit", "powersgd", "topk") else method
        traffic, world = Traffic(), world_of(hosts)
        links = links_of(method, parameters, options=options)
        communicator = connected(hosts, links, traffic)
        route = route_linked(Mesh.plan({"dp": 4}, world), "dp", world, links)
        slices, flat = flat_slices_of(communicator), torch.ones(NUMEL)
        parts = parts_of(communicator, flat)
        sum_channel = communicator.gradients_summed(WHOLE, "test")
        reduce = communicator.gradients_scattered(lambda each=slices: each, "test")
        gather = communicator.parameters_gathered(lambda each=slices: each, "test")
        for start, expected in (
            (partial(sum_channel, flat), route.gradients_summed(WHOLE)),
            (partial(reduce, parts), route.gradients_scattered(slices)),
            (partial(gather, parts, None), route.parameters_gathered(slices)),
        ):
            traffic.clear()
            start().wait()
            assert Counter(traffic.sent()) == +expected, (hosts, method, options)
            assert any(axis == "dp.far" for axis, _ in traffic.sent())
        channel = communicator.channels[0]
        errors = [errors for _, errors, _ in channel.reduction.feedback()]
        factors = [factor for _, factor in channel.reduction.factors()]
        held = sum(each.nbytes for each in errors + factors)
        assert held == route.kept_back(WHOLE), (hosts, method, options)
        if options == BY_CHANCE:
            assert held == 8 * sum(span.is_matrix for span in channel.spans)
        skipping = links_of(method, parameters, undoable=True, options=options)
        route = route_linked(Mesh.plan({"dp": 4}, world), "dp", world, skipping)
        assert route.kept_back(WHOLE) == 2 * held
        communicator.close()


@pytest.mark.ranks(3)
def test_a_gradient_that_is_not_finite_reaches_all_ranks_and_leaves_all_errors_as_they_are():
    for method in ("int8", "powersgd", "topk", "onebit", "int4"):
        options = BY_CHANCE if method == "int4" else {}
        communicator = connected("abc", links_of(method, options=options))
        channel = communicator.gradients_summed(WHOLE, "test")
        first, bad, last = (gradients(step, communicator.rank) for step in range(3))
        channel(first).wait()
        before = state_of(communicator)
        if communicator.rank == 1:
            bad[17] = float("nan")
        elif communicator.rank == 0:
            bad.mul_(1e30)  # beside such a gradient an error has no digits left
        channel(bad).wait()
        assert bad[17].isnan()
        assert are_equal(state_of(communicator), before), method
        channel(last).wait()
        assert last.isfinite().all()
        communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("method", "options"), [("powersgd", {}), ("int8", BY_CHANCE)])
def test_a_step_that_is_skipped_leaves_errors_factors_and_counts_as_they_were(method, options):
    links = links_of(method, undoable=True, warmup_steps=1, options=options)
    communicator = connected("ab", links)
    channels = [communicator.gradients_summed(WHOLE, name) for name in ("one", "two")]

    def sums(step: int) -> None:
        for channel in channels:
            channel(gradients(step, communicator.rank)).wait()

    for step in range(2):
        sums(step)
        communicator.step_decided(taken=True)
    before = state_of(communicator)
    for step in (2, 3):  # as with micro-batches that are summed each
        sums(step)
    assert not are_equal(state_of(communicator), before)
    for _ in range(2):  # two optimizers
        communicator.step_decided(taken=False)
        assert are_equal(state_of(communicator), before)
        assert [channel.sums for channel in channels] == [2, 2]
    channels[0](gradients(4, communicator.rank)).wait()
    communicator.step_decided(taken=True)
    after = state_of(communicator)
    communicator.step_decided(taken=False)
    assert are_equal(state_of(communicator), after)
    assert not are_equal(after, before)
    communicator.close()


# --- other gradients from step to step ---

ONE, TWO = (
    FlatSlice.of(prod(shape), torch.float32, [ParameterRow(name, shape, 0, 0)])
    for name, shape in (("weight", WEIGHT), ("table", TABLE))
)


class Alternating:
    """Sums some of two flat tensors, each a matrix, by a channel that replaces the one before."""

    def __init__(self, communicator: LinkedCommunicator) -> None:
        self._communicator = communicator
        self._channel: ReduceChannel | None = None
        self.apart: list[Tensor] = []

    def sum(self, step: int, *chosen: FlatSlice) -> None:
        """Sum made-up gradients; note how far each sum is from the exact one."""
        communicator, before = self._communicator, self._channel
        bounds = [communicator.chunk(each.numel) for each in chosen]
        slices = [
            [each.cut(*edges[rank]) for each, edges in zip(chosen, bounds, strict=True)]
            for rank in range(communicator.size)
        ]
        self._channel = communicator.gradients_scattered(lambda: slices, "test", before)
        flats = [gradients(step, communicator.rank)[: each.numel] for each in chosen]
        parts = [
            [flat[slice(*edges[rank])] for flat, edges in zip(flats, bounds, strict=True)]
            for rank in range(communicator.size)
        ]
        self._channel(parts).wait()
        mine = slice(*bounds[0][communicator.rank])
        exact = total(step, communicator.size)
        self.apart.append((exact[: flats[0].numel()] - flats[0])[mine])


@pytest.mark.ranks(2)
@pytest.mark.complete
@pytest.mark.parametrize("method", ["int4", "powersgd"])
def test_errors_factors_and_warm_up_go_on_when_other_gradients_are_sent(method):
    communicator = connected("ab", links_of(method, warmup_steps=2))
    sums = Alternating(communicator)
    for step, chosen in enumerate([(ONE, TWO), (ONE,), (ONE, TWO), (ONE, TWO)]):
        sums.sum(step, *chosen)
    assert [bool(each.abs().max() > 1e-3) for each in sums.apart] == [False, False, True, True]
    (channel,) = communicator.channels
    assert channel.sums == 4
    before = kept_back(communicator)
    factors = {(s.name, s.first): q.clone() for s, q in channel.reduction.factors()}
    assert all(before[row.start : row.start + 2000].abs().max() > 0 for row in ROWS[::2])
    saved = {(shard.name, shard.state): shard.tensor.clone() for shard in communicator.kept()}
    sums.sum(4, ONE)
    waiting = {(s.name, s.state): s.tensor for s in communicator.kept() if s.name == "table"}
    errors = [key for key in waiting if ".error." in key[1]]
    assert errors
    assert all(torch.equal(waiting[key], saved[key]) for key in errors)
    sums.sum(5, ONE)
    two = [[TWO.cut(*edges)] for edges in communicator.chunk(TWO.numel)]
    communicator.gradients_scattered(lambda: two, "test", sums._channel)
    assert torch.equal(kept_back(communicator)[3533:], before[3533:])
    (channel,) = communicator.channels
    assert channel.sums == 4  # as many as before: the table had no gradients in between
    for span, factor in channel.reduction.factors():
        assert torch.equal(factor, factors[span.name, span.first])
    communicator.close()
