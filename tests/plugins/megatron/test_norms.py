"""The norm of gradients that ranks hold in parts, in copies and whole; frozen and missing ones."""

import pytest
import torch

from cases import case
from cell_twins import Twins
from drivetrain.testing.conformance.suite import everyone
from huggingface_models import VOCABULARY, gpt2, llama, token_batch
from stacks import words

pytestmark = pytest.mark.ranks(2)

CELLS = [
    ({"tp": 2, "data_parallel": {"name": "zero1"}, "sequence_parallel": True}, 2.0),
    ({"tp": 2, "pp": 2}, float("inf")),
    ({"pp": 2, "data_parallel": {"name": "zero2"}}, 3.0),
]


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_norm_of_cells():
    """A tied weight, parts, copies and replicas: one norm, that of one process, on every rank."""
    for options, p in CELLS:
        torch.manual_seed(0)
        both = Twins(gpt2(2), **options)
        replicas = both.accelerator.mesh["dp"].size
        for step in range(2):
            with case(options, step):
                both.backward(*(token_batch(2 * step + i) for i in range(replicas)))
                norm = both.clip(0.05 if p == 2 else 0.01, p)
                assert norm > 0.01
                assert len(set(everyone(norm.item()))) == 1
                both.step()
        both.check_weights()


def test_subset():
    """Only what is given is counted and scaled."""
    for inner in ("ddp", "zero1"):
        torch.manual_seed(0)
        both = Twins(llama(kv_heads=1), tp=2, data_parallel={"name": inner})
        for ending in ("k_proj.weight", "layernorm.weight"):
            names = {n for n, _ in both.model.named_parameters() if n.endswith(ending)}
            assert names
            with case(inner, ending):
                both.backward(token_batch(0))
                both.clip(0.001, names=names)
                both.clip(float("inf"))
                both.step()
        both.check_weights()


def test_gradients_that_are_none():
    both = Twins(words(VOCABULARY, 8, 6, blocks=3, act=torch.nn.GELU).double(), tp=2)
    for used in (2, 1, 3):
        both.model.order = both.twin.order = tuple(range(used))
        both.backward(token_batch(used))
        missing = {n for n, v in both.model.named_parameters() if v.grad is None}
        assert missing == {n for n, v in both.twin.named_parameters() if v.grad is None}
        both.clip(0.1)
        if missing:
            both.clip(0.1, names=missing)
        both.step()
    both.check_weights()


FROZEN = {
    "weights of columns": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight"),
    "all but norms": ("proj.weight", "proj.bias", "embed_tokens.weight", "lm_head.weight"),
    "sums and copies": ("norm.weight", "k_proj.weight", "k_proj.bias", "o_proj.bias"),
}


def test_frozen_and_thawed_after_prepare():
    """Gradients of copies and of partial sums are summed also where a layer was frozen before."""
    for frozen, shards, thawed in (
        ("weights of columns", False, False),
        ("all but norms", True, True),
        ("sums and copies", False, True),
        ("sums and copies", True, False),
    ):
        torch.manual_seed(0)
        model = llama(kv_heads=1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(FROZEN[frozen]))
        trained = list if thawed else lambda parameters: [p for p in parameters if p.requires_grad]
        both = Twins(model, trained=trained, tp=2, sequence_parallel=shards)
        for step in range(2):
            with case(frozen, shards, thawed, step):
                both.backward(token_batch(step))
                both.clip(0.3)
                both.step()
            if thawed:
                both.model.requires_grad_(True)
                both.twin.requires_grad_(True)
        both.check_weights()
