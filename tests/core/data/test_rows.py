"""Rows of a batch: counted whatever a collate function makes, and kept where they are real."""

import numpy as np
import pytest
import torch

from drivetrain.data.sources import RowCount, Rows, count_rows
from drivetrain.errors import UsageError


def test_rows_are_counted_in_tensors_lists_and_containers():
    x = torch.zeros(4, 2)
    for batch, samples, rows in (
        (x, 4, 4),
        ({"n": torch.tensor(1), "x": x}, 2, 4),
        ({"words": ["a", "b", "c"]}, 3, 3),
        ([x, torch.zeros(4)], 4, 4),
        ([torch.zeros(5), torch.zeros(3)], 2, 2),
        ([torch.zeros(2), torch.zeros(2)], 2, 2),
        (["a", "b"], 2, 2),
        (torch.tensor(1), 1, 1),
        (np.zeros((3, 1)), 3, 3),
    ):
        assert count_rows(batch, samples) == rows, batch


def test_rows_of_repeated_samples_are_told_by_collating_the_others_where_rows_are_not_samples():
    called = []

    def again(real):
        called.append(real)
        return torch.zeros(real * 2)

    count = RowCount()
    assert count.of(torch.zeros(4), 4, 3, again) == (4, 3)
    assert called == []
    assert count.of(torch.zeros(8), 4, 3, again) == (8, 6)
    assert count.of(torch.zeros(4), 4, 1, again) == (4, 2), "earlier rows were not samples"
    assert called == [3, 1]
    assert count.of(torch.zeros(7), 4, 0, again) == (7, 0)
    assert count.of(torch.zeros(7), 4, 4, again) == (7, 7)
    assert called == [3, 1]


def test_what_is_made_of_repetitions_is_left_out():
    rows = Rows(4, 3)
    kept = rows.kept({"x": torch.arange(8), "mean": torch.tensor(1.0)}, objects=False)
    assert kept["x"].tolist() == list(range(6)), "two values for each row"
    assert kept["mean"] == 1
    assert Rows(4, 0).kept(torch.tensor(1.0), objects=False).tolist() == []
    assert Rows(4, 4).kept(torch.arange(5), objects=False).tolist() == list(range(5))
    with pytest.raises(UsageError, match=r"has, 4, .* found 6: the last 1 rows"):
        rows.kept(torch.arange(6), objects=False)
    names, x = list("abcd"), torch.arange(4)
    for data, expected in (
        (names, list("abc")),
        ({"x": x, "names": names}, {"x": x[:3], "names": names[:3]}),
        ([{"id": i} for i in range(4)], [{"id": i} for i in range(3)]),
        ([names, names, names, names], [names[:3]] * 4),
    ):
        found = rows.kept(data, objects=True)
        assert str(found) == str(expected)
