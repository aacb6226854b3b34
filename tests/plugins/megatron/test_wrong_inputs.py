"""What cannot be right is an error on every rank, with a way out; nothing is lost without a word.

Plans, worlds and orders of axes are in test_megatron_plans, different batches in
test_megatron_batches, ranks that fail or die in test_megatron_failures.
"""

import copy
import logging
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
WIDTH = 8
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


@pytest.mark.ranks(4)
def test_what_does_not_divide_is_reported():
    """Six heads and a vocabulary of 97 words over four ranks."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    root = logging.getLogger("drivetrain_megatron")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        accelerator, _ = prepared(built(llama), tp=4)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    if accelerator.is_main_process:
        (said,) = [line for line in lines if "not even" in line]
        assert "over 4 ranks" in said
        assert (
            "model.embed_tokens.weight, of whose 97 indices of dim 0 ranks hold 24, 24, 24, 25"
            in said
        )
    accelerator.free_memory()


class Skip(nn.Module):
    """Block ``end`` gets what came before block ``start``, too."""

    start, end = 2, 3

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, ids):
        x = self.words(ids)
        kept = [x]
        for index, layer in enumerate(self.layers):
            x = layer(x + kept[self.start] if index == self.end else x)
            kept.append(x)
        return self.head(x)


class EverySkip(Skip):
    """The last block needs the embedding."""

    start, end = 0, 3


@pytest.mark.parametrize("kind", [Skip, EverySkip])
@pytest.mark.parametrize("cut", ["3,1", None])
@pytest.mark.ranks(2)
def test_skip_connections_cross_stages(kind, cut):
    model = built(kind)
    twin = copy.deepcopy(model)
    where = {} if cut is None else {"cut": cut}
    accelerator, model = prepared(model, pp=2, micro_batches=2, **where)
    ids = token_batch(0, rows=4)
    accelerator.backward(outside(model, ids))
    outside(twin, ids).backward()
    check_gradients(accelerator, model, twin)
    accelerator.free_memory()


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


class Choosy(Skip):
    """Chooses by the values of a block's output."""

    end = -1

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = -x
        return self.head(x)


@pytest.mark.ranks(2)
def test_a_model_that_branches_on_hidden_states():
    refused(
        r"expected values for bool\(\).*inside of the model's blocks",
        lambda: prepared(built(Choosy), pp=2),
    )


@pytest.mark.ranks(2)
def test_a_script_that_branches_on_a_promised_loss():
    accelerator, model = prepared(built(gpt2, 4), pp=2)
    ids = token_batch(0, rows=4)
    refused(r"item\(\).*after accelerator.backward", lambda: inside(model, ids).item() > 1)
    refused(r"expected values for bool\(\)", lambda: bool(inside(model, ids) > 1))
    accelerator.free_memory()


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


@pytest.mark.ranks(2)
def test_after_backward_every_rank_may_choose():
    accelerator, model = prepared(built(gpt2, 4), pp=2)
    for loss_of in (outside, inside):
        loss = loss_of(model, token_batch(0, rows=4))
        accelerator.backward(loss)
        assert loss.item() > 1
        assert len(set(everyone(loss.item()))) == 1
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


@pytest.mark.ranks(2)
def test_a_weight_that_is_learned_outside():
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    accelerator, model = prepared(built(gpt2, 4), pp=2)
    ids = token_batch(0, rows=4)
    refused(PENALTY, lambda: accelerator.backward(inside(model, ids) * temperature))
    refused(
        PENALTY,
        lambda: accelerator.backward(step_loss(logits_of(model(ids)) * temperature, ids)),
    )
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_penalty_under_tensor_parallelism():
    """Each rank's own parameters: their gradients are right, and those of what is shared."""
    model = built(llama)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model, tp=2)
    ids = token_batch(0)
    accelerator.backward(outside(model, ids) + penalty(model))
    (outside(twin, ids) + penalty(twin)).backward()
    check_gradients(accelerator, model, twin)
    accelerator.free_memory()


# --- backward that asks for more ---


@LOSSES
@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
@pytest.mark.ranks(2)
def test_a_graph_that_is_kept(loss_of, option):
    accelerator, model = prepared(built(gpt2, 4), pp=2)
    ids = token_batch(0, rows=4)
    loss = loss_of(model, ids)
    refused(
        rf"without options, found {option}.*run the forward again",
        lambda: accelerator.backward(loss, **{option: True}),
    )
    accelerator.backward(loss, **{option: False})
    accelerator.free_memory()


@LOSSES
@pytest.mark.parametrize("accumulation", [1, 3])
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


@pytest.mark.ranks(2)
def test_a_kept_graph_under_tensor_parallelism():
    """Nothing is special there: two backwards of one forward add up."""
    model = built(llama)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model, tp=2)
    ids = token_batch(0)
    for net, backward in ((model, accelerator.backward), (twin, torch.Tensor.backward)):
        loss = outside(net, ids)
        backward(loss, retain_graph=True)
        backward(loss)
    check_gradients(accelerator, model, twin)
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
def test_two_losses_of_one_model_that_makes_its_loss():
    accelerator, model = prepared(built(gpt2, 4), pp=2)
    ids = token_batch(0, rows=4)
    loss = inside(model, ids) + inside(model, ids)
    refused("made of 2 forwards.*run backward for each", lambda: accelerator.backward(loss))
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


@pytest.mark.parametrize(
    ("mine", "accumulation", "match"),
    [
        ({"pp": 2}, (2, 3), "accumulation = 2"),
        (({"pp": 2}, {"tp": 2}), (1, 1), r"strategy\.(tp|pp)"),
        (({"pp": 2, "cut": "3,1"}, {"pp": 2}), (1, 1), r"strategy\.cut"),
        (
            ({"tp": 2}, {"tp": 2, "data_parallel": {"name": "zero1"}}),
            (1, 1),
            r"strategy\.data_parallel",
        ),
    ],
)
@pytest.mark.ranks(2)
def test_ranks_with_different_configurations(mine, accumulation, match):
    rank = int(os.environ["RANK"])
    options = mine[rank] if isinstance(mine, tuple) else mine
    refused(
        f"ranks disagree on the configuration.*{match}",
        lambda: prepared(built(gpt2, 4), accumulation[rank], **options),
        RankMismatchError,
    )


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
@pytest.mark.ranks(2)
def test_ranks_with_different_models(options):
    layers = 2 + 2 * int(os.environ["RANK"])
    refused(
        "ranks disagree on the model",
        lambda: prepared(built(gpt2, layers), **options),
        RankMismatchError,
    )


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize("gradients", [True, False])
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


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.ranks(2)
def test_one_rank_that_stays_away(options, turn):
    """A rank that skips a batch is waited for no longer than the timeout."""
    accelerator, model = prepared(built(gpt2, 4), timeout_s=IN_VAIN_S, **options)
    ids = token_batch(0, rows=4)
    for _ in range(3):
        accelerator.backward(inside(model, ids))
    if accelerator.process_index == turn:
        with pytest.raises(CollectiveError, match="rank"):
            accelerator.backward(inside(model, ids))
    accelerator.free_memory()
