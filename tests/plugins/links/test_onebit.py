"""Signs with a scale per block: bytes as documented, and never worse than sending nothing."""

import torch

from drivetrain_links.onebit import OneBit, OneBitOptions

BLOCK = 64


def sent_back(values: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    method = OneBit(OneBitOptions(block=block, compiled=False))
    message = torch.full((method.nbytes(values.numel()),), 255, dtype=torch.uint8)
    method.encode(values, message)
    found = torch.empty_like(values)
    method.decode(message, found)
    return found


def test_each_number_comes_back_as_the_mean_size_of_its_block_with_its_sign():
    for numel in (1, 8, BLOCK, 3 * BLOCK + 13):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(5))
        values[numel // 2] = 0.0
        for block, back in zip(values.split(BLOCK), sent_back(values).split(BLOCK), strict=True):
            signs = torch.where(block >= 0, 1.0, -1.0)
            torch.testing.assert_close(back, signs * block.abs().mean())
            lost = (back - block).square().sum()
            expected = block.square().sum() - block.abs().sum() ** 2 / block.numel()
            torch.testing.assert_close(lost, expected, atol=1e-5, rtol=1e-5)

    values = torch.zeros(2 * BLOCK)
    for bad in (float("nan"), float("inf")):
        values[17] = bad
        found = sent_back(values)
        assert not found[17].isfinite()
        assert torch.equal(found[BLOCK:], values[BLOCK:])

    assert OneBit(OneBitOptions()).nbytes(2560) == 2560 // 8 + 4 * 10
    assert OneBit(OneBitOptions(block=64)).nbytes(65) == 9 + 2 * 4
