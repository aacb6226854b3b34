"""Dropout over ranks: the same masks for any number of tensor-parallel ranks, sharded or not."""

import copy
import itertools
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain.collectives.solo import SoloCommunicator
from drivetrain.errors import UsageError
from drivetrain.parts.blocks import repeated_blocks
from drivetrain.runtime.mesh import Axis
from drivetrain.traffic import Traffic
from drivetrain_megatron.dropout.chain import Dropout, MaskSource
from drivetrain_megatron.dropout.dropouts import Dropping, Site
from huggingface_models import bert, encoder, gpt2, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Handmade(nn.Module):
    """Blocks as people write them: functional dropout of whole, head and feature shards."""

    class Block(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.dropout = dropout
            self.norm = nn.LayerNorm(24)
            self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
            self.up, self.down = nn.Linear(24, 36), nn.Linear(36, 24)

        def forward(self, x):
            p, qkv = self.dropout, self.qkv(x)
            shape = (*qkv.shape[:2], -1, 4)
            q, k, v = (each.reshape(shape).transpose(1, 2) for each in qkv.chunk(3, -1))
            a = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=p if self.training else 0.0
            )
            a = self.out(a.transpose(1, 2).flatten(2))
            x = self.norm(x + F.dropout(a, p, self.training))
            hidden = torch.dropout(self.up(x).relu(), p, self.training)
            return x + F.dropout(self.down(hidden), p, self.training, inplace=True)

    def __init__(self, layers=2, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(97, 24)
        self.dropout = dropout
        self.blocks = nn.ModuleList(self.Block(dropout) for _ in range(layers))
        self.head = nn.Linear(24, 97)

    def forward(self, input_ids):
        x = F.dropout(self.tokens(input_ids), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {
    "gpt2": gpt2,
    "bert": bert,
    "encoder": encoder,
    "handmade": lambda dropout: Handmade(dropout=dropout).double(),
}
EACH = pytest.mark.parametrize("name", list(MODELS))
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])


def loss_of(model, ids):
    logits = logits_of(model(ids))
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


def build(name, dropout):
    torch.manual_seed(0)
    return MODELS[name](dropout=dropout)


