"""Runs recorded on ranks, and compared with their reference in the same process."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.registry import strategies
from drivetrain.runtime.world import RECORD_VARIABLE
from drivetrain.verify import Recorder, RecordRequest, RunRecord, compare, digest, judge
from stacks import Residual, Stack

STEPS = 3


def net():
    blocks = [Residual(4, 12, act=nn.ReLU, norm=nn.LayerNorm) for _ in range(2)]
    return Stack(blocks, first=nn.Embedding(10, 4), last=nn.Linear(4, 10, bias=False), tied=True)


def recorded(strategy, damage=None, late=None, *, same=False, seed=1, evaluate=True):
    """Train for some steps with accumulation and clipping, in fp64, and return the record."""
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2)
    request = RecordRequest(steps=STEPS, reference=strategy == strategies().reference())
    recorder = Recorder(request)
    accelerator.observe(recorder)
    torch.manual_seed(0)
    model = net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, (48, 5), generator=generator)
    if same:  # every rank gets all batches
        batches = ids.unflatten(0, (-1, 4))
        ids = batches.repeat_interleave(accelerator.num_processes, 0).flatten(0, 1)
    loader = DataLoader(TensorDataset(ids), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (rows,) in loader:
        with accelerator.accumulate(model):
            output = model(rows)
            loss = nn.functional.cross_entropy(output.flatten(0, 1), rows.roll(1, 1).flatten())
            accelerator.backward(loss)
            if damage:
                damage(model)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            if late and accelerator.sync_gradients:
                late(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if evaluate and accelerator.sync_gradients:
                recorder.note("length of a batch", rows.shape[0])
    accelerator.free_memory()
    return recorder.record


def test_gradients_are_measured_in_every_step():
    record = recorded("ddp")
    names = set(record.steps[0].norms)
    assert "first.weight" in names
    assert [set(step.norms) for step in record.steps] == [names] * STEPS
    assert len({step.norms["first.weight"] for step in record.steps}) == STEPS


def test_a_digest_knows_shapes_and_dtypes():
    batches = torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), 0.0
    assert len({digest(batch) for batch in batches}) == 4


def test_gradients_thrown_away_inside_of_a_window_are_counted():
    numbers = itertools.count()

    def throw_away(model):
        if next(numbers) % 2 == 0:
            for parameter in model.parameters():
                parameter.grad = None

    assert [step.cleared for step in recorded("plain", throw_away).steps] == [1] * STEPS
    assert [step.cleared for step in recorded("plain").steps] == [0] * STEPS


def test_a_record_goes_on_with_the_next_accelerator(tmp_path, monkeypatch):
    request = tmp_path / "request.json"
    RecordRequest(folder=str(tmp_path)).write(request)
    monkeypatch.setenv(RECORD_VARIABLE, str(request))
    for width in (2, 3):
        accelerator = Accelerator(strategy="plain", cpu=True)
        model = nn.Linear(width, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        Accelerator(strategy="plain", cpu=True)  # one that trains nothing changes nothing
        accelerator.backward(model(torch.ones(1, width)).sum())
        optimizer.step()
        accelerator.free_memory()
    record = RunRecord.read(tmp_path)
    assert len(record.steps) == 2
    assert [state["weight"].numel() for state in record.states] == [2, 2, 3]
    assert judge(compare(record, record)) == ("equal", ())
    last = {"weight": torch.ones(1, 3), "bias": torch.ones(1)}
    other = dataclasses.replace(record, states=[*record.states[:2], last])
    assert judge(compare(record, other))[0] == "error"


FORMS = ("ddp", "zero1", "zero3", "fsdp")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", FORMS)
def test_data_parallel_runs_equal_the_reference(strategy):
    run, reference = recorded(strategy), recorded(strategies().reference())
    comparison = compare(run, reference)
    assert not comparison.problem
    assert len(run.steps) == STEPS == comparison.steps
    assert comparison.compared["loss"] == STEPS * 2 * 2  # micro-batches, ranks
    assert comparison.compared["gradient norm"] == STEPS * len(list(net().parameters()))
    parameters = len(list(net().parameters()))
    assert comparison.compared["stepped gradient"] == STEPS * parameters
    assert comparison.compared["optimizer state"] == STEPS * parameters * 3
    assert comparison.compared["note"]
    assert judge(comparison, doubles=True)[0] != "error", comparison.differences


@pytest.mark.ranks(2)
@pytest.mark.complete
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_ranks_that_share_a_replica_equal_the_reference_on_the_same_batches(axis):
    run = recorded({"name": "megatron", axis: 2})
    comparison = compare(run, recorded("plain", same=True))
    assert not comparison.problem
    assert judge(comparison, doubles=True)[0] != "error", comparison.differences
    places = set(run.whereabouts.values())
    assert places >= ({"divided over tp"} if axis == "tp" else {"stage 0", "stage 1"})


@pytest.mark.ranks(2)
def test_a_gradient_that_is_a_little_too_large_is_named():
    """Other data are no fault of the strategy."""

    def enlarge(model):
        model.blocks[1].up.weight.grad.mul_(1 + 1e-6)

    reference = recorded("plain")
    comparison = compare(recorded("ddp", enlarge), reference)
    verdict, errors = judge(comparison, doubles=True)
    first = errors[0]
    assert verdict == "error"
    assert (first.step, first.kind, first.name) == (1, "gradient norm", "blocks.1.up.weight")
    assert 0 < first.relative < 1e-6 < 2 * first.absolute / first.expected

    def later(model, optimizer):
        model.blocks[1].up.weight.grad.mul_(1 + 1e-6)

    first = judge(compare(recorded("ddp", late=later), reference), doubles=True)[1][0]
    assert (first.step, first.kind, first.name) == (1, "stepped gradient", "blocks.1.up.weight")

    def decayed(model, optimizer):
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(1 + 1e-6)

    first = judge(compare(recorded("ddp", late=decayed), reference), doubles=True)[1][0]
    assert (first.step, first.kind) == (2, "optimizer state")
    assert first.name.startswith("0.exp_avg_sq of ")

    comparison = compare(recorded("ddp", seed=2), reference)
    assert comparison.problem.startswith(
        "expected the same batches in both runs, found another batch 1 on data-parallel rank 0"
    )
