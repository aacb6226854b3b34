"""Computing in fp64 and without dropout."""

import torch
from torch import nn

from drivetrain.verify import Doubles, compute_in_doubles, in_doubles, without_dropout


def norm(x):
    """Compute in fp32 by name, as norms of language models do."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).float())).to(x.dtype)


def test_code_that_asks_for_fp32_gets_fp64_and_no_dropout():
    x = torch.rand(3, 5, dtype=torch.float64)
    right = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    assert not torch.allclose(norm(x), right, rtol=1e-12, atol=0)
    with Doubles():
        assert torch.allclose(norm(x), right, rtol=1e-15, atol=0)
        assert torch.zeros(2, dtype=torch.bfloat16).dtype is torch.float64
        assert torch.zeros(2, dtype=torch.int32).dtype is torch.int32

    x, (ids, flag) = in_doubles((torch.ones(2), [torch.ones(2, dtype=torch.int64), True]))
    assert (x.dtype, ids.dtype, flag) == (torch.float64, torch.int64, True)

    layer = nn.TransformerEncoderLayer(4, 2, dropout=0.3)
    layer.attention_dropout, layer.drop_path, layer.dropped = 0.5, 0.1, 7
    lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.4)
    assert without_dropout(nn.ModuleList([layer, lstm, nn.Dropout(0.0), nn.PReLU()])) == 7
    assert layer.dropout1.p == layer.self_attn.dropout == layer.drop_path == 0
    assert layer.dropped == 7
    assert lstm.dropout == 0


def test_backward_takes_its_inputs_by_name():
    layer = nn.Linear(2, 1, dtype=torch.float64)
    with Doubles():
        layer(torch.ones(1, 2, dtype=torch.float64)).sum().backward(inputs={"weight": layer.weight})
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
    assert layer.bias.grad is None


def test_a_process_computes_in_fp64_from_then_on():
    compute_in_doubles()
    try:
        assert nn.Linear(1, 1).weight.dtype is torch.float64
        assert torch.ones(1, dtype=torch.float32).dtype is torch.float64
    finally:
        Doubles().__exit__(None, None, None)
        torch.set_default_dtype(torch.float32)
