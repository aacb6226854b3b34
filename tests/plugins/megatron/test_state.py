"""The whole model of ranks that have parts: built without memory, exported, evaluated, changed."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from cases import case
from cell_twins import EXACT
from drivetrain import Accelerator
from drivetrain.checkpoint.export import ExportedWeights, read_export
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.errors import CheckpointError, RankMismatchError, UsageError
from drivetrain.model.modules import held_parameters
from drivetrain_megatron import state
from huggingface_models import ARCHITECTURES, VOCABULARY, token_batch, word_loss
from stacks import Residual, Stack
from zero_stages import MASTERS

pytestmark = pytest.mark.ranks(2)


def build(name, layers=4, seed=7):
    torch.manual_seed(seed)
    return ARCHITECTURES[name](layers)


def accelerator_of(**options):
    return Accelerator(strategy={"name": "megatron", **options}, cpu=True)


def prepared(accelerator, model):
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def train(accelerator, model, optimizer):
    """Return the weights after some steps."""
    for step in range(2):
        ids = token_batch(step, rows=4)
        accelerator.pipeline_step(model, ids, ids, loss_fn=word_loss)
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}


def same(found, expected):
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def over(inner, **options):
    return {"data_parallel": {"name": inner, **options}}


TP, PP, ZERO3 = {"tp": 2}, {"pp": 2}, over("zero3", keep_below=0)
CELLS = [("llama-gqa", {**PP, "chunks": 2, "schedule": "interleaved"}), ("llama-mqa", TP | ZERO3)]
MORE_CELLS = [("gpt2", TP | over("zero1"))]
CELLS_OF_FOUR = [("gpt2", TP | PP), ("llama-gqa", PP | ZERO3)]


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(CELLS, marks=pytest.mark.ranks(2)),
        pytest.param(MORE_CELLS, marks=[pytest.mark.ranks(2), pytest.mark.exhaustive]),
        pytest.param(CELLS_OF_FOUR, marks=[pytest.mark.ranks(4), pytest.mark.exhaustive]),
    ],
)
def test_built_without_memory_and_exported(tmp_path, cells):
    for number, (name, options) in enumerate(cells):
        with case(name, options):
            check_built(tmp_path / str(number), name, options)


def check_built(folder, name, options):
    """Bit for bit the values of ordinary construction, the same training, and those of a file."""
    layers = 4 if "chunks" in options else 2
    expected = build(name, layers).state_dict()
    expected = {key: value.clone() for key, value in expected.items()}
    ordinary = accelerator_of(**options)
    model, optimizer = prepared(ordinary, build(name, layers))
    trained = train(ordinary, model, optimizer)
    ordinary.save_model(model, folder, max_shard_size="20KB")

    accelerator = accelerator_of(**options)
    with accelerator.building():
        model = build(name, layers)
    model, optimizer = prepared(accelerator, model)
    same(accelerator.get_state_dict(model), expected)
    same(train(accelerator, model, optimizer), trained)

    accelerator = accelerator_of(**options)
    if accelerator.is_main_process:
        whole = build(name, layers)
        whole.config.save_pretrained(folder)
        kind = getattr(transformers, type(whole).__name__)
        loaded = kind.from_pretrained(folder, dtype=torch.float64).state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in trained.items())
    with accelerator.building(weights=folder):
        model = build(name, layers, seed=99)
    model, _ = prepared(accelerator, model)
    same(accelerator.get_state_dict(model), trained)


@pytest.mark.parametrize("options", [TP, PP])
def test_ranks_with_seeds_of_their_own_begin_with_the_values_of_rank_0(options):
    accelerator = accelerator_of(**options)
    model, _ = prepared(accelerator, build("gpt2", 2, seed=accelerator.process_index))
    same(accelerator.get_state_dict(model), build("gpt2", 2, seed=0).state_dict())


def test_state_of_an_optimizer_is_cut_too():
    """Adagrad makes its state in its constructor, where parameters have no values yet."""

    def adagrad(model):
        parameters = model.parameters()
        return torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1)

    twin = build("llama", 2)
    other = adagrad(twin)
    accelerator = accelerator_of(tp=2)
    with accelerator.building():
        model = build("llama", 2)
        optimizer = adagrad(model)
    found = train(accelerator, *accelerator.prepare(model, optimizer))
    for step in range(2):
        ids = token_batch(step, rows=4)
        word_loss(twin(ids), ids).backward()
        other.step()
        other.zero_grad()
    torch.testing.assert_close(found, twin.state_dict(), **EXACT)


def test_state_of_a_compiled_model(tmp_path):
    """Read and saved under the names of the model inside."""
    for options in (TP, PP):
        expected = build("gpt2", 2).state_dict()
        accelerator = accelerator_of(**options)
        model, _ = prepared(accelerator, torch.compile(build("gpt2", 2), backend="eager"))
        same(accelerator.get_state_dict(model), expected)
        accelerator.save_model(model, tmp_path / next(iter(options)))


@pytest.mark.ranks(4)
def test_each_rank_reads_its_share_alone_and_changes_reach_copies(tmp_path, monkeypatch):
    """Of a file of weights no rank reads more elements than it keeps."""
    accelerator = accelerator_of(**TP, **PP)
    if accelerator.is_main_process:
        build("llama").save_pretrained(tmp_path)
    accelerator.wait_for_everyone()
    read = []
    own = ExportedWeights.read

    def counted(self, name, only=None):
        found = own(self, name, only)
        read.append(found.numel())
        return found

    monkeypatch.setattr(ExportedWeights, "read", counted)
    with accelerator.building(weights=tmp_path):
        model = build("llama")
    model, _ = prepared(accelerator, model)
    held = [p.untyped_storage().nbytes() // p.itemsize for p in held_parameters(model)]
    assert sum(read) == sum(held)

    accelerator, twin = accelerator_of(**TP, **PP), build("gpt2").eval()
    model, _ = prepared(accelerator, build("gpt2"))
    with accelerator.gathered(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "transformer.wte.weight":
                parameter.mul_(2)
    with torch.no_grad():
        twin.transformer.wte.weight.mul_(2)
        ids = token_batch(0)
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, **EXACT)


def test_low_parameters_of_all_stages_are_gathered():
    """Stages read parameters in bf16, those of other stages, too."""
    model = Stack([Residual(6) for _ in range(2)])
    expected = {name: p.detach().bfloat16() for name, p in model.named_parameters() if p.dim() > 1}
    model.example_inputs = torch.zeros(2, 6)
    strategy = {"name": "megatron", **PP, **over("zero2")}
    accelerator = Accelerator(strategy=strategy, cpu=True, **MASTERS)
    model, _ = prepared(accelerator, model)
    with accelerator.gathered(model):
        same(
            {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() > 1},
            expected,
        )


def test_generation_and_gathered_parameters():
    """Ranks keep keys and values of their own heads; changes of the first rank reach all."""
    for sharded in (False, True):
        twin = build("llama-gqa").eval()
        accelerator = accelerator_of(tp=2, sequence_parallel=sharded)
        model, _ = prepared(accelerator, build("llama-gqa"))
        ids = token_batch(3, rows=2)[:, :4]
        with accelerator.inference(model) as inner:
            found = inner.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(found, twin.generate(ids, max_new_tokens=5, do_sample=False))
        with accelerator.gathered(model), pytest.raises(UsageError, match="inference"):
            model(ids)
        model(ids)
        layer = model.model.layers[0]
        for parameter in (layer.self_attn.q_proj.weight, layer.input_layernorm.weight):
            with accelerator.gathered(parameter):
                if accelerator.is_main_process:
                    parameter.data.fill_(7.0)
            assert (parameter == 7).all()


class Buffered(Stack):
    """Blocks with statistics, one buffer that every stage reads and one that nothing reads."""

    def __init__(self):
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)]
        super().__init__(blocks, first=nn.Linear(5, 8), last=nn.Linear(8, 3))
        self.register_buffer("offset", torch.arange(8.0))
        self.register_buffer("unused", torch.ones(2))

    def forward(self, x):
        x = self.first(x) + self.offset
        for layer in self.blocks:
            x = layer(x) + self.offset.sqrt()
        return self.last(x)


def test_buffers(tmp_path):
    """Statistics come from the stages that compute them; what several have is saved once."""
    torch.manual_seed(1)
    accelerator = accelerator_of(pp=2, micro_batches=1)
    model, optimizer = prepared(accelerator, Buffered())
    torch.manual_seed(1)
    twin = Buffered()
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    accelerator.pipeline_step(model, x, None, loss_fn=lambda y, _: y.square().mean())
    optimizer.step()
    twin(x).square().mean().backward()
    torch.optim.AdamW(twin.parameters(), lr=0.01).step()
    found = accelerator.get_state_dict(model)
    torch.testing.assert_close(found, twin.state_dict())
    assert dict(model.named_buffers()).keys() == dict(twin.named_buffers()).keys()
    model.load_state_dict({name: 2 * tensor for name, tensor in found.items()})
    found = accelerator.get_state_dict(model)
    torch.testing.assert_close(found, {name: 2 * t for name, t in twin.state_dict().items()})
    accelerator.save_state(tmp_path / "saved")
    other = Accelerator(cpu=True, strategy="ddp")
    whole, _ = prepared(other, Buffered())
    other.load_state(tmp_path / "saved")
    assert all(torch.equal(tensor, found[key]) for key, tensor in whole.state_dict().items())


def test_tied_weights_are_saved_once(tmp_path):
    accelerator = accelerator_of(**TP)
    model, _ = prepared(accelerator, build("gpt2", 2))
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "export")
    with open_checkpoint(tmp_path / "state", accelerator.world) as reader:
        saved = {name for name, _ in list(reader.model(0).keys())}
    for names in (saved, [name for name, _ in read_export(tmp_path / "export")]):
        assert "lm_head.weight" not in names
        assert list(names).count("transformer.wte.weight") == 1
    weights = accelerator.get_state_dict(model)
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
    assert weights["lm_head.weight"].shape[0] == VOCABULARY


# --- optimizers that need whole matrices ---


TP2 = {"name": "megatron", "tp": 2}


def built():
    torch.manual_seed(5)
    return Stack([Residual(8), Residual(8)])


class Factored(torch.optim.Optimizer):
    """Keeps the mean squares of rows and columns alone, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = p.grad.square()
                rows = self.state[p].setdefault("rows", square.new_zeros(p.shape[:1]))
                rows.add_(square.view(p.shape[0], -1).mean(1))
                shape = (-1, *[1] * (p.dim() - 1))
                p.sub_(p.grad / (rows.view(shape) + 1e-8).sqrt(), alpha=group["lr"])


