"""Channels between hosts: sums and gathers within each method's bound, what is kept back, bytes."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import prod

import pytest
import torch
from torch import Tensor

from drivetrain.collectives.channels import ReduceChannel
from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.links.linked import LinkedCommunicator, route_linked
from drivetrain.runtime.mesh import Mesh
from drivetrain.traffic import Traffic
from link_channels import (
    NUMEL,
    ROWS,
    TABLE,
    WEIGHT,
    are_equal,
    connected,
    gathered,
    gradients,
    kept_back,
    links_of,
    state_of,
    total,
    world_of,
)

HALF_STEP = {"bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
"""The largest error of one rounding, in units of the largest number of a block (or of itself)."""


def check_sums(
    hosts: str, method: str, dtype: torch.dtype = torch.float32, **options: object
) -> None:
    communicator = connected(hosts, links_of(method, options=options))
    channel = communicator.gradients_summed(Stretch.of(NUMEL, dtype, ROWS), "test")
    size, levels = communicator.size, len(set(hosts))
    far, results = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(3):
        flat = gradients(step, communicator.rank).to(dtype)
        channel(flat).wait()
        assert all(torch.equal(flat, other) for other in gathered(flat))
        exact = total(step, size)
        assert torch.allclose(flat[3500:3533].float(), exact[3500:3533], rtol=1e-6, atol=1e-6)
        assert torch.allclose(flat[-3:].float(), exact[-3:], rtol=1e-6, atol=1e-6)
        far += exact
        results += flat.float()
        if step == 0 and method in HALF_STEP:
            error = (2 if options else 1) * HALF_STEP[method]
            bound = error * (1 + levels) * 1.01 * exact.abs().max() * 2
            assert 0 < (flat - exact).abs().max() < bound
    if method != "bf16":  # what did not come is kept for the next step, down to rounding
        torch.testing.assert_close(results + kept_back(communicator), far, rtol=0, atol=2e-5)
        assert kept_back(communicator)[:3500].abs().max() > 0
    communicator.close()


BY_CHANCE = {"rounding": "stochastic", "feedback": False}
"""Options with which nothing but a count is kept."""


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_sums_over_hosts_of_several_ranks_and_over_four_hosts(hosts):
    for method in ("bf16", "int8", "int4", "onebit", "powersgd", "topk"):
        check_sums(hosts, method)


@pytest.mark.ranks(4)
def test_parts_are_summed_and_gathered_within_the_bound_and_alike():
    communicator = connected("aabb", links_of("int8", "int8"))
    whole = Stretch.of(NUMEL, torch.float32, ROWS)
    bounds = communicator.chunk(NUMEL)
    stretches = [[whole.cut(*each)] for each in bounds]
    reduce = communicator.gradients_scattered(lambda stretches=stretches: stretches, "test")
    gather = communicator.parameters_gathered(lambda stretches=stretches: stretches, "test")
    start, stop = bounds[communicator.rank]
    results, exact = torch.zeros(stop - start), torch.zeros(stop - start)
    for step in range(3):
        flat = gradients(step, communicator.rank)
        reduce([[flat[a:b]] for a, b in bounds]).wait()
        results += flat[start:stop]
        exact += total(step, 4)[start:stop]
    assert (results - exact).abs().max() > 0
    everyone = torch.zeros(NUMEL)
    everyone[start:stop] = results
    torch.testing.assert_close(
        torch.stack(gathered(everyone)).sum(0) + kept_back(communicator),
        sum(total(step, 4) for step in range(3)),
        rtol=0,
        atol=2e-5,
    )
    mine = gradients(9, 0)
    flat = torch.full_like(mine, -1)
    flat[start:stop] = mine[start:stop]
    gather([[flat[a:b]] for a, b in bounds], None).wait()
    assert 0 < (flat - mine).abs().max() < 1.01 * HALF_STEP["int8"] * mine.abs().max()
    assert torch.equal(flat[3500:3533], mine[3500:3533])
    assert all(torch.equal(flat, other) for other in gathered(flat))
    communicator.close()


@pytest.mark.ranks(4)
def test_updates_of_parameters_lose_nothing_for_good():
    for method in ("int8", "onebit", "powersgd", "topk", "bf16"):
        check_updates(method)


def check_updates(method: str) -> None:
    communicator = connected("aabb", links_of("exact", method))
    stretches = [
        [Stretch.of(NUMEL, torch.float32, ROWS).cut(*b)] for b in communicator.chunk(NUMEL)
    ]
    update = communicator.parameters_updated(lambda: stretches, "test")
    bounds, rank = communicator.chunk(NUMEL), communicator.rank
    before, after = gradients(0, 0), gradients(1, 0)
    flat = before.clone()
    mine, apart = slice(*bounds[rank]), []
    for _ in range(3):  # the same new values: each gather sends what the one before it left out
        update([[flat[a:b]] for a, b in bounds], lambda: flat[mine].copy_(after[mine])).wait()
        apart.append(float((flat - after).abs().mean()))
        assert torch.equal(flat[3500:3533], after[3500:3533])
        assert all(torch.equal(flat, other) for other in gathered(flat))
    assert 0 < apart[2] < apart[1] < apart[0] < float((before - after).abs().mean())
    communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_bytes_are_those_of_the_route(hosts):
    for method, options in (
        *((name, {}) for name in ("bf16", "int8", "int4", "onebit", "powersgd", "topk")),
        ("int4", {"rounding": "stochastic"}),
        ("int4", BY_CHANCE),
    ):
        parameters = "exact" if method in ("onebit", "powersgd", "topk") else method
        traffic, world = Traffic(), world_of(hosts)
        links = links_of(method, parameters, options=options)
        communicator = connected(hosts, links, traffic)
        route = route_linked(Mesh.plan({"dp": 4}, world), "dp", world, links)
        whole = Stretch.of(NUMEL, torch.float32, ROWS)
        bounds = communicator.chunk(NUMEL)
        stretches = [[whole.cut(*each)] for each in bounds]
        sum_channel = communicator.gradients_summed(whole, "test")
        reduce = communicator.gradients_scattered(lambda stretches=stretches: stretches, "test")
        gather = communicator.parameters_gathered(lambda stretches=stretches: stretches, "test")
        flat = torch.ones(NUMEL)
        parts = [[flat[a:b]] for a, b in bounds]
        for start, expected in (
            (partial(sum_channel, flat), route.gradients_summed(whole)),
            (partial(reduce, parts), route.gradients_scattered(stretches)),
            (partial(gather, parts, None), route.parameters_gathered(stretches)),
        ):
            traffic.clear()
            start().wait()
            assert Counter(traffic.sent()) == +expected
            far = sum(each for (axis, _), each in traffic.sent().items() if axis == "dp.far")
            assert far > 0
        kept = communicator.channels[:1]
        held = sum(
            each.nbytes
            for channel in kept
            for each in (
                *(errors for _, errors, _ in channel.reduction.feedback()),
                *(factor for _, factor in channel.reduction.factors()),
            )
        )
        assert held == route.kept_back(whole)
        if options == BY_CHANCE:
            spans = [span for channel in kept for span in channel.spans if span.is_matrix]
            assert held == 8 * len(spans)
        skipping = links_of(method, parameters, undoable=True, options=options)
        route = route_linked(Mesh.plan({"dp": 4}, world), "dp", world, skipping)
        assert route.kept_back(whole) == 2 * held
        communicator.close()


@pytest.mark.ranks(3)
def test_a_gradient_that_is_not_finite_reaches_all_ranks_and_leaves_all_errors_as_they_are():
    for method in ("int8", "powersgd", "topk", "onebit"):
        check_not_finite(method)
    check_not_finite("int4", BY_CHANCE)


def check_not_finite(method: str, options: Mapping[str, object] | None = None) -> None:
    communicator = connected("abc", links_of(method, options=options or {}))
    channel = communicator.gradients_summed(Stretch.of(NUMEL, torch.float32, ROWS), "test")
    first = gradients(0, communicator.rank)
    channel(first).wait()
    before = state_of(communicator)
    bad = gradients(1, communicator.rank)
    if communicator.rank == 1:
        bad[17] = float("nan")
    elif communicator.rank == 0:
        bad.mul_(1e30)  # beside such a gradient an error has no digits left
    channel(bad).wait()
    assert bad[17].isnan()
    assert are_equal(state_of(communicator), before)
    last = gradients(2, communicator.rank)
    channel(last).wait()
    assert last.isfinite().all()
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("method", "options"), [("powersgd", {}), ("int8", BY_CHANCE)])
def test_a_step_that_is_skipped_leaves_errors_factors_and_counts_as_they_were(method, options):
    links = links_of(method, undoable=True, warmup_steps=1, options=options)
    communicator = connected("ab", links)
    stretch = Stretch.of(NUMEL, torch.float32, ROWS)
    channels = [communicator.gradients_summed(stretch, name) for name in ("one", "two")]
    for step in range(2):
        for channel in channels:
            channel(gradients(step, communicator.rank)).wait()
        communicator.step_decided(taken=True)
    before = state_of(communicator)
    for step in (2, 3):  # as with micro-batches that are summed each
        for channel in channels:
            channel(gradients(step, communicator.rank)).wait()
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
    Stretch.of(prod(shape), torch.float32, [ParameterRow(name, shape, 0, 0)])
    for name, shape in (("weight", WEIGHT), ("table", TABLE))
)


class Alternating:
    """Sums some of two flat tensors, each a matrix, by a channel that replaces the one before."""

    def __init__(self, communicator: LinkedCommunicator) -> None:
        self._communicator = communicator
        self._channel: ReduceChannel | None = None
        self.apart: list[Tensor] = []

    def sum(self, step: int, *chosen: Stretch) -> None:
        """Sum made-up gradients; note how far each sum is from the exact one."""
        communicator, before = self._communicator, self._channel
        bounds = [communicator.chunk(each.numel) for each in chosen]
        stretches = [
            [each.cut(*edges[rank]) for each, edges in zip(chosen, bounds, strict=True)]
            for rank in range(communicator.size)
        ]
        self._channel = communicator.gradients_scattered(lambda: stretches, "test", before)
        flats = [gradients(step, communicator.rank)[: each.numel] for each in chosen]
        self._channel(
            [
                [flat[slice(*edges[rank])] for flat, edges in zip(flats, bounds, strict=True)]
                for rank in range(communicator.size)
            ]
        ).wait()
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
    communicator.gradients_scattered(
        lambda: [[TWO.cut(*edges)] for edges in communicator.chunk(TWO.numel)],
        "test",
        sums._channel,
    )
    assert torch.equal(kept_back(communicator)[3533:], before[3533:])
    (channel,) = communicator.channels
    assert channel.sums == 4  # as many as before: the table had no gradients in between
    for span, factor in channel.reduction.factors():
        assert torch.equal(factor, factors[span.name, span.first])
    communicator.close()
