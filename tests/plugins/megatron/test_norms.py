"""The norm of gradients that ranks hold in parts, in copies and whole; frozen and missing ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Accelerator
from huggingface_models import ARCHITECTURES, llama, logits_of, token_batch
from word_models import PlainBlocks

EXACT = {"rtol": 1e-10, "atol": 1e-12}
MODELS = {**ARCHITECTURES, "llama-tied": lambda: llama(kv_heads=1, tied=True)}
NORMS = pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
TP = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)]


class Twins:
    """A model under tensor parallelism and the same in one process."""

    def __init__(self, name, change=lambda model: None, **options):
        torch.manual_seed(0)
        self.model = MODELS[name]()
        change(self.model)
        self.twin = copy.deepcopy(self.model)
        strategy = {"name": "megatron", **options}
        self.accelerator = Accelerator(strategy=strategy, cpu=True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.other = torch.optim.SGD([p for p in self.twin.parameters() if p.requires_grad], lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(
            self.model, torch.optim.SGD(trained, lr=0.1)
        )

    def backward(self, step=0):
        axis = self.accelerator.mesh["dp"]
        losses = [self._loss(self.twin, token_batch(step + rank)) for rank in range(axis.size)]
        (sum(losses) / axis.size).backward()
        loss = self._loss(self.model, token_batch(step + axis.rank))
        torch.testing.assert_close(loss, losses[axis.rank], **EXACT)
        self.accelerator.backward(loss)

    def clip(self, max_norm, p=2.0, names=None):
        mine, theirs = (
            [v for n, v in model.named_parameters() if names is None or n in names]
            for model in (self.model, self.twin)
        )
        found = self.accelerator.clip_grad_norm_(mine, max_norm, p)
        expected = nn.utils.clip_grad_norm_(theirs, max_norm, p)
        torch.testing.assert_close(found, expected, **EXACT, check_dtype=False)
        return found

    def step(self):
        for optimizer in (self.optimizer, self.other):
            optimizer.step()
            optimizer.zero_grad()

    def check_weights(self):
        found = self.accelerator.get_state_dict(self.model)
        for name, tensor in self.twin.state_dict().items():
            torch.testing.assert_close(
                found[name], tensor, **EXACT, msg=lambda m, name=name: f"{name}: {m}"
            )

    def close(self):
        self.accelerator.free_memory()

    @staticmethod
    def _loss(model, ids):
        return F.cross_entropy(logits_of(model(ids)).flatten(0, 1), ids.flatten())


@NORMS
@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("name", ["llama-mqa", "gpt2", "llama-tied"])
def test_norm_is_that_of_one_process(name, tp, p):
    """Copies of key-value heads, tied weights and whole ones count once, parts all."""
    both = Twins(name, tp=tp)
    both.backward()
    norm = both.clip(0.04, p)
    both.clip(float("inf"), p)  # after clipping
    assert norm > 0.04
    both.step()
    both.check_weights()
    both.close()


@NORMS
@pytest.mark.ranks(2)
def test_partial_gradients_count_whole(p):
    """On shards of the sequence each rank has a part of the gradients of norms."""
    both = Twins("llama-gqa", tp=2, sequence_parallel=True)
    both.backward()
    both.clip(0.4, p)
    both.step()
    both.check_weights()
    both.close()


@NORMS
@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.ranks(4)
def test_over_data_parallel_ranks(inner, p):
    both = Twins("llama-mqa", tp=2, data_parallel={"name": inner})
    both.backward()
    both.clip(0.4, p)
    both.step()
    both.check_weights()
    both.close()


@pytest.mark.parametrize("inner", ["ddp", "zero1"])
@pytest.mark.parametrize(
    "ending",
    ["k_proj.weight", "layernorm.weight", "0.self_attn.q_proj.bias", "lm_head.weight", "o_proj"],
)
@pytest.mark.ranks(2)
def test_subset(ending, inner):
    """Only what is given is counted and scaled."""
    both = Twins("llama-mqa", tp=2, data_parallel={"name": inner})
    names = {n for n, _ in both.model.named_parameters() if n.endswith(ending) or ending in n}
    assert names
    both.backward()
    both.clip(0.001, names=names)
    both.clip(float("inf"))
    both.step()
    both.check_weights()
    both.close()


MODELS["branches"] = lambda: PlainBlocks(3).double()


@NORMS
@pytest.mark.ranks(2)
def test_gradients_that_are_none(p):
    both = Twins("branches", tp=2)
    for used in (2, 1, 3):
        both.model.used = both.twin.used = used
        both.backward(used)
        missing = {n for n, v in both.model.named_parameters() if v.grad is None}
        assert missing == {n for n, v in both.twin.named_parameters() if v.grad is None}
        both.clip(0.1, p)
        if missing:
            both.clip(0.1, p, names=missing)
        both.step()
    both.check_weights()
    both.close()


def freeze(model, endings):
    for name, parameter in model.named_parameters():
        if name.endswith(endings):
            parameter.requires_grad_(False)


FROZEN = {
    "words": ("embed_tokens.weight",),
    "head": ("lm_head.weight",),
    "a column": ("q_proj.weight", "q_proj.bias"),
    "weights of columns": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight"),
    "copied heads": ("k_proj.weight", "k_proj.bias"),
    "a row": ("o_proj.weight", "down_proj.weight"),
    "biases": ("bias",),
    "norms": ("norm.weight",),
    "all but norms": ("proj.weight", "proj.bias", "embed_tokens.weight", "lm_head.weight"),
    "the first block and words": ("embed_tokens.weight", *(f"layers.0.{n}" for n in (
        "self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight",
        "self_attn.k_proj.bias", "self_attn.v_proj.weight", "self_attn.v_proj.bias",
        "self_attn.o_proj.weight", "self_attn.o_proj.bias", "input_layernorm.weight",
    ))),
}  # fmt: skip


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.ranks(2)
def test_frozen(frozen, shards):
    both = Twins("llama-mqa", lambda m: freeze(m, FROZEN[frozen]), tp=2, sequence_parallel=shards)
    for step in range(2):
        both.backward(step)
        both.clip(0.3)
        both.step()
    both.check_weights()
    both.close()


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "shards"])
@pytest.mark.ranks(2)
def test_thawed_after_prepare(shards):
    """Gradients of copies and of partial sums are summed also where a layer was frozen before."""
    endings = ("norm.weight", "k_proj.weight", "o_proj.bias")
    both = Twins("llama-mqa", tp=2, sequence_parallel=shards)
    both.close()
    torch.manual_seed(0)
    both.model = MODELS["llama-mqa"]()
    freeze(both.model, endings)
    both.twin = copy.deepcopy(both.model)
    both.accelerator = Accelerator(
        strategy={"name": "megatron", "tp": 2, "sequence_parallel": shards}, cpu=True
    )
    both.other = torch.optim.SGD(both.twin.parameters(), lr=0.1)
    both.model, both.optimizer = both.accelerator.prepare(
        both.model, torch.optim.SGD(both.model.parameters(), lr=0.1)
    )
    for step in range(2):
        both.backward(step)
        both.clip(0.3)
        both.step()
        for model in (both.model, both.twin):
            model.requires_grad_(True)
    both.check_weights()
    both.close()
