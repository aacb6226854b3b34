"""Tensor parallelism of whole models: losses, gradients and steps equal those of one process."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from cases import case
from cell_twins import EXACT, Twins
from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError
from drivetrain_megatron import state
from huggingface_models import ARCHITECTURES, llama, logits_of, token_batch

pytestmark = pytest.mark.ranks(2)


def test_selective_recompute_sums_products_anew():
    """What recompute keeps of a layer is its product, not the sum over ranks that it became."""
    for name, options in (("llama-gqa", {"tp": 2}), ("gpt2", {"tp": 2, "sequence_parallel": True})):
        with case(name, options):
            torch.manual_seed(0)
            both = Twins(ARCHITECTURES[name](), **options)
            both.accelerator.recompute(both.model, mode="selective")
            both.backward(token_batch(0))
            both.check_gradients()


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_one_head_of_keys_for_four_ranks():
    sgd = partial(torch.optim.SGD, momentum=0.9)
    both = Twins(ARCHITECTURES["llama-mqa"](), optimizer=sgd, tp=4)
    both.train(token_batch(0), token_batch(1))


# --- evaluation over shares of layers and stages ---


TP, PP = {"tp": 2}, {"pp": 2}
CELLS = [("llama-gqa", TP, torch.no_grad), ("gpt2", PP, torch.inference_mode)]
MORE_CELLS = [
    ("gpt2", {**PP, "schedule": "zb-h1"}, torch.no_grad),
    ("bert", {**TP, "sequence_parallel": True}, torch.inference_mode),
    ("llama-gqa", {"data_parallel": {"name": "zero3"}}, torch.inference_mode),
]


@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE_CELLS, marks=pytest.mark.exhaustive)])
def test_evaluation_in_between(cells):
    for name, options, mode in cells:
        with case(name, options, mode):
            check(name, options, mode)


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_evaluation_over_shares_of_stages():
    check("llama-gqa", TP | PP, torch.inference_mode)


def check(name, options, mode):
    """With other rows; also between forward and backward, and between backward and step."""
    torch.manual_seed(0)
    both = Twins(ARCHITECTURES[name](2), **options)
    rank, replicas = both.accelerator.mesh["dp"].rank, both.accelerator.mesh["dp"].size

    def evaluate(rows):
        ids = token_batch(99, rows=rows)
        both.model.eval()
        with mode():
            found = logits_of(both.model(ids))
            # Users go on with what they get, in the mode or behind it.
            found = found.float() if not found.is_floating_point() else found + 0
        with torch.no_grad():
            torch.testing.assert_close(found.clone(), logits_of(both.twin.eval()(ids)), **EXACT)
        both.model.train()
        both.twin.train()

    evaluate(3)
    for step in range(2):
        batches = [token_batch(replicas * step + place, rows=4) for place in range(replicas)]
        loss = both.loss(both.model, batches[rank])
        evaluate(1)
        both.accelerator.backward(loss)
        torch.stack([both.loss(both.twin, ids) for ids in batches]).mean().backward()
        evaluate(5)
        if "data_parallel" not in options:
            both.check_gradients()
        both.step()
        evaluate(2)


# --- ranks of a cell that get different batches hear of it at once, all of them ---


IDS = token_batch(0)


def prepared():
    torch.manual_seed(0)
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    return accelerator, accelerator.prepare(llama())


def refused(match, model, *args, **options):
    with pytest.raises(RankMismatchError, match=match):
        model(*args, **options)


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
    accelerator, model = prepared()
    lengths = r"rank 0 has argument 0: \(2, 6\).*argument 0: \(2, 7\)"
    refused(lengths, model, IDS[:, : 6 + rank])
    more = {"use_cache": False} if rank else {}
    refused("rank 0 has nothing, and rank 1 has use_cache: False", model, IDS, **more)


@pytest.mark.ranks(4)
def test_replicas_may_differ():
    """Only the ranks of one cell share a batch; those that differ are named by their ranks."""
    accelerator, model = prepared()
    cell = accelerator.mesh["dp"].rank
    for step in range(2):
        accelerator.backward(model(token_batch(10 * step + cell)).logits.sum())
    accelerator, model = prepared()
    rank = accelerator.process_index
    match = r"rank [02] has argument 0.*rank [13] has arg"
    with pytest.raises(RankMismatchError, match=match) as found:
        model(token_batch(rank))
    assert f"ranks {2 * (rank // 2)}, {2 * (rank // 2) + 1}," in str(found.value)


def test_only_the_first_training_forwards_are_compared():
    accelerator, model = prepared()
    counts = []
    with patch.object(state, "differing", return_value=[]) as compared:
        for _ in range(4):
            accelerator.traffic.clear()
            model(IDS)
            entries = accelerator.traffic.entries().items()
            counts.append(sum(entry.calls for (axis, _), entry in entries if axis == "tp"))
    assert compared.call_count == 2 * state.FORWARDS  # along tp, and along pp
    assert counts[0] - 2 == counts[1] == counts[2] == counts[3]  # generators, and whether they drew
