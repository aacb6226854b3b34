"""Compares two recorded runs, number by number, in the order in which a step computes them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from drivetrain.verify.recorder import RunRecord

Kind = Literal[
    "start", "loss", "gradient norm", "stepped gradient", "optimizer state", "weight", "note"
]
Verdict = Literal["equal", "rounding", "error"]

SHRINKS = 1e-5
"""Rounding is 2**29 times smaller in fp64 than in fp32; an error stays. This lies well between."""

DOUBLE_ROUNDING = 1e-12
"""Largest relative difference that sums in another order make in fp64, with room for some steps."""

SINGLE_ROUNDING = 1e-6
"""The same in fp32, where fp64 cannot be had."""

LOOSE: Mapping[Kind, float] = {
    "start": 1e-6,
    "loss": 1e-2,
    "gradient norm": 5e-2,
    "stepped gradient": 5e-2,
    "optimizer state": 5e-2,
    "weight": 1e-2,
    "note": 1e-2,
}
"""Largest relative difference by kind that counts as rounding where fp64 cannot be had."""

LOW_ROUNDING = 0.05
"""More than low dtypes put a weight apart in some steps, unless the steps are as long as that."""

SHORTER = 20
"""How much shorter than the steps before a step may be, and count as long as these."""


_SEED = (
    "; the script draws data by rank, time or an unseeded generator: seed it, and take batches "
    "from a prepared loader"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One number, or tensor, that is not the same in both runs.

    Attributes:
        step: optimizer step, from 1; 0 for the state before the first.
        kind: of the number.
        name: of the parameter, buffer or note, of state with its key; "" for a loss.
        found: the number in the run; of a tensor the element that differs most.
        expected: the same in the reference.
        absolute: distance of the two.
        relative: distance divided by the number's scale: the largest element of the tensor, the
            norm of all gradients, or the loss.
        of_change: distance divided by the largest change of the tensor in this step; None for other
            numbers than weights, and for a tensor that did not change.
        gradient: of a weight, the largest norm that its gradient had so far in either run, divided
            by the norm of all gradients; None for other numbers, and without a gradient.
        where: rank and micro-batch, or unit or stage.
    """

    step: int
    kind: Kind
    name: str = ""
    found: float = 0.0
    expected: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0
    of_change: float | None = None
    gradient: float | None = None
    where: str = ""

    @property
    def key(self) -> tuple[int, str, str, str]:
        """Tells which number it is, in every repetition of the two runs."""
        return self.step, self.kind, self.name, self.where


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences between a run and its reference.

    Attributes:
        problem: why the two cannot be compared; "" if they can.
        steps: how many steps both have.
        compared: how many numbers were compared, by kind.
        differences: what is not equal to the last bit, in the order of the step.
    """

    problem: str = ""
    steps: int = 0
    compared: Mapping[Kind, int]
    differences: Sequence[Difference] = ()

    def largest(self, kind: Kind) -> float:
        """Return the largest relative difference of a kind, 0 when all numbers are equal."""
        return max((each.relative for each in self.differences if each.kind == kind), default=0.0)


def compare(run: RunRecord, reference: RunRecord) -> Comparison:
    """Compare a run with its reference, bit by bit."""
    steps = min(len(run.steps), len(reference.steps))
    problem = _problem(run, reference)
    if problem:
        return Comparison(problem=problem, steps=steps, compared={})
    counts: dict[Kind, int] = {}
    differences = []
    gradients: dict[str, float] = {}
    for number in range(steps + 1):
        if number:
            _follow(gradients, run.steps[number - 1].norms, reference.steps[number - 1].norms)
        for each in _step(run, reference, number):
            counts[each.kind] = counts.get(each.kind, 0) + 1
            if each.absolute != 0:
                size = gradients.get(each.name) if each.kind == "weight" else None
                differences.append(replace(each, gradient=size))
    return Comparison(steps=steps, compared=counts, differences=differences)


def judge(
    comparison: Comparison, repeated: Comparison | None = None, *, doubles: bool = False
) -> tuple[Verdict, Sequence[Difference]]:
    """Tell rounding from error.

    Args:
        comparison: of the runs as they are.
        repeated: of both runs in fp64; None where there is no such repetition.
        doubles: whether the runs as they are were computed in fp64 already.

    Returns:
        The verdict, and the differences that are errors, in the order of the step: those of the
        repetition, if there is one, and behind them those that only the runs as they are have.
    """
    if not comparison.differences:
        return "equal", ()
    doubles = doubles or repeated is not None
    limits = dict.fromkeys(LOOSE, DOUBLE_ROUNDING) if doubles else LOOSE
    noise = DOUBLE_ROUNDING if doubles else SINGLE_ROUNDING
    shrunk = {each.key: SHRINKS * each.absolute for each in comparison.differences}
    errors = [
        each
        for each in (comparison if repeated is None else repeated).differences
        if not each.relative <= limits[each.kind]  # NaN is beyond
        and not (repeated is not None and each.absolute <= shrunk.get(each.key, 0.0))
        and not _is_noise(each, noise)
    ]
    if repeated is not None:
        known = {each.key for each in errors}
        errors += [
            each
            for each in comparison.differences
            if each.key not in known and _is_left_behind(each)
        ]
    return ("error" if errors else "rounding"), errors


def _is_noise(difference: Difference, rounding: float) -> bool:
    """Whether a weight is apart because the optimizer steps by the sign of its gradient's rounding.

    The gradient of a bias in front of a normalisation, or of attention's keys, is zero but for
    rounding. Adam makes steps of full length of it, in any direction: two runs move apart by twice
    the change of a step at most, in each step.
    """
    size, change = difference.gradient, difference.of_change
    if size is None or change is None:
        return False
    return 0 < size <= rounding and change <= 2 * difference.step


def _is_left_behind(difference: Difference) -> bool:
    """Whether a weight is further apart than low dtypes and the steps so far can have put it.

    A repetition in fp64 has no masters beside low weights, and so does not show that a write of the
    script has missed them. Rounding can turn each step around: then two runs move apart by twice
    the length of a step, which may have been longer before; and where the gradient is nothing but
    rounding, as that of attention's key biases, by any number of steps.
    """
    change, size = difference.of_change, difference.gradient
    return (
        difference.kind == "weight"
        and change is not None
        and not (size is not None and 0 < size <= SINGLE_ROUNDING)
        and not difference.relative <= LOW_ROUNDING  # NaN is beyond
        and not change <= SHORTER * difference.step
    )


def _follow(
    gradients: dict[str, float], mine: Mapping[str, float], theirs: Mapping[str, float]
) -> None:
    """Note the largest gradient of each parameter so far, as a part of the norm of all."""
    scale = math.hypot(*theirs.values())
    for name, norm in theirs.items():
        size = max(mine.get(name, math.nan), norm) / scale if scale else 0.0
        gradients[name] = max(size, gradients.get(name, 0.0))


def _problem(run: RunRecord, reference: RunRecord) -> str:
    """Return why two runs cannot be compared, "" if they can."""
    if not run.steps or not reference.steps:
        return "no optimizer step was recorded"
    for number, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=False), 1):
        problem = _other_batch(mine.batches, theirs.batches)
        if problem:
            return (
                f"expected the same batches in both runs, found {problem} of step {number}{_SEED}"
            )
    only = sorted(set(run.states[0]) ^ set(reference.states[0]))
    if only:
        return f"expected the same tensors in both runs, found in one of them only: {only[:4]}"
    if len(run.steps) != len(reference.steps):
        return f"expected {len(reference.steps)} steps as in the reference, found {len(run.steps)}"
    return ""


def _other_batch(mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> str:
    """Return which batch differs, "" if none does.

    Where all ranks of the reference had the same batches, a single replica has to have these.
    """
    if len(mine) == 1 and len(set(theirs)) == 1:
        theirs = theirs[:1]
    for replica, batches in enumerate(zip_longest(mine, theirs, fillvalue=())):
        for batch, (left, right) in enumerate(zip_longest(*batches), 1):
            if left != right:
                return f"another batch {batch} on data-parallel rank {replica}"
    return ""


def _step(run: RunRecord, reference: RunRecord, number: int) -> Iterator[Difference]:
    """Yield every number of a step with its distance; step 0 is the state before the first."""
    if number:
        mine, theirs = run.steps[number - 1], reference.steps[number - 1]
        yield from _losses(number, mine.losses, theirs.losses)
        places = run.whereabouts
        yield from _norms(number, "gradient norm", mine.norms, theirs.norms, places)
        yield from _norms(number, "stepped gradient", mine.stepped, theirs.stepped, places)
        for state in dict.fromkeys(name.partition(" of ")[0] for name in theirs.moments):
            own = {k: v for k, v in theirs.moments.items() if k.startswith(f"{state} of ")}
            yield from _norms(number, "optimizer state", mine.moments, own, places)
        for name, value in theirs.notes.items():
            note = mine.notes.get(name, math.nan)
            yield _number(number, "note", name, note, value, abs(value), "")
    before = reference.states[number - 1] if number else {}
    for name, expected in reference.states[number].items():
        where = run.whereabouts.get(name, "")
        yield _tensor(number, name, run.states[number][name], expected, before.get(name), where)


def _losses(
    number: int, mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> Iterator[Difference]:
    for replica, losses in enumerate(zip(mine, theirs, strict=False)):
        for batch, (found, expected) in enumerate(zip_longest(*losses, fillvalue=math.nan), 1):
            where = f"micro-batch {batch} of data-parallel rank {replica}"
            yield _number(number, "loss", "", found, expected, abs(expected), where)


def _norms(
    number: int,
    kind: Kind,
    mine: Mapping[str, float],
    theirs: Mapping[str, float],
    places: Mapping[str, str],
) -> Iterator[Difference]:
    """Yield the norms in the order of backward: the first difference is nearest the cause."""
    scale = math.hypot(*theirs.values())
    for name in reversed(list(theirs)):
        found, where = mine.get(name, math.nan), places.get(name, "")
        yield _number(number, kind, name, found, theirs[name], scale, where)


def _number(
    step: int, kind: Kind, name: str, found: float, expected: float, scale: float, where: str
) -> Difference:
    equal = found == expected or (math.isnan(found) and math.isnan(expected))
    absolute = 0.0 if equal else abs(found - expected)  # NaN where one of them is
    return Difference(
        step=step,
        kind=kind,
        name=name,
        found=found,
        expected=expected,
        absolute=absolute,
        relative=_ratio(absolute, scale),
        where=where,
    )


def _tensor(
    step: int, name: str, found: Tensor, expected: Tensor, before: Tensor | None, where: str
) -> Difference:
    same = Difference(step=step, kind="weight" if step else "start", name=name, where=where)
    if found.shape != expected.shape:
        return replace(same, absolute=math.inf, relative=math.inf)
    if not expected.numel() or torch.equal(found, expected):
        return same
    wide = torch.complex128 if expected.is_complex() else torch.float64
    mine, theirs = found.to(wide).flatten(), expected.to(wide).flatten()
    apart = torch.where(mine.isnan() & theirs.isnan(), 0.0, (mine - theirs).abs())
    apart = torch.where(mine == theirs, 0.0, apart)  # equal infinities
    worst = int(apart.nan_to_num(nan=math.inf).argmax())
    absolute = float(apart[worst])
    change = None
    if before is not None and before.shape == expected.shape:  # else that of another model
        change = float((theirs - before.to(wide).flatten()).abs().max())
    return replace(
        same,
        found=float(mine[worst].real),
        expected=float(theirs[worst].real),
        absolute=absolute,
        relative=_ratio(absolute, float(theirs.abs().max())),
        of_change=absolute / change if change else None,
    )


def _ratio(absolute: float, scale: float) -> float:
    if absolute == 0:
        return 0.0
    return absolute / scale if scale else math.inf
