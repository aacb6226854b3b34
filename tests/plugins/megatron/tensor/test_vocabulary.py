"""Embeddings cut by words: lookups, gradients, padding, words that do not exist."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from cases import case
from cell_twins import Twins
from drivetrain import communication
from drivetrain.collectives import connect
from drivetrain.cost import Traffic
from drivetrain.errors import ConfigError, UsageError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain_megatron.plan.trial import run_emulated
from drivetrain_megatron.tensor.linear import attach_column
from drivetrain_megatron.tensor.operators import Edges, TokenShards, gather
from drivetrain_megatron.tensor.partition import even
from drivetrain_megatron.tensor.vocabulary import (
    ShardedLogits,
    Terms,
    attach_vocabulary,
    cross_entropy,
)
from emulated_tensors import calls, close, numbers
from huggingface_models import llama, token_batch

HIDDEN, TOKENS = 6, 7


def example(vocabulary, padding):
    torch.manual_seed(0)
    module = nn.Embedding(vocabulary, HIDDEN, padding_idx=padding).double()
    words = torch.randint(0, vocabulary, (2, TOKENS))
    words[0, :2] = 0
    if padding is not None:
        words[1, 3] = module.padding_idx
    return module, words


def attached(module, size, ranks, tokens=None):
    """Return a divided copy and how to cut the whole weight's gradient."""
    module = copy.deepcopy(module)
    edges = Edges(ranks, tokens)
    partition = even(0, module.num_embeddings, size)
    attach_vocabulary(module, edges, partition)
    module.weight.data = partition.take(module.weight.data, ranks.rank)
    return module, partition


def check_lookups(size, vocabulary, padding):
    whole, words = example(vocabulary, padding)
    expected = whole(words)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    shards = even(-2, TOKENS, size)

    def body(ranks):
        module, partition = attached(whole, size, ranks)
        out = module(words)
        close(out, expected)
        assert out.requires_grad
        out.backward(grad)
        gradient = partition.take(whole.weight.grad, ranks.rank)
        close(module.weight.grad, gradient)
        assert calls(ranks) == {"all_reduce": 1}
        sent = ranks.traffic.total()
        tokens = TokenShards()  # of a sequence that is cut, too
        module, _ = attached(whole, size, ranks, tokens)
        tokens.begin(TOKENS)
        out = module(words)
        close(out, shards.take(expected, ranks.rank))
        out.backward(shards.take(grad, ranks.rank))
        close(module.weight.grad, gradient)
        close(gather(out, ranks, shards), expected)
        return sent

    sent = sum(run_emulated(size, body))
    assert sent == 2 * expected.numel() * 8 * (size - 1)


def test_lookups_equal_one_process_also_of_shards_of_the_sequence():
    for vocabulary, padding in ((97, None), (97, 96), (97, 50), (3, -1)):
        check_lookups(4, vocabulary, padding)


def test_what_cannot_be_looked_up_or_divided_is_refused():
    whole, words = example(97, None)

    def body(ranks):
        module, _ = attached(whole, 2, ranks)
        for wrong in (97, -1):
            with pytest.raises(UsageError, match=rf"words from 0 to 96, found .* {wrong}"):
                module(torch.tensor([wrong]))
        assert module(words[:, :0]).shape == (2, 0, HIDDEN)
        for other, partition, match in (
            (nn.Embedding(8, 4, max_norm=1.0), even(0, 8, 2), "without max_norm"),
            (nn.Embedding(8, 4, scale_grad_by_freq=True), even(0, 8, 2), "without scale_grad_by"),
            (nn.Embedding(8, 4, sparse=True), even(0, 8, 2), "without sparse"),
            (nn.EmbeddingBag(8, 4), even(0, 8, 2), "leave it out of the plan"),
        ):
            with pytest.raises(ConfigError, match=match):
                attach_vocabulary(other, Edges(ranks), partition)

    run_emulated(2, body)


# --- cross entropy of logits cut over the vocabulary: as torch's, without gathering them ---


SHAPES = [(5, 97), (97,), (0, 97), (3, 2)]


def near(actual, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)


def loss_example(shape, scale=1.0, ignored=None):
    torch.manual_seed(0)
    dim = len(shape) - 1
    logits = scale * torch.randn(shape, dtype=torch.float64)
    target = torch.randint(0, shape[dim], shape[:dim])
    if ignored is not None and target.dim():
        target.view(-1)[::2] = ignored
    return logits, target, dim


