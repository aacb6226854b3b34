"""Writes without a trace: digests tell values apart, and when a forward looks for such writes."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import torch

from drivetrain.parallel import gather
from drivetrain.parallel.unit import digest


def test_each_element_counts_with_its_place():
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for numel, dtype in product([1, 7, 8186, 20_003], dtypes):
        values = torch.arange(numel).to(dtype) % 101
        before = digest(values)
        assert digest(values.clone()) == before
        for place in {0, numel // 2, numel - 1}:
            changed = values.clone()
            changed[place] += 1
            assert digest(changed) != before, (numel, dtype, place)
        if numel > 1:
            assert digest(values.roll(1)) != before, (numel, dtype)


def test_units_are_looked_at_in_turn_and_later_now_and_then(monkeypatch):
    monkeypatch.setattr(gather, "LOOKS", 3)
    units = [SimpleNamespace(digests=None) for _ in range(2)]
    for unit in units:
        unit.notice_all_writes = partial(setattr, unit, "digests", [])
    subject = object.__new__(gather.Gather)
    subject._forward, subject._looked, subject._freed = 0, None, units
    turns = []
    for _ in range(9):
        subject._look_at_next()
        turns.append([place for place, unit in enumerate(units) if unit.digests is not None])
    assert turns == [[1], [0], [1], [], [], [0], [], [], [1]]
