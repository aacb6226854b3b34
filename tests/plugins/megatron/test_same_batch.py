"""Ranks of a cell that get different batches hear of it at once, all of them."""

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError
from huggingface_models import llama, token_batch


def prepared(**options):
    torch.manual_seed(0)
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    return accelerator, accelerator.prepare(llama())


@pytest.mark.ranks(2)
def test_different_tokens():
    """The same rows in another order differ, too."""
    accelerator, model = prepared(tp=2)
    rank = accelerator.process_index
    ids = token_batch(0)
    with pytest.raises(
        RankMismatchError,
        match=r"ranks 0, 1,.*same batch, found that rank 0 has input_ids: \(2, 7\) torch.int64 "
        r"with digest \w+, and rank 1 has input_ids: .*mesh\['dp'\].rank",
    ):
        model(input_ids=ids.flip(0) if rank else ids)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_what_differs_is_named():
    accelerator, model = prepared(tp=2)
    rank = accelerator.process_index
    ids = token_batch(0)
    mask = torch.ones_like(ids)
    mask[0, rank] = 0
    with pytest.raises(RankMismatchError, match=r"rank 0 has attention_mask: \(2, 7\)"):
        model(ids, attention_mask=mask)
    with pytest.raises(
        RankMismatchError, match=r"rank 0 has argument 0: \(2, 6\).*argument 0: \(2, 7\)"
    ):
        model(ids[:, : 6 + rank])
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_one_rank_has_more_arguments():
    accelerator, model = prepared(tp=2)
    ids = token_batch(0)
    more = {"use_cache": False} if accelerator.process_index else {}
    with pytest.raises(
        RankMismatchError, match=r"rank 0 has nothing, and rank 1 has use_cache: False"
    ):
        model(ids, **more)
    accelerator.free_memory()


@pytest.mark.ranks(4)
def test_replicas_may_differ():
    """Only the ranks of one cell share a batch; those that differ are named by their ranks."""
    accelerator, model = prepared(tp=2)
    cell = accelerator.mesh["dp"].rank
    for step in range(2):
        accelerator.backward(model(token_batch(10 * step + cell)).logits.sum())
    accelerator.free_memory()
    accelerator, model = prepared(tp=2)
    rank = accelerator.process_index
    with pytest.raises(
        RankMismatchError, match=r"rank [02] has argument 0.*rank [13] has arg"
    ) as found:
        model(token_batch(rank))
    assert f"ranks {2 * (rank // 2)}, {2 * (rank // 2) + 1}," in str(found.value)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_only_the_first_training_forwards_are_compared():
    accelerator, model = prepared(tp=2)

    def sent():
        return sum(
            entry.calls
            for (axis, _), entry in accelerator.traffic.entries().items()
            if axis == "tp"
        )

    counts = []
    for _ in range(4):
        before = sent()
        model(token_batch(0))
        counts.append(sent() - before)
    assert counts[0] - 1 == counts[1] == counts[2] + 1  # the first shares random generators
    assert counts[2] == counts[3]
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_evaluation_is_not_compared():
    """A script may generate with what it likes, as long as ranks do it together."""
    accelerator, model = prepared(tp=2)
    model.eval()
    with torch.no_grad():
        model(token_batch(0))
    model.train()
    with pytest.raises(RankMismatchError):
        model(token_batch(accelerator.process_index))
    accelerator.free_memory()
