"""Ranks of a cell that get different batches hear of it at once, all of them."""

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError
from huggingface_models import llama, token_batch

IDS = token_batch(0)


def prepared():
    torch.manual_seed(0)
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    return accelerator, accelerator.prepare(llama())


def refused(match, model, *args, **options):
    with pytest.raises(RankMismatchError, match=match):
        model(*args, **options)


@pytest.mark.ranks(2)
def test_what_differs_is_named():
    """The same rows in another order differ, too, also in an evaluation."""
    accelerator, model = prepared()
    rank = accelerator.process_index
    mask = torch.ones_like(IDS)
    mask[0, rank] = 0
    tokens = (
        r"ranks 0, 1,.*same batch, found that rank 0 has input_ids: \(2, 7\) torch.int64 "
        r"with digest \w+, and rank 1 has input_ids: .*mesh\['dp'\].rank"
    )
    with torch.no_grad():
        refused(r"rank 0 has argument 0: \(2, 7\)", model.eval(), token_batch(rank))
    model.train()
    refused(tokens, model, input_ids=IDS.flip(0) if rank else IDS)
    refused(r"rank 0 has attention_mask: \(2, 7\)", model, IDS, attention_mask=mask)
    accelerator.free_memory()
    accelerator, model = prepared()
    lengths = r"rank 0 has argument 0: \(2, 6\).*argument 0: \(2, 7\)"
    refused(lengths, model, IDS[:, : 6 + rank])
    more = {"use_cache": False} if rank else {}
    refused("rank 0 has nothing, and rank 1 has use_cache: False", model, IDS, **more)
    accelerator.free_memory()


@pytest.mark.ranks(4)
def test_replicas_may_differ():
    """Only the ranks of one cell share a batch; those that differ are named by their ranks."""
    accelerator, model = prepared()
    cell = accelerator.mesh["dp"].rank
    for step in range(2):
        accelerator.backward(model(token_batch(10 * step + cell)).logits.sum())
    accelerator.free_memory()
    accelerator, model = prepared()
    rank = accelerator.process_index
    match = r"rank [02] has argument 0.*rank [13] has arg"
    with pytest.raises(RankMismatchError, match=match) as found:
        model(token_batch(rank))
    assert f"ranks {2 * (rank // 2)}, {2 * (rank // 2) + 1}," in str(found.value)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_only_the_first_training_forwards_are_compared():
    accelerator, model = prepared()
    counts = []
    for _ in range(4):
        accelerator.traffic.clear()
        model(IDS)
        entries = accelerator.traffic.entries().items()
        counts.append(sum(entry.calls for (axis, _), entry in entries if axis == "tp"))
    assert counts[0] - 1 == counts[1] == counts[2] + 1  # the first shares random generators
    assert counts[2] == counts[3]
    accelerator.free_memory()
