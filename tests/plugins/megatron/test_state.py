"""The whole model of ranks that have parts: built without memory, exported, evaluated, changed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, UsageError
from drivetrain.checkpoint import ExportedWeights, open_checkpoint, read_export
from huggingface_models import ARCHITECTURES, VOCABULARY, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}
CELLS = {
    "pp2": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "chunks": 2, "schedule": "interleaved"}),
    "pp3": (3, {"pp": 3}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "pp2-zero3": (4, {"pp": 2, "data_parallel": {"name": "zero3", "keep_below": 0}}),
}
CELL = pytest.mark.parametrize(
    "options",
    [
        pytest.param(given, marks=pytest.mark.ranks(ranks), id=name)
        for name, (ranks, given) in CELLS.items()
    ],
)


def build(name, layers=4):
    torch.manual_seed(7)
    return ARCHITECTURES[name](layers)


def accelerator_of(options):
    return Accelerator(strategy={"name": "megatron", **options}, cpu=True)


def step_loss(output, targets):
    return F.cross_entropy(logits_of(output).view(-1, VOCABULARY), targets.reshape(-1))


def train(accelerator, model, optimizer, steps=2):
    for step in range(steps):
        ids = token_batch(step, rows=4)
        accelerator.pipeline_step(model, ids, ids, loss_fn=step_loss)
        optimizer.step()
        optimizer.zero_grad()


def prepared(accelerator, model):
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.ranks(2)
def test_state_of_a_compiled_model(options, tmp_path):
    """Read and saved under the names of the model inside."""
    expected = build("gpt2").state_dict()
    accelerator = accelerator_of(options)
    model, _ = prepared(accelerator, torch.compile(build("gpt2"), backend="eager"))
    found = accelerator.get_state_dict(model)
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    accelerator.save_model(model, tmp_path / "weights")
    accelerator.free_memory()


@CELL
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_built_without_memory(name, options):
    """Bit for bit the values of ordinary construction, and the same training."""
    expected = build(name).state_dict()
    ordinary = accelerator_of(options)
    model, optimizer = prepared(ordinary, build(name))
    train(ordinary, model, optimizer)
    trained = ordinary.get_state_dict(model)
    ordinary.free_memory()
    accelerator = accelerator_of(options)
    with accelerator.building():
        model = build(name)
    model, optimizer = prepared(accelerator, model)
    for key, tensor in accelerator.get_state_dict(model).items():
        assert torch.equal(tensor, expected[key]), key
    train(accelerator, model, optimizer)
    for key, tensor in accelerator.get_state_dict(model).items():
        assert torch.equal(tensor, trained[key]), key
    accelerator.free_memory()


@CELL
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_export_and_back(tmp_path, name, options):
    import transformers

    accelerator = accelerator_of(options)
    model, optimizer = prepared(accelerator, build(name))
    train(accelerator, model, optimizer)
    weights = accelerator.get_state_dict(model)
    accelerator.save_model(model, tmp_path, max_shard_size="20KB")
    accelerator.free_memory()
    if accelerator.is_main_process:
        whole = build(name)
        whole.config.save_pretrained(tmp_path)
        kind = getattr(transformers, type(whole).__name__)
        loaded = kind.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
        for key, tensor in weights.items():
            assert torch.equal(loaded[key], tensor), key
    again = accelerator_of(options)
    with again.building(weights=tmp_path):
        torch.manual_seed(99)
        model = ARCHITECTURES[name](4)
    model, _ = prepared(again, model)
    for key, tensor in again.get_state_dict(model).items():
        assert torch.equal(tensor, weights[key]), key
    again.free_memory()


@pytest.mark.ranks(4)
def test_each_rank_reads_its_share_alone(tmp_path, monkeypatch):
    """Of a file of weights no rank reads more elements than it keeps."""
    accelerator = accelerator_of({"tp": 2, "pp": 2})
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
    assert sum(read) == sum(p.numel() for p in model.parameters())
    accelerator.free_memory()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(2)
def test_generation_with_a_cache(sequence_parallel):
    """Tensor-parallel ranks keep keys and values of their own heads."""
    twin = build("llama-gqa").eval()
    accelerator = accelerator_of({"tp": 2, "sequence_parallel": sequence_parallel})
    model, _ = prepared(accelerator, build("llama-gqa"))
    ids = token_batch(3, rows=2)[:, :4]
    with accelerator.inference(model) as inner:
        found = inner.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, twin.generate(ids, max_new_tokens=5, do_sample=False))
    accelerator.free_memory()


@pytest.mark.ranks(4)
def test_changes_reach_copies_of_tied_weights():
    accelerator = accelerator_of({"tp": 2, "pp": 2})
    twin = build("gpt2").eval()
    model, _ = prepared(accelerator, build("gpt2"))
    with accelerator.gathered(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "transformer.wte.weight":
                parameter.mul_(2)
    with torch.no_grad():
        twin.transformer.wte.weight.mul_(2)
        ids = token_batch(0)
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, **EXACT)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_forward_of_gathered_parameters_is_refused():
    accelerator = accelerator_of({"tp": 2})
    model, _ = prepared(accelerator, build("llama"))
    with accelerator.gathered(model), pytest.raises(UsageError, match="inference"):
        model(token_batch(0))
    model(token_batch(0))
    accelerator.free_memory()


class Buffered(nn.Module):
    """Blocks with statistics, one buffer that every stage reads and one that nothing reads."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)
        )
        self.leave = nn.Linear(8, 3)
        self.register_buffer("offset", torch.arange(8.0))
        self.register_buffer("unused", torch.ones(2))

    def forward(self, x):
        x = self.enter(x) + self.offset
        for layer in self.layers:
            x = layer(x) + self.offset.sqrt()
        return self.leave(x)


