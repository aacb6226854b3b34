"""Batches and losses in a pipeline: cut where the result is the whole batch's, and only there."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.losses import Weights
from stacks import Residual, Stack
from staged_twins import EXACT, Twins

WORDS = 11


def words(blocks=2, norm=nn.LayerNorm, kind=Stack):
    """Return residual blocks between an embedding and a head."""
    torch.manual_seed(0)
    residual = [Residual(8, norm=norm) for _ in range(blocks)]
    return kind(residual, first=nn.Embedding(WORDS, 8), last=nn.Linear(8, WORDS)).double()


def cross_entropy(output, y, **options):
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), **options)


def masked(output, y):
    """A mean over the words that are not the third, by hand."""
    each = F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="none")
    counts = y.flatten() != 3
    return (each * counts).sum() / counts.sum()


def distance(output, y):
    """A mean of squares over the positive words, as a mask of floats has it."""
    mask = y.to(output.dtype).clamp(0, 1)
    return (output.square().mean(-1) * mask).sum() / mask.sum()


def contrastive(output, y):
    vectors = output.mean(1)
    return F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


SCHEDULES = (
    {},
    {"schedule": "zb-h1", "micro_batches": 3},
    {"schedule": "interleaved", "chunks": 2},
)
CLASSES = torch.linspace(0.2, 2, WORDS).double()
LOSSES = {
    "mean": (cross_entropy, Weights.TARGETS),
    "padding word": (lambda o, y: cross_entropy(o, y, ignore_index=0), Weights.COUNTED),
    "class weights": (lambda o, y: cross_entropy(o, y, weight=CLASSES), Weights.COUNTED),
    "sum": (lambda o, y: cross_entropy(o, y, reduction="sum"), Weights.ONES),
    "squares": (lambda o, y: o.square().mean(), Weights.ROWS),
    "two": (lambda o, y: cross_entropy(o, y) + F.cross_entropy(o[:, 0], y[:, 1]), Weights.NONE),
    "masked by hand": (masked, Weights.NONE),
    "masked by floats": (distance, Weights.NONE),
    "contrastive": (contrastive, Weights.NONE),
}


def batch(seed, rows=4):
    return torch.randint(1, WORDS, (rows, 6), generator=torch.Generator().manual_seed(seed))


def batches(name):
    """Return (ids, targets): nothing to ignore at first, then uneven, then a part with nothing."""
    ignored = {"padding word": 0, "masked by hand": 3, "masked by floats": 0}.get(name, -100)
    if name in {"class weights", "sum", "squares", "contrastive"}:
        ignored = 5
    for seed in range(3):
        ids = batch(seed, rows=4 + seed)
        targets = ids.clone()
        if seed:
            targets[:2, 2:] = ignored
        if seed == 2:
            targets[:2] = ignored
        yield ids, targets


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.ranks(2)
def test_losses_that_are_handed_over(turn):
    """First a batch in which every target counts alike, so that it tells nothing of the weights."""
    for name in list(LOSSES)[turn::3]:
        both = Twins(words(4 if turn == 2 else 2), **SCHEDULES[turn])
        loss_of, weights = LOSSES[name]
        for ids, targets in batches(name):
            loss = both.accelerator.pipeline_step(both.model, ids, targets, loss_fn=loss_of)
            expected = loss_of(both.twin(ids), targets)
            expected.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-10), name
            both.check_gradients()
        assert set(both.strategy._pipeline._losses._known.values()) == {weights}, name
        both.close()


class SequenceFirst(nn.Module):
    """Of torch's own default layout: (sequence, batch)."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.double()

    def forward(self, ids, padding):
        mask = nn.Transformer.generate_square_subsequent_mask(len(ids), dtype=torch.float64)
        hidden = self.encoder(self.words(ids), mask=mask, src_key_padding_mask=padding)
        return self.head(hidden)


@pytest.mark.ranks(2)
def test_the_dim_of_the_batch_is_found():
    """Ids are (sequence, batch), the mask (batch, sequence); in evaluation, dropout is off."""
    torch.manual_seed(0)
    model = SequenceFirst()
    padding = torch.zeros(4, 6, dtype=torch.float64)
    padding[1, 4:] = float("-inf")
    ids = batch(0).T
    both = Twins(model, (ids, padding))
    both.eval()
    both.backward(*(cross_entropy(output, ids) for output in both(ids, padding)))
    both.check_gradients()
    known = both.strategy._pipeline._batches._known
    (division,) = known.values()
    assert division.dims == (1, 0, None)
    before = torch.get_rng_state()
    both.model.train()
    with torch.no_grad():
        both.model(ids, padding)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(d.dims == (1, 0, None) for d in known.values())
    both.close()


class RowNorm(nn.BatchNorm1d):
    """Statistics over the rows of a batch, for (batch, length, width)."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.ranks(2)
def test_blocks_that_couple_rows_are_not_cut():
    """Nor does the trial move their running statistics; in evaluation they may be cut."""
    both = Twins(words(norm=RowNorm))
    for seed in range(2):
        ids = batch(seed)
        both.backward(*(cross_entropy(output, ids) for output in both(ids)))
        both.check_gradients()
    buffers = dict(both.twin.named_buffers())
    rank = both.accelerator.mesh["pp"].rank
    for name, buffer in both.model.named_buffers():
        if name.startswith(f"blocks.{rank}"):
            torch.testing.assert_close(buffer, buffers[name], **EXACT)
    known = both.strategy._pipeline._batches._known
    assert [d.dims for d in known.values()] == [None]
    both.eval()
    with torch.no_grad():
        torch.testing.assert_close(*both(ids), **EXACT)
    assert [d.dims for d in known.values()] == [None, (0, None)]
    both.close()


class Deep(Stack):
    """Returns the hidden states of all blocks, if asked for."""

    def forward(self, ids, states=False):
        x = self.first(ids)
        hidden = [x]
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        logits = self.last(x)
        return {"logits": logits, "states": hidden} if states else {"logits": logits}


@pytest.mark.ranks(2)
def test_deep_supervision_is_refused_by_its_name():
    """On every rank; the pipeline then trains on."""
    both = Twins(words(4, kind=Deep), cut="2,2")
    for place in (2, 1, 2):  # the last stage receives the second block's state
        output = both.model(batch(0), states=True)
        loss = output["logits"].mean() + output["states"][place].mean()
        if place == 2:
            both.accelerator.backward(loss)
            continue
        with pytest.raises(UsageError, match="deep supervision"):
            both.accelerator.backward(loss)
    both.close()


@dataclass
class Plain:
    logits: torch.Tensor


class ReturningDataclass(Stack):
    def forward(self, ids):
        return Plain(super().forward(ids))


@pytest.mark.ranks(2)
def test_a_dataclass_is_refused_by_its_name():
    """In training and in evaluation, before anything is sent."""
    both = Twins(words(kind=ReturningDataclass))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(UsageError, match="found a Plain"):
            both.model(batch(0))
    assert len(both.accelerator.get_state_dict(both.model)) == len(both.twin.state_dict())
    both.close()
