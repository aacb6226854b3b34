"""Ranks that share layers draw alike: states cross before a forward whose last one drew."""

import random
from datetime import timedelta
from functools import partial

import numpy
import torch

from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.runtime.mesh import Axis
from drivetrain.traffic import Traffic
from drivetrain_megatron.dropout import AlikeDraws


class Counted(SoloCommunicator):
    """Counts how often states were sent."""

    sent = 0

    def broadcast(self, *args, **kwargs):
        self.sent += 1
        return super().broadcast(*args, **kwargs)


DRAWS = [random.random, partial(torch.rand, 1), numpy.random.rand]


def test_a_draw_of_any_generator_is_noticed():
    for draw in DRAWS:
        axis = Axis(name="tp", size=1, rank=0, ranks=(0,), hosts=("here",))
        ranks = Counted(axis, Traffic(), timedelta(seconds=9))
        draws, counts = AlikeDraws(ranks, torch.device("cpu")), []
        for compute in (int, int, draw, draw, int, int):
            draws.during(compute, training=True)
            counts.append(ranks.sent)
        assert counts == [1, 1, 1, 2, 3, 3]
        draws.during(int, training=False)
        assert ranks.sent == 4, "evaluation is another forward"
