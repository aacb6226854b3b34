"""Masks that count: what they look like as random numbers, and that shards see the same."""

import copy
import itertools
import random
from datetime import timedelta
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cases import case
from cell_twins import Twins, loss_of
from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.cost import Traffic
from drivetrain.errors import UsageError
from drivetrain.model.modules import repeated_blocks
from drivetrain.runtime import rng
from drivetrain.runtime.mesh import Axis
from drivetrain_megatron.dropout import AlikeDraws, Dropout, Dropping, Site, combine, keep_mask
from drivetrain_megatron.tensor.partition import Partition, even, packed, units
from emulated_tensors import close
from huggingface_models import bert, encoder, gpt2, token_batch
from stacks import Parts, Stack

SHAPES = [(50,), (3, 7), (2, 6, 7, 5), (3, 40, 48), (2, 5, 3000), (4, 1, 1), (7, 2000)]


def shares(key, shape, partition):
    """Return what all ranks compute of a mask, put together."""
    whole = torch.zeros(shape, dtype=torch.bool)
    for rank in range(partition.ranks):
        local = partition.local_shape(rank, shape)
        partition.put(whole, keep_mask(key, local, 0.4, partition=partition, rank=rank), rank)
    return whole


def test_shards_of_any_dim_are_parts_of_the_whole():
    for shape, ranks in itertools.product(SHAPES, (2, 4)):
        whole = keep_mask(11, shape, 0.4)
        assert whole.shape == shape
        for dim, size in enumerate(shape):
            for each in (dim, dim - len(shape)):
                assert torch.equal(shares(11, shape, even(each, size, ranks)), whole)


def test_shards_of_packed_dims_and_of_units():
    whole = keep_mask(3, (5, 48), 0.4)
    assert torch.equal(shares(3, (5, 48), packed(1, (16, 16, 16), 3, unit=4)), whole)
    assert torch.equal(shares(3, (5, 48), units(-1, 48, 8, 4)), whole)


def deviations(mask, p, dim=None):
    """Return by how many standard deviations the means along a dim are off."""
    kept = mask.double()
    means = kept.mean() if dim is None else kept.mean([d for d in range(kept.dim()) if d != dim])
    count = kept.numel() / means.numel()
    return (means - (1 - p)).abs() / (p * (1 - p) / count) ** 0.5


def test_means_are_those_of_a_fair_coin():
    shape = 48, 64, 128
    for p in (0.1, 0.9):
        for key in (0, combine(1, 2)):
            mask = keep_mask(key, shape, p)
            assert deviations(mask, p) < 4.5
            for dim in range(3):
                off = deviations(mask, p, dim)
                assert off.max() < 5.0
                # Neither too uneven nor too even: means of a random coin scatter.
                assert len(off) < 50 or 0.5 < off.square().mean() < 1.6


def correlation(a, b):
    """Return the correlation of two masks times the root of their size: normal with spread 1."""
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return float((a * b).mean() / (a.std() * b.std()) * a.numel() ** 0.5)


def test_neighbors_do_not_correlate():
    for p in (0.1, 0.5):
        mask = keep_mask(combine(7), (48, 64, 128), p)
        for dim, step in itertools.product(range(3), (1, 2, 3, 8, 16, 32)):
            size = mask.shape[dim] - step
            pair = mask.narrow(dim, 0, size), mask.narrow(dim, step, size)
            assert abs(correlation(*pair)) < 5.0, (dim, step)


def test_a_dim_that_is_too_long_is_refused():
    long = Partition(0, (1 << 32) + 1, (((0, 5),), ((5, (1 << 32) + 1),)))
    with pytest.raises(UsageError, match="reshape the tensor"):
        keep_mask(1, (5,), 0.5, partition=long, rank=0)


def test_alike_shards_edges_and_keys():
    twice = Partition(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))
    masks = [keep_mask(3, (2, 9), 0.5, partition=twice, rank=rank) for rank in range(4)]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])

    assert keep_mask(1, (9, 9), 0.0).all()
    assert not keep_mask(1, (9, 9), 1.0).any()
    assert keep_mask(1, (999, 99), 1 - 1e-12).sum() == 0

    keys = {combine(*numbers) for numbers in itertools.product(range(6), repeat=3)}
    assert len(keys) == 6**3
    assert combine(0) != combine(0, 0)
    assert all(0 <= key < 1 << 64 for key in keys)


# --- dropout over ranks ---


