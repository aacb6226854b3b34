"""Trainers of transformers and TRL train under each strategy as they do plain, on one process."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers
from transformers import TrainingArguments

import trainers
from drivetrain.errors import CheckpointError, ConfigError, UsageError
from drivetrain.integrations.transformers import (
    StrategyTraining,
    accumulation_of,
    engine_of,
    loader_options,
    refuse_other_batches,
    refuse_other_engines,
    score_by_modules,
    scores_of,
    use_drivetrain,
)

SCRIPT = Path(__file__).parent / "scripts" / "trainer.py"
ONE_BATCH = ("tp", "pp")
"""Strategies whose ranks share a batch."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, about themselves
needs_trl = pytest.mark.skipif(
    find_spec("trl") is None, reason="TRL is not installed; pip install drivetrain[trl]"
)


def launched(monkeypatch, folder: Path, strategy: str) -> int:
    """Let this process find a launch configuration; return how many ranks have their own batch."""
    trainers.launched(monkeypatch, folder, strategy)
    monkeypatch.setenv("CI", "1")  # TRL reports no use
    monkeypatch.setenv("MASTER_PORT", "29500")  # which accelerate sets where it is missing
    return 1 if strategy in ONE_BATCH else 2


def alike(found: dict, expected: dict, first: int = 0, other_batches: bool = False) -> None:
    """Compare two records from a step on, to the rounding of fp32.

    ``other_batches`` says that the best model was found with other batches: a Trainer's evaluation
    is a mean of batches' means.
    """
    for name in expected.keys() - {"weights", "best", "evaluated"}:
        assert len(found[name]) == len(expected[name]) == trainers.STEPS, name
        close = pytest.approx(expected[name][first:], rel=2e-5, abs=2e-6)
        assert found[name][first:] == close, name
    if "evaluated" in expected:
        assert found["best"] == pytest.approx(expected["best"], rel=5e-2)
        # The best model was loaded again, whole, and the ranks evaluate it as they did before.
        rounding = 5e-2 if other_batches else 1e-6
        assert found["evaluated"] == pytest.approx(found["best"], rel=rounding)
    for name, weight in found.get("weights", {}).items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-3, atol=2e-4)
    assert found.get("weights", expected["weights"]).keys() == expected["weights"].keys()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The record of a training on one process without a strategy, made once."""

    @cache
    def record(name: str, accumulation: int = 1) -> dict:
        folder = tmp_path_factory.mktemp("plain")
        return trainers.train(name, lambda kind: kind, folder, 1, accumulation=accumulation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")
        yield record


@pytest.fixture
def expected(plain, request):
    """The record of the training that a test's parameters name; made before ranks are there."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    return plain(parameters.get("training", "causal"), parameters.get("accumulation", 1))


def test_scores_are_computed_by_modules_where_ranks_share_them(monkeypatch):
    """A head of which a rank has a part is called, not multiplied by its weight."""
    changed = []
    monkeypatch.setattr("drivetrain.integrations.transformers.score_by_modules", changed.append)

    class Base:
        def __init__(self, ranks, stages=1):
            mesh = {"pp": SimpleNamespace(size=stages)}
            self.accelerator = SimpleNamespace(cell_size=ranks, mesh=mesh)
            self.args = SimpleNamespace(predict_with_generate=True)
            self.model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
            self.save_model = print

        def floating_point_ops(self, inputs):
            return 24

    trainer = type("Trained", (StrategyTraining, Base), {})
    for ranks in (1, 2, 4):
        assert trainer(ranks).floating_point_ops(None) == 24 / ranks
    with pytest.raises(UsageError, match="expected predict_with_generate=False under pp"):
        trainer(2, stages=2)
    assert len(changed) == 2


