"""What ranks tell each other, and that those who disagree hear about it on every rank."""

import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.communication import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)
from drivetrain.errors import CollectiveError, RankMismatchError, UsageError

DTYPES = [torch.bool, torch.int16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64]


@dataclass(repr=False)
class Batch:
    """Shows its address, which differs from rank to rank."""

    x: Tensor


def rank():
    return dist.get_rank()


@pytest.mark.ranks(2)
def test_what_is_gathered_broadcast_and_padded():
    for dtype in DTYPES:
        mine = torch.tensor([0, 1, rank()]).to(dtype)
        expected = [torch.tensor([0, 1, r]).to(dtype) for r in (0, 1)]
        gathered = gather(mine)
        assert gathered.dtype == dtype
        assert (
            gathered.to(torch.complex64).tolist()
            == torch.cat(expected).to(torch.complex64).tolist()
        )
        received = broadcast(mine, from_process=1)
        assert received.to(torch.complex64).tolist() == expected[1].to(torch.complex64).tolist()
        assert mine.to(torch.complex64)[2] == rank(), "the argument changed"

    column = torch.arange(6.0).view(2, 3).t()
    found = gather([column, torch.empty(0, 2), torch.empty(3, 0), Batch(torch.ones(1))])
    torch.testing.assert_close(found[0], torch.cat([column, column]))
    assert [tuple(t.shape) for t in (found[1], found[2], found[3].x)] == [(0, 2), (6, 0), (2,)]
    attached = torch.ones(2, requires_grad=True)
    assert not gather(attached * 2).requires_grad

    mine = {"x": torch.full((2,), rank())}
    assert broadcast(mine, from_process=1)["x"].tolist() == [1, 1]
    assert mine["x"].tolist() == [rank()] * 2
    with pytest.raises(UsageError, match=r"ranks \[0, 1\], found 7"):
        broadcast(mine, from_process=7)

    mine = {"x": torch.ones(1 + rank(), 2), "n": torch.tensor(5)}
    padded = pad_across_processes(mine, pad_index=-1)
    assert padded["x"].tolist() == ([[1, 1], [-1, -1]] if rank() == 0 else [[1, 1], [1, 1]])
    assert padded["n"].item() == 5
    assert mine["x"].shape == (1 + rank(), 2)
    first = pad_across_processes(torch.ones(1 + rank(), 1), dim=-2, pad_first=True)
    assert first.tolist() == ([[0], [1]] if rank() == 0 else [[1], [1]])
    assert gather(padded)["x"].shape == (4, 2)


@pytest.mark.ranks(3)
def test_unequal_shapes_are_an_error_on_every_rank():
    for operation in (gather, broadcast, reduce):
        with pytest.raises(RankMismatchError) as caught:
            operation({"x": torch.ones(2 if rank() == 1 else 3, 4)})
        message = str(caught.value)
        assert "ranks 0, 2: " in message
        assert "float32(3, 4)" in message
        assert "; rank 1: " in message
        assert "float32(2, 4)" in message
        assert gather(torch.tensor(rank())).tolist() == [0, 1, 2]  # and life goes on


@pytest.mark.ranks(2)
def test_other_differences_are_errors_too():
    for first, second in (
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        ({"a": torch.ones(2), "b": torch.ones(2)}, {"b": torch.ones(2), "a": torch.ones(2)}),
        (torch.ones(2), "text"),
        (torch.ones(1), torch.tensor(1.0)),
    ):
        with pytest.raises(RankMismatchError, match=r"rank 0: .*; rank 1: "):
            gather(first if rank() == 0 else second)

    with pytest.raises(RankMismatchError, match=r"of 1 dims.*of 2 dims"):
        pad_across_processes(torch.ones(2) if rank() == 0 else torch.ones(2, 2), dim=1)


@pytest.mark.ranks(2)
def test_ranks_in_different_operations_are_told():
    with pytest.raises(CollectiveError) as caught:
        gather(torch.ones(2)) if rank() == 0 else reduce(torch.ones(2), "max")
    assert re.search(r"rank 0: gather of .* at test_communication.py:\d+", str(caught.value))
    assert re.search(r"rank 1: reduce to the max of .* at test_comm", str(caught.value))


@pytest.mark.ranks(3)
def test_objects_reductions_and_groups_of_some_ranks():
    assert gather_object([rank()] * rank()) == [1, 2, 2]
    assert gather_object({"r": rank()}) == [{"r": 0}, {"r": 1}, {"r": 2}]
    assert gather_object("ab") == ["ab"] * 3
    assert broadcast_object_list([rank()] * (1 + rank()), from_process=1) == [1, 1]
    assert gather_object([1] if rank() == 1 else "ab") == ["ab", [1], "ab"]

    mine = torch.tensor([1.0, rank()])
    assert reduce(mine).tolist() == [1.0, 1.0]
    assert reduce([mine], "sum", scale=0.5)[0].tolist() == [1.5, 1.5]
    assert reduce(mine, "max").tolist() == [1.0, 2.0]
    assert reduce(mine, "none", scale=2.0).tolist() == [2.0, 2.0 * rank()]
    assert mine.tolist() == [1.0, rank()], "the argument changed"

    assert reduce(torch.tensor([100], dtype=torch.int8), "mean").tolist() == [100.0]
    assert reduce(torch.tensor([rank()]), "mean").tolist() == [1.0]
    half = reduce(torch.tensor([60000.0], dtype=torch.float16), "mean")
    assert (half.dtype, half.tolist()) == (torch.float16, [60000.0])
    flags = torch.tensor([True, rank() == 1, False])
    assert reduce(flags, "sum").tolist() == [3, 1, 0]
    assert reduce(flags, "max").tolist() == [True, True, False]
    short = reduce(torch.tensor([rank()], dtype=torch.int16), "sum")
    assert (short.dtype, short.tolist()) == (torch.int16, [3])

    pair = dist.new_group([1, 2])
    if rank() > 0:
        assert gather(torch.tensor(rank()), group=pair).tolist() == [1, 2]
        assert broadcast(torch.tensor(rank()), from_process=2, group=pair).item() == 2
        assert reduce(torch.tensor(rank()), "sum", group=pair).item() == 3
        assert reduce(torch.tensor(rank()), group=pair).item() == 1.5
        with pytest.raises(UsageError, match=r"\[1, 2\]"):
            broadcast(torch.tensor(1), from_process=0, group=pair)
    wait_for_everyone()


def test_nested_tensors_are_not_padded():
    rows = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning, match="to_padded_tensor"):
        assert pad_across_processes({"x": rows})["x"] is rows


def test_one_process_is_a_world():
    wait_for_everyone()
    assert gather({"loss": torch.tensor(2.0, requires_grad=True)})["loss"].tolist() == [2.0]
    assert not gather(torch.tensor(2.0, requires_grad=True)).requires_grad
    assert gather_object([1, 2]) == [1, 2]
    assert gather_object("ab") == ["ab"]
    assert broadcast(torch.ones(2)).tolist() == [1, 1]
    assert broadcast_object_list([1, "a"]) == [1, "a"]
    assert reduce(torch.tensor([3]), "mean").tolist() == [3.0]
    for dim in (0, -2):
        assert pad_across_processes(torch.ones(2), dim=dim).tolist() == [1, 1]
    with pytest.raises(UsageError, match="found 1"):
        broadcast(torch.ones(2), from_process=1)
    with pytest.raises(UsageError, match="found 'average'"):
        reduce(torch.ones(2), "average")
    with pytest.raises(TypeError, match="found str"):
        gather("text")