REFUSED = ((Factored, False), (torch.optim.Adafactor, True), (torch.optim.LBFGS, False))


def test_optimizer_of_whole_matrices_is_refused():
    for kind, late in REFUSED:
        model = built()
        optimizer = kind(model.parameters())
        accelerator = Accelerator(strategy=TP2, cpu=True)
        match = rf"element-wise optimizer.*{kind.__name__}.*set tp: 1"
        with pytest.raises(UsageError, match=match):
            if late:
                accelerator.prepare(accelerator.prepare(model), optimizer)
            else:
                accelerator.prepare(model, optimizer)


def test_state_of_whole_matrices_is_not_loaded(tmp_path):
    """A checkpoint of one rank may hold it; a rank that has a part of the matrix cannot use it."""
    model = built()
    accelerator = Accelerator(strategy="ddp", cpu=True)
    model, optimizer = accelerator.prepare(model, Factored(model.parameters()))
    accelerator.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator = Accelerator(strategy=TP2, cpu=True)
    model = built()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match=r"to have the parameter's shape .*set tp: 1"):
        accelerator.load_state(tmp_path / "state")


def test_which_tensors_are_trained_is_told_by_their_stage(monkeypatch):
    model = nn.Linear(2, 3)
    monkeypatch.setattr(state, "gather_facts", lambda mine, *_, **options: [mine])
    whole = state.WholeState(model, SimpleNamespace(axis=None), torch.device("cpu"))
    model.bias.requires_grad_(False)
    places = whole.places(model)
    assert {name: each.facts.trainable for name, each in places.items()} == {
        "weight": True,
        "bias": False,
    }


def test_a_rank_that_has_fewer_arguments_is_told():
    lines = ["argument 0: a", "argument 1: b"]
    for texts in ({0: lines[:1], 1: lines}, {0: lines, 1: lines[:1]}):
        with pytest.raises(RankMismatchError, match=r"nothing.*argument 1: b|1: b.*nothing"):
            raise RankMismatchError(state._message(texts))