DEFAULT = {("causal", "zero3", 2), ("causal", "pp", 1), ("causal", "fsdp", 1), ("sft", "pp", 2)}
DEFAULT |= {("dpo", "zero2", 1), ("dpo", "tp", 1)}
"""Combinations of the default run."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("training", "strategy", "accumulation"),
    [
        pytest.param(
            *case,
            marks=[needs_trl] * (case[0] != "causal")
            + [pytest.mark.exhaustive] * (case not in DEFAULT),
        )
        for case in product(trainers.TRAININGS, trainers.STRATEGIES, (1, 2))
    ],
)
def test_losses_equal_those_of_one_process(
    training, strategy, accumulation, expected, tmp_path, monkeypatch
):
    ranks = launched(monkeypatch, tmp_path, strategy)
    found = trainers.train(training, use_drivetrain, tmp_path, ranks, accumulation=accumulation)
    alike(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["zero2", "tp"])
def test_means_are_those_of_each_sample_once(strategy, tmp_path, monkeypatch):
    """11 samples in batches of 8: some came twice; losses that count no items were doubled."""
    ranks = launched(monkeypatch, tmp_path, strategy)
    torch.manual_seed(0)
    words = torch.randint(2, 16, (11, 5))
    labels = words.masked_fill(torch.arange(5) > torch.arange(11)[:, None] % 4 + 1, -100)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    t5 = transformers.T5Config(vocab_size=16, **sizes)
    for model, options, data in (
        (transformers.T5ForConditionalGeneration(t5), {"predict_with_generate": True}, words),
        (trainers.tiny_llama(), {}, labels),
    ):
        with torch.no_grad():
            rows = zip(words.split(8), data.split(8), strict=True)
            means = [float(model.eval()(input_ids=x, labels=y).loss) for x, y in rows]
        samples = [{"input_ids": x, "labels": y} for x, y in zip(words, data, strict=True)]
        trainer = use_drivetrain(transformers.Seq2SeqTrainer)(
            model,
            trainers.arguments(
                transformers.Seq2SeqTrainingArguments,
                tmp_path,
                ranks,
                max_steps=1,
                per_device_eval_batch_size=8 // ranks,
                **options,
            ),
            train_dataset=samples,
            eval_dataset=samples,
            compute_metrics=lambda found: {"texts": len(found.predictions)},
        )
        found = trainer.evaluate()
        assert found["eval_texts"] == len(words)
        assert found["eval_loss"] == pytest.approx((8 * means[0] + 3 * means[1]) / 11, rel=1e-5)
        assert trainer.train().training_loss == pytest.approx(means[0], rel=1e-5)
        trainer.accelerator.free_memory()


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
@pytest.mark.parametrize("after", ["ddp", "zero3", "fsdp", "tp", "pp"])
def test_a_run_goes_on_under_another_strategy(after, expected, tmp_path, monkeypatch):
    ranks = launched(monkeypatch, tmp_path, "zero2")
    trainers.train("causal", use_drivetrain, tmp_path / "before", ranks)
    ranks = launched(monkeypatch, tmp_path, after)
    resume = str(tmp_path / "before" / "checkpoint-10")
    found = trainers.train("causal", use_drivetrain, tmp_path / "after", ranks, resume=resume)
    alike(found, expected, first=10, other_batches=after in ONE_BATCH)


@pytest.mark.exhaustive
def test_a_launched_script_trains(plain, tmp_path):
    options = ("--cpu", "--nproc-per-node", "2", "--strategy", "zero3")
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain_launch", "launch", *options, str(SCRIPT), str(tmp_path)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(trainers.__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(plain("causal")["losses"], rel=2e-5)


# --- training arguments that choose an engine ---


def usual(**changed: object) -> SimpleNamespace:
    given = dict.fromkeys(("deepspeed", "fsdp_plugin_args", "parallelism_config"))
    given |= dict.fromkeys(("torch_compile_backend", "torch_compile_mode"))
    given |= {"torch_compile": False, "n_gpu": 0, "gradient_accumulation_steps": 1}
    given["accelerator_config"] = SimpleNamespace(gradient_accumulation_kwargs=None)
    return SimpleNamespace(**given | changed)


def test_a_deepspeed_configuration_chooses_the_strategy(tmp_path):
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    strategy = {"name": "zero3", "offload": {"optimizer": "cpu"}}
    for given in (config, str(path)):
        assert engine_of(usual(deepspeed=given)) == {"strategy": strategy, "config": None}


def test_fsdp_arguments_and_a_parallelism_config_choose_the_strategy(tmp_path):
    config = {"reshard_after_forward": False, "activation_checkpointing": True}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=config)
    found = engine_of(arguments)
    assert found["strategy"] == {"name": "fsdp", "reshard_after_forward": False}
    assert found["config"] == {"recompute": {"mode": "full"}}
    sizes = importlib.import_module("accelerate").ParallelismConfig(tp_size=2)
    assert engine_of(usual(parallelism_config=sizes))["strategy"]["tp"] == 2
    assert engine_of(usual()) == {}  # the launch configuration chooses


@pytest.mark.ranks(2)
def test_a_trainer_trains_with_the_engine_of_its_arguments(expected, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the arguments set it
    seen = []

    class Seeing(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            seen.append(self.accelerator.config.strategy)
            return super().training_step(*args, **kwargs)

    changed = {"fsdp": True, "save_strategy": "no", "load_best_model_at_end": False}
    found = trainers.train(
        "causal", lambda _: use_drivetrain(Seeing), tmp_path, 2, eval_strategy="no", **changed
    )
    assert set(seen) == {"fsdp"}
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-5)


@pytest.mark.ranks(2)
def test_a_trainer_that_saves_on_rank_0_alone_and_asks_accelerates_state(
    expected, tmp_path, monkeypatch
):
    """As transformers up to 5.8, and trl's GRPO."""
    ranks = launched(monkeypatch, tmp_path, "fsdp")

    class Older(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            state = importlib.import_module("accelerate.state").AcceleratorState()
            assert (state.num_processes, state.mixed_precision) == (2, "no")

        def save_model(self, output_dir=None, _internal_call=False):
            if self.args.should_save:
                self._save(output_dir)

    changed = {"save_strategy": "no", "load_best_model_at_end": False, "eval_strategy": "no"}
    found = trainers.train("causal", lambda _: use_drivetrain(Older), tmp_path, ranks, **changed)
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-5)
    shapes = {name: weight.shape for name, weight in expected["weights"].items()}
    if "weights" in found:  # on rank 0; those of the last step, not of the best
        assert {name: weight.shape for name, weight in found["weights"].items()} == shapes


