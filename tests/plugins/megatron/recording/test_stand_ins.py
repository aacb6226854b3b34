"""Parameters of other stages stand under their names: facts, whole inside of ``gathered``."""

import copy
import io

import pytest
import torch
from torch import nn

from drivetrain.errors import UsageError
from stacks import Residual, Stack
from staged_twins import Twins

pytestmark = pytest.mark.ranks(2)

WIDTH = 4
X = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)


class Tied(Stack):
    """The last layer has the weight of the first; calls are counted around the blocks."""

    def __init__(self, blocks=4):
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        super().__init__(
            [Residual(WIDTH) for _ in range(blocks)], first=first, last=last, tied=True
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.number = 0

    def forward(self, x):
        self.calls += 1
        self.number += 1
        return super().forward(x)


def trained(**options):
    torch.manual_seed(0)
    made = {"make": lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options}
    both = Twins(Tied(), (X[:2],), **made)
    both.backward(*(y.square().mean() for y in both(X)), rtol=1e-5)
    return both


def refused(match, use, *args):
    with pytest.raises(UsageError, match=match):
        use(*args)


def test_what_names_of_other_stages_say():
    both = trained()
    model, twin, rank = both.model, both.twin, both.accelerator.mesh["pp"].rank
    shapes = [(n, p.shape) for n, p in twin.named_parameters()]
    assert [(n, p.shape) for n, p in model.named_parameters()] == shapes
    other = model.blocks[0 if rank else 3].up.weight
    listed = next(model.blocks[0 if rank else 3].parameters())
    elsewhere = "another pipeline stage"
    for parameter in (other, listed):
        refused(elsewhere, lambda p=parameter: p.grad.norm().item())
        refused(elsewhere, parameter.sum().item)
    refused(elsewhere, nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    for use in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        refused(r"stage \d has; copy it before .*gathered\(model\).*get_state_dict", use, model)
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad.mul_(2.0)  # on every stage: also on that which has it
    both.step()
    assert all(p.grad is None for p in model.parameters())
    if rank:  # the copy is of before the step
        refused(elsewhere, model.last.weight.sum().item)
    else:
        torch.testing.assert_close(model.last.weight, twin.last.weight)
    found = model.state_dict()
    assert list(found) == list(twin.state_dict())
    torch.testing.assert_close(found, twin.state_dict())
    assert found["first.weight"] is found["last.weight"]


def test_parameters_keep_their_places():
    """A place that gets another parameter is refused, whichever stages the two are on."""
    both = trained()
    model, blocks = both.model, both.model.blocks
    model.last.weight = model.first.weight  # which they are
    model.first.weight = model.last.weight
    for layer, other in ((blocks[0], blocks[1]), (blocks[3], blocks[0])):
        refused("'weight' of Linear is .* replaced", setattr, layer.up, "weight", other.up.weight)
    refused("'bias' of Linear is .* replaced", setattr, blocks[0].up, "bias", None)
    both.backward(*(y.square().mean() for y in both(X)), rtol=1e-5)
    both.check_gradients()


def test_inside_of_gathered_all_are_whole_and_copies_compute_by_themselves():
    both = trained()
    both.step()
    with both.accelerator.gathered(both.model):
        copied = copy.deepcopy(both.model)
        for mine, theirs in zip(both.model.parameters(), both.twin.parameters(), strict=True):
            torch.testing.assert_close(mine.data, theirs.data)
            with torch.no_grad():
                mine.mul_(0.5)
        refused("not to be called while", both.model, X)
    torch.testing.assert_close(copied(X), both.twin(X))
    with torch.no_grad():
        for theirs in both.twin.parameters():
            theirs.mul_(0.5)
        torch.testing.assert_close(*both(X))


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved", "chunks": 2}])
def test_a_forward_counts_once(options):
    both = Twins(Tied(), (X[:2],), **options)
    for rows in (6, 3, 1):
        both.backward(*(y.square().mean() for y in both(X[:rows])), rtol=1e-5)
        both.twin(X[:rows])
        with torch.no_grad():
            both.model(X[:rows])
    assert both.model.number == both.twin.number == 6
    both.check_state()
