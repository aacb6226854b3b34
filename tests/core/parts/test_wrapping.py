"""Another forward for a module: what copies, pickles and signatures see of it."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from drivetrain.parts.wrapping import UninheritedHook, is_wrapped, unwrap_forward, wrap_forward


class Chooses(nn.Module):
    """A forward one of whose arguments has the name that wrappers like to use themselves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs, module="none"):
        return inputs * self.weight, module


def doubled(module, compute, args, kwargs):
    outputs, name = compute(*args, **kwargs)
    return 2 * outputs, name


@pytest.fixture
def wrapped():
    module = Chooses()
    wrap_forward(module, "_doubled", doubled)
    return module


def test_arguments_of_any_name_pass(wrapped):
    assert wrapped(torch.tensor(3.0), module="mine") == (12.0, "mine")
    assert list(inspect.signature(wrapped.forward).parameters) == ["inputs", "module"]


def test_unwrapped_it_computes_as_before(wrapped):
    assert is_wrapped(wrapped, "_doubled")
    unwrap_forward(wrapped, "_doubled")
    assert not is_wrapped(wrapped, "_doubled")
    assert wrapped(torch.tensor(3.0)) == (6.0, "none")
    assert "forward" not in vars(wrapped)


def test_wrappings_nest_and_the_same_key_replaces(wrapped):
    wrap_forward(wrapped, "_again", doubled)
    assert wrapped(torch.tensor(1.0))[0] == 8.0
    wrap_forward(wrapped, "_again", doubled)
    assert wrapped(torch.tensor(1.0))[0] == 8.0
    unwrap_forward(wrapped, "_again")
    assert wrapped(torch.tensor(1.0))[0] == 4.0


def test_a_copy_computes_with_its_own_parameters(wrapped):
    other = copy.deepcopy(wrapped)
    with torch.no_grad():
        other.weight.fill_(5.0)
    assert other(torch.tensor(1.0))[0] == 10.0
    assert wrapped(torch.tensor(1.0))[0] == 4.0


def test_a_pickle_computes_as_its_class_says(wrapped):
    other = pickle.loads(pickle.dumps(wrapped))
    assert other(torch.tensor(1.0))[0] == 2.0
    assert not is_wrapped(other, "_doubled")


def test_hooks_act_but_not_on_copies():
    seen = []
    hook = UninheritedHook(seen.append)
    hook("here")
    copy.deepcopy(hook)("copied")
    assert seen == ["here"]
