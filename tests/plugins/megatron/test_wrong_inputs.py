"""What cannot be right is an error on every rank, with a way out; nothing is lost without a word.

Plans, worlds and orders of axes are in test_plans and test_config, different batches in
test_training, ranks that fail or die in pipeline/test_pipeline.
"""

import os
from functools import partial

import pytest
import torch
from torch import nn

from cases import case
from cell_twins import Twins, loss_of
from drivetrain import Accelerator
from drivetrain.communication import gather_object
from drivetrain.errors import CollectiveError, RankMismatchError, UsageError
from drivetrain.testing.conformance.suite import everyone
from huggingface_models import gpt2, llama, logits_of, token_batch, word_loss

pytestmark = pytest.mark.ranks(2)

IN_VAIN_S = 30
"""Far more than a wait takes to look around; a test that fails ends by it."""
PENALTY = r"something else in it that wants a gradient, such as a penalty.*weight_decay"
EARLY = r"item\(\).*after accelerator.backward"
IDS = token_batch(0, rows=4)


def inside(model, ids):
    """A loss that the model makes."""
    return model(input_ids=ids, labels=ids).loss


def built(kind=gpt2, layers=4):
    torch.manual_seed(0)
    return kind(layers)


def refused(match, action, kind=UsageError):
    """Check that every rank refuses with the same words."""
    with pytest.raises(kind, match=match) as found:
        action()
    assert len(set(everyone(str(found.value)))) == 1


def test_more_stages_than_blocks():
    """The modules inside of blocks are divided among the stages then."""
    for layers, options in (
        (1, {"micro_batches": 2}),
        (3, {"chunks": 2, "schedule": "interleaved", "micro_batches": 4}),
    ):
        both = Twins(built(layers=layers), pp=2, **options)
        with case(layers):
            both.backward(IDS)
            both.check_gradients()


def test_a_loss_of_one_element_in_another_shape():
    """Torch's backward takes it; the last stage alone failed where all stages get its value."""
    strategy = {"name": "megatron", "pp": 2}
    for steps in (1, 2):
        accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=steps)
        model = accelerator.prepare(built(layers=2))
        for _ in range(steps):
            with accelerator.accumulate(model):
                loss = word_loss(model(input_ids=IDS), IDS).reshape(1)
                accelerator.backward(loss)
        assert loss.shape == (1,)
        assert len(set(everyone(loss.item()))) == 1


def test_a_script_that_branches_on_a_loss():
    """The last stage has the value, and waits for one that waits elsewhere: both learn of it."""
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2},
        config={"launch": {"timeout_s": IN_VAIN_S}},
        cpu=True,
    )
    model, last = accelerator.prepare(built()), accelerator.process_index == 1
    accelerator.backward(loss_of(model, IDS))  # all ranks meet before the first gradients
    loss = loss_of(model, IDS)
    match = "gradient of the output of stage 0.* on rank 1 .*: rank 0 waits in" if last else EARLY
    with pytest.raises(CollectiveError if last else UsageError, match=match):
        if loss.item() > 1:
            accelerator.backward(loss)
    if not last:
        with pytest.raises(CollectiveError, match="rank 1 waits in gradient of the output"):
            gather_object([None])


def penalty(model):
    return 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())


def test_a_penalty_on_parameters():
    """Each rank has other parameters: the loss of the last one knows nothing of the others."""
    for loss, accumulation in ((loss_of, 1), (inside, 2)):
        both = Twins(built(), accumulation=accumulation, pp=2)
        accelerator, model = both.accelerator, both.model
        with case(loss), accelerator.accumulate(model):
            found, one = loss(model, IDS), model.transformer.ln_f.weight.sum()  # of the last stage
            for wrong in (found + penalty(model), found + one):
                refused(PENALTY, partial(accelerator.backward, wrong))
            refused("returned, found none in it", partial(accelerator.backward, one))
            accelerator.backward(found)
    # A loss function runs on the last stage alone; all of them refuse what it made.
    both = Twins(built(), pp=2)

    def wrong(*given):
        return word_loss(*given) + penalty(both.model)

    refused(PENALTY, partial(both.accelerator.pipeline_step, both.model, IDS, IDS, loss_fn=wrong))


def test_a_loss_times_a_value_of_another_stage():
    """Another rank has the value and finds nothing wrong: it does not wait for this one."""
    for loss in (loss_of, inside):
        both = Twins(built(), pp=2)
        wrong = loss(both.model, IDS) * both.model.transformer.wpe.weight.detach().norm()
        kind, match = CollectiveError, "to go from rank|waited|failed"
        if both.accelerator.process_index == 1:
            kind, match = UsageError, r"expected values for backward\(\)"
        with case(loss), pytest.raises(kind, match=match):
            both.accelerator.backward(wrong)


