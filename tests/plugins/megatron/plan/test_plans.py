"""Plans of the user and of the model: done as written, or refused on every rank with the reason."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import case
from cell_twins import Twins
from divided_words import WIDE, WORDS, PostNorm, batch, planned, planned_and_described, trained
from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError
from drivetrain.testing.conformance.suite import everyone
from drivetrain_megatron.plan import named, trial
from huggingface_models import ARCHITECTURES, llama, token_batch
from said import said
from stacks import LowRank, Parts, Residual, Stack

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
    none = Twins(model, tp=2)
    assert none.divided == found
    plan = {"*.attn.c_attn": "packed_colwise", "*.attn.c_proj": "rowwise", "*.wte": "vocab"}
    both = Twins(build("gpt2"), tp=2, plan={**plan, "lm_head": "vocab"})
    assert "transformer.wte.weight" in both.divided
    assert not any(".mlp." in name for name in both.divided)
    both.train(token_batch(0))


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


def mixing():
    """Return a block with a norm between a column and a row: no rank can compute it alone."""

    def compute(m, x):
        x = x + m.down(torch.relu(m.norm(m.up(x))))
        return x + m.two(torch.relu(m.one(x)))

    norm, layers = nn.LayerNorm(6), {"up": nn.Linear(8, 6), "down": nn.Linear(6, 8)}
    return Parts(compute, **layers, norm=norm, one=nn.Linear(8, 40), two=nn.Linear(40, 8))


def test_report_says_what_was_refused_and_why():
    torch.manual_seed(0)
    _, text = planned_and_described(Stack(mixing() for _ in range(3)).double())
    assert "tensor parallel over 2 ranks: 9 of 30 parameters divided" in text
    assert "3 blocks blocks.0 to blocks.2: one -> two" in text
    assert "3 blocks blocks.0 to blocks.2: down stays whole: " in text
    assert "whole on each rank: blocks.0.up.weight (384 bytes)" in text


@pytest.mark.ranks(2)
def test_every_rank_refuses_with_the_same_words():
    cannot = r"'blocks.0.up' to be colwise.*cannot be: .*(differ|RuntimeError)"
    alone = "data_parallel: expected a strategy over the axis dp alone, found 'megatron'"
    for match, options in (
        (cannot, {"plan": {"*.up": "colwise", "*.down": "rowwise"}}),
        (alone, {"data_parallel": {"name": "megatron"}}),
    ):
        model = Stack(mixing() for _ in range(3)).double()
        with pytest.raises(ConfigError, match=match) as found:
            Accelerator(strategy={"name": "megatron", "tp": 2, **options}, cpu=True).prepare(model)
        assert len(set(everyone(str(found.value)))) == 1


@pytest.mark.ranks(2)
def test_adapters_of_rows():
    """Two layers read the divided features: that group stays whole, numbers are right."""
    model = build().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "o_proj", "down_proj")):
            model.set_submodule(name, LowRank(module))
    both = Twins(model, tp=2)
    both.train(token_batch(0))


def towers():
    """Return blocks of two kinds, with a plan for one of them."""

    def blocks(inner):
        layers = ((nn.Linear(8, inner), nn.GELU(), nn.Linear(inner, 8)) for _ in range(2))
        return nn.ModuleList(nn.Sequential(*each) for each in layers)

    def compute(m, x):
        for block in (*m.vision, *m.text):
            x = x + block(x)
        return x

    plan = {"text.*.0": "colwise", "text.*.2": "rowwise"}
    return Parts(compute, text=blocks(12), vision=blocks(16), _tp_plan=plan)


def test_a_plan_of_a_model_forbids_nothing_where_it_is_silent():
    model = towers()
    assert not any(derivation.is_whole for derivation in planned(model).blocks.values())
    # The rows may not be divided: neither may the columns.
    model._tp_plan = {"text.*.0": "colwise"}
    blocks = planned(model).blocks
    assert {name for name in blocks if not blocks[name].plan.groups} == {"text.0", "text.1"}


class OneHead(Residual):
    def forward(self, x):
        inner = self.up(x)
        heads = inner.view(*inner.shape[:-1], 1, inner.shape[-1])
        return x + self.down(torch.relu(heads).flatten(-2))


def test_features_of_one_head_are_divided():
    """One rank got all of them, and the others none."""
    (group,) = planned(nn.Sequential(OneHead(8, 12), OneHead(8, 12))).blocks["0"].plan.groups
    assert group.inputs.local_sizes == (6, 6)


# --- layers outside of blocks that are divided by words, and layers that only look like them ---


FEATURES = 16


class Factorised(Stack):
    """A projection in front of the blocks, as wide as there are positions; a head behind them."""

    def __init__(self, positions):
        ends = {"first": nn.Embedding(WORDS, FEATURES), "last": nn.Linear(WIDE, WORDS)}
        super().__init__((PostNorm(WIDE) for _ in range(2)), **ends)
        self.positions, self.wider = nn.Embedding(positions, FEATURES), nn.Linear(FEATURES, WIDE)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids):
        x = self.wider(self.first(ids) + self.positions(torch.arange(ids.shape[1])))
        return self.last(self.body(x)) * self.temperature


class ScaledEmbedding(nn.Embedding):
    """As of Gemma and BART."""

    def forward(self, ids):
        return super().forward(ids) * math.sqrt(self.embedding_dim)


def scaled():
    torch.manual_seed(0)
    return Stack(
        [PostNorm(WIDE), PostNorm(WIDE)],
        first=ScaledEmbedding(WORDS, WIDE),
        last=nn.Linear(WIDE, WORDS, bias=False),
        tied=True,
    ).double()


TP2 = {"name": "megatron", "tp": 2}


@pytest.mark.ranks(2)
def test_a_projection_in_front_of_blocks_is_no_head():
    """Its gradient was that of one rank's features, with the right loss."""
    for positions in (31, WIDE):
        torch.manual_seed(0)
        divided, mine, theirs = trained(Factorised(positions).double(), TP2, batch())
        assert "wider.weight" not in divided
        assert {"first.weight", "last.weight"} <= divided
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_an_embedding_of_another_class_stays_whole_or_is_refused():
    """The head that shares its weight, too; a user's plan is no guess: every rank says which."""
    divided, mine, theirs = trained(scaled(), TP2, batch())
    assert "first.weight" not in divided
    assert "blocks.0.up.weight" in divided
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    plan = {"first": "vocab", "last": "vocab", "*.up": "colwise", "*.down": "rowwise"}
    with pytest.raises(ConfigError, match="computes as nn.Embedding does"):
        trained(scaled(), {**TP2, "plan": plan}, batch())


