"""Dtypes through the facade: what keeps its own, what prepare() says, what is never ignored."""

import copy
import logging

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, AutocastKwargs, GradScalerKwargs
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_ddp import Ddp


class Mixed(nn.Module):
    """Norms, a frozen int8 table, fp32 rotary angles, an integer buffer, and what forward saw."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.batch = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)
        self.table = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("angles", torch.linspace(0, 1, 6) * 1.001)
        self.register_buffer("positions", torch.arange(5), persistent=False)
        self.seen = []

    def forward(self, x):
        hidden = self.first(x)
        out = self.last(self.batch(self.norm(hidden)) * self.angles.cos())
        self.seen = [hidden.dtype, self.norm(hidden.float()).dtype, out.dtype]
        return out


def dtypes(model):
    return {
        name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("precision", "low"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.ranks(2)
def test_parameters_and_buffers_keep_their_dtype(precision, low):
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    model = Mixed()
    before, angles = dtypes(model), model.angles.clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        step(accelerator, model, optimizer)
    assert not accelerator.optimizer_step_was_skipped
    assert dtypes(model) == before
    assert before["batch.num_batches_tracked"] is before["positions"] is torch.int64
    assert torch.equal(model.angles, angles)
    assert model.batch.num_batches_tracked == 2
    assert model.seen == [low, torch.float32, low]
    assert {s.dtype for s in optimizer.state[model.last.weight].values()} == {torch.float32}
    accelerator.end_training()


def said(caplog, model, **options):
    with caplog.at_level(logging.INFO, "drivetrain"):
        Accelerator(cpu=True, **options).prepare(model)
    return [r.getMessage() for r in caplog.records if "precision of" in r.getMessage()]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "compute fp32, reduce fp32, master fp32"),
        ({"mixed_precision": "bf16"}, "compute bf16, reduce fp32, master fp32"),
        ({"mixed_precision": "fp16"}, "compute fp16, reduce fp32, master fp32, loss scale 65536"),
        (
            {"mixed_precision": "bf16", "config": {"dtypes": {"reduce": "bf16"}}},
            "compute bf16, reduce bf16, master fp32",
        ),
        (
            {"mixed_precision": "bf16", "kwargs_handlers": [AutocastKwargs(enabled=False)]},
            "compute fp32, reduce fp32, master fp32",
        ),
    ],
)
def test_prepare_says_the_dtypes(caplog, options, line):
    lines = said(caplog, nn.Linear(1000, 2), **options)
    assert lines == [f"precision of Linear: param fp32 (2,002 in 2), {line}"]


def test_prepare_counts_parameters_by_dtype(caplog):
    model = nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.Linear(2, 1), nn.Linear(1, 1))
    model[2].half().requires_grad_(False)
    assert said(caplog, model) == [
        "precision of Sequential: param bf16 (12 in 2) and fp32 (3 in 2) and fp16 (2 in 2), "
        "compute bf16 and fp32 and fp16, reduce bf16 and fp32, master bf16 and fp32"
    ]


def test_without_logging_the_line_goes_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    Accelerator(cpu=True).prepare(nn.Linear(1, 1))
    assert "precision of Linear: param fp32 (2 in 2)" in capsys.readouterr().err


@pytest.mark.parametrize("dtypes", [{"param": "bf16"}, {"master": "fp32"}])
def test_strategy_without_masters_refuses_them(dtypes):
    accelerator = Accelerator(
        cpu=True, strategy="ddp", mixed_precision="bf16", config={"dtypes": dtypes}
    )
    with pytest.raises(ConfigError, match=rf"ddp: expected dtypes\.{next(iter(dtypes))} as"):
        accelerator.prepare(nn.Linear(1, 1))


def test_combination_that_does_not_fit_is_refused_at_once():
    with pytest.raises(ConfigError, match="param: bf16 needs precision: bf16"):
        Accelerator(cpu=True, config={"dtypes": {"param": "bf16"}})


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


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            Careless,
            {"config": {"dtypes": {"param": "bf16"}}},
            "expected bf16 for 0.weight, as dtypes.p",
        ),
        (
            Careless,
            {"config": {"dtypes": {"master": "fp32"}}},
            "expected fp32 for 1.weight, as dtypes.master says, found bf16; the strategy does not",
        ),
        (Coarse, {}, "expected fp32 for 0.weight, as dtypes.param says, found bf16"),
    ],
)
def test_strategy_that_ignores_the_policy_is_caught(monkeypatch, kind, options, message):
    monkeypatch.setattr(type(strategies()), "load", lambda *_: kind)
    accelerator = Accelerator(cpu=True, strategy="ddp", mixed_precision="bf16", **options)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        accelerator.prepare(model, optimizer)
