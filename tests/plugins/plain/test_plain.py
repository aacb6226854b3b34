"""The strategy ``plain``: gradients are means over ranks, in the order of the ranks."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import ConfigError, UsageError
from drivetrain.registry import strategies
from stacks import Parts


def one_of_two():
    """Return a model that uses a layer only where it is told to."""

    def compute(m, x, both):
        m.seen += x.sum()
        return (m.sometimes(m.always(x)) if both else m.always(x)).square().mean()

    layers = {name: nn.Linear(2, 2) for name in ("always", "sometimes", "never")}
    return Parts(compute, **layers, seen=nn.Buffer(torch.zeros(())))


@pytest.mark.ranks(3)
def test_gradients_are_means_and_buffers_those_of_rank_0():
    accelerator = Accelerator(strategy="plain", cpu=True)
    rank = accelerator.process_index
    model = one_of_two().double()
    model = accelerator.prepare(model)
    inputs = [torch.full((4, 2), each + 1.0, dtype=torch.float64) for each in range(3)]
    accelerator.backward(model(inputs[rank], both=rank == 1))
    alone = one_of_two().double()
    alone.load_state_dict(accelerator.get_state_dict(model))
    losses = [alone(x, both=each == 1) for each, x in enumerate(inputs)]
    (sum(losses) / 3).backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        if "never" in name:
            assert mine.grad is None
        else:
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-14, atol=1e-16), name
    assert float(model.seen) == float(inputs[0].sum())


def test_it_alone_is_the_reference_and_refuses_other_dtypes():
    assert strategies().reference() == "plain"
    config = {"precision": "bf16", "dtypes": {"param": "bf16"}}
    with pytest.raises(ConfigError, match=r"plain: expected dtypes\.param"):
        Accelerator(strategy="plain", config=config, cpu=True).prepare(nn.Linear(2, 2))


@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused():
    accelerator = Accelerator(strategy="plain", cpu=True)
    model = accelerator.prepare(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(UsageError, match="sparse=False"):
        accelerator.backward(model(torch.tensor([1])).sum())
