"""One object to a file and back; loading runs no code."""

import os
import pickle

import pytest
import torch

from drivetrain.checkpoint import load, save
from drivetrain.errors import CheckpointError


def test_round_trip(tmp_path):
    for safe, name in ((True, "f.safetensors"), (False, "f.pt")):
        path = tmp_path / name
        save({"a": torch.ones(2, 3).T, "b": torch.tensor(1)}, path, safe_serialization=safe)
        save({"a": torch.ones(2, 3).T, "b": torch.tensor(2)}, path, safe_serialization=safe)
        found = load(path)
        assert found["a"].shape == (3, 2)
        assert found["b"].item() == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_safetensors_hold_only_tensors(tmp_path):
    for obj in ([torch.ones(1)], {"a": 1}, {1: torch.ones(1)}):
        with pytest.raises(CheckpointError, match="for safe_serialization, found"):
            save(obj, tmp_path / "f", safe_serialization=True)
    assert list(tmp_path.iterdir()) == []


def test_failing_save_keeps_the_old_file(tmp_path):
    save([1], tmp_path / "f")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        save(lambda: 1, tmp_path / "f")
    assert load(tmp_path / "f") == [1]
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save([1], tmp_path / "none" / "f")


class Evil:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def test_loading_runs_no_code(tmp_path):
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil(tmp_path / "canary1")))
    torch.save(Evil(tmp_path / "canary2"), tmp_path / "evil2.pt")
    for name in ("evil.pt", "evil2.pt"):
        with pytest.raises(CheckpointError, match="never loaded because that runs code"):
            load(tmp_path / name)
    assert not list(tmp_path.glob("canary*"))


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointError, match="there is no file"):
        load(tmp_path / "none")
    for name in ("f.pt", "f.safetensors"):
        (tmp_path / name).write_bytes(b"\xff" * 100)
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name)
