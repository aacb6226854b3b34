"""fsdp inside of ``megatron``, on its axis ``dp``: models equal one process, saved and loaded.

The tests of megatron have fsdp among its inner strategies for steps, norms, cost and checkpoints;
here are windows, small units, ways of sharding, and pipelines of which a stage runs blocks only.
"""

import pytest
import torch
from torch import nn

from cell_twins import EXACT, loss_of
from drivetrain.testing.conformance.suite import Twins, adamw
from drivetrain.testing.models import Case
from huggingface_models import VOCABULARY, gpt2, llama, token_batch
from stacks import words
from zero_stages import start

FSDP = {"name": "fsdp", "unit_from": 1}
MODELS = {
    "llama": lambda: llama(kv_heads=2),
    "gpt2": gpt2,
    "blocks": lambda: words(VOCABULARY, 8, 6, act=nn.GELU).double(),
}


def twins_of(name, inner=FSDP, **options):
    """Return a model under megatron with fsdp inside, and its twin in one process."""
    case = Case(name, MODELS[name], lambda step, rank: token_batch(10 * step + rank), loss_of)
    strategy = {"name": "megatron", "data_parallel": dict(inner), **options}
    return Twins(start(strategy, gradient_accumulation_steps=2), case, adamw)


def train(twins, windows):
    """Train both for windows of two micro-batches, and compare norms and weights."""
    accelerator, case = twins.accelerator, twins.case
    for micro in range(2 * windows.start, 2 * windows.stop):
        with accelerator.accumulate(twins.model):
            accelerator.backward(case.loss(twins.model, case.batch(micro, twins.axis.rank)))
            twins.backward_twin(micro)
            if accelerator.sync_gradients:
                for parameter in twins.twin.parameters():
                    parameter.grad /= 2
                norm = accelerator.clip_grad_norm_(twins.model.parameters(), 0.5)
                expected = nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.5)
                torch.testing.assert_close(norm, expected, **EXACT)
                twins.twin_optimizer.step()
                twins.twin_optimizer.zero_grad()
            twins.optimizer.step()
            twins.optimizer.zero_grad()
    found = accelerator.get_state_dict(twins.model)
    torch.testing.assert_close(found, twins.twin.state_dict(), **EXACT)


@pytest.mark.ranks(4)
def test_windows_over_cells_and_pipelines():
    """Of a cell a rank holds a quarter of what layers divide: it gathers what tp has left it."""
    twins = twins_of("llama", tp=2)
    train(twins, range(2))
    strategy = twins.accelerator.strategy_of(twins.model)
    (inner,) = [s for s in vars(strategy).values() if type(s).__name__ == "Fsdp"]
    matrices = [s for s in inner.placement if "proj.weight" in s.name]
    whole = {n: p.numel() for n, p in twins.twin.named_parameters()}
    assert len(matrices) == 2 * 7
    assert all(s.owned_numel == whole[s.name] // 4 for s in matrices)
    assert not any(unit.live_bytes for unit in inner.placement.units)
    twins = twins_of("blocks", pp=2)
    train(twins, range(2))


@pytest.mark.exhaustive
@pytest.mark.ranks(8)
def test_hybrid_inside():
    """Of four data-parallel ranks pairs divide a cell's share, and replicate it once more."""
    twins = twins_of("blocks", {**FSDP, "sharding": "hybrid", "shard_size": 2}, tp=2)
    train(twins, range(1))
