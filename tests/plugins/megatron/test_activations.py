"""Activations in bf16 between hosts: a pipeline trains closely, its ledger has half the bytes."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, RankMismatchError
from drivetrain.facade import settings
from drivetrain.links.chosen import LinkMethods
from drivetrain.runtime.precision import Precision
from drivetrain_megatron import Megatron, stage_links
from drivetrain_megatron.config import MegatronConfig
from huggingface_models import VOCABULARY, gpt2, llama, logits_of, token_batch

ROWS, LENGTH, STEPS = 4, 7, 3
BF16 = LinkMethods(activations="bf16")


def hosts(monkeypatch, per_host):
    """Let each ``per_host`` ranks in a row believe that they have a host to themselves."""
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // per_host))


def announced(monkeypatch, logger):
    """Return the list of the lines that a logger will announce."""
    said = []
    monkeypatch.setattr(logger, "announce", said.append)
    return said


class Training:
    """Steps of an fp32 model under a pipeline."""

    def __init__(self, module, activations, *, precision="no", **options):
        torch.manual_seed(3)
        given = {"pp": 2, "micro_batches": 2, **options}
        config = {
            "strategy": {"name": "megatron", **given},
            "links": {"far": {"activations": activations}},
            "precision": precision,
        }
        self.accelerator = Accelerator(cpu=True, config=config)
        whole = copy.deepcopy(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.strategy = self.accelerator.strategy_of(self.model)
        self.whole = whole

    def promised(self, *args):
        spec = ModelSpec.of(self.whole, inputs=(args, {}))
        return dict(Megatron.cost(self.strategy.config, spec, self.strategy.run).sent)

    def words(self, steps=STEPS):
        """Return the losses of steps on words, and the bytes of the last one."""
        losses = []
        for index in range(steps):
            self.accelerator.traffic.clear()
            ids = token_batch(index, rows=ROWS, length=LENGTH)
            self.optimizer.zero_grad()
            logits = logits_of(self.model(ids)).view(-1, VOCABULARY)
            loss = F.cross_entropy(logits, ids.reshape(-1))
            self.accelerator.backward(loss)
            self.optimizer.step()
            losses.append(loss.item())
        return losses, self.accelerator.traffic.sent()

    def weights(self):
        found = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in found.items()}

    def close(self):
        self.accelerator.free_memory()


def of_words(build, activations, **options):
    """Return losses, bytes of a step, its promised bytes, and the weights."""
    torch.manual_seed(1)
    training = Training(build().float(), activations, **options)
    losses, sent = training.words()
    promised = training.promised(token_batch(0, rows=ROWS, length=LENGTH))
    weights = training.weights()
    training.close()
    return losses, sent, promised, weights


@pytest.mark.ranks(2)
def test_a_pipeline_over_hosts_sends_half_and_trains_closely(monkeypatch):
    hosts(monkeypatch, 1)
    exact, rounded = (of_words(llama, name) for name in ("exact", "bf16"))
    for _, sent, promised, _ in (exact, rounded):
        assert sent == promised
        assert ("pp", "send") not in sent
    whole = exact[1]["pp.far", "send"]
    assert whole == ROWS * LENGTH * 48 * 4  # two micro-batches, one way from each rank
    assert 2 * rounded[1]["pp.far", "send"] == whole
    assert exact[0] != rounded[0]
    assert exact[0] == pytest.approx(rounded[0], rel=2**-8)
    apart = max(float((rounded[3][k] - v).abs().max()) for k, v in exact[3].items())
    assert 1e-7 < apart < 2 * STEPS * 1e-2  # Adam's steps, each at most of its rate


@pytest.mark.ranks(2)
def test_a_pipeline_on_one_host_is_exact_and_says_so_once(monkeypatch):
    said = announced(monkeypatch, settings.logger)
    exact, rounded = (of_words(gpt2, name) for name in ("exact", "bf16"))
    assert exact[:3] == rounded[:3]
    assert all(torch.equal(rounded[3][name], value) for name, value in exact[3].items())
    assert ("pp", "send") in rounded[1]
    (line,) = (each for each in said if "activations bf16" in each)
    assert "activations bf16 (rounding); all ranks are on one host, so that nothing is" in line


@pytest.mark.ranks(4)
def test_whole_pipelines_on_each_host_are_exact_and_say_so(monkeypatch):
    hosts(monkeypatch, 2)
    said = announced(monkeypatch, stage_links.logger)
    exact, rounded = (of_words(llama, name, order="tp,pp,dp") for name in ("exact", "bf16"))
    assert exact[:2] == rounded[:2]
    assert ("pp", "send") in rounded[1]
    (line,) = said
    assert "links.far.activations: bf16 rounds nothing: all stages of each pipeline" in line


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.ranks(4)
def test_only_the_link_between_hosts_is_rounded(monkeypatch, schedule):
    hosts(monkeypatch, 2)
    options = {"pp": 4, "micro_batches": 4, "schedule": schedule}
    options |= {"chunks": 2} if schedule == "interleaved" else {}

    def build():
        return llama(4 * options.get("chunks", 1))

    exact, rounded = (of_words(build, name, **options) for name in ("exact", "bf16"))
    for _, sent, promised, _ in (exact, rounded):
        assert sent == promised
    far, near = ("pp.far", "send"), ("pp.near", "send")
    assert exact[1][near] == rounded[1][near] > 0
    assert exact[1].get(far, 0) == 2 * rounded[1].get(far, 0)
    inner = schedule == "1f1b" and os.environ["RANK"] in ("0", "3")
    assert (far in rounded[1]) is not inner
    assert exact[0] != rounded[0]
    assert exact[0] == pytest.approx(rounded[0], rel=2**-7)


@pytest.mark.ranks(2)
def test_tied_weights_cross_exactly(monkeypatch):
    """GPT-2's head has the embedding's weight: both stages compute with the same bits."""
    hosts(monkeypatch, 1)
    exact, rounded = (of_words(gpt2, name) for name in ("exact", "bf16"))
    for _, sent, promised, _ in (exact, rounded):
        assert sent == promised
    tied = VOCABULARY * 48 * 4
    sent = [each[1]["pp.far", "send"] - tied for each in (exact, rounded)]
    assert sent[0] == 2 * sent[1] > 0
    weights = rounded[3]
    head, embedding = weights["lm_head.weight"], weights["transformer.wte.weight"]
    assert torch.equal(head, embedding)
    assert not torch.equal(embedding, embedding.bfloat16().float())


class Reader(nn.Module):
    """A block with a second output, of which a later stage uses the sign alone."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, side, places):
        x = x + torch.tanh(self.main(x)) * side.detach().sign() + places
        return x, self.side(x), (x.detach() > 0).long()


