"""Activations in bf16 between hosts: a pipeline trains closely, its ledger has half the bytes."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import linked_trainings
from cases import case
from cell_twins import loss_of
from drivetrain import Accelerator
from drivetrain.compression.methods import LinkMethods
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, RankMismatchError
from drivetrain.facade import prepared
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline import transfer
from drivetrain_megatron.strategy import Megatron
from huggingface_models import VOCABULARY, gpt2, llama, token_batch
from linked_trainings import same, spread
from stacks import Parts, Stack

ROWS, LENGTH, STEPS = 4, 7, 3
METHODS = ("exact", "bf16")
FAR, NEAR, ONE = ("pp.far", "send"), ("pp.near", "send"), ("pp", "send")


class Training:
    """An fp32 model under a pipeline."""

    def __init__(self, module, activations, **options):
        torch.manual_seed(3)
        config = {
            "strategy": {"name": "megatron", "pp": 2, "micro_batches": 2, **options},
            "links": {"far": {"activations": activations}},
        }
        self.accelerator = Accelerator(cpu=True, config=config)
        self.whole = copy.deepcopy(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)

    def step(self, make_loss):
        self.accelerator.traffic.clear()
        self.optimizer.zero_grad()
        loss = make_loss(self.model)
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss.item()

    def sent(self):
        return self.accelerator.traffic.sent()

    def weights(self):
        found = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in found.items()}


def of_words(build, activations, **options):
    """Return the losses of some steps, the bytes of the last one, and the weights."""
    torch.manual_seed(1)
    training = Training(build().float(), activations, **options)
    batches = [token_batch(index, rows=ROWS, length=LENGTH) for index in range(STEPS)]
    losses = [training.step(lambda model, ids=ids: loss_of(model, ids)) for ids in batches]
    sent, weights = training.sent(), training.weights()
    spec = ModelSpec.of(training.whole, inputs=((batches[0],), {}))
    strategy = training.accelerator.strategy_of(training.model)
    assert sent == dict(Megatron.cost(strategy.config, spec, strategy.run).sent)
    return losses, sent, weights


def announced(monkeypatch, logger):
    """Return the list of the lines that a logger will announce."""
    said = []
    monkeypatch.setattr(logger, "announce", said.append)
    return said


@pytest.mark.ranks(2)
def test_a_pipeline_over_hosts_sends_half_and_trains_closely(monkeypatch):
    """GPT-2's head has the embedding's weight: both stages compute with the same bits."""
    spread(monkeypatch, 1)
    exact, rounded = (of_words(gpt2, name) for name in METHODS)
    assert ONE not in exact[1] | rounded[1]
    tied = VOCABULARY * 48 * 4
    whole, half = (each[1][FAR] - tied for each in (exact, rounded))
    assert whole == ROWS * LENGTH * 48 * 4  # two micro-batches, one way from each rank
    assert 2 * half == whole
    assert exact[0] != rounded[0]
    assert exact[0] == pytest.approx(rounded[0], rel=2**-8)
    apart = max(float((rounded[2][k] - v).abs().max()) for k, v in exact[2].items())
    assert 1e-7 < apart < 2 * STEPS * 1e-2  # Adam's steps, each at most of its rate
    embedding = rounded[2]["transformer.wte.weight"]
    assert torch.equal(rounded[2]["lm_head.weight"], embedding)
    assert not torch.equal(embedding, embedding.bfloat16().float())


@pytest.mark.ranks(2)
def test_a_pipeline_on_one_host_is_exact_and_says_so_once(monkeypatch):
    said = announced(monkeypatch, prepared.logger)
    exact, rounded = (of_words(gpt2, name) for name in METHODS)
    assert exact[:2] == rounded[:2]
    assert all(torch.equal(rounded[2][name], value) for name, value in exact[2].items())
    assert ONE in rounded[1]
    (line,) = (each for each in said if "activations bf16" in each)
    assert "activations bf16 (rounding); all ranks are on one host, so that nothing is" in line


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.ranks(4)
def test_only_the_link_between_hosts_is_rounded(monkeypatch, chunks):
    spread(monkeypatch, 2)
    schedule = "1f1b" if chunks == 1 else "interleaved"
    options = {"pp": 4, "micro_batches": 4, "schedule": schedule, "chunks": chunks}
    exact, rounded = (of_words(lambda: llama(4 * chunks), name, **options) for name in METHODS)
    assert exact[1][NEAR] == rounded[1][NEAR] > 0
    assert exact[1].get(FAR, 0) == 2 * rounded[1].get(FAR, 0)
    inner = chunks == 1 and os.environ["RANK"] in ("0", "3")
    assert (FAR in rounded[1]) is not inner
    assert exact[0] != rounded[0]
    assert exact[0] == pytest.approx(rounded[0], rel=2**-7)


def reader():
    """Return a block with a second output, of which a later stage uses the sign alone."""

    def compute(m, x, side, places):
        x = x + torch.tanh(m.main(x)) * side.detach().sign() + places
        return x, m.side(x), (x.detach() > 0).long()

    return Parts(compute, main=nn.Linear(6, 6), side=nn.Linear(6, 6))


class Readers(Stack):
    def forward(self, x):
        side, places = x, torch.zeros_like(x, dtype=torch.long)
        for block in self.blocks:
            x, side, places = block(x, side, places)
        return x


@pytest.mark.ranks(2)
def test_no_gradient_stays_no_gradient_and_integers_stay_whole(monkeypatch):
    """The parameters of ``side`` have no gradient: weight decay must not touch them."""
    spread(monkeypatch, 1)
    found = {}
    for name in METHODS:
        torch.manual_seed(5)
        module = Readers(reader() for _ in range(4))
        before = {key: value.clone() for key, value in module.state_dict().items()}
        training = Training(module, name)
        torch.manual_seed(6)
        for _ in range(2):
            training.step(lambda model: model(torch.randn(4, 6)).square().mean())
        found[name] = training.sent()[FAR]
        assert all(p.grad is None for n, p in training.model.named_parameters() if ".side." in n)
        for key, value in training.weights().items():
            assert torch.equal(value, before[key]) is (".side." in key)
    integers = found["exact"] - 2 * (found["exact"] - found["bf16"])
    assert found["exact"] > found["bf16"]
    assert integers == (4 * 6 * 8 if os.environ["RANK"] == "0" else 0)


@pytest.mark.ranks(2)
def test_two_bytes_are_not_rounded_and_other_methods_are_refused(monkeypatch):
    spread(monkeypatch, 1)
    found = []
    for name in METHODS:
        torch.manual_seed(5)
        module = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float16) for _ in range(4)))
        training = Training(module, name)
        x = torch.ones(4, 6, dtype=torch.float16)
        loss = training.model(x).square().mean()
        training.accelerator.backward(loss)
        found.append((loss.item(), training.sent()[FAR]))
    assert found[0] == found[1]
    with pytest.raises(RankMismatchError, match="links"):
        Training(llama().float(), METHODS[int(os.environ["RANK"])])


def test_without_a_pipeline_rounding_is_refused():
    methods, precision = LinkMethods(activations="bf16"), Precision.of("no")
    Megatron.check_links(MegatronConfig(pp=2), methods, precision)
    with pytest.raises(ConfigError, match=r"links\.far\.activations: exact without a pipeline"):
        Megatron.check_links(MegatronConfig(tp=2), methods, precision)


# --- slow links under a divided model ---


def linked(inner, method):
    training = linked_trainings.Training(inner, far={"gradients": method})
    training.rank = training.accelerator.mesh["dp"].rank  # others of a cell get the same rows
    return training


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_a_data_parallel_axis_over_hosts_is_approximate_and_goes_on(monkeypatch, tmp_path):
    spread(monkeypatch, 2)
    for inner in ("ddp", "zero2"):
        strategy = {"name": "megatron", "tp": 2, "data_parallel": {"name": inner}}
        monkeypatch.setitem(linked_trainings.FORMS, inner, strategy)
        with case(inner):
            check(inner, tmp_path / inner)


def check(inner, folder):
    found = {}
    for method in ("exact", "int4"):
        training = linked(inner, method).train(2)
        training.accelerator.save_state(folder / method)
        found[method] = training.train().state()
        sent = training.accelerator.traffic.sent()
        assert (("dp.far", "all_to_all") in sent) is (method == "int4")
    apart = max(float((found["int4"][k] - v).abs().max()) for k, v in found["exact"].items())
    assert 1e-6 < apart < 0.05
    again = linked(inner, "int4")
    again.accelerator.load_state(folder / "int4")
    again.step = 2
    assert same(again.train().state(), found["int4"])


@pytest.mark.parametrize(("hosts", "lines"), [("aabb", 1), ("aabc", 0), ("abcd", 0)])
def test_rounding_that_has_no_effect_is_told_where_no_pipeline_crosses_hosts(
    monkeypatch, hosts, lines
):
    said = []
    monkeypatch.setattr(transfer.logger, "announce", said.append)
    sizes = {name: SimpleNamespace(size=2) for name in ("pp", "dp")}
    world = World(size=4, hosts=tuple(hosts))
    links = SimpleNamespace(rounds_activations=True, activations="bf16")
    transfer.announce_idle_rounding(SimpleNamespace(links=links, world=world, mesh=sizes))
    assert len(said) == lines