def prepare(model, accumulation=1, **options):
    accelerator = Accelerator(
        strategy={"name": "megatron", **options},
        cpu=True,
        gradient_accumulation_steps=accumulation,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def counting(model, replica=0, seed=0):
    """Let a model of one process drop by the same masks, without the strategy."""
    axis = Axis(name="tp", size=1, rank=0, ranks=(0,), hosts=("here",))
    dropout = Dropout(
        MaskSource(seed, replica), SoloCommunicator(axis, Traffic(), timedelta(seconds=9))
    )
    dropout.find(model, None)
    dropout.attach(model)
    dropout.follow(repeated_blocks(model))
    return dropout


def check_gradients(accelerator, model, twin):
    strategy = accelerator.strategy_of(model)
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        whole, partition = theirs[name].grad, strategy._facts[name].partition
        expected = whole if partition is None else partition.take(whole, strategy._tp.rank)
        torch.testing.assert_close(parameter.grad, expected, **EXACT, msg=name)


def check_training(name, dropout=0.1, steps=2, recompute=None, **options):
    model = build(name, dropout)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    accelerator, model, optimizer = prepare(model, accumulation=2, **options)
    if recompute:
        accelerator.recompute(model, mode=recompute)
    masks = counting(twin)
    model.train()
    twin.train()
    for batch in range(2 * steps):
        ids = token_batch(batch)
        with accelerator.accumulate(model):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            theirs = loss_of(twin, ids)
            (theirs / 2).backward()
            torch.testing.assert_close(loss.detach(), theirs.detach(), **EXACT)
            if batch % 2:
                check_gradients(accelerator, model, twin)
                other.step()
                other.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    assert masks.forwards == 2 * steps
    accelerator.free_memory()


@EACH
@SEQUENCE
@pytest.mark.ranks(2)
def test_two_ranks(name, sequence_parallel):
    check_training(name, tp=2, sequence_parallel=sequence_parallel)


@EACH
@SEQUENCE
@pytest.mark.ranks(4)
def test_four_ranks(name, sequence_parallel):
    check_training(name, dropout=0.3, tp=4, sequence_parallel=sequence_parallel)


@EACH
@pytest.mark.parametrize(
    ("recompute", "sequence_parallel"), [("full", False), ("full", True), ("selective", True)]
)
@pytest.mark.ranks(2)
def test_recomputed_blocks_drop_the_same(name, sequence_parallel, recompute):
    check_training(name, steps=1, recompute=recompute, tp=2, sequence_parallel=sequence_parallel)


def seen_by(model, module, call):
    """Return what a module of a model returned in each call of it."""
    seen = []
    handle = module.register_forward_hook(lambda m, args, output: seen.append(output.detach()))
    call()
    handle.remove()
    return seen


@SEQUENCE
@pytest.mark.ranks(2)
def test_replicas_are_equal_and_shards_differ(sequence_parallel):
    accelerator, model, _ = prepare(
        build("encoder", 0.3), tp=2, sequence_parallel=sequence_parallel
    )
    model.train()
    group = accelerator.mesh["tp"].group
    ids = token_batch(0, length=8)

    def others(module):
        (mine,) = seen_by(model, module, lambda: model(ids))
        theirs = torch.empty_like(mine.contiguous())
        both = [torch.empty_like(theirs), theirs]
        torch.distributed.all_gather(both, mine.contiguous(), group=group)
        return both

    layer = model.encoder.layers[0]
    whole, features = others(model.encoder), others(layer.dropout)
    assert torch.equal(*whole)
    assert features[0].shape[-1] == 20
    zeros = [each == 0 for each in features]
    assert not torch.equal(*zeros)
    residual = [each == 0 for each in others(layer.dropout2)]
    assert residual[0].shape[1] == (4 if sequence_parallel else 8)
    assert torch.equal(*residual) != sequence_parallel
    accelerator.free_memory()


@pytest.mark.ranks(4)
def test_data_parallel_ranks_drop_differently():
    model = build("gpt2", 0.2)
    twins = [copy.deepcopy(model).train() for _ in range(2)]
    accelerator, model, _ = prepare(model, tp=2)
    model.train()
    replica = accelerator.mesh["dp"].rank
    losses = []
    for index, twin in enumerate(twins):
        counting(twin, replica=index)
        losses.append(loss_of(twin, token_batch(0)).detach())
    mine = loss_of(model, token_batch(0)).detach()
    torch.testing.assert_close(mine, losses[replica], **EXACT)
    assert abs(losses[0] - losses[1]) > 1e-4
    accelerator.free_memory()


def losses_of(model, batches=3):
    return [loss_of(model, token_batch(0)).item() for _ in range(batches)]


def test_each_forward_and_each_seed_drops_differently():
    models = [build("bert", 0.2).train() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        counting(model, seed=seed)
    first, again, other = map(losses_of, models)
    assert first == again
    assert len({*first, *other}) == 6


def test_evaluation_drops_nothing_and_changes_nothing():
    name = "bert"
    model, undisturbed = (build(name, 0.2) for _ in range(2))
    plain = build(name, 0.2).eval()
    for each in (model, undisturbed):
        counting(each)
        each.train()
    expected = losses_of(undisturbed, 2)
    found = losses_of(model, 1)
    with torch.no_grad():
        torch.testing.assert_close(
            loss_of(model.eval(), token_batch(4)), loss_of(plain, token_batch(4)), **EXACT
        )
    found += losses_of(model.train(), 1)
    assert found == expected


def test_a_forward_that_fails_leaves_no_trace():
    model, undisturbed = (build("encoder", 0.2).train() for _ in range(2))
    counting(model)
    counting(undisturbed)
    before = torch.get_rng_state()
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((2, 3), 1000))
    assert torch.equal(torch.get_rng_state(), before)
    assert losses_of(model) == losses_of(undisturbed)


class Small(nn.Module):
    def __init__(self, p, inplace=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(p, inplace)

    def forward(self, x):
        return self.dropout(self.linear(x))


def test_scale_and_probabilities_at_the_edges():
    for inplace in (False, True):
        x = torch.randn(500, 8)
        for p in (0.25, 1.0):
            model = Small(p, inplace).train()
            counting(model)
            y, whole = model(x), model.eval()(x)
            kept = y != 0
            torch.testing.assert_close(y[kept], whole[kept] / (1 - p) if p < 1 else whole[kept])
            assert abs(kept.double().mean() - (1 - p)) < 0.04
            y.sum().backward()
            assert torch.isfinite(model.linear.weight.grad).all()
            model.train().dropout.p = 0.0
            assert torch.equal(model(x), whole)


def test_a_trial_drops_nothing_and_does_not_count():
    model, x = Small(0.4).train(), torch.ones(9, 8)
    masks = counting(model)
    with masks.left_out():
        assert torch.equal(model(x), model.linear(x))
    assert masks.forwards == 0
    assert not torch.equal(model(x), model.linear(x))
    assert masks.forwards == 1


def test_checkpoint_of_torch_and_calls_that_repeat():
    """One module that runs several times in a forward, each time computed again in backward."""

    class Repeated(nn.Module):
        def __init__(self, recompute):
            super().__init__()
            self.step = Small(0.4)
            self.recompute = recompute

        def forward(self, x):
            for _ in range(3):
                x = (
                    checkpoint(self.step, x, use_reentrant=False)
                    if self.recompute
                    else self.step(x)
                )
            return x

    torch.manual_seed(0)
    kept = Repeated(recompute=False).double()
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
        torch.testing.assert_close(a.grad, b.grad, **EXACT)


@EACH
@pytest.mark.ranks(4)
def test_pipeline_stages_drop_as_one_process_does(name):
    model = build(name, 0.1)
    twin = copy.deepcopy(model).train()
    accelerator, model, _ = prepare(model, accumulation=2, tp=2, pp=2)
    model.train()
    counting(twin)
    for batch in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, token_batch(batch)))
        (loss_of(twin, token_batch(batch)) / 2).backward()
    check_gradients(accelerator, model, twin)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_module_called_by_itself_is_refused():
    accelerator, model, _ = prepare(build("encoder", 0.2), tp=2)
    model.train()
    with pytest.raises(UsageError, match="call the model itself"):
        model.encoder.layers[0].dropout(torch.ones(2, 7, 48))
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_dropout_that_was_off_is_refused_inside_of_blocks():
    accelerator, model, _ = prepare(build("encoder", 0.2), tp=2)
    module = model.encoder.layers[1].linear1
    surrounded = module.forward
    module.forward = lambda x: F.dropout(surrounded(x), 0.5)  # not seen at prepare: torch's own
    model.train()
    loss_of(model, token_batch(0))
    found = accelerator.strategy_of(model)._dropout.layouts.found
    del found[Site("encoder.layers.1.dropout", 0)]
    with pytest.raises(UsageError, match="was seen when block"):
        loss_of(model, token_batch(0))
    accelerator.free_memory()


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(3, 1, 5, 6, generator=torch.Generator().manual_seed(1)) < 0.7},
    "float": {"attn_mask": torch.linspace(-2, 2, 30, dtype=torch.float64).view(5, 6)},
    "nothing": {"attn_mask": torch.zeros(5, 6, dtype=torch.bool)},
}


