"""Errors, factors and counts that sums keep: in channels, between them, saved and loaded."""

import contextlib
import io
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.volume import FlatSlice, ParameterRow, ParameterSpan
from drivetrain.compression.communicator import LinkedCommunicator
from drivetrain.compression.compressor import Kept
from drivetrain.compression.error_feedback import LinkChannel, ParkedState, SavedLinks, take_kept
from drivetrain.shards import Shard
from link_channels import (
    NUMEL,
    WHOLE,
    connected,
    flat_slices_of,
    gradients,
    kept_back,
    links_of,
    parts_of,
    total,
)
from read_tensors import InMemory


class Saved(InMemory):
    """A checkpoint of the shards of all ranks, in memory, and the sum of all errors."""

    def __init__(self, mine: Iterator[Shard], total: Tensor) -> None:
        self.total = total
        everyone: list[list[Shard]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(mine))
        shards = [shard for each in everyone for shard in each]
        super().__init__({(shard.name, shard.state): shard.tensor for shard in shards})
        assert len(self.tensors) == len(shards)  # each key is one tensor


def channel_of(communicator: LinkedCommunicator, *, scattered: bool):
    if not scattered:
        channel = communicator.gradients_summed(WHOLE, "test")
        return lambda flat: channel(flat).wait()
    parts = communicator.gradients_scattered(lambda: flat_slices_of(communicator), "test")
    return lambda flat: parts(parts_of(communicator, flat)).wait()


def kept_after(hosts: str, method: str, *, scattered: bool) -> Saved:
    """Sum twice, and save; return the checkpoint."""
    communicator = connected(hosts, links_of(method, warmup_steps=1))
    channel = channel_of(communicator, scattered=scattered)
    for step in range(2):
        channel(gradients(step, communicator.rank))
    saved = Saved(communicator.kept(), kept_back(communicator))
    assert saved.total.abs().max() > 0
    communicator.close()
    return saved


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("method", ["int4", "powersgd"])
def test_errors_are_folded_over_other_hosts(method, scattered):
    for before, after in (("abcd", "aabb"), ("aabb", "abcd"), ("aabb", "aabb")):
        saved = kept_after(before, method, scattered=scattered)
        communicator = connected(after, links_of(method, warmup_steps=1))
        channel = channel_of(communicator, scattered=scattered)
        take_kept([communicator], saved, method)
        folded = kept_back(communicator)
        if method == "int4":  # a low-rank sum may have no matrix where a row is cut
            torch.testing.assert_close(folded, saved.total, rtol=0, atol=1e-5)
        if before == after:
            again = Saved(communicator.kept(), folded)
            assert again.tensors.keys() == saved.tensors.keys()
            assert all(torch.equal(again.tensors[key], saved.tensors[key]) for key in again.tensors)
        flat, exact = gradients(2, communicator.rank), total(2, 4)
        channel(flat)
        start, stop = communicator.chunk(NUMEL)[communicator.rank] if scattered else (0, NUMEL)
        assert not torch.allclose(flat[start:stop], exact[start:stop])  # no warm-up again
        communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scattered", [False, True])
def test_a_resumed_run_draws_what_the_saved_one_would_have_drawn(scattered):
    links = links_of("int4", options={"rounding": "stochastic", "feedback": False})
    communicator = connected("aabb", links)
    channel = channel_of(communicator, scattered=scattered)
    for step in range(2):
        channel(gradients(step, communicator.rank))
    saved = Saved(communicator.kept(), torch.empty(0))
    assert {int(count) for count in saved.tensors.values()} == {2}
    expected, repeated = gradients(2, communicator.rank), gradients(2, communicator.rank)
    channel(expected)
    channel(repeated)
    communicator.close()
    for hosts in ("aabb", "abcd"):
        communicator = connected(hosts, links)
        channel = channel_of(communicator, scattered=scattered)
        take_kept([communicator], saved, "int4")
        sums = [each.reduction for each in communicator.channels]
        counts = [int(count) for each in sums for _, count in each.factors()]
        assert counts
        assert max(counts) == 2
        found = gradients(2, communicator.rank)
        channel(found)
        assert torch.equal(found, expected) is (hosts == "aabb")
        assert not torch.equal(found, repeated)  # each sum has draws of its own
        communicator.close()