def check(size, logits, target, dim, **options):
    partition = even(dim, logits.shape[dim], size)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, **options)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def body(ranks):
        mine = partition.take(logits, ranks.rank).requires_grad_()
        before = mine.detach().clone()
        loss = cross_entropy(mine, target, Terms(ranks, partition, **options))
        forward = calls(ranks)
        assert torch.equal(mine, before)  # the caller's logits are never changed
        assert loss.dtype is expected.dtype
        near(loss, expected)
        loss.backward(grad)
        assert torch.equal(mine, before)
        near(mine.grad, partition.take(whole.grad, ranks.rank))
        assert calls(ranks) == forward  # backward sends nothing
        return ranks.traffic

    return run_emulated(size, body)


def test_shapes_and_reductions():
    for size, shape in itertools.product((1, 4), SHAPES):
        for reduction in ("none", "sum", "mean"):
            check(size, *loss_example(shape), reduction=reduction)


def test_smoothing_weights_and_ignored_targets():
    reductions = itertools.cycle(("none", "sum", "mean"))  # each kind meets all three
    kinds = ((0.0, True), (0.3, False), (0.3, True), (1.0, False))
    for (smoothing, weighted), ignored in itertools.product(kinds, (-100, 3)):
        weight = torch.rand(97, dtype=torch.float64) + 0.1 if weighted else None
        options = {"label_smoothing": smoothing, "ignore_index": ignored, "weight": weight}
        check(3, *loss_example((6, 97), ignored=ignored), reduction=next(reductions), **options)


def test_huge_and_masked_logits_and_no_targets():
    for smoothing in (0.0, 0.1):
        check(4, *loss_example((6, 97), scale=1000.0), label_smoothing=smoothing)

    logits, target, dim = loss_example((6, 97))
    logits[:, 60:] = -torch.inf  # all words of the last rank, and some of another
    target %= 60
    check(4, logits, target, dim)

    for reduction in ("sum", "mean"):
        logits, target, dim = loss_example((6, 97))
        check(3, logits, torch.full_like(target, -100), dim, reduction=reduction)


def test_three_small_reductions_and_one_more_for_smoothing():
    for smoothing, count in ((0.0, 3), (0.1, 4)):
        ledgers = check(4, *loss_example((10, 97)), label_smoothing=smoothing)
        for ledger in ledgers:
            (entry,) = ledger.entries().values()
            assert entry.calls == count
        # All ranks together: 2 (t - 1) numbers per target and all-reduce.
        assert sum(ledger.total() for ledger in ledgers) == count * 10 * 8 * 2 * 3


