"""A model that ran in ``untouched`` is as before, also where its dicts refuse changes."""

import copy
import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from drivetrain.model.untouched import untouched


class Settled(OrderedDict):
    """Settings that refuse changes, as those of diffusers' models."""

    def __init__(self, *args):
        super().__init__(*args)
        self.settled = True

    def _refuse(self, *args, **kwargs):
        raise TypeError("settled")

    update = clear = pop = setdefault = __delitem__ = _refuse

    def __setitem__(self, key, value):
        if getattr(self, "settled", False):
            raise TypeError("settled")
        super().__setitem__(key, value)


def test_dicts_get_their_contents_back_and_none_refuses():
    model = nn.BatchNorm1d(2)
    model.settings, model.counts = Settled({"b": 1, "a": 2}), {"calls": 0}
    model.cache = OrderedDict(first=0)
    model.seen, model.kept = {1}, [torch.zeros(1)]
    model.draw = [random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)]
    drawn = copy.deepcopy(model.draw)

    def draw(one, other, generator):
        return one.random(), other.random(), torch.rand((), generator=generator).item()

    with untouched(model):
        model(torch.ones(4, 2))
        draw(*model.draw)
        model.seen.add(2)
        model.kept[0].add_(1)
        model.counts["calls"] += 1
        model.counts["late"] = model.late = 1
        model.cache["second"] = 1
        OrderedDict.__setitem__(model.settings, "c", 3)
    assert list(model.settings.items()) == [("b", 1), ("a", 2)]
    assert model.counts == {"calls": 0}
    assert list(model.cache) == ["first"]
    assert not hasattr(model, "late")
    assert not model.num_batches_tracked
    assert (model.seen, model.kept) == ({1}, [0])
    assert draw(*model.draw) == draw(*drawn)