def block(dropout):
    """Return one as people write it: functional dropout of whole, head and feature shards."""

    def compute(m, x):
        p, qkv = dropout * m.training, m.qkv(x)
        shape = (*qkv.shape[:2], -1, 4)
        q, k, v = (each.reshape(shape).transpose(1, 2) for each in qkv.chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        a = m.out(a.transpose(1, 2).flatten(2))
        x = m.norm(x + F.dropout(a, dropout, m.training))
        hidden = torch.dropout(m.up(x).relu(), dropout, m.training)
        return x + F.dropout(m.down(hidden), dropout, m.training, inplace=True)

    return Parts(
        compute,
        norm=nn.LayerNorm(24),
        qkv=nn.Linear(24, 72),
        out=nn.Linear(24, 24),
        up=nn.Linear(24, 36),
        down=nn.Linear(36, 24),
    )


class Handmade(Stack):
    def __init__(self, dropout):
        blocks = [block(dropout) for _ in range(2)]
        super().__init__(blocks, first=nn.Embedding(97, 24), last=nn.Linear(24, 97))
        self.dropout = dropout

    def forward(self, input_ids):
        x = F.dropout(self.first(input_ids), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


MODELS = {
    "gpt2": gpt2,
    "bert": bert,
    "handmade": lambda dropout: Handmade(dropout).double(),
    "encoder": encoder,
}
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])


def build(name, dropout):
    torch.manual_seed(0)
    return MODELS[name](dropout=dropout).train()


def prepared(model, **options):
    both = Twins(model, **options)
    both.model.train()
    return both


def counting(model, replica=0, seed=0):
    """Let a model of one process drop by the same masks, without the strategy."""
    axis = Axis(name="tp", size=1, rank=0, ranks=(0,), hosts=("here",))
    ranks = SoloCommunicator(axis, Traffic(), timedelta(seconds=9))
    dropout = Dropout(seed, replica, ranks)
    dropout.find(model, None)
    dropout.attach(model)
    dropout.follow(repeated_blocks(model))
    return dropout


def check_training(name, dropout=0.1, windows=2, recompute=None, **options):
    both = prepared(build(name, dropout), accumulation=2, **options)
    if recompute:
        both.accelerator.recompute(both.model, mode=recompute)
    masks = counting(both.twin)
    for batch in range(2 * windows):
        ids = token_batch(batch)
        with both.accelerator.accumulate(both.model):
            loss, theirs = both.loss(both.model, ids), both.loss(both.twin, ids)
            both.accelerator.backward(loss)
            (theirs / 2).backward()
            close(loss.item(), theirs.item())
            if batch % 2:
                both.check_gradients()
                both.step()
    assert masks.forwards == 2 * windows


@pytest.mark.ranks(2)
def test_two_ranks():
    """Blocks that are recomputed drop the same."""
    check_two_ranks(("gpt2", False, None), ("handmade", True, None), ("encoder", True, "full"))


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_two_ranks_and_other_models():
    check_two_ranks(("bert", True, None), ("handmade", False, "full"), ("bert", True, "selective"))


def check_two_ranks(*cells):
    for name, sharded, recompute in cells:
        with case(name, sharded, recompute):
            check_training(name, recompute=recompute, tp=2, sequence_parallel=sharded)


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_four_ranks():
    check_training("gpt2", dropout=0.3, windows=1, tp=4, sequence_parallel=True)
    check_training("handmade", dropout=0.3, windows=1, tp=4)
    check_pipeline("gpt2")
    check_pipeline("encoder")


def check_pipeline(name):
    """Stages drop as one process does."""
    both = prepared(build(name, 0.1), accumulation=2, tp=2, pp=2)
    counting(both.twin)
    for batch in range(2):
        with both.accelerator.accumulate(both.model):
            both.accelerator.backward(loss_of(both.model, token_batch(batch)))
        (loss_of(both.twin, token_batch(batch)) / 2).backward()
    both.check_gradients()


