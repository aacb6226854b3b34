"""The loss scale by itself: when it grows, when it shrinks, what it remembers, when it gives up."""

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.runtime.precision import LossScaler, ScaleRule

CPU = torch.device("cpu")


def scaler(**rule):
    usual = {"init_scale": 64.0, "growth_interval": 100}
    return LossScaler(ScaleRule(**usual | rule), enabled=True)


def steps(scaler, *outcomes, optimizer=0):
    """Let an optimizer step, well (True) or not, with gradients of the scale at hand."""
    for good in outcomes:
        scaler.record(optimizer, overflow=not good, made_with=scaler.get_scale())
        scaler.update()
    return scaler.get_scale()


def test_growth_needs_good_steps_in_a_row():
    subject = scaler(growth_interval=3)
    assert steps(subject, True, True) == 64
    assert steps(subject, False) == 32
    assert steps(subject, True, True) == 32
    assert steps(subject, True) == 64
    subject = scaler(growth_interval=2)  # a round of two optimizers is one step
    steps(subject, True, optimizer=0)
    assert steps(subject, True, optimizer=1) == 64
    assert steps(subject, True, optimizer=0) == 128
    subject = scaler(growth_interval=2)
    steps(subject, True)
    for optimizer in (0, 1):  # the first one steps again, with another one
        subject.record(optimizer, overflow=False, made_with=64.0)
    subject.update()
    assert subject.get_scale() == 128


def test_hysteresis_counts_bad_steps_in_a_row_of_each_optimizer():
    subject = scaler(hysteresis=2)
    assert steps(subject, False, True, False) == 64
    assert steps(subject, False) == 32
    assert steps(subject, False) == 16
    assert steps(subject, True, False) == 16
    subject = scaler(hysteresis=2)
    steps(subject, False, optimizer=0)
    assert steps(subject, True, optimizer=1) == 64
    assert steps(subject, False, optimizer=0) == 32


def test_an_overflow_shrinks_the_scale_it_was_made_with_once():
    subject = scaler()
    for optimizer in (0, 1):
        subject.record(optimizer, overflow=True, made_with=64.0)
        subject.update()
    assert subject.get_scale() == 32
    subject.record(0, overflow=True, made_with=128.0)  # of gradients that waited
    subject.update()
    assert subject.get_scale() == 32
    subject = scaler()
    for overflow in (True, False):  # of two models of one optimizer
        subject.record(0, overflow=overflow, made_with=64.0)
    subject.update()
    assert subject.get_scale() == 32
    subject = scaler(growth_interval=1)
    assert steps(subject, True, optimizer=0) == 128
    subject.record(1, overflow=True, made_with=64.0)
    subject.update()
    assert subject.get_scale() == 32


def test_scale_stays_above_its_minimum_and_then_gives_up():
    subject = scaler(init_scale=8.0, min_scale=3.0, max_skipped=3)
    assert steps(subject, False) == 4
    assert steps(subject, False) == 3
    assert steps(subject, False, False) == 3
    steps(subject, True)
    assert steps(subject, False, False) == 3
    with pytest.raises(UsageError, match=r"smallest loss scale \(3\), found .* last 3 steps"):
        steps(subject, False)


def test_state_holds_counts_and_what_is_not_settled_yet():
    subject = scaler(hysteresis=2, growth_interval=2)
    steps(subject, True, False)
    subject.record(0, overflow=True, made_with=64.0)
    state = subject.state_dict()
    assert state["scale"] == 32
    again = scaler(hysteresis=2, growth_interval=2)
    again.load_state_dict(state)
    assert steps(again, False) == 16  # the third bad step in a row
    assert subject.get_scale() == 64
    subject.update()
    assert subject.get_scale() == 32
    subject = scaler(growth_interval=2)
    steps(subject, True)
    subject.load_state_dict(subject.state_dict())
    assert steps(subject, True, optimizer=1) == 128  # a round of its own


def test_unscale_divides_and_finds():
    for bad in (float("inf"), float("-inf"), float("nan")):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            pieces = [torch.full((3,), 8.0, dtype=dtype), torch.full((2, 2), 4.0)]
            assert not scaler().unscale(pieces, 4.0, ranks=1, device=CPU)
            assert pieces[0].tolist() == [2.0] * 3
            assert pieces[1].tolist() == [[1.0] * 2] * 2
            pieces[0][1] = bad
            assert scaler().unscale(pieces, 4.0, ranks=1, device=CPU)
    assert not scaler().unscale([], 4.0, ranks=1, device=CPU)
    with pytest.raises(UsageError, match=r"fp32 under a loss scale, found 1 of 2 in fp16; give"):
        scaler().unscale([torch.ones(2).half(), torch.ones(2)], 4.0, ranks=1, device=CPU)


def test_numbers_out_of_range_are_refused():
    for name, value in {
        "init_scale": 0.5, "min_scale": 0.0, "growth_factor": 0.5, "backoff_factor": 1.0,
        "growth_interval": 0, "hysteresis": 0, "max_skipped": 0,
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=rf"{name} .*, found {value}; change {name}"):
            ScaleRule(**{name: value})


@pytest.mark.ranks(2)
def test_infinity_on_one_rank_is_known_to_all():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    pieces = [torch.tensor([float("inf")])] if rank == 1 else []  # rank 0 holds no gradient
    assert scaler().unscale(pieces, 4.0, ranks=2, device=CPU)
    assert not scaler().unscale([torch.ones(rank + 1)], 4.0, ranks=2, device=CPU)
