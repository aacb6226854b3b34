"""Automatic names count up, the oldest go first, and only whole checkpoints count."""

import pytest
import torch

from drivetrain.checkpoint import Contents, latest, next_name, prune, save_checkpoint, sweep
from drivetrain.errors import CheckpointError
from drivetrain.runtime.world import World
from drivetrain.shards import Part, Shard


def save(directory):
    shard = Shard("w", "", torch.ones(1), (1,), Part.whole((1,)))
    save_checkpoint(directory, Contents(models=[[shard]]), world=World())


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_names_count_up_from_the_highest(tmp_path):
    assert next_name(tmp_path / "none") == "checkpoint_0"
    for number in (0, 9, 10):
        save(tmp_path / f"checkpoint_{number}")
    (tmp_path / "checkpoint_77").write_text("a file")
    (tmp_path / "checkpoint_x").mkdir()
    assert next_name(tmp_path) == "checkpoint_11"
    (tmp_path / "checkpoint_11").mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoint_10", "the highest whole one"
    with pytest.raises(CheckpointError, match="limit of at least 1"):
        prune(tmp_path, 0)


def test_latest_without_any(tmp_path):
    with pytest.raises(CheckpointError, match="found no folder of such a name"):
        latest(tmp_path / "none")
    (tmp_path / "checkpoint_3").mkdir()
    with pytest.raises(CheckpointError, match="found checkpoint_3"):
        latest(tmp_path)


def test_prune_removes_the_oldest_by_number(tmp_path):
    for number in (1, 2, 9, 10):
        save(tmp_path / f"checkpoint_{number}")
    (tmp_path / "checkpoint_11").mkdir()  # not whole: neither counted nor touched
    removed = prune(tmp_path, 2)
    assert [path.name for path in removed] == ["checkpoint_1", "checkpoint_2"]
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_11", "checkpoint_9"]
    assert prune(tmp_path, 5) == []


def test_remains_of_all_names_are_swept(tmp_path):
    sweep(tmp_path / "none")
    save(tmp_path / ".checkpoint_2.old-0123456789abcdef")
    (tmp_path / "checkpoint_3").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"], "the only whole one goes back"
    assert latest(tmp_path) == tmp_path / "checkpoint_2"
    for name in (".checkpoint_0.old-0123456789abcdef", ".checkpoint_4.tmp-0123456789abcdef"):
        save(tmp_path / name)  # a kill between a rename and the deletion: all of it is there
    (tmp_path / ".mine.tmp-0123456789abcdef").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == [".mine.tmp-0123456789abcdef", "checkpoint_2", "checkpoint_3"]
