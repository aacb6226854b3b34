"""A plan is tried as a whole: code around the blocks may read what a rank has a share of."""

import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from divided_words import WIDE, WORDS, PostNorm, TwoRanks, batch
from drivetrain.errors import CollectiveError, ConfigError, UsageError
from drivetrain.runtime import rng
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.plan import model as plan_model
from drivetrain_megatron.plan import trial
from drivetrain_megatron.plan.model import TensorParallel, confirmed
from drivetrain_megatron.plan.trial import run_emulated
from drivetrain_megatron.recording.calls import inputs_for
from stacks import Stack


class Words(Stack):
    """A transformer whose subclasses add something around the blocks."""

    def __init__(self, blocks=2, kind=PostNorm):
        super().__init__(
            [kind(WIDE) for _ in range(blocks)],
            first=nn.Embedding(WORDS, WIDE),
            last=nn.Linear(WIDE, WORDS),
        )

    def forward(self, ids):
        return self.around(super().forward(ids))

    def around(self, logits):
        return logits


class Prior(Words):
    """Reads the bias of the head, of which a rank has the words of its own."""

    def around(self, logits):
        return logits * self.last.bias.pow(2).mean()


class Penalized(Words):
    """Reads weights inside of blocks."""

    def around(self, logits):
        return logits * sum(block.up.weight.pow(2).mean() for block in self.blocks)


class Kept(PostNorm):
    def forward(self, x):
        x = self.norm(x + self.attention(x))
        self.inner = F.gelu(self.up(x))
        return self.last(x + self.down(self.inner))


class Watched(Words):
    """Reads an activation that a block keeps; nothing is seen of this in outputs."""

    def __init__(self):
        super().__init__(kind=Kept)
        self.scale = nn.Parameter(torch.ones(()))

    def around(self, logits):
        used = self.scale * self.blocks[0].inner.mean()
        return logits + (used - used.detach())


def planned(model, **options):
    model.example_inputs = batch()
    config = MegatronConfig(tp=2, **options)
    inputs = inputs_for(config, model)
    plan = TensorParallel.of(config, model, TwoRanks()).plan(model, inputs)
    assert plan.vocabulary == ["first", "last"]  # until the whole model is tried
    assert not any(block.is_whole for block in plan.blocks.values())
    return confirmed(model, inputs, plan, config)


def test_words_that_other_code_reads_stay_whole():
    plan = planned(Prior().double())
    assert not plan.vocabulary
    assert plan.note.startswith("first, last stay whole: divided by words, output 0 differs")
    assert not any(block.is_whole for block in plan.blocks.values())


def test_blocks_of_which_other_code_reads_a_share_stay_whole():
    for kind, found in (
        (Penalized, "output 0 differs"),
        (Watched, "the gradient of '[a-z0-9.]+' differs"),
    ):
        (whole,) = planned(kind().double()).blocks.items()
        assert whole[0] == ""
        assert whole[1].is_whole
        assert re.match(f"divided over ranks, .*{found}", whole[1].untried)


def test_plans_of_the_user_and_shards_of_the_sequence_are_refused():
    plan = {"*.up": "colwise", "*.down": "rowwise", "first": "vocab", "last": "vocab"}
    with pytest.raises(ConfigError, match="with this plan output 0 differs"):
        planned(Penalized().double(), plan=plan)
    with pytest.raises(ConfigError, match="output 0 differs.*set sequence_parallel: false"):
        planned(Penalized().double(), sequence_parallel=True)


def test_a_model_that_cannot_run_in_a_trial_keeps_its_words_whole():
    class Checked(Words):
        def around(self, logits):
            if type(logits) is torch.Tensor:
                raise ValueError("only without values")
            return logits

    plan = planned(Checked().double())
    assert not plan.vocabulary
    assert "only without values" in plan.note
    assert not any(block.is_whole for block in plan.blocks.values())


