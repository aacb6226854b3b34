"""The first rows of loaders: read as the loader would, alike on all ranks, without a trace."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Accelerator
from drivetrain.data.examples import ExampleBatches, first_rows
from drivetrain.runtime import rng
from drivetrain.testing.conformance.suite import everyone

ROWS = torch.arange(12.0).view(6, 2)


class Restless(Dataset):
    """Draws, counts, and opens a file at its first row."""

    def __init__(self, inner=None):
        self.generator = torch.Generator().manual_seed(3)
        self.numpys = np.random.default_rng(3)
        self.file, self.read, self.cache = None, [], {}
        self.inner = inner

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.file = object()
        self.read.append(index)
        self.cache[index] = True
        drawn = torch.rand(1, generator=self.generator).item() + self.numpys.random()
        drawn += torch.rand(1).item() + random.random() + np.random.random()
        return torch.tensor([drawn]) if self.inner is None else self.inner[index]


def state_of(dataset):
    drawn = dataset.generator.get_state().tolist(), dataset.numpys.bit_generator.state
    return drawn, dataset.file, list(dataset.read), dict(dataset.cache)


class AtOnce(Dataset):
    def __len__(self):
        return 6

    def __getitems__(self, indices):
        return [ROWS[index] for index in indices]


def test_two_rows_through_the_collation():
    def collated(rows):
        return {"x": torch.stack([row[0] for row in rows]) + 1}

    found = first_rows(DataLoader(TensorDataset(ROWS), 4, collate_fn=collated, shuffle=True))
    assert found.origin == "rows 0 and 1 of TensorDataset"
    assert torch.equal(found.batch["x"], ROWS[:2] + 1)
    assert torch.equal(first_rows(DataLoader(AtOnce(), 4)).batch, ROWS[:2])


def test_one_row_where_two_do_not_go_together_or_items_are_batches():
    lengths = [torch.zeros(n) for n in (3, 4, 5)]
    found = first_rows(DataLoader(lengths, 1))
    assert (found.origin, tuple(found.batch.shape)) == ("row 0 of list", (1, 3))
    assert first_rows(DataLoader(ROWS, batch_size=None)).batch.tolist() == [0, 1]
    sampler = BatchSampler(range(6), 3, False)
    found = first_rows(DataLoader(ROWS, sampler=sampler, batch_size=None)).batch
    assert torch.equal(found, ROWS[:2])


def test_rows_of_a_rank_are_those_of_the_latest_loader_that_says():
    by_batches = DataLoader(ROWS, batch_sampler=BatchSampler(range(6), 4, False))
    for split, rows in ((False, 4), (True, 2)):
        examples = ExampleBatches(split=split, loaders=[DataLoader(ROWS, 3)])
        examples.add([DataLoader(ROWS, batch_size=None), by_batches])
        assert examples.rows(2) == rows
    assert ExampleBatches().rows(2) == 0


def test_reading_leaves_no_trace():
    inner = Restless()
    dataset = Restless(inner)
    loader = DataLoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(9))
    before = [state_of(dataset), state_of(inner), loader.generator.get_state().tolist()]
    states = rng.capture()
    first = first_rows(loader).batch
    after = rng.capture()
    assert all(torch.equal(states[key], after[key]) for key in states)
    assert [state_of(dataset), state_of(inner), loader.generator.get_state().tolist()] == before
    assert torch.equal(first_rows(loader).batch, first)


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("the stream was read")


class Broken(list):
    def __getitem__(self, index):
        raise OSError(f"no file for row {index}")


def test_a_dataset_without_rows_is_a_problem_and_no_error():
    for dataset, problem in (
        (Stream(), "an IterableDataset is not read ahead"),
        (Broken("abc"), "OSError: no file for row 0"),
    ):
        found = first_rows(DataLoader(dataset, 2))
        assert (found.batch, found.problem) == (None, problem)


@pytest.mark.ranks(2)
def test_every_rank_has_the_batches_of_rank_0():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    loaders = [
        DataLoader([torch.full((rank + 1,), float(rank))] * 4, 2),
        DataLoader([lambda: 0] * 4, 2, collate_fn=lambda rows: rows),
    ]
    # Another rank may know fewer loaders.
    accelerator._preparation.show(loaders if accelerator.is_main_process else [])
    good, bad = accelerator.run.examples.read()
    assert torch.equal(good.batch, torch.zeros(2, 1))
    assert "pickle" in bad.problem
    assert len(set(everyone((good.origin, bad.origin, bad.problem)))) == 1
    accelerator.free_memory()
    assert accelerator.run.examples.read() == []
