"""The cost that the strategy states, against ledgers, connections and tensors of real steps."""

import copy

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run as PlannedRun
from drivetrain.testing.conformance.tcp import is_supported, sent_bytes, sent_since
from drivetrain.testing.conformance.twins import everyone
from drivetrain.traffic import Traffic
from drivetrain_megatron import Megatron, volumes
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.volumes import Activation, RanksOfAxis
from huggingface_models import ARCHITECTURES, WIDTH, token_batch
from word_models import WithLoss, word_loss

ROWS, TOKENS = 4, 7
TRANSFORMERS = pytest.mark.parametrize("name", ["llama", "gpt2", "encoder"])
SEQUENCE = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])


def build(name, layers, *, inside=False):
    torch.manual_seed(0)
    model = ARCHITECTURES[name](layers)
    return WithLoss(model) if inside else model


class Run:
    """Steps of a small model under the strategy, and what ``cost`` says of one."""

    def __init__(self, name, *, layers=2, inside=False, window=1, rows=ROWS, adam=False, **options):
        self.rows, self.window, self.inside = rows, window, inside
        self.accelerator = Accelerator(
            strategy={"name": "megatron", **options},
            gradient_accumulation_steps=window,
            cpu=True,
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
        self.spec = spec
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

    def sent(self, steps=2):
        """Return the bytes of one step by (axis, operation)."""
        before = self.accelerator.traffic.sent()
        for seed in range(steps):
            self.step(seed)
        after = self.accelerator.traffic.sent()
        growth = {key: count - before.get(key, 0) for key, count in after.items()}
        assert all(count % steps == 0 for count in growth.values())
        return {key: count // steps for key, count in growth.items() if count}

    def calls(self):
        """Return how many collectives over tp one step makes: in forward, and in backward."""
        self.accelerator.traffic.clear()
        loss = self.forward(0)
        forward = self.count()
        self.accelerator.backward(loss)
        both = self.count()
        return forward, {op: both[op] - forward.get(op, 0) for op in both}

    def count(self):
        entries = self.accelerator.traffic.entries()
        return {op: entry.calls for (axis, op), entry in entries.items() if axis == "tp"}

    def close(self):
        everyone(None)
        self.accelerator.free_memory()


def planned(name, layers=2, *, ranks, spec=None, **options):
    """Return the cost of a run that is only planned, on rank 0."""
    config = MegatronConfig(**options)
    world = World(size=ranks, local_size=ranks, hosts=("here",) * ranks)
    run = PlannedRun(
        world=world,
        mesh=Mesh.plan(config.sizes(ranks), world),
        precision=Precision(),
        accumulation=1,
        traffic=Traffic(),
    )
    given = ((token_batch(0, rows=ROWS, length=TOKENS),), {})
    model = spec or ModelSpec.of(build(name, layers), states=0, inputs=given)
    return Megatron.cost(config, model, run)


def check_sent(name, **options):
    run = Run(name, **options)
    assert run.sent() == dict(run.cost.sent)
    run.close()


# --- the formulas ---


def test_formulas_are_those_of_the_papers_and_ranks_together_send_what_a_ring_sends():
    for ranks in (2, 4, 8):
        line = RanksOfAxis(ranks)
        a = Activation(rows=3, tokens=16, width=8, itemsize=2)
        share = a.nbytes * (ranks - 1) // ranks
        for sharded in (False, True):
            assert volumes.group(a, a, line, sharded=sharded).total() == 4 * share
        assert volumes.whole(a, line).total() == 2 * share
        assert volumes.joined(a, line).total() == share
        tokens = a.rows * a.tokens
        assert volumes.cross_entropy(tokens, 4, line) == {
            "all_reduce": 6 * 4 * tokens * (ranks - 1) // ranks
        }

    a = Activation(rows=1, tokens=4096, width=4096, itemsize=2)
    for sharded in (False, True):
        layer = 2 * volumes.group(a, a, RanksOfAxis(8), sharded=sharded).total()
        assert layer == 8 * 4096 * 4096 * 2 * 7 // 8 == 234_881_024

    a = Activation(rows=2, tokens=7, width=5, itemsize=1)
    for ranks in (2, 3, 4, 9):
        each = [
            volumes.group(a, a, RanksOfAxis(ranks, r), sharded=True).total() for r in range(ranks)
        ]
        assert sum(each) == 4 * a.nbytes * (ranks - 1)


# --- tensor parallelism ---


@TRANSFORMERS
@SEQUENCE
@pytest.mark.ranks(2)
def test_collectives_of_a_layer(name, sharded):
    """Two all-reduces forward and two backward, or their forms for shards; by one layer more."""
    few, many = (Run(name, layers=n, tp=2, sequence_parallel=sharded) for n in (2, 3))
    grown = []
    for before, after in zip(few.calls(), many.calls(), strict=True):
        grown.append({op: after[op] - before.get(op, 0) for op in after})
    partial = len(parameters_summed(many)) - len(parameters_summed(few))
    both = {"all_gather": 2, "reduce_scatter": 2}
    forward, backward = ({**both, "all_reduce": 0} if sharded else {"all_reduce": 2},) * 2
    assert grown[0] == forward
    assert grown[1] == {**backward, "all_reduce": backward["all_reduce"] + partial}
    assert sharded or not partial
    few.close()
    many.close()


def parameters_summed(run):
    return [name for name, facts in run.strategy._facts.items() if facts.partial]


@pytest.mark.parametrize("name", ["llama", "llama-gqa", "llama-mqa", "gpt2", "neox", "encoder"])
@SEQUENCE
@pytest.mark.ranks(2)
def test_bytes_over_two_ranks(name, sharded):
    check_sent(name, tp=2, sequence_parallel=sharded)


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "gpt2", "encoder"])
@SEQUENCE
@pytest.mark.ranks(4)
def test_bytes_over_four_ranks(name, sharded):
    """Heads, tokens and words are uneven here."""
    check_sent(name, tp=4, sequence_parallel=sharded)


