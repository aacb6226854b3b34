"""Pipeline parallelism of whole models: losses, gradients and steps equal those of one process."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.testing.conformance.twins import everyone
from huggingface_models import ARCHITECTURES, VOCABULARY, logits_of, token_batch
from word_models import WithLoss, word_loss

ROOT = Path(__file__).parents[4]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def example_gpt(layers):
    """Return the GPT of the example as it stands."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples/train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(48, layers, 6, 32).double()


def one_matrix(layers):
    """Return a GPT whose blocks share a matrix, so that every stage uses it."""
    model = ARCHITECTURES["gpt2"](layers)
    first, *others = model.transformer.h
    for block in others:
        block.mlp.c_fc.weight = first.mlp.c_fc.weight
    return model


MODELS = {**ARCHITECTURES, "example": example_gpt}


def build(name, layers=4):
    torch.manual_seed(0)
    return {**MODELS, "one matrix": one_matrix}[name](layers)


def loss_outside(model, ids):
    return word_loss(model(ids), ids)


def loss_inside(model, ids):
    return model(ids)["loss"]


def check(name, loss_of, *, accumulation=1, rows=4, steps=3, **options):
    model = build(name)
    if loss_of is loss_inside:
        model = WithLoss(model)
    twin = copy.deepcopy(model)
    accelerator = Accelerator(
        strategy={"name": "megatron", **options},
        gradient_accumulation_steps=accumulation,
        cpu=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(steps):
        losses = []
        for micro in range(accumulation):
            ids = token_batch(accumulation * step + micro, rows=rows)
            with accelerator.accumulate(model):
                loss = loss_of(model, ids)
                accelerator.backward(loss)
                losses.append(loss)
                expected = loss_of(twin, ids)
                (expected / accumulation).backward()
                losses.append(expected.detach())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    theirs = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
                    torch.testing.assert_close(norm, theirs, **EXACT)
                optimizer.step()
                optimizer.zero_grad()
        for mine, expected in zip(losses[::2], losses[1::2], strict=True):
            assert mine.item() == pytest.approx(expected.item(), rel=1e-10)
        other.step()
        other.zero_grad()
    whole = dict(twin.named_parameters())
    with accelerator.gathered(model):
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter, whole[key], **EXACT, msg=lambda m, key=key: f"{key} {m}"
            )
    model.eval()
    twin.eval()
    with torch.no_grad():
        ids = token_batch(99, rows=rows)
        torch.testing.assert_close(loss_of(model, ids), loss_of(twin, ids), **EXACT)
    accelerator.free_memory()


EACH = pytest.mark.parametrize("name", list(MODELS))
LOSS = pytest.mark.parametrize("loss_of", [loss_outside, loss_inside])


@EACH
@LOSS
@pytest.mark.ranks(2)
def test_two_stages(name, loss_of):
    check(name, loss_of, pp=2, micro_batches=2)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.ranks(2)
def test_window(name):
    check(name, loss_outside, pp=2, accumulation=3)


@pytest.mark.ranks(3)
def test_three_stages_of_four_blocks():
    name = "gpt2"
    check(name, loss_inside, pp=3, micro_batches=2)  # fewer micro-batches than stages
    check(name, loss_outside, pp=3, micro_batches=3, rows=7)


@pytest.mark.ranks(3)
def test_a_matrix_of_all_stages():
    """The owner adds up the gradients of copies on several ranks; and of two stages on a rank."""
    check("one matrix", loss_inside, pp=3, micro_batches=2)
    check("one matrix", loss_outside, pp=3, micro_batches=3, rows=7)


@pytest.mark.ranks(2)
def test_a_matrix_of_all_stages_in_turns():
    check("one matrix", loss_inside, pp=2, micro_batches=2, schedule="interleaved", chunks=2)


@EACH
@pytest.mark.ranks(4)
def test_four_stages(name):
    check(name, loss_inside, pp=4, micro_batches=4)
    check(name, loss_outside, pp=4, micro_batches=3)


