"""Mistakes that libraries of this kind have made; others lie with the tests of their modules."""

import pytest
import torch
from torch.nn import functional as F

from cell_twins import Twins, loss_of
from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.facade.settings import GradScalerKwargs
from drivetrain.model.modules import named_parameters
from drivetrain.testing.conformance.suite import everyone
from huggingface_models import VOCABULARY, gpt2, llama, logits_of, token_batch

pytestmark = pytest.mark.ranks(2)


def built(kind=gpt2, *args):
    torch.manual_seed(0)
    return kind(*args)


@pytest.mark.ranks(4)
def test_copies_of_a_tied_weight_stay_alike():
    """Steps of AdamW; one copy is sharded by ZeRO and the other follows it, bit by bit."""
    both = Twins(built(gpt2, 2), optimizer=torch.optim.AdamW, pp=2, data_parallel={"name": "zero1"})
    for step in range(3):
        both.backward(token_batch(2 * step), token_batch(2 * step + 1))
        both.step()
    with torch.no_grad():
        both.model(token_batch(0))  # copies follow before the next forward
    last = both.accelerator.mesh["pp"].rank == 1
    held = both.model.lm_head if last else both.model.transformer.wte
    with both.accelerator.strategy_of(both.model)._builder._shared.computing():
        bits = everyone(held.weight.detach().numpy().tobytes())
    assert len(bits) == 4
    assert len(set(bits)) == 1
    name = "transformer.wte.weight"
    saved, expected = both.accelerator.get_state_dict(both.model), both.twin.state_dict()
    torch.testing.assert_close(saved[name], expected[name], rtol=1e-6, atol=1e-8)


def test_an_exception_leaves_no_trace():
    """Functions of torch are its own, and training goes on as if nothing had been."""
    functions = {name: getattr(F, name) for name in ("cross_entropy", "dropout", "linear")}
    plain = F.cross_entropy(torch.eye(3), torch.arange(3))
    both = Twins(built(llama), tp=2, sequence_parallel=True)
    ids = token_batch(0)

    def fail(*_):
        raise ArithmeticError("sprung")

    for place in (both.model.model.layers[1].mlp, both.model.lm_head):
        handle = place.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            loss_of(both.model, ids)
        handle.remove()
    with pytest.raises(UsageError, match="targets from 0 to 96"):
        F.cross_entropy(logits_of(both.model(ids)).flatten(0, 1), ids.flatten() + VOCABULARY)
    assert all(getattr(F, name) is function for name, function in functions.items())
    torch.testing.assert_close(F.cross_entropy(torch.eye(3), torch.arange(3)), plain)
    both.train(token_batch(0), token_batch(1))


@pytest.mark.parametrize(
    ("precision", "schedule", "accumulation"), [("fp16", "1f1b", 2), ("bf16", "zb-h1", 1)]
)
def test_messages_under_autocast(precision, schedule, accumulation):
    """Gradients travel in the dtype of the outputs, though backward runs outside of autocast."""
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "schedule": schedule},
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        cpu=True,
    )
    twin, model = built(gpt2, 4).float(), built(gpt2, 4).float()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        for micro in range(accumulation):
            ids = token_batch(2 * step + micro, rows=4)
            with accelerator.accumulate(model):
                loss, expected = loss_of(model, ids), loss_of(twin, ids)
                accelerator.backward(loss)
                (expected / accumulation).backward()
        assert loss.item() == pytest.approx(expected.item(), rel=0.02)
        accelerator.unscale_gradients()
        whole = dict(twin.named_parameters())
        for name, parameter in named_parameters(model).items():
            gradient = whole[name].grad
            distance = (parameter.grad - gradient).norm() / gradient.norm()
            assert distance < 0.05, (name, distance)
        optimizer.zero_grad()
        twin.zero_grad()
