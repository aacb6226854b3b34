"""The conjugate pairs: values, gradients, traffic, any layout, and nobody's tensor is changed."""

import torch

from drivetrain.collectives import sent_elements
from drivetrain_megatron.plan.trial import run_emulated
from drivetrain_megatron.tensor.operators import copy, gather, reduce, reduce_scatter, scatter
from drivetrain_megatron.tensor.partition import Partition, even, packed
from emulated_tensors import calls, close, numbers

REPLICATED = Partition(1, 6, (((0, 2), (4, 6)), ((2, 4), (4, 6)), ((2, 4),), ()))


def test_copy_sums_gradients_and_leaves_them_alone():
    def body(ranks):
        x = numbers(2, 7).requires_grad_()
        y = copy(x, ranks)
        assert torch.equal(y, x)
        assert calls(ranks) == {}
        grad = numbers(2, 7, seed=ranks.rank)
        before = grad.clone()
        (x_grad,) = torch.autograd.grad(y, x, grad)
        assert torch.equal(grad, before)  # somebody else may hold it
        close(x_grad, sum(numbers(2, 7, seed=rank) for rank in range(3)))
        sent = sent_elements("all_reduce", 14, size=3, rank=ranks.rank)
        assert ranks.traffic.total() == 8 * sent

    run_emulated(3, body)


PARTITIONS = [even(1, 7, 1), even(-2, 7, 2), even(1, 7, 3), even(1, 3, 4), even(-1, 97, 4)]
PARTITIONS += [even(0, 2, 4), packed(-1, (4, 4, 4), 3), REPLICATED]


def check_pairs_are_adjoint(partition):
    size = partition.ranks
    shape = [2, 5, 3]
    shape[partition.dim] = partition.size
    whole = numbers(*shape, seed=50)

    def body(ranks):
        rank = ranks.rank
        share = partition.take(whole, rank).requires_grad_()
        dots = {}
        for name, partial in {"gather": False, "partial": True}.items():
            out = gather(share, ranks, partition, partial=partial)
            assert torch.equal(out, whole)
            assert out.is_contiguous()
            grad = numbers(*shape, seed=rank if partial else 7)
            (back,) = torch.autograd.grad(out, share, grad)
            dots[name] = ((out * grad).sum(), (share * back).sum())
        full = numbers(*shape, seed=rank).requires_grad_()
        for operator in (scatter, reduce_scatter):
            x = whole.clone().requires_grad_() if operator is scatter else full
            out = operator(x, ranks, partition)
            assert out.is_contiguous()
            grad = numbers(*out.shape, seed=rank + 20)
            (back,) = torch.autograd.grad(out, x, grad)
            dots[operator.__name__] = ((out * grad).sum(), (x * back).sum())
        assert torch.equal(scatter(whole, ranks, partition), share)
        summed = sum(numbers(*shape, seed=other) for other in range(size))
        close(reduce_scatter(full, ranks, partition), partition.take(summed, rank))
        return dots

    results = run_emulated(size, body)
    for name in results[0]:
        lefts, rights = zip(*(dots[name] for dots in results), strict=True)
        # Where every rank has the whole, one of them counts: the others repeat it.
        left = lefts[0] if name == "gather" else sum(lefts)
        right = rights[0] if name == "scatter" else sum(rights)
        close(left, right)


def test_pairs_are_adjoint():
    """Sum over ranks of <A x, y> equals that of <x, A^T y>, and shapes and places are right."""
    for partition in PARTITIONS:
        check_pairs_are_adjoint(partition)


def test_second_derivatives():
    def body(ranks):
        x = numbers(3).requires_grad_()
        (grad,) = torch.autograd.grad(copy(x, ranks).pow(3).sum(), x, create_graph=True)
        close(grad, 2 * 3 * x.square())
        grad.sum().backward()
        close(x.grad, 2 * 6 * x)
        y = numbers(3, seed=1 + ranks.rank).requires_grad_()
        total = reduce(y, ranks)
        (grad,) = torch.autograd.grad(total.pow(3).sum(), y, create_graph=True)
        (grad * y).sum().backward()  # each rank a part of the sum
        close(y.grad, 3 * total.square() + 6 * total * total)

    run_emulated(2, body)
