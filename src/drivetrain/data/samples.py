"""Samples that the library reads for itself, beside the loader's own reading: nobody notices.

Generators, counters and lists of the dataset are afterwards as they were.
"""

import copy
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset


def collated(loader: DataLoader[Any], rows: list[Any]) -> Any:
    """Return rows of a dataset as the loader makes a batch of them, here and now.

    With batch_size=None they are handed to the dataset whole, or one alone.
    """
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        takes_lists = isinstance(loader.sampler, BatchSampler)
        return loader.collate_fn(dataset[rows if takes_lists else rows[0]])
    at_once = getattr(dataset, "__getitems__", None)
    found = [dataset[row] for row in rows] if at_once is None else at_once(rows)
    return loader.collate_fn(found)


@contextmanager
def without_trace(*objects: Any) -> Iterator[None]:
    """Context after which attributes of datasets and collations have their former values.

    A file that the dataset opens at its first row would else be open in all worker processes.
    """
    saved = [(vars(member), dict(vars(member))) for member in _members(objects)]
    try:
        for attributes, before in saved:
            attributes.update({name: _copied(value) for name, value in before.items()})
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)


def _members(objects: Sequence[Any]) -> Iterator[Any]:
    """Yield objects with attributes, and the datasets inside of datasets."""
    waiting, seen = [*objects], set[int]()
    while waiting:
        member = waiting.pop()
        if isinstance(member, MethodType):
            member = member.__self__
        if id(member) in seen or isinstance(member, type) or not hasattr(member, "__dict__"):
            continue
        seen.add(id(member))
        yield member
        for value in vars(member).values():
            parts = value if isinstance(value, list | tuple) else [value]
            if parts and isinstance(parts[0], Dataset):  # not millions of samples
                waiting += parts


def _copied(value: Any) -> Any:
    """Return a copy of a list, a dict or a generator, and other values themselves."""
    if type(value) in (list, dict, set, deque):
        return copy.copy(value)
    own = isinstance(value, torch.Generator | random.Random)
    numpys = type(value).__module__.startswith("numpy.random")
    return copy.deepcopy(value) if own or numpys else value
