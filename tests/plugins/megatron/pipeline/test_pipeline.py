"""Pipeline parallelism of whole models: losses, gradients and steps equal those of one process."""

import copy
import gc
import importlib.util
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.errors import CollectiveError, ConfigError, UsageError
from drivetrain.testing.conformance.suite import cut_connections, everyone
from graphs import backend, graphs
from huggingface_models import (
    ARCHITECTURES,
    WithLoss,
    gpt2,
    token_batch,
    word_loss,
)
from stacks import Parts, Residual, Stack
from staged_twins import EXACT, Twins

pytestmark = pytest.mark.ranks(4)

ROOT = Path(__file__).parents[4]


def example_gpt(layers):
    """Return the GPT of the example as it stands."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples/train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(48, layers, 6, 32).double()


def one_matrix(layers):
    """Return a GPT whose blocks share a matrix, so that every stage uses it."""
    model = ARCHITECTURES["gpt2"](layers)
    first, *others = model.transformer.h
    for block in others:
        block.mlp.c_fc.weight = first.mlp.c_fc.weight
    return model


MODELS = {**ARCHITECTURES, "example": example_gpt}


def build(name, layers=4):
    torch.manual_seed(0)
    return {**MODELS, "one matrix": one_matrix}[name](layers)


def loss_outside(model, ids):
    return word_loss(model(ids), ids)


def loss_inside(model, ids):
    return model(ids)["loss"]


def check(name, loss_of, *, accumulation=1, rows=4, steps=2, evaluates=False, **options):
    model = build(name)
    if loss_of is loss_inside:
        model = WithLoss(model)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    both = Twins(model, make=sgd, accumulation=accumulation, **options)

    def evaluate():
        with torch.no_grad():
            ids = token_batch(99, rows=rows)
            torch.testing.assert_close(loss_of(both.model, ids), loss_of(both.twin, ids), **EXACT)

    for step in range(steps * accumulation):
        if evaluates:
            evaluate()
        ids = token_batch(step, rows=rows)
        with both.accelerator.accumulate(both.model):
            both.backward(*(loss_of(each, ids) for each in (both.model, both.twin)))
            if both.accelerator.sync_gradients:
                norm = both.accelerator.clip_grad_norm_(both.model.parameters(), 0.5)
                theirs = nn.utils.clip_grad_norm_(both.twin.parameters(), 0.5)
                torch.testing.assert_close(norm, theirs, **EXACT)
                both.step()
    with both.accelerator.gathered(both.model):
        found, expected = (dict(each.named_parameters()) for each in (both.model, both.twin))
        torch.testing.assert_close(found, expected, **EXACT)
    both.eval()
    evaluate()


EACH = pytest.mark.parametrize("name", list(MODELS))
TWO_BACKWARDS = pytest.param(
    loss_inside, {"steps": 1, "schedule": "zb-h1"}, marks=pytest.mark.exhaustive
)
LOSS = pytest.mark.parametrize("loss_of", [loss_outside, loss_inside])


@EACH
@LOSS
@pytest.mark.ranks(2)
def test_two_stages(name, loss_of):
    check(name, loss_of, pp=2, micro_batches=2)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.exhaustive)])
@pytest.mark.ranks(2)
def test_window(name):
    """An evaluation may come between its micro-batches: a stage has put off their backwards."""
    check(name, loss_outside, pp=2, accumulation=3, evaluates=True)


@pytest.mark.ranks(3)
def test_a_matrix_of_all_stages():
    """The owner adds up the gradients of copies on several ranks; and of two stages on a rank."""
    check("one matrix", loss_inside, pp=3, micro_batches=2)
    check("one matrix", loss_outside, pp=3, micro_batches=3, rows=7)


@pytest.mark.exhaustive
@EACH
def test_four_stages(name):
    check(name, loss_inside, pp=4, micro_batches=4)
    check(name, loss_outside, steps=1, pp=4, micro_batches=3, accumulation=5)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "gpipe", "1f1b"])
@pytest.mark.ranks(2)
def test_schedules(schedule):
    name, chunks = ("one matrix", 2) if schedule == "interleaved" else ("gpt2", 1)
    check(name, loss_inside, pp=2, micro_batches=4, schedule=schedule, chunks=chunks)


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
@pytest.mark.parametrize("inner", ["zero2", "ddp", "zero1", "zero3", "fsdp"])
def test_over_data_parallel_ranks(inner, schedule):
    check(
        "gpt2", loss_inside, pp=2, micro_batches=3, data_parallel={"name": inner}, schedule=schedule
    )


@EACH
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["shards", "whole"])
@pytest.mark.parametrize(("loss_of", "more"), [(loss_outside, {}), TWO_BACKWARDS])
def test_tensor_and_pipeline(name, sequence_parallel, loss_of, more):
    cell = {"tp": 2, "pp": 2, "sequence_parallel": sequence_parallel, "micro_batches": 3}
    check(name, loss_of, **cell, **more)


def test_shards_of_the_sequence_are_not_cut_into_micro_batches():
    """Blocks see each token by itself, and where tokens are equal, shards of parts are, too."""
    blocks = [Residual(8, dtype=torch.float64) for _ in range(2)]
    ends = {"first": nn.Embedding(9, 8).double(), "last": nn.Linear(8, 9).double()}
    both = Twins(Stack(blocks, **ends), torch.arange(8).view(2, 4), tp=2, sequence_parallel=True)
    for ids in (torch.arange(8).view(2, 4), torch.tensor([[2, 2, 4, 3]])):
        both.backward(*(F.cross_entropy(out.flatten(0, 1), ids.flatten()) for out in both(ids)))


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param({"tp": 2}, id="tp", marks=pytest.mark.exhaustive),  # by default: a small model
        pytest.param({"schedule": "zb-h1"}, id="zb-h1"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_blocks(cell):
    with backend("aot_eager"):
        check("gpt2", loss_inside, pp=2, micro_batches=4, compiles="blocks", **cell)
        assert graphs()


@pytest.mark.exhaustive
@pytest.mark.parametrize("inner", ["ddp", "zero1"])
@pytest.mark.ranks(8)
def test_three_dims(inner):
    """tp 2, pp 2 and dp 2 at once, by a name in the configuration."""
    options = {"tp": 2, "pp": 2, "micro_batches": 2, "data_parallel": {"name": inner}}
    check("gpt2", loss_inside, steps=1, **options)


def test_ignored_labels():
    """The mean is over all tokens that count, however they fall into micro-batches."""
    both = Twins(build("gpt2"), tp=2, micro_batches=4)
    ids = token_batch(3, rows=4)
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[1, :5] = -100
    labels[3] = -100  # a micro-batch without any target
    both.backward(*(each.loss for each in both(input_ids=ids, labels=labels)), rtol=1e-5)
    both.check_gradients(rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
@pytest.mark.ranks(2)
def test_losses_that_count_nothing_add_zeros(options):
    """As under other strategies, where optimizers decay such weights; they may be no numbers."""
    both = Twins(build("gpt2"), accumulation=2, **options)
    for weights in ([0.0, 0.0], [1.0, 0.0]):  # the second: copies send the first's gradient last
        for micro, weight in enumerate(weights):
            found, expected = (loss_outside(m, token_batch(micro)) for m in (both.model, both.twin))
            (expected * weight).backward()
            with both.accelerator.accumulate(both.model):
                factor = 1.0 if weight else torch.nan
                both.accelerator.backward(found * factor, weight=weight)
        both.check_gradients()


@pytest.mark.ranks(2)
def test_levels_may_change():
    """A loss that is handed over, one of the model's own, one made outside, and back."""
    both = Twins(build("gpt2"), micro_batches=2, cut="profile")
    bounds = both.strategy._builder._planned[1].bounds
    assert len(set(everyone(bounds))) == 1
    for step, level in enumerate(["L3", "L1", "L2", "L1", "L3", "L2"]):
        ids = token_batch(step, rows=5)
        if level == "L3":
            batch = {"input_ids": ids}
            both.accelerator.pipeline_step(both.model, batch, ids, loss_fn=word_loss)
            word_loss(both.twin(ids), ids).backward()
        elif level == "L2":
            both.backward(*(each.loss for each in both(input_ids=ids, labels=ids)), rtol=1e-5)
        else:
            both.backward(*(word_loss(each, ids) for each in both(ids)))
        both.check_gradients(**({"rtol": 1e-4, "atol": 1e-7} if level == "L2" else EXACT))