@SEQUENCE
@pytest.mark.ranks(2)
def test_replicas_are_equal_and_shards_differ(sequence_parallel):
    both = prepared(build("encoder", 0.3), tp=2, sequence_parallel=sequence_parallel)
    model, group = both.model, both.accelerator.mesh["tp"].group
    ids = token_batch(0, length=8)

    def of_both_ranks(module):
        """Return what a module returns on each rank."""
        seen = []
        handle = module.register_forward_hook(lambda m, args, output: seen.append(output.detach()))
        model(ids)
        handle.remove()
        mine = seen[0].contiguous()
        found = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(found, mine, group=group)
        return found

    layer = model.encoder.layers[0]
    assert torch.equal(*of_both_ranks(model.encoder))
    features = of_both_ranks(layer.dropout)
    assert features[0].shape[-1] == 20
    assert not torch.equal(*(each == 0 for each in features))
    residual = [each == 0 for each in of_both_ranks(layer.dropout2)]
    assert residual[0].shape[1] == (4 if sequence_parallel else 8)
    assert torch.equal(*residual) != sequence_parallel


@pytest.mark.ranks(4)
def test_data_parallel_ranks_drop_differently():
    twins = [build("gpt2", 0.2) for _ in range(2)]
    both = prepared(build("gpt2", 0.2), tp=2, dropout_seed=3)
    replica = both.accelerator.mesh["dp"].rank
    losses = []
    for index, twin in enumerate(twins):
        counting(twin, replica=index, seed=3)
        losses.append(loss_of(twin, token_batch(0)).detach())
    close(loss_of(both.model, token_batch(0)).detach(), losses[replica])
    assert abs(losses[0] - losses[1]) > 1e-4


def test_each_forward_of_a_pipeline_has_a_number_of_its_own():
    model = small(0.5)
    masks = counting(model)
    assert [masks.take(count) for count in (2, 1)] == [0, 2]
    model.eval()
    assert [masks.take(count) for count in (2, 1)] == [-2, -3]
    assert masks.forwards == 3


def losses_of(model, batches=3):
    return [loss_of(model, token_batch(0)).item() for _ in range(batches)]


def test_each_forward_and_each_seed_drops_differently():
    models = [build("bert", 0.2) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        counting(model, seed=seed)
    first, again, other = map(losses_of, models)
    assert first == again
    assert len({*first, *other}) == 6


def test_evaluation_drops_nothing_and_failures_leave_no_trace():
    model, undisturbed, plain = (build("encoder", 0.2) for _ in range(3))
    for each in (model, undisturbed):
        counting(each)
    expected = losses_of(undisturbed)
    found = losses_of(model, 1)
    with torch.no_grad():
        close(loss_of(model.eval(), token_batch(4)), loss_of(plain.eval(), token_batch(4)))
    found += losses_of(model.train(), 1)
    before = torch.get_rng_state()
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((2, 3), 1000))
    assert torch.equal(torch.get_rng_state(), before)
    assert found + losses_of(model, 1) == expected


def test_several_forwards_put_generators_back_once(monkeypatch):
    masks, taken, drawn, make = counting(small(0.4)), [], [], rng.Snapshot
    before = rng.capture()
    monkeypatch.setattr(rng, "Snapshot", lambda: taken.append(make()) or taken[-1])
    with masks.several():
        for number in (0, 1, 0):
            with masks.forward(number):
                drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
    monkeypatch.undo()
    torch.testing.assert_close(rng.capture(), before, rtol=0, atol=0)
    assert drawn[0] == drawn[2] != drawn[1]
    assert len(taken) == 1


def small(p, inplace=False, kind=nn.Sequential):
    return kind(nn.Linear(8, 8), nn.Dropout(p, inplace)).train()


def test_scale_and_probabilities_at_the_edges():
    x = torch.randn(500, 8)
    for inplace, p in itertools.product((False, True), (0.25, 1.0)):
        model = small(p, inplace)
        counting(model)
        y, whole = model(x), model.eval()(x)
        kept = y != 0
        torch.testing.assert_close(y[kept], whole[kept] / (1 - p) if p < 1 else whole[kept])
        assert abs(kept.double().mean() - (1 - p)) < 0.04
        y.sum().backward()
        assert torch.isfinite(model[0].weight.grad).all()
        model.train()[1].p = 0.0
        assert torch.equal(model(x), whole)


def test_a_trial_drops_nothing_and_does_not_count():
    model, x = small(0.4), torch.ones(9, 8)
    masks = counting(model)
    with masks.left_out():
        assert torch.equal(model(x), model[0](x))
    assert masks.forwards == 0
    assert not torch.equal(model(x), model[0](x))
    assert masks.forwards == 1


