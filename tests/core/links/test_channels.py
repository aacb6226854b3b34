"""Channels between hosts: sums and gathers within each method's bound, what is kept back, bytes."""

from collections import Counter
from functools import partial

import pytest
import torch

from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.links.linked import route_linked
from drivetrain.runtime.mesh import Mesh
from drivetrain.traffic import Traffic
from link_channels import (
    NUMEL,
    ROWS,
    TABLE,
    WEIGHT,
    connected,
    gathered,
    gradients,
    kept_back,
    links_of,
    total,
    world_of,
)

HALF_STEP = {"bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
"""The largest error of one rounding, in units of the largest number of a block (or of itself)."""


def check_sums(hosts: str, method: str, dtype: torch.dtype = torch.float32) -> None:
    communicator = connected(hosts, links_of(method))
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
            bound = HALF_STEP[method] * (1 + levels) * 1.01 * exact.abs().max() * 2
            assert 0 < (flat - exact).abs().max() < bound
    if method != "bf16":  # what did not come is kept for the next step, down to rounding
        torch.testing.assert_close(results + kept_back(communicator), far, rtol=0, atol=2e-5)
        assert kept_back(communicator)[:3500].abs().max() > 0
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["bf16", "int8", "int4", "powersgd", "topk"])
def test_sums_over_two_hosts_of_one_rank(method):
    check_sums("ab", method)


@pytest.mark.ranks(2)
def test_sums_of_double_precision():
    check_sums("ab", "int8", torch.float64)


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_sums_over_hosts_of_several_ranks_and_over_four_hosts(hosts):
    for method in ("bf16", "int8", "int4", "powersgd", "topk"):
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
@pytest.mark.parametrize("method", ["int8", "int4", "topk", "bf16"])
def test_updates_of_parameters_lose_nothing_for_good(method):
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
    for method in ("bf16", "int8", "int4", "powersgd", "topk"):
        parameters = "exact" if method in ("powersgd", "topk") else method
        traffic, links, world = Traffic(), links_of(method, parameters), world_of(hosts)
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
        held = sum(
            kept.errors.nbytes
            for channel in communicator.channels[:1]
            for kept in channel.reduction.feedback()
        )
        assert held == route.kept_back(whole) or method == "powersgd"  # it keeps factors, too
        communicator.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("method", ["int8", "powersgd", "topk"])
def test_a_gradient_that_is_not_finite_reaches_all_ranks_and_spoils_no_later_step(method):
    communicator = connected("abc", links_of(method))
    channel = communicator.gradients_summed(Stretch.of(NUMEL, torch.float32, ROWS), "test")
    first = gradients(0, communicator.rank)
    channel(first).wait()
    before = kept_back(communicator)
    bad = gradients(1, communicator.rank)
    if communicator.rank == 1:
        bad[17] = float("nan")
    channel(bad).wait()
    assert bad[17].isnan()
    torch.testing.assert_close(kept_back(communicator)[:2000], before[:2000], rtol=0, atol=1e-5)
    last = gradients(2, communicator.rank)
    channel(last).wait()
    assert last.isfinite().all()
    communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_errors_go_on_to_the_channels_that_come(hosts):
    communicator = connected(hosts, links_of("int4"))
    channel = communicator.gradients_summed(Stretch.of(NUMEL, torch.float32, ROWS), "before")
    flat = gradients(0, communicator.rank)
    channel(flat).wait()
    before = kept_back(communicator)
    assert before.abs().max() > 0
    communicator.renew_channels()
    # The other way round, so that each element is at another place, and perhaps of another rank.
    moved = ParameterRow("table", TABLE, 0, 0), ParameterRow("weight", WEIGHT, 0, 64 * 41)
    communicator.gradients_summed(Stretch.of(64 * 41 + 3500, torch.float32, moved), "after")
    torch.testing.assert_close(kept_back(communicator), before, rtol=0, atol=1e-6)
    communicator.close()


@pytest.mark.ranks(2)
def test_a_warm_up_is_exact_and_small_tensors_always_are():
    communicator = connected("ab", links_of("int4", warmup_steps=1))
    channel = communicator.gradients_summed(Stretch.of(NUMEL, torch.float32, ROWS), "test")
    exact = total(0, 2)
    for expected in (True, False):
        flat = gradients(0, communicator.rank)
        channel(flat).wait()
        assert torch.allclose(flat, exact, rtol=1e-6, atol=1e-6) is expected
    small = Stretch.of(60, torch.float32, [ParameterRow("small", (6, 10), 0, 0)])
    flat = gradients(0, communicator.rank)[:60].clone()
    communicator.gradients_summed(small, "small")(flat).wait()
    torch.testing.assert_close(flat, exact[:60])
    assert len(communicator.channels) == 1
    communicator.close()
