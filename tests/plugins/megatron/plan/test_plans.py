"""Plans of the user and of the model: done as written, or refused on every rank with the reason."""

import copy
import logging
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from divided_words import TwoRanks
from drivetrain import Accelerator
from drivetrain.errors import ConfigError
from drivetrain.testing.conformance.twins import everyone
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.plan.model import TensorParallel
from drivetrain_megatron.recording.calls import inputs_for
from huggingface_models import ARCHITECTURES, llama, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}
ATTENTION = {
    "*.self_attn.q_proj": "colwise",
    "*.self_attn.k_proj": "colwise",
    "*.self_attn.v_proj": "colwise",
    "*.self_attn.o_proj": "rowwise",
}
FEEDFORWARD = {
    "*.mlp.gate_proj": "colwise",
    "*.mlp.up_proj": "colwise",
    "*.mlp.down_proj": "rowwise",
}


def build(name="llama", **options):
    torch.manual_seed(0)
    return ARCHITECTURES[name](**options)


def prepared(model, **options):
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2, **options}, cpu=True)
    return accelerator, accelerator.prepare(model)


def divided(accelerator, model):
    """Return the names of the parameters of which this rank has a part."""
    facts = accelerator.strategy_of(model)._facts
    return {name for name, known in facts.items() if known.partition is not None}


def check_equals(accelerator, model, twin, ids=None):
    """Compare logits, and gradients after backward, with those of one process."""
    ids = token_batch(0) if ids is None else ids
    loss = F.cross_entropy(logits_of(model(ids)).flatten(0, 1), ids.flatten())
    accelerator.backward(loss)
    theirs = F.cross_entropy(logits_of(twin(ids)).flatten(0, 1), ids.flatten())
    theirs.backward()
    torch.testing.assert_close(loss.detach(), theirs.detach(), **EXACT)
    facts = accelerator.strategy_of(model)._facts
    rank = accelerator.mesh["tp"].rank
    for (name, mine), whole in zip(model.named_parameters(), twin.parameters(), strict=True):
        partition = facts[name].partition
        expected = whole.grad
        assert (expected is None) == (mine.grad is None), name
        if expected is not None:
            expected = expected if partition is None else partition.take(expected, rank)
            torch.testing.assert_close(
                mine.grad, expected, **EXACT, msg=lambda m, name=name: f"{name} {m}"
            )


def refused(match, model, **options):
    """Check that every rank refuses a plan with the same words; nobody waits for anybody."""
    with pytest.raises(ConfigError, match=match) as found:
        prepared(model, **options)
    assert len(set(everyone(str(found.value)))) == 1


@pytest.mark.ranks(2)
def test_styles_of_hugging_face():
    """A model's own plan, written out, is the same as none."""
    model = build("llama-gqa")
    plan = dict(model._tp_plan)
    assert set(plan.values()) >= {"colwise", "rowwise", "embedding_rowwise"}
    accelerator, own = prepared(copy.deepcopy(model), plan=plan)
    expected = divided(accelerator, own)
    check_equals(accelerator, own, copy.deepcopy(model))
    accelerator.free_memory()
    accelerator, none = prepared(model)
    assert divided(accelerator, none) == expected
    accelerator.free_memory()


