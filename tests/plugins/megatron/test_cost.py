"""The cost that the strategy states, against ledgers, connections and tensors of real steps."""

import copy

import pytest
import torch

from cases import case
from drivetrain import Accelerator
from drivetrain.collectives import Route
from drivetrain.cost import ModelSpec, Traffic
from drivetrain.model.modules import held_parameters
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run as PlannedRun
from drivetrain.testing.conformance.suite import everyone, is_supported, sent_bytes, sent_since
from drivetrain_megatron import cost as volumes
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.cost import Activation
from drivetrain_megatron.strategy import Megatron
from huggingface_models import ARCHITECTURES, WIDTH, WithLoss, token_batch, word_loss

ROWS, TOKENS = 4, 7


def build(name, layers=2, *, inside=False):
    torch.manual_seed(0)
    model = ARCHITECTURES[name](layers)
    return WithLoss(model) if inside else model


class Run:
    """Steps of a small model under the strategy, and what ``cost`` says of one."""

    def __init__(self, name, *, layers=2, inside=False, window=1, rows=ROWS, adam=False, **options):
        self.rows, self.window, self.inside = rows, window, inside
        self.accelerator = Accelerator(
            strategy={"name": "megatron", **options}, gradient_accumulation_steps=window, cpu=True
        )
        model = build(name, layers, inside=inside)
        whole = copy.deepcopy(model)
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        self.model, self.optimizer = self.accelerator.prepare(
            model, kind(model.parameters(), lr=1e-3)
        )
        self.strategy = self.accelerator.strategy_of(self.model)
        spec = ModelSpec.of(whole, states=2 if adam else 0, inputs=((self.batch(0),), {}))
        self.cost = type(self.strategy).cost(self.strategy.config, spec, self.strategy.run)
        for step in range(2):  # batches are compared in the first forwards
            self.step(step)

    def batch(self, seed):
        return token_batch(seed, rows=self.rows, length=TOKENS)

    def forward(self, seed):
        ids = self.batch(seed)
        output = self.model(ids)
        return output["loss"] if self.inside else word_loss(output, ids)

    def step(self, seed, *, zero_grad=True):
        for micro in range(self.window):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.forward(self.window * seed + micro))
                self.optimizer.step()
                if zero_grad:
                    self.optimizer.zero_grad()

    def sent(self):
        """Return the bytes of one step by (axis, operation)."""
        self.accelerator.traffic.clear()
        self.step(0)
        return {key: count for key, count in self.accelerator.traffic.sent().items() if count}


GIVEN = ((token_batch(0, rows=ROWS, length=TOKENS),), {})


def planned(name, *, ranks, spec=None, **options):
    """Return the cost of a run that is only planned, on rank 0."""
    config = MegatronConfig(**options)
    world = World(size=ranks, local_size=ranks, hosts=("here",) * ranks)
    mesh = Mesh.plan(config.sizes(ranks), world)
    run = PlannedRun(
        world=world, mesh=mesh, precision=Precision(), accumulation=1, traffic=Traffic()
    )
    return Megatron.cost(config, spec or ModelSpec.of(build(name), states=0, inputs=GIVEN), run)


def line_of(ranks, rank=0):
    hosts = ("here",) * ranks
    return Route(Axis(name="tp", size=ranks, rank=rank, ranks=tuple(range(ranks)), hosts=hosts))


