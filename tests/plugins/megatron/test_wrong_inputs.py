"""What cannot be right is an error on every rank, with a way out; nothing is lost without a word.

Plans, worlds and orders of axes are in test_megatron_plans, different batches in
test_megatron_batches, ranks that fail or die in test_megatron_failures.
"""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.errors import CollectiveError, RankMismatchError, UsageError
from drivetrain.testing.conformance.twins import everyone
from huggingface_models import VOCABULARY, gpt2, llama, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}
TIMEOUT_S = 3600.0
"""Far beyond a test's own limit: a rank that waits for it fails its test."""
IN_VAIN_S = 4
"""The timeout of tests that wait for it."""
PENALTY = r"something else in it that wants a gradient, such as a penalty.*weight_decay"


def prepared(model, accumulation=1, timeout_s=TIMEOUT_S, **options):
    torch.manual_seed(0)
    accelerator = Accelerator(
        strategy={"name": "megatron", **options},
        gradient_accumulation_steps=accumulation,
        config={"launch": {"timeout_s": timeout_s}},
        cpu=True,
    )
    return accelerator, accelerator.prepare(model)


def built(kind=gpt2, *args, **options):
    torch.manual_seed(0)
    return kind(*args, **options)


def step_loss(output, targets):
    return F.cross_entropy(logits_of(output).view(-1, VOCABULARY), targets.reshape(-1))


def outside(model, ids):
    """A loss that the script makes."""
    return step_loss(model(ids), ids)


def inside(model, ids):
    """A loss that the model makes."""
    return model(input_ids=ids, labels=ids).loss


LOSSES = pytest.mark.parametrize("loss_of", [outside, inside])


def refused(match, action, kind=UsageError):
    """Check that every rank refuses with the same words."""
    with pytest.raises(kind, match=match) as found:
        action()
    assert len(set(everyone(str(found.value)))) == 1


def check_gradients(accelerator, model, twin, **tolerance):
    """Compare gradients with those of one process."""
    tolerance = tolerance or EXACT
    facts, rank = accelerator.strategy_of(model)._facts, accelerator.mesh["tp"].rank
    whole = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        expected, partition = whole[name].grad, facts[name].partition
        expected = expected if partition is None else partition.take(expected, rank)
        torch.testing.assert_close(
            parameter.grad, expected, **tolerance, msg=lambda m, name=name: f"{name} {m}"
        )


# --- models that do not divide ---


