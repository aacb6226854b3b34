"""Models of Hugging Face train as in one process, generate, and checkpoint by their own method."""

import copy

import pytest
import torch
import torch.nn.functional as F

from drivetrain import Accelerator
from huggingface_models import (
    FEEDFORWARD,
    HEADS,
    VOCABULARY,
    WIDTH,
    bert,
    gpt2,
    llama,
    logits_of,
    token_batch,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def t5():
    """Return a T5 in fp64: encoder and decoder of two blocks, one table of words for all three."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=FEEDFORWARD,
        num_layers=2,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).double()


MODELS = {
    "llama": (llama, "LlamaDecoderLayer"),
    "llama-tied": (lambda: llama(tied=True), "LlamaDecoderLayer, Embedding"),
    "gpt2": (gpt2, "GPT2Block"),
    "bert": (bert, "BertLayer"),
    "t5": (t5, "T5Block"),
}


class Twins:
    """A model under fsdp and its twin in one process; both by momentum."""

    def __init__(self, name, *, units="auto", change=lambda model: None, **options):
        make, layer = MODELS[name]
        torch.manual_seed(0)
        built = make()
        self.twin = copy.deepcopy(built)
        change(built)
        self.kind = name
        chosen = {"unit_from": 1} if units == "auto" else {"units": "class", "unit_classes": layer}
        self.accelerator = Accelerator(strategy={"name": "fsdp", **chosen, **options}, cpu=True)
        self.other = self._optimizer(self.twin)
        self.model, self.optimizer = self.accelerator.prepare(built, self._optimizer(built))

    @staticmethod
    def _optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model, seed):
        ids = token_batch(seed)
        inputs = {"input_ids": ids, "labels": token_batch(seed + 500)}
        if self.kind != "t5":
            inputs["labels"] = ids
        logits = logits_of(model(**inputs))
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    def step(self, number):
        axis = self.accelerator.mesh["dp"]
        loss = self.loss(self.model, 10 * number + axis.rank)
        self.accelerator.backward(loss)
        losses = [self.loss(self.twin, 10 * number + rank) for rank in range(axis.size)]
        (sum(losses) / axis.size).backward()
        torch.testing.assert_close(loss, losses[axis.rank], **EXACT)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.7)
        expected = torch.nn.utils.clip_grad_norm_(self.twin.parameters(), 0.7)
        torch.testing.assert_close(norm, expected, **EXACT)
        for optimizer in (self.optimizer, self.other):
            optimizer.step()
            optimizer.zero_grad()

    def check(self):
        found = self.accelerator.get_state_dict(self.model)
        for name, tensor in self.twin.state_dict().items():
            torch.testing.assert_close(
                found[name], tensor, **EXACT, msg=lambda m, name=name: f"{name} {m}"
            )

    @property
    def units(self):
        return [u.layout.key for u in self.accelerator.strategy_of(self.model).placement.units]

    def sent(self, operation):
        entry = self.accelerator.traffic.entries().get(("dp", operation))
        return entry.calls if entry else 0

    def close(self):
        self.accelerator.free_memory()


@pytest.mark.parametrize("units", ["auto", "class"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.ranks(2)
def test_trains_as_in_one_process(name, units):
    both = Twins(name, units=units)
    blocks = [key for key in both.units if key.rpartition(".")[2].isdecimal()]
    assert len(blocks) == (4 if name == "t5" else 2)
    for step in range(3):
        both.step(step)
    both.check()
    both.close()


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.ranks(2)
def test_generates(name, cache):
    """All ranks together, in the middle of training; tokens are those of one process."""
    both = Twins(name)
    both.step(0)
    ids = token_batch(3)[:, :4]
    how = {"max_new_tokens": 5, "do_sample": False, "use_cache": cache, "pad_token_id": 0}
    with both.accelerator.inference(both.model) as inner:
        found = inner.generate(ids, **how)
    assert torch.equal(found, both.twin.generate(ids, **how))
    both.step(1)
    both.check()
    both.close()


def checkpointed(model, *, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sharding", ["full", "grad"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.ranks(2)
def test_checkpoints_by_its_own_method(name, sharding, reentrant):
    """Recomputed blocks are gathered as often as others: their recomputation begins backward."""
    gathers, calls = [], []
    for change in (lambda model: None, lambda model: checkpointed(model, reentrant=reentrant)):
        both = Twins(name, change=change, sharding=sharding)
        for module in both.model.modules():
            if type(module).__name__.endswith(("Attention", "MLP", "DenseActDense")):
                module.register_forward_pre_hook(lambda *_: calls.append(len(gathers)))
        both.step(0)
        both.step(1)
        before = both.sent("all_gather")
        both.step(2)
        gathers.append(both.sent("all_gather") - before)
        both.check()
        both.close()
    assert calls.count(1) == 2 * calls.count(0)
    assert gathers[1] == gathers[0]