def check_attention_step_by_step_equals_that_of_torch(mask, scale, kv_heads):
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(3, h, n, 8, generator=generator, dtype=torch.float64)
        for h, n in ((4, 5), (kv_heads, 6), (kv_heads, 6))
    ]
    options = {**MASKS[mask], "scale": scale, "enable_gqa": kv_heads != 4}
    results = []
    for compute in ("theirs", "ours"):
        given = [x.clone().requires_grad_() for x in made]
        if compute == "ours":
            with Dropping(lambda weights, p: weights):
                y = F.scaled_dot_product_attention(*given, dropout_p=0.5, **options)
        else:
            y = F.scaled_dot_product_attention(*given, **options)
        y.square().sum().backward()
        results.append([y, *(x.grad for x in given)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_attention_step_by_step_equals_that_of_torch():
    for mask, (scale, kv_heads) in itertools.product(MASKS, ((None, 4), (0.3, 2))):
        check_attention_step_by_step_equals_that_of_torch(mask, scale, kv_heads)


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.ranks(2)
def test_a_run_that_goes_on_drops_as_if_it_had_never_stopped(tmp_path, options):
    def losses(accelerator, model, optimizer, steps):
        found = []
        for batch in steps:
            loss = loss_of(model, token_batch(batch))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    accelerator, model, optimizer = prepare(build("gpt2", 0.2).train(), **options)
    losses(accelerator, model, optimizer, range(2))
    accelerator.save_state(tmp_path / "saved")
    expected = losses(accelerator, model, optimizer, range(2, 4))
    accelerator.free_memory()
    accelerator, model, optimizer = prepare(build("gpt2", 0.2).train(), **options)
    accelerator.load_state(tmp_path / "saved")
    assert losses(accelerator, model, optimizer, range(2, 4)) == expected
    accelerator.free_memory()
