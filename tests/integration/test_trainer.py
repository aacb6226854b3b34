"""transformers.Trainer under each strategy trains as the plain Trainer does on one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from drivetrain.errors import UsageError
from drivetrain.integrations.transformers import (
    StrategyTraining,
    accumulate_alike,
    refuse_other_engines,
    use_drivetrain,
)

SCRIPT = Path(__file__).parent / "scripts" / "trainer.py"
LAUNCH = ("-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2")
STRATEGIES = {
    "ddp": ("--strategy", "ddp"),
    "zero2": ("--strategy", "zero2"),
    "zero3": ("--strategy", "zero3"),
    "fsdp": ("--strategy", "fsdp"),
    "tp": ("--strategy", "megatron", "--set", "strategy.tp=2"),
    "pp": ("--strategy", "megatron", "--set", "strategy.pp=2"),
}
ONE_BATCH = ("tp", "pp")
"""Strategies whose ranks share a batch."""


def train(folder: Path, *options: str, strategy: str = "") -> dict:
    """Run the script and return what it recorded, with the exported weights."""
    launcher = (*LAUNCH, *STRATEGIES[strategy]) if strategy else ()
    ranks = "2" if strategy and strategy not in ONE_BATCH else "1"
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(folder), "--ranks", ranks, *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "record.json").read_text()) | {
        "weights": load_file(folder / "export" / "model.safetensors")
    }


def alike(found: dict, expected: dict, first: int = 0) -> None:
    """Compare two records from a step on, to the rounding of fp32."""
    for name in ("losses", "norms", "rates"):
        assert len(found[name]) == len(expected[name]) == 20
        assert found[name][first:] == pytest.approx(expected[name][first:], rel=2e-5), name
    assert found["best"] == pytest.approx(expected["best"], rel=5e-2)
    # The best model was loaded again, whole, and the ranks evaluate it as they did before.
    assert found["evaluated"] == pytest.approx(found["best"], rel=1e-6)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-3, atol=2e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The records of the Trainer of transformers alone, by micro-batches per step."""
    known: dict[str, dict] = {}

    def record(accumulation: str) -> dict:
        if accumulation not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[accumulation] = train(folder, "--plain", "--accumulation", accumulation)
        return known[accumulation]

    return record


@pytest.mark.parametrize(
    ("strategy", "accumulation"),
    [
        pytest.param(
            strategy,
            accumulation,
            marks=[] if (strategy, accumulation) == ("zero3", "2") else pytest.mark.exhaustive,
        )
        for strategy in STRATEGIES
        for accumulation in ("1", "2")
    ],
)
def test_losses_equal_those_of_one_process(strategy, accumulation, plain, tmp_path):
    found = train(tmp_path, "--accumulation", accumulation, strategy=strategy)
    alike(found, plain(accumulation))


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["zero3", "fsdp", "tp", "pp"])
def test_a_run_goes_on_under_another_strategy(after, plain, tmp_path):
    train(tmp_path / "before", strategy="zero2")
    checkpoint = str(tmp_path / "before" / "checkpoint-10")
    alike(train(tmp_path / "after", "--resume", checkpoint, strategy=after), plain("1"), first=10)


# --- training arguments and classes that have no meaning here ---


def arguments(**changed: object) -> SimpleNamespace:
    usual = {
        "deepspeed": None,
        "fsdp_plugin_args": None,
        "parallelism_config": None,
        "torch_compile": False,
        "n_gpu": 0,
        "gradient_accumulation_steps": 1,
        "accelerator_config": SimpleNamespace(gradient_accumulation_kwargs=None),
    }
    return SimpleNamespace(**usual | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"deepspeed": "ds.json"}, "no deepspeed in the training arguments, found 'ds.json'"),
        ({"fsdp_plugin_args": {"fsdp_version": 2}}, "no fsdp_config in the training arguments"),
        ({"parallelism_config": "tp 2"}, "no parallelism_config in the training arguments"),
        ({"torch_compile": True}, r"pass Trainer\(model=torch.compile\(model\)\)"),
        ({"n_gpu": 4}, "expected one GPU for each process, found 4"),
    ],
)
def test_other_engines_are_refused_in_one_line(changed, message):
    with pytest.raises(UsageError, match=message):
        refuse_other_engines(arguments(**changed), torch.nn.Linear(1, 1))


def test_a_model_that_is_divided_already_is_refused():
    with pytest.raises(UsageError, match="divided over 2 ranks by from_pretrained"):
        refuse_other_engines(arguments(), SimpleNamespace(tp_size=2))


def test_one_number_of_micro_batches():
    accelerator = SimpleNamespace(accumulation=4)
    with pytest.raises(UsageError, match=r"one number of micro-batches per step, found \[2, 4\]"):
        accumulate_alike(arguments(gradient_accumulation_steps=2), accelerator)


def test_a_trainer_with_an_accelerator_of_its_own_is_refused():
    class Own(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            pass

    with pytest.raises(UsageError, match="found Own, which makes an Accelerator of its own"):
        use_drivetrain(Own)


def test_subclasses_train_under_strategies_too():
    class Sub(transformers.Seq2SeqTrainer):
        pass

    kind = use_drivetrain(Sub)
    assert issubclass(kind, StrategyTraining)
    assert issubclass(kind, Sub)
    assert kind.__name__ == "Sub"