def check_statistics(dtype):
    logits, target, dim = loss_example((6, 97), scale=3.0)
    logits = logits.to(dtype)
    partition = even(dim, 97, 3)
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole, target)
    expected.backward()

    def body(ranks):
        mine = partition.take(logits, ranks.rank).requires_grad_()
        loss = cross_entropy(mine, target, Terms(ranks, partition))
        assert loss.dtype is dtype
        assert torch.equal(loss, expected.to(dtype))
        loss.backward()
        assert mine.grad.dtype is dtype
        near(mine.grad, partition.take(whole.grad, ranks.rank).to(dtype), rtol=0.01, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert cross_entropy(mine, target, Terms(ranks, partition)).dtype is torch.float32

    run_emulated(3, body)


def test_statistics_are_kept_in_fp32():
    for dtype in (torch.bfloat16, torch.float16):
        check_statistics(dtype)


def test_bad_targets_are_refused():
    def body(ranks):
        partition = even(1, 97, 2)
        logits, target, _ = loss_example((5, 97))
        mine, terms = partition.take(logits, ranks.rank), Terms(ranks, partition)
        with pytest.raises(UsageError, match="targets from 0 to 96, found some from .* to 97"):
            cross_entropy(mine, target.fill_(97), terms)
        whole = ShardedLogits.of(mine, ranks, partition)
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(whole, target[:4])
        with pytest.raises(ValueError, match="max"):
            F.cross_entropy(whole, target, reduction="max")

    run_emulated(2, body)


# --- logits that stay cut over the vocabulary: what keeps them so, what gathers, gradients ---


WORDS = 97


WHOLE = numbers(2, 7, WORDS)
LABELS = torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = LABELS > 40
KEPT = {
    "float": lambda x: x.float().double(),
    "to": lambda x: x.to(torch.float32).to(LABELS.device).to(x),
    "contiguous": lambda x: x.contiguous().clone(),
    "slice": lambda x: x[:, slice(0, -1), :],
    "ellipsis": lambda x: x[..., :-1, :],
    "last token": lambda x: x[:, -1],
    "one batch": lambda x: x[0],
    "mask": lambda x: x[MASK],
    "indices": lambda x: x[:, torch.tensor([3, 1])],
    "view": lambda x: x.view(-1, WORDS),
    "view size": lambda x: x.view(torch.Size((7, 2, WORDS))),
    "reshape": lambda x: x.transpose(0, 1).reshape(-1, x.size(-1)),
    "torch reshape": lambda x: torch.reshape(x, (14, -1)),
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.unflatten(1, (7, 1)),
    "squeeze": lambda x: x[:1].squeeze(0),
    "transpose": lambda x: x.transpose(0, 1).contiguous(),
    "permute": lambda x: x.permute(1, 0, 2),
    "scaled": lambda x: -(2 * (x / 0.7) * 3),
    "concatenated": lambda x: torch.cat([x, 2 * x]),
    "beside each other": lambda x: torch.concat((x, x[:, :2]), dim=-2),
    "softcap": lambda x: torch.tanh(x / 30.0) * 30.0,
}
GATHERED = {
    "softmax": lambda x: x.softmax(-1),
    "argmax": lambda x: x.argmax(-1),
    "words": lambda x: x[..., :50],
    "one word": lambda x: x[:, :, 3],
    "pair": lambda x: x[LABELS > 40, 5],
    "new dim": lambda x: x[None],
    "flat": lambda x: x.view(-1),
    "transposed words": lambda x: x.transpose(1, 2),
    "permuted words": lambda x: x.permute(0, 2, 1),
    "times a tensor": lambda x: x * LABELS.unsqueeze(-1),
    "matmul": lambda x: x @ numbers(WORDS, 3),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "concatenated words": lambda x: torch.cat([x, x], -1),
    "concatenated with others": lambda x: torch.cat([x, torch.zeros(1, 7, WORDS).double()]),
    "many dims": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "probabilities": lambda x: F.cross_entropy(
        x.view(-1, WORDS), WHOLE.view(-1, WORDS).softmax(-1)
    ),
}


def logits_of(ranks, whole=WHOLE, partition=None):
    partition = partition or even(-1, WORDS, ranks.size)
    leaf = partition.take(whole, ranks.rank).requires_grad_()
    return leaf, ShardedLogits.of(leaf * 1, ranks, partition), partition


def check_stays_cut(function, size):
    whole = WHOLE.clone().requires_grad_()
    expected = function(whole)
    grad = numbers(*expected.shape, seed=3)
    expected.backward(grad)

    def body(ranks):
        leaf, logits, partition = logits_of(ranks)
        out = function(logits)
        assert calls(ranks) == {}
        assert out.shape == expected.shape
        assert out.requires_grad
        assert isinstance(out, ShardedLogits)
        assert torch.equal(out.gathered(), expected)
        ranks.traffic.clear()
        torch.autograd.backward([out], [grad])
        assert calls(ranks) == {}
        close(leaf.grad, partition.take(whole.grad, ranks.rank))

    run_emulated(size, body)


def test_stays_cut():
    for name, function in KEPT.items():
        with case(name):
            check_stays_cut(function, 3)


def check_gathers(function):
    whole = WHOLE.clone().requires_grad_()
    expected = function(whole)
    grad = numbers(*expected.shape, seed=3)
    if expected.requires_grad:
        expected.backward(grad)

    def body(ranks):
        leaf, logits, partition = logits_of(ranks)
        out = function(logits)
        assert not isinstance(out, ShardedLogits)
        assert set(calls(ranks)) == {"all_gather"}
        close(out, expected)
        if expected.requires_grad:
            ranks.traffic.clear()
            out.backward(grad)
            assert calls(ranks) == {}  # every rank has the whole gradient: a slice of it
            close(leaf.grad, partition.take(whole.grad, ranks.rank))

    run_emulated(3, body)


def test_gathers_for_everything_else():
    for name, function in GATHERED.items():
        with case(name):
            check_gathers(function)


def indexed(x, index, value=-torch.inf):
    x[index] = value


def divided(x):
    x[:, -1, :] /= 0.7


def in_steps(x):
    x /= 0.7
    x *= 2
    x -= 1
    x.tanh_().mul_(3)


WRITTEN = {
    "one word": lambda x: indexed(x, (..., 5)),
    "some words": lambda x: indexed(x, (slice(None), 0, slice(30, 60)), numbers(30)),
    "below the best": lambda x: indexed(x, x < x.topk(5).values[..., [-1]]),
    "every word by tensors": lambda x: indexed(x, torch.tensor([0]), numbers(7, WORDS)),
    "last token": divided,
    "through a view": lambda x: x[:, -1].view(2, WORDS).masked_fill_(WHOLE[:, 0] > 0, -1.0),
    "masked_fill_": lambda x: x.masked_fill_(MASK[..., None], 0.5),
    "scatter_": lambda x: x.scatter_(-1, LABELS[..., None], -torch.inf),
    "by elements": in_steps,
    "itself": lambda x: x.sub_(x.logsumexp(-1, keepdim=True)),
    "inplace": lambda x: F.relu(x, inplace=True),
    "init": lambda x: nn.init.constant_(x, 2.0),
    "out": lambda x: torch.add(WHOLE, 1, out=x),
}


def check_written(guard, name, size=3):
    write = WRITTEN[name]

    def body(ranks):
        with guard():
            whole = WHOLE.clone()
            above, view, other = whole.unsqueeze(0), whole[:, -1], whole * 1
            expected = write(whole)
            base = logits_of(ranks)[1]
            logits = base.view(2, 7, WORDS)
            above_here, view_here, other_here = base.unsqueeze(0), logits[:, -1], logits * 1
            out = write(logits)
            assert (out is None) == (expected is None)
            here = (logits, base, above_here, view_here, other_here)
            for mine, theirs in zip(here, (whole, whole, above, view, other), strict=True):
                assert isinstance(mine, ShardedLogits)
                close(mine, theirs)
            if name not in ("below the best", "itself"):
                assert torch.equal(logits, whole)
            assert out is None or out is logits or name == "through a view"

    run_emulated(size, body)


def test_without_gradients_it_is_written_to():
    """What is written is seen by views that were made before, and by what it is a view of."""
    for guard, name in itertools.product((torch.no_grad, torch.inference_mode), WRITTEN):
        with case(guard, name):
            check_written(guard, name)


def test_facts_text_and_tensors_like_it_send_nothing():
    def body(ranks):
        _, logits, _ = logits_of(ranks)
        facts = logits.shape, logits.size(-1), logits.ndim, len(logits), logits.numel()
        assert facts == (WHOLE.shape, WORDS, 3, 2, WHOLE.numel())
        assert (logits.dtype, logits.device) == (torch.float64, WHOLE.device)
        assert logits.requires_grad
        assert not logits.is_leaf
        assert not logits.detach().requires_grad
        with torch.no_grad():
            assert not (logits * 2).requires_grad
        assert "(2, 7, 97)" in repr(logits)
        assert f"{logits}" == str(logits) == repr(logits)
        made = [logits.new_zeros(()), logits.new_ones(2, 3), logits.new_full((2,), 7.0)]
        assert all(type(each) is torch.Tensor and each.dtype is torch.float64 for each in made)
        assert made[2].tolist() == [7.0, 7.0]
        in_steps(logits.detach())
        assert calls(ranks) == {}

    run_emulated(2, body)


def test_an_output_that_is_written_to_has_no_gradients_any_more():
    """As of a plain tensor: what backward needs is gone, and it says so."""

    def body(ranks):
        logits = logits_of(ranks)[1].tanh()
        with torch.no_grad():
            logits[..., 5] = 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logits.sum().backward()

    run_emulated(2, body)


def test_writing_with_gradients_is_refused():
    def body(ranks):
        _, logits, _ = logits_of(ranks)
        plain = logits.detach()
        out = torch.zeros(2, dtype=torch.float64)

        def assign():
            logits[0] = 0

        def divide():
            nonlocal logits
            logits /= 2

        for write in (
            assign,
            divide,
            lambda: logits.mul_(2),
            lambda: logits.masked_fill_(MASK, 0),
            lambda: plain.mul_(WHOLE.clone().requires_grad_()),
            lambda: plain.squeeze_(0).transpose_(0, 1),
            lambda: plain.set_(WHOLE),
            lambda: setattr(plain, "data", WHOLE),
        ):
            with pytest.raises(UsageError, match="logits = logits / 2"):
                write()
        with pytest.raises(UsageError, match="not written to"):
            torch.add(WHOLE, 1, out=logits)
        assert torch.equal(logits.gathered(), WHOLE)
        assert torch.equal(out.add_(plain[0, 0, :2]), WHOLE[0, 0, :2])

    run_emulated(2, body)


def sampled(model, ids, new, temperature=0.8, best=5):
    """Generate as plain training scripts do, with a generator of their own."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(new):
        logits = model(ids).logits[:, -1, :]
        logits /= temperature
        values, _ = torch.topk(logits, best)
        logits[logits < values[:, [-1]]] = -float("inf")
        word = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1, generator=generator)
        ids = torch.cat((ids, word), dim=1)
    return ids


@pytest.mark.ranks(2)
def test_sampling_equals_one_process():
    both = Twins(llama(), tp=2)
    model, twin = both.model.eval(), both.twin.eval()
    ids = token_batch(1, rows=3)
    with torch.inference_mode():
        assert isinstance(model(ids).logits, ShardedLogits)
        expected = sampled(twin, ids, new=8)
        assert torch.equal(sampled(model, ids, new=8), expected)
    assert len(expected[:, ids.shape[1] :].unique()) > 3


@pytest.mark.ranks(2)
def test_a_head_on_real_ranks():
    world = World.discover(cpu=True)
    ranks = connect(Mesh.build({"tp": 2}, world)["tp"], Traffic(), world.device, world.timeout)
    torch.manual_seed(0)
    whole = nn.Linear(6, WORDS).double()
    head, partition = copy.deepcopy(whole), even(0, WORDS, 2)
    for parameter in head.parameters():
        parameter.data = partition.take(parameter.data, ranks.rank)
    attach_column(head, Edges(ranks), even(-1, WORDS, 2), logits=True)
    x, x_here = numbers(2, 7, 6).requires_grad_(), numbers(2, 7, 6).requires_grad_()
    F.cross_entropy(whole(x).flatten(0, 1), LABELS.flatten()).backward()
    F.cross_entropy(head(x_here).flatten(0, 1), LABELS.flatten()).backward()
    close(x_here.grad, x.grad)
    for mine, reference in zip(head.parameters(), whole.parameters(), strict=True):
        close(mine.grad, partition.take(reference.grad, ranks.rank))
    assert calls(ranks) == {"all_reduce": 4}
    assert torch.equal(head(x).argmax(-1), whole(x).argmax(-1))
    with torch.no_grad():  # by functions that know nothing of it
        everyone = communication.gather({"logits": head(x)}, group=ranks.axis)["logits"]
        close(everyone, torch.cat([whole(x)] * 2))
        with pytest.raises(UsageError, match="all_reduce on logits"):
            communication.reduce(head(x), "sum", group=ranks.axis)
    ranks.close()


def test_the_node_of_a_leaf_is_found():
    """As of a plain tensor: what is noted there is met by whoever follows the graph."""

    def body(ranks):
        leaf = logits_of(ranks)[1].detach().requires_grad_()
        node = get_gradient_edge(leaf).node
        assert leaf.local().grad_fn.next_functions[0][0] is node
        leaf.view_as(leaf).float().sum().backward()
        close(leaf.grad.gathered(), torch.ones_like(WHOLE))

    run_emulated(2, body)


@pytest.mark.exhaustive
@pytest.mark.parametrize("micro_batches", [3, 1])
@pytest.mark.ranks(4)
def test_micro_batches_of_a_pipeline_send_no_words(micro_batches):
    """The loss outside of the model is made of outputs joined along rows: nothing is gathered."""
    both = Twins(llama(), tp=2, pp=2, micro_batches=micro_batches)
    ids = token_batch(1, rows=5)
    both.backward(ids)  # the first call decides how batches are cut
    for each in (both.model, both.twin):
        each.zero_grad()
    both.accelerator.traffic.clear()
    both.backward(ids)
    assert {name for axis, name in both.accelerator.traffic.sent() if axis == "tp"} == {
        "all_reduce"
    }
    both.check_gradients()
