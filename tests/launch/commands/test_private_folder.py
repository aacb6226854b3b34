"""A launcher's private folders: whose are swept, and which stay."""

import tempfile

from drivetrain.runtime.world import memory_kept_mark
from drivetrain_launch.commands.launch import memory_folder, temporary_folder


def test_folders_of_other_launchers_stay_while_these_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as first:
        with temporary_folder() as second:
            assert first.is_dir()
        assert not second.exists()
        (first / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_ranks_want_to_keep_stays_until_the_next_launcher(tmp_path):
    with memory_folder(tmp_path) as kept:
        (kept / "0").mkdir()
        memory_kept_mark(kept / "0").touch()
    assert kept.is_dir()
    with memory_folder(tmp_path):
        assert not kept.exists()
