"""Stands in for ``datasets``: sentences made of a few words, where scripts expect GLUE's MRPC."""

import csv
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORDS = [f"word{i}" for i in range(40)]
TRAIN, VALIDATION = 96, 41
"""Numbers of rows; the second one divides over no number of ranks."""


def _silent() -> None:
    return


_logging = SimpleNamespace(set_verbosity_warning=_silent, set_verbosity_error=_silent)
utils = SimpleNamespace(logging=_logging)


class Dataset:
    """Columns of equal length."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._columns = {name: list(values) for name, values in columns.items()}

    @classmethod
    def from_dict(cls, columns: Mapping[str, list[Any]]) -> "Dataset":
        return cls(columns)

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> "Dataset":
        return cls({name: [row[name] for row in rows] for name in rows[0]})

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    @property
    def num_rows(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, int):
            return {name: values[key] for name, values in self._columns.items()}
        rows = range(*key.indices(len(self))) if isinstance(key, slice) else key
        return {name: [values[row] for row in rows] for name, values in self._columns.items()}

    def __iter__(self) -> Iterable[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def select(self, rows: Iterable[int]) -> "Dataset":
        return Dataset(self[[int(row) for row in rows]])

    def unique(self, column: str) -> list[Any]:
        return list(dict.fromkeys(self._columns[column]))

    def rename_column(self, before: str, after: str) -> "Dataset":
        return Dataset({after if n == before else n: v for n, v in self._columns.items()})

    def filter(self, function: Callable[[Any], bool], input_columns: str) -> "Dataset":
        column = self._columns[input_columns]
        return self.select(row for row, value in enumerate(column) if function(value))

    def map(
        self,
        function: Callable[[Any], Mapping[str, list[Any]]],
        batched: bool = False,
        remove_columns: Iterable[str] = (),
        **options: Any,
    ) -> "Dataset":
        assert batched, "only batched=True is stood in for"
        made = dict(function(self._columns))
        dropped = set(remove_columns)
        kept = {name: values for name, values in self._columns.items() if name not in dropped}
        return Dataset(kept | made)


class IterableDataset:
    """A stream of rows, which no script here makes; Accelerate asks each dataset for it."""


class DatasetDict(dict[str, Dataset]):
    """Datasets by split; what is done is done to each."""

    def map(self, *args: Any, **options: Any) -> "DatasetDict":
        return DatasetDict({name: each.map(*args, **options) for name, each in self.items()})

    def filter(self, *args: Any, **options: Any) -> "DatasetDict":
        return DatasetDict({name: each.filter(*args, **options) for name, each in self.items()})

    def rename_column(self, *args: Any) -> "DatasetDict":
        return DatasetDict({name: each.rename_column(*args) for name, each in self.items()})


def load_dataset(
    name: str, config: str | None = None, data_files: Any = None, split: Any = None, **options: Any
) -> Any:
    """Return pairs of sentences for GLUE, a file's rows for ``csv``, else lines of text."""
    if name == "csv":
        splits = {key: _read(file) for key, file in data_files.items()}
    else:
        make = _pairs if name.endswith("glue") else _texts
        splits = {"train": make(TRAIN), "validation": make(VALIDATION), "test": make(VALIDATION)}
    return splits[split] if isinstance(split, str) else DatasetDict(splits)


def _read(file: str) -> Dataset:
    with Path(file).open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return Dataset({name: [row[name] for row in rows] for name in rows[0]})


def _pairs(count: int) -> Dataset:
    draw = random.Random(count)
    first = [_sentence(draw) for _ in range(count)]
    labels = [row % 2 for row in range(count)]
    second = [each if label else _sentence(draw) for each, label in zip(first, labels, strict=True)]
    return Dataset(
        {"sentence1": first, "sentence2": second, "label": labels, "idx": list(range(count))}
    )


def _texts(count: int) -> Dataset:
    draw = random.Random(count)
    lines = ["" if row % 8 == 0 else _sentence(draw) for row in range(6 * count)]
    return Dataset({"text": lines})


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))