# --- attention as people write it by hand ---


OWN_WORDS = 24


class Packed(nn.Module):
    """One layer makes queries, keys and values; forms say how its output is taken apart."""

    columns = ("c_attn",)

    def __init__(self, hidden, heads):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.n_head, self.n_embd = heads, hidden

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.parts(x, B, T, C)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def heads(self, parts, B, T, C):
        return [p.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for p in parts]


class Split(Packed):
    """The size to split by is an attribute, that of a reshape comes from the input."""

    def parts(self, x, *sizes):
        return self.heads(self.c_attn(x).split(self.n_embd, dim=2), *sizes)


class Configured(Packed):
    """The same, with a configuration of which other numbers are equal."""

    def __init__(self, hidden, heads):
        super().__init__(hidden, heads)
        numbers = {"n_layer": heads, "block_size": hidden, "n_embd": hidden, "n_head": heads}
        self.config = SimpleNamespace(**numbers)

    def parts(self, x, *sizes):
        return self.heads(self.c_attn(x).split(self.config.n_embd, dim=2), *sizes)


class Chunks(Packed):
    def parts(self, x, *sizes):
        return self.heads(self.c_attn(x).chunk(3, -1), *sizes)


class Reshaped(Packed):
    def parts(self, x, B, T, C):
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class Separate(Packed):
    """Three layers, and torch works out the features of a head."""

    columns = ("query", "key", "value")

    def __init__(self, hidden, heads):
        super().__init__(hidden, heads)
        del self.c_attn
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))

    def parts(self, x, B, T, C):
        made = [layer(x) for layer in (self.query, self.key, self.value)]
        return [p.view(B, T, self.n_head, -1).transpose(1, 2) for p in made]


