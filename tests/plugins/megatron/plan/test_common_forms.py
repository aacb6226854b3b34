"""Attention as people write it by hand: each form is divided, and gives what one process gives."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import case
from cell_twins import Twins
from divided_words import planned

WORDS = 24


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


class Block(nn.Module):
    def __init__(self, attention, hidden):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(hidden), nn.LayerNorm(hidden), attention
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Decoder(nn.Module):
    """A small GPT with tied words."""

    def __init__(self, form, hidden, heads):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, hidden), nn.Embedding(16, hidden)
        self.h = nn.ModuleList(Block(form(hidden, heads), hidden) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


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
    with lines_of_report() as lines:
        both = Twins(Decoder(form, *sizes).double(), **options)
    facts = both.accelerator.strategy_of(both.model)._facts
    for layer in (*form.columns, "c_proj"):
        partition = facts[f"h.1.attn.{layer}.weight"].partition
        assert partition is not None, (form, layer)
        assert len(set(partition.local_sizes)) == 1
    if both.accelerator.is_main_process:
        named = ", ".join(f"attn.{name}" for name in form.columns)
        said = "\n".join(lines)
        assert f"2 blocks h.0 to h.1: {named} -> attn.c_proj; up -> down" in said
        assert "stays whole" not in said
    # Sequences of other lengths than the first: what was tried must hold for all.
    generator = torch.Generator().manual_seed(0)
    both.train(*(torch.randint(WORDS, (3, 9 + n), generator=generator) for n in range(2)))
    if form is not Separate:  # torch cannot work out the features of no rows
        # A batch without rows trains nothing, and is no error.
        both.accelerator.backward(both.model(torch.zeros(0, 7, dtype=torch.int64)).sum())
        assert all(p.grad is None or not p.grad.any() for p in both.model.parameters())
    both.close()


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
        blocks = planned(Decoder(form, *SIZES["square heads"]).double(), ranks=4).blocks
        rows = [group.row for group in blocks["h.0"].plan.groups]
        assert rows == ["attn.c_proj", "down"], form
