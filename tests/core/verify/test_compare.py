"""Numbers of two records, equal, apart by rounding, or wrong; without ranks."""

import math
from dataclasses import replace

import torch

from drivetrain.checkpoint.encoding import write_tensors
from drivetrain.verify import RunRecord, StepRecord, compare, judge, state_file


def record(*, weight=2.0, loss=1.0, norm=3.0, steps=1, start=1.0, batches=(("a",),)):
    """Return a record of a model with two weights, of which the second trains."""
    states = [{"first": torch.ones(2), "second": torch.tensor([start, 1.0])}]
    states += [{"first": torch.ones(2), "second": torch.tensor([weight, 1.0])}] * steps
    step = StepRecord(losses=((loss,),), batches=batches, norms={"second": norm, "third": 4.0})
    places = {"second": "unit blocks.0"}
    return RunRecord(steps=[step] * steps, states=states, whereabouts=places)


def test_what_differs_is_named_with_its_place_and_size():
    comparison = compare(record(), record())
    assert judge(comparison) == ("equal", ())
    assert comparison.compared == {"start": 2, "loss": 1, "gradient norm": 2, "weight": 2}

    comparison = compare(record(weight=2.5), record(weight=2.0))
    verdict, (found,) = judge(comparison)
    assert verdict == "error"
    place = found.step, found.kind, found.name, found.where
    assert place == (1, "weight", "second", "unit blocks.0")
    assert (found.absolute, found.relative, found.of_change) == (0.5, 0.25, 0.5)
    assert (found.found, found.expected) == (2.5, 2.0)

    for kind, change in (("loss", {"loss": 1.5}), ("gradient norm", {"norm": 4.0})):
        verdict, (found,) = judge(compare(record(**change), record()))
        assert (verdict, found.kind) == ("error", kind)
        assert found.relative == (0.5 if kind == "loss" else 0.2)  # of the norm of all, 5

    run, reference = record(), record()
    for each, value in ((run, 6.0), (reference, 4.0)):
        each.steps[0] = replace(each.steps[0], losses=((value,),), notes={"length": value})
    assert [each.relative for each in compare(run, reference).differences] == [0.5, 0.5]

    assert judge(compare(record(loss=math.nan), record(loss=math.nan)))[0] == "equal"
    assert judge(compare(record(loss=math.nan), record()))[0] == "error"
    assert judge(compare(record(weight=math.nan), record()))[0] == "error"
    assert judge(compare(record(weight=math.nan), record(weight=math.nan)))[0] == "equal"
    infinite = record(weight=math.inf)
    infinite.states[1] = infinite.states[1] | {"second": torch.tensor([math.inf, 1.5])}
    (found,) = compare(infinite, record(weight=math.inf)).differences
    assert (found.absolute, found.found) == (0.5, 1.5)
    other = record()
    other.states[1] = other.states[1] | {"second": torch.ones(3)}
    assert judge(compare(other, record()))[0] == "error"


def test_the_repetition_tells_rounding_from_errors():
    apart = compare(record(weight=2.0001), record())
    rounding = compare(record(weight=2.0 + 5e-7), record())
    assert judge(apart, compare(record(), record())) == ("rounding", [])
    assert judge(apart, apart)[0] == "error"
    assert judge(rounding, doubles=True)[0] == "error"
    assert judge(rounding)[0] == "rounding"

    rounding = compare(record(loss=1.0 + 1e-7), record())
    assert judge(rounding, compare(record(weight=3.0), record()))[0] == "error"


def test_a_weight_that_fp64_excuses_is_no_further_than_low_dtypes_and_steps_put_it():
    """As where a write of the script misses masters, which fp64 does not have."""
    right = compare(record(), record())

    def judged(weight, change=0.005, norm=1.0):
        run, reference = (record(weight=each, steps=2, norm=norm) for each in (weight, 1.0))
        reference.states[2] = {"first": torch.ones(2), "second": torch.tensor([1.0, 1.0 + change])}
        return judge(compare(run, reference), right)

    verdict, errors = judged(1.35)
    assert verdict == "error"
    assert [(each.step, each.kind, each.name) for each in errors] == [(2, "weight", "second")]
    assert judged(math.nan)[0] == "error"
    assert judged(1.04)[0] == "rounding"  # some steps of bf16
    assert judged(1.155)[0] == "rounding"  # two steps may both be turned around
    assert judged(1.35, change=0.1)[0] == "rounding"  # no further than steps of this length
    assert judged(1.35, norm=1e-12)[0] == "rounding"  # a gradient of rounding, as of key biases


def test_steps_along_the_rounding_of_a_gradient_go_anywhere():
    for norm, weight, verdict in (
        (1e-15, 0.999, "rounding"),  # the step of the reference from 1.0 is to 1.001
        (3e-12, 0.999, "rounding"),  # of a norm of 4
        (1e-15, 0.990, "error"),  # further than any step of the optimizer
        (1e-3, 0.999, "error"),  # a gradient that says where to go
        (0.0, 0.999, "error"),  # no gradient, no noise
        (math.nan, 0.999, "error"),
    ):
        run = record(weight=weight, norm=norm)
        reference = record(weight=1.001, norm=0.0 if norm == 0 else 1e-15)
        again = compare(record(weight=1.001), reference)
        found, errors = judge(again, compare(run, reference))
        assert found == verdict
        assert any(each.kind == "weight" for each in errors) == (verdict == "error")
        assert judge(compare(run, reference), doubles=True)[0] == verdict
    run, reference = (record(weight=1.001, norm=1e-15, steps=2) for _ in range(2))
    for each, weight in ((run, 0.999), (reference, 1.002)):  # three steps apart after two
        each.states[2] = each.states[1] | {"second": torch.tensor([weight, 1.0])}
    assert judge(compare(run, reference), doubles=True)[0] == "rounding"


def test_runs_that_cannot_be_compared_say_why():
    for other, problem in (
        ({"batches": (("b",),)}, "another batch 1 on data-parallel rank 0 of step 1"),
        ({"batches": (("a",), ("c",))}, "another batch 1 on data-parallel rank 1 of step 1"),
        ({"steps": 2}, "expected 1 steps as in the reference, found 2"),
        ({"steps": 0}, "no optimizer step was recorded"),
    ):
        assert problem in compare(record(**other), record()).problem

    less = record()
    del less.states[0]["first"]
    for pair in ((less, record()), (record(), less)):
        assert "found in one of them only: ['first']" in compare(*pair).problem

    both = (("a",), ("a",))
    assert compare(record(), record(batches=both)).problem == ""


def test_a_record_comes_back_from_its_folder(tmp_path):
    first = record(loss=math.inf, steps=2)
    for number, state in enumerate(first.states):
        write_tensors(state_file(tmp_path, number), state)
    first.write(tmp_path)
    again = RunRecord.read(tmp_path)
    assert (again.steps, again.whereabouts) == (first.steps, first.whereabouts)
    assert compare(again, record(loss=math.inf, steps=2)).differences == []


def test_a_gradient_that_has_once_said_where_to_go_excuses_no_later_step():
    run, reference = record(weight=0.999, steps=2), record(weight=1.001, steps=2)
    small = StepRecord(losses=((1.0,),), batches=(("a",),), norms={"second": 1e-15, "third": 4.0})
    run.steps[1] = reference.steps[1] = small
    reference.states[2] = reference.states[1] | {"second": torch.tensor([1.002, 1.0])}
    _, errors = judge(compare(run, reference), doubles=True)
    assert [(each.step, each.kind) for each in errors] == [(1, "weight"), (2, "weight")]
