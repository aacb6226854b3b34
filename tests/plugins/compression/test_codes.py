"""Codes of signs, of the largest numbers and of low rank: bytes as documented, and what is kept."""

import torch

from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.compression.compressor import Codec
from drivetrain_compression.codes import CHUNK, OneBit, TopK, TopKOptions
from drivetrain_compression.powersgd import FactorPlan

BLOCK = 64
ONEBIT = OneBit(OneBit.Config(block=BLOCK, compiled=False))


def sent_back(method: Codec, values: torch.Tensor) -> torch.Tensor:
    message = torch.full((method.nbytes(values.numel()),), 255, dtype=torch.uint8)
    method.encode(values, message)
    found = torch.empty_like(values)
    method.decode(message, found)
    return found


def test_each_number_comes_back_as_the_mean_size_of_its_block_with_its_sign():
    for numel in (1, 8, BLOCK, 3 * BLOCK + 13):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(5))
        values[numel // 2] = 0.0
        for block, back in zip(
            values.split(BLOCK), sent_back(ONEBIT, values).split(BLOCK), strict=True
        ):
            signs = torch.where(block >= 0, 1.0, -1.0)
            torch.testing.assert_close(back, signs * block.abs().mean())
            lost = (back - block).square().sum()
            expected = block.square().sum() - block.abs().sum() ** 2 / block.numel()
            torch.testing.assert_close(lost, expected, atol=1e-5, rtol=1e-5)

    values = torch.zeros(2 * BLOCK)
    for bad in (float("nan"), float("inf")):
        values[17] = bad
        found = sent_back(ONEBIT, values)
        assert not found[17].isfinite()
        assert torch.equal(found[BLOCK:], values[BLOCK:])

    assert OneBit(OneBit.Config()).nbytes(2560) == 2560 // 8 + 4 * 10
    assert OneBit(OneBit.Config(block=64)).nbytes(65) == 9 + 2 * 4


def test_chunks_have_scales_and_bytes_of_their_own():
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(3 * CHUNK + 2000, generator=generator)
    values[CHUNK : 2 * CHUNK] *= 0.01
    found = sent_back(TopK(TopKOptions()), values)
    for chunk, back in zip(values.split(CHUNK), found.split(CHUNK), strict=True):
        at = back != 0
        assert at.sum() == 64
        assert chunk[~at].abs().max() <= chunk[at].abs().min()  # the largest are sent
        apart = (back - chunk)[at].abs()
        assert apart.max() < 1.5 * chunk[at].square().mean().sqrt()  # the width of a bin
        assert bool((apart <= chunk[at].abs()).all())  # never worse than sending nothing
    alone = sent_back(TopK(TopKOptions()), values[CHUNK : 2 * CHUNK].clone())
    assert torch.equal(found[CHUNK : 2 * CHUNK], alone)

    values = torch.zeros(2 * CHUNK)
    values[17] = float("nan")
    found = sent_back(TopK(TopKOptions()), values)
    assert found[17].isnan()
    assert torch.equal(found[CHUNK:], values[CHUNK:])

    values = torch.randn(CHUNK, generator=torch.Generator().manual_seed(5))
    for compiled in (True, False):
        method = TopK(TopKOptions(compiled=compiled))
        found = sent_back(method, 1e30 * values)
        torch.testing.assert_close(found / 1e30, sent_back(method, values))

    assert TopK(TopKOptions()).nbytes(128 * CHUNK) == 4 * 128 * CHUNK / 128
    assert TopK(TopKOptions(keep=128)).nbytes(CHUNK) == 16 + 128 * 3 // 2 + 128 // 4


def test_a_search_of_some_columns_finds_the_largest_numbers_of_all():
    for keep in (4, 64, 100, 1024):
        sizes = torch.rand(4, CHUNK, generator=torch.Generator().manual_seed(5))
        sizes[1, ::16] += 1
        sizes[2, 100:1300] += 1
        sizes[3] = torch.arange(CHUNK)
        expected = sizes.topk(keep, dim=1).indices.sort(dim=1).values
        assert torch.equal(TopK(TopKOptions(keep=keep))._largest(sizes), expected)


def test_a_piece_of_a_matrix_has_whole_rows_and_elements_that_go_as_they_are():
    whole = FlatSlice.of(64 * 60, torch.float32, [ParameterRow("weight", (64, 60), 0, 0)])
    plan = FactorPlan([[whole.cut(70, 3005)]], rank=4)
    (matrix,) = plan.matrices
    assert (matrix.rows, matrix.columns, matrix.span.first) == (48, 60, 120)
    assert [tuple(each) for each in plan.plain[0]] == [(0, 0, 50), (0, 2930, 2935)]
