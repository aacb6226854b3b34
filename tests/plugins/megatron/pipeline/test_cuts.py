"""Batches and losses in a pipeline: cut where the result is the whole batch's, and only there."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.suite import everyone
from drivetrain_megatron.pipeline.losses import Weights, origins_of
from stacks import Parts, Residual, Stack
from staged_twins import EXACT, Twins

pytestmark = pytest.mark.ranks(2)

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


@pytest.mark.parametrize("turn", [2, 1, 0])
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
        assert set(both.strategy.pipeline._losses._known.values()) == {weights}, name


def sequence_first():
    """Return an encoder of torch's own default layout: (sequence, batch)."""

    def compute(m, ids, padding):
        mask = nn.Transformer.generate_square_subsequent_mask(len(ids), dtype=torch.float64)
        return m.head(m.encoder(m.words(ids), mask=mask, src_key_padding_mask=padding))

    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1), 2, enable_nested_tensor=False
    )
    ends = {"words": nn.Embedding(WORDS, 8), "head": nn.Linear(8, WORDS)}
    return Parts(compute, **ends, encoder=encoder).double()


def test_the_dim_of_the_batch_is_found():
    """Ids are (sequence, batch), the mask (batch, sequence); in evaluation, dropout is off."""
    model = sequence_first()
    padding = torch.zeros(4, 6, dtype=torch.float64)
    padding[1, 4:] = float("-inf")
    ids = batch(0).T
    both = Twins(model, (ids, padding))
    both.eval()
    both.backward(*(cross_entropy(output, ids) for output in both(ids, padding)))
    both.check_gradients()
    known = both.strategy.pipeline._batches._known
    (division,) = known.values()
    assert division.dims == (1, 0, None)
    before = torch.get_rng_state()
    both.model.train()
    with torch.no_grad():
        both.model(ids, padding)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(d.dims == (1, 0, None) for d in known.values())


class RowNorm(nn.BatchNorm1d):
    """Statistics over the rows of a batch, for (batch, length, width)."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


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
    known = both.strategy.pipeline._batches._known
    assert [d.dims for d in known.values()] == [None]
    both.eval()
    with torch.no_grad():
        torch.testing.assert_close(*both(ids), **EXACT)
    assert [d.dims for d in known.values()] == [None, (0, None)]


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


def test_a_stage_that_was_frozen_after_prepare_is_thawed_in_mid_training():
    both = Twins(words(), make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for seed, thawed in ((0, False), (1, True)):
        for each in (both.model, both.twin):
            each.first.requires_grad_(thawed)
            each.blocks[0].requires_grad_(thawed)
        ids = batch(seed)
        both.backward(*(cross_entropy(output, ids) for output in both(ids)))
        both.step()
    both.check_state()


class Variational(nn.Module):
    """Returns a mean of which its code between blocks makes a smaller tensor, which is sent."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)
        self.example_inputs = torch.randn(2, 8)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + spread.exp()), mean


def test_a_loss_of_what_lies_between_blocks_is_refused_where_it_is_made():
    both = Twins(Variational())
    output, mean = both.model(torch.randn(8, 8))
    if both.accelerator.mesh["pp"].rank == 1:  # the other learns of it as this rank ends
        with pytest.raises(UsageError, match="deep supervision"):
            origins_of(output.mean() + mean.mean())


@dataclass
class Plain:
    logits: torch.Tensor


class ReturningDataclass(Stack):
    def forward(self, ids):
        return Plain(super().forward(ids))


def test_a_dataclass_is_refused_by_its_name():
    """In training and in evaluation, before anything is sent."""
    both = Twins(words(kind=ReturningDataclass))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(UsageError, match="found a Plain"):
            both.model(batch(0))
    assert len(both.accelerator.get_state_dict(both.model)) == len(both.twin.state_dict())


# --- levels of a pipeline in the script's loop: what the model returns may be used as ever ---


WIDTH = 8


class Illustrated(Stack):
    """Returns what it makes before its blocks, too, as models of images and text do."""

    def __init__(self):
        super().__init__((Residual(WIDTH) for _ in range(2)), first=nn.Linear(WIDTH, WIDTH))

    def forward(self, left, right):
        features = self.first(right)
        return self.body(left + features), features


def illustrated():
    torch.manual_seed(0)
    pairs = torch.randn(2, 2, 4, WIDTH, dtype=torch.float64)
    return Twins(Illustrated().double(), tuple(pairs[0]), accumulation=2), pairs


def test_an_output_of_an_early_stage_may_lie_on_the_way_of_its_gradient():
    both, pairs = illustrated()
    for pair in pairs:
        with both.accelerator.accumulate(both.model):
            both.backward(*(x.square().mean() for x, _ in both(*pair)))
    both.check_gradients()
    output, features = both.model(*pairs[0])
    mine = features if both.accelerator.is_main_process else output
    with pytest.raises(UsageError, match="found a backward of its own on what a pipeline"):
        mine.sum().backward()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_gradients_are_refused_alike_on_all_stages(accumulation):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    both = Twins(model, torch.ones(4, 4), accumulation=accumulation)
    x = torch.ones(4, 4, requires_grad=True)
    with both.accelerator.accumulate(both.model):
        scores = both.model(x)
        with pytest.raises(UsageError, match="a gradient penalty") as error:
            torch.autograd.grad(scores.sum(), x, create_graph=True)
    assert len(set(everyone(str(error.value)))) == 1
    both.accelerator.backward(scores.sum())  # the refused call leaves all usable


class Scored(Stack):
    """Returns scores, which of them are positive, a loss, and hidden states of the first block."""

    def __init__(self):
        super().__init__((Residual(WIDTH) for _ in range(4)), last=nn.Linear(WIDTH, 3))

    def forward(self, x, y):
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        scores, loss = self.last(x), F.cross_entropy(self.last(x), y)
        return {"loss": loss, "scores": scores, "positive": scores > 0, "hidden": hidden[0]}


def own_loss(output):
    """A loss of the script, which reads values before backward."""
    factor = 2.0 if output["positive"].sum().item() % 2 else 3.0
    return factor * output["scores"].square().mean()


@pytest.mark.parametrize("steps", [1, 2])
def test_where_outputs_are_shared_every_stage_reads_them_and_makes_the_loss(steps):
    batch = torch.randn(6, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 1])
    both = Twins(Scored().double(), batch, accumulation=steps)
    both.strategy.pipeline.shares_outputs = True
    for _ in range(steps):
        with both.accelerator.accumulate(both.model):
            output, expected = both(*batch)
            for name in ("scores", "positive"):
                torch.testing.assert_close(output[name], expected[name])
            losses = own_loss(output), own_loss(expected)
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
            both.backward(*losses)
    both.check_gradients(**EXACT)
    output = both.model(*batch)
    with pytest.raises(UsageError, match="takes the output of an earlier block"):
        both.accelerator.backward(output["scores"].mean() + output["hidden"].mean())
