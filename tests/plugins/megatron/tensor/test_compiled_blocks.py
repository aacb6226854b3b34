"""Compiled blocks that ranks share: few graphs, the numbers and the collectives of eager ones."""

from collections import Counter

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.testing.models import HIDDEN, WIDTH, linear
from graphs import backend, graphs
from stacks import Block, Tower

pytestmark = [pytest.mark.ranks(2), pytest.mark.filterwarnings("ignore")]  # torch.compile's own


class Mixed(Block):
    """Two layers with one input, one with no other to go with, and attention of torch.

    Rows are a sequence to the attention.
    """

    def __init__(self):
        super().__init__()
        self.gate, self.mix = linear(WIDTH, HIDDEN), linear(WIDTH, WIDTH)
        self.wide, self.narrow = linear(WIDTH, 8), linear(8, WIDTH)
        self.attention = nn.MultiheadAttention(8, 2, dtype=torch.float64)

    def forward(self, x):
        x = x + torch.layer_norm(self.mix(x), (WIDTH,))
        h = self.wide(x)
        x = x + self.narrow(self.attention(h, h, h, need_weights=False)[0])
        return x + self.drop(self.down(torch.sigmoid(self.gate(x)) * self.up(x)))


class Beside(Block):
    """Two pairs of layers, whose sums do not wait for each other."""

    def __init__(self):
        super().__init__()
        self.second = nn.ModuleList([linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)])

    def forward(self, x):
        inner, outer = self.second
        return super().forward(x) + outer(torch.sigmoid(inner(x)))


def trained(block, mode, dropout=0.0, **options):
    """Return the values of three steps, what was sent in its order, and graphs after each step."""
    accelerator = Accelerator(
        strategy={"name": "megatron", **options}, cpu=True, config={"compile": mode}
    )
    torch.manual_seed(0)
    kind = type("Tower", (Tower,), {"block": block})
    model = kind(3, dropout=dropout)
    model.example_inputs = (torch.randn(8, WIDTH, dtype=torch.float64),)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sent, made, by_itself, add = [], [], {}, accelerator.traffic.add
    accelerator.traffic.add = lambda *entry: sent.append(entry) or add(*entry)
    for _ in range(3):
        x = torch.randn(8, WIDTH, dtype=torch.float64)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if block is Mixed:  # where parameters show the whole
            by_itself = {"block": model.blocks[0](x)}
        made.append(graphs())
    found = accelerator.get_state_dict(model) | by_itself
    return found, sent, made


def check(block, by, number, reduces=(), **options):
    """Compare eager and compiled blocks; sums of ``reduces`` may come in another order."""
    with backend(by):
        expected, sent, _ = trained(block, "none", **options)
        found, order, made = trained(block, "blocks", **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert Counter(order) == Counter(sent)
    own, ours = ([each for each in one if each[1] not in reduces] for one in (sent, order))
    assert ours == own
    assert made == [number] * 3


def test_divided_blocks_are_one_graph():
    check(Mixed, "aot_eager", 1, tp=2)


@pytest.mark.ranks(4)
def test_divided_blocks_of_stages_are_one_graph():
    check(Beside, "aot_eager", 1, tp=2, pp=2, micro_batches=2)


def test_blocks_with_shards_of_the_sequence_are_one_graph():
    """Gradients of parameters leave a graph together, so that their sums come behind."""
    check(Beside, "aot_eager", 1, ("all_reduce",), tp=2, sequence_parallel=True)


def test_collectives_keep_their_order_where_nothing_waits_for_them():
    check(Beside, "inductor", 1, tp=2)


def test_counted_dropout_stays_between_graphs_and_keeps_its_masks():
    check(Beside, "aot_eager", 3, dropout=0.3, tp=2)


def test_blocks_of_stages_are_one_graph():
    check(Beside, "aot_eager", 1, pp=2)