def test_losses_that_are_refused_leave_the_pipeline_as_it_was():
    """Its value is asked for too early, is scaled by a weight, its graph kept, or it is of two."""
    both = Twins(built(), pp=2)
    model, backward = both.model, both.accelerator.backward
    refused(EARLY, lambda: inside(model, IDS).item() > 1)
    refused(r"expected values for bool\(\)", lambda: bool(inside(model, IDS) > 1))
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    refused(PENALTY, lambda: backward(inside(model, IDS) * weight))
    refused(PENALTY, lambda: backward(word_loss(logits_of(model(IDS)) * weight, IDS)))
    refused(
        "made of 2 forwards.*run backward for each",
        lambda: backward(inside(model, IDS) + inside(model, IDS)),
    )
    loss = loss_of(model, IDS)
    refused(
        "without options, found retain_graph.*run the forward again",
        lambda: backward(loss, retain_graph=True),
    )
    backward(loss, retain_graph=False)
    loss_of(both.twin, IDS).backward()
    both.check_gradients()
    for loss in (loss_of, inside):
        with pytest.raises(UsageError, match=r"expected accelerator.backward\(loss\), found"):
            loss(model, IDS).backward()
        found = loss(model, IDS)
        match = r"accelerator\.backward|not have been used"
        with pytest.raises((UsageError, RuntimeError), match=match):
            torch.autograd.grad(found, list(model.parameters()))


def test_a_second_backward():
    late = r"backward has not run, found.*each forward has one|the first of 1 forwards"
    for loss, accumulation in ((loss_of, 3), (inside, 1)):
        both = Twins(built(), accumulation=accumulation, pp=2)
        model, backward = both.model, both.accelerator.backward
        with case(loss), both.accelerator.accumulate(model):
            first = loss(model, IDS)
            backward(first)
            refused("each forward has one backward", partial(backward, first))
        with case(loss), both.accelerator.accumulate(model):
            other = loss(model, IDS)
            refused(late, partial(backward, first))
            backward(other)


def test_second_derivatives_under_tensor_parallelism():
    both = Twins(built(llama, 2), tp=2)
    loss = loss_of(both.model, token_batch(0))
    gradients = torch.autograd.grad(loss, list(both.model.parameters()), create_graph=True)
    with pytest.raises(UsageError, match="expected gradients of layers that ranks share to be"):
        sum(gradient.pow(2).sum() for gradient in gradients).backward()


def test_backwards_in_another_order_and_forwards_without_one():
    # Hugging Face makes its loss in fp32.
    for loss, tolerance in ((loss_of, {}), (inside, {"rtol": 1e-4, "atol": 1e-8})):
        both = Twins(built(), pp=2)
        backward = both.accelerator.backward
        batches = [token_batch(seed, rows=4) for seed in range(3)]
        losses = [loss(both.model, ids) for ids in batches]
        for chosen in (2, 0):
            backward(losses[chosen])
            loss(both.twin, batches[chosen]).backward()
        with case(loss):
            both.check_gradients(**tolerance)
            new = loss(both.model, batches[1])
            refused("each forward has one backward", partial(backward, losses[1]))
        backward(new)
        for each in (both.model, both.twin):
            each.zero_grad()
        if loss is loss_of:  # one loss of two forwards
            for model, run in ((both.model, backward), (both.twin, torch.Tensor.backward)):
                run(loss(model, IDS) + 2 * loss(model, token_batch(1, rows=3)))
            both.check_gradients()


def test_an_accumulation_window_out_of_order():
    both = Twins(built(), accumulation=2, pp=2)
    accelerator, model = both.accelerator, both.model
    first, second = token_batch(0), token_batch(1)
    with accelerator.accumulate(model):
        one, other = loss_of(model, first), loss_of(model, second)
        for wrong in (other, one + other):
            refused("the first of 2 forwards", partial(accelerator.backward, wrong))
        accelerator.backward(one)
    with accelerator.accumulate(model):
        accelerator.backward(other)
    for ids in (first, second):
        (loss_of(both.twin, ids) / 2).backward()
    both.check_gradients()
    with accelerator.accumulate(model):
        loss_of(model, first)


def test_the_output_of_one_pipeline_as_the_input_of_another():
    """As of a GAN's generator: stages without its values failed alone, in words of torch."""
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2}, cpu=True)
    one, other = accelerator.prepare(built(), built())
    made = one(input_ids=IDS).logits
    match = "an output of a pipelined model .*this one's earlier batch.*put both into one module"
    refused(match, lambda: other(inputs_embeds=made.detach()), RankMismatchError)


def test_ranks_that_do_not_agree():
    """On the model, or on whether it trains: some would wait for messages that nobody sends."""
    layers = 2 + 2 * int(os.environ["RANK"])
    other = "ranks disagree on the model"
    refused(other, lambda: Twins(built(layers=layers), pp=2), RankMismatchError)
    for options, gradients in (({"tp": 2}, True), ({"pp": 2}, False)):
        both = Twins(built(), **options)
        if both.accelerator.process_index == 1:
            both.model.train(not gradients)
            torch.set_grad_enabled(gradients)
        what = "training" if gradients else "gradients enabled"
        match = f"rank 0 has {what}: True, and rank 1 has {what}: False.*on all of them together"
        try:
            refused(match, lambda model=both.model: model(IDS), RankMismatchError)
        finally:
            torch.set_grad_enabled(True)
