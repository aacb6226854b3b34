"""Attention as people write it by hand: each form is divided, and gives what one process gives."""

import copy
import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator

EXACT = {"rtol": 1e-10, "atol": 1e-12}
WORDS = 24


class Packed(nn.Module):
    """One layer makes queries, keys and values; forms say how its output is taken apart."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.n_head = heads
        self.n_embd = hidden

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
        self.config = type("Config", (), {})()
        self.config.n_layer = heads
        self.config.block_size = hidden
        self.config.n_embd = hidden
        self.config.n_head = heads

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

    def __init__(self, hidden, heads):
        super().__init__(hidden, heads)
        del self.c_attn
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)

    def parts(self, x, B, T, C):
        made = [layer(x) for layer in (self.query, self.key, self.value)]
        return [p.view(B, T, self.n_head, -1).transpose(1, 2) for p in made]


class Block(nn.Module):
    def __init__(self, attention, hidden):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = attention
        self.ln_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Decoder(nn.Module):
    """A small GPT with tied words."""

    def __init__(self, form, hidden, heads):
        super().__init__()
        self.wte = nn.Embedding(WORDS, hidden)
        self.wpe = nn.Embedding(16, hidden)
        self.h = nn.ModuleList(Block(form(hidden, heads), hidden) for _ in range(2))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def loss_of(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))


@contextmanager
def lines_of_report():
    """Collect what the plugin says inside of the context."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("drivetrain_megatron")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def check(form, sizes, **options):
    """Train two steps beside one process; all layers of attention must be divided."""
    torch.manual_seed(0)
    model = Decoder(form, *sizes).double()
    twin = copy.deepcopy(model)
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    with lines_of_report() as lines:
        model, optimizer = accelerator.prepare(model, optimizer)
    facts = accelerator.strategy_of(model)._facts
    check_divided(accelerator, facts, form, lines)
    rank = accelerator.mesh["tp"].rank
    for step in range(2):
        # Sequences of other lengths than the first: what was tried must hold for all.
        ids = torch.randint(WORDS, (3, 9 + step), generator=torch.Generator().manual_seed(step))
        loss, theirs = loss_of(model, ids), loss_of(twin, ids)
        accelerator.backward(loss)
        theirs.backward()
        torch.testing.assert_close(loss.detach(), theirs.detach(), **EXACT)
        for (name, mine), whole in zip(model.named_parameters(), twin.parameters(), strict=True):
            cut = facts[name].partition
            expected = whole.grad if cut is None else cut.take(whole.grad, rank)
            torch.testing.assert_close(
                mine.grad, expected, **EXACT, msg=lambda m, name=name: f"{name} {m}"
            )
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    accelerator.free_memory()


def check_divided(accelerator, facts, form, lines):
    columns = ("query", "key", "value") if form is Separate else ("c_attn",)
    for layer in (*columns, "c_proj"):
        partition = facts[f"h.1.attn.{layer}.weight"].partition
        assert partition is not None, (form, layer)
        assert len(set(partition.local_sizes)) == 1
    if accelerator.is_main_process:
        named = ", ".join(f"attn.{name}" for name in columns)
        said = "\n".join(lines)
        assert f"2 blocks h.0 to h.1: {named} -> attn.c_proj; up -> down" in said
        assert "stays whole" not in said


FORMS = (Split, Configured, Chunks, Reshaped, Separate)
SIZES = pytest.mark.parametrize("sizes", [(32, 4), (16, 4)], ids=["wide-heads", "square-heads"])
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])


@SIZES
@SEQUENCE
@pytest.mark.ranks(2)
def test_two_ranks(sizes, sequence_parallel):
    for form in FORMS:
        check(form, sizes, tp=2, sequence_parallel=sequence_parallel)


@SIZES
@SEQUENCE
@pytest.mark.ranks(4)
def test_four_ranks(sizes, sequence_parallel):
    for form in FORMS:
        check(form, sizes, tp=4, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])
@pytest.mark.ranks(2)
def test_empty_batches(sequence_parallel):
    """A batch without rows trains nothing, and is no error."""
    for form in (Split, Chunks, Reshaped):
        torch.manual_seed(0)
        model = Decoder(form, 32, 4).double()
        accelerator = Accelerator(
            strategy={"name": "megatron", "tp": 2, "sequence_parallel": sequence_parallel}, cpu=True
        )
        model = accelerator.prepare(model)
        accelerator.backward(model(torch.zeros(0, 7, dtype=torch.int64)).sum())
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        accelerator.free_memory()
