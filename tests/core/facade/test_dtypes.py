"""Dtypes through the facade: what keeps its own, what prepare() says, what is never ignored."""

import copy
import logging

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, AutocastKwargs
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_ddp.strategy import Ddp


def said(caplog, model, **options):
    with caplog.at_level(logging.INFO, "drivetrain"):
        Accelerator(cpu=True, **options).prepare(model)
    return [r.getMessage() for r in caplog.records if "precision of" in r.getMessage()]


def test_prepare_says_the_dtypes(caplog):
    low, off = {"mixed_precision": "bf16"}, [AutocastKwargs(enabled=False)]
    reduced = {"dtypes": {"reduce": "bf16"}}
    for options, line in (
        ({}, "compute fp32, reduce fp32, master fp32"),
        (low, "compute bf16, reduce fp32, master fp32"),
        ({"mixed_precision": "fp16"}, "compute fp16, reduce fp32, master fp32, loss scale 65536"),
        ({**low, "config": reduced}, "compute bf16, reduce bf16, master fp32"),
        ({**low, "kwargs_handlers": off}, "compute fp32, reduce fp32, master fp32"),
    ):
        caplog.clear()
        lines = said(caplog, nn.Linear(1000, 2), **options)
        assert lines == [f"precision of Linear: param fp32 (2,002 in 2), {line}"]
    for handlers, given, dtype in (
        ([], None, torch.bfloat16),
        (off, None, torch.float32),
        ([], off[0], torch.float32),
    ):
        accelerator, x = Accelerator(cpu=True, kwargs_handlers=handlers, **low), torch.ones(2, 2)
        with accelerator.autocast(given):
            assert (x @ x).dtype is dtype
    model = nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.Linear(2, 1), nn.Linear(1, 1))
    model[2].half().requires_grad_(False)
    caplog.clear()
    assert said(caplog, model) == [
        "precision of Sequential: param bf16 (12 in 2) and fp32 (3 in 2) and fp16 (2 in 2), "
        "compute bf16 and fp32 and fp16, reduce bf16 and fp32, master bf16 and fp32"
    ]


class Careless(Ddp):
    """Does nothing about dtypes and says nothing."""

    default = False

    @classmethod
    def check_options(cls, config, precision):
        """Refuse nothing."""

    def __init__(self, config, run):
        self.run = run
        plain = copy.copy(run)
        object.__setattr__(plain, "precision", type(run.precision)())
        super().__init__(config, plain)


class Coarse(Ddp):
    """Converts what should stay."""

    default = False

    def prepare(self, model, optimizers):
        return super().prepare(model.bfloat16(), optimizers)


def test_strategy_that_ignores_the_policy_is_caught(monkeypatch):
    for kind, options, message in (
        (Ddp, {"param": "bf16"}, r"ddp: expected dtypes\.param as"),
        (Careless, {"param": "bf16"}, "expected bf16 for 0.weight, as dtypes.p"),
        (
            Careless,
            {"master": "fp32"},
            "expected fp32 for 1.weight, as dtypes.master says, found bf16; the strategy does not",
        ),
        (Coarse, {}, "expected fp32 for 0.weight, as dtypes.param says, found bf16"),
    ):
        monkeypatch.setattr(type(strategies()), "load", lambda *_, kind=kind: kind)
        accelerator = Accelerator(
            cpu=True, strategy="ddp", mixed_precision="bf16", config={"dtypes": options}
        )
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=message):
            accelerator.prepare(model, optimizer)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_norm_meets_its_wider_weight_in_one_dtype_as_the_fused_kernel_wants(monkeypatch):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 4, bias=False))
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", strategy="zero1", config={"dtypes": {"param": "bf16"}}
    )
    model, x = accelerator.prepare(copy.deepcopy(plain)), torch.randn(4, 8)
    for matrix in (plain[0], plain[2]):
        matrix.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x).float()
    met, norm = [], nn.functional.rms_norm

    def noted(x, shape, weight, eps):
        met.append((x.dtype, weight.dtype))
        return norm(x, shape, weight, eps)

    monkeypatch.setattr(nn.functional, "rms_norm", noted)
    assert torch.equal(model(x), expected)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x.bfloat16())
    assert met == [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
