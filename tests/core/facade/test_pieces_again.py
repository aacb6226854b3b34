"""A batch that runs out of memory on one rank: all ranks take it again, in smaller pieces."""

import copy
import weakref

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.testing.models import WIDTH
from stacks import Tower

ROWS = 9
ERRORS = (
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2 GiB"),
    (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    (MemoryError, ""),
)


class Shortage(nn.Module):
    """Computes what its module does; more rows than fit are an allocator's error.

    Args:
        inner: the module.
        ranks: those with too little memory.
        where: ``forward`` or ``backward``.
    """

    def __init__(self, inner, ranks=(1,), where="forward"):
        super().__init__()
        self.inner, self.where, self.ranks = inner, where, ranks
        self.fits, self.rank, self.errors = 10**6, 0, 0
        self.taken, self.held = [], []

    def forward(self, x):
        assert all(each() is None for each in self.held)  # of the pieces before
        self.taken.append(len(x))
        middle = self.inner.body(self.inner.first(x))
        self.held = [weakref.ref(middle)]
        if len(x) > self.fits and self.rank in self.ranks:
            if self.where == "forward":
                self._fail()
            middle.register_hook(self._fail)
        return self.inner.last(middle)

    def _fail(self, *_):
        self.errors += 1
        kind, text = ERRORS[self.errors % len(ERRORS)]
        raise kind(text)


def rows_of(batch, rank):
    generator = torch.Generator().manual_seed(10 * batch + rank)
    return torch.randn(ROWS + rank, WIDTH, generator=generator, dtype=torch.float64)


def prepared(strategy, option="auto", *, model=None, windows=2, **options):
    accelerator = Accelerator(
        strategy=strategy,
        cpu=True,
        gradient_accumulation_steps=windows,
        config={"micro_batch": option},
        **options,
    )
    model.rank = accelerator.process_index
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator, *accelerator.prepare(model, sgd)


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("ddp", "forward"),
        ("ddp", "backward"),
        ("zero1", "backward"),
        ("zero2", "forward"),
        ("zero2", "backward"),
        ({"name": "zero2", "accumulate": "local"}, "forward"),
        ("plain", "forward"),
    ],
    ids=str,
)
@pytest.mark.ranks(2)
def test_a_step_is_that_of_whole_batches_though_one_rank_runs_out_of_memory(strategy, where):
    """In the second batch of a window, whose first left gradients, and in the first of the next."""
    alone = Tower()
    model = Shortage(copy.deepcopy(alone), where=where)
    accelerator, model, optimizer = prepared(strategy, model=model)
    ours = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    window = []
    for batch, fits in enumerate((ROWS + 1, 3, 2, 2)):
        model.fits = fits
        mine = rows_of(batch, accelerator.process_index)
        expected = alone(mine).square().mean()
        loss = accelerator.backward_in_pieces(mine, lambda part: model(part).square().mean())
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        window += [rows_of(batch, rank) for rank in range(2)]
        if batch % 2:
            alone(torch.cat(window)).square().mean().backward()
            ours.step()
            ours.zero_grad()
            window = []
        optimizer.step()
        optimizer.zero_grad()
    assert model.errors == (2 if accelerator.process_index else 0)
    found = accelerator.get_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[f"inner.{name}"], value, rtol=1e-12, atol=1e-12)
    accelerator.free_memory()
