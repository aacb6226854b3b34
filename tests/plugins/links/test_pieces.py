"""Encoding piece by piece: the same bytes and numbers as in one piece, and no row left out."""

import pytest
import torch

from drivetrain.links import codec
from drivetrain.links.codec import Codec, rows_in_caches
from drivetrain.registry import compressors

NUMEL = 5 * 4096 + 77
BY_CHANCE = {"rounding": "stochastic"}


def encoded(method: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a message about made-up numbers, and the numbers that come back."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5))
    message = torch.full((method.nbytes(NUMEL),), 255, dtype=torch.uint8)
    method.encode_gradients(values.clone(), message, 3)
    found = torch.full((NUMEL,), -1.0)
    method.decode(message, found)
    assert 0 < (found - values).norm() < values.norm()
    return message, found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {}),
        ("int4", {}),
        ("int4", {"block": 100}),
        ("int8", {"block": 65536}),
        ("int8", BY_CHANCE),
        ("int4", BY_CHANCE),
        ("topk", {}),
    ],
)
def test_small_pieces_make_the_bytes_and_numbers_of_a_single_one(name, options, monkeypatch):
    kind = compressors().load(name)
    found = []
    for piece in (1, 4096, 3 * 4096, 10 * NUMEL):
        monkeypatch.setattr(codec, "_PIECE", piece)
        found.append(encoded(kind(kind.Config(**options))))
    for message, numbers in found[1:]:
        assert torch.equal(message, found[0][0])
        assert torch.equal(numbers, found[0][1])


def test_ranges_cover_all_rows_and_other_devices_have_a_single_one():
    def rows(count: int, width: int, device: str) -> list[tuple[int, int]]:
        ranges = rows_in_caches(count, width, torch.device(device))
        return [(each.start, each.stop) for each in ranges]

    assert rows(5, 65536 // 2, "cpu") == [(0, 2), (2, 4), (4, 5)]
    assert rows(2, 10 * 65536, "cpu") == [(0, 1), (1, 2)]
    assert rows(5, 65536 // 2, "meta") == [(0, 5)]
    assert rows(0, 256, "cpu") == rows(0, 256, "meta") == []
