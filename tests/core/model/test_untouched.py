"""A model that ran in ``untouched`` is as before, also where its dicts refuse changes."""

from collections import OrderedDict

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
    with untouched(model):
        model(torch.ones(4, 2))
        model.counts["calls"] += 1
        model.counts["late"] = model.late = 1
        model.cache["second"] = 1
        OrderedDict.__setitem__(model.settings, "c", 3)
    assert list(model.settings.items()) == [("b", 1), ("a", 2)]
    assert model.counts == {"calls": 0}
    assert list(model.cache) == ["first"]
    assert not hasattr(model, "late")
    assert not model.num_batches_tracked
