"""Finds by trial how calls of the model can be cut into micro-batches, and along which dims.

A few rows of a call's inputs run through each stage whole and in parts, with random tensors in the
place of the stage before. Where the joined tensors of the parts equal those of the whole, the
blocks treat rows alike, and the inputs may be cut so. Nothing is sent but the ranks' agreement, and
the model, its buffers and the random generators are afterwards what they were.
"""

import dataclasses
import math
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from drivetrain.errors import CollectiveError, UsageError
from drivetrain.model import is_left_equal, untouched
from drivetrain_megatron.pipeline.batches import (
    Dims,
    MicroBatch,
    cut_at,
    first_rows,
    is_same,
    join,
    joined_dim,
    rows_of,
)
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.stages import Stage
from drivetrain_megatron.recording.phases import PLAIN, TensorMeta
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.shapes import Metas

_ROWS = 3
"""Rows of a trial: a part of one row, and one of the others."""

_SEED = 0

_DRAWN = 1_000_003
"""Random numbers that are drawn for one tensor: a prime, so that rows of a matrix differ."""


@dataclass(frozen=True, slots=True)
class Division:
    """How the calls of one kind are cut.

    Attributes:
        dims: for each leaf of (args, kwargs, targets), the dim along which it is cut; None where
            the call must stay whole.
        joins: for each block, the dims along which its tensors are joined; empty for whole calls.
        kept: the blocks whose tensors the rest of the model reads, by index.
        failure: the first error that parts of the batch raised on this rank, in words, where the
            call stays whole; "" without any.
    """

    dims: Dims | None
    joins: tuple[Dims, ...]
    kept: frozenset[int]
    failure: str = ""

    def join_of(self, block: int, place: int) -> int | None:
        """Return the dim along which one tensor of a block is joined."""
        return self.joins[block][place] if self.joins else None


def kind_of(leaves: Sequence[Any], tree: Any) -> Hashable:
    """Return the kind of a call by the names, dtypes and dims of its inputs, without extents."""
    return str(tree), tuple(map(_leaf_kind, leaves))


def _leaf_kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        # One row may stand for all of them.
        return leaf.dtype, tuple(extent == 1 for extent in leaf.shape)
    is_number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
    by_value = isinstance(leaf, PLAIN) and not is_number
    return repr(leaf) if by_value else type(leaf).__qualname__


def trial_parts(
    args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, dims: Dims
) -> tuple[MicroBatch, list[MicroBatch]]:
    """Return a small batch of a call's first rows, and its parts, of uneven rows."""
    leaves = tree_leaves((tuple(args), dict(kwargs), targets))
    count = min(rows_of(leaves, dims) or 0, _ROWS)
    (whole,) = cut_at(args, kwargs, targets, dims, (0, count))
    return whole, cut_at(args, kwargs, targets, dims, (0, 1, count))


def random_tensors(
    metas: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> list[Tensor]:
    """Return tensors of these shapes and dtypes: normal numbers, the same on every rank."""
    return [
        _random(shape).to(device, dtype)
        if dtype.is_floating_point
        else torch.zeros(shape, dtype=dtype, device=device)
        for shape, dtype in metas
    ]


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype in which equal numbers show: fp32 for halves."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _random(shape: tuple[int, ...]) -> Tensor:
    """Return normal numbers, which repeat in large tensors, to be there soon."""
    count = math.prod(shape)
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    drawn = torch.randn(min(count, _DRAWN), generator=generator, device="cpu")
    return drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)


def cut_tensors(
    tensors: Sequence[Tensor], dims: Dims, parts: Sequence[Sequence[TensorMeta]]
) -> list[list[Tensor]]:
    """Return for each part its tensors, cut along dims into the parts' extents."""
    cut = [
        [tensor] * len(parts)
        if dim is None
        else list(torch.split(tensor, [metas[place].shape[dim] for metas in parts], dim))
        for place, (tensor, dim) in enumerate(zip(tensors, dims, strict=True))
    ]
    return [[shares[index] for shares in cut] for index in range(len(parts))]


