"""Recomputed blocks: bitwise equal gradients, what is kept, and the calls that can go wrong."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from drivetrain.errors import UsageError
from drivetrain.model import recompute as replay
from drivetrain.model.recompute import attach, choose_blocks, is_attached, restore
from stacks import Residual, Stack

WIDTH, LENGTH, ROWS = 32, 48, 4


class Block(nn.Module):
    """Attention written out, with dropout, and a feed-forward layer."""

    def __init__(self, width=WIDTH, heads=4):
        super().__init__()
        self.heads, self.calls = heads, 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, mask=None, *, scale=1.0):
        self.calls += 1
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        attended = self.drop(scores.softmax(-1)) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def build(block=Block, dtype=torch.float64, *, layers=3, mode=None):
    torch.manual_seed(3)
    blocks = [block() for _ in range(layers)]
    model = Stack(blocks, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, 1)).to(dtype)
    if mode is not None:
        attach(choose_blocks(model), mode)
    return model


def inputs(dtype=torch.float64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=dtype)


def train(model, *args, **kwargs):
    """Return loss, gradients and the next random number after one forward and backward."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(*args, **kwargs).float().square().mean()
    after = torch.rand(())
    loss.backward()
    return [loss.detach(), after, torch.rand(()), *(p.grad for p in model.parameters())]


def same(first, second):
    pairs = zip(first, second, strict=True)
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def saved_bytes(model, *args):
    """Return the bytes of distinct storages, parameters apart, that live until backward."""

    def storages():
        gc.collect()
        return {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if issubclass(type(t), torch.Tensor) and t.layout is torch.strided
        }

    before = storages()
    # What autograd itself holds: packed by hooks, so that Python sees it.
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        loss = model(*args).sum()
    kept = {key: size for key, size in storages().items() if key not in before}
    del loss
    return sum(kept.values())


MODES = ("full", "selective")


def two_forwards(model):
    torch.manual_seed(1)
    first, second = model(inputs()), model(inputs(seed=6))
    with torch.no_grad():
        model(inputs(seed=7))
    second.sum().backward()
    (first.square().sum() + first.sum()).backward()
    return [p.grad for p in model.parameters()]


def two_backwards(model):
    torch.manual_seed(1)
    loss = model(inputs()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in model.parameters()]


def test_gradients_are_bitwise_equal():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for mode in MODES:
        for dtype in (torch.float64, torch.float32):
            expected = train(build(dtype=dtype), inputs(dtype), mask, scale=0.5)
            model = build(dtype=dtype, mode=mode)
            assert same(train(model, inputs(dtype), mask, scale=0.5), expected)
            assert [block.calls for block in model.blocks] == [2, 2, 2]
        assert same(two_forwards(build(mode=mode)), two_forwards(build()))
        model = build(mode=mode)
        assert same(two_backwards(model), two_backwards(build()))
        assert [block.calls for block in model.blocks] == [3, 3, 3]


def test_what_each_mode_keeps():
    x, kept = inputs(), {}
    for mode in ("none", "selective", "full"):
        kept[mode] = saved_bytes(build(layers=6, mode=None if mode == "none" else mode), x)
    one = x.nbytes  # rows * length * width
    per_block = {mode: (each - kept["full"]) / 6 / one for mode, each in kept.items()}
    # The input of each block and the output of the last; the rest is x's, the norms' and random
    # states of 5056 bytes.
    assert kept["full"] == pytest.approx(one * 7, rel=0.1)
    # qkv 3, out 1, up 4, down 1; attended is none of them
    assert per_block["selective"] == pytest.approx(9, rel=0.05)
    assert per_block["none"] > 2 * per_block["selective"]


def test_nothing_happens_without_training_or_gradients():
    for mode in MODES:
        model = build(mode=mode)
        with torch.no_grad():
            model(inputs())
        with torch.inference_mode():
            model(inputs())
        model.eval()
        model(inputs()).sum().backward()
        assert [block.calls for block in model.blocks] == [3, 3, 3]


def partly_frozen(mode, frozen):
    model = build()
    if frozen == "half":
        for part in (model.blocks[0], model.blocks[1].qkv, model.first):
            part.requires_grad_(False)
    else:
        getattr(model, frozen).requires_grad_(False)
    if mode:
        attach(choose_blocks(model), mode)
    return train(model, inputs())


def written_into(mode):
    model = build(lambda: InPlace(WIDTH), mode=mode)
    torch.manual_seed(0)
    x = model.first(inputs())
    for block in model.blocks:
        x = block(x).add_(1.0).sigmoid_()
    x.sum().backward()
    return [p.grad for p in model.blocks.parameters()]


