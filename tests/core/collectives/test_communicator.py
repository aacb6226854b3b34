"""Collectives on parts: tensors of many sizes and dtypes at once, packed into few messages."""

from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import Tensor

from drivetrain.collectives import Communicator, communicator_of, ring, sent_bytes
from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.collectives.neighbors import Neighbors, Tag
from drivetrain.collectives.ring import ChunkMessages
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.runtime.mesh import Axis
from flat_collectives import open_native, open_ring, values

FLOATS = [torch.float32, torch.bfloat16, torch.float64]
SUMMED = [*FLOATS, torch.int8]
MOVED = [*SUMMED, torch.bool]
ODD = [0, 1, 3, 0, 17, 255, 1, 1001, 64, 5]

Shapes = list[list[tuple[int, torch.dtype]]]
"""For each rank, the lengths and dtypes of its tensors."""


def cases(size: int, dtypes: list[torch.dtype]) -> dict[str, Shapes]:
    """What ranks may hold, by what is special about it."""
    mixed = [[(n + rank, dtypes[n % len(dtypes)]) for n in ODD] for rank in range(size)]
    one = [[(n, dtypes[0]) for n in ODD] for _ in range(size)]
    tiny = [(n % 40, dtypes[n % len(dtypes)]) for n in range(120)]
    large = (ring.PIECE_BYTES // dtypes[0].itemsize + 7, dtypes[0])
    return {
        "all alike": one,
        "every length and dtype": mixed,
        "all on the last rank": [[] for _ in range(size - 1)] + [mixed[0]],
        "nothing on rank 0": [[], *mixed[1:]],
        "only empty tensors on rank 1": [mixed[0], [(0, dtypes[0])] * 3, *mixed[2:]],
        "one tensor each": [[(33 * rank, dtypes[rank % 2])] for rank in range(size)],
        "tiny ones around a large one": [[*tiny[:50], large, *tiny[50:]] for _ in range(size)],
        "nothing": [[] for _ in range(size)],
        "nothing but empty tensors": [[(0, dtypes[0]), (0, dtypes[1])] for _ in range(size)],
    }


def inputs(shapes: Shapes, seed: int) -> list[list[Tensor]]:
    """Slices of larger tensors, at odd places."""
    return [
        [
            values(numel + 1, seed + index + 3 * holder, dtype)[1:]
            for index, (numel, dtype) in enumerate(tensors)
        ]
        for holder, tensors in enumerate(shapes)
    ]


def blank(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:] for tensor in tensors]


def same(parts: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, parts, expected)) and len(parts) == len(expected)


def total_of(shapes: Shapes) -> list[int]:
    return [sum(numel * dtype.itemsize for numel, dtype in tensors) for tensors in shapes]


def check_gather(communicator: Communicator, traffic: Traffic, shapes: Shapes) -> None:
    rank = communicator.rank
    expected = inputs(shapes, seed=0)
    parts = [
        [each.clone() for each in tensors] if holder == rank else blank(tensors)
        for holder, tensors in enumerate(expected)
    ]
    traffic.clear()
    handle = communicator.gather_parts(parts)
    handle.wait()
    assert handle.done()
    handle.wait()
    assert all(map(same, parts, expected))
    sent = sent_bytes("all_gather", total_of(shapes), rank)
    assert traffic.sent() == ({("dp", "all_gather"): sent} if sent else {})


def check_reduce(communicator: Communicator, traffic: Traffic, shapes: Shapes) -> None:
    rank = communicator.rank
    everyone = [inputs(shapes, seed) for seed in range(communicator.size)]
    own = [[parts[rank][i] for parts in everyone] for i in range(len(shapes[rank]))]
    expected = [torch.stack(each).sum(0).to(each[0].dtype) for each in own]
    parts = inputs(shapes, seed=rank)
    traffic.clear()
    handle = communicator.reduce_parts(parts)
    handle.wait()
    assert handle.done()
    assert same(parts[rank], expected)
    sent = sent_bytes("reduce_scatter", total_of(shapes), rank)
    assert traffic.sent() == ({("dp", "reduce_scatter"): sent} if sent else {})


