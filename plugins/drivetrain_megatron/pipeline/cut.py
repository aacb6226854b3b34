"""Cuts the blocks of a model into stages of consecutive blocks, so that the slowest is fastest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from drivetrain.errors import ConfigError
from drivetrain_megatron.recording.phases import Dependency, Recording

_INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class StageCut:
    """Where each stage begins.

    Attributes:
        bounds: index of the first block of each stage, and the number of blocks at the end.
    """

    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    def blocks(self, stage: int) -> range:
        """Return the indices of a stage's blocks."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def phases(self, stage: int) -> range:
        """Return the phases of a stage: of its blocks, and the last stage's final phase."""
        last = stage == self.stages - 1
        return range(self.bounds[stage], self.bounds[stage + 1] + int(last))

    def stage_of(self, phase: int) -> int:
        """Return the stage that a phase belongs to."""
        return next(stage for stage in range(self.stages) if phase in self.phases(stage))


def kept_together(recording: Recording) -> dict[int, Dependency]:
    """Return the blocks before which no stage can begin, each with the obstacle."""
    return {
        bound: dependency
        for dependency in recording.dependencies
        for bound in range(dependency.source + 1, dependency.consumer + 1)
    }


def balanced(
    recording: Recording,
    stages: int,
    costs: Sequence[float] | None = None,
    before: float | None = None,
    after: float | None = None,
) -> StageCut:
    """Return the most even cut among the cuts with the smallest largest stage.

    The largest cost is found exactly by dynamic programming over contiguous cuts; a second pass
    minimizes the sum of squares among the cuts that have it.

    Args:
        recording: of the model.
        stages: how many stages; each gets a block at least.
        costs: of each block, in any unit; None for the work that the recording estimates.
        before: what the first stage has besides, in the same unit; None for the recording's.
        after: what the last stage has besides; None for the recording's.

    Raises:
        ConfigError: there are not enough blocks, or not enough places where a stage can begin.
    """
    blocks = len(recording.blocks)
    costs = recording.costs() if costs is None else list(costs)
    if len(costs) != blocks:
        raise ConfigError(f"expected a cost for each of {blocks} blocks, found {len(costs)}")
    _check_number(blocks, stages)
    if not any(costs):
        costs = [1.0] * blocks  # no matrix products: blocks count the same
    edges = (
        float(recording.between[0]) if before is None else before,
        float(recording.between[-1]) if after is None else after,
    )
    closed = kept_together(recording)
    largest = _Partition(costs, edges, closed, stages).smallest_largest()
    if largest == _INFINITE:
        raise _closed(stages, blocks, closed)
    return StageCut(_Partition(costs, edges, closed, stages).most_even(largest))


def listed(recording: Recording, stages: int, layout: Sequence[int]) -> StageCut:
    """Return the cut that a user wrote down.

    Args:
        recording: of the model.
        stages: how many stages there must be.
        layout: the number of blocks of each stage; or, when it begins with 0, the index of the
            first block of each.

    Raises:
        ConfigError: the list does not fit the model; the message says how.
    """
    blocks = len(recording.blocks)
    _check_number(blocks, stages)
    shown = f"found {list(layout)}"
    if len(layout) != stages:
        raise ConfigError(f"expected a layout of {stages} stages, {shown}, which has {len(layout)}")
    if layout[0] == 0:
        bounds = (*layout, blocks)
        if any(a >= b for a, b in pairwise(bounds)):
            raise ConfigError(
                f"expected indices of first blocks that grow and stay below {blocks}, {shown}"
            )
    else:
        if min(layout) < 1 or sum(layout) != blocks:
            raise ConfigError(
                f"expected a block for each stage at least and {blocks} blocks in all, {shown}, "
                f"which sums to {sum(layout)}"
            )
        bounds = tuple(sum(layout[:stage]) for stage in range(stages + 1))
    closed = kept_together(recording)
    for bound in bounds[1:-1]:
        if bound in closed:
            raise _not_here(closed[bound], bound)
    return StageCut(bounds)


def _check_number(blocks: int, stages: int) -> None:
    if not 1 <= stages <= blocks:
        raise ConfigError(
            f"expected between 1 and {blocks} stages for a model of {blocks} blocks, found "
            f"{stages}: every stage holds a block at least; lower pp (or the chunks per rank)"
        )


def _not_here(dependency: Dependency, bound: int) -> ConfigError:
    return ConfigError(
        f"expected stages that only need what the block before them returns, found that "
        f"{dependency.what} comes from phase {dependency.source}, so that no stage can begin at "
        f"block {bound}: let every block return it with its output, compute it from the inputs "
        "without parameters, or compute it in the block that needs it"
    )


def _closed(stages: int, blocks: int, closed: Mapping[int, Dependency]) -> ConfigError:
    free = [bound for bound in range(1, blocks) if bound not in closed]
    first = closed[min(closed)]
    return ConfigError(
        f"expected {stages - 1} places between {blocks} blocks where a stage can begin, found "
        f"{len(free)} ({free}): {_not_here(first, min(closed))}"
    )


class _Partition:
    """Contiguous partitions of costs; ``table[s][k]`` is about the first k blocks in s stages."""

    def __init__(
        self,
        costs: Sequence[float],
        edges: tuple[float, float],
        closed: Mapping[int, Dependency],
        stages: int,
    ) -> None:
        self._blocks, self._stages, self._closed = len(costs), stages, closed
        self._sums = [edges[0]]  # what comes before the first block stays with it
        for cost in costs:
            self._sums.append(self._sums[-1] + cost)
        self._sums[0], self._sums[-1] = 0.0, self._sums[-1] + edges[1]

    def _cost(self, first: int, stop: int) -> float:
        return self._sums[stop] - self._sums[first]

    def _may_begin(self, bound: int) -> bool:
        return bound not in self._closed

    def smallest_largest(self) -> float:
        """Return the smallest possible cost of the largest stage."""
        best = [0.0] + [_INFINITE] * self._blocks
        for _ in range(self._stages):
            best = [_INFINITE] + [
                min(
                    (
                        max(best[first], self._cost(first, stop))
                        for first in range(stop)
                        if self._may_begin(first)
                    ),
                    default=_INFINITE,
                )
                for stop in range(1, self._blocks + 1)
            ]
        return best[-1]

    def most_even(self, largest: float) -> tuple[int, ...]:
        """Return the bounds with the least sum of squares and no stage above a cost."""
        limit = largest * (1 + 1e-12)
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))]
        best += [(_INFINITE, ())] * self._blocks
        for _ in range(self._stages):
            following: list[tuple[float, tuple[int, ...]]] = [(_INFINITE, ())]
            for stop in range(1, self._blocks + 1):
                following.append(
                    min(
                        (
                            (best[first][0] + self._cost(first, stop) ** 2, (*best[first][1], stop))
                            for first in range(stop)
                            if self._may_begin(first) and self._cost(first, stop) <= limit
                        ),
                        default=(_INFINITE, ()),
                    )
                )
            best = following
        return best[-1][1]