def decoder(form, hidden, heads):
    """Return a small GPT with tied words."""

    def block_of(m, x):
        x = x + m.attn(m.ln_1(x))
        return x + m.down(F.gelu(m.up(m.ln_2(x))))

    def block():
        return Parts(
            block_of,
            ln_1=nn.LayerNorm(hidden),
            ln_2=nn.LayerNorm(hidden),
            attn=form(hidden, heads),
            up=nn.Linear(hidden, 4 * hidden),
            down=nn.Linear(4 * hidden, hidden),
        )

    def compute(m, ids):
        x = m.wte(ids) + m.wpe(torch.arange(ids.shape[1], device=ids.device))
        for each in m.h:
            x = each(x)
        return m.lm_head(m.ln_f(x))

    model = Parts(
        compute,
        wte=nn.Embedding(OWN_WORDS, hidden),
        wpe=nn.Embedding(16, hidden),
        h=nn.ModuleList(block() for _ in range(2)),
        ln_f=nn.LayerNorm(hidden),
        lm_head=nn.Linear(hidden, OWN_WORDS, bias=False),
    )
    model.wte.weight = model.lm_head.weight
    return model


def check(form, sizes, **options):
    """Train two steps beside one process; all layers of attention must be divided."""
    torch.manual_seed(0)
    model = decoder(form, *sizes).double()
    if form is Configured:  # one configuration for all modules, which a checkpoint may save
        model.config = model.h[0].attn.config = model.h[1].attn.config
    with said("drivetrain_megatron") as lines:
        both = Twins(model, **options)
    assert form is not Configured or both.model.config.n_embd == sizes[0]
    facts = both.accelerator.strategy_of(both.model)._facts
    for layer in (*form.columns, "c_proj"):
        partition = facts[f"h.1.attn.{layer}.weight"].partition
        assert partition is not None, (form, layer)
        assert len(set(partition.local_sizes)) == 1
    if both.accelerator.is_main_process:
        named = ", ".join(f"attn.{name}" for name in form.columns)
        text = "\n".join(lines)
        assert f"2 blocks h.0 to h.1: {named} -> attn.c_proj; up -> down" in text
        assert "stays whole" not in text
    # Sequences of other lengths than the first: what was tried must hold for all.
    generator = torch.Generator().manual_seed(0)
    both.train(*(torch.randint(OWN_WORDS, (3, 9 + n), generator=generator) for n in range(2)))
    if form is not Separate:  # torch cannot work out the features of no rows
        # A batch without rows trains nothing, and is no error.
        both.accelerator.backward(both.model(torch.zeros(0, 7, dtype=torch.int64)).sum())
        assert all(p.grad is None or not p.grad.any() for p in both.model.parameters())


SIZES = {"wide heads": (32, 4), "square heads": (16, 4)}


@pytest.mark.ranks(2)
def test_each_form_is_divided():
    for form, sizes, sharded in (
        (Split, SIZES["wide heads"], False),
        (Configured, SIZES["square heads"], True),
        (Chunks, SIZES["wide heads"], True),
        (Reshaped, SIZES["square heads"], False),
        (Separate, SIZES["wide heads"], True),
    ):
        with case(form):
            check(form, sizes, tp=2, sequence_parallel=sharded)


