"""Families whose attention adds a bias of all heads, or whose linear layers are subclasses."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from divided_steps import check_two_steps
from drivetrain_megatron.tensor.linear import computes_as_linear
from mixture_models import LABELED, WIDTH, WORDS

COMMON = {"vocab_size": WORDS, "pad_token_id": 0, "num_layers": 2, "num_heads": 4}

T5 = {**COMMON, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "dropout_rate": 0.0}

FALCON = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "pad_token_id": 0,
}


def t5():
    config = transformers.T5Config(**T5, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).double().eval()


def falcon():
    return transformers.FalconForCausalLM(transformers.FalconConfig(**FALCON)).double().eval()


@pytest.mark.parametrize(("build", "share"), [(t5, 0.55), (falcon, 0.65)])
@pytest.mark.ranks(2)
def test_most_of_it_is_divided(build, share):
    torch.manual_seed(0)
    assert check_two_steps(build(), LABELED, {"tp": 2}, 1e-6) < share  # the loss is in fp32


class OtherCode(nn.Linear):
    def forward(self, x):
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(()) * self.training


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)


class Detached(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


def test_a_subclass_is_tried():
    for bias in (False, True):
        assert computes_as_linear(OtherCode(3, 4, bias, device="meta"))
        for kind in (Noisy, Scaled, Detached):
            assert not computes_as_linear(kind(3, 4, bias))
