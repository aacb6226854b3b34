"""fsdp inside of ``megatron``, on its axis ``dp``: models equal one process, saved and loaded.

The tests of megatron have fsdp among its inner strategies for steps, norms, cost and checkpoints;
here are windows, small units, ways of sharding, and pipelines of which a stage runs blocks only.
"""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Accelerator, communication
from huggingface_models import gpt2, llama, logits_of, token_batch
from word_models import PlainBlocks

EXACT = {"rtol": 1e-10, "atol": 1e-12}
FSDP = {"name": "fsdp", "unit_from": 1}


MODELS = {"llama": lambda: llama(kv_heads=2), "gpt2": gpt2}
INNER = {
    "full": FSDP,
    "grad": {**FSDP, "sharding": "grad"},
    "local": {**FSDP, "accumulate": "local"},
    "kept": {**FSDP, "reshard_after_forward": False},
}
WINDOW = 2


def blocks():
    return PlainBlocks().double()


def loss_of(model, ids):
    return F.cross_entropy(logits_of(model(ids)).flatten(0, 1), ids.flatten())


class Twins:
    """A model under megatron with fsdp inside, and its twin in one process."""

    def __init__(self, name, inner, **options):
        torch.manual_seed(0)
        built = MODELS.get(name, blocks)()
        self.twin = copy.deepcopy(built)
        strategy = {"name": "megatron", "data_parallel": dict(inner), **options}
        self.accelerator = Accelerator(
            strategy=strategy, cpu=True, gradient_accumulation_steps=WINDOW
        )
        self.other = self._optimizer(self.twin)
        self.model, self.optimizer = self.accelerator.prepare(built, self._optimizer(built))

    @staticmethod
    def _optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(self, number):
        """Run a window on both, and compare its losses and its norm."""
        axis, compared = self.accelerator.mesh["dp"], []
        for i in range(WINDOW):
            seed = 100 * number + 10 * i
            losses = [loss_of(self.twin, token_batch(seed + rank)) for rank in range(axis.size)]
            (sum(losses) / (WINDOW * axis.size)).backward()
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, token_batch(seed + axis.rank))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    expected = nn.utils.clip_grad_norm_(self.twin.parameters(), 0.5)
                    torch.testing.assert_close(norm, expected, **EXACT)
                self.optimizer.step()
                self.optimizer.zero_grad()
            compared.append((loss, losses[axis.rank]))
        for loss, expected in compared:  # a pipeline knows its losses when the window is over
            assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
        self.other.step()
        self.other.zero_grad()

    def check(self):
        found = self.accelerator.get_state_dict(self.model)
        for name, tensor in self.twin.state_dict().items():
            torch.testing.assert_close(
                found[name], tensor, **EXACT, msg=lambda m, name=name: f"{name} {m}"
            )

    def close(self):
        self.accelerator.free_memory()


@pytest.mark.parametrize("inner", list(INNER.values()), ids=list(INNER))
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.ranks(4)
def test_window_over_tensor_parallel_cells(name, inner):
    both = Twins(name, inner, tp=2)
    for number in range(2):
        both.step(number)
    both.check()
    both.close()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.ranks(4)
def test_window_over_pipelines(name):
    both = Twins(name, FSDP, pp=2)
    for number in range(2):
        both.step(number)
    both.check()
    both.close()


@pytest.mark.ranks(4)
def test_parameters_are_divided_twice():
    """A rank holds a quarter of what layers divide, and gathers over dp what tp has left it."""
    both = Twins("llama", FSDP, tp=2)
    both.step(0)
    strategy = both.accelerator.strategy_of(both.model)
    (inner,) = [s for s in vars(strategy).values() if type(s).__name__ == "Fsdp"]
    matrices = [s for s in inner.placement if "proj.weight" in s.name]
    whole = {n: p.numel() for n, p in both.twin.named_parameters()}
    assert len(matrices) == 2 * 7
    assert all(s.owned_numel == whole[s.name] // 4 for s in matrices)
    assert not any(unit.live_bytes for unit in inner.placement.units)
    both.close()


@pytest.mark.ranks(8)
def test_hybrid_inside():
    """Of four data-parallel ranks pairs divide a cell's share, and replicate it once more."""
    both = Twins("blocks", {**FSDP, "sharding": "hybrid", "shard_size": 2}, tp=2)
    both.step(0)
    both.step(1)
    both.check()
    both.close()


@pytest.mark.ranks(4)
def test_checkpoint_to_fsdp_alone_and_back(tmp_path):
    """Moments and weights come back bit for bit."""
    folder = Path(communication.broadcast_object_list([str(tmp_path)])[0])
    both = Twins("gpt2", FSDP, tp=2)
    both.step(0)
    both.accelerator.save_state(folder / "nested")
    expected = both.accelerator.get_state_dict(both.model)
    both.close()
    alone = Accelerator(strategy=dict(FSDP), cpu=True)
    torch.manual_seed(1)
    built = MODELS["gpt2"]()
    model, _ = alone.prepare(built, Twins._optimizer(built))
    alone.load_state(folder / "nested")
    for name, tensor in alone.get_state_dict(model).items():
        assert torch.equal(tensor, expected[name]), name
    alone.save_state(folder / "alone")
    alone.free_memory()
    again = Twins("gpt2", FSDP, tp=2)
    again.twin, again.other = both.twin, both.other
    again.accelerator.load_state(folder / "alone")
    again.step(1)
    again.check()
    again.close()
