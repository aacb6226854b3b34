"""Compiled codes: the bytes and numbers of operations of torch, and what there is without one."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drivetrain.compression.compressor import Codec
from drivetrain.registry import compressors
from drivetrain.runtime.world import cache_folder
from drivetrain_compression import codes
from drivetrain_compression.codes import Format, KernelError, Kernels, built, kernels, loaded

TINY = torch.finfo(torch.float32).tiny
NUMEL = 3 * 4096 + 77

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, codes.COMPILERS)), reason="no C compiler on this machine"
)


def both(name: str, **options: object) -> tuple[Codec, Codec]:
    """Return a method that is compiled, and the same in operations of torch."""
    kind = compressors().load(name)
    return kind(kind.Config(**options)), kind(kind.Config(compiled=False, **options))


def normal(numel: int, seed: int = 5) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def awkward(name: str) -> Tensor:
    """Return numbers of which some are hard to round or to scale."""
    values = normal(NUMEL)
    if name == "ties":  # halves of a scale that is a power of two: to the even integer
        steps = torch.arange(-254, 255) / 2
        values = steps.repeat(NUMEL // steps.numel() + 1)[:NUMEL].clone()
        values[::100] = 127.0
    elif name == "ties of 4 bits":
        values = (torch.arange(NUMEL) % 29 - 14) / 2
    elif name == "zeros":
        values[: NUMEL // 2] = 0.0
        values[1000:2000] = -0.0
    elif name == "denormal":
        values = values * TINY / 8
        values[4096:8192] = TINY / 2**22
    elif name == "large":
        values = values * 1e37
    elif name == "equal":
        values = torch.full((NUMEL,), -0.75)
    return values


def sent(method: Codec, values: Tensor, errors: Tensor | None) -> Tensor:
    message = torch.full((method.nbytes(values.numel()),), 171, dtype=torch.uint8)
    method.encode_gradients(values, message, errors=errors)
    return message


def results(method: Codec, message: Tensor, values: Tensor) -> list[Tensor]:
    """Return the numbers of a message: written, added, and their errors."""
    written, added, errors = torch.full_like(values, 3.0), values.clone(), normal(len(values), 9)
    method.decode(message, written)
    method.add(message, added)
    method.keep(values, message, errors)
    return [written, added, errors]


def are_same(some: Tensor, others: Tensor) -> bool:
    """Whether tensors are the same bit by bit, but for the kind of a NaN."""
    bits = some.view(torch.int32) == others.view(torch.int32)
    return bool((bits | (some.isnan() & others.isnan())).all())


CASES = ["normal", "ties", "ties of 4 bits", "zeros", "denormal", "large", "equal"]


def messages_and_results(method: Codec, torchs: Codec, values: Tensor, errors: Tensor | None):
    """Return the messages of both; the numbers of the first are the same by both ways."""
    message, expected = (sent(each, values, errors) for each in (method, torchs))
    both = (results(each, message, values) for each in (method, torchs))
    assert all(map(are_same, *both))
    return message, expected


def hard(numels: tuple[int, ...]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield awkward numbers, and errors that were kept or none."""
    for case, numel in itertools.product(CASES, numels):
        values = awkward(case)[-numel:].contiguous()
        for errors in (None, normal(numel, 7) * values.abs().mean()):
            yield case, values, errors


@needs_compiler
def test_integers_have_the_bytes_and_numbers_of_torch():
    for name, options in itertools.product(
        ("int8", "int4"), ({}, {"block": 16}, {"block": 100}, {"block": 4097})
    ):
        method, torchs = both(name, **options)
        for case, values, errors in hard((NUMEL, 1, 2, 15, 257)):
            message, expected = messages_and_results(method, torchs, values, errors)
            assert torch.equal(message, expected), (name, options, case)


