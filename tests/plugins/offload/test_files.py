"""The file under the store nvme: alignment, order, and what the disk may answer."""

import errno
import itertools
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from drivetrain.errors import StorageError, UsageError
from drivetrain_offload import nvme as files
from drivetrain_offload.nvme import DiskFile, Transfer
from drivetrain_offload.options import ALIGNMENT
from drivetrain_offload.tiles import AlignedPool, aligned_empty


def refuse_direct(monkeypatch):
    """Let every file system refuse O_DIRECT, as some network file systems do."""
    real = files.fcntl.fcntl

    def fcntl(fd, command, argument=0):
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(files.fcntl, "fcntl", fcntl)


@pytest.fixture(params=["direct", "buffered"])
def file(request, tmp_path, monkeypatch):
    if request.param == "buffered":
        refuse_direct(monkeypatch)
    made = DiskFile(tmp_path, request_bytes=2 * ALIGNMENT, threads=4)
    if request.param == "direct" and not made.direct:
        made.close()
        pytest.skip(f"the file system of {tmp_path} refuses O_DIRECT")
    assert made.direct == (request.param == "direct")
    made.grow(64 * ALIGNMENT)
    yield made
    made.close()


def numbers(nbytes, seed=0):
    buffer = aligned_empty(nbytes, torch.uint8)
    buffer.copy_(torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(seed)))
    return buffer


def test_any_length_at_aligned_offsets_and_zeros_where_it_grows(file):
    for nbytes in (0, 1, 4095, 4096, 4097, 50_000):
        data, back = numbers(nbytes), numbers(nbytes + 9, seed=1)
        after = back[nbytes:].clone()
        file.write(ALIGNMENT, data).wait()
        file.forget()
        file.read(ALIGNMENT, back[:nbytes]).wait()
        assert torch.equal(back[:nbytes], data)
        assert torch.equal(back[nbytes:], after)
    data, back = numbers(4096), numbers(3 * 4096)
    file.write(63 * ALIGNMENT, data).wait()
    file.grow(100 * ALIGNMENT)
    file.read(63 * ALIGNMENT, back).wait()
    assert torch.equal(back[:4096], data)
    assert not back[4096:].any()
    file.read(30 * ALIGNMENT, back).wait()
    assert not back.any()


def test_the_same_bytes_in_order_of_submission(file, monkeypatch):
    real, first = os.pwritev, threading.Event()

    def slow(fd, views, at):
        if not first.is_set():
            first.set()
            time.sleep(0.1)
        return real(fd, views, at)

    monkeypatch.setattr(files.os, "pwritev", slow)
    back = aligned_empty(40_000, torch.uint8)
    file.write(0, numbers(40_000, seed=1))
    file.write(4096, numbers(4096, seed=2))
    read = file.read(0, back)
    file.write(0, numbers(4096, seed=3))
    read.wait()
    assert torch.equal(back[:4096], numbers(40_000, seed=1)[:4096])
    assert torch.equal(back[4096:8192], numbers(4096, seed=2))
    assert torch.equal(back[8192:], numbers(40_000, seed=1)[8192:])
    file.read(0, back).wait()
    assert torch.equal(back[:4096], numbers(4096, seed=3))


def test_transfers_conflict_where_they_share_bytes_that_one_changes():
    ranges = list(itertools.combinations(range(5), 2))
    for one, other, first, second in itertools.product(ranges, ranges, *[(False, True)] * 2):
        a, b = (
            Transfer([], start * ALIGNMENT, stop * ALIGNMENT, writes=writes)
            for (start, stop), writes in ((one, first), (other, second))
        )
        shared = set(range(*one)) & set(range(*other))
        assert a.conflicts(b) is bool(shared and (first or second)), (one, other)


