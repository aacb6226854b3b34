"""What layers of a group send in backward is under way while gradients of weights are computed."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drivetrain_megatron.plan.divide import BlockPlan, GroupPlan, divide
from drivetrain_megatron.plan.thread_ranks import run_emulated
from drivetrain_megatron.tensor.operators import Edges, TokenShards
from drivetrain_megatron.tensor.partition import even
from drivetrain_megatron.tensor.weight_grad import WeightHalf

WIDTH, INNER, TOKENS = 6, 8, 5
EXACT = {"rtol": 1e-10, "atol": 1e-12}
SEQUENCE = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sequence"])


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Gate and up share an input; what goes in is not a leaf, as in a model."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Diary:
    """Writes down when a rank's collectives begin and end, and when weights get gradients."""

    def __init__(self, ranks, block):
        self.events = []
        for name in ("all_reduce", "reduce_scatter"):
            setattr(ranks, name, self._noting(name, getattr(ranks, name)))
        for name, parameter in block.named_parameters():
            if name.endswith("weight") and "norm" not in name:
                parameter.register_hook(lambda _, name=name: self.events.append(name))

    def _noting(self, name, method):
        def noted(*args, **kwargs):
            self.events.append(f"{name} begins")
            return Noted(method(*args, **kwargs), lambda: self.events.append(f"{name} ends"))

        return noted


class Noted:
    def __init__(self, handle, note):
        self._handle, self._note = handle, note

    def wait(self):
        self._note()
        self._handle.wait()


def plan(columns, entrance="", prefix="mlp."):
    by = even(0, INNER, 2)
    layers = {f"{prefix}{name}": by for name in columns}
    return BlockPlan((GroupPlan(layers, f"{prefix}down", by, entrance),))


def backward_events(division, sharded, autocast=False, run=lambda block, x: block(x)):
    """Return what each of two ranks did in backward, after checking what came out."""
    torch.manual_seed(1)
    whole = Block() if autocast else Block().double()
    x = torch.randn(2, TOKENS, WIDTH, dtype=whole.norm.weight.dtype, requires_grad=True)
    by_tokens = even(-2, TOKENS, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = whole(x)
    expected.square().sum().backward()

    def body(ranks):
        block = copy.deepcopy(whole)
        tokens = TokenShards() if sharded else None
        facts = divide(block, division, Edges(ranks, tokens))
        block.zero_grad()
        diary = Diary(ranks, block)
        own = (by_tokens.take(x, ranks.rank) if sharded else x).detach().requires_grad_()
        if tokens is not None:
            tokens.begin(TOKENS)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(block, own)
        diary.events.clear()
        out.square().sum().backward()
        close = {"rtol": 0.05, "atol": 0.2} if autocast else EXACT
        given = by_tokens.take(x.grad, ranks.rank) if sharded else x.grad
        torch.testing.assert_close(own.grad, given, **close)
        for name, parameter in block.named_parameters():
            partition = facts[name].partition
            if partition is not None:
                part = partition.take(whole.get_parameter(name).grad, ranks.rank)
                torch.testing.assert_close(parameter.grad, part, **close)
                assert parameter.grad.dtype is parameter.dtype
        return diary.events

    return run_emulated(2, body)


@SEQUENCE
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("entrance", ["", "mlp"])
def test_one_sum_is_hidden_behind_all_weights_of_a_group(sharded, autocast, entrance):
    operation = "reduce_scatter" if sharded else "all_reduce"
    for events in backward_events(plan(["gate", "up"], entrance), sharded, autocast):
        assert events[0] == "mlp.down.weight"
        assert events[1] == f"{operation} begins"
        assert set(events[2:4]) == {"mlp.gate.weight", "mlp.up.weight"}
        assert events[4:] == [f"{operation} ends"]


class Inside(nn.Module):
    """Changes what enters before its layers see it."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = x.clone()
        return self.down(F.silu(self.gate(x)) * self.up(x))


@SEQUENCE
def test_layers_that_get_something_else_are_right_without_overlap(sharded, monkeypatch):
    monkeypatch.setattr(f"{__name__}.Mlp", Inside)
    operation = "reduce_scatter" if sharded else "all_reduce"
    for events in backward_events(plan(["gate", "up"], "mlp"), sharded):
        assert events[-2:] == [f"{operation} begins", f"{operation} ends"]


@SEQUENCE
def test_a_layer_alone_hides_its_sum_behind_its_own_weight(sharded, monkeypatch):
    class Plain(Mlp):
        def forward(self, x):
            return self.down(F.silu(self.up(x)))

    here = threading.local()
    compute = WeightHalf.compute

    def noted(half):
        here.events.append("product for a weight")
        return compute(half)

    monkeypatch.setattr(WeightHalf, "compute", noted)

    def body(ranks):
        block, tokens = Plain().double(), TokenShards() if sharded else None
        divide(block, plan(["up"], prefix=""), Edges(ranks, tokens))
        here.events = Diary(ranks, block).events
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
        with (tokens or TokenShards()).of(6):
            out = block(x)
        here.events.clear()
        out.sum().backward()
        return [event for event in here.events if " " in event]

    operation = "reduce_scatter" if sharded else "all_reduce"
    wanted = [f"{operation} begins", "product for a weight", f"{operation} ends"]
    assert [events[1:] for events in run_emulated(2, body)] == [wanted] * 2


@SEQUENCE
def test_recomputed_blocks_and_second_backwards(sharded):
    def recomputed(block, x):
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    def twice(block, x):
        out = block(x)
        torch.autograd.backward(out.sum(), retain_graph=True)
        x.grad = None
        block.zero_grad()
        return out

    operation = "reduce_scatter" if sharded else "all_reduce"
    for run in (recomputed, twice):
        for events in backward_events(plan(["gate", "up"]), sharded, run=run):
            assert events[-1] == f"{operation} ends"
            assert set(events[-3:-1]) == {"mlp.gate.weight", "mlp.up.weight"}


def test_a_copy_of_a_block_computes_the_same():
    torch.manual_seed(1)
    whole = Block().double()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    whole(x).square().sum().backward()

    def body(ranks):
        block = copy.deepcopy(whole)
        facts = divide(block, plan(["gate", "up"]), Edges(ranks))
        block.zero_grad()
        twin, own = copy.deepcopy(block), x.detach().clone().requires_grad_()
        twin(own).square().sum().backward()
        torch.testing.assert_close(own.grad, x.grad, **EXACT)
        for name, parameter in twin.named_parameters():
            expected, partition = whole.get_parameter(name).grad, facts[name].partition
            expected = expected if partition is None else partition.take(expected, ranks.rank)
            torch.testing.assert_close(parameter.grad, expected, **EXACT)
        assert all(parameter.grad is None for parameter in block.parameters())

    run_emulated(2, body)


def test_nothing_outlives_a_forward():
    def body(ranks):
        block = Block().double()
        divide(block, plan(["gate", "up"]), Edges(ranks))
        hooks = [*block.mlp.gate._forward_pre_hooks.values()]
        block(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True))
        assert [vars(hook)["_entered"] for hook in hooks] == [None]

    run_emulated(2, body)