def test_arguments_without_counterpart_are_refused_in_one_line():
    zero3, ignored = {"zero_optimization": {"stage": 3}}, {"ignored_modules": ["a"]}
    for changed, kind, message in (
        ({"deepspeed": zero3, "fsdp_plugin_args": {"a": 1}}, UsageError, "object of one engine"),
        ({"deepspeed": {"zero_optimisation": {"stage": 1}}}, ConfigError, "unknown key"),
        ({"fsdp_plugin_args": ignored}, UsageError, "expected no ignored_modules"),
    ):
        with pytest.raises(kind, match=message) as raised:
            engine_of(usual(**changed))
        assert "\n" not in str(raised.value), changed


def test_torch_compile_compiles_the_blocks():
    given = usual(torch_compile=True, torch_compile_backend="inductor")
    refuse_other_engines(given, None)
    assert engine_of(given) == {"config": {"compile": "blocks"}}


# --- training arguments, models and classes that have no meaning here ---


def test_other_engines_are_refused_in_one_line():
    for changed, message in (
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "found 'eager' and None"),
        ({"n_gpu": 4}, "expected one GPU for each process, found 4"),
        ({"sync_ref_model": True}, "expected sync_ref_model=False, found True"),
    ):
        with pytest.raises(UsageError, match=message):
            refuse_other_engines(usual(**changed), torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="divided over 2 ranks by from_pretrained"):
        refuse_other_engines(usual(), SimpleNamespace(tp_size=2))
    model = torch.nn.Linear(1, 1)
    model.weight.ds_id = 0
    with pytest.raises(UsageError, match="deepspeed.zero.Init has divided"):
        refuse_other_engines(usual(), model)


