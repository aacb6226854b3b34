"""Cuts into stages: exact against all cuts, even where it can be, and refused where it cannot."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.errors import ConfigError, UsageError
from drivetrain.model.trace import trace_model
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline import cut
from drivetrain_megatron.pipeline.cut import balanced, listed, profile, scaled_edges
from drivetrain_megatron.recording.phases import Dependency, Recording
from stacks import Residual, Stack, record


def recording(blocks, before=0, after=0, dependencies=()):
    between = (before, *([0] * (blocks - 1)), after)
    return Recording((None,) * blocks, (), {}, {}, between, tuple(dependencies), ())


def stage_costs(bounds, costs, before, after):
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    sums[0] += before
    sums[-1] += after
    return sums


def all_bounds(blocks, stages):
    for inner in itertools.combinations(range(1, blocks), stages - 1):
        yield (0, *inner, blocks)


def test_the_largest_stage_is_as_small_as_it_can_be():
    for seed in range(40):
        rand = random.Random(seed)
        blocks = rand.randint(1, 9)
        stages = rand.randint(1, blocks)
        costs = [rand.choice([1.0, 2.0, 3.5, rand.random() * 5]) for _ in range(blocks)]
        before, after = rand.random() * 3, rand.random() * 6
        cut = balanced(recording(blocks), stages, costs, before, after)
        found = stage_costs(cut.bounds, costs, before, after)
        every = [stage_costs(bounds, costs, before, after) for bounds in all_bounds(blocks, stages)]
        smallest = min(max(sums) for sums in every)
        assert max(found) == pytest.approx(smallest)
        even = min(sum(c * c for c in s) for s in every if max(s) <= smallest * (1 + 1e-9))
        assert sum(c * c for c in found) == pytest.approx(even)


def test_places_that_dependencies_close_are_not_used():
    kept = Dependency(2, 4, "argument 'skip' of block 'x'")
    for stages in (1, 2, 3, 4):
        cut = balanced(recording(6, dependencies=[kept]), stages, [1.0] * 6)
        assert {3, 4}.isdisjoint(cut.bounds)
    with pytest.raises(ConfigError, match=r"4 places.*found 3 \(\[1, 2, 5\]\).*'skip'"):
        balanced(recording(6, dependencies=[kept]), 5, [1.0] * 6)


def test_bounds_are_even_and_what_is_around_blocks_counts():
    costs = [7.0, 7.0, 4.0, 9.0, 1.0, 5.0]  # 7, 11, 15 has the least sum of squares
    assert balanced(recording(6), 3, costs).bounds == (0, 2, 4, 6)

    assert balanced(recording(4), 2, [0.0] * 4).bounds == (0, 2, 4)
    assert balanced(recording(8, after=0), 2, [1.0] * 8).bounds == (0, 4, 8)
    assert balanced(recording(8, after=4), 2, [1.0] * 8).bounds == (0, 6, 8)
    assert balanced(recording(8, before=4), 2, [1.0] * 8).bounds == (0, 2, 8)


def test_lists_of_blocks_and_of_first_blocks():
    assert listed(recording(7), 3, [0, 1, 4]).bounds == (0, 1, 4, 7)

    cut = listed(recording(7), 3, [3, 2, 2])
    assert (cut.bounds, cut.stages) == ((0, 3, 5, 7), 3)
    assert [list(cut.blocks(stage)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert list(cut.phases(2)) == [5, 6, 7]
    assert [cut.stage_of(phase) for phase in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]


def test_a_wrong_list_says_what_is_wrong_with_it():
    for layout, message in (
        ([4, 3], "3 stages.*which has 2"),
        ([3, 2, 1], "7 blocks in all.*sums to 6"),
        ([3, 4, 0], "a block for each stage"),
        ([0, 4, 4], "that grow"),
        ([0, 4, 7], "below 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            listed(recording(7), 3, layout)
    for stages in (0, 4):
        with pytest.raises(ConfigError, match=rf"between 1 and 3 stages.*3 blocks, found {stages}"):
            balanced(recording(3), stages, [1.0] * 3)
        with pytest.raises(ConfigError, match="between 1 and 3 stages"):
            listed(recording(3), stages, [1] * stages)


def uneven():
    """Return two small blocks, two of 32 times the work, and a head."""
    return Stack([Residual(64, hidden) for hidden in (64, 64, 2048, 2048)], last=nn.Linear(64, 16))


def test_work_is_that_of_the_matrix_products():
    found = record(uneven(), (torch.ones(10, 64),), {})
    assert found.costs() == [2 * 10 * 64 * h * 2 for h in (64, 64, 2048, 2048)]
    assert found.between == (0, 0, 0, 0, 2 * 10 * 64 * 16)
    assert balanced(found, 2).bounds == (0, 3, 4)


class Work(TorchDispatchMode):
    """A clock that goes with the matrix products, not with what else the machine does."""

    done = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.done += 2 * args[-1].shape[0] * result.numel()
        return result

    def perf_counter(self):
        return self.done


def test_measured_costs(monkeypatch):
    model, x = uneven(), torch.randn(256, 64)
    found = record(model, (x,), {})
    state = torch.get_rng_state()
    with Work() as clock:
        monkeypatch.setattr(cut, "time", clock)
        seconds = profile(model, trace_model(model, (x,), {}))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert seconds[0] == seconds[1], "one kind of block is measured once"
    product = 2 * 256 * 64 * 64
    assert seconds[0] == 5 * product  # the inputs of the first block need no gradient
    assert seconds[2] == 6 * 32 * product
    before, after = scaled_edges(found, seconds)
    assert before == 0
    assert 0 < after < seconds[2]
    assert model(x).shape == (256, 16)
    # Neither is a head of as much work as its numbers say next to blocks of other units.
    monkeypatch.setattr(cut, "profile", lambda *_: [1e-9] * 4)
    for how, bounds in (("cost", (0, 3, 4)), ("profile", (0, 2, 4)), ("uniform", (0, 2, 4))):
        assert cut.chosen_cut(MegatronConfig(pp=2, cut=how), model, found, None).bounds == bounds

    model = uneven().to("meta")
    trace = trace_model(model, (torch.ones(10, 64),), {})
    with pytest.raises(UsageError, match="meta device"):
        profile(model, trace)
