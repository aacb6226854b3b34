"""What every store owes, whatever it keeps tensors on, found by name."""

from types import SimpleNamespace

import pytest
import torch

from drivetrain.errors import ConfigError
from drivetrain.parallel.options import OffloadOptions
from drivetrain.registry import stores
from drivetrain.store import TensorStore
from drivetrain_offload.options import NvmeConfig
from drivetrain_offload.strategy import open_stores

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
SHAPES = ((), (3, 0, 2), (1,), (1023,), (1024,), (1025,), (7, 11, 13), (3, 70_001))


@pytest.fixture(params=["cpu", "nvme"])
def store(request, tmp_path):
    kind = stores().load(request.param)
    made = (
        kind(NvmeConfig(path=str(tmp_path), staging_mib=1)) if request.param == "nvme" else kind()
    )
    yield made
    made.close()


def sample(shape=(5,), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**7, shape, generator=generator, dtype=torch.uint8)
    return numbers.to(torch.float32).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def same(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    plain = torch.float32 if found.dtype.itemsize == 1 else found.dtype
    assert torch.equal(found.to(plain), expected.to(plain))


def test_what_was_put_is_fetched(store):
    """Of every dtype and shape, before and after it was flushed; views and parameters too."""
    assert isinstance(store, TensorStore)
    given = {
        f"{dtype} {shape}": sample(shape, dtype, seed)
        for dtype in DTYPES
        for seed, shape in enumerate(SHAPES)
    }
    weight = torch.nn.Parameter(sample((40, 60)))
    given |= {"t": weight.t(), "s": weight[::3, 1::2]}
    for key, tensor in given.items():
        store.put(key, tensor)
    for flush in (False, True):
        if flush:
            store.flush()
        for key, tensor in given.items():
            found = store.fetch(key)
            same(found, tensor.detach())
            assert found.device == store.device
            assert not found.requires_grad


def test_the_last_put_counts_and_is_a_copy(store):
    for seed in range(20):
        store.put("k", given := sample((70_000,), seed=seed))
        store.put("other", sample((3,), seed=seed))
    given.fill_(-1)
    same(store.fetch("k"), sample((70_000,), seed=19))
    for shape, dtype in [((9,), torch.int64), ((90_000,), torch.float64), ((2, 2), torch.bool)]:
        store.put("k", sample(shape, dtype))
        same(store.fetch("k"), sample(shape, dtype))
    same(store.fetch("other"), sample((3,), seed=19))
    with pytest.raises(KeyError, match="gone"):
        store.fetch("gone")
    with pytest.raises(KeyError, match="gone"):
        store.prefetch(["k", "gone"])
    store.close()
    store.close()
    with pytest.raises(KeyError):
        store.fetch("k")


def test_prefetch_and_inference_mode_change_nothing(store):
    for seed in range(4):
        store.put(str(seed), sample((5000,), seed=seed))
    store.prefetch(["0", "1", "2", "1"])
    store.put("1", sample((5000,), seed=11))
    for key, seed in (("0", 0), ("1", 11), ("2", 2), ("3", 3), ("0", 0)):
        same(store.fetch(key), sample((5000,), seed=seed))
    with torch.inference_mode():
        store.put("k", sample())
    store.put("k", sample(seed=1))
    same(store.fetch("k"), sample(seed=1))
    store.fetch("k").add_(1)


def test_a_store_without_a_stepper_keeps_no_optimizer_state(monkeypatch):
    kinds = SimpleNamespace(load=lambda name: object)
    monkeypatch.setattr("drivetrain_offload.strategy.stores", lambda: kinds)
    with pytest.raises(ConfigError, match="'shelf', which keeps tensors only"):
        open_stores(OffloadOptions(optimizer="shelf"))
