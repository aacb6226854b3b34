"""What we write is the safetensors format, durable, hashed, and written through no planted link."""

import errno
import hashlib
import os
import sys

import pytest
import torch
from safetensors import safe_open

from drivetrain.checkpoint import encoding as tensorfile
from drivetrain.checkpoint.encoding import DTYPES, Contents, TensorFile, write_tensors
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.manifest import write_bytes
from drivetrain.checkpoint.saving import Save
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Shard


def read(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_every_dtype_round_trips_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "BUFFER_BYTES", 64)  # large ones pass through a small buffer
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (24 * dtype.itemsize,))
        tensor = raw.to(torch.uint8).view(dtype).reshape(2, 3, 4)
        tensors = {"t": tensor, "strided": tensor.transpose(0, 2), "scalar": tensor[0, 0, 0]}
        tensors |= {"empty": tensor[:0], "sliced": tensor[:, 1:2]}
        path = tmp_path / str(dtype)
        record = write_tensors(path, tensors)
        assert record.size == path.stat().st_size
        assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        found = read(path)
        assert found.keys() == tensors.keys()
        for key, expected in tensors.items():
            assert (found[key].dtype, found[key].shape) == (dtype, expected.shape)
            assert torch.equal(bits(found[key]), bits(expected)), (dtype, key)


def test_tensors_of_different_dtypes_are_aligned(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5, dtype=torch.float64)}
    tensors["c"] = torch.ones(1, dtype=torch.bfloat16)
    write_tensors(tmp_path / "f", tensors)
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert all(file.get_tensor(k).data_ptr() % t.itemsize == 0 for k, t in tensors.items())


def test_finite_numbers_may_have_a_sum_that_is_not():
    assert tensorfile.is_finite(torch.full((4,), 3e38))
    assert not tensorfile.is_finite(torch.tensor([1.0, float("inf")]))


def test_what_no_file_holds_is_refused_before_one_is_made(tmp_path):
    for name, tensor, message in (
        ("t", torch.ones(1, dtype=torch.complex128), "'t' has dtype torch.complex128"),
        ("__metadata__", torch.ones(1), "__metadata__"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_tensors(tmp_path / "f", {name: tensor})
        assert not (tmp_path / "f").exists()
    with pytest.raises(CheckpointError, match="to hold strided data"):
        write_tensors(tmp_path / "f", {"t": torch.eye(2).to_sparse()})


def test_tensors_must_come_as_announced(tmp_path):
    plan = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    for name, said in (
        ("b", r"expected .*'a'.* found .*'b'"),
        ("a", r"lacks announced tensors: \['b'\]"),
    ):
        refused = pytest.raises(CheckpointError, match=said)
        with refused, TensorFile(tmp_path / name, plan) as file:
            file.add(name, torch.ones(2))


def test_planted_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "f").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "f", b"evil")
    assert victim.read_text() == "precious"


def test_short_writes_go_on(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, memoryview(data)[:3]))
    write_bytes(tmp_path / "f", b"0123456789")
    assert (tmp_path / "f").read_text() == "0123456789"


def test_io_errors_name_the_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    for call in ("write", "fsync"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/") as caught:
            patch.setattr(os, call, fail)
            write_bytes(tmp_path / call, b"x")
        assert caught.value.filename == str(tmp_path / call)


def test_works_without_numpy(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setitem(sys.modules, "numpy", None)
    for owner, name in ((torch.Tensor, "numpy"), (torch, "from_numpy")):
        monkeypatch.setattr(owner, name, refuse)
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    contents = Contents(models=[[Shard("t", "", tensor, (2, 3), Part.whole((2, 3)))]])
    Save(tmp_path / "ck", World()).finish(contents)
    model = open_checkpoint(tmp_path / "ck", World()).model(0)
    assert model.read("t", part=Part((0, 1), (2, 1))).tolist() == [[1.0], [4.0]]
