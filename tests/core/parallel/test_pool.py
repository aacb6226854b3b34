"""Lent buffers: sizes, reuse, limits."""

import torch

from drivetrain.parallel.reduce import LentBuffers


def test_buffers_are_reused_oldest_first_and_those_in_need_are_not_kept():
    buffers = LentBuffers(2, 64, torch.device("cpu"))
    first, second = buffers.take(12), buffers.take(64)
    addresses = [first.data_ptr(), second.data_ptr()]
    assert (first.shape, second.shape) == ((12,), (64,))
    assert buffers.exhausted
    more = buffers.take(8)
    assert more.untyped_storage().nbytes() == 8
    for each in (first[4:], second, more):  # any view of it
        buffers.take_back(each)
    assert [buffers.take(64).data_ptr() for _ in range(2)] == addresses
    buffers.close()
    large = buffers.take(65)  # larger than those that are lent again
    buffers.take_back(large)
    assert buffers.take(64).data_ptr() not in [*addresses, large.data_ptr()]
