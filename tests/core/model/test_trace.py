"""One look at a model: its operations, their work and bytes, what follows from what."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.model.trace import trace_model
from drivetrain.model.valueless import (
    WORK,
    ValuelessTensor,
    ValuesNeededError,
    facts_of,
    freeze,
)
from stacks import Parts

B, T, D, HEADS, VOCABULARY = 2, 8, 16, 4, 32


def only(trace, name):
    (found,) = [operation for operation in trace.operations if operation.name == name]
    return found


def test_the_work_and_bytes_of_operations():
    found = only(trace_model(nn.Linear(8, 3), (torch.ones(4, 8),), {}), "linear")
    assert found.work == 2 * 4 * 8 * 3
    assert found.read == 4 * (4 * 8 + 8 * 3 + 3)
    assert found.written == 4 * (4 * 3)
    assert not found.known
    with torch.autocast("cpu", torch.bfloat16):
        assert only(trace_model(nn.Linear(8, 3), (torch.ones(4, 8),), {}), "linear").written == 24

    def in_place(m, x):
        return m.layer(x).relu_()

    model = Parts(in_place, layer=nn.Linear(8, 3))
    assert only(trace_model(model, (torch.ones(4, 8),), {}), "relu_").written == 4 * (4 * 3)
    x = torch.ones(5, B, D)
    with FlopCounterMode(display=False) as counter:
        nn.GRU(D, D)(x)
    assert trace_model(nn.GRU(D, D), (x,), {}).work == counter.get_total_flops() > 0
    both = nn.LSTM(D, T, num_layers=2, bidirectional=True)  # torch counts none of its work
    each = 2 * x.shape[:-1].numel()
    weights = sum(weight.numel() for weight in both.parameters() if weight.dim() > 1)
    assert trace_model(both, (x,), {}).work == each * weights
    on_gpu = WORK[torch.ops.aten._cudnn_rnn](x, list(both.parameters()), 4, None, out_val=None)
    assert on_gpu == each * weights

    query = nn.Parameter(torch.ones(B, HEADS, T, D, dtype=torch.bfloat16))
    attention = Parts(lambda m: F.scaled_dot_product_attention(m.q, m.q, m.q), q=query)

    found = only(trace_model(attention, (), {}), "scaled_dot_product_attention")
    assert found.work == 2 * (2 * B * HEADS * T * T * D)
    assert found.written == 2 * (B * HEADS * T * D)
    assert found.read == 2 * (B * HEADS * T * D)  # one tensor, however often it is handed over

    long = query.detach().repeat(1, 1, 3, 1)
    attention = Parts(lambda m: F.scaled_dot_product_attention(m.q, long, long), q=query)
    found = only(trace_model(attention, (), {}), "scaled_dot_product_attention")
    assert found.work == 3 * 2 * (2 * B * HEADS * T * T * D)

    found = only(trace_model(nn.Embedding(1000, D), (torch.zeros(B, T).long(),), {}), "embedding")
    assert found.written == 4 * B * T * D
    assert found.read == 4 * B * T * D + 8 * B * T

    trace = trace_model(gpt2(), (), {"input_ids": IDS})
    per_block = 24 * B * T * D**2 + 4 * B * T**2 * D
    assert [sum(o.work for o in trace.inside(call)) for call in trace.blocks] == [per_block] * 3
    assert trace.work == 3 * per_block + 2 * B * T * D * VOCABULARY

    assert facts_of(torch.ones(3, 1).expand(3, 100)).nbytes == 3 * 4
    assert facts_of(torch.ones(0, 5)).nbytes == 0
    assert len({freeze([number], facts_of) for number in (1, 1.0, True)}) == 3


def gpt2():
    config = transformers.GPT2Config(
        n_embd=D, n_layer=3, n_head=HEADS, vocab_size=VOCABULARY, n_positions=T
    )
    return transformers.GPT2LMHeadModel(config)


IDS = torch.arange(B * T).view(B, T)


def test_views_move_nothing_and_say_what_they_show():
    def packed(m, x):
        q, k, v = m.qkv(x).split(D, dim=-1)
        return q + k * v.view(B, T, HEADS, -1).flatten(2)

    trace = trace_model(Parts(packed, qkv=nn.Linear(D, 3 * D)), (torch.ones(B, T, D),), {})
    (made,) = only(trace, "linear").outputs
    split = only(trace, "split")
    assert (split.read, split.written) == (0, 0)
    shown = [(view.base, view.offset) for view in split.views]
    assert shown == [(made, 0), (made, D), (made, 2 * D)]
    assert only(trace, "add").read == 2 * 4 * B * T * D


def test_what_follows_from_what():
    net = Parts(
        lambda m, x: m.second(m.first(x) * m.scale), first=nn.Linear(D, D), second=nn.Linear(D, D)
    )
    net.register_buffer("scale", torch.ones(D))

    trace = trace_model(net, (torch.ones(B, D),), {})
    first, second = [o for o in trace.operations if o.name == "linear"]
    times = only(trace, "mul")
    assert first.inputs[1:] == (trace.parameters["first.weight"], trace.parameters["first.bias"])
    assert times.inputs == (first.outputs[0], trace.buffers["scale"])
    assert second.inputs[0] == times.outputs[0]
    assert trace.output == [("0", second.outputs[0])]
    assert (first.module, times.module, second.module) == ("first", "", "second")
    calls = {call.name: call for call in trace.modules}
    assert calls["first"].outputs == first.outputs
    assert trace.inside(calls["second"]) == [second]


def test_inputs_and_buffers_are_computed_with_and_other_values_refused():
    def masked(m, x, mask):
        return x if mask.all() else m.layer(x) * mask.cumsum(0)

    trace = trace_model(
        Parts(masked, layer=nn.Linear(D, D)), (torch.ones(B, D), torch.eye(B)[:, :1]), {}
    )
    assert only(trace, "cumsum").known
    assert not only(trace, "mul").known

    def chooses(m, x):
        y = m.layer(x)
        return y if y.sum() > 0 else -y

    with pytest.raises(ValuesNeededError, match="bool"):
        trace_model(Parts(chooses, layer=nn.Linear(D, D)), (torch.ones(B, D),), {})


class Notes:
    """What a trace did, which a list of the model would not tell: it is as before."""

    def __init__(self):
        self.list = []

    def append(self, item):
        self.list.append(item)


def choosing_block():
    """Return one that reads values, writes into a tensor that has some, and draws."""

    def compute(m, x, mask):
        out = torch.zeros(x.shape)
        chosen = x.sum(-1) > x.sum(-1).min()
        if chosen.any():
            m.drawn.append(torch.rand(()).item())
            out[chosen] += m.linear(x[chosen])
        return out, mask

    return Parts(compute, linear=nn.Linear(D, D), drawn=Notes())


def choosing_model():
    def compute(m, x, mask):
        x = m.first(x)
        for block in m.blocks:
            x, mask = block(x, mask)
            m.kinds.append((type(x), type(mask)))
            m.seen.append(x)
        return 2 * x

    blocks = nn.ModuleList(choosing_block() for _ in range(2))
    return Parts(compute, first=nn.Linear(D, D), blocks=blocks, kinds=Notes(), seen=[])


def test_a_block_that_depends_on_values_gets_some():
    for isolated in (False, True):
        model, x, mask = choosing_model(), torch.ones(B, D), torch.ones(B, 1)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for seed in (0, 1):  # as ranks may have
            torch.manual_seed(seed)
            trace = trace_model(model, (x, mask), {}, isolated=isolated)
            assert torch.initial_seed() == seed
        assert not model.seen
        first, second, *_ = model.blocks[0].drawn.list
        assert first == second
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert model.kinds.list == [(ValuelessTensor, torch.Tensor)] * 4
        for call in trace.blocks:
            (linear,) = [each for each in trace.inside(call) if each.name == "linear"]
            weight = trace.parameters[f"{call.name}.linear.weight"]
            assert weight in linear.inputs
            assert linear.work
            assert not linear.known
            assert call.returned[0].requires_grad
            assert trace.tensors[call.returned[0].number].facts.shape == (B, D)
            assert call.returned[1].argument == 1
        assert trace.blocks[1].given[0] == trace.blocks[0].returned[0].handed
        assert not trace.operations[-1].known


def test_the_mode_of_the_forward_is_chosen_and_undone():
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout()).eval()
    for training in (True, False):
        trace = trace_model(model, (torch.ones(B, D),), {}, training=training)
        options = only(trace, "dropout").kwargs
        assert (options["p"], options["training"]) == (0.5, training)
    assert not any(module.training for module in model.modules())