@needs_compiler
def test_signs_are_those_of_torch_and_means_but_for_the_order_of_sums():
    for block in (16, 100, 256, 4097):
        method, torchs = both("onebit", block=block)
        for case, values, errors in hard((NUMEL, 1, 7, 257)):
            message, expected = messages_and_results(method, torchs, values, errors)
            edge = 4 * -(-len(values) // block)
            assert torch.equal(message[edge:], expected[edge:]), (block, case)
            means = (each[:edge].view(torch.float32) for each in (message, expected))
            torch.testing.assert_close(*means, rtol=1e-6, atol=1e-45)


@needs_compiler
def test_the_largest_numbers_are_those_of_torch():
    for keep in (4, 64, 100, 516, 1024):
        method, torchs = both("topk", keep=keep)
        chunks = -(-NUMEL // 4096)
        edge, last = 16 * chunks, 16 * chunks + chunks * keep * 3 // 2
        values = normal(NUMEL)
        values[4096:8192] *= 1e-3
        values[100:1300] += 5.0  # many of one range
        values[-77:] += 20.0  # no zero behind the last number is among the largest: keep <= 77
        for errors in (None, normal(NUMEL, 7)):
            message, expected = messages_and_results(method, torchs, values, errors)
            whole = slice(edge, edge + (chunks - 1) * keep * 3 // 2)
            assert torch.equal(message[whole], expected[whole])  # the places
            torch.testing.assert_close(
                message[:edge].view(torch.float32), expected[:edge].view(torch.float32)
            )
            assert (message[last:] != expected[last:]).float().mean() < 0.01  # edges of bins


@needs_compiler
def test_what_is_equal_zero_or_not_finite_comes_back_as_such():
    method, _ = both("topk")
    values = torch.zeros(2 * 4096)
    values[:4096] = 0.5
    values[4000] = -0.75
    found = torch.empty_like(values)
    method.decode(sent(method, values, None), found)
    assert found.nonzero().flatten().tolist() == [*range(63), 4000]
    assert not found[4096:].any()

    for name in ("int8", "int4", "onebit", "topk"):
        for bad in (float("nan"), float("inf"), -float("inf")):
            method, torchs = both(name)
            values = normal(2 * 4096)
            values[17] = bad
            message = sent(method, values, None)
            found, expected = (torch.empty_like(values) for _ in range(2))
            method.decode(message, found)
            torchs.decode(message, expected)
            assert are_same(found, expected)
            assert not found[17].isfinite()
            assert found[4096:].isfinite().all()
            torchs.decode(sent(torchs, values, None), expected)
            assert torch.equal(found.isfinite(), expected.isfinite())


@needs_compiler
def test_the_sources_compile_and_only_fp32_gets_there(tmp_path):
    found = loaded(tmp_path / "drivetrain" / "kernels")
    message = torch.zeros(2048, dtype=torch.uint8)
    for values, errors in (
        (torch.zeros(256, dtype=torch.bfloat16), None),
        (torch.zeros(256), torch.zeros(256, dtype=torch.float64)),
        (torch.zeros(512)[::2], None),
    ):
        with pytest.raises(ValueError, match=r"expected a contiguous tensor of torch\.float32"):
            found.encode(Format.INT8, values, errors, message, 256)


@pytest.mark.parametrize("compiles", [pytest.param(True, marks=needs_compiler), False])
def test_a_block_of_few_denormal_steps_spoils_no_other_block(compiles):
    for name, steps, most in (("int8", 127, 190), ("int4", 7, 10)):
        kind = compressors().load(name)
        method = kind(kind.Config(compiled=compiles))
        values = normal(512)
        values[256:] = 0.0
        values[256:260] = torch.tensor([most, -most, 1, -1]) * 2.0**-149
        found = torch.empty_like(values)
        method.decode(sent(method, values, None), found)
        scale = values[:256].abs().max() / steps
        assert (found[:256] - values[:256]).abs().max() <= scale / 2 * 1.001
        assert ((found * values)[256:] >= 0).all()
        assert (found - values)[256:].double().norm() < values[256:].double().norm()


@pytest.fixture
def small_source(tmp_path, monkeypatch) -> None:
    """Compile a source that takes no time."""
    source = tmp_path / "small.c"
    source.write_text("void encode(void) {}\nvoid decode(void) {}\n", encoding="utf-8")
    monkeypatch.setattr(codes, "SOURCES", (source,))


@needs_compiler
@pytest.mark.usefixtures("small_source")
def test_a_broken_library_is_compiled_anew(tmp_path):
    folder = tmp_path / "drivetrain" / "kernels"
    path = built(folder)
    path.write_bytes(b"")
    assert loaded(folder).path == path
    assert path.stat().st_size


@needs_compiler
def test_the_log_says_once_which_way_encodes(monkeypatch):
    said, (method, _) = [], both("int8")
    monkeypatch.setattr(codes.logger, "announce", said.append)
    kernels.cache_clear()
    method.get_ready(torch.device("meta"))
    assert not said, "other devices say nothing"
    for _ in range(2):
        method.get_ready(torch.device("cpu"))
    (line,) = said
    assert f"encode with compiled kernels: {built(cache_folder() / 'kernels')}" in line


def test_a_user_without_a_home_has_no_kernels_but_trains(monkeypatch):
    said = []
    monkeypatch.setattr(codes.logger, "announce", said.append)
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert kernels.__wrapped__() is None
    assert "encode with operations of torch" in said[0]


def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *compilers: str) -> Path:
    monkeypatch.setattr(codes, "COMPILERS", compilers)
    return tmp_path / "kernels"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_another_processor_has_another_library(tmp_path, monkeypatch):
    paths = []
    for facts in ("one", "two"):
        makes = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done'
        compiler = script(tmp_path / facts, f"{makes}; echo {facts}")
        paths.append(built(without(monkeypatch, tmp_path, compiler)))
    assert paths[0] != paths[1]


def test_why_there_are_no_kernels_is_said(tmp_path, monkeypatch):
    folder = without(monkeypatch, tmp_path, "no-such-compiler")
    with pytest.raises(KernelError, match="none of the C compilers no-such-compiler; install one"):
        built(folder)
    failing = script(tmp_path / "failing", "echo unknown processor >&2; exit 1")
    folder = without(monkeypatch, tmp_path, failing)
    with pytest.raises(KernelError, match="failing cannot compile .*: unknown processor"):
        built(folder)
    slow = script(tmp_path / "slow", "exec sleep 60")
    folder = without(monkeypatch, tmp_path, slow)
    monkeypatch.setattr(codes, "COMPILES_S", 0.2)
    with pytest.raises(KernelError, match="cannot compile with .* timed out"):
        built(folder)
    fine = script(tmp_path / "fine", "echo facts")
    folder = without(monkeypatch, tmp_path, fine)
    folder.mkdir()
    for mode in (0o777, 0o770):
        folder.chmod(mode)
        with pytest.raises(KernelError, match=f"written by you alone, found mode {mode:o}"):
            built(folder)
    folder.chmod(0o700)
    folder.rmdir()
    folder.write_text("a file", encoding="utf-8")
    with pytest.raises(KernelError, match="cannot keep a library in"):
        built(folder)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"half")
    with pytest.raises(KernelError, match="cannot load .*broken.so"):
        Kernels(broken)