@pytest.mark.ranks(4)
def test_errors_go_on_under_another_method_and_that_is_said_once():
    saved = kept_after("aabb", "int4", scattered=True)
    communicator = connected("aabb", links_of("topk"))
    channel_of(communicator, scattered=True)
    with contextlib.redirect_stderr(io.StringIO()) as text:
        take_kept([communicator], saved, "topk")
        take_kept([], saved, "exact")
    torch.testing.assert_close(kept_back(communicator), saved.total, rtol=0, atol=1e-5)
    said = text.getvalue()
    if communicator.rank == 0:
        assert said.count("int4; this run goes on under topk, and the errors that were kept") == 1
        assert "goes on under exact, and the errors that were kept are left out" in said
    communicator.close()


@pytest.mark.ranks(4)
def test_a_warm_up_is_over_for_every_parameter_whatever_its_channel_holds_then():
    rows = [ParameterRow("one", (64, 64), 0, 0), ParameterRow("two", (64, 64), 0, 4096)]
    flat_slice = FlatSlice.of(8192, torch.float32, rows)
    communicator = connected("abcd", links_of("int4", warmup_steps=1))
    channel = communicator.gradients_summed(flat_slice, "both")
    for _ in range(2):
        channel(torch.ones(8192)).wait()
    saved = Saved(communicator.kept(), torch.empty(0))
    communicator.close()
    communicator = connected("aabb", links_of("int4", warmup_steps=1))
    communicator.gradients_summed(flat_slice, "a half of it, which is one of the two parameters")
    take_kept([communicator], saved, "int4")
    (channel,) = communicator.channels
    assert len(channel.spans) > 0
    assert channel.sums == 2
    communicator.close()


def test_a_host_that_keeps_no_errors_of_a_part_leaves_those_of_before_to_others():
    saved = {
        ("weight", f"links.error.int4.{host}.0"): torch.full((9,), 2.0**host) for host in range(3)
    }
    span, given = ParameterSpan("weight", 9, 3, 0, 0, 9), torch.zeros(9)
    for host in (0, 2):
        kept = Kept(span, torch.ones(9), without=1)
        reduction = SimpleNamespace(feedback=lambda kept=kept: [kept], factors=lambda: [])
        SavedLinks(InMemory(saved)).give(reduction, host, 3)
        given += kept.errors
    assert given.tolist() == [1 + 2 + 4] * 9


def test_the_factor_of_the_same_rows_comes_before_those_of_others():
    states = {f"links.factor.{first}": torch.full((8, 2), float(first)) for first in (0, 64, 128)}
    span, factor = ParameterSpan("weight", 192, 8, 128, 0, 64), torch.zeros(8, 2)
    reduction = SimpleNamespace(feedback=lambda: [], factors=lambda: [(span, factor)])
    saved = InMemory({("weight", state): values for state, values in states.items()})
    SavedLinks(saved).give(reduction, 0, 2)
    assert torch.equal(factor, states["links.factor.128"])


def test_the_warm_up_counts_the_sums_of_steps_that_were_taken():
    kept, sums = Kept(ParameterSpan("weight", 9, 3, 0, 0, 9), torch.zeros(9)), []
    reduction = SimpleNamespace(feedback=lambda: [kept], factors=lambda: [])
    warmed = LinkChannel(lambda tensors: sums.append("exact"), 3, undoable=True)
    warmed.take_method(reduction, [kept.span], lambda tensors: sums.append("approximate"))
    for summed, taken in ((1, True), (2, False), (2, True), (1, True)):
        for _ in range(summed):
            warmed(kept.errors)
        warmed.step_decided(taken=taken)
    assert sums == ["exact"] * 5 + ["approximate"]


def sum_of(first: int, errors: Tensor) -> SimpleNamespace:
    span = ParameterSpan("weight", 900, 30, first, 0, errors.numel())
    return SimpleNamespace(feedback=lambda: [Kept(span, errors)], factors=lambda: [])


def test_errors_that_a_new_sum_does_not_take_wait_at_their_places():
    parked, every = ParkedState(), torch.arange(900.0)
    parked.park(SimpleNamespace(reduction=sum_of(100, every[100:800]), spans=[], sums=0))
    taken, left = torch.zeros(300), torch.zeros(900)
    parked.give(sum_of(200, taken))
    for shard in parked.shards([], "int4", 0, counted=False):
        left[int(shard.state.rpartition(".")[2]) :][: shard.tensor.numel()] += shard.tensor
    assert torch.equal(taken, every[200:500])
    expected = torch.zeros(900)
    expected[100:200], expected[500:800] = every[100:200], every[500:800]
    assert torch.equal(left, expected)
