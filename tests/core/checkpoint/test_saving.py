"""A checkpoint gives back what was saved, in any parts, and says what it does not have."""

from dataclasses import replace

import pytest
import torch

from drivetrain.checkpoint import saving
from drivetrain.checkpoint.encoding import Contents, Report, merge_scalars, write_common
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.saving import Save
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Reader, Shard

WORLD = World()


def whole(name, tensor, state=""):
    return Shard(name, state, tensor, tuple(tensor.shape), Part.whole(tensor.shape))


def save(directory, *models, **contents):
    Save(directory, WORLD).finish(Contents(models=models, **contents))


@pytest.fixture
def weight():
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


def test_everything_comes_back(tmp_path, weight):
    moments = whole("layer.weight", weight * 2, "0.exp_avg")
    state = {"epoch": 3, "schedulers": [{"last_lr": (0.1,), "milestones": {5: 1}}]}
    save(
        tmp_path / "ck",
        [whole("layer.weight", weight), whole("steps", torch.tensor(7)), moments],
        [whole("other", weight[0])],
        scalars=[{0: {"layer.weight": {"step": 7, "flag": None}}}, {}],
        state=state,
        rank_state={"random": torch.arange(5, dtype=torch.uint8)},
    )
    with open_checkpoint(tmp_path / "ck", WORLD) as found:
        first: Reader = found.model(0)
        assert (found.models, found.world_size, found.state) == (2, 1, state)
        keys = {("layer.weight", ""), ("steps", ""), ("layer.weight", "0.exp_avg")}
        assert set(first.keys()) == keys
        assert first.shape("layer.weight") == (4, 6)
        assert torch.equal(first.read("layer.weight"), weight)
        assert torch.equal(first.read("layer.weight", "0.exp_avg"), weight * 2)
        assert first.read("steps").shape == ()
        assert torch.equal(found.model(1).read("other"), weight[0])
        assert first.scalars("layer.weight", 0) == {"step": 7, "flag": None}
        assert first.scalars("layer.weight", 1) == first.scalars("steps", 0) == {}
        assert found.rank_state(0)["random"].tolist() == [0, 1, 2, 3, 4]
        assert found.rank_state(1) is None


def test_two_runs_that_save_into_one_folder_are_told_so(tmp_path, weight):
    first = saving.Save(tmp_path / "ck", WORLD)
    saving.Save(tmp_path / "ck", WORLD)  # takes the first one's draft for the remains of a kill
    said = "gone: if another run saves here, take one folder each"
    with pytest.raises(CheckpointError, match=said):
        first.finish(Contents(models=([whole("w", weight)],)))


def test_parts_in_several_forms_make_one_tensor(tmp_path, weight):
    def part(tensor, *where):
        return Shard("w", "", tensor, (4, 6), Part(*where))

    pieces = [
        part(weight[:, :2], (0, 0), (4, 2)),
        part(weight[:, 2:].reshape(-1)[:5], (0, 2), (4, 4), (0, 5)),
        part(weight[:, 2:].reshape(-1)[5:], (0, 2), (4, 4), (5, 16)),
    ]
    save(tmp_path / "ck", pieces)
    with open_checkpoint(tmp_path / "ck", WORLD) as found:
        read = found.model(0).read
        box = read("w", part=Part((1, 1), (3, 3)))
        flat = read("w", part=Part((0, 0), (4, 6), (5, 8)))
        assert torch.equal(read("w"), weight)
    box += 0  # what was read outlives the reader
    assert torch.equal(box, weight[1:, 1:4])
    assert flat.tolist() == [5, 6, 7]


def test_files_are_cut_at_the_limit(tmp_path, weight, monkeypatch):
    for limit, fresh in (("FILE_BYTES", False), ("FRESH_BYTES", True)):
        folder = tmp_path / limit
        names = [f"w{i}" for i in range(5)]
        shards = [replace(whole(n, weight + i), fresh=fresh) for i, n in enumerate(names)]
        with monkeypatch.context() as patch:
            patch.setattr(saving, limit, 200)
            save(folder, shards)
        assert len(list(folder.glob("model-0-weights-*"))) == 3  # 2 + 2 + 1 of 96 bytes
        found = open_checkpoint(folder, WORLD).model(0)
        assert all(torch.equal(found.read(n), weight + i) for i, n in enumerate(names))


