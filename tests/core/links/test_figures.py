"""The figures for the choice of methods: a line over sizes, of the slowest rank."""

import pytest
import torch

from drivetrain.links import automatic as figures


def test_the_time_of_an_encoding_is_that_of_the_slowest_rank(monkeypatch):
    numels = [rows * figures.COLUMNS for rows in figures.ROWS]
    every = [
        {"int8": (fixed + each * numels[0], fixed + each * numels[1])}
        for fixed, each in ((2e-3, 3e-9), (1e-3, 1e-9))
    ]
    monkeypatch.setattr(figures, "_times", lambda methods, clock: every[1])
    monkeypatch.setattr(figures, "gather_facts", lambda mine, kind, doing: every)
    found = figures.slowest_times({"int8": None}, torch.device("cpu"))["int8"]
    assert found.fixed_s == pytest.approx(2e-3)
    assert found.per_number_s == pytest.approx(3e-9)