@pytest.mark.parametrize("words", ["*.wte", "both"])
@pytest.mark.ranks(2)
def test_tied_words(words):
    plan = {
        "*.attn.c_attn": "packed_colwise",
        "*.attn.c_proj": "rowwise",
    }
    plan |= {"*.wte": "vocab", "lm_head": "vocab"} if words == "both" else {words: "vocab"}
    model = build("gpt2")
    if words != "both":
        refused("share a weight, the plan must name both", model, plan=plan)
        return
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model, plan=plan)
    assert "transformer.wte.weight" in divided(accelerator, model)
    assert not any(".mlp." in name for name in divided(accelerator, model))
    check_equals(accelerator, model, twin)
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"*.q_prj": "colwise"}, r"'\*.q_prj', which matches none of the .* nearest is '.*q_proj'"),
        ({"*.q_proj": "colwize"}, r"'colwize' for '\*.q_proj'; the nearest is 'colwise'"),
        (
            {"*.q_proj": "colwise"},
            r"'model.layers.0.self_attn.q_proj' to be colwise.*leaves out "
            r"'model.layers.0.self_attn.k_proj', .*'model.layers.0.self_attn.o_proj', and only",
        ),
        ({"*.o_proj": "rowwise"}, r"leaves out 'model.layers.0.self_attn.q_proj', .*v_proj'"),
        (
            {**ATTENTION, "*.o_proj": "colwise"},
            r"'model.layers.0.self_attn.o_proj' to be colwise.*its place in the model makes it row",
        ),
        ({**ATTENTION, "*norm": "colwise"}, r"norm' to be colwise.*RMSNorm, which is no linear"),
        ({"*.mlp": "attention"}, r"mlp' to be attention"),
        ({"lm_head": "colwise"}, r"'lm_head' to be colwise.*it is in no block"),
        ({"model.norm": "vocab"}, r"RMSNorm, neither an embedding nor a linear layer"),
        ({**FEEDFORWARD, "*.mlp.up_proj": "vocab"}, r"leaves out 'model.layers.0.mlp.up_proj'"),
        ({"*.mlp.up_proj": "vocab"}, r"up_proj' to be vocab.*no head that makes"),
    ],
)
@pytest.mark.ranks(2)
def test_plan_that_cannot_be_done(plan, match):
    refused(match, build(), plan=plan)


@pytest.mark.ranks(4)
def test_key_value_heads_that_do_not_fit():
    refused("take one of .* ranks", llama(kv_heads=3), tp=4)


@pytest.mark.ranks(2)
def test_order_that_is_none():
    order = "tp,tp,dp"
    refused(r"order of the axes tp, dp, pp, each once", build(), order=order)


@pytest.mark.ranks(2)
def test_cells_inside_of_cells():
    refused(
        "data_parallel: expected a strategy over the axis dp alone, found 'megatron'",
        build(),
        data_parallel={"name": "megatron"},
    )


class Two(nn.Module):
    """Two heads per block: fewer than ranks."""

    def __init__(self, hidden=3):
        super().__init__()
        self.words = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(
            8, 2, hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, ids):
        return self.head(self.encoder(self.words(ids)))


@pytest.mark.ranks(4)
def test_more_ranks_than_heads(tmp_path):
    """Ranks without a head, or without a feature, compute nothing there; numbers are right."""
    torch.manual_seed(0)
    model = Two().double()
    twin = copy.deepcopy(model)
    accelerator = Accelerator(
        strategy={"name": "megatron", "tp": 4, "data_parallel": "zero1"}, cpu=True
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    other = torch.optim.AdamW(twin.parameters(), lr=0.1)
    ids = torch.arange(14).view(2, 7) % 5
    for step in range(3):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        accelerator.backward(loss)
        theirs = F.cross_entropy(twin(ids).flatten(0, 1), ids.flatten())
        theirs.backward()
        torch.testing.assert_close(loss.detach(), theirs.detach(), **EXACT)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        torch.testing.assert_close(norm, expected, **EXACT)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        if step == 1:
            accelerator.save_state(tmp_path / "state")
    names = divided(accelerator, model)
    assert any("self_attn.in_proj_weight" in name for name in names)
    found = accelerator.get_state_dict(model)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-9)
    accelerator.load_state(tmp_path / "state")
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    torch.testing.assert_close(loss.detach(), theirs.detach(), **EXACT)
    accelerator.free_memory()