def check_scale(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    for shapes in cases(size, FLOATS).values():
        parts = inputs(shapes, seed=7)
        communicator.reduce_parts(parts, scale=0.5).wait()
        halves = [each * size * 0.5 for each in inputs(shapes, seed=7)[rank]]
        assert same(parts[rank], halves)


def check(communicator: Communicator, traffic: Traffic) -> None:
    for shapes in cases(communicator.size, MOVED).values():
        check_gather(communicator, traffic, shapes)
    for shapes in cases(communicator.size, SUMMED).values():
        check_reduce(communicator, traffic, shapes)
    check_scale(communicator)
    communicator.barrier()


@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.ranks(n, timeout=60)) for n in (2, 3)]
)
def test_parts_of_many_lengths_and_dtypes(monkeypatch, world):
    large = ring.PIECE_BYTES
    for opened, piece_bytes in ((open_ring, 64), (open_ring, large), (open_native, 64)):
        monkeypatch.setattr(ring, "PIECE_BYTES", piece_bytes)
        traffic = Traffic()
        communicator = opened(traffic)
        check(communicator, traffic)
        communicator.close()


@pytest.mark.ranks(2)
def test_parameters_that_need_gradients():
    for communicator in (open_ring(Traffic()), open_native(Traffic())):
        weight = torch.nn.Parameter(torch.full((4, 3), float(communicator.rank)))
        flat = weight.view(-1)
        communicator.gather_parts([[flat[:5], flat[5:6]], [flat[6:]]]).wait()
        assert weight.flatten().tolist() == [0.0] * 6 + [1.0] * 6
        communicator.reduce_parts([[flat[:5], flat[5:6]], [flat[6:]]]).wait()
        mine = weight.flatten()[:6] if communicator.rank == 0 else weight.flatten()[6:]
        assert mine.tolist() == [2.0 * communicator.rank] * 6
        communicator.barrier()
        communicator.close()


@pytest.mark.ranks(3)
def test_what_is_sent_may_be_written_just_before():
    for communicator in (open_ring(Traffic()), open_native(Traffic())):
        rank, others = communicator.rank, [r for r in range(3) if r != communicator.rank]

        def write(tensors, rank=rank):
            for other, each in enumerate(tensors):
                each.fill_(10 * rank + other)

        swapped = [torch.zeros(4 + each) for each in range(3)]
        arrived = list(torch.zeros(3, 4 + rank))
        gathered, summed = (list(torch.zeros(3, 4)) for _ in range(2))
        handles = [
            communicator.all_to_all(swapped, arrived, first=partial(write, swapped)),
            communicator.gather_parts([[t] for t in gathered], first=partial(write, gathered)),
            communicator.reduce_parts([[t] for t in summed], first=partial(write, summed)),
        ]
        for handle in handles:
            handle.wait()
        assert [int(arrived[r][-1]) for r in others] == [10 * r + rank for r in others]
        assert [int(each[0]) for each in gathered] == [0, 11, 22]
        assert int(summed[rank][0]) == 30 + 3 * rank
        communicator.close()


@pytest.mark.ranks(3)
def test_few_messages_for_many_tensors(monkeypatch: pytest.MonkeyPatch):
    communicator = open_ring(Traffic())
    sent: list[int] = []
    send = Neighbors.send

    def counted(self: Neighbors, piece: Tensor, tag: Tag) -> object:
        sent.append(piece.nbytes)
        return send(self, piece, tag)

    monkeypatch.setattr(Neighbors, "send", counted)
    large = ring.PIECE_BYTES // 4 + 10_000  # two messages of float32, the second a small one
    shapes = [[(7, torch.float32)] * 200 + [(large, torch.float32)] + [(9, torch.int8)] * 200] * 3
    nbytes = total_of(shapes)[0]
    communicator.gather_parts(inputs(shapes, 0)).wait()
    assert sum(sent) == 2 * nbytes  # its own and one to pass on
    assert len(sent) == 2 * 2  # the large tensor; its end together with all others
    sent.clear()
    communicator.reduce_parts(inputs(shapes, 0)).wait()
    assert sum(sent) == 2 * nbytes
    assert len(sent) == 2 * 3  # one message per dtype
    communicator.close()