def test_frozen_parameters_and_writing_in_place():
    for mode in MODES:
        for frozen in ("first", "blocks", "half"):
            assert same(partly_frozen(mode, frozen), partly_frozen(None, frozen)), frozen
        assert same(written_into(mode), written_into(None))


class InPlace(Residual):
    """Writes into the results of its matrix products, and its result is written into."""

    def forward(self, x):
        return self.down(torch.sigmoid_(self.up(x)).mul(2).tanh_())


class Counting(Residual):
    """Reads a buffer that it writes, as norms of averages and spectral norms do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x * self.calls)


def normalized():
    norms = nn.BatchNorm1d(LENGTH), nn.InstanceNorm1d(LENGTH, track_running_stats=True)
    return nn.Sequential(*norms, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def test_statistics_move_once():
    for mode in MODES:
        model, expected = build(normalized, mode=mode), build(normalized)
        for _ in range(2):
            assert same(train(model, inputs()), train(expected, inputs()))
            assert same(model.buffers(), expected.buffers())
        assert model.blocks[0][0].num_batches_tracked.item() == 2


def test_a_recomputation_reads_the_buffers_of_its_forward():
    for mode in MODES:
        model, expected = (build(lambda: Counting(WIDTH), mode=each) for each in (mode, None))
        for _ in range(2):
            assert same(train(model, inputs()), train(expected, inputs()))
            assert same(model.buffers(), expected.buffers())


def test_an_operation_that_draws_is_not_kept():
    operation = torch.ops.aten.native_dropout.default
    assert not replay._draws_random_numbers(torch.ops.aten.mm.default, (), {})
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert not replay._draws_random_numbers(attention, (1, 2, 3), {})
    assert replay._draws_random_numbers(attention, (1, 2, 3, 0.1), {})
    assert replay._draws_random_numbers(attention, (1, 2, 3), {"dropout_p": 0.1})
    assert torch.Tag.nondeterministic_seeded in operation.tags


class Fails(Block):
    fail = False

    def forward(self, x):
        if self.fail:
            raise ZeroDivisionError("mine")
        return super().forward(x)


def test_after_an_exception_training_goes_on():
    for mode in MODES:
        model, expected = build(Fails, mode=mode), build(Fails)
        loss = model(inputs()).sum()
        for use in (lambda model=model: model(inputs()), loss.backward):
            model.blocks[1].fail = True
            with pytest.raises(ZeroDivisionError, match="mine"):
                use()
            model.blocks[1].fail = False
            assert same(train(model, inputs()), train(expected, inputs()))


def test_restore_undoes_and_attach_replaces():
    model = build()
    own = Block.forward.__get__(model.blocks[2])
    model.blocks[2].forward = own
    before = [set(block.__dict__) for block in model.blocks]
    for mode in ("full", "selective", "full"):
        attach(choose_blocks(model), mode)
    assert is_attached(model)
    train(model, inputs())
    assert [block.calls for block in model.blocks] == [2, 2, 2]
    restore(model)
    assert not is_attached(model)
    assert [set(block.__dict__) for block in model.blocks] == before
    assert model.blocks[2].forward is own
    assert same(train(model, inputs()), train(build(), inputs()))


def test_compiled_otherwise_is_an_error():
    model = build()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with pytest.raises(UsageError, match=r"uncompiled block 'blocks.1'"):
        attach(choose_blocks(model), "selective")
    assert not is_attached(model)
    model = build()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(UsageError, match=r"found block.compile\(\)"):
        attach(choose_blocks(model), "full")
    around = torch.compile(build(), backend="eager")
    with pytest.raises(UsageError, match="nothing compiled around the block 'blocks.0'"):
        choose_blocks(around)


def test_choice_by_name_and_distance():
    model = build(layers=5)
    for names, every, expected in (
        ([], 2, ["blocks.0", "blocks.2", "blocks.4"]),
        (["blocks.[13]", "blocks.1.*", "*.4.up"], 1, ["blocks.1", "blocks.3", "blocks.4.up"]),
        (["blocks", "blocks.1.up"], 1, ["blocks"]),
    ):
        chosen = choose_blocks(model, names, every=every)
        assert [name for name, _ in chosen] == expected
    with pytest.raises(UsageError, match=r"'layers.\*' to match a module of Stack"):
        choose_blocks(model, ["blocks.*", "layers.*"])
    with pytest.raises(UsageError, match="to hold repeated blocks"):
        choose_blocks(model.blocks[0])
    with pytest.raises(UsageError, match="every to be 1 or more, found 0"):
        choose_blocks(model, every=0)