@pytest.mark.parametrize(("layers", "chunks"), [(1, 1), (3, 2)])
@pytest.mark.ranks(2)
def test_more_stages_than_blocks(layers, chunks):
    """The modules inside of blocks are divided among the stages then."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    model = built(gpt2, layers)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(
        model, pp=2, chunks=chunks, schedule=schedule, micro_batches=2 * chunks
    )
    ids = token_batch(0, rows=4)
    accelerator.backward(outside(model, ids))
    outside(twin, ids).backward()
    check_gradients(accelerator, model, twin)
    accelerator.free_memory()


# --- choices that depend on values of another stage ---


@pytest.mark.ranks(2)
def test_a_script_that_branches_on_a_loss():
    """The last stage has the value, and waits in vain for those that do not: not for ever."""
    accelerator, model = prepared(built(gpt2, 4), timeout_s=IN_VAIN_S, pp=2)
    last = accelerator.process_index == 1
    loss = outside(model, token_batch(0, rows=4))
    match = "to go from rank 1 to rank 0" if last else r"item\(\).*after accelerator.backward"
    with pytest.raises(CollectiveError if last else UsageError, match=match):
        if loss.item() > 1:
            accelerator.backward(loss)
    everyone(None)  # the first stage stays until the last one has taken its message
    accelerator.free_memory()


# --- losses of which a part would be lost ---


def penalty(model):
    return 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())


@LOSSES
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.ranks(2)
def test_a_penalty_on_parameters(loss_of, accumulation):
    """Each rank has other parameters: the loss of the last one knows nothing of the others."""
    accelerator, model = prepared(built(gpt2, 4), accumulation, pp=2)
    ids = token_batch(0, rows=4)
    with accelerator.accumulate(model):
        loss = loss_of(model, ids)
        refused(PENALTY, lambda: accelerator.backward(loss + penalty(model)))
        refused(
            "made of a tensor that the model returned",
            lambda: accelerator.backward(penalty(model)),
        )
        accelerator.backward(loss + penalty(model).detach())
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_penalty_in_a_loss_function():
    """The function runs on the last stage, which refuses; the others hear of it at once."""
    accelerator, model = prepared(built(gpt2, 4), pp=2)
    ids = token_batch(0, rows=4)
    last = accelerator.process_index == 1
    with pytest.raises(
        UsageError if last else CollectiveError,
        match=PENALTY if last else "stage 0 for micro-batch",
    ):
        accelerator.pipeline_step(
            model, ids, ids, loss_fn=lambda *given: step_loss(*given) + penalty(model)
        )
    accelerator.free_memory()


# --- backward that asks for more ---


@pytest.mark.ranks(2)
def test_losses_that_are_refused_leave_the_pipeline_as_it_was():
    """Its value is asked for too early, is scaled by a weight, its graph kept, or it is of two."""
    model = built(gpt2, 4)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model, pp=2)
    ids, backward = token_batch(0, rows=4), accelerator.backward
    refused(r"item\(\).*after accelerator.backward", lambda: inside(model, ids).item() > 1)
    refused(r"expected values for bool\(\)", lambda: bool(inside(model, ids) > 1))
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    refused(PENALTY, lambda: backward(inside(model, ids) * weight))
    refused(PENALTY, lambda: backward(step_loss(logits_of(model(ids)) * weight, ids)))
    refused(
        "made of 2 forwards.*run backward for each",
        lambda: backward(inside(model, ids) + inside(model, ids)),
    )
    loss = outside(model, ids)
    refused(
        "without options, found retain_graph.*run the forward again",
        lambda: backward(loss, retain_graph=True),
    )
    backward(loss, retain_graph=False)
    outside(twin, ids).backward()
    check_gradients(accelerator, model, twin)
    accelerator.free_memory()


@pytest.mark.parametrize(("loss_of", "accumulation"), [(outside, 3), (inside, 1)])
@pytest.mark.ranks(2)
def test_a_second_backward(loss_of, accumulation):
    accelerator, model = prepared(built(gpt2, 4), accumulation, pp=2)
    ids = token_batch(0, rows=4)
    with accelerator.accumulate(model):
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        refused("each forward has one backward", lambda: accelerator.backward(loss))
    with accelerator.accumulate(model):
        other = loss_of(model, ids)
        refused(
            r"backward has not run, found.*each forward has one|the first of 1 forwards",
            lambda: accelerator.backward(loss),
        )
        accelerator.backward(other)
    accelerator.free_memory()


@LOSSES
@pytest.mark.ranks(2)
def test_a_backward_by_the_user(loss_of):
    accelerator, model = prepared(built(gpt2, 4), pp=2)
    ids = token_batch(0, rows=4)
    loss = loss_of(model, ids)
    with pytest.raises(UsageError, match=r"expected accelerator.backward\(loss\), found"):
        loss.backward()
    loss = loss_of(model, ids)
    with pytest.raises(
        (UsageError, RuntimeError), match=r"accelerator\.backward|not have been used"
    ):
        torch.autograd.grad(loss, list(model.parameters()))
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_second_derivatives_under_tensor_parallelism():
    accelerator, model = prepared(built(llama), tp=2)
    loss = outside(model, token_batch(0))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(UsageError, match="expected gradients of layers that ranks share to be"):
        sum(gradient.pow(2).sum() for gradient in gradients).backward()
    accelerator.free_memory()


# --- forwards and backwards that do not pair ---


@pytest.mark.ranks(2)
def test_one_loss_of_two_forwards():
    model = built(gpt2, 4)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model, pp=2)
    first, second = token_batch(0, rows=4), token_batch(1, rows=3)
    accelerator.backward(outside(model, first) + 2 * outside(model, second))
    (outside(twin, first) + 2 * outside(twin, second)).backward()
    check_gradients(accelerator, model, twin)
    accelerator.free_memory()


@LOSSES
@pytest.mark.ranks(2)
def test_backwards_in_another_order_and_forwards_without_one(loss_of):
    model = built(gpt2, 4)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model, pp=2)
    batches = [token_batch(seed, rows=4) for seed in range(3)]
    losses = [loss_of(model, ids) for ids in batches]
    for chosen in (2, 0):
        accelerator.backward(losses[chosen])
        loss_of(twin, batches[chosen]).backward()
    # Hugging Face makes its loss in fp32.
    tolerance = {"rtol": 1e-4, "atol": 1e-8} if loss_of is inside else EXACT
    check_gradients(accelerator, model, twin, **tolerance)
    new = loss_of(model, batches[1])
    refused("each forward has one backward", lambda: accelerator.backward(losses[1]))
    accelerator.backward(new)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_an_accumulation_window_out_of_order():
    model = built(gpt2, 4)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model, 2, pp=2)
    first, second = token_batch(0), token_batch(1)
    with accelerator.accumulate(model):
        one, other = outside(model, first), outside(model, second)
        for wrong in (other, one + other):
            refused("the first of 2 forwards", lambda wrong=wrong: accelerator.backward(wrong))
        accelerator.backward(one)
    with accelerator.accumulate(model):
        accelerator.backward(other)
    for ids in (first, second):
        (outside(twin, ids) / 2).backward()
    check_gradients(accelerator, model, twin)
    with accelerator.accumulate(model):
        outside(model, first)
    accelerator.free_memory()


# --- ranks that do not agree ---


@pytest.mark.ranks(2)
def test_ranks_with_different_models():
    layers = 2 + 2 * int(os.environ["RANK"])
    refused(
        "ranks disagree on the model",
        lambda: prepared(built(gpt2, layers), pp=2),
        RankMismatchError,
    )


@pytest.mark.parametrize(("options", "gradients"), [({"tp": 2}, True), ({"pp": 2}, False)])
@pytest.mark.ranks(2)
def test_one_rank_evaluates(options, gradients):
    """The others train: they would wait for messages that nobody sends."""
    accelerator, model = prepared(built(gpt2, 4), **options)
    if accelerator.process_index == 1:
        model.train(not gradients)
        torch.set_grad_enabled(gradients)
    what = "training" if gradients else "gradients enabled"
    try:
        refused(
            f"rank 0 has {what}: True, and rank 1 has {what}: False.*on all of them together",
            lambda: model(token_batch(0, rows=4)),
            RankMismatchError,
        )
    finally:
        torch.set_grad_enabled(True)
    accelerator.free_memory()