def test_names_that_collide_or_are_reserved(tmp_path, weight):
    shards = [whole("__metadata__", weight[0]), whole("__metadata__#1", weight[1])]
    shards += [whole("0.m/w", weight[2], "0.n"), whole("w", weight[3], "0.n/0.m")]
    save(tmp_path / "ck", shards)
    found = open_checkpoint(tmp_path / "ck", WORLD).model(0)
    for shard in shards:
        assert torch.equal(found.read(shard.name, shard.state), shard.tensor)


def test_what_the_checkpoint_lacks(tmp_path, weight):
    save(tmp_path / "ck", [whole("layer.weight", weight)])
    found = open_checkpoint(tmp_path / "ck", WORLD)
    model, part = found.model(0), Part((0, 0), (4, 7))
    for call, message in (
        (lambda: model.read("layer.weigth"), r"lacks 'layer.weigth'; nearest .*: layer.weight"),
        (lambda: model.shape("layer.weight", "0.exp_avg"), r"optimizer state '0.exp_avg'"),
        (lambda: model.read("layer.weight", part=part), r"inside its shape \(4, 6\)"),
        (lambda: found.model(1), r"expected model 1 .* found 1 models"),
        (lambda: found.model(-1), r"expected model -1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()


def test_shards_that_make_no_tensor_are_refused(tmp_path):
    def piece(numel, first):
        return Shard("w", "", torch.ones(numel), (4,), Part((first,), (2,)))

    for shards, message in (
        ([piece(2, 0)], "its 4 elements .* found 2"),
        ([whole("w", torch.ones(2))] * 2, "its 2 elements .* found 4"),
        ([piece(3, 0)], "'w' has 3 of 4 elements"),
        ([piece(2, 3)], "'w' has 2 of 4 elements"),
        ([whole("w", torch.ones(2, dtype=torch.complex128))], "'w' has dtype torch.complex128"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path / "ck", shards)
        assert list(tmp_path.iterdir()) == []


def test_state_that_is_not_plain_is_refused(tmp_path, weight):
    with pytest.raises(CheckpointError, match=r"state\.objects\[1\]\.fn is a .*function"):
        save(tmp_path / "ck", [whole("w", weight)], state={"objects": [1, {"fn": print}]})
    with pytest.raises(CheckpointError, match=r"scalars\[0\].*is a builtins.set"):
        save(tmp_path / "ck", [whole("w", weight)], scalars=[{0: {"w": {"x": {1}}}}])
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_holds_what_one_rank_alone_knows(tmp_path):
    reports = [
        Report(models=[[]], aliases=[{"b": "a"}]),
        Report(models=[[]], aliases=[{"d": "c"}], finite=False),
        Report(models=[[]], aliases=[{}]),
    ]
    write_common(tmp_path, reports, Contents(models=[[]]))
    manifest = Manifest.read(tmp_path)
    assert manifest.aliases == ({"b": "a", "d": "c"},)
    assert not manifest.finite


def test_lists_of_ranks_are_as_long_as_each_other():
    one, other = ([{0: {"w": {"steps": steps}}}] for steps in ([1, 2], [1, 2, 3]))
    assert merge_scalars([one, one]) == one
    with pytest.raises(CheckpointError, match="ranks disagree on .*'steps'"):
        merge_scalars([one, other])


def test_ranks_with_equal_numbers_agree():
    def state(number, dtype=torch.float64):
        return [{0: {"w": {"factors": [torch.tensor([number, 1.0], dtype=dtype)]}}}]

    nan = float("nan")
    for one, other in ((0.0, -0.0), (nan, nan), (2.0, 2.0)):
        merge_scalars([state(one), state(other)])
    for other in (state(1.5), state(2.0, torch.float32), state(nan)):
        with pytest.raises(CheckpointError, match="ranks disagree on .*'factors'"):
            merge_scalars([state(2.0), other])