class Remembering(Words):
    """In evaluation it writes into a tensor that autograd needs, and counts with whole sizes."""

    def around(self, logits):
        if not self.training:
            scaled = logits.exp()
            used = scaled.sum() + (self.blocks[0].up.weight[:, 0] * torch.ones(2 * WIDE)).sum()
            scaled.add_(1)
            return scaled + used
        return logits


def test_a_model_without_gradients_in_a_trial_is_compared_without():
    """As RWKV, which crashed on ranks in the first evaluation."""
    (whole,) = planned(Remembering().double()).blocks.values()
    assert whole.untried.startswith("divided over ranks, RuntimeError")


def test_long_lists_are_tried_by_their_first_blocks(monkeypatch):
    """Where all blocks need too much memory; and nothing is tried where two need too much."""
    model = Words(blocks=6).double()
    names = []

    def counted(tried, *options):
        names.extend([len(tried.blocks)] if isinstance(tried, Words) else [])
        return random_copy(tried, *options)

    random_copy = trial.random_copy
    monkeypatch.setattr(trial, "random_copy", counted)
    weights = sum(p.numel() for p in model.parameters())
    for most, blocks in ((1 << 30, [6]), (weights * 48, [2]), (weights, [])):
        monkeypatch.setattr(plan_model, "MOST_BYTES", most)
        assert planned(model).vocabulary == ["first", "last"]
        assert names == blocks
        names.clear()


def test_thin_matrices_find_the_same(monkeypatch):
    monkeypatch.setattr(trial, "LARGE", 64)
    monkeypatch.setattr(trial, "FEATURES", 4)
    assert planned(Words().double()).vocabulary == ["first", "last"]
    assert not planned(Prior().double()).vocabulary
    assert "" in planned(Penalized().double()).blocks


# --- ranks as threads ---


def test_errors_end_all_ranks():
    reached = []

    def fails(ranks):
        if ranks.rank == 2:
            raise ZeroDivisionError("of rank 2")
        ranks.barrier()
        reached.append(ranks.rank)

    with pytest.raises(ZeroDivisionError, match="of rank 2"):
        run_emulated(4, fails)
    assert reached == []

    def fails_alike(ranks):
        ranks.barrier()
        raise ZeroDivisionError(f"of rank {ranks.rank}")

    with pytest.raises(ZeroDivisionError, match="of rank 0"):
        run_emulated(4, fails_alike)

    def stays_away(ranks):
        if ranks.rank:
            ranks.all_reduce(torch.zeros(3)).wait()

    def other_size(ranks):
        label = f"of rank {ranks.rank}"
        ranks.all_reduce(torch.zeros(4 + ranks.rank), label=label).wait()

    def other_chunks(ranks):
        ranks.all_gather(torch.zeros(4), chunks=[(0, 1), (2, 4)])

    for body, error, match in (
        (stays_away, CollectiveError, r"all_reduce of 3 .* has failed or ended"),
        (other_size, CollectiveError, r"of 4 .*\(of rank 0\); rank 1: .* of 5"),
        (other_chunks, UsageError, r"one \(start, stop\) for each of 2 ranks"),
    ):
        with pytest.raises(error, match=match):
            run_emulated(2, body)


def test_backward_runs_in_the_thread_of_its_rank():
    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ranks):
            ctx.ranks = ranks
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            ctx.ranks.all_reduce(grad).wait()
            return grad, None

    def body(ranks):
        x = torch.ones(3, requires_grad=True)
        (Meet.apply(x, ranks) * (ranks.rank + 1)).sum().backward()
        return x.grad.tolist()

    assert run_emulated(3, body) == [[6, 6, 6]] * 3


def test_ranks_draw_alike_and_leave_generators_alone():
    def body(ranks):
        drawn = [torch.rand(()).item()]
        for _ in range(3):
            ranks.barrier()
            drawn += [torch.rand(()).item(), random.random()]
        return drawn

    before = rng.capture()
    first, *others = run_emulated(3, body)
    assert len(set(first)) == len(first)
    assert others == [first, first]
    torch.testing.assert_close(rng.capture(), before)