@pytest.mark.ranks(2)
def test_bytes_of_a_window():
    check_sent("llama", tp=2, window=3)


def test_layers_and_few_others_are_all_there_is():
    """The statement in full, from shapes alone: layers, words in and out, cross entropy."""
    line, layers = RanksOfAxis(2), 2
    cost = planned("llama", layers, ranks=2, tp=2)
    a = Activation(ROWS, TOKENS, WIDTH, 8)
    expected = 2 * layers * volumes.group(a, a, line, sharded=False).total()
    expected += 2 * volumes.whole(a, line).total()
    expected += volumes.cross_entropy(ROWS * TOKENS, 8, line).total()
    assert cost.sent == {("tp", "all_reduce"): expected}


# --- pipeline parallelism ---


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.ranks(2)
def test_bytes_of_a_pipeline(name, inside):
    """A forward and A backward over the cut; GPT-2 and BERT share a weight between stages."""
    check_sent(name, pp=2, micro_batches=2, inside=inside)


@pytest.mark.ranks(2)
def test_bytes_of_a_pipeline_with_a_window():
    check_sent("gpt2", pp=2, window=3)


@pytest.mark.parametrize(
    "schedule", [{"schedule": "interleaved", "chunks": 2}, {"schedule": "zb-h1"}]
)
@pytest.mark.ranks(2)
def test_bytes_of_other_schedules(schedule):
    check_sent("llama", layers=4, pp=2, micro_batches=4, inside=True, **schedule)


@pytest.mark.ranks(4)
def test_bytes_of_four_stages():
    check_sent("gpt2", layers=4, pp=4, micro_batches=3, inside=True)


@SEQUENCE
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.ranks(4)
def test_bytes_of_cells_of_four(name, sharded):
    check_sent(name, tp=2, pp=2, micro_batches=2, inside=True, sequence_parallel=sharded)


# --- the wire, and what is held ---


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}])
@pytest.mark.skipif(not is_supported(), reason="needs a count of bytes per connection (Linux)")
@pytest.mark.ranks(2)
def test_connections_carry_what_the_ledger_has(options):
    run = Run("llama", rows=64, **options)
    everyone(None)
    before, ledger = sent_bytes(), run.accelerator.traffic.total()
    for seed in range(3):
        run.step(seed)
    ledger = run.accelerator.traffic.total() - ledger
    kernel = sent_since(before)
    assert abs(kernel - ledger) <= 0.02 * ledger + 2**16
    assert ledger == 3 * run.cost.total_sent
    run.close()


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2},
        {"tp": 2, "pp": 2},
        {"tp": 2, "data_parallel": {"name": "zero1"}},
    ],
    ids=str,
)
@TRANSFORMERS
@pytest.mark.ranks(4)
def test_bytes_held(name, options):
    """Parameters, gradients and moments of this rank, to the byte but for Adam's step counts."""
    run = Run(name, adam=True, **options)
    run.step(0, zero_grad=False)
    states = [v for state in run.optimizer.state.values() for v in state.values()]
    parameters = list(run.model.parameters())
    kept = [s.tensor for s in run.strategy.shards() if not s.state]
    assert storage(parameters) == run.cost.held["parameters"]
    assert storage(states) == pytest.approx(run.cost.held["optimizer"], abs=8 * len(states))
    gradients = [*run.strategy.gradients(), *(p.grad for p in parameters)]
    assert storage(gradients) <= run.cost.held["gradients"] + 64
    assert storage([*parameters, *kept]) >= run.cost.held["parameters"]
    run.close()


def storage(tensors):
    """Return the bytes of the storages behind tensors, shared ones once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
             for t in tensors if t is not None}  # fmt: skip
    return sum(found.values())


# --- what is said when less is known ---


def test_planning_leaves_the_model_alone():
    model = build("gpt2", 2)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    planned("gpt2", ranks=4, tp=2, pp=2, spec=ModelSpec.of(model, inputs=((token_batch(0),), {})))
    assert "forward" not in model.__dict__
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_models_without_values_cost_the_same():
    given = ((token_batch(0, rows=ROWS, length=TOKENS),), {})
    spec = ModelSpec.of(build("llama", 2).to("meta"), states=0, inputs=given)
    for options in ({"tp": 2}, {"pp": 2}):
        found = planned("llama", ranks=2, spec=spec, **options)
        assert found == planned("llama", ranks=2, **options)