# --- checkpoints of pipelines: saved by one division, loaded by another, and training goes on ---


SAVED, LAST = 1, 2
TURNS = {"pp": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 2}
DIVISIONS = {
    "ddp": {"name": "ddp"},
    "pp4": {"name": "megatron", "pp": 4, "micro_batches": 2},
    "zero3": {"name": "zero3", "keep_below": 0},
    "interleaved": {"name": "megatron", **TURNS},
    "tp2-pp2": {"name": "megatron", "tp": 2, "pp": 2, "micro_batches": 2},
    "tp2-fsdp": {"name": "megatron", "tp": 2, "data_parallel": {"name": "fsdp", "unit_from": 1}},
    "pp2-zero1": {"name": "megatron", "pp": 2, "micro_batches": 2, "data_parallel": "zero1"},
}
"""Of four ranks; each loads what the one before it has saved."""


def made():
    torch.manual_seed(3)
    model = gpt2(4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


class Trained:
    """A model under a division; ranks of a data-parallel axis share the rows of a batch."""

    def __init__(self, division):
        self.accelerator = Accelerator(strategy=DIVISIONS[division], cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(*made())

    def steps(self, first, last):
        dp = self.accelerator.mesh["dp"]
        for step in range(first, last):
            ids = token_batch(step, rows=8)[dp.rank :: dp.size].contiguous()
            self.accelerator.pipeline_step(self.model, ids, ids, loss_fn=word_loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self, expected, where):
        with self.accelerator.gathered(self.model):
            for name, parameter in self.model.named_parameters():
                close = torch.isclose(parameter, expected[name], rtol=1e-10, atol=1e-12)
                assert close.all(), f"{where}: {name}"


def uninterrupted():
    """Return the weights of one process when the others save, and at the end."""
    model, optimizer = made()
    kept = []
    for step in range(LAST):
        ids = token_batch(step, rows=8)
        word_loss(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return kept[SAVED - 1], kept[-1]


@pytest.mark.exhaustive
def test_each_division_goes_on_with_the_checkpoint_of_another(tmp_path):
    saved, last = uninterrupted()
    for name in DIVISIONS:
        trained = Trained(name)
        trained.steps(0, SAVED)
        trained.check(saved, name)
        trained.accelerator.save_state(tmp_path / name)
    for saver, name in itertools.pairwise([*DIVISIONS, "ddp"]):
        trained = Trained(name)
        trained.accelerator.load_state(tmp_path / saver)
        where = f"saved by {saver}, loaded by {name}"
        trained.check(saved, where)
        trained.steps(SAVED, LAST)
        trained.check(last, where)


# --- rank that fails in a pipeline: the others end soon, and say where they were ---


TIMEOUT_S = 3600.0  # far beyond a test's own limit: a rank that waits for it fails its test


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("loss", KeyboardInterrupt),
        ("forward", RuntimeError),
        pytest.param("connections", ConnectionError, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.ranks(3)
def test_a_stage_that_fails(place, kind):
    """By an exception, or as when its process is killed: all of its connections end."""
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 3, "micro_batches": 3},
        config={"launch": {"timeout_s": TIMEOUT_S}},
        cpu=True,
    )
    model = accelerator.prepare(gpt2(3))
    rank = accelerator.mesh["pp"].rank
    odd = rank == (2 if place == "loss" else 1)
    ids = token_batch(0, rows=3)
    failing = []

    def fail(*_):
        if place == "connections":
            cut_connections()
        raise kind("sprung")

    def loss_or_fail(output, targets):
        return fail() if failing else word_loss(output, targets)

    accelerator.pipeline_step(model, ids, ids, loss_fn=loss_or_fail)
    if odd and place == "loss":
        failing.append(rank)
    elif odd:
        model.transformer.h[1].mlp.register_forward_hook(fail)
    with pytest.raises(kind if odd else CollectiveError) as caught:
        accelerator.pipeline_step(model, ids, ids, loss_fn=loss_or_fail)
    if not odd:
        assert "stage" in str(caught.value)
        assert "micro-batch" in str(caught.value)


@pytest.mark.ranks(2)
def test_calls_and_models_that_do_not_fit():
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2}, cpu=True)
    with pytest.raises(ConfigError, match="between 1 and 1 stages for a model of 1 blocks"):
        accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    torch.manual_seed(0)
    model = accelerator.prepare(gpt2(2))
    ids = token_batch(0, rows=2)
    with pytest.raises(UsageError, match="expected a batch with rows"):
        model(ids[:0])
    output = model(input_ids=ids, labels=ids)
    with pytest.raises(UsageError, match="times numbers"):
        accelerator.backward(output.loss.square())


