"""The awkward models are what they claim to be: deterministic, trainable, and awkward."""

import pytest
import torch

from drivetrain.testing.models import CASES


@pytest.mark.parametrize("name", CASES)
def test_deterministic_and_trainable(name):
    case = CASES[name]
    losses = []
    for _ in range(2):
        model = case.build()
        loss = case.loss(model, case.batch(1, 0))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert case.loss(model, case.batch(1, 1)).item() != losses[0]


def grads(name, rank):
    case = CASES[name]
    model = case.build()
    case.loss(model, case.batch(0, rank)).backward()
    return {name: p.grad is not None for name, p in model.named_parameters()}


def test_each_is_awkward_in_its_way():
    tied, odd, transposed = (CASES[n].build() for n in ("tied", "odd_shapes", "transposed"))
    assert tied.head.weight is tied.embedding.weight
    assert (odd.scale.dim(), odd.empty.numel(), odd.one.numel()) == (0, 0, 1)
    assert not transposed.weight.is_contiguous()
    assert not transposed.kernel.is_contiguous()
    dtypes = {p.dtype for p in CASES["mixed_dtypes"].build().parameters()}
    assert dtypes == {torch.bfloat16, torch.float32, torch.float64}
    assert not grads("unused", 0)["unused.weight"]
    assert not grads("adapted", 0)["frozen.weight"]
    assert grads("branching", 0) != grads("branching", 1) != grads("branching", 2)
    assert not grads("two_outputs", 0)["side.weight"]
    assert max(p.numel() * 8 for p in CASES["large"].build().parameters()) > 25 * 2**20
