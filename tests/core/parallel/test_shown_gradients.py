"""What stands at ``p.grad`` where it cannot be a whole gradient: refused by name, and no memory.

What it can be is a matter of ``tests/loops/ways/gradients.py``.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.parallel.gradients import DividedGradient

pytestmark = pytest.mark.ranks(2)


def trained(strategy, **options):
    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def backward(accelerator, model):
    accelerator.backward(model(torch.ones(2, 8)).square().mean())


def test_a_gradient_in_mid_window_can_be_cleared_and_not_read():
    accelerator, model, _ = trained("zero1", gradient_accumulation_steps=2)
    weight = model[0].weight
    with accelerator.accumulate(model):
        backward(accelerator, model)
        for use in (lambda g: g.mul_(2), lambda g: g.norm(), lambda g: g.tolist()):
            with pytest.raises(UsageError, match=r"'0\.weight'.*mid-window.*sync_gradients"):
                use(weight.grad)
        weight.grad.zero_()
        assert isinstance(weight.grad, DividedGradient)
    with accelerator.accumulate(model):
        backward(accelerator, model)
        assert weight.grad.norm() > 0
    accelerator.free_memory()
    assert weight.grad is None


def test_two_gradients_and_more_dims_make_whole_results():
    accelerator, model, _ = trained("zero1")
    backward(accelerator, model)
    matrix, row = model[2].weight.grad, model[0].bias.grad
    whole, whole_row = (torch.tensor(gradient.tolist()) for gradient in (matrix, row))
    torch.testing.assert_close(matrix * row, whole * whole_row)
    torch.testing.assert_close(matrix + torch.ones(3, 4, 16), whole + torch.ones(3, 4, 16))
    torch._foreach_addcmul_([matrix], [whole], [whole], 0.5)
    torch.testing.assert_close(torch.tensor(matrix.tolist()), whole + 0.5 * whole * whole)


def test_it_has_no_memory_is_made_once_and_says_what_it_is():
    accelerator, model, optimizer = trained("zero2")
    seen = set()
    for _ in range(2):
        backward(accelerator, model)
        seen.add(id(model[0].weight.grad))
        optimizer.zero_grad()
    assert len(seen) == 1
    for _ in range(2):
        backward(accelerator, model)
        grad = model[0].weight.grad
        assert grad.data is grad
        assert repr(grad) == f"{grad}"
        assert "of 0.weight, shape (16, 8)" in repr(grad)
        assert not grad.untyped_storage().nbytes()
        for use in (grad.data_ptr, lambda: grad.apply_(abs)):  # noqa: B023
            with pytest.raises(UsageError, match="memory"):
                use()
        with pytest.raises(UsageError, match="out"):
            torch.mul(grad, 2.0, out=grad)
        with pytest.raises(UsageError, match="out"):
            torch.sort(torch.ones(16, 8), out=(grad, torch.empty(0, dtype=torch.long)))
        with pytest.raises(ValueError, match="read-only"):
            grad.T.numpy()[0] = 1.0
        with pytest.raises(UsageError, match="keep its shape"):
            grad.resize_(3, 2)
        rows = grad[3:5]
        with pytest.raises(UsageError, match=r"written into.*p\.grad\[index\] = value"):
            rows.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad()
        assert model[0].weight.grad is None
    accelerator.free_memory()


def test_a_rank_that_reads_alone_is_named():
    accelerator, model, optimizer = trained("zero2")
    backward(accelerator, model)
    with pytest.raises(CollectiveError, match="gradient norm"):
        if accelerator.is_main_process:
            model[0].weight.grad.norm()
        optimizer.step()
    accelerator.free_memory()


def test_a_kept_gradient_that_is_gone_keeps_no_variables_of_the_script():
    accelerator, model, _ = trained("zero1", gradient_accumulation_steps=2)
    weight = model[0].weight

    def window():
        kept = None
        for _ in range(2):
            with accelerator.accumulate(model):
                loss = model(torch.ones(2, 8)).square().mean()
                accelerator.backward(loss)
                kept, weight.grad = weight.grad if kept is None else kept, None
        return kept, weakref.ref(loss)

    def read(gradient):
        batch = torch.ones(2)
        with pytest.raises(UsageError, match="mid-window"):
            gradient.clone()
        return weakref.ref(batch)

    kept, loss = window()
    batch = read(kept)
    gc.collect()
    assert (loss(), batch()) == (None, None)
    accelerator.free_memory()
