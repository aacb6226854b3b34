"""Encoding piece by piece: the numbers of one piece, whatever the pieces, and none left out."""

import itertools

import torch

from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.compression import compressor as messages
from drivetrain.compression.compressor import MARK_BYTES, Codec, MessageLayout
from drivetrain.registry import compressors

ROWS = [
    ParameterRow("weight", (11, 1000), 0, 0),
    ParameterRow("bias", (33,), 0, 11000),
    ParameterRow("table", (5, 4097), 0, 11033),
]
NUMEL = 11033 + 5 * 4097 + 3
BY_CHANCE = {"rounding": "stochastic"}
METHODS = [
    *((name, {}) for name in ("bf16", "int8", "int4", "onebit", "topk")),
    ("int4", {"block": 100}),
    ("int4", {"block": 17}),
    ("int8", {"block": 65536}),
    ("int8", BY_CHANCE),
    ("int4", BY_CHANCE),
    ("onebit", {"block": 17}),
    ("topk", {"keep": 4}),
]


def made(name: str, **options: object) -> Codec:
    kind = compressors().load(name)
    return kind(kind.Config(**options))


def layout_of(method: Codec) -> MessageLayout:
    return MessageLayout(method, [FlatSlice.of(NUMEL, torch.float32, ROWS).cut(5, NUMEL)])


def sent_back(method: Codec) -> torch.Tensor:
    """Return the numbers that come back from a message about made-up ones."""
    layout = layout_of(method)
    values = torch.randn(NUMEL - 5, generator=torch.Generator().manual_seed(5))
    message, found = layout.room(values.device).fill_(255), torch.zeros_like(values)
    draws = torch.Generator().manual_seed(3)
    for elements, _, room in layout.pieces(values.device):
        method.encode_gradients(elements.of([values]), message[room], draws=draws)
    for elements, _, room in layout.pieces(values.device):
        method.decode(message[room], elements.of([found]))
    assert 0 < (found - values).norm() < values.norm()
    return found


def test_small_pieces_make_the_numbers_of_a_single_one(monkeypatch):
    for name, options in METHODS:
        method, found = made(name, **options), []
        for piece in (1, 4096, 3 * 4096, 10 * NUMEL):
            monkeypatch.setattr(messages, "_PIECE", piece)
            found.append(sent_back(method))
        assert all(torch.equal(numbers, found[0]) for numbers in found[1:])


def test_pieces_cover_all_matrices_and_their_bytes_side_by_side(monkeypatch):
    for device in ("cpu", "meta"):
        for name, options in METHODS:
            monkeypatch.setattr(messages, "_PIECE", 4096)
            method = made(name, **options)
            layout = layout_of(method)
            pieces = list(layout.pieces(torch.device(device)))
            if device == "meta":  # a few large operations are faster
                assert len(pieces) == 2
            elif method.group <= 4096:
                assert len(pieces) > 2
            covered = [range(each.start, each.stop) for (each, _, _) in pieces]
            assert [*itertools.chain(*covered)] == [*range(10995), *range(11028, NUMEL - 8)]
            stops = [place.stop for _, place, _ in pieces]
            assert [place.start for _, place, _ in pieces] == [0, *stops[:-1]]
            assert stops[-1] == layout.numel == 10995 + 5 * 4097
            edge = MARK_BYTES
            for elements, _, room in pieces:
                assert 0 <= room.start - edge < 4
                assert room.start % 4 == 0  # where fp32 may lie
                assert room.stop - room.start == method.nbytes(elements.numel)
                edge = room.stop
            plain = 4 * (33 + 3)
            assert 0 <= layout.nbytes - plain - edge < 4


def test_numbers_of_two_bytes_are_not_rounded_to_others_of_two_bytes():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        flat_slice = FlatSlice.of(NUMEL, dtype, ROWS)
        assert made("bf16").approximates([[flat_slice]]) is (dtype == torch.float32)