class Readers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Reader() for _ in range(4))

    def forward(self, x):
        side, places = x, torch.zeros_like(x, dtype=torch.long)
        for layer in self.layers:
            x, side, places = layer(x, side, places)
        return x


@pytest.mark.ranks(2)
def test_no_gradient_stays_no_gradient_and_integers_stay_whole(monkeypatch):
    """The parameters of ``side`` have no gradient: weight decay must not touch them."""
    hosts(monkeypatch, 1)
    found = {}
    for name in ("exact", "bf16"):
        torch.manual_seed(5)
        module = Readers()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        training = Training(module, name)
        torch.manual_seed(6)
        for _ in range(2):
            training.optimizer.zero_grad()
            training.accelerator.traffic.clear()
            loss = training.model(torch.randn(4, 6)).square().mean()
            training.accelerator.backward(loss)
            training.optimizer.step()
        sent = training.accelerator.traffic.sent()
        assert all(p.grad is None for n, p in training.model.named_parameters() if ".side." in n)
        weights = training.weights()
        for key, value in weights.items():
            assert torch.equal(value, before[key]) is (".side." in key)
        found[name] = sent["pp.far", "send"]
        training.close()
    integers = found["exact"] - 2 * (found["exact"] - found["bf16"])
    assert found["exact"] > found["bf16"]
    assert integers == (4 * 6 * 8 if os.environ["RANK"] == "0" else 0)


@pytest.mark.ranks(2)
def test_a_model_of_two_bytes_is_not_rounded(monkeypatch):
    hosts(monkeypatch, 1)
    found = []
    for name in ("exact", "bf16"):
        torch.manual_seed(5)
        module = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float16) for _ in range(4)))
        training = Training(module, name)
        loss = training.model(torch.ones(4, 6, dtype=torch.float16)).square().mean()
        training.accelerator.backward(loss)
        found.append((loss.item(), training.accelerator.traffic.sent()["pp.far", "send"]))
        training.close()
    assert found[0] == found[1]


@pytest.mark.ranks(2)
def test_ranks_with_other_methods_are_refused_on_each(monkeypatch):
    hosts(monkeypatch, 1)
    method = "bf16" if os.environ["RANK"] == "1" else "exact"
    with pytest.raises(RankMismatchError, match="links"):
        Training(llama().float(), method)


def test_without_a_pipeline_rounding_is_refused():
    precision = Precision.of("no")
    Megatron.check_links(MegatronConfig(pp=2), BF16, precision)
    with pytest.raises(ConfigError, match=r"links\.far\.activations: exact without a pipeline"):
        Megatron.check_links(MegatronConfig(tp=2), BF16, precision)
