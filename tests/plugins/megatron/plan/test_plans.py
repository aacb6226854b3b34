"""Plans of the user and of the model: done as written, or refused on every rank with the reason."""

import copy
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from cell_twins import Twins
from divided_words import planned, planned_and_described
from drivetrain import Accelerator
from drivetrain.errors import ConfigError
from drivetrain.testing.conformance.twins import everyone
from drivetrain_megatron.plan import named
from huggingface_models import ARCHITECTURES, llama, token_batch
from stacks import Stack

ATTENTION = {
    **{f"*.self_attn.{name}_proj": "colwise" for name in "qkv"},
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


@pytest.mark.ranks(2)
def test_styles_of_hugging_face_and_tied_words():
    """A model's own plan, written out, is the same as none; a plan divides what it names alone."""
    model = build("llama-gqa")
    plan = dict(model._tp_plan)
    assert set(plan.values()) >= {"colwise", "rowwise", "embedding_rowwise"}
    both = Twins(copy.deepcopy(model), tp=2, plan=plan)
    found = both.divided
    both.train(token_batch(0))
    both.close()
    none = Twins(model, tp=2)
    assert none.divided == found
    none.close()
    plan = {"*.attn.c_attn": "packed_colwise", "*.attn.c_proj": "rowwise", "*.wte": "vocab"}
    both = Twins(build("gpt2"), tp=2, plan={**plan, "lm_head": "vocab"})
    assert "transformer.wte.weight" in both.divided
    assert not any(".mlp." in name for name in both.divided)
    both.train(token_batch(0))
    both.close()


WRONG = [
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
]


def test_plans_that_cannot_be_done():
    for plan, match in WRONG:
        with pytest.raises(ConfigError, match=match):
            planned(build(), plan=plan)
    plan = {"*.attn.c_attn": "packed_colwise", "*.attn.c_proj": "rowwise", "*.wte": "vocab"}
    with pytest.raises(ConfigError, match="share a weight, the plan must name both"):
        planned(build("gpt2"), plan=plan)
    with pytest.raises(ConfigError, match=r"take one of .* ranks"):
        planned(llama(kv_heads=3), ranks=4)


@pytest.mark.ranks(4)
def test_more_ranks_than_heads(tmp_path):
    """Ranks without a head, or without a feature, compute nothing there; numbers are right."""
    torch.manual_seed(0)
    layer = partial(
        nn.TransformerEncoderLayer, 8, 2, 3, dropout=0.0, batch_first=True, norm_first=True
    )
    model = Stack([layer(), layer()], first=nn.Embedding(5, 8), last=nn.Linear(8, 5)).double()
    both = Twins(model, optimizer=torch.optim.AdamW, tp=4, data_parallel="zero1")
    assert any("self_attn.in_proj_weight" in name for name in both.divided)
    ids = torch.arange(14).view(2, 7) % 5
    for step in range(3):
        expected = both.loss(both.twin, ids).item()
        both.backward(ids)
        both.clip(0.1)
        both.step()
        if step == 1:
            both.accelerator.save_state(tmp_path / "state")
    both.check_weights(rtol=1e-8, atol=1e-9)
    both.accelerator.load_state(tmp_path / "state")
    assert both.loss(both.model, ids).item() == pytest.approx(expected, rel=1e-10)
    both.close()


def test_a_plan_of_a_model_with_unknown_styles_is_not_used(monkeypatch):
    said, model = [], build()
    monkeypatch.setattr(named.logger, "announce", said.append)
    expected = planned(copy.deepcopy(model))
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"}
    found = planned(model)
    assert "LlamaForCausalLM brings is not used, it has the styles moe_tp_experts" in said[0]
    for name, derivation in expected.blocks.items():
        assert found.blocks[name].plan == derivation.plan
    assert found.vocabulary == expected.vocabulary


class Mixing(nn.Module):
    """A norm over the features between a column and a row: no rank can compute it alone."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8)
        self.one, self.two = nn.Linear(8, 40), nn.Linear(40, 8)

    def forward(self, x):
        x = x + self.down(torch.relu(self.norm(self.up(x))))
        return x + self.two(torch.relu(self.one(x)))


def test_report_says_what_was_refused_and_why():
    torch.manual_seed(0)
    _, text = planned_and_described(Stack(Mixing() for _ in range(3)).double())
    assert "tensor parallel over 2 ranks: 9 of 30 parameters divided" in text
    assert "3 blocks blocks.0 to blocks.2: one -> two" in text
    assert "3 blocks blocks.0 to blocks.2: down stays whole: " in text
    assert "whole on each rank: blocks.0.up.weight (384 bytes)" in text


@pytest.mark.ranks(2)
def test_every_rank_refuses_with_the_same_words():
    torch.manual_seed(0)
    cannot = r"'blocks.0.up' to be colwise.*cannot be: .*(differ|RuntimeError)"
    alone = "data_parallel: expected a strategy over the axis dp alone, found 'megatron'"
    for match, options in (
        (cannot, {"plan": {"*.up": "colwise", "*.down": "rowwise"}}),
        (alone, {"data_parallel": {"name": "megatron"}}),
    ):
        model = Stack(Mixing() for _ in range(3)).double()
        with pytest.raises(ConfigError, match=match) as found:
            Accelerator(strategy={"name": "megatron", "tp": 2, **options}, cpu=True).prepare(model)
        assert len(set(everyone(str(found.value)))) == 1


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


@pytest.mark.ranks(2)
def test_adapters_of_rows():
    """Two layers read the divided features: that group stays whole, numbers are right."""
    model = build().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "o_proj", "down_proj")):
            model.set_submodule(name, Added(module))
    both = Twins(model, tp=2)
    both.train(token_batch(0))
    both.close()


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
    assert not any(derivation.is_whole for derivation in planned(model).blocks.values())
    # The rows may not be divided: neither may the columns.
    model._tp_plan = {"text.*.0": "colwise"}
    blocks = planned(model).blocks
    assert {name for name in blocks if not blocks[name].plan.groups} == {"text.0", "text.1"}


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
    (group,) = planned(nn.Sequential(OneHead(), OneHead())).blocks["0"].plan.groups
    assert group.inputs.local_sizes == (6, 6)
