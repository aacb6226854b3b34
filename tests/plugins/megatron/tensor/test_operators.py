"""The conjugate pairs: values, gradients, traffic, any layout, and nobody's tensor is changed."""

import pytest
import torch
from torch import nn

from drivetrain.collectives import connect, sent_elements
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain.traffic import Traffic
from drivetrain_megatron.plan.thread_ranks import run_emulated
from drivetrain_megatron.tensor.operators import copy, gather, reduce, reduce_scatter, scatter
from drivetrain_megatron.tensor.partition import Partition, even, packed
from drivetrain_megatron.tensor.products import Product, column_product, row_product

RANKS = [1, 2, 3, 4]
each_size = pytest.mark.parametrize("size", RANKS)
REPLICATED = Partition(1, 6, (((0, 2), (4, 6)), ((2, 4), (4, 6)), ((2, 4),), ()))


def numbers(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def calls(ranks):
    return {operation: entry.calls for (_, operation), entry in ranks.traffic.entries().items()}


@each_size
def test_copy_sums_gradients_and_leaves_them_alone(size):
    def body(ranks):
        x = numbers(2, 7).requires_grad_()
        y = copy(x, ranks)
        assert torch.equal(y, x)
        assert calls(ranks) == {}
        grad = numbers(2, 7, seed=ranks.rank)
        before = grad.clone()
        (x_grad,) = torch.autograd.grad(y, x, grad)
        assert torch.equal(grad, before)  # somebody else may hold it
        close(x_grad, sum(numbers(2, 7, seed=rank) for rank in range(size)))
        expected = sent_elements("all_reduce", 14, size=size, rank=ranks.rank) * 8
        assert ranks.traffic.total() == expected

    run_emulated(size, body)


@each_size
def test_reduce_sums_and_passes_the_gradient_on(size):
    def body(ranks):
        x = numbers(2, 7, seed=ranks.rank).requires_grad_()
        before = x.detach().clone()
        y = reduce(x, ranks)
        assert torch.equal(x, before)
        close(y, sum(numbers(2, 7, seed=rank) for rank in range(size)))
        grad = numbers(2, 7, seed=99)
        close(torch.autograd.grad(y, x, grad)[0], grad)
        assert calls(ranks) == ({} if size == 1 else {"all_reduce": 1})

    run_emulated(size, body)


PARTITIONS = [even(1, 7, 1), even(-2, 7, 2), even(1, 7, 3), even(1, 3, 4), even(-1, 97, 4)]
PARTITIONS += [even(0, 2, 4), packed(-1, (4, 4, 4), 3), REPLICATED]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_pairs_are_adjoint(partition):
    """Sum over ranks of <A x, y> equals that of <x, A^T y>, and shapes and places are right."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_and_dtype(dtype):
    def body(ranks):
        partition = even(1, 7, 3)
        whole = numbers(7, 2, 4, dtype=dtype).transpose(0, 1)
        share = scatter(whole, ranks, partition)
        strided = share.transpose(0, 2).contiguous().transpose(0, 2)
        assert not strided.is_contiguous()
        assert torch.equal(gather(strided, ranks, partition), whole)
        x = whole.clone(memory_format=torch.preserve_format).requires_grad_()
        assert not x.is_contiguous()
        y = reduce(copy(x, ranks), ranks)
        assert y.dtype is dtype
        (grad,) = torch.autograd.grad(y, x, torch.ones((), dtype=dtype).expand(2, 7, 4))
        assert torch.equal(grad, torch.full_like(grad, 3))
        gather(share.requires_grad_(), ranks, partition, partial=True).sum().backward()
        assert torch.equal(share.grad, torch.full_like(share, 3))

    run_emulated(3, body)


def test_a_gradient_that_two_consumers_share_is_not_reduced_in_place():
    def body(ranks):
        x, other = (numbers(4).requires_grad_() for _ in range(2))
        (copy(x, ranks) + other).sum().backward()  # one gradient tensor for both
        assert other.grad.tolist() == [1] * 4
        assert x.grad.tolist() == [2] * 4

    run_emulated(2, body)


@each_size
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "sequence"])
def test_products_equal_one_process(size, transposed, cut):
    x, first, bias, second = numbers(2, 7, 6), numbers(10, 6), numbers(10), numbers(5, 10)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, first, bias, second)]
    out = nn.functional.linear(
        nn.functional.linear(leaves[0], leaves[1], leaves[2]).tanh(), leaves[3]
    )
    grad = numbers(2, 7, 5, seed=5)
    expected = torch.autograd.grad(out, leaves, grad)
    features, tokens = even(0, 10, size), even(1, 7, size)

    def body(ranks):
        rank = ranks.rank
        one = features.take(first, rank)
        two = features.take(second.t(), rank).t()
        mine = [
            tokens.take(x, rank) if cut else x.clone(),
            one.t().contiguous() if transposed else one,
            features.take(bias, rank),
            two.t().contiguous() if transposed else two.contiguous(),
        ]
        for tensor in mine:
            tensor.requires_grad_()
        product = Product(ranks, transposed, tokens if cut else None)
        hidden = column_product(mine[0], mine[1], mine[2], product).tanh()
        result = row_product(hidden, mine[3], product)
        close(result, tokens.take(out, rank) if cut else out.detach())
        forward = {} if size == 1 else dict(calls(ranks))
        grads = torch.autograd.grad(result, mine, tokens.take(grad, rank) if cut else grad.clone())
        close(grads[0], tokens.take(expected[0], rank) if cut else expected[0])
        close(grads[1].t() if transposed else grads[1], features.take(expected[1], rank))
        close(grads[2], features.take(expected[2], rank))
        close(grads[3] if transposed else grads[3].t(), features.take(expected[3].t(), rank))
        if size > 1:
            assert forward == ({"all_gather": 1, "reduce_scatter": 1} if cut else {"all_reduce": 1})
            assert calls(ranks) == dict.fromkeys(forward, 2)
        return ranks.traffic.total()

    sent = sum(run_emulated(size, body))
    # All ranks together: one block, 4 A (t - 1) / t each, A = (2 x 7 x (6 or 5)) x 8 bytes.
    activation = (2 * 7 * 6 + 2 * 7 * 5) / 2 * 8
    assert sent == pytest.approx(4 * activation * (size - 1))


def test_frozen_inputs_and_weights_send_and_compute_nothing():
    def body(ranks):
        x, weight = numbers(3, 4), numbers(2, 4).requires_grad_()
        column_product(x, weight, None, Product(ranks)).sum().backward()
        assert calls(ranks) == {}
        y = x.clone().requires_grad_()
        column_product(y, weight.detach(), None, Product(ranks)).sum().backward()
        assert calls(ranks) == {"all_reduce": 1}
        close(y.grad, 2 * weight.detach().sum(0).expand(3, 4))

    run_emulated(2, body)


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


@pytest.mark.ranks(3)
def test_real_ranks_do_the_same():
    world = World.discover(cpu=True)
    ranks = connect(Mesh.build({"tp": 3}, world)["tp"], Traffic(), world.device, world.timeout)
    tokens, features = even(1, 7, 3), even(0, 10, 3)
    x = tokens.take(numbers(2, 7, 6), ranks.rank).requires_grad_()
    first, second = (features.take(numbers(10, 6, seed=s), ranks.rank) for s in (1, 2))
    product = Product(ranks, sequence=tokens)
    hidden = column_product(x, first, None, product)
    result = gather(row_product(hidden, second, product._replace(transposed=True)), ranks, tokens)
    whole = numbers(2, 7, 6).requires_grad_()
    expected = whole @ numbers(10, 6, seed=1).t() @ numbers(10, 6, seed=2)
    close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    close(x.grad, tokens.take(whole.grad, ranks.rank))
    assert calls(ranks) == {"all_gather": 3, "reduce_scatter": 2}
    ranks.close()