def test_checkpoint_of_torch_and_calls_that_repeat():
    """One module that runs several times in a forward, each time computed again in backward."""

    class Repeated(nn.Sequential):
        recompute = False

        def forward(self, x):
            step = super().forward
            for _ in range(3):
                x = checkpoint(step, x, use_reentrant=False) if self.recompute else step(x)
            return x

    torch.manual_seed(0)
    kept = small(0.4, kind=Repeated).double()
    again = copy.deepcopy(kept)
    again.recompute = True
    x = torch.randn(16, 8, dtype=torch.float64)
    for model in (kept, again):
        counting(model)
        outputs = [model(x) for _ in range(2)]  # two forwards before the first backward
        assert not torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    for a, b in zip(kept.parameters(), again.parameters(), strict=True):
        close(a.grad, b.grad)


@pytest.mark.ranks(2)
def test_modules_called_by_themselves_and_dropout_that_was_off_are_refused():
    both = prepared(build("encoder", 0.2), tp=2)
    layers = both.model.encoder.layers
    with pytest.raises(UsageError, match="call the model itself"):
        layers[0].dropout(torch.ones(2, 7, 48))
    surrounded = layers[1].linear1.forward
    layers[1].linear1.forward = lambda x: F.dropout(surrounded(x), 0.5)  # not seen at prepare
    loss_of(both.model, token_batch(0))
    found = both.accelerator.strategy_of(both.model)._dropout.layouts.found
    del found[Site("encoder.layers.1.dropout", 0)]
    with pytest.raises(UsageError, match="was seen when block"):
        loss_of(both.model, token_batch(0))


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(3, 1, 5, 6, generator=torch.Generator().manual_seed(1)) < 0.7},
    "float": {"attn_mask": torch.linspace(-2, 2, 30, dtype=torch.float64).view(5, 6)},
    "nothing": {"attn_mask": torch.zeros(5, 6, dtype=torch.bool)},
}


def test_attention_step_by_step_equals_that_of_torch():
    for mask, (scale, kv_heads) in itertools.product(MASKS, ((None, 4), (0.3, 2))):
        generator = torch.Generator().manual_seed(0)
        made = [
            torch.randn(3, h, n, 8, generator=generator, dtype=torch.float64)
            for h, n in ((4, 5), (kv_heads, 6), (kv_heads, 6))
        ]
        options = {**MASKS[mask], "scale": scale, "enable_gqa": kv_heads != 4}
        results = []
        for ours in (False, True):
            given = [x.clone().requires_grad_() for x in made]
            if ours:
                with Dropping(lambda weights, p: weights):
                    y = F.scaled_dot_product_attention(*given, dropout_p=0.5, **options)
            else:
                y = F.scaled_dot_product_attention(*given, **options)
            y.square().sum().backward()
            results.append([y, *(x.grad for x in given)])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-10, atol=1e-12, msg=lambda text, mask=mask: f"{mask} {text}"
            )


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.ranks(2)
def test_a_run_that_goes_on_drops_as_if_it_had_never_stopped(tmp_path, options):
    def losses(both, steps):
        found = []
        for batch in steps:
            loss = loss_of(both.model, token_batch(batch))
            both.accelerator.backward(loss)
            both.step()
            found.append(loss.item())
        return found

    both = prepared(build("gpt2", 0.2), **options)
    losses(both, range(2))
    both.accelerator.save_state(tmp_path / "saved")
    expected = losses(both, range(2, 4))
    both = prepared(build("gpt2", 0.2), **options)
    both.accelerator.load_state(tmp_path / "saved")
    assert losses(both, range(2, 4)) == expected


# --- ranks that share layers draw alike: states cross before a forward whose last one drew ---


class Counted(SoloCommunicator):
    """Counts how often states were sent."""

    sent = 0

    def broadcast(self, *args, **kwargs):
        self.sent += 1
        return super().broadcast(*args, **kwargs)


DRAWS = [random.random, partial(torch.rand, 1), numpy.random.rand]


def test_a_draw_of_any_generator_is_noticed():
    for draw in DRAWS:
        axis = Axis(name="tp", size=1, rank=0, ranks=(0,), hosts=("here",))
        ranks = Counted(axis, Traffic(), timedelta(seconds=9))
        draws, counts, model = AlikeDraws(ranks, torch.device("cpu")), [], nn.Identity()
        for compute in (int, int, draw, draw, int, int):
            with draws.during(model):
                compute()
            counts.append(ranks.sent)
        assert counts == [1, 1, 1, 2, 3, 3]
        with draws.during(model.eval()):
            pass
        assert ranks.sent == 4, "evaluation is another forward"
