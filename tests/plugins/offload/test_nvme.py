"""The store nvme beyond what every store owes: ranges, reserved room, memory, bad directories."""

import errno
import logging
import os
import shutil
import subprocess
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from drivetrain.errors import ConfigError, PreflightError, StorageError, UsageError
from drivetrain_offload import nvme as files
from drivetrain_offload.nvme import NvmeStore
from drivetrain_offload.options import NvmeConfig
from drivetrain_offload.tiles import aligned_empty


@pytest.fixture
def store(tmp_path):
    made = NvmeStore(NvmeConfig(path=str(tmp_path), request_mib=0.0625, threads=3, staging_mib=1))
    yield made
    made.close()


def filled(numel, seed=0):
    buffer = aligned_empty(numel)
    return buffer.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(seed)))


def test_reserved_tensors_are_zeros_at_fixed_places(store):
    store.reserve({"a": torch.empty(1025, device="meta"), "b": torch.empty(2, 3).bfloat16()})
    assert store.nbytes == 8192 + 4096
    assert torch.equal(store.fetch("a"), torch.zeros(1025))
    assert torch.equal(store.fetch("b"), torch.zeros(2, 3).bfloat16())
    store.put("a", torch.ones(1025))
    store.put("b", torch.ones(6))
    assert store.nbytes == 8192 + 4096
    assert torch.equal(store.fetch("a"), torch.ones(1025))
    with pytest.raises(UsageError, match=r"expected new keys, found \['a'\]"):
        store.reserve({"c": torch.empty(1), "a": torch.empty(1)})
    with pytest.raises(KeyError):
        store.fetch("c")


def test_fetched_tensors_are_the_callers_own_and_not_older_than_what_was_written(store):
    store.put("k", filled(3000))
    store.fetch("k").fill_(7)
    kept = store.fetch("k")
    assert kept.data_ptr() % 4096 == 0
    store.prefetch(["k"])
    store.write_from("k", filled(1024, seed=1), 1024, 2048).wait()
    expected = filled(3000)
    expected[1024:2048] = filled(1024, seed=1)
    assert torch.equal(store.fetch("k"), expected)
    assert torch.equal(kept, filled(3000))
    buffer = aligned_empty(2000).fill_(5.0)
    store.read_into("k", buffer, 1024, 2025).wait()  # a read may stop anywhere
    assert torch.equal(buffer[:1001], expected[1024:2025])
    assert (buffer[1001:] == 5).all()


def test_ranges_and_buffers_that_cannot_be(store):
    store.put("k", filled(3000))
    for start, stop, says in (
        (1, 3000, "expected a start that is a multiple of 1024 elements of torch.float32"),
        (0, 1000, "expected a stop that is a multiple of 1024 elements"),
        (0, 3001, "expected a range within 3,000 elements, found 0 to 3,001"),
        (2048, 1024, "expected a range within"),
    ):
        with pytest.raises(UsageError, match=says):
            store.write_from("k", aligned_empty(4096), start, stop)
    assert torch.equal(store.fetch("k"), filled(3000))
    for buffer in (aligned_empty(2999), aligned_empty(3000, torch.int32), aligned_empty(0)):
        with pytest.raises(UsageError, match="expected a buffer of one dim, torch.float32 and"):
            store.read_into("k", buffer)
    with pytest.raises(UsageError, match=r"aligned_empty\(\) makes such a buffer"):
        store.read_into("k", aligned_empty(3001)[1:])
    with pytest.raises(KeyError):
        store.read_into("gone", aligned_empty(1))


def test_copies_on_their_way_take_bounded_memory(store, monkeypatch):
    real, gate, started = os.pwritev, threading.Event(), threading.Event()
    monkeypatch.setattr(files.os, "pwritev", lambda *a: gate.wait(20) and real(*a))

    def puts():
        for index in range(6):
            store.put(str(index), filled(2**16, seed=index))  # 256 KiB each; 1 MiB may wait
            if index == 3:
                started.set()

    thread = threading.Thread(target=puts)
    thread.start()
    assert started.wait(20)
    thread.join(0.2)
    assert thread.is_alive()
    assert len(store._extents) == 5
    gate.set()
    thread.join()
    for index in range(6):
        assert torch.equal(store.fetch(str(index)), filled(2**16, seed=index))


def test_puts_that_fail_and_more_than_there_is_room_for(store, tmp_path, monkeypatch):
    """A failure is told by the next call."""
    before = store.nbytes
    huge = torch.empty(2**50, device="meta")
    room = rf"expected {2**52 + 4096:,} free bytes, found [\d,]+;"
    with pytest.raises(StorageError, match=room) as error:
        store.reserve({"huge": huge, "small": torch.empty(1)})
    assert str(tmp_path) in str(error.value)
    assert store.nbytes == before
    store.put("small", torch.ones(1))
    assert torch.equal(store.fetch("small"), torch.ones(1))
    monkeypatch.setattr(files.os, "pwritev", mock.Mock(side_effect=OSError(errno.EIO, "broken")))
    store.put("k", filled(10))
    for call in (lambda: store.fetch("k"), store.flush, lambda: store.put("k", filled(10))):
        with pytest.raises(StorageError, match="EIO") as caught:
            call()
        assert str(tmp_path) in str(caught.value)


def test_directories_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for path, error, says in (
        ("", ConfigError, "expected the path of a directory on a disk, found none"),
        (tmp_path / "gone", PreflightError, "gone: expected a directory, found nothing"),
        (tmp_path / "file", PreflightError, "file: expected a directory, found a file"),
    ):
        with pytest.raises(error, match=says):
            NvmeStore(NvmeConfig(path=str(path)))
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(PreflightError, match="this user can write to"):
        NvmeStore(NvmeConfig(path=str(tmp_path)))
    monkeypatch.undo()
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(files.os, "open", mock.Mock(side_effect=refused))
    with pytest.raises(PreflightError, match="found Read-only file system"):
        NvmeStore(NvmeConfig(path=str(tmp_path)))
    for name, value in (("request_mib", 0.3), ("threads", 0), ("staging_mib", 0.0)):
        with pytest.raises(ConfigError, match=f"{name}: expected"):
            NvmeConfig(path="/tmp", **{name: value})


def test_file_system_types(tmp_path, monkeypatch, caplog):
    """A tmpfs is warned of."""
    assert files.file_system(tmp_path)
    assert files.file_system(files.Path("/proc")) == "proc"
    mounts = [SimpleNamespace(mountpoint=str(tmp_path), fstype=kind) for kind in ("xfs", "ext4")]
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda **_: mounts)
    assert files.file_system(tmp_path / "inside") == "ext4"  # the later one hides the other
    monkeypatch.setattr(files, "file_system", lambda _: "tmpfs")
    with caplog.at_level(logging.WARNING):
        NvmeStore(NvmeConfig(path=str(tmp_path))).close()
    assert f"{tmp_path} is a tmpfs: what is kept there takes host memory" in caplog.text


# --- a small ext4 file system ---


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
