"""Whatever happens to a checkpoint directory, a whole one is at its place; the oldest go first."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.commit import complete, next_name, prune, sweep
from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.saving import Save
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Shard

WORLD = World()


@pytest.fixture(params=["one call", "two renames"])
def replacing(request, monkeypatch):
    """Whether the file system exchanges two names in one call; not all of them do."""
    if request.param == "two renames":
        monkeypatch.setattr(commit, "exchange", lambda one, other: False)
    return request.param


def save(directory, value, *, overwrite=False):
    tensor = torch.full((4,), float(value))
    shard = Shard("w", "", tensor, (4,), Part.whole((4,)))
    contents = Contents(models=[[shard]])
    Save(directory, WORLD, overwrite=overwrite).finish(contents)


def value_in(directory):
    return open_checkpoint(directory, WORLD).model(0).read("w")[0].item()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_overwrite_never_deletes_what_is_no_checkpoint(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("data", "file"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            save(tmp_path / name, 1, overwrite=True)
    assert (tmp_path / "data" / "precious").read_text() == "x"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", 1, overwrite=True)
    assert value_in(tmp_path / "empty") == 1


def test_missing_parents_are_made_and_links_are_followed(tmp_path):
    save(tmp_path / "a" / "b" / "ck", 1)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "ck")
    save(tmp_path / "link", 2, overwrite=True)
    assert value_in(tmp_path / "a" / "b" / "ck") == 2
    assert (tmp_path / "link").is_symlink()


def test_names_are_on_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        commit, "sync_directory", lambda path: synced.append((path, (tmp_path / "ck").exists()))
    )
    save(tmp_path / "ck", 1)
    (draft, before), *_, (parent, after) = synced
    assert (draft.parent, draft.name == "ck", before) == (tmp_path, False, False)
    assert (parent, after) == (tmp_path, True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_new_names_that_the_disk_does_not_keep_are_undone(
    tmp_path, monkeypatch, replacing, overwrite
):
    if overwrite:
        save(tmp_path / "ck", 1)

    def sync(path):
        if path == tmp_path:
            raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(commit, "sync_directory", sync)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path / "ck", 2, overwrite=overwrite)
    assert names(tmp_path) == ["ck"] * overwrite
    assert not overwrite or value_in(tmp_path / "ck") == 1


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


CALLS = [(os, "write"), (os, "fsync"), (os, "open"), (os, "unlink"), (os, "rmdir")]
CALLS += [(Path, "mkdir"), (Path, "rename"), (Path, "unlink")]


def killed_at_call(number, directory):
    """Save in this process, which dies at the given call of any that touch the disk."""
    calls = iter(range(1000))

    def counted(real):
        def call(*args, **options):
            return kill() if next(calls) == number else real(*args, **options)

        return call

    for owner, name in CALLS:
        setattr(owner, name, counted(getattr(owner, name)))
    save(directory, 2, overwrite=True)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only saves and dies
def test_killed_at_any_call_that_touches_the_disk(tmp_path, replacing):
    found = []
    for number in range(200):
        folder = tmp_path / str(number)
        save(folder / "ck", 1)
        given = (number, folder / "ck")
        process = multiprocessing.get_context("fork").Process(target=killed_at_call, args=given)
        process.start()
        process.join()
        # A script may look for the folder before it loads.
        assert (folder / "ck").exists() or replacing == "two renames"
        found.append(value_in(folder / "ck"))
        save(folder / "ck", 3, overwrite=True)
        assert value_in(folder / "ck") == 3
        assert names(folder) == ["ck"]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert number > 20
    assert found == sorted(found), "once the new one is there it stays"
    assert set(found) == {1, 2}


def test_a_save_puts_the_old_one_back_before_it_sweeps(tmp_path):
    save(tmp_path / "ck", 1)
    (tmp_path / "ck").rename(tmp_path / ".ck.old-0123456789abcdef")
    with pytest.raises(CheckpointError, match="already exists"):
        save(tmp_path / "ck", 2)
    assert value_in(tmp_path / "ck") == 1
    assert names(tmp_path) == ["ck"]


def test_only_leftovers_of_the_same_name_are_swept(tmp_path):
    keep = [".ck.tmp-", ".ck.tmp-xyz", ".other.tmp-0123456789abcdef", ".ck.new-01"]
    for name in [*keep, ".ck.tmp-0123456789abcdef"]:
        (tmp_path / name).mkdir()
    (tmp_path / ".ck.tmp-aa").symlink_to(tmp_path / ".ck.new-01")
    save(tmp_path / "ck", 1)
    assert names(tmp_path) == sorted([*keep, ".ck.tmp-aa", "ck"])


def test_names_count_up_from_the_highest(tmp_path):
    assert next_name(tmp_path / "none") == "checkpoint_0"
    for number in (0, 9, 10):
        save(tmp_path / f"checkpoint_{number}", 1)
    (tmp_path / "checkpoint_77").write_text("a file")
    (tmp_path / "checkpoint_x").mkdir()
    assert next_name(tmp_path) == "checkpoint_11"
    (tmp_path / "checkpoint_11").mkdir()
    assert complete(tmp_path)[0] == tmp_path / "checkpoint_10", "the highest whole one"
    with pytest.raises(CheckpointError, match="limit of at least 1"):
        prune(tmp_path, 0)


def test_prune_removes_the_oldest_by_number(tmp_path):
    for number in (1, 2, 9, 10):
        save(tmp_path / f"checkpoint_{number}", 1)
    (tmp_path / "checkpoint_11").mkdir()  # not whole: neither counted nor touched
    removed = prune(tmp_path, 2)
    assert [path.name for path in removed] == ["checkpoint_1", "checkpoint_2"]
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_11", "checkpoint_9"]
    assert prune(tmp_path, 5) == []


def test_remains_of_all_names_are_swept(tmp_path):
    sweep(tmp_path / "none")
    save(tmp_path / ".checkpoint_2.old-0123456789abcdef", 1)
    (tmp_path / "checkpoint_3").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"], "the only whole one goes back"
    assert complete(tmp_path) == [tmp_path / "checkpoint_2"]
    for name in (".checkpoint_0.old-0123456789abcdef", ".checkpoint_4.tmp-0123456789abcdef"):
        save(tmp_path / name, 1)  # a kill between a rename and the deletion: all of it is there
    (tmp_path / ".mine.tmp-0123456789abcdef").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == [".mine.tmp-0123456789abcdef", "checkpoint_2", "checkpoint_3"]
