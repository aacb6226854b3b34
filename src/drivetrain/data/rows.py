"""Rows of a rank's batch: the first ones are of samples, the others only repeat samples.

Samples repeat where the last batches of an epoch are filled up. A collate function may make more or
fewer rows than samples, so rows are counted in the batch itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from drivetrain.errors import UsageError
from drivetrain.nested import recursively_apply


class Rows(NamedTuple):
    """The rows of a rank's batch.

    Attributes:
        whole: all of them.
        real: the first so many do not repeat samples of the epoch.
    """

    whole: int
    real: int

    def kept(self, data: Any, *, objects: bool) -> Any:
        """Return what was made of the batch without what was made of its repetitions.

        Args:
            data: tensors or objects in containers, with one or several rows for each of the batch;
                what has no rows is left out where the whole batch repeats samples.
            objects: whether lists may hold rows; else they hold tensors with rows.

        Raises:
            UsageError: the rows cannot be told apart.
        """
        if self.real == self.whole:
            return data

        def has_rows(item: Any) -> bool:
            return _is_array(item) or (objects and _is_list_of_rows(item, self.whole))

        return recursively_apply(self._first, data, test_type=has_rows)

    def _first(self, data: Any) -> Any:
        if not isinstance(data, list | tuple) and not data.shape:
            return data.reshape(1)[:0] if not self.real else data
        count = len(data)
        if count == 1 != self.whole:  # one value of this rank
            return data if self.real else data[:0]
        if count % self.whole and self.real:
            raise UsageError(
                f"expected as many rows as the batch at hand has, {self.whole}, or a multiple, "
                f"found {count}: the last {self.whole - self.real} rows of this batch only repeat "
                "samples, and nothing tells which of yours belong to them; pass values of all "
                "rows, or take gather() or pad_across_processes() for what has no rows"
            )
        return data[: count // self.whole * self.real]


class RowCount:
    """Counts the rows of the batches of one rank in one epoch."""

    def __init__(self) -> None:
        self._alike = True

    def of(self, batch: Any, samples: int, real: int, again: Callable[[int], Any]) -> Rows:
        """Return the rows of the next batch.

        Args:
            batch: as the script gets it.
            samples: how many the batch was made of.
            real: the first so many of them are no repetitions.
            again: makes a batch of the first so many samples; called where a batch repeats samples,
                and rows are not samples.
        """
        whole = count_rows(batch, samples)
        self._alike = self._alike and whole == samples
        if real in (0, samples):
            return Rows(whole, whole if real else 0)
        return Rows(whole, real if self._alike else min(whole, count_rows(again(real), real)))


def count_rows(batch: Any, samples: int = 0, *, otherwise: int = 1) -> int:
    """Return the rows of a batch: of its first tensor or list with any.

    Args:
        batch: tensors and lists in containers.
        samples: a list with so many items is a list of samples, unless its items have as many rows.
        otherwise: where there are none.
    """
    found = _rows_of(batch)
    if isinstance(batch, list) and len(batch) == samples != found:
        return samples
    return otherwise if found is None else found


def _rows_of(data: Any) -> int | None:
    if _is_array(data):
        return int(data.shape[0]) if data.shape else None
    if isinstance(data, Mapping):
        data = tuple(data.values())
    elif hasattr(data, "__dataclass_fields__"):
        data = tuple(getattr(data, name) for name in data.__dataclass_fields__)
    if not isinstance(data, list | tuple):
        return None
    found = next((rows for rows in map(_rows_of, data) if rows is not None), None)
    return len(data) if found is None and isinstance(data, list) else found


def _is_array(data: Any) -> bool:
    """Whether something is a tensor, or an array of another library."""
    return isinstance(getattr(data, "shape", None), tuple)


def _is_list_of_rows(data: Any, whole: int) -> bool:
    """Whether a list holds one item for each row, and not parts that have rows each."""
    if not isinstance(data, list | tuple) or hasattr(data, "_fields") or not data:
        return False
    if all(isinstance(item, Mapping) for item in data):
        return len(data) % whole == 0
    return not all(_rows_of(item) == whole for item in data)
