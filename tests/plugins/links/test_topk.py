"""The largest numbers of each chunk: a codebook for each, and bytes as documented."""

import torch

from drivetrain_links.topk import CHUNK, TopK, TopKOptions


def sent_back(values: torch.Tensor, **options: bool) -> torch.Tensor:
    method = TopK(TopKOptions(**options))
    message = torch.empty(method.nbytes(values.numel()), dtype=torch.uint8)
    method.encode(values, message)
    found = torch.empty_like(values)
    method.decode(message, found)
    return found


def test_chunks_have_scales_and_bytes_of_their_own():
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(3 * CHUNK + 2000, generator=generator)
    values[CHUNK : 2 * CHUNK] *= 0.01
    found = sent_back(values)
    for chunk, back in zip(values.split(CHUNK), found.split(CHUNK), strict=True):
        at = back != 0
        assert at.sum() == 64
        assert chunk[~at].abs().max() <= chunk[at].abs().min()  # the largest are sent
        apart = (back - chunk)[at].abs()
        assert apart.max() < 1.5 * chunk[at].square().mean().sqrt()  # the width of a bin
        assert bool((apart <= chunk[at].abs()).all())  # never worse than sending nothing
    alone = sent_back(values[CHUNK : 2 * CHUNK].clone())
    assert torch.equal(found[CHUNK : 2 * CHUNK], alone)

    values = torch.zeros(2 * CHUNK)
    values[17] = float("nan")
    found = sent_back(values)
    assert found[17].isnan()
    assert torch.equal(found[CHUNK:], values[CHUNK:])

    values = torch.randn(CHUNK, generator=torch.Generator().manual_seed(5))
    for compiled in (True, False):
        found = sent_back(1e30 * values, compiled=compiled)
        torch.testing.assert_close(found / 1e30, sent_back(values, compiled=compiled))

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
