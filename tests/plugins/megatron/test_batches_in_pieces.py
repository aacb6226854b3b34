"""Batches in pieces in cells: each piece is a call through tensor and pipeline parallelism."""

import copy

import pytest
import torch
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.facade import pieces
from drivetrain.testing.models import OUT, WIDTH
from stacks import Lossy, Tower

pytestmark = pytest.mark.ranks(2)

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class LossyTower(Lossy, Tower):
    """A tower that returns its loss."""


def batch(step, replica):
    """Return rows and their classes, some to be ignored; each has another number of rows."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    rows = 9 + 4 * step + 3 * replica
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    classes = torch.randint(OUT, (rows,), generator=generator)
    return inputs, classes.masked_fill(torch.rand(rows, generator=generator) > 0.7, -100)


def train(cell, option, level, *, window=1, steps=4):
    """Train a cell on pieces and one process on all rows; return how many rows pieces had.

    Args:
        cell: options of ``megatron``.
        option: ``micro_batch``.
        level: where the loss is made: outside, by the model, or by a function handed over; there
            and outside it is a mean of the rows that count.
        window: batches of a step.
        steps: batches in all.
    """
    torch.manual_seed(0)
    model = (LossyTower if level == "inside" else Tower)(4)
    model.example_inputs = batch(0, 0)[0]
    twin = copy.deepcopy(model)
    accelerator = Accelerator(
        strategy={"name": "megatron", **cell},
        gradient_accumulation_steps=window,
        config={"micro_batch": option},
        cpu=True,
    )
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, made)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    replicas, sizes, used = accelerator.mesh["dp"], [], []
    for step in range(steps):
        sizes.append([])
        for inputs, classes in accelerator.micro_batches(batch(step, replicas.rank)):
            sizes[-1].append(len(inputs))
            weight = (classes >= 0).sum()
            if level == "inside":
                accelerator.backward(model(inputs)["loss"])
            elif level == "outside":
                loss = F.cross_entropy(model(inputs), classes)
                accelerator.backward(loss, weight=weight)
                loss.item()  # known at once: backward waits for no later call of the window
            else:
                given = (model, inputs, classes)
                accelerator.pipeline_step(*given, loss_fn=F.cross_entropy, weight=weight)
        optimizer.step()
        optimizer.zero_grad()
        used += [batch(step, replica) for replica in range(replicas.size)]
        if (step + 1) % window == 0:
            inputs, classes = map(torch.cat, zip(*used, strict=True))
            output = twin(inputs)
            loss = output["loss"] if level == "inside" else F.cross_entropy(output, classes)
            loss.backward()
            other.step()
            other.zero_grad()
            used.clear()
    found = accelerator.get_state_dict(model)
    torch.testing.assert_close(found, twin.state_dict(), **EXACT)
    return sizes


CASES = {
    "outside": ({"pp": 2}, "auto", "outside", [[2, 2, 5], [13], [17], [21]]),
    "handed over": (
        {"pp": 2, "micro_batches": 4},
        "auto",
        "handed over",
        [[4, 4, 1], [4, 9], [17], [21]],  # the first batch has no rows for all small ones
    ),
    "inside": ({"pp": 2, "schedule": "zb-h1"}, 5, "inside", [[4, 5], [4, 4, 5], None, None]),
    "tensors": ({"tp": 2}, "auto", "outside", [[1, 8], [13], [17], [21]]),
}


@pytest.mark.complete
@pytest.mark.parametrize("case", CASES)
def test_a_cell_steps_as_one_process_on_all_rows(case):
    """Rows of batches are odd, and windows of two batches, where calls would be the window's."""
    cell, option, level, expected = CASES[case]
    sizes = train(cell, option, level, window=2)
    for found, wanted in zip(sizes, expected, strict=True):
        assert wanted is None or found == wanted


FOUR = {
    "zero2": {"pp": 2, "micro_batches": 4, "data_parallel": {"name": "zero2"}},
    "zero3": {"pp": 2, "data_parallel": {"name": "zero3", "keep_below": 0}},
    "tensors": {"pp": 2, "tp": 2},
}


@pytest.mark.parametrize("cell", FOUR)
@pytest.mark.ranks(4, timeout=60)
def test_replicas_have_as_many_pieces(cell):
    """With ``zero2``, one replica's piece has 1 row where the other's has 4.

    In some pieces of one replica no row counts; the other one waits for its gradients all the same.
    """
    sizes = train(FOUR[cell], "auto", "outside")
    if cell == "zero2":
        assert sizes[0] in ([4, 4, 1], [4, 4, 4])
    train(FOUR[cell], 4, "handed over", window=2)


def test_the_stage_that_needs_most_decides_and_its_peak_grows_with_rows_of_a_part(monkeypatch):
    """One row of each of 3 parts takes what 3 rows take: the room is for four times as much.

    The call in which a pipeline tries how calls are cut takes more, which tells nothing.
    """
    found = []
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "micro_batches": 3},
        config={"micro_batch": "auto"},
        cpu=True,
    )
    need = 1 if accelerator.process_index else 0.5

    def peak(device):
        tries = found == [[3]]
        return int(2**20 * (need * -(-found[-1][-1] // 3) + 9 * tries))

    monkeypatch.setattr(pieces, "_room", lambda device, ranks: 5 * 2**20)
    monkeypatch.setattr(pieces, "_held", lambda device: 0)
    monkeypatch.setattr(pieces, "_peak", peak)
    model = Tower(4)
    model.example_inputs = batch(0, 0)[0]
    model = accelerator.prepare(model)
    for rows in (40, 31, 2):
        found.append([])
        for part in accelerator.micro_batches(torch.randn(rows, WIDTH, dtype=torch.float64)):
            found[-1].append(len(part))
            accelerator.backward(model(part).square().mean())
    assert found == [[3, 3, 12, 12, 10], [9, 12, 10], [2]]