def test_several_requests_are_in_flight_and_done_when_their_bytes_are_there(file, monkeypatch):
    real, gate, meeting = os.preadv, threading.Event(), threading.Barrier(4, timeout=300)

    def together(fd, views, at):
        gate.wait(20)
        meeting.wait()  # breaks unless four requests come at once
        return real(fd, views, at)

    monkeypatch.setattr(files.os, "preadv", together)
    read = file.read(0, aligned_empty(8 * 2 * ALIGNMENT, torch.uint8))
    assert not read.done()
    gate.set()
    read.wait()
    assert read.done()


def test_less_at_once_is_continued(file, monkeypatch):
    """A part of a block is moved again."""
    real_read, real_write, odd = os.preadv, os.pwritev, iter([5000, 4097])

    def little(fd, views, at):
        return real_read(fd, [views[0][: max(4096, len(views[0]) // 2)]], at)

    def partly(fd, views, at):
        return min(real_write(fd, views, at), next(odd, 4096))

    monkeypatch.setattr(files.os, "pwritev", partly)
    monkeypatch.setattr(files.os, "preadv", little)
    data, back = numbers(30_000), aligned_empty(30_000, torch.uint8)
    file.write(0, data).wait()
    file.read(0, back).wait()
    assert torch.equal(back, data)


def test_a_failed_write_ends_everything(file, tmp_path, monkeypatch):
    real = os.pwritev

    def fail(fd, views, at):
        if at == 2 * ALIGNMENT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, views, at)

    monkeypatch.setattr(files.os, "pwritev", fail)
    write = file.write(0, numbers(6 * ALIGNMENT))
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        write.wait()
    assert str(tmp_path) in str(caught.value)
    data = numbers(10)
    for call in (file.flush, lambda: file.read(0, data), lambda: file.write(0, data)):
        with pytest.raises(StorageError, match=r"a write failed before: .*write 8,192 bytes"):
            call()


def test_a_failed_read_is_its_own(file, monkeypatch):
    real, broken = os.preadv, [0]

    def fail(fd, views, at):
        if at in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, at)

    monkeypatch.setattr(files.os, "preadv", fail)
    with pytest.raises(StorageError, match=r"expected to read 4,096 bytes .*EIO: Input/output"):
        file.read(0, numbers(4096)).wait()
    file.read(ALIGNMENT, numbers(4096)).wait()
    file.flush()
    os.ftruncate(file._fd, 3 * ALIGNMENT)
    read = file.read(2 * ALIGNMENT, aligned_empty(2 * ALIGNMENT, torch.uint8))
    expected = "expected to read 8,192 bytes at offset 8,192 .* found that 4,096 could be;"
    with pytest.raises(StorageError, match=expected):
        read.wait()


def test_a_failed_sync_of_the_page_cache(tmp_path, monkeypatch):
    refuse_direct(monkeypatch)
    file = DiskFile(tmp_path, request_bytes=4096, threads=1)
    file.grow(4096)
    monkeypatch.setattr(files.os, "fdatasync", mock.Mock(side_effect=OSError(errno.EIO, "")))
    with pytest.raises(StorageError, match="EIO"):
        file.flush()
    with pytest.raises(StorageError, match="failed before"):
        file.write(0, numbers(1))
    file.close()


def test_what_is_not_aligned_is_refused(file):
    buffer = aligned_empty(9000, torch.uint8)
    for offset, part in ((1, buffer), (0, buffer[1:]), (0, buffer[512:])):
        with pytest.raises(UsageError, match="multiples of 4096"):
            file.read(offset, part)
    with pytest.raises(UsageError, match="contiguous host tensor"):
        file.write(0, buffer[::2])
    with pytest.raises(UsageError, match="within the 262,144 of the file"):
        file.write(62 * ALIGNMENT, buffer)
    file.close()
    with pytest.raises(UsageError, match="found a closed one"):
        file.read(0, buffer)


def test_a_name_goes_at_once_or_at_the_end_and_buffered_is_said_once(tmp_path, monkeypatch, caplog):
    """Where a file system makes no files without a name."""
    real = os.open

    def opened(path, flags, *more, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(files.os, "open", opened)
    refuse_direct(monkeypatch)
    for _ in range(2):
        file = DiskFile(tmp_path, request_bytes=4096, threads=1)
        assert list(tmp_path.iterdir()) == []
        file.grow(8192)
        file.write(0, numbers(8192)).wait()
        file.close()
    assert caplog.text.count("the file system refuses O_DIRECT") == 1

    def busy(path, missing_ok=False):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as context:
        context.setattr(files.Path, "unlink", busy)
        file = DiskFile(tmp_path, request_bytes=4096, threads=1)
    (name,) = tmp_path.iterdir()
    assert "stays after kill -9" in caplog.text
    assert name.name in caplog.text
    file.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_the_first_block_tells(tmp_path, monkeypatch, number):
    """Some file systems take the flag and refuse requests; a broken disk is told from them."""
    real, refusals = os.pwritev, iter([number])

    def refuse(fd, views, at):
        for answer in refusals:
            raise OSError(answer, os.strerror(answer))
        return real(fd, views, at)

    monkeypatch.setattr(files.os, "pwritev", refuse)
    if number == errno.EIO:
        with pytest.raises(StorageError, match=r"write and read 4,096 bytes .*EIO"):
            DiskFile(tmp_path, request_bytes=4096, threads=1)
        return
    file = DiskFile(tmp_path, request_bytes=4096, threads=1)
    assert not file.direct
    assert not files.fcntl.fcntl(file._fd, files.fcntl.F_GETFL) & os.O_DIRECT
    file.grow(8192)
    file.write(0, numbers(5000)).wait()
    file.close()


def test_a_pool_hands_memory_out_again_when_no_tensor_lies_in_it():
    pool = AlignedPool(page_locked=False, spare=1)
    first = pool.take(5000)
    assert (first.numel(), first.data_ptr() % ALIGNMENT) == (8192, 0)
    address, view = first.data_ptr(), first[:10].detach().view(torch.int16)
    del first
    second = pool.take(5000)
    assert second.data_ptr() != address  # the view still lies there
    del view
    assert pool.take(5000).data_ptr() == address
    third = pool.take(8192)
    del second, third
    assert len(pool._spare) == 1
    held = pool.take(5000)
    pool.clear()
    del held
    assert pool._spare == []


def change(file, at, mask=1):
    """Change bits of a byte in the file, past its own descriptor."""
    with Path(f"/proc/self/fd/{file._fd}").open("r+b", buffering=0) as other:
        (byte,) = os.pread(other.fileno(), 1, at)
        os.pwrite(other.fileno(), bytes([byte ^ mask]), at)
        os.fsync(other.fileno())


def test_a_changed_bit_is_seen_where_it_is(tmp_path):
    """Blocks that were never written are zeros."""
    verified = DiskFile(tmp_path, request_bytes=2 * ALIGNMENT, threads=4, verify=True)
    verified.grow(64 * ALIGNMENT)
    data, back = numbers(50_000), aligned_empty(50_000, torch.uint8)
    verified.write(0, data).wait()
    verified.read(0, back).wait()
    assert torch.equal(back, data)
    for at in (0, 4095, 4096, 9 * 4096 + 17, 49_999):
        change(verified, at, mask=128)
        place = rf"block at offset {at // 4096 * 4096:,} of the file"
        with pytest.raises(StorageError, match=place):
            verified.read(0, back).wait()
        verified.write(0, data).wait()  # what is written anew is right again
        verified.read(0, back).wait()
    back = aligned_empty(3 * 4096, torch.uint8)
    verified.grow(100 * ALIGNMENT)
    verified.read(97 * ALIGNMENT, back).wait()
    change(verified, 98 * ALIGNMENT)
    with pytest.raises(StorageError, match="as it was written, found other bytes"):
        verified.read(97 * ALIGNMENT, back).wait()
    verified.close()
