"""Checkpoints of tensor-parallel runs: loaded anywhere, with equal bits, and training goes on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Accelerator
from drivetrain.checkpoint import open_checkpoint, read_export
from drivetrain.errors import CheckpointError, UsageError
from huggingface_models import (
    ARCHITECTURES,
    VOCABULARY,
    llama,
    logits_of,
    token_batch,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SAVED, LAST = 2, 4
ROWS = 12  # divides by every number of data-parallel ranks: the mean over ranks is that over rows
MODELS = {**ARCHITECTURES, "llama-tied": lambda: llama(tied=True)}

STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero1": {"name": "zero1", "bucket_mib": 0.001},
    "zero3": {"name": "zero3", "keep_below": 0},
    "tp1": {"name": "megatron"},
    "tp2": {"name": "megatron", "tp": 2},
    "tp3": {"name": "megatron", "tp": 3},
    "tp4": {"name": "megatron", "tp": 4},
    "tp2-zero1": {"name": "megatron", "tp": 2, "data_parallel": {"name": "zero1"}},
    "tp2-zero3": {
        "name": "megatron",
        "tp": 2,
        "data_parallel": {"name": "zero3", "keep_below": 0},
    },
    "tp2-fsdp": {"name": "megatron", "tp": 2, "data_parallel": {"name": "fsdp", "unit_from": 1}},
}
"""Each with the numbers of ranks on which it runs here."""

WORLDS = {
    "ddp": (1, 2),
    "zero1": (2, 3),
    "zero3": (2, 4),
    "tp1": (1,),
    "tp2": (2, 4),
    "tp3": (3,),
    "tp4": (4,),
    "tp2-zero1": (4,),
    "tp2-zero3": (4,),
    "tp2-fsdp": (4,),
}


def build(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = MODELS[name]()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.003}]
    return model, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def loss_of(model, ids):
    logits = logits_of(model(ids))
    return F.cross_entropy(logits.view(-1, VOCABULARY), ids.view(-1))


class Trained:
    """A model under a strategy; every cell gets its rows of the same batches."""

    def __init__(self, strategy, name):
        self.accelerator = Accelerator(strategy=copy.deepcopy(STRATEGIES[strategy]), cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(*build(name))

    def steps(self, first, last):
        axis = self.accelerator.mesh["dp"]
        for step in range(first, last):
            rows = token_batch(step, rows=ROWS).chunk(axis.size)[axis.rank]
            self.accelerator.backward(loss_of(self.model, rows))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self):
        return self.accelerator.get_state_dict(self.model)

    def close(self):
        self.accelerator.free_memory()


def alone(name):
    """Return the weights of one process after the steps before saving, and at the end."""
    model, optimizer = build(name)
    kept = []
    for step in range(LAST):
        loss_of(model, token_batch(step, rows=ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append({key: value.clone() for key, value in model.state_dict().items()})
    return kept[SAVED - 1], kept[-1]


def check_equal(found, expected, *, bits=False):
    assert set(found) == set(expected)
    for name, tensor in found.items():
        if bits:
            assert torch.equal(tensor, expected[name]), name
        else:
            torch.testing.assert_close(
                tensor, expected[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("megatron")


def content(path, world):
    """Return all that a checkpoint holds, by (name, state), whatever wrote it. Collective."""
    with open_checkpoint(path, world) as reader:
        saved = reader.model(0)
        return {key: saved.read(*key) for key in saved.keys()}  # noqa: SIM118 - no dict


def on(world):
    return [strategy for strategy, sizes in WORLDS.items() if world in sizes]


def each_world():
    return pytest.mark.parametrize(
        "world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3, 4)]
    )


def pairs(world):
    """Yield (who loads, whose checkpoint): each loads a third of them."""
    for i, loader in enumerate(on(world)):
        for saver in SAVERS[(i + world) % 3 :: 3]:
            yield loader, saver


EACH = pytest.mark.parametrize("name", ["gpt2", "llama-mqa"])
SAVERS = [f"{strategy}-{n}" for strategy, sizes in WORLDS.items() for n in sizes]


@each_world()
@EACH
def test_save(folder, name, world):
    """Save after two steps, with the moments, and go on."""
    saved, last = alone(name)
    for strategy in on(world):
        trained = Trained(strategy, name)
        trained.steps(0, SAVED)
        check_equal(trained.weights(), saved)
        trained.accelerator.save_state(folder / f"{name}-{strategy}-{world}")
        trained.steps(SAVED, LAST)
        check_equal(trained.weights(), last)
        trained.close()


@each_world()
@EACH
def test_load(folder, name, world):
    """Every run loads a checkpoint of every other: equal bits of weights and moments."""
    if any(not (folder / f"{name}-{saver}").exists() for saver in SAVERS):
        pytest.skip("needs the checkpoints of test_save, which did not run or failed")
    _, last = alone(name)
    for loader, saver in pairs(world):
        check_resumed(folder, name, saver, loader, world, last)


def check_resumed(folder, name, saver, loader, world, last):
    where = f"{name}: {saver} -> {loader} on {world}"
    path, again = folder / f"{name}-{saver}", folder / f"{name}-{saver}-{loader}-{world}"
    trained = Trained(loader, name)
    trained.accelerator.load_state(path)
    trained.accelerator.save_state(again)
    mine = trained.accelerator.world
    saved, found = content(path, mine), content(again, mine)
    assert set(found) == set(saved), where
    assert any(state == "0.exp_avg_sq" for _, state in saved)
    for key, tensor in saved.items():
        assert torch.equal(found[key], tensor), f"{where}: {key} has other bits"
    for key, tensor in trained.weights().items():
        known = saved.get((key, ""))
        assert known is None or torch.equal(tensor, known), f"{where}: {key}"
    trained.steps(SAVED, LAST)
    check_equal(trained.weights(), last)
    trained.close()


def test_every_checkpoint_is_loaded():
    """By tensor-parallel runs and by others, those of tensor-parallel runs by all kinds."""
    found = {(loader, saver) for world in (1, 2, 3, 4) for loader, saver in pairs(world)}
    assert {saver for _, saver in found} == set(SAVERS)
    crossed = {(a.partition("-")[0], b.partition("-")[0]) for a, b in found}
    assert {("tp1", "tp2"), ("tp2", "zero1"), ("tp2", "tp2"), ("zero3", "tp2")} <= crossed
    assert {("tp4", "tp2"), ("tp3", "tp2"), ("ddp", "tp2"), ("tp4", "tp3")} <= crossed


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "llama-tied", "bert"])
@pytest.mark.ranks(2)
def test_export_loads_in_transformers(tmp_path, name):
    import transformers

    trained = Trained("tp2", name)
    trained.steps(0, 1)
    weights = trained.weights()
    trained.accelerator.save_model(trained.model, tmp_path / "export")
    if trained.accelerator.is_main_process:
        model, _ = build(name)
        model.config.save_pretrained(tmp_path / "export")
        kind = getattr(transformers, type(model).__name__)
        loaded = kind.from_pretrained(tmp_path / "export", dtype=torch.float64)
        assert loaded.config.num_attention_heads == 6
        theirs = loaded.state_dict()
        for key, tensor in weights.items():
            assert torch.equal(theirs[key], tensor), key
    trained.accelerator.wait_for_everyone()
    trained.close()


@pytest.mark.ranks(2)
def test_tied_weights_are_saved_once(tmp_path):
    trained = Trained("tp2", "gpt2")
    trained.steps(0, 1)
    trained.accelerator.save_state(tmp_path / "state")
    trained.accelerator.save_model(trained.model, tmp_path / "export")
    saved = content(tmp_path / "state", trained.accelerator.world)
    assert ("transformer.wte.weight", "") in saved
    assert ("lm_head.weight", "") not in saved
    names = [name for name, _ in read_export(tmp_path / "export")]
    assert names.count("transformer.wte.weight") == 1
    weights = trained.weights()
    assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
    assert weights["lm_head.weight"].shape == (VOCABULARY, 48)
    trained.close()


class Pair(nn.Module):
    """A block of two layers."""

    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Other(nn.Module):
    """A model of blocks, of some width, perhaps with a layer more."""

    def __init__(self, hidden, *, extra):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Pair(hidden) for _ in range(2))
        self.extra = nn.Linear(8, 8) if extra else nn.Identity()
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.extra(x))


@pytest.mark.parametrize(
    ("saved", "loaded", "expected"),
    [
        ((6, True), (6, False), "2 in the checkpoint only: 'extra.bias', 'extra.weight'"),
        ((6, False), (6, True), "2 missing from the checkpoint: 'extra.weight', 'extra.bias'"),
        ((6, False), (5, False), r"'blocks.0.up.weight': expected \(5, 8\), found \(6, 8\)"),
    ],
)
@pytest.mark.ranks(2)
def test_checkpoint_of_another_model(tmp_path, saved, loaded, expected):
    def prepared(hidden, extra):
        accelerator = Accelerator(strategy=copy.deepcopy(STRATEGIES["tp2"]), cpu=True)
        model = Other(hidden, extra=extra).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return accelerator, *accelerator.prepare(model, optimizer)

    accelerator, *_ = prepared(*saved)
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator, model, _ = prepared(*loaded)
    before = accelerator.get_state_dict(model)
    with pytest.raises(CheckpointError, match=expected):
        accelerator.load_state(tmp_path / "state")
    check_equal(accelerator.get_state_dict(model), before, bits=True)
    accelerator.free_memory()


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


@pytest.mark.parametrize("late", [False, True], ids=["together", "later"])
@pytest.mark.parametrize("kind", [Factored, torch.optim.Adafactor, torch.optim.LBFGS])
@pytest.mark.ranks(2)
def test_optimizer_of_whole_matrices_is_refused(kind, late):
    model, _ = build("llama")
    optimizer = kind(model.parameters())
    accelerator = Accelerator(strategy=copy.deepcopy(STRATEGIES["tp2"]), cpu=True)
    with pytest.raises(UsageError, match=rf"element-wise optimizer.*{kind.__name__}.*set tp: 1"):
        if late:
            accelerator.prepare(accelerator.prepare(model), optimizer)
        else:
            accelerator.prepare(model, optimizer)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_optimizer_of_whole_matrices_may_hold_what_stays_whole():
    """Biases and norms of a block are whole on every rank, so any optimizer may step them."""
    model, _ = build("llama")
    whole = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    accelerator = Accelerator(strategy=copy.deepcopy(STRATEGIES["tp2"]), cpu=True)
    twin = copy.deepcopy(model)
    model, one, other = accelerator.prepare(model, Factored(whole), torch.optim.SGD(rest, lr=0.1))
    theirs = Factored([p for name, p in twin.named_parameters() if "norm" in name])
    accelerator.backward(loss_of(model, token_batch(0)))
    loss_of(twin, token_batch(0)).backward()
    one.step()
    theirs.step()
    found = accelerator.get_state_dict(model)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), **EXACT)
    del other
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_state_of_whole_matrices_is_not_loaded(tmp_path):
    """A checkpoint of one rank may hold it; a rank that has a part of the matrix cannot use it."""
    model, _ = build("llama")
    accelerator = Accelerator(strategy="ddp", cpu=True)
    model, optimizer = accelerator.prepare(model, Factored(model.parameters()))
    accelerator.backward(loss_of(model, token_batch(0)))
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    trained = Trained("tp2", "llama")
    with pytest.raises(CheckpointError, match=r"to have the parameter's shape .*set tp: 1"):
        trained.accelerator.load_state(tmp_path / "state")
    trained.close()


@pytest.mark.ranks(2)
def test_changes_of_the_first_rank_reach_all():
    """In gathered(), of divided parameters and of whole ones."""
    trained = Trained("tp2", "llama")
    model, accelerator = trained.model, trained.accelerator
    layer = model.model.layers[0]
    for parameter in (layer.self_attn.q_proj.weight, layer.input_layernorm.weight):
        with accelerator.gathered(parameter):
            if accelerator.is_main_process:
                parameter.data.fill_(7.0)
        assert (parameter == 7).all()
    trained.close()