def test_formulas_are_those_of_the_papers_and_ranks_together_send_what_a_ring_sends():
    for ranks in (2, 4, 8):
        line = line_of(ranks)
        a = Activation(rows=3, tokens=16, width=8, itemsize=2)
        share = a.numel * a.itemsize * (ranks - 1) // ranks
        for sharded in (False, True):
            assert volumes.group(a, a, line, sharded=sharded).total() == 4 * share
        assert a.summed(line).total() == 2 * share
        assert a.passed("all_gather", line).total() == share
        tokens = a.rows * a.tokens
        sent = {("tp", "all_reduce"): 6 * 4 * tokens * (ranks - 1) // ranks}
        assert volumes.cross_entropy(tokens, 4, line) == sent

    a = Activation(rows=1, tokens=4096, width=4096, itemsize=2)
    for sharded in (False, True):
        layer = 2 * volumes.group(a, a, line_of(8), sharded=sharded).total()
        assert layer == 8 * 4096 * 4096 * 2 * 7 // 8 == 234_881_024

    a = Activation(rows=2, tokens=7, width=5, itemsize=1)
    for ranks in (2, 3, 4, 9):
        lines = [line_of(ranks, rank) for rank in range(ranks)]
        each = [volumes.group(a, a, line, sharded=True).total() for line in lines]
        assert sum(each) == 4 * a.numel * a.itemsize * (ranks - 1)


TP, SHARDS, PP = {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}
INSIDE = {"micro_batches": 4, "layers": 4, "inside": True}
SENT = [
    ("llama-gqa", TP),
    ("gpt2", {**SHARDS, "window": 3}),
    ("gpt2", {**PP, "window": 3}),
    ("llama", {**PP, **INSIDE, "schedule": "interleaved", "chunks": 2}),
]
MORE_SENT = [
    ("encoder", SHARDS),
    ("llama", {**PP, "micro_batches": 2, "inside": True}),
    ("llama", {**PP, **INSIDE, "schedule": "zb-h1"}),
]
ZERO2 = {"data_parallel": {"name": "zero2"}}
SENT_OF_CELLS = [  # two replicas that need each other in each micro-batch
    ("gpt2", {**PP, **ZERO2}),
    ("llama", {**PP, **ZERO2, "micro_batches": 2, "inside": True, "window": 2}),
]
SENT_OF_FOUR = [
    ("gpt2", {**PP, **ZERO2, "window": 3}),
    ("llama", {**PP, **ZERO2, "micro_batches": 1}),
    ("llama", {**PP, **ZERO2, **INSIDE, "schedule": "interleaved", "chunks": 2}),
    ("llama", {**PP, **ZERO2, **INSIDE, "schedule": "zb-h1"}),
    ("llama-mqa", {**SHARDS, "tp": 4}),  # heads, tokens and words are uneven here
    ("gpt2", {"pp": 4, **INSIDE, "micro_batches": 3}),
    ("gpt2", {**SHARDS, **PP, "micro_batches": 2, "inside": True}),
]


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(SENT, marks=pytest.mark.ranks(2)),
        pytest.param(MORE_SENT, marks=[pytest.mark.ranks(2), pytest.mark.exhaustive]),
        pytest.param(SENT_OF_CELLS, marks=pytest.mark.ranks(4)),
        pytest.param(SENT_OF_FOUR, marks=[pytest.mark.ranks(4), pytest.mark.exhaustive]),
    ],
)
def test_bytes_of_a_step(cells):
    """A forward and a backward over each cut; GPT-2 shares a weight between stages."""
    for name, options in cells:
        with case(name, options):
            run = Run(name, **options)
            assert run.sent() == dict(run.cost.sent)


def test_layers_and_few_others_are_all_there_is():
    """The statement in full, from shapes alone: layers, words in and out, cross entropy."""
    line, a = line_of(2), Activation(ROWS, TOKENS, WIDTH, 8)
    expected = 2 * 2 * volumes.group(a, a, line, sharded=False).total()
    expected += 2 * a.summed(line).total()
    expected += volumes.cross_entropy(ROWS * TOKENS, 8, line).total()
    assert planned("llama", ranks=2, tp=2).sent == {("tp", "all_reduce"): expected}


@pytest.mark.skipif(not is_supported(), reason="needs a count of bytes per connection (Linux)")
@pytest.mark.ranks(2)
def test_connections_carry_what_the_ledger_has():
    run = Run("llama", rows=64, **PP)
    everyone(None)
    before, ledger = sent_bytes(), run.accelerator.traffic.total()
    for seed in range(3):
        run.step(seed)
    ledger = run.accelerator.traffic.total() - ledger
    assert abs(sent_since(before) - ledger) <= 0.02 * ledger + 2**16
    assert ledger == 3 * run.cost.total_sent


@pytest.mark.ranks(4)
def test_bytes_held():
    """Parameters, gradients and moments of this rank, to the byte but for Adam's step counts."""
    for name, options in (
        ("gpt2", TP | PP),
        ("llama", {**SHARDS, "data_parallel": {"name": "zero1"}}),
    ):
        with case(name, options):
            check_held(Run(name, adam=True, **options))


def check_held(run):
    run.step(0, zero_grad=False)
    states = [v for state in run.optimizer.optimizer.state.values() for v in state.values()]
    parameters = list(held_parameters(run.model))
    kept = [s.tensor for s in run.strategy.state.shards() if not s.state]
    held = run.cost.held
    assert storage(parameters) == held["parameters"]
    assert storage(states) == pytest.approx(held["optimizer"], abs=8 * len(states))
    with run.strategy._shares.open():
        shown = [p.grad for p in parameters]  # a gradient in pieces has no memory itself
    gradients = [*run.strategy.gradients(), *(g for g in shown if type(g) is torch.Tensor)]
    assert storage(gradients) <= held["gradients"] + 64
    assert storage([*parameters, *kept]) >= held["parameters"]


def storage(tensors):
    """Return the bytes of the storages behind tensors, shared ones once."""
    found = [t.untyped_storage() for t in tensors if t is not None]
    return sum({each.data_ptr(): each.nbytes() for each in found}.values())


def test_planning_leaves_the_model_alone_and_needs_no_values():
    model = build("gpt2")
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    planned("gpt2", ranks=4, tp=2, pp=2, spec=ModelSpec.of(model, inputs=((token_batch(0),), {})))
    assert "forward" not in model.__dict__
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    spec = ModelSpec.of(build("llama").to("meta"), states=0, inputs=GIVEN)
    for options in (TP, PP):
        assert planned("llama", ranks=2, spec=spec, **options) == planned(
            "llama", ranks=2, **options
        )
