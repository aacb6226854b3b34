"""Loaders: several at a time, looks at a batch, rows of any number, streams in parts.

Ranks divide the batches of one process, so that a step is the same on both.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import DataLoaderConfiguration
from way_kit import LENGTH, WORDS, Loop


def _words(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


class _Training:
    """A training with windows of three batches, and one more loader."""

    def __init__(self, loop: Loop, others: int = 16) -> None:
        divided = DataLoaderConfiguration(split_batches=True)
        loop.begin(dataloader_config=divided, gradient_accumulation_steps=3)
        self.loop = loop
        self.model, self.optimizer = loop.ready()
        loaders = [DataLoader(_words(rows, rows), batch_size=8) for rows in (56, others)]
        self.train, self.other = loop.prepare(*loaders)
        self.trained = 0

    def step(self, batch: Tensor) -> None:
        """Train a batch; the seventh ends a window, as the loader ends there."""
        loop, place = self.loop, self.trained % 7
        self.trained += 1
        with loop.accumulate(self.model):
            share = 1 if not loop.alone else 1 / 3 if place < 6 else 1
            loop.backward(loop.loss(self.model, batch) * share)
            if not loop.alone or place in (2, 5, 6):
                self.optimizer.step()
                self.optimizer.zero_grad()

    def looks(self) -> bool:
        """Whether this process takes looks at batches by itself."""
        return self.loop.alone or self.loop.accelerator.is_main_process

    def ends(self) -> None:
        self.loop.weights(self.model)


def a_loader_is_zipped_with_a_longer_one(loop: Loop) -> None:
    training = _Training(loop, others=80)
    for _ in range(2):
        for batch, _ in zip(training.train, training.other, strict=False):
            training.step(batch)
    training.ends()


def rank_0_alone_looks_at_batches(loop: Loop) -> None:
    """As rectified-flow's Trainer learns the shape of its data at each save."""
    training = _Training(loop)
    for _ in range(2):
        if training.looks():
            next(iter(training.train))
        for batch in training.train:
            if training.looks():
                next(iter(training.train))
            training.step(batch)
            if training.looks():
                next(iter(training.other))
    training.ends()


def each_step_draws_by_next_iter(loop: Loop) -> None:
    """All draws of a loader that is not shuffled are its first batch."""
    training = _Training(loop)
    for step in range(3):
        with loop.accumulate(training.model):
            batch = next(iter(training.train))
            loop.backward(loop.loss(training.model, batch) / (3 if loop.alone else 1))
            if not loop.alone or step == 2:
                training.optimizer.step()
    training.ends()


def a_stream_divides_itself_by_rank(loop: Loop) -> None:
    def numbers() -> Iterable[float]:
        first, step = (0, 1) if loop.alone else _place(loop)
        return (float(number) for number in range(first, 23, step))

    _sum_of_metrics(loop, DataLoader(_Stream(numbers), batch_size=2))


def a_stream_has_another_order_on_each_rank(loop: Loop) -> None:
    def numbers() -> Iterable[float]:
        generator = torch.Generator()
        generator.seed()
        return torch.randperm(23, generator=generator).double().tolist()

    _sum_of_metrics(loop, DataLoader(_Stream(numbers), batch_size=2))


def _place(loop: Loop) -> tuple[int, int]:
    return loop.accelerator.process_index, loop.accelerator.num_processes


def _sum_of_metrics(loop: Loop, loader: DataLoader[Any]) -> None:
    """Note count and sum of squares of what an evaluation gathers: each row is there once."""
    gathered = []
    for batch in loop.prepare(loader):
        made = torch.as_tensor(batch) * 1.0
        gathered.append(made if loop.alone else loop.accelerator.gather_for_metrics(made))
    found = torch.cat(gathered).double()
    loop.note("count", float(len(found)))
    loop.note("squares", found.square().sum())


class _Stream(IterableDataset[float]):
    """Samples of a function."""

    def __init__(self, numbers: Callable[[], Iterable[float]]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[float]:
        return iter(self.numbers())
