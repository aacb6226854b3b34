"""A rank that fails in a pipeline: the others end soon, and say where they were."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.errors import CollectiveError, ConfigError, UsageError
from huggingface_models import VOCABULARY, gpt2, logits_of, token_batch

TIMEOUT_S = 3600.0  # far beyond a test's own limit: a rank that waits for it fails its test


def loss_of(output, targets):
    return F.cross_entropy(logits_of(output).view(-1, VOCABULARY), targets.view(-1))


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["forward", "loss"])
@pytest.mark.ranks(4)
def test_an_exception_on_one_stage(place, kind):
    torch.manual_seed(0)
    model = gpt2(4)
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 4, "micro_batches": 4},
        config={"launch": {"timeout_s": TIMEOUT_S}},
        cpu=True,
    )
    model = accelerator.prepare(model)
    rank = accelerator.mesh["pp"].rank
    odd = rank == (2 if place == "forward" else 3)
    ids = token_batch(0, rows=4)
    failing = []

    def fail(*_):
        raise kind("sprung")

    def loss_or_fail(output, targets):
        return fail() if failing else loss_of(output, targets)

    accelerator.pipeline_step(model, ids, ids, loss_fn=loss_or_fail)
    if odd and place == "loss":
        failing.append(rank)

    if odd and place == "forward":
        model.transformer.h[2].mlp.register_forward_hook(fail)
    with pytest.raises(kind if odd else CollectiveError) as caught:
        accelerator.pipeline_step(model, ids, ids, loss_fn=loss_or_fail)
    if not odd:
        assert "stage" in str(caught.value)
        assert "micro-batch" in str(caught.value)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_calls_that_do_not_fit():
    torch.manual_seed(0)
    model = gpt2(2)
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2}, cpu=True)
    model = accelerator.prepare(model)
    ids = token_batch(0, rows=2)
    with pytest.raises(UsageError, match="expected a batch with rows"):
        model(ids[:0])
    output = model(input_ids=ids, labels=ids)
    with pytest.raises(UsageError, match="times numbers"):
        accelerator.backward(output.loss.square())
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_more_stages_than_blocks():
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2}, cpu=True)
    with pytest.raises(ConfigError, match="between 1 and 1 stages for a model of 1 blocks"):
        accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


KILLED = """
import os, signal, sys
import torch
from drivetrain import Accelerator
from drivetrain.errors import CollectiveError
from huggingface_models import gpt2, token_batch

torch.manual_seed(0)
accelerator = Accelerator(
    strategy={"name": "megatron", "pp": 4, "micro_batches": 4},
    config={"launch": {"timeout_s": 6}},
    cpu=True,
)
model = accelerator.prepare(gpt2(4))
ids = token_batch(0, rows=4)
accelerator.backward(model(input_ids=ids, labels=ids).loss)
if accelerator.process_index == 2:
    model.transformer.h[2].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
try:
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
except CollectiveError as error:
    print(error, flush=True)
    os._exit(3)
"""


@pytest.mark.exhaustive
def test_a_rank_that_is_killed(port):
    """No launcher stops the others: they end by themselves, and name what they waited for."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),  # pytest adds the folder of shared models
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [process.communicate()[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [3, 3, -9, 3]
    for rank in (0, 1, 3):
        for word in ("stage", "micro-batch"):
            assert word in said[rank], said[rank]
        assert "forward" in said[rank] or "gradient" in said[rank] or "input" in said[rank]
