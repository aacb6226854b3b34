"""Cuts the blocks of a model into stages of consecutive blocks, so that the slowest is fastest.

The cost of a block is estimated from a trace of the model, or measured: one forward and backward of
each kind of block, on random inputs.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import ConfigError, UsageError
from drivetrain.model.modules import uncompiled
from drivetrain.model.trace import BlockCall, ModelTrace, TracedTensor
from drivetrain.model.untouched import without_values
from drivetrain.model.valueless import random_like
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.recording.phases import Dependency, Recording, named_blocks
from drivetrain_megatron.recording.proxy import StageProxy

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

    The largest cost is found exactly by dynamic programming over contiguous cuts; among the cuts of
    this cost a second pass minimizes the sum of squares.

    Args:
        recording: of the model.
        stages: how many stages; each gets a block at least.
        costs: of each block, in any unit; None for the estimate of the recording.
        before: further cost of the first stage, in the same unit; None for the recording's.
        after: further cost of the last stage; None for the recording's.

    Raises:
        ConfigError: there are not enough blocks, or not enough places where a stage can begin.
    """
    blocks = len(recording.blocks)
    costs = recording.costs() if costs is None else list(costs)
    _check_number(blocks, stages)
    if not any(costs):
        costs = [1.0] * blocks  # no matrix products: blocks count the same
    edges = (
        float(recording.between[0]) if before is None else before,
        float(recording.between[-1]) if after is None else after,
    )
    closed = kept_together(recording)
    sums = list(accumulate(costs, initial=edges[0]))  # what comes first stays with block 0
    sums[0], sums[-1] = 0.0, sums[-1] + edges[1]

    def best(
        joined: Callable[[float, float], float], limit: float
    ) -> tuple[float, tuple[int, ...]]:
        """Return the least value of the cuts with no stage above a cost, and its bounds."""
        none: tuple[float, tuple[int, ...]] = (_INFINITE, ())
        found = [(0.0, (0,)), *[none] * blocks]  # about the first k blocks
        for _ in range(stages):
            found = [none] + [
                min(
                    (
                        (joined(found[first][0], cost), (*found[first][1], stop))
                        for first in range(stop)
                        if first not in closed and (cost := sums[stop] - sums[first]) <= limit
                    ),
                    default=none,
                )
                for stop in range(1, blocks + 1)
            ]
        return found[-1]

    largest, _ = best(max, _INFINITE)
    if largest == _INFINITE:
        raise _closed(stages, blocks, closed)
    _, bounds = best(lambda total, cost: total + cost**2, largest * (1 + 1e-12))
    return StageCut(bounds)


def listed(recording: Recording, stages: int, layout: Sequence[int]) -> StageCut:
    """Return the cut that a user wrote down.

    Args:
        recording: of the model.
        stages: how many stages there must be.
        layout: the number of blocks of each stage; or, with 0 first, the indices of first blocks.

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


def chosen_cut(
    config: MegatronConfig, model: nn.Module, recording: Recording, trace: ModelTrace
) -> StageCut:
    """Return where the stages of a configuration begin.

    Raises:
        ConfigError: the model or the configured list does not allow it.
    """
    stages = config.pp * config.chunks
    how = config.cut
    if how == "cost":
        return balanced(recording, stages)
    if how == "uniform":
        return balanced(recording, stages, [1.0] * len(recording.blocks), 0.0, 0.0)
    if how == "profile":
        seconds = profile(uncompiled(model), trace)
        return balanced(recording, stages, seconds, *scaled_edges(recording, seconds))
    try:
        layout = [int(part) for part in how.split(",")]
    except ValueError:
        raise ConfigError(
            f"strategy.cut: expected cost, profile, uniform, or numbers of blocks such as "
            f"6,8,8,6, found {how!r}"
        ) from None
    return listed(recording, stages, layout)


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


_RUNS = 3
"""How often a kind of block is timed; the first run warms up and the fastest counts."""


def profile(model: nn.Module, trace: ModelTrace) -> list[float]:
    """Return the seconds that each block takes for forward and backward.

    Of each kind of block (class, shapes of parameters and arguments) the first is computed, with
    random inputs. Gradients and random generators stay as they were. The example inputs of the
    trace have the size that counts.

    Raises:
        UsageError: the model has no values.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "expected a model with values to measure, found one on the meta device: estimate its "
            "costs instead, or give the cut as a list"
        )
    blocks = dict(named_blocks(trace.candidates, model))
    known: dict[Any, float] = {}
    seconds = []
    values = {
        name: [(module, dict(module._parameters)) for module in block.modules()]
        for name, block in blocks.items()
    }
    with without_values(model, StageProxy), torch.enable_grad():
        for call in trace.blocks:
            block = blocks[call.name]
            kind = _kind(block, trace, call)
            if kind not in known:
                for module, own in values[call.name]:  # whatever this block changes is undone
                    module._parameters.update(own)
                known[kind] = min([_once(block, trace, call) for _ in range(_RUNS)][1:])
            seconds.append(known[kind])
    return seconds


def scaled_edges(recording: Recording, seconds: Sequence[float]) -> tuple[float, float]:
    """Return the costs before and after the blocks, in seconds at the speed of the blocks."""
    work = sum(block.work for block in recording.blocks)
    pace = sum(seconds) / work if work else 0.0
    return recording.between[0] * pace, recording.between[-1] * pace


def _kind(block: nn.Module, trace: ModelTrace, call: BlockCall) -> tuple[Any, ...]:
    """Return the facts of a block and its call that decide about the time."""
    given = [None if number is None else trace.tensors[number].facts for number in call.given]
    parameters = (tuple(parameter.shape) for parameter in block.parameters())
    shapes = (None if facts is None else (facts.shape, facts.dtype) for facts in given)
    return (type(block), *parameters, *shapes)


def _once(block: nn.Module, trace: ModelTrace, call: BlockCall) -> float:
    """Return the seconds of one forward and backward."""
    args, kwargs = tree_map(_copied, trace.example(call, _random))
    sources = [*tree_leaves((args, kwargs)), *block.parameters()]
    wanted = [leaf for leaf in sources if isinstance(leaf, Tensor) and leaf.requires_grad]
    _wait()
    started = time.perf_counter()
    result = tree_leaves(block.forward(*args, **kwargs))
    roots = [leaf for leaf in result if isinstance(leaf, Tensor) and leaf.requires_grad]
    if roots and wanted:
        seeds = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    _wait()
    return time.perf_counter() - started


def _random(seen: TracedTensor) -> Tensor:
    """Return a random tensor in place of one without values."""
    return random_like(seen.facts, seen.facts.dtype.is_floating_point)


def _copied(leaf: Any) -> Any:
    """Return an object that a block may change; tensors are never seen again."""
    return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