@pytest.mark.ranks(2)
def test_buffers(tmp_path):
    """Statistics come from the stages that compute them; what several have is saved once."""
    torch.manual_seed(1)
    accelerator = accelerator_of({"pp": 2, "micro_batches": 1})
    model, optimizer = prepared(accelerator, Buffered())
    torch.manual_seed(1)
    twin = Buffered()
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    accelerator.pipeline_step(model, x, None, loss_fn=lambda y, _: y.square().mean())
    optimizer.step()
    twin(x).square().mean().backward()
    torch.optim.AdamW(twin.parameters(), lr=0.01).step()
    found = accelerator.get_state_dict(model)
    for key, tensor in twin.state_dict().items():
        torch.testing.assert_close(found[key], tensor, msg=key)
    accelerator.save_state(tmp_path / "saved")
    accelerator.free_memory()
    other = Accelerator(cpu=True, strategy="ddp")
    whole, _ = prepared(other, Buffered())
    other.load_state(tmp_path / "saved")
    for key, tensor in whole.state_dict().items():
        assert torch.equal(tensor, found[key]), key
    other.free_memory()


@pytest.mark.ranks(2)
def test_tied_weights_are_saved_once(tmp_path):
    accelerator = accelerator_of({"tp": 2})
    model, _ = prepared(accelerator, build("gpt2"))
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "export")
    with open_checkpoint(tmp_path / "state", accelerator.world) as reader:
        saved = {name for name, _ in list(reader.model(0).keys())}
    exported = [name for name, _ in read_export(tmp_path / "export")]
    for names in (saved, exported):
        assert "lm_head.weight" not in names
        assert list(names).count("transformer.wte.weight") == 1
    weights = accelerator.get_state_dict(model)
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
    assert weights["lm_head.weight"].shape[0] == VOCABULARY
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_changes_of_the_first_rank_reach_all():
    """In gathered(), of divided parameters and of whole ones."""
    accelerator = accelerator_of({"tp": 2})
    model, _ = prepared(accelerator, build("llama"))
    layer = model.model.layers[0]
    for parameter in (layer.self_attn.q_proj.weight, layer.input_layernorm.weight):
        with accelerator.gathered(parameter):
            if accelerator.is_main_process:
                parameter.data.fill_(7.0)
        assert (parameter == 7).all()
    accelerator.free_memory()
