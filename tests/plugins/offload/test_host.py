"""The store cpu: page-locked where there is an accelerator, copies that do not wait."""

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from drivetrain.parallel.gradients import FlatGradients
from drivetrain_offload import host, strategy, tiles
from drivetrain_offload.host import HostStore
from drivetrain_offload.options import HostConfig
from drivetrain_offload.tiles import aligned_empty
from offloaded_trainings import Free, Training, assert_same


class Runtime:
    """Stands in for the accelerator's runtime: notes what is locked."""

    def __init__(self, code=0):
        self.code = code
        self.locked = {}

    def cudaHostRegister(self, address, nbytes, flags):
        if self.code == 0:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


def install(monkeypatch, runtime):
    monkeypatch.setattr(tiles, "_runtime", lambda: runtime)
    monkeypatch.setattr(tiles, "_forget_failure", lambda: None)
    monkeypatch.setattr(host, "can_page_lock", lambda: True)

    def check(code):
        if code:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(tiles.torch.cuda, "check_error", check)


def test_pages_are_locked_once_per_tensor_and_unlocked_with_it(monkeypatch):
    runtime = Runtime()
    install(monkeypatch, runtime)
    store = HostStore()
    store.put("k", torch.arange(3000.0))
    first = store.fetch("k")
    assert runtime.locked == {first.data_ptr(): 12288}
    store.put("k", torch.zeros(3000))
    assert runtime.locked == {first.data_ptr(): 12288}
    assert not first.any()
    view = first[5:7].detach()
    store.put("k", torch.ones(5))
    del first
    assert len(runtime.locked) == 2  # the view still lies there
    del view
    gc.collect()
    assert list(runtime.locked.values()) == [4096]
    store.close()
    gc.collect()
    assert runtime.locked == {}


def test_pages_that_cannot_be_locked_are_said_once_and_none_where_asked(monkeypatch, caplog):
    install(monkeypatch, Runtime(code=2))
    store = HostStore()
    store.put("a", torch.ones(3))
    store.put("b", torch.ones(3))
    assert torch.equal(store.fetch("a"), torch.ones(3))
    assert caplog.text.count("could not be page-locked (out of memory)") == 1
    runtime = Runtime()
    install(monkeypatch, runtime)
    store = HostStore(HostConfig(page_locked=False))
    store.put("k", torch.ones(3))
    assert runtime.locked == {}


def test_fetch_waits_for_its_own_copy_and_flush_for_all(monkeypatch):
    waited, store = [], HostStore()
    for name in "abc":
        store.put(name, torch.ones(1))
        store._copies[name] = SimpleNamespace(synchronize=partial(waited.append, name))
    store.fetch("b")
    assert waited == ["b"]
    store.put("c", torch.zeros(1))
    assert waited == ["b", "c"]
    store.flush()
    store.flush()
    assert waited == ["b", "c", "a"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu():
    store = HostStore()
    source = torch.arange(2**22, device="cuda", dtype=torch.float32)
    for turn in range(3):
        store.put("k", source)
        source.add_(1)
        found = store.fetch("k")
        assert found.is_pinned()
        assert torch.equal(found, torch.arange(2**22, dtype=torch.float32) + turn)
    store.flush()
    assert aligned_empty(10, page_locked=True).is_pinned()
    store.close()


@pytest.mark.parametrize("store", ["cpu", "nvme"])
def test_what_crosses_the_bus_lies_in_locked_pages(store, monkeypatch, tmp_path):
    """Gradients and new values, in the same pages again, with the bits of pages that are not."""
    offload = {
        "optimizer": store,
        "delayed": True,
        **({"path": str(tmp_path)} if store == "nvme" else {}),
    }
    low = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}

    def trained():
        return Training(
            {"name": "zero2", "bucket_mib": 0.004, "offload": offload}, model=Free, **low
        )

    expected = trained().steps().close()
    runtime = Runtime()
    install(monkeypatch, runtime)
    monkeypatch.setattr(strategy, "can_page_lock", lambda: True)
    locked = {"gradients": [], "values": []}
    keep, installed = FlatGradients._keep, strategy.PendingValues.install

    def is_locked(tensor):
        places = runtime.locked.items()
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in places)

    def kept(gradients, pieces):
        keep(gradients, pieces)
        locked["gradients"].append(is_locked(gradients._kept))

    def arrived(pending):
        locked["values"].extend(map(is_locked, pending._buffers.values()))
        installed(pending)

    monkeypatch.setattr(FlatGradients, "_keep", kept)
    monkeypatch.setattr(strategy.PendingValues, "install", arrived)
    found = trained().steps(2)
    before = len(runtime.locked)
    assert_same(found.steps(2, first=2).close(), expected)
    assert len(runtime.locked) <= before
    assert all(map(all, locked.values()))
    assert all(locked.values())
    del found
    gc.collect()
    assert not runtime.locked
