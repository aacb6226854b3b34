"""What we write is the safetensors format, durable, hashed, and written through no planted link."""

import errno
import hashlib
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from drivetrain.checkpoint import tensorfile
from drivetrain.checkpoint.tensorfile import DTYPES, TensorFile, write_bytes, write_tensors
from drivetrain.errors import CheckpointError


def read(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_every_dtype_round_trips_bit_for_bit(tmp_path, dtype):
    torch.manual_seed(0)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (24 * dtype.itemsize,))
    tensor = raw.to(torch.uint8).view(dtype).reshape(2, 3, 4)
    tensors = {"t": tensor, "strided": tensor.transpose(0, 2), "scalar": tensor[0, 0, 0]}
    tensors |= {"empty": tensor[:0], "sliced": tensor[:, 1:2]}
    record = write_tensors(tmp_path / "f.safetensors", tensors)
    content = (tmp_path / "f.safetensors").read_bytes()
    assert record.size == len(content)
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    found = read(tmp_path / "f.safetensors")
    assert found.keys() == tensors.keys()
    for key, expected in tensors.items():
        assert found[key].dtype == dtype
        assert found[key].shape == expected.shape
        assert torch.equal(bits(found[key]), bits(expected))


def test_tensors_of_different_dtypes_are_aligned(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5, dtype=torch.float64)}
    tensors["c"] = torch.ones(1, dtype=torch.bfloat16)
    write_tensors(tmp_path / "f", tensors)
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert all(file.get_tensor(k).data_ptr() % t.itemsize == 0 for k, t in tensors.items())


def test_large_tensors_pass_through_a_small_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "BUFFER_BYTES", 7)
    tensor = torch.arange(100)
    record = write_tensors(tmp_path / "f", {"t": tensor})
    assert torch.equal(read(tmp_path / "f")["t"], tensor)
    assert record.sha256 == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()


def test_finite_numbers_may_have_a_sum_that_is_not():
    assert tensorfile.is_finite(torch.full((4,), 3e38))
    assert not tensorfile.is_finite(torch.tensor([1.0, float("inf")]))


def test_no_tensors_at_all(tmp_path):
    write_tensors(tmp_path / "f", {})
    assert read(tmp_path / "f") == {}


def test_unknown_dtype_is_refused_before_a_file_is_made(tmp_path):
    with pytest.raises(CheckpointError, match=r"'t' has dtype torch.complex128"):
        write_tensors(tmp_path / "f", {"t": torch.ones(1, dtype=torch.complex128)})
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()])
def test_tensors_without_dense_data_are_refused(tmp_path, tensor):
    with pytest.raises(CheckpointError, match="to hold strided data"):
        write_tensors(tmp_path / "f", {"t": tensor})


def test_reserved_name_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="__metadata__"):
        write_tensors(tmp_path / "f", {"__metadata__": torch.ones(1)})


def test_tensors_must_come_as_announced(tmp_path):
    plan = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with (
        pytest.raises(CheckpointError, match=r"expected .*'a'.* found .*'b'"),
        TensorFile(tmp_path / "f", plan) as file,
    ):
        file.add("b", torch.ones(2))
    with (
        pytest.raises(CheckpointError, match=r"lacks announced tensors: \['b'\]"),
        TensorFile(tmp_path / "g", plan) as file,
    ):
        file.add("a", torch.ones(2))


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


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_io_errors_name_the_file(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_bytes(tmp_path / "f", b"x")
    assert caught.value.filename == str(tmp_path / "f")


def test_works_without_numpy(tmp_path):
    script = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from drivetrain.checkpoint import Contents, open_checkpoint, save_checkpoint
from drivetrain.runtime.world import World
from drivetrain.shards import Part, Shard
t = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
shard = Shard("t", "", t, (2, 3), Part.whole((2, 3)))
target = Path(sys.argv[1])
save_checkpoint(target, Contents(models=[[shard]]), world=World())
found = open_checkpoint(target, World()).model(0).read("t", part=Part((0, 1), (2, 1)))
assert found.tolist() == [[1.0], [4.0]], found
"""
    command = [sys.executable, "-c", script, str(tmp_path / "ck")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
