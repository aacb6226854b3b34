"""A small ext4 file system: a full disk is known before the first step, and is left as it was."""

import shutil
import subprocess

import pytest
import torch

from drivetrain.errors import StorageError
from drivetrain_offload import nvme as files
from drivetrain_offload.nvme import NvmeStore
from drivetrain_offload.options import NvmeConfig

MIB = 2**20


def free(place):
    return shutil.disk_usage(place).free


def test_too_little_room_is_told_with_numbers(small_disk):
    store, before = NvmeStore(NvmeConfig(path=str(small_disk))), free(small_disk)
    with pytest.raises(StorageError, match=rf"expected {64 * MIB:,} free bytes, found {before:,};"):
        store.reserve({"k": torch.empty(16 * MIB, device="meta")})
    with pytest.raises(StorageError, match=r"disk: expected 67,108,864 free bytes"):
        store.put("k", torch.zeros(16 * MIB))
    assert free(small_disk) == before
    store.put("k", torch.ones(MIB))
    store.flush()
    assert free(small_disk) <= before - 4 * MIB + 4096  # one block was there from the start
    assert torch.equal(store.fetch("k"), torch.ones(MIB))
    store.close()
    assert free(small_disk) >= before


def test_a_disk_that_another_process_fills_and_a_read_only_one(small_disk, monkeypatch):
    """The disk itself says that it is full; room that was taken stays taken."""
    store, before = NvmeStore(NvmeConfig(path=str(small_disk))), free(small_disk)
    store.reserve({"k": torch.empty(MIB, device="meta")})
    with monkeypatch.context() as patch:
        patch.setattr("drivetrain_offload.nvme.check_room", lambda *_: None)
        full = r"expected 67,108,864 free bytes, found [\d,]+; make"
        with pytest.raises(StorageError, match=full):
            store.put("big", torch.zeros(16 * MIB))
    assert free(small_disk) >= before - 4 * MIB - 2 * 4096
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "other").write_bytes(bytes(free(small_disk) + MIB))
    store.put("k", torch.ones(MIB))
    store.flush()
    assert torch.equal(store.fetch("k"), torch.ones(MIB))
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(files.PreflightError, match="that this user can write to"):
        NvmeStore(NvmeConfig(path=str(small_disk)))
