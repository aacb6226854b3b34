"""Ranks whose plans differ: an error on each of them, or one plan for all."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases import case
from drivetrain import Accelerator
from drivetrain.errors import ConfigError, RankMismatchError
from drivetrain.model.modules import named_parameters
from drivetrain.testing.conformance.suite import everyone
from drivetrain_launch.cli import run
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline import cut
from drivetrain_megatron.recording.calls import example_inputs
from stacks import Residual

WIDTH = 8


class Failing(Residual):
    """Fails on rank 1, wherever it is tried: in evaluation mode, or in any."""

    def __init__(self, modes):
        super().__init__(WIDTH)
        self.modes = modes

    def forward(self, x):
        if dist.get_rank() == 1 and self.training in self.modes:
            raise RuntimeError("no memory left")
        return super().forward(x)


def chain(make):
    model = nn.Sequential(*(make() for _ in range(4)))
    model.example_inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.ranks(2)
def test_a_plan_that_one_rank_lacks_is_an_error_on_all():
    for cell, modes in itertools.product(({"tp": 2}, {"pp": 2}), ((False,), (False, True))):
        model = chain(lambda modes=modes: Failing(modes))
        accelerator = Accelerator(strategy={"name": "megatron", **cell}, cpu=True)
        with case(cell, modes):
            if cell == {"pp": 2} and modes == (False,):
                # Stages are found by a trace at training, without any trial.
                accelerator.prepare(model)
            else:
                match = r"rank 0 has .*rank 1 .*no memory left"
                with pytest.raises(RankMismatchError, match=match):
                    accelerator.prepare(model)


@pytest.mark.ranks(4)
def test_replicas_cut_alike_where_ranks_measure_other_times(monkeypatch):
    rank = dist.get_rank()
    seconds = [5.0 if block == rank else 1.0 for block in range(4)]
    monkeypatch.setattr(cut, "profile", lambda model, trace: seconds)
    torch.manual_seed(0)
    model = chain(lambda: Residual(WIDTH)).double()
    model.example_inputs = model.example_inputs.double()
    whole = dict(model.named_parameters())
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "micro_batches": 2, "cut": "profile"}, cpu=True
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    names = everyone(list(named_parameters(model)))
    held = [{name.split(".")[0] for name in mine} for mine in names]
    stages = [set("0"), set("123")]  # as rank 0 has measured
    assert sorted(held, key=len) == sorted(stages * 2, key=len)
    assert accelerator.get_state_dict(model).keys() == whole.keys()


# --- dry run of the command: what a cell sends besides is said not to be counted ---


def preview(capsys, ranks, **options):
    settings = [f"strategy.{name}={value}" for name, value in options.items()]
    chosen = [text for setting in settings for text in ("--set", setting)]
    arguments = ["--cpu", "--nproc-per-node", str(ranks), "--strategy", "megatron", *chosen]
    assert run(["launch", *arguments, "--dry-run", "no-such-script.py"]) == 0
    rows = (line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
    found = {row[0]: row[-1].strip() for row in rows}
    return {name: value for name, value in found.items() if name.startswith("sent")}


def test_what_a_dry_run_counts(capsys):
    """All where a rank is a cell; gradients between cells, but no activations of any batch."""
    assert preview(capsys, 4, tp=2, pp=2) == {
        "sent per step: activations over tp": "not counted: depends on the batch",
        "sent per step: activations over pp": "not counted: depends on the batch",
    }
    rows = preview(capsys, 4, tp=2)
    total = rows.pop("sent per step: total of what is counted")
    assert rows.pop("sent per step: activations over tp").startswith("not counted")
    assert list(rows.values()) == [total]
    assert float(total.removesuffix(" GiB")) > 1
    for ranks in (1, 2):
        assert "sent per step: total" in preview(capsys, ranks)


def test_example_inputs_without_values_stand_for_others_of_their_shape():
    """As where ``drivetrain estimate`` makes a model, and with it its inputs, without memory."""
    with torch.device("meta"):
        model = nn.Sequential(*(Residual(WIDTH) for _ in range(4)))
        model.example_inputs = torch.randn(4, WIDTH)
    (given,) = example_inputs(model).args
    assert given.shape == (4, WIDTH)
    assert not given.is_meta


# --- options of the strategy that contradict each other are errors before anything starts ---


CONTRADICTIONS = [
    ({"tp": 3}, "multiple of tp x pp = 3 x 1 = 3, found 4"),
    ({"tp": 2, "pp": 4}, "multiple of tp x pp = 2 x 4 = 8, found 4"),
    ({"order": "tp,dp"}, "each once, found 'tp,dp'"),
    ({"order": "tp,dp,dp"}, "each once"),
    ({"pp": 2, "chunks": 2}, "schedule: interleaved with chunks: 2, found 1f1b"),
    ({"pp": 2, "schedule": "interleaved"}, "pp: 2 and chunks: 1"),
    ({"schedule": "interleaved", "chunks": 2}, "pp: 1 and chunks: 2"),
    ({"pp": 2, "sequence_parallel": True}, "tp above 1"),
    ({"tp": 2, "trace_dir": "traces"}, "pp above 1"),
]


def test_contradictions():
    for options, message in CONTRADICTIONS:
        with pytest.raises(ConfigError, match=message):
            MegatronConfig(**options).sizes(4)


def test_axes_and_schedules():
    assert list(MegatronConfig(tp=2, pp=2).sizes(8).items()) == [("tp", 2), ("dp", 2), ("pp", 2)]
    found = MegatronConfig(tp=2, order="pp, tp,dp").sizes(4)
    assert list(found.items()) == [("pp", 1), ("tp", 2), ("dp", 2)]

    assert MegatronConfig(pp=2, schedule="interleaved", chunks=2).sizes(2)["pp"] == 2
