"""The pool of constant buffers: sizes, reuse, limits."""

import pytest
import torch

from drivetrain.errors import UsageError
from drivetrain.parallel.replicated import BufferPool


def test_buffers_are_reused_oldest_first_and_lie_apart():
    pool = BufferPool(2, 64)
    assert pool.nbytes == 0
    first = pool.take(3, torch.float32, "cpu")
    second = pool.take(16, torch.float32, "cpu")
    assert (first.shape, second.shape) == ((3,), (16,))
    assert pool.nbytes == 128
    addresses = [first.data_ptr(), second.data_ptr()]
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take(4, torch.bfloat16, "cpu").data_ptr() == addresses[0]
    assert pool.take(8, torch.float64, "cpu").data_ptr() == addresses[1]
    assert pool.nbytes == 128
    pool = BufferPool(2, 30)
    first, second = (pool.take(7, torch.float32, "cpu") for _ in range(2))
    second.fill_(first.fill_(1.0)[0] + 1.0)  # 30 is not 4 x 7: they do not overlap
    assert first.tolist() == [1.0] * 7


def test_a_full_pool_has_nothing_to_lend_and_takes_back_only_what_is_out():
    pool = BufferPool(1, 8)
    out = pool.take(1, torch.float64, "cpu")
    with pytest.raises(LookupError, match="all 1 buffers on cpu are lent"):
        pool.take(1, torch.float64, "cpu")
    pool.give_back(out)
    pool.take(0, torch.float64, "cpu")
    pool = BufferPool(1, 8)
    out = pool.take(2, torch.float32, "cpu")
    pool.give_back(out[1:].view(1, 1))  # any view of it
    for stranger in (out, torch.zeros(2)):
        with pytest.raises(UsageError, match="still out"):
            pool.give_back(stranger)
    with pytest.raises(UsageError, match="found 3 elements of torch.float32 = 12 bytes"):
        pool.take(3, torch.float32, "cpu")
    for count, nbytes in ((0, 8), (1, 0)):
        with pytest.raises(UsageError, match=f"found {count} of {nbytes}"):
            BufferPool(count, nbytes)


def test_each_device_has_its_own_buffers_until_the_end():
    pool = BufferPool(2, 8)
    out = pool.take(2, torch.float32, "cpu")
    first, second = (pool.take(1, torch.float32, "meta") for _ in range(2))
    assert first.device.type == second.device.type == "meta"
    pool.give_back(first)
    pool.give_back(second)
    assert pool.nbytes == 24
    pool.close()
    assert pool.nbytes == 0
    out.fill_(1.0)
    assert pool.take(2, torch.float32, "cpu").data_ptr() != out.data_ptr()