@pytest.mark.ranks(4)
def test_window_of_four_stages():
    check("gpt2", loss_outside, pp=4, accumulation=5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.ranks(2)
def test_schedules(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    check("gpt2", loss_inside, pp=2, micro_batches=4, schedule=schedule, chunks=chunks)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.ranks(4)
def test_over_data_parallel_ranks(inner, schedule):
    check(
        "gpt2", loss_inside, pp=2, micro_batches=3, data_parallel={"name": inner}, schedule=schedule
    )


@EACH
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])
@pytest.mark.ranks(4)
def test_tensor_and_pipeline(name, sequence_parallel):
    options = {"tp": 2, "pp": 2, "sequence_parallel": sequence_parallel, "micro_batches": 2}
    check(name, loss_outside, **options)
    check(name, loss_inside, **options)


@pytest.mark.exhaustive
@EACH
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])
@pytest.mark.ranks(4)
def test_tensor_and_pipeline_in_two_halves(name, sequence_parallel):
    options = {"tp": 2, "pp": 2, "sequence_parallel": sequence_parallel, "micro_batches": 3}
    check(name, loss_inside, **options, schedule="zb-h1")


@pytest.mark.parametrize("inner", ["ddp", "zero1"])
@pytest.mark.ranks(8)
def test_three_dims(inner):
    """tp 2, pp 2 and dp 2 at once, by a name in the configuration."""
    options = {"tp": 2, "pp": 2, "micro_batches": 2, "data_parallel": {"name": inner}}
    check("gpt2", loss_inside, steps=2, **options)


def step_loss(output, targets):
    return F.cross_entropy(logits_of(output).view(-1, VOCABULARY), targets.view(-1))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.ranks(2)
def test_explicit_step(schedule):
    """A loss function is handed over: any schedule, and the loss has its value everywhere."""
    model = build("llama")
    twin = copy.deepcopy(model)
    chunks = 2 if schedule == "interleaved" else 1
    options = {"pp": 2, "micro_batches": 3, "schedule": schedule, "chunks": chunks}
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    model = accelerator.prepare(model)
    ids = token_batch(1, rows=5)
    loss = accelerator.pipeline_step(model, {"input_ids": ids}, ids, loss_fn=step_loss)
    expected = step_loss(twin(ids), ids)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    whole = dict(twin.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[key].grad, **EXACT)
    accelerator.free_memory()


@pytest.mark.ranks(4)
def test_ignored_labels():
    """The mean is over all tokens that count, however they fall into micro-batches."""
    options = {"pp": 2, "tp": 2, "micro_batches": 4}
    model = build("gpt2")
    twin = copy.deepcopy(model)
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    model = accelerator.prepare(model)
    ids = token_batch(3, rows=4)
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[1, :5] = -100
    labels[3] = -100  # a micro-batch without any target
    loss = model(input_ids=ids, labels=labels).loss
    accelerator.backward(loss)
    expected = twin(input_ids=ids, labels=labels).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    whole = dict(twin.named_parameters())
    facts = accelerator.strategy_of(model)._facts
    for key, parameter in model.named_parameters():
        partition = facts[key].partition
        gradient = whole[key].grad
        if partition is not None:
            gradient = partition.take(gradient, accelerator.mesh["tp"].rank)
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-8)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_levels_may_change():
    """A loss that is handed over, one of the model's own, one made outside, and back."""
    model = build("gpt2")
    twin = copy.deepcopy(model)
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "micro_batches": 2, "cut": "profile"}, cpu=True
    )
    model = accelerator.prepare(model)
    bounds = accelerator.strategy_of(model)._builder._planned[1].bounds
    assert len(set(everyone(bounds))) == 1
    whole = dict(twin.named_parameters())
    for step, level in enumerate(["L3", "L1", "L2", "L1", "L3", "L2"]):
        ids = token_batch(step, rows=5)
        expected = step_loss(twin(ids), ids)
        expected.backward()
        if level == "L3":
            accelerator.pipeline_step(model, {"input_ids": ids}, ids, loss_fn=step_loss)
        elif level == "L2":
            unshifted = torch.cat([ids[:, :1], ids], dim=1)[:, :-1]
            accelerator.backward(model(input_ids=ids, labels=unshifted).loss)
            twin.zero_grad()
            twin(input_ids=ids, labels=unshifted).loss.backward()
        else:
            accelerator.backward(step_loss(model(ids), ids))
        for key, parameter in model.named_parameters():
            tolerance = {"rtol": 1e-4, "atol": 1e-7} if level == "L2" else EXACT
            torch.testing.assert_close(parameter.grad, whole[key].grad, **tolerance)
        model.zero_grad()
        twin.zero_grad()
    accelerator.free_memory()