def _candidates(leaves: Sequence[Any]) -> Iterator[Dims]:
    """Yield dims along which leaves may be cut: as many rows in dim 0, in dim 1, and so on.

    First those of a tensor whose same dim has so many rows, then other dims of so many rows, too.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    seen: set[Dims] = set()
    most = max((tensor.dim() for tensor in tensors), default=0)
    for dim in range(most):
        for rows in dict.fromkeys(x.shape[dim] for x in tensors if x.dim() > dim):
            alike = tuple(_dim_of(leaf, rows, [dim]) for leaf in leaves)
            others = tuple(_dim_of(leaf, rows, [dim, *range(most)]) for leaf in leaves)
            for dims in (alike, others) if rows > 1 else ():
                if dims not in seen:
                    seen.add(dims)
                    yield dims


def _dim_of(leaf: Any, rows: int, dims: Iterable[int]) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    return next((dim for dim in dims if dim < leaf.dim() and leaf.shape[dim] == rows), None)


def _joins_of(whole: Metas, parts: Sequence[Metas]) -> tuple[Dims, ...]:
    """Return the dims of each block's tensors.

    Raises:
        ValueError: a tensor is not joined of its parts, or a block has none that is.
    """
    joins = tuple(
        tuple(
            joined_dim(meta.shape, [part[block][place].shape for part in parts])
            for place, meta in enumerate(metas)
        )
        for block, metas in enumerate(whole)
    )
    if not all(any(dim is not None for dim in dims) for dims in joins):
        raise ValueError("expected tensors of every block to have rows, found none")
    return joins


def _check_seen(output: Any) -> None:
    """Check that the tensors of an output are seen.

    Raises:
        UsageError: they are in a dataclass, which nobody has registered.
    """
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf):
            name = type(leaf).__name__
            raise UsageError(
                f"expected a model that returns tensors in a tuple, list, dict or Hugging Face "
                f"ModelOutput, found a {name}: the pipeline does not see the tensors inside. "
                f"Return one of these, or call torch.export.register_dataclass({name}) first"
            )


class BatchTrial:
    """Decides how calls of a model are cut, once for each kind of call."""

    def __init__(self, model: nn.Module, stages: LocalStages) -> None:
        self._model, self._stages = model, stages
        self._modules = list(model.modules())
        self._known: dict[Hashable, Division] = {}

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any = None) -> Hashable:
        """Return the kind of a call: its inputs, and the state of the model."""
        leaves, tree = tree_flatten((tuple(args), dict(kwargs), targets))
        modes = tuple(module.training for module in self._modules)
        return kind_of(leaves, tree), modes, torch.is_grad_enabled()

    def division(
        self,
        kind: Hashable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Any = None,
        *,
        cuts: bool = True,
    ) -> Division:
        """Return how a call is cut; ranks that must run the same forwards agree.

        Args:
            kind: of the call.
            args: positional inputs.
            kwargs: inputs by name.
            targets: of the loss function, cut as the inputs are.
            cuts: whether micro-batches are wanted.
        """
        leaves = tree_leaves((tuple(args), dict(kwargs), targets))
        first_rows(leaves)  # a batch with rows
        key = kind, cuts
        found = self._known.get(key)
        # Extents that agreed by chance at first are no rows of a batch.
        stale = found is not None and found.dims is not None and not rows_of(leaves, found.dims)
        is_new = self._stages.is_new(found is None or stale)
        if found is None or is_new:
            with self._apart():
                found = self._known[key] = self._tried(args, kwargs, targets, leaves, cuts)
        return found

    def _apart(self) -> ExitStack:
        """Return a context that leaves no trace."""
        stack = ExitStack()
        stack.enter_context(untouched(self._model))
        stack.enter_context(self._stages.dropout.left_out())
        stack.enter_context(torch.no_grad())
        return stack

    def _tried(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Any,
        leaves: Sequence[Any],
        cuts: bool,
    ) -> Division:
        rows = first_rows(leaves)
        with self._stages.left.noting():
            outline = self._stages.outline(MicroBatch(tuple(args), kwargs, rows, targets))
        _check_seen(outline)
        proxies = [x for x in tree_leaves(outline) if isinstance(x, StageProxy)]
        self._check_alike(tree_flatten(outline)[1], proxies)
        kept = frozenset[int]().union(*(proxy.blocks for proxy in proxies))
        failure = ""
        candidates = list(_candidates(leaves)) if cuts else []
        most, least = self._stages.agree([len(candidates), -len(candidates)])
        # Ranks with unequal numbers of them have batches of unlike shapes: each stays whole.
        for dims in candidates if most == -least else ():
            joins, error = self._joins(args, kwargs, targets, dims, kept)
            failure = failure or error
            (failed,) = self._stages.agree([joins is None])
            if not failed and joins is not None:
                return Division(dims, joins, kept)
        return Division(None, (), kept, failure)

    def _check_alike(self, tree: TreeSpec, proxies: Sequence[StageProxy]) -> None:
        """Check that the output has the same structure on every stage.

        Raises:
            UsageError: it has not; on each of them.
        """
        facts = str(tree), [(tuple(p.shape), p.dtype, sorted(p.blocks)) for p in proxies]
        digest = zlib.crc32(repr(facts).encode())
        most, least = self._stages.agree([digest, -digest])
        if most != -least:
            raise UsageError(
                "expected the model to return the same structure on every pipeline stage, found "
                "several: hooks on blocks put something into it, and blocks of other stages have "
                "none of those that were there before accelerator.prepare(). Return it from the "
                "model, or put such hooks on after prepare()"
            )

    def _joins(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Any,
        dims: Dims,
        kept: frozenset[int],
    ) -> tuple[tuple[Dims, ...] | None, str]:
        """Return the dims of the blocks' tensors, if parts along some dims make up the whole.

        Else None, and the error that was raised, if there was any.
        """
        stages = [worker.stage for worker in self._stages.workers.values()]
        try:
            whole, parts = trial_parts(args, kwargs, targets, dims)
            metas = stages[0].left(whole.args, whole.kwargs)
            joins = _joins_of(metas, [stages[0].left(p.args, p.kwargs) for p in parts])
            fits = all(self._fits(stage, whole, parts, joins, kept) for stage in stages)
        except CollectiveError:
            raise  # another rank has failed: no answer of this one would reach it
        except Exception as error:  # whatever a model raises for parts along a wrong dim
            return None, f"{type(error).__name__}: {error}"
        return (joins if fits else None), ""

    def _fits(
        self,
        stage: Stage,
        whole: MicroBatch,
        parts: Sequence[MicroBatch],
        joins: Sequence[Dims],
        kept: frozenset[int],
    ) -> bool:
        """Whether the blocks of a stage give the same for the whole and for its parts.

        Whatever the whole leaves behind, such as statistics and counts, parts must not change.
        """
        left = self._stages.left
        before = stage.receives(whole.args, whole.kwargs)
        received = random_tensors([meta[:2] for meta in before], self._stages.device)
        along = joins[stage.blocks.start - 1][: len(before)] if before else ()
        sizes = [stage.receives(part.args, part.kwargs) for part in parts]
        shares = cut_tensors(received, along, sizes)
        expected, changed = self._run(stage, whole, received, kept), left.state()
        found = [
            self._run(stage, part, share, kept) for part, share in zip(parts, shares, strict=True)
        ]
        return is_left_equal(changed, left.state()) and all(
            is_same(join([part[block][place] for part in found], dim), tensor)
            for block, tensors in expected.items()
            for place, (tensor, dim) in enumerate(zip(tensors, joins[block], strict=False))
        )

    def _run(
        self, stage: Stage, batch: MicroBatch, received: Sequence[Tensor], kept: frozenset[int]
    ) -> Mapping[int, Sequence[Tensor]]:
        views = [tensor.clone() for tensor in received]  # blocks may change them in place
        dropout = self._stages.dropout
        with dropout.forward(dropout.forwards), self._stages.inner.running():
            return stage.run(batch.args, batch.kwargs, views, kept).made
