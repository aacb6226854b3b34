"""Several ranks write one checkpoint, any number reads it, and they fail together."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import manifest as tensorfile
from drivetrain.checkpoint.commit import together
from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.saving import Save
from drivetrain.errors import CheckpointError, CollectiveError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.saved_state import describe_difference
from drivetrain.shards import Shard
from drivetrain.testing.conformance.suite import cut_connections, is_supported

WHOLE = torch.arange(35, dtype=torch.float32).reshape(5, 7)


def flat_shards(world, state=""):
    """An uneven flat range on each rank."""
    cuts = [*[0, 3, 22][: world.size], 35]
    first, last = cuts[world.rank], cuts[world.rank + 1]
    part = Part((0, 0), (5, 7), (first, last))
    yield Shard("w", state, WHOLE.reshape(-1)[first:last], (5, 7), part)


def column_shards(world):
    """A column block on each rank, as tensor parallelism holds it."""
    width = -(-7 // world.size)
    first, last = min(7, world.rank * width), min(7, (world.rank + 1) * width)
    yield Shard("tp", "", WHOLE[:, first:last], (5, 7), Part((0, first), (5, last - first)))


def save(directory, world, **options):
    rank = world.rank
    contents = Contents(
        models=[[*flat_shards(world), *flat_shards(world, "0.m")], column_shards(world)],
        scalars=[{0: {"w": {"step": 4}, f"only.{rank}": {"step": rank}}}, {}],
        state={"epoch": 2},
        rank_state={"r": torch.tensor([rank])},
    )
    Save(directory, world, **options).finish(contents)


def check(directory, world):
    with open_checkpoint(directory, world) as found:
        first, second = found.model(0), found.model(1)
        assert torch.equal(first.read("w"), WHOLE)
        assert torch.equal(first.read("w", "0.m"), WHOLE)
        assert torch.equal(second.read("tp"), WHOLE)
        for shard in flat_shards(world):
            assert torch.equal(second.read("tp", part=shard.part), shard.tensor)
        for shard in column_shards(world):
            assert torch.equal(first.read("w", part=shard.part), shard.tensor)
        for rank in range(found.world_size):
            assert first.scalars(f"only.{rank}", 0) == {"step": rank}
            assert found.rank_state(rank)["r"].item() == rank
        assert first.scalars("w", 0) == {"step": 4}
        assert found.rank_state(found.world_size) is None
        assert found.state == {"epoch": 2}
        return found.world_size


def raises_the_same(world, message, work):
    with pytest.raises(CheckpointError, match=message) as caught:
        work()
    texts = [None] * world.size
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1


@pytest.mark.ranks(2)
def test_a_failure_on_one_rank_is_raised_on_both(tmp_path, monkeypatch):
    world = World.discover(cpu=True)
    save(tmp_path / "ck", world)
    walked = []

    def shards():
        for name in "abc":  # each shard is gathered: stopping early would hang the other rank
            dist.all_reduce(torch.ones(1))
            walked.append(name)
            part = Part.whole((1,)) if world.is_main else Part((0,), (0,))
            yield Shard(name, "", torch.ones(part.sizes), (1,), part)

    def fail(*_):
        raise OSError(5, "Input/output error", "the file")

    if world.rank == 1:
        monkeypatch.setattr(tensorfile.HashedFile, "write", fail)

    def work():
        Save(tmp_path / "ck", world, overwrite=True).finish(Contents(models=[shards()]))

    raises_the_same(world, "rank 1: Input/output error: the file", work)
    assert walked == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    monkeypatch.undo()
    assert check(tmp_path / "ck", world) == 2
    raises_the_same(world, "already exists", lambda: save(tmp_path / "ck", world))
    path = max((tmp_path / "ck").glob("model-1-*"))  # one rank looks at it
    dist.barrier()
    if world.is_main:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    dist.barrier()
    message = f"expected sha256 .*{path.name}"
    raises_the_same(world, message, lambda: open_checkpoint(tmp_path / "ck", world))


@pytest.mark.ranks(2)
def test_ranks_that_contradict_each_other(tmp_path):
    world = World.discover(cpu=True)

    def save_with(shards, scalars):
        Save(tmp_path / "ck", world).finish(Contents(models=[shards], scalars=scalars))

    shape = (2 + world.rank,)
    shard = Shard("w", "", torch.ones(1), shape, Part((world.rank,), (1,)))
    raises_the_same(world, "ranks disagree on 'w'", lambda: save_with([shard], [{}]))
    scalars = [{0: {"w": {"step": world.rank}}}]
    raises_the_same(world, r"ranks disagree on .*'step'.*rank 1", lambda: save_with([], scalars))
    whole = Shard("w", "", torch.ones(2), (2,), Part.whole((2,)))
    raises_the_same(world, "exactly once, found 4", lambda: save_with([whole], [{}]))
    value = torch.zeros(1, dtype=torch.complex128) if world.rank else torch.zeros(1)
    message = r"rank 1: the tensor .scalars\[0\].* has dtype torch.complex128, which .* cannot hold"
    raises_the_same(world, message, lambda: save_with([], [{0: {"w": {"s": value}}}]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
def test_ranks_that_load_different_checkpoints(tmp_path):
    world = World.discover(cpu=True)
    for turn in range(2):
        Save(tmp_path / f"{turn}", world).finish(Contents(models=[], state={"at": turn}))
    message = "cannot load a checkpoint: ranks disagree on the digest of its files: rank 0 has"
    raises_the_same(world, message, lambda: open_checkpoint(tmp_path / f"{world.rank}", world))
    verify = ("full", "none")[world.rank]
    raises_the_same(world, "verify", lambda: open_checkpoint(tmp_path / "0", world, verify=verify))


@pytest.mark.ranks(2)
def test_scalars_of_every_plain_kind_cross_ranks_exactly(tmp_path):
    world = World.discover(cpu=True)
    kinds = {
        "tensor": torch.tensor(4.5),
        "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "pair": (1, [None, True]),
        "nan": float("nan"),
        "by number": {7: -0.0, 2**70: "größe"},
    }
    scalars = [{0: {f"of rank {world.rank}": kinds, "of both": kinds}}]
    Save(tmp_path / "ck", world).finish(Contents(models=[[]], scalars=scalars))
    with open_checkpoint(tmp_path / "ck", world) as found:
        for name in ("of rank 0", "of rank 1", "of both"):
            assert_alike(found.model(0).scalars(name, 0), kinds)


def assert_alike(found, expected):
    torch.testing.assert_close(found["nan"], expected["nan"], equal_nan=True)
    for key in ("tensor", "empty", "transposed"):
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key])
    assert (found["pair"], found["by number"]) == (expected["pair"], expected["by number"])


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_an_error_within_the_timeout():
    world = World.discover(cpu=True)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    if world.is_main:
        message = r"save x on rank 0 at test_ranks\.py:\d+ failed .*rank 1 says nothing"
        with pytest.raises(CollectiveError, match=message):
            together(world, "save x", list, group)
    dist.barrier()  # rank 1 is alive, but silent, until rank 0 has given up


@pytest.mark.skipif(not is_supported(), reason="a rank cuts its own connections (Linux)")
@pytest.mark.ranks(2)
def test_a_rank_that_is_lost_in_a_save_is_no_error_of_the_disk(tmp_path):
    """Another start may go on: the exit code is that of a lost rank."""
    world = World.discover(cpu=True)
    save(tmp_path / "ck", world)
    if world.rank == 1:
        cut_connections()
        return
    with pytest.raises(CollectiveError, match="rank 1") as caught:
        save(tmp_path / "ck", world, overwrite=True)
    assert caught.value.exit_code == 5
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_differences_are_described():
    expected = {("a", ""): (2,), ("b", ""): (3, 4), ("c", "0.m"): (1,)}
    assert describe_difference(expected, dict(expected)) == ""
    text = describe_difference(expected, {("a", ""): (2,), ("b", ""): (4, 3), ("z", ""): (1,)})
    assert "expected 3 tensors, found 3 in the checkpoint" in text
    assert "1 missing from the checkpoint: 'c', optimizer state '0.m'" in text
    assert "1 in the checkpoint only: 'z'" in text
    assert "'b': expected (3, 4), found (4, 3)" in text
    many = {(f"w{i}", ""): (1,) for i in range(20)}
    text = describe_difference(many, {}, first=2)
    assert "20 missing from the checkpoint: 'w0', 'w1', and 18 more" in text