def test_large_tensors_are_not_copied_and_small_ones_are_packed():
    large, small = torch.zeros(1000), [torch.full((2,), float(i)) for i in range(3)]
    cut = ChunkMessages([small[0], large, small[1], torch.zeros(0), small[2]], piece_bytes=1024)
    assert [each.numel() for each in cut.messages] == [256, 256, 256, 232, 6]
    memory = large.untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == memory for each in cut.messages[:4])
    cut.pack()
    assert cut.messages[-1].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    cut.messages[-1].add_(1)
    cut.unpack()
    assert [each.tolist() for each in small] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    one = ChunkMessages([small[0]], piece_bytes=1024)
    assert one.messages[0].data_ptr() == small[0].data_ptr()
    many = ChunkMessages([torch.zeros(numel % 16 + 1) for numel in range(500)], piece_bytes=1024)
    lengths = [each.nbytes for each in many.messages]
    assert sum(lengths) == sum(4 * (numel % 16 + 1) for numel in range(500))
    assert max(lengths) <= 1024
    assert min(lengths[:-1]) > 1024 - 64


def test_sent_bytes():
    lengths = [5, 0, 20]
    assert [sent_bytes("all_gather", lengths, rank) for rank in range(3)] == [25, 5, 20]
    assert [sent_bytes("reduce_scatter", lengths, rank) for rank in range(3)] == [20, 25, 5]
    assert [sent_bytes("all_reduce", lengths, rank) for rank in range(3)] == [45, 30, 25]
    assert sent_bytes("all_gather", [9], 0) == sent_bytes("reduce_scatter", [9], 0) == 0
    with pytest.raises(UsageError, match="sent_elements"):
        sent_bytes("broadcast", lengths, 0)


@pytest.mark.ranks(2)
def test_wrong_parts_are_refused_and_nothing_is_sent():
    traffic = Traffic()
    for communicator in (open_ring(traffic), open_native(traffic)):
        for run in (communicator.gather_parts, communicator.reduce_parts):
            with pytest.raises(UsageError, match="each of 2 ranks, found 3 lists"):
                run([[torch.zeros(2)]] * 3)
            with pytest.raises(UsageError, match=r"1-D and contiguous, found shape \(2, 2\)"):
                run([[torch.zeros(2, 2)]] * 2)
            with pytest.raises(UsageError, match=r"strides \(2,\) among those of rank 0"):
                run([[torch.zeros(3), torch.zeros(8)[::2]]] * 2)
        communicator.close()
    assert not traffic.entries()


@pytest.mark.ranks(2)
def test_errors_name_the_line_of_the_call():
    parts = [[torch.ones(2, dtype=torch.int16)]] * 2  # which the library cannot sum
    native, own = open_native(), open_ring()
    with pytest.raises(CollectiveError, match=r"reduce_scatter #1 \(.*test_communicator.*:\d+\)"):
        native.reduce_parts(parts).wait()
    with pytest.raises(CollectiveError, match=r"all_reduce #2 \(mine\) on axis 'dp'"):
        native.all_reduce(parts[0][0], label="mine").wait()
    own.reduce_parts(parts).wait()
    with pytest.raises(CollectiveError, match=r"reduce_scatter #2 \(.*test_communicator.*:\d+\)"):
        own.reduce_parts(parts, scale=0.5).wait()
    own.close()


def test_a_number_finds_a_communicator_and_keeps_none_alive():
    axis = Axis(name="tp", size=1, rank=0, ranks=(0,), hosts=("here",))
    one, other = (SoloCommunicator(axis, Traffic(), timedelta(seconds=9)) for _ in range(2))
    number = one.number
    assert communicator_of(number) is one
    assert communicator_of(other.number) is other
    del one
    with pytest.raises(UsageError, match="found that its strategy is gone"):
        communicator_of(number)