class Lines(logging.Handler):
    """Keeps what was said."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def said(model, **options):
    """Return what the library said while it prepared a model."""
    root = logging.getLogger("drivetrain_megatron")
    handler = Lines()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        accelerator, model = prepared(model, **options)
        names = divided(accelerator, model)
        accelerator.free_memory()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return "\n".join(everyone(handler.lines)[0]), names


@pytest.mark.ranks(2)
def test_plan_of_a_model_with_unknown_styles():
    model = build()
    _, expected = said(copy.deepcopy(model))
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"}
    text, names = said(model)
    assert "LlamaForCausalLM brings is not used, it has the styles moe_tp_experts" in text
    assert names == expected


class Mixing(nn.Module):
    """A norm over the features between a column and a row: no rank can compute it alone."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(6, 8)
        self.one = nn.Linear(8, 40)
        self.two = nn.Linear(40, 8)

    def forward(self, x):
        x = x + self.down(torch.relu(self.norm(self.up(x))))
        return x + self.two(torch.relu(self.one(x)))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.ranks(2)
def test_report_says_what_was_refused_and_why():
    torch.manual_seed(0)
    text, names = said(Mixed().double())
    assert "tensor parallel over 2 ranks: 9 of 30 parameters divided" in text
    assert "3 blocks layers.0 to layers.2: one -> two" in text
    assert "3 blocks layers.0 to layers.2: down stays whole: " in text
    assert "whole on each rank: layers.0.up.weight (384 bytes)" in text
    assert {name.split(".")[2] for name in names} == {"one", "two"}
    refused(
        r"'layers.0.up' to be colwise.*cannot be: .*(differ|RuntimeError)",
        Mixed().double(),
        plan={"*.up": "colwise", "*.down": "rowwise"},
    )


class Added(nn.Module):
    """A linear layer with a small pair of layers beside it."""

    def __init__(self, base, rank=3):
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape
        self.down = nn.Linear(inputs, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(model, names):
    """Freeze a model and put adapters beside these of its layers."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(names):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Added(module))
    return model


@pytest.mark.parametrize("names", [("o_proj",), ("q_proj", "o_proj", "down_proj")])
@pytest.mark.ranks(2)
def test_adapters_of_rows(names):
    """Two layers read the divided features: that group stays whole, numbers are right."""
    model = adapted(build(), names)
    twin = copy.deepcopy(model)
    accelerator, model = prepared(model)
    check_equals(accelerator, model, twin)
    accelerator.free_memory()


class Towers(nn.Module):
    """Blocks of two kinds; the model brings a plan for one of them."""

    _tp_plan: ClassVar = {"text.*.0": "colwise", "text.*.2": "rowwise"}

    def __init__(self):
        super().__init__()
        self.text, self.vision = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(8, inner), nn.GELU(), nn.Linear(inner, 8)) for _ in range(2)
            )
            for inner in (12, 16)
        )

    def forward(self, x):
        for block in (*self.vision, *self.text):
            x = x + block(x)
        return x


def test_a_plan_of_a_model_forbids_nothing_where_it_is_silent():
    model = Towers()
    config = MegatronConfig(tp=2)
    plan = TensorParallel.of(config, model, TwoRanks()).plan(model, inputs_for(config, model))
    assert not any(derivation.is_whole for derivation in plan.blocks.values())
    named = {name: style for name, style in model._tp_plan.items() if style == "colwise"}
    model._tp_plan = named  # the rows may not be divided: neither may the columns
    plan = TensorParallel.of(config, model, TwoRanks()).plan(model, inputs_for(config, model))
    whole = {name for name, derivation in plan.blocks.items() if not derivation.plan.groups}
    assert whole == {"text.0", "text.1"}


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        inner = self.up(x)
        heads = inner.view(*inner.shape[:-1], 1, inner.shape[-1])
        return x + self.down(torch.relu(heads).flatten(-2))


def test_features_of_one_head_are_divided():
    """One rank got all of them, and the others none."""
    model = nn.Sequential(OneHead(), OneHead())
    config = MegatronConfig(tp=2)
    plan = TensorParallel.of(config, model, TwoRanks()).plan(model, inputs_for(config, model))
    (group,) = plan.blocks["0"].plan.groups
    assert group.inputs.local_sizes == (6, 6)