def test_batches_that_would_be_cut_or_become_others_are_refused():
    def run(ranks, option):
        config = SimpleNamespace(run=SimpleNamespace(micro_batch=option))
        return SimpleNamespace(num_processes=ranks, config=config)

    usual = dict.fromkeys(("auto_find_batch_size", "bf16_full_eval", "fp16_full_eval"), False)
    for changed, message in (
        ({"auto_find_batch_size": True}, "expected auto_find_batch_size=False on several ranks"),
        ({"train_sampling_strategy": "batch_rebalance"}, "expected train_sampling_strategy='group"),
        ({"bf16_full_eval": True}, "expected bf16_full_eval=False and fp16_full_eval=False"),
    ):
        args = SimpleNamespace(**usual | changed)
        refuse_other_batches(args, run(1, "whole"))
        with pytest.raises(UsageError, match=message):
            refuse_other_batches(args, run(2, "whole"))
    with pytest.raises(UsageError, match="expected whole under a Trainer, found auto"):
        refuse_other_batches(SimpleNamespace(**usual), run(1, "auto"))


def test_one_number_of_micro_batches():
    assert accumulation_of(usual(), 4) == (4, {})
    more = {"num_steps": 3, "sync_each_batch": True}
    given = usual(accelerator_config=SimpleNamespace(gradient_accumulation_kwargs=more))
    assert accumulation_of(given, 1) == (3, {"sync_each_batch": True})
    with pytest.raises(UsageError, match=r"one number of micro-batches per step, found \[2, 4\]"):
        accumulation_of(usual(gradient_accumulation_steps=2), 4)


def test_a_seed_of_the_data_counts_even_if_it_is_zero():
    config = importlib.import_module("transformers.trainer_pt_utils").AcceleratorConfig()
    for given, expected in ((0, 0), (None, 3)):
        options = loader_options(usual(accelerator_config=config, seed=3, data_seed=given))
        assert options.data_seed == expected
    given = {"split_batches": True, "dispatch_batches": True, "even_batches": False}
    given |= {"use_seedable_sampler": False, "non_blocking": True}
    options = loader_options(usual(accelerator_config=type(config)(**given), data_seed=3))
    assert given.items() <= asdict(options).items()


def test_scores_of_tokens_are_those_of_their_probabilities():
    logits = torch.tensor([[[1.0, 3.0, 0.5], [2.0, 0.0, 1.0]]])
    found = scores_of(logits, torch.tensor([[1, -100]]))
    chances = logits[0, 0].softmax(-1)
    expected = {
        "log_probs": chances[1].log(),
        "entropy": -(chances * chances.log()).sum(),
        "log_sum_sq_probs": chances.square().sum().log(),
        "mean_logits": logits[0, 0].mean(),
        "is_top1": torch.tensor(True),
        "label_mask": torch.tensor(True),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name][0, 0], value)
        assert not found[name][0, 1], name

    def of_trl(temperature):
        def forward(model, words, fused_lm_head=False, labels=None, shift_labels=None):
            assert not (fused_lm_head and temperature)
            return SimpleNamespace(logits=logits, aux_loss=3.0)

        return forward

    model = torch.nn.Linear(1, 1)
    model.forward = MethodType(of_trl(2.0), model)
    score_by_modules(model)
    for labels in ({"labels": torch.tensor([[0, 1]])}, {"shift_labels": torch.tensor([[1, -100]])}):
        scores = model(None, fused_lm_head=True, num_items_in_batch=5, **labels)
        expected = (logits[0, 0] / 2).log_softmax(-1)[1]
        torch.testing.assert_close(scores.log_probs[0, 0], expected)
        assert scores.log_probs.shape == (1, 1 + ("shift_labels" in labels))
        assert scores.aux_loss == 3.0


def test_a_trainer_with_an_accelerator_of_its_own_is_refused():
    class Own(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            pass

    with pytest.raises(UsageError, match="found Own, which makes an Accelerator of its own"):
        use_drivetrain(Own)


def test_checkpoints_of_a_plain_trainer_are_refused(tmp_path):
    short = {"max_steps": 2, "save_steps": 2, "eval_steps": 2}
    trainers.train("causal", lambda kind: kind, tmp_path, 1, **short)
    resume = str(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match="found optimizer.pt of another Trainer"):
        trainers.train("causal", use_drivetrain, tmp_path / "after", 1, resume=resume, **short)


def test_subclasses_train_under_strategies_too():
    sub = type("Sub", (transformers.Seq2SeqTrainer,), {})
    kind = use_drivetrain(sub)
    assert issubclass(kind, StrategyTraining)
    assert issubclass(kind, sub)
    assert kind.__name__ == "Sub"
