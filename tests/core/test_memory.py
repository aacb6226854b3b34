"""Batch sizes that fit, and letting go of memory."""

import gc
import weakref

import pytest
import torch

from drivetrain.errors import UsageError
from drivetrain.memory import find_executable_batch_size, release_memory

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("XPU out of memory."),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    MemoryError(),
]


class Big:
    """Something one can see the end of."""


def fits(limit, tried, error=OUT_OF_MEMORY[0]):
    def function(batch_size, *args, **kwargs):
        tried.append(batch_size)
        if batch_size > limit:
            raise error
        return batch_size, args, kwargs

    return function


def test_sizes_shrink_until_one_fits():
    for error in OUT_OF_MEMORY:
        tried = []
        run = find_executable_batch_size(fits(100, tried, error), starting_batch_size=111)
        assert run("a", b=1) == (99, ("a",), {"b": 1})
        assert tried == [111, 99]

    tried = []
    assert find_executable_batch_size(fits(1, tried), starting_batch_size=4)()[0] == 1
    assert tried == [4, 3, 2, 1]

    with pytest.raises(RuntimeError, match="started with 3, ended at zero"):
        find_executable_batch_size(fits(0, []), starting_batch_size=3)()

    tried = []
    with pytest.raises(RuntimeError, match="shape"):
        find_executable_batch_size(fits(1, tried, RuntimeError("wrong shape")))()
    assert tried == [128]


def test_own_rules_are_honored_if_they_reduce():
    tried, sizes = [], iter([64, 10])
    options = {"starting_batch_size": 100, "reduce_batch_size_fn": sizes.__next__}
    assert find_executable_batch_size(**options)(fits(10, tried))()[0] == 10
    assert tried == [100, 64, 10]

    run = find_executable_batch_size(fits(1, []), 8, reduce_batch_size_fn=lambda: 8)
    with pytest.raises(UsageError, match="less than 8, found 8"):
        run()


def test_a_call_with_the_batch_size_is_refused():
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size, model):
        """Words."""
        return model

    assert (train("model"), train.__doc__) == ("model", "Words.")
    with pytest.raises(TypeError, match=r"passes the batch size to train\(\) itself"):
        train(4, "model")
    with pytest.raises(UsageError, match=r"train\(\)"):
        train("model", batch_size=4)


def test_what_a_failed_try_held_is_free_before_the_next():
    held = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        assert [thing() for thing in held] == [None] * len(held)
        big = Big()
        held.append(weakref.ref(big))
        if batch_size > 1:
            raise MemoryError
        return batch_size

    assert train() == 1


def test_release_memory():
    first, second = Big(), Big()
    seen = weakref.ref(first)
    first.itself = first
    first, second = release_memory(first, second)
    gc.collect()
    assert (first, second, seen()) == (None, None, None)
    assert release_memory() == []
