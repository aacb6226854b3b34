"""Another forward for a module: what copies, pickles and signatures see of it."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from drivetrain.model.modules import UninheritedHook, is_wrapped, unwrap_forward, wrap_forward


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


def test_wrappings_nest_and_the_same_key_replaces(wrapped):
    for _ in range(2):
        wrap_forward(wrapped, "_again", doubled)
        assert wrapped(torch.tensor(1.0))[0] == 8.0
    for key, expected in (("_again", 4.0), ("_doubled", 2.0)):
        assert is_wrapped(wrapped, key)
        unwrap_forward(wrapped, key)
        assert not is_wrapped(wrapped, key)
        assert wrapped(torch.tensor(1.0)) == (expected, "none")
    assert "forward" not in vars(wrapped)


def test_a_copy_computes_with_its_own_parameters_and_a_pickle_as_its_class_says(wrapped):
    other, plain = copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))
    with torch.no_grad():
        other.weight.fill_(5.0)
    assert [each(torch.tensor(1.0))[0] for each in (other, wrapped, plain)] == [10.0, 4.0, 2.0]
    assert not is_wrapped(plain, "_doubled")


def test_hooks_act_but_not_on_copies():
    seen = []
    hook = UninheritedHook(seen.append)
    hook("here")
    copy.deepcopy(hook)("copied")
    assert seen == ["here"]
