"""Cross entropy of logits cut over the vocabulary: as torch's, without gathering them."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.plan.thread_ranks import run_emulated
from drivetrain_megatron.tensor.partition import even, packed
from drivetrain_megatron.tensor.vocabulary import Terms, cross_entropy
from emulated_tensors import calls

SHAPES = [(5, 97), (97,), (2, 97, 3), (2, 97, 3, 2), (0, 97), (3, 2)]


def close(actual, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)


def example(shape, scale=1.0, ignored=None):
    torch.manual_seed(0)
    dim = min(1, len(shape) - 1)
    logits = scale * torch.randn(shape, dtype=torch.float64)
    target = torch.randint(0, shape[dim], (*shape[:dim], *shape[dim + 1 :]))
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
        close(loss, expected)
        loss.backward(grad)
        assert torch.equal(mine, before)
        close(mine.grad, partition.take(whole.grad, ranks.rank))
        assert calls(ranks) == forward  # backward sends nothing
        return ranks.traffic

    return run_emulated(size, body)


def test_shapes_and_reductions():
    for size, shape in itertools.product((1, 4), SHAPES):
        for reduction in ("none", "sum", "mean"):
            check(size, *example(shape), reduction=reduction)


def test_smoothing_weights_and_ignored_targets():
    reductions = itertools.cycle(("none", "sum", "mean"))  # each kind meets all three
    kinds = ((0.0, True), (0.3, False), (0.3, True), (1.0, False))
    shapes = ((6, 97), (2, 97, 3))
    for (smoothing, weighted), ignored, shape in itertools.product(kinds, (-100, 3), shapes):
        weight = torch.rand(97, dtype=torch.float64) + 0.1 if weighted else None
        options = {"label_smoothing": smoothing, "ignore_index": ignored, "weight": weight}
        check(3, *example(shape, ignored=ignored), reduction=next(reductions), **options)


def test_huge_and_masked_logits_and_no_targets():
    for smoothing in (0.0, 0.1):
        check(4, *example((6, 97), scale=1000.0), label_smoothing=smoothing)

    logits, target, dim = example((6, 97))
    logits[:, 60:] = -torch.inf  # all words of the last rank, and some of another
    target %= 60
    check(4, logits, target, dim)

    for reduction in ("sum", "mean"):
        logits, target, dim = example((6, 97))
        check(3, logits, torch.full_like(target, -100), dim, reduction=reduction)


def test_three_small_reductions_and_one_more_for_smoothing():
    for smoothing, count in ((0.0, 3), (0.1, 4)):
        ledgers = check(4, *example((10, 97)), label_smoothing=smoothing)
        for ledger in ledgers:
            (entry,) = ledger.entries().values()
            assert entry.calls == count
        # All ranks together: 2 (t - 1) numbers per target and all-reduce.
        assert sum(ledger.total() for ledger in ledgers) == count * 10 * 8 * 2 * 3


def check_statistics(dtype):
    logits, target, dim = example((6, 97), scale=3.0)
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
        close(mine.grad, partition.take(whole.grad, ranks.rank).to(dtype), rtol=0.01, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert cross_entropy(mine, target, Terms(ranks, partition)).dtype is torch.float32

    run_emulated(3, body)


def test_statistics_are_kept_in_fp32():
    for dtype in (torch.bfloat16, torch.float16):
        check_statistics(dtype)


def test_bad_targets_are_refused():
    def body(ranks):
        partition = even(1, 97, 2)
        logits, target, _ = example((5, 97))
        mine, terms = partition.take(logits, ranks.rank), Terms(ranks, partition)
        with pytest.raises(UsageError, match="probabilities"):
            cross_entropy(mine, logits.softmax(-1), terms)
        with pytest.raises(UsageError, match="targets from 0 to 96, found some from .* to 97"):
            cross_entropy(mine, target.fill_(97), terms)
        with pytest.raises(UsageError, match=r"shapes .* and \(4,\)"):
            cross_entropy(mine, target[:4], terms)
        with pytest.raises(UsageError, match="classes of this rank"):
            cross_entropy(logits, target, terms)  # gathered: each word would count twice
        with pytest.raises(UsageError, match="'max'"):
            cross_entropy(mine, target, terms._replace(reduction="max"))
        with pytest.raises(ConfigError, match="one range per rank"):
            cross_entropy(mine, target, terms._replace(partition=packed(1, (50, 47), 2)))

    run_emulated(2, body)
