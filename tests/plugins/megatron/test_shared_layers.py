"""Layers that several blocks share, and gradients of gradients, under tensor parallelism."""

import pytest
import torch
from torch import nn

from cases import case
from cell_twins import Twins
from divided_steps import check_two_steps
from drivetrain import UsageError
from emulated_tensors import numbers
from mixture_models import BATCH, FAMILIES, LABELED, Expert, huggingface, looped
from mixture_models import WIDTH as WIDE
from stacks import Residual

pytestmark = pytest.mark.ranks(2)

WIDTH, INNER = 8, 12
TP = {"tp": 2}


class SharedBlock(Residual):
    """Adds the output of layers that every block calls, and of two of its own."""

    def __init__(self, shared):
        super().__init__(WIDTH, INNER)
        self.shared = shared

    def forward(self, x):
        return super().forward(x + self.shared(x))


def layers():
    return nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)


def shared_model():
    shared = nn.Sequential(*layers())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(SharedBlock(shared) for _ in range(2)))


def critic():
    blocks = [nn.Sequential(*layers(), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def mean_square(model, x):
    return model(x).square().mean()


def with_penalty(model, x):
    """Return a critic's loss with a penalty on the norm of its gradient (WGAN-GP)."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (gradient.norm(dim=1) - 1).square().mean()


def test_steps_equal_one_process():
    for build, loss in ((shared_model, mean_square), (critic, with_penalty)):
        torch.manual_seed(0)
        both = Twins(build().double(), loss=loss, tp=2)
        mine, whole = (
            sum(p.untyped_storage().nbytes() for p in m.parameters())
            for m in (both.model, both.twin)
        )
        assert mine < 0.8 * whole
        both.train(numbers(4, WIDTH), numbers(4, WIDTH, seed=1))


def test_a_penalty_through_layers_with_one_input_is_refused():
    both = Twins(nn.Sequential(Expert(), Expert()).double(), tp=2)
    with pytest.raises(UsageError, match="fsdp or zero3"):
        both.accelerator.backward(with_penalty(both.model, numbers(4, WIDE)))


# --- mixtures of experts under tensor and pipeline parallelism: equal to one process ---


def test_experts_in_a_loop():
    for cell in ({"tp": 2}, {"pp": 2}):
        torch.manual_seed(0)
        with case(cell):
            # Also of the experts that no token has chosen.
            assert check_two_steps(looped(), BATCH, cell, 1e-12) < 0.52


def check_experts(*families, implementation="eager", tolerance=1e-7, cell=TP):
    for name in families:
        torch.manual_seed(0)
        model = huggingface(name, implementation)
        if implementation is None:
            model = model.float()  # a product of groups has no fp64
        with case(name, implementation, cell):
            assert check_two_steps(model, LABELED, cell, tolerance) < (0.62 if cell == TP else 1)


def test_experts_of_hugging_face():
    check_experts("mixtral", "granite")
    check_experts("gpt_oss", implementation=None, tolerance=1e-4)
    check_experts("gpt_oss", implementation="batched_mm")


@pytest.mark.exhaustive
def test_other_experts_of_hugging_face():
    check_experts(*FAMILIES)
    check_experts("gpt_oss", cell={"pp": 2, "micro_batches": 1})