def test_four_ranks_have_a_head_each():
    for form in (Split, Configured, Chunks, Reshaped, Separate):
        torch.manual_seed(0)
        blocks = planned(decoder(form, *SIZES["square heads"]).double(), ranks=4).blocks
        rows = [group.row for group in blocks["h.0"].plan.groups]
        assert rows == ["attn.c_proj", "down"], form


# --- layers that fit no group are divided by themselves, where a block would stay whole else ---


class Normed(nn.Module):
    """Norms over all features of queries and keys, as of OLMo 2; an uneven inner width."""

    def __init__(self, inner=33):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE) for _ in range(4))
        self.q_norm, self.k_norm, self.norm = (nn.LayerNorm(WIDE) for _ in range(3))
        self.up, self.inner_norm, self.down = (
            nn.Linear(WIDE, inner),
            nn.LayerNorm(inner),
            nn.Linear(inner, WIDE),
        )
        self.gate = nn.Linear(WIDE, 1)

    def forward(self, x):
        heads = (self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x))
        heads = (each.view(*x.shape[:2], -1, 8).transpose(1, 2) for each in heads)
        found = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norm(x + self.o(found)) * self.gate(x).sigmoid()
        return x + self.down(F.gelu(self.inner_norm(self.up(x))))


def model_of(make):
    return Stack(
        [make(), make()], first=nn.Embedding(WORDS, WIDE), last=nn.Linear(WIDE, WORDS)
    ).double()


def built():
    torch.manual_seed(0)
    return model_of(Normed)


def of_a_block(model, **options):
    model.example_inputs = batch()
    plan, text = planned_and_described(model, **options)
    return plan.blocks["blocks.0"].plan, text


def test_large_layers_are_divided_by_themselves(monkeypatch):
    """A layer of 1 percent or less of a block stays whole: it would send more than it saves.

    Thin matrices find the same.
    """
    expected, text = of_a_block(built())
    assert not expected.groups
    assert {each.layer: each.by_rows for each in expected.alone} == {
        **dict.fromkeys(("q", "k", "v", "up"), False),
        **dict.fromkeys(("o", "down"), True),
    }
    assert "2 blocks blocks.0 to blocks.1: by itself q, k, v, o, up, down" in text
    assert "stays whole: " not in text
    monkeypatch.setattr(trial, "LARGE", 64)
    monkeypatch.setattr(trial, "FEATURES", 4)
    assert of_a_block(built())[0] == expected


class Mixed(Normed):
    """Another pair of layers, which can be divided together."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDE, 8 * WIDE), nn.Linear(8 * WIDE, WIDE)

    def forward(self, x):
        x = super().forward(x)
        return x + self.narrow(self.wide(x).relu())


def test_beside_groups_and_in_plans_of_users_no_layer_is_divided_by_itself():
    plan, text = of_a_block(model_of(Mixed))
    assert [group.row for group in plan.groups] == ["narrow"]
    assert not plan.alone
    assert "o stays whole: " in text
    plan, _ = of_a_block(model_of(Mixed), plan={"*.wide": "colwise", "*.narrow": "rowwise"})
    assert not plan.alone


@pytest.mark.ranks(2)
def test_they_train_as_in_one_process_and_the_cost_has_what_they_send():
    model = built()
    spec = ModelSpec.of(copy.deepcopy(model), states=0, inputs=((batch(),), {}))
    both = Twins(model, tp=2)
    assert both.divided >= {f"blocks.{n}.{layer}.weight" for n in range(2) for layer in "qkvo"}
    both.train(batch(), batch())  # the first two forwards compare batches
    both.accelerator.traffic.clear()
    both.backward(batch())
    both.step()
    sent = both.accelerator.traffic.sent()
    strategy = both.accelerator.strategy_of(both.model)
    promised = dict(type(strategy).cost(strategy.config, spec, strategy.run).sent)
    assert promised["tp", "all_gather"]
    assert {key: count for key, count in sent.items() if count} == promised
