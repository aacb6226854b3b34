"""``nn.MultiheadAttention`` on local heads: masks, layouts, outputs, encoders around it."""

import copy
import itertools

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigError, UsageError
from drivetrain.model.untouched import keep_padding
from drivetrain_megatron.plan.trial import run_emulated
from drivetrain_megatron.tensor.attention import attach_heads, head_partitions
from drivetrain_megatron.tensor.behavior import behavior_of, detach
from drivetrain_megatron.tensor.linear import attach_column, attach_row
from drivetrain_megatron.tensor.operators import Edges
from drivetrain_megatron.tensor.partition import even
from emulated_tensors import calls, close, numbers

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 7, 6, 4
FEATURES = HEADS * HEAD_DIM


def attention(heads=HEADS, **options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(heads * HEAD_DIM, heads, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases too: none is zero
    return module


def divided(whole, ranks, tokens=None):
    """Return a divided copy, and how each parameter is cut."""
    module = copy.deepcopy(whole)
    cuts = head_partitions(module, ranks.size)
    for name, partition in cuts.items():
        parameter = module.get_parameter(name)
        parameter.data = partition.take(parameter.data, ranks.rank)
    attach_heads(module, Edges(ranks, tokens))
    return module, cuts


def check(whole, inputs, size, **options):
    """Compare outputs, weights and all gradients; return each rank's counted collectives."""
    leaves = {id(each): each.clone().requires_grad_() for each in inputs}
    expected, weights = whole(*(leaves[id(each)] for each in inputs), **options)
    grad, weights_grad = numbers(*expected.shape, seed=8), None
    loss = (expected * grad).sum()
    if weights is not None:
        weights_grad = numbers(*weights.shape, seed=9)
        loss = loss + (weights * weights_grad).sum()
    whole.zero_grad()
    loss.backward()

    def body(ranks):
        module, cuts = divided(whole, ranks)
        mine = {id(each): each.clone().requires_grad_() for each in inputs}
        out, shown = module(*(mine[id(each)] for each in inputs), **options)
        close(out, expected)
        loss = (out * grad).sum()
        assert (shown is None) == (weights is None)
        if weights is not None:
            close(shown, weights)
            loss = loss + (shown * weights_grad).sum()
        loss.backward()
        for key, leaf in leaves.items():
            close(mine[key].grad, leaf.grad)
        for name, parameter in module.named_parameters():
            reference = whole.get_parameter(name).grad
            close(
                parameter.grad,
                cuts[name].take(reference, ranks.rank) if name in cuts else reference,
            )
        return calls(ranks)

    return run_emulated(size, body)


def inputs_of(batch_first, sources=TOKENS):
    shape = (BATCH, TOKENS, FEATURES) if batch_first else (TOKENS, BATCH, FEATURES)
    x = numbers(*shape)
    if sources == TOKENS:
        return x, x, x
    memory = numbers(*(sources if extent == TOKENS else extent for extent in shape), seed=1)
    return x, memory, memory


def test_other_sources_and_separate_weights():
    x, memory, _ = inputs_of(True, sources=5)
    (found, *_) = check(attention(batch_first=True), (x, memory, memory), 3)
    assert found == {"all_reduce": 4}  # one is of the weights
    whole = attention(bias=False, batch_first=True, kdim=FEATURES, vdim=5)
    (found, *_) = check(whole, (x, memory, numbers(BATCH, 5, 5, seed=2)), 3)
    assert found == {"all_reduce": 5}


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDING = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
PADDING[1, 4:] = True
PER_HEAD = numbers(BATCH * HEADS, TOKENS, TOKENS, seed=4)
MASKS = {
    "bool": {"attn_mask": CAUSAL},
    "float": {"attn_mask": numbers(TOKENS, TOKENS, seed=3)},
    "bool per head": {"attn_mask": (PER_HEAD > 1)},
    "float per head": {"attn_mask": PER_HEAD},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": PADDING.double() * -3},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True},
    "hint and padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
}


def test_masks():
    for size, need_weights in ((4, False), (2, True)):
        for mask in MASKS.values():
            whole = attention(batch_first=need_weights)
            check(whole, inputs_of(need_weights), size, need_weights=need_weights, **mask)


def test_unbatched_and_fewer_heads_than_ranks():
    x, padding = numbers(TOKENS, FEATURES), PADDING[1].double() * -3
    for average, batch_first in itertools.product((False, True), (False, True)):
        check(  # torch ignores batch_first here
            attention(batch_first=batch_first),
            (x, x, x),
            3,
            average_attn_weights=average,
            attn_mask=PER_HEAD[:HEADS],
            key_padding_mask=padding,
        )
    whole = attention(heads=2, batch_first=True)
    x = numbers(BATCH, TOKENS, 2 * HEAD_DIM)
    for options in ({"need_weights": False}, {"average_attn_weights": False}, {}):
        check(whole, (x, x, x), 4, **options)


def test_dropout_is_drawn_in_training_only():
    whole = attention(dropout=0.5, batch_first=True)
    x = numbers(BATCH, TOKENS, FEATURES)
    expected, _ = whole.eval()(x, x, x)

    def body(ranks):
        module, _ = divided(whole, ranks)
        for shown in (False, True):
            close(module.eval()(x, x, x, need_weights=shown)[0], expected)
            options = {"need_weights": shown, "average_attn_weights": False}
            dropped, weights = module.train()(x, x, x, **options)
            assert not torch.allclose(dropped, expected)
            if shown:
                assert 0.3 < (weights == 0).double().mean() < 0.7

    run_emulated(2, body)


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        FEATURES, HEADS, 10, dropout=0.0, batch_first=True, dtype=torch.float64, **options
    )
    model = nn.TransformerEncoder(layer, 2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return model


def divide_encoder(model, ranks):
    for layer in model.layers:
        layer.self_attn, _ = divided(layer.self_attn, ranks)
        by = even(0, 10, ranks.size)
        for parameter in (layer.linear1.weight, layer.linear1.bias):
            parameter.data = by.take(parameter.data, ranks.rank)
        layer.linear2.weight.data = even(1, 10, ranks.size).take(layer.linear2.weight, ranks.rank)
        attach_column(layer.linear1, Edges(ranks), even(-1, 10, ranks.size))
        attach_row(layer.linear2, Edges(ranks), even(-1, 10, ranks.size))


def test_encoders_never_bypass_it():
    (x, *_) = inputs_of(True)
    for training, options in (
        (False, {}),
        (False, {"src_key_padding_mask": PADDING}),
        (True, {"mask": CAUSAL}),
    ):
        whole = encoder().train(training)
        keep_padding(whole)
        with torch.set_grad_enabled(training):
            expected = whole(x, **options)  # in eval mode by torch's own path, from whole weights

        def body(ranks, whole=whole, training=training, options=options, expected=expected):
            model = copy.deepcopy(whole)
            divide_encoder(model, ranks)
            with torch.set_grad_enabled(training):
                close(model(x, **options), expected)
            assert calls(ranks) == {"all_reduce": 4}
            if training:
                model(x.clone().requires_grad_(), **options).sum().backward()
                assert calls(ranks) == {"all_reduce": 4 + 4 + 4}

        run_emulated(4, body)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_named_and_can_be_kept_out():
    whole = encoder().eval()
    (x, *_) = inputs_of(True)

    def body(ranks):
        model = copy.deepcopy(whole)
        divide_encoder(model, ranks)
        model.use_nested_tensor = True
        with torch.no_grad():
            with pytest.raises(UsageError, match="enable_nested_tensor=False"):
                model(x, src_key_padding_mask=PADDING)
            keep_padding(model)
            assert model(x, src_key_padding_mask=PADDING).shape == x.shape

    run_emulated(2, body)


def test_the_module_stays_the_users():
    def body(ranks):
        whole = attention()
        module, _ = divided(whole, ranks)
        assert isinstance(module, nn.MultiheadAttention)
        assert repr(module) == repr(whole)
        assert module._qkv_same_embed_dim is False
        assert behavior_of(copy.deepcopy(module)) is behavior_of(module)
        detach(module)
        assert type(module) is nn.MultiheadAttention
        assert module._qkv_same_embed_dim is True

    run_emulated(2, body)


def test_bad_options_and_masks_are_refused():
    def body(ranks):
        for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
            module = nn.MultiheadAttention(8, 2, **options)
            with pytest.raises(ConfigError, match=f"without {next(iter(options))}"):
                attach_heads(module, Edges(ranks))
        with pytest.raises(ConfigError, match="cut its linear layers"):
            attach_heads(nn.Linear(2, 2), Edges(ranks))
        module, _ = divided(attention(), ranks)
        x, _, _ = inputs_of(False)
        for options, match in (
            ({"is_causal": True}, "an attn_mask with is_causal"),
            ({"attn_mask": CAUSAL.int()}, "attn_mask of bools or floats"),
            ({"key_padding_mask": PADDING.int()}, "key_padding_mask of bools or floats"),
            ({"attn_mask": CAUSAL[:3]}, r"\(12, 7, 7\), found \(3, 7\)"),
        ):
            with pytest.raises(UsageError, match=match):
                module(x, x, x, **options)

    run_emulated(2, body)


def test_autocast():
    whole = attention(batch_first=True).float()
    x = numbers(BATCH, TOKENS, FEATURES).float()

    def body(ranks):
        module, _ = divided(whole, ranks)
        for need_weights, mask in itertools.product((False, True), (None, CAUSAL, CAUSAL.float())):
            with torch.autocast("cpu", torch.bfloat16):
                expected, _ = whole(x, x, x, attn_mask=mask, need_weights=need_weights)
                out, _ = module(x, x, x, attn_mask=mask, need_weights=need_weights)
            assert out.dtype is expected.dtype
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.2)

    run_emulated(2, body)