@pytest.mark.ranks(2)
def test_two_models_in_one_window_step_one_after_the_other():
    """A step finds the losses of its own model: the other's have no values yet."""
    strategy = {"name": "megatron", "pp": 2}
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    models = [nn.Sequential(*(Residual(8) for _ in range(2))).double() for _ in range(2)]
    alone, pairs = copy.deepcopy(models), []
    for model in models:
        model.example_inputs = x
        pairs.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    records = []
    accelerator.report.listen(records.append)
    for _ in range(2 * 2):
        with accelerator.accumulate(*models):
            for model, optimizer in pairs:
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    for model, twin in zip(models, alone, strict=True):
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            twin(x).square().mean().backward()
            optimizer.step()
        found = accelerator.get_state_dict(model)
        torch.testing.assert_close(found, dict(twin.state_dict()), rtol=1e-12, atol=1e-14)
    accelerator.report.finish()
    first, last = everyone([(each.step, each.loss) for each in records])
    assert first == last  # some values come to the first stage after the record was begun
    assert [step for step, _ in first] == [1, 2]
    accelerator.end_training()


def tensors_after_each(call):
    """Return how many tensors there are after the second and the third of three calls."""
    counts = []
    for _ in range(3):
        call()
        gc.collect()
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    return counts[1:]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.ranks(2)
def test_calls_are_freed_without_a_step(grad):
    """With their gradients: as soon as nobody has the output, of which a loss could be made."""
    x = torch.randn(4, 8)
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2}, cpu=True)
    for inside in (False, True):
        model = nn.Sequential(*(Residual(8) for _ in range(2)))
        if inside:
            model = Parts(lambda m, x: {"loss": m.body(x).square().mean()}, body=model)
        model.example_inputs = x
        model = accelerator.prepare(model)

        def call(model=model):
            with torch.set_grad_enabled(grad):
                model(x)

        second, third = tensors_after_each(call)
        assert second == third


@pytest.mark.ranks(2)
def test_a_model_may_return_a_parameter():
    """It outlives the call that it came out of."""
    body, scale = nn.Sequential(*(Residual(8) for _ in range(2))), nn.Parameter(torch.ones(()))
    model = Parts(lambda m, x: (m.body(x) * m.scale, m.scale), body=body, scale=scale).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    both = Twins(model, x, make=partial(torch.optim.SGD, lr=0.1))
    for _ in range(2):
        both.backward(*((out * scale).square().mean() for out, scale in both(x)))
        both.step()
    both.check_state()


def test_replicas_that_decide_together_evaluate_batches_of_different_kinds():
    """ZeRO-3 lets them run as many forwards; a batch of one row is of another kind."""
    x = torch.randn(4, 8)
    model = nn.Sequential(*(Residual(8) for _ in range(2)))
    both = Twins(model, x, data_parallel={"name": "zero3"})
    for rows in ((4, 4), (1, 2), (2, 1)):
        with torch.no_grad():
            torch.testing.assert_close(*both(x[: rows[both.accelerator.mesh["dp"].rank]]))
