"""Every schedule is proven on paper: it ends, in the promised time, and keeps what it may keep."""

import itertools

import pytest

from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.pipeline.command import UNIT_DURATIONS, promised, simulate
from drivetrain_megatron.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    Span,
    Timeline,
    make_schedule,
)

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT  # noqa: E741
RANKS, MICRO_BATCHES = range(1, 6), range(1, 11)
UNEVEN = {F: 1.25, B: 3.5, I: 1.5, W: 2.0}
DURATIONS = UNIT_DURATIONS, UNEVEN
CASES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), *(("interleaved", v) for v in range(1, 4))]


def sizes():
    return itertools.product(RANKS, MICRO_BATCHES)


def by_hand(*ranks, stages=None, micro_batches=1):
    """Make a schedule of ranks that are written as ("F0@0", ...)."""
    parsed = [
        [
            Action(ActionKind(text[0]), int(text.split("@")[1]), int(text[1:].split("@")[0]))
            for text in rank
        ]
        for rank in ranks
    ]
    return Schedule("by hand", stages or len(ranks), micro_batches, tuple(map(tuple, parsed)))


def check_order(schedule, timeline):
    """Hold every begin against the ends of what the action needs, without the simulator's help."""
    ended = {span.action: span.stop for rank in timeline.ranks for span in rank}
    halves = (I, W) if schedule.name == "zb-h1" else (B,)
    every = itertools.product((F, *halves), range(schedule.stages), range(schedule.micro_batches))
    assert sorted(itertools.chain(*schedule.ranks)) == sorted(every)
    for actions, spans in zip(schedule.ranks, timeline.ranks, strict=True):
        assert [span.action for span in spans] == list(actions)
        for before, after in itertools.pairwise(spans):
            assert before.stop <= after.start
        for span in spans:
            assert schedule.ranks[span.action.stage % len(schedule.ranks)] == actions
            stage, micro_batch, kind = span.action.stage, span.action.micro_batch, span.action.kind
            if kind is F and stage:
                assert ended[Action(F, stage - 1, micro_batch)] <= span.start
            if kind is not F:
                assert ended[Action(F, stage, micro_batch)] <= span.start
            if kind in (B, I) and stage < schedule.stages - 1:
                assert ended[Action(kind, stage + 1, micro_batch)] <= span.start
            if kind is W:
                assert ended[Action(I, stage, micro_batch)] <= span.start


def test_every_schedule_ends_in_an_order_that_data_allows():
    for (name, v), durations in itertools.product(CASES, DURATIONS):
        for p, m in sizes():
            schedule = make_schedule(name, p, m, v)
            assert len(schedule.ranks) == p
            assert schedule.stages == p * v
            check_order(schedule, simulate(schedule, durations, travel=0.25))


def test_time_is_what_is_promised():
    for name, durations in itertools.product(("gpipe", "1f1b"), DURATIONS):
        for p, m in sizes():
            expected = (m + p - 1) * (durations[F] + durations[B])
            schedule = make_schedule(name, p, m)
            assert simulate(schedule, durations).makespan == pytest.approx(expected)
            assert promised(schedule, durations).value == pytest.approx(expected)

    for v, durations in itertools.product((1, 2, 3), DURATIONS):
        both = durations[F] + durations[B]
        for p, m in sizes():
            schedule = make_schedule("interleaved", p, m, v)
            found = simulate(schedule, durations).makespan
            if m % p == 0:
                assert found == pytest.approx(m * v * both + (p - 1) * both)
                assert promised(schedule, durations).value == pytest.approx(found)
            else:
                assert promised(schedule, durations) is None
                # Never slower than the plain schedule, of stages v times as long.
                assert found <= (m + p - 1) * v * both + 1e-9

    equal = {F: 1.0, I: 1.0, W: 1.0}
    for p, m in sizes():
        schedule = make_schedule("zb-h1", p, m)
        found = simulate(schedule, equal).makespan
        if m >= p:
            assert found == 3 * m + p - 1
            assert promised(schedule, equal).value == found
        else:
            assert promised(schedule, equal) is None
            assert found <= 3 * (m + p - 1)
    assert promised(make_schedule("zb-h1", 4, 8), UNEVEN) is None
    assert promised(by_hand(["F0@0", "B0@0"]), UNIT_DURATIONS) is None
    assert {name for name, _ in CASES} == set(SCHEDULES)


def test_kept_micro_batches():
    for p, m in sizes():
        gpipe, one, zero = (
            simulate(make_schedule(name, p, m)) for name in ("gpipe", "1f1b", "zb-h1")
        )
        for rank in range(p):
            assert gpipe.kept(rank) == m
            assert one.kept(rank) == min(m, p - rank)
            assert one.kept(rank) <= zero.kept(rank) <= min(m, p)


def test_messages_that_travel_cost_time_between_ranks_only():
    assert simulate(make_schedule("gpipe", 2, 1), travel=0.5).makespan == 6 + 2 * 0.5
    assert simulate(make_schedule("1f1b", 1, 5), travel=9.0).makespan == 15
    assert simulate(make_schedule("interleaved", 1, 2, 3), travel=9.0).makespan == 18


def test_schedules_that_cannot_end_are_refused():
    schedule = by_hand(
        ["F0@0", "B0@0", "F1@0", "B1@0"], ["F1@1", "B1@1", "F0@1", "B0@1"], micro_batches=2
    )
    with pytest.raises(UsageError, match="'B0@0' waits for ever"):
        simulate(schedule)


def test_numbers_that_fit_no_schedule_are_refused():
    for arguments, text in (
        (("1f1", 2, 2), "expected a schedule of .*'1f1b'.*, found '1f1'"),
        (("1f1b", 0, 2), "found 0 ranks"),
        (("1f1b", 2, -1), "-1 micro-batches"),
        (("interleaved", 2, 2, 0), "0 chunks"),
        (("gpipe", 2, 2, 2), "one chunk per rank for the schedule 'gpipe', found 2"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_schedule(*arguments)


def test_measured_timelines_may_lack_actions_and_begin_late():
    measured = Timeline(
        ((Span(Action(F, 0, 0), 10.5, 11.0), Span(Action(B, 0, 0), 12.0, 12.5)), (), ())
    )
    assert measured.start == 10.5
    assert measured.makespan == 2.0
    assert measured.idle == pytest.approx(1 - 1 / 6)
    assert [measured.idle_of(rank) for rank in range(3)] == [0.5, 1.0, 1.0]
    assert [measured.kept(rank) for rank in range(3)] == [1, 0, 0]
    empty = Timeline(((), ()))
    assert (empty.makespan, empty.idle, empty.start) == (0.0, 0.0, 0.0)
