"""Blocks of words as of BERT, how they are planned for two ranks, and how they train divided."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.plan.model import ModelPlan, TensorParallel, describe
from drivetrain_megatron.recording.calls import inputs_for

WORDS, WIDE = 61, 32


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        heads = (each(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for each in (self.q, self.k))
        values = self.v(x).view(*x.shape[:2], -1, 8).transpose(1, 2)
        found = F.scaled_dot_product_attention(*heads, values)
        return self.o(found.transpose(1, 2).flatten(2))


class PostNorm(nn.Module):
    """As in BERT: the input goes into attention as it is."""

    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return self.last(x + self.down(F.gelu(self.up(x))))


class TwoRanks(SoloCommunicator):
    """Two ranks, of which a plan only asks how many there are."""

    def __init__(self):
        self.axis = None

    size, rank = 2, 0


def planned(model, ranks=2, **options) -> ModelPlan:
    """Return how tensor-parallel ranks divide a model."""
    return planned_and_described(model, ranks, **options)[0]


def planned_and_described(model, ranks=2, **options) -> tuple[ModelPlan, str]:
    """Return how ranks divide a model, and the report that says so."""
    config, axis = MegatronConfig(tp=ranks, **options), TwoRanks()
    axis.size = ranks
    tensor = TensorParallel.of(config, model, axis)
    plan = tensor.plan(model, inputs_for(config, model))
    nbytes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    return plan, "\n".join(describe(plan, tensor.facts(model, plan), nbytes, ranks))


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def trained(model, strategy, ids):
    """Return the whole weights after a step of plain SGD, and those of one process."""
    twin = copy.deepcopy(model)
    loss_of(twin, ids).backward()
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    facts = accelerator.strategy_of(model)._facts
    divided = {name for name, known in facts.items() if known.partition is not None}
    accelerator.backward(loss_of(model, ids))
    optimizer.step()
    state = accelerator.get_state_dict(model)
    expected = {name: p.detach() - p.grad for name, p in twin.named_parameters()}
    accelerator.free_memory()
    return divided, {name: state[name] for name in expected}, expected


def batch():
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))
