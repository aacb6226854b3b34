"""Finds by trial how calls of the model, and their losses, can be cut into micro-batches."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from drivetrain.errors import CollectiveError, UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Arguments, Keywords
from drivetrain.model.modules import UninheritedHook
from drivetrain.model.untouched import is_left_equal, untouched
from drivetrain.nested import tensors_in
from drivetrain_megatron.pipeline.losses import TargetCounter, Weights, has_negative
from drivetrain_megatron.pipeline.runner import LocalStages, LossOf
from drivetrain_megatron.pipeline.stage import ProxyPlace, Stage, StagePass, Watch, hidden
from drivetrain_megatron.pipeline.transfer import (
    Dims,
    DividedCall,
    Division,
    MicroBatch,
    cut_at,
    first_rows,
    is_same,
    join,
    joined_dim,
    rows_of,
    tolerance,
)
from drivetrain_megatron.recording.phases import PLAIN, TensorMeta
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.shapes import Metas
from drivetrain_megatron.tensor.operators import TokenShards

# --- how calls of the model can be cut, and along which dims ---

# A few rows of a call's inputs run through each stage whole and in parts, with random tensors in
# the place of the stage before. Where the joined tensors of the parts equal those of the whole, the
# blocks treat rows alike, and the inputs may be cut so. Nothing is sent but the ranks' agreement,
# and the model, its buffers and the random generators are afterwards what they were.


_ROWS = 3
"""Rows of a trial: a part of one row, and one of the others."""

_SEED = 0

_DRAWN = 1_000_003
"""Random numbers that are drawn for one tensor: a prime, so that rows of a matrix differ."""


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


def trial_parts(batch: MicroBatch, dims: Dims) -> tuple[MicroBatch, list[MicroBatch]]:
    """Return a small batch of a call's first rows, and its parts, of uneven rows.

    Each draws other random numbers: blocks that draw do not give for parts what they do for all.
    """
    count = min(rows_of(batch.flat()[0], dims) or 0, _ROWS)
    (whole,) = cut_at(batch, dims, (0, count))
    parts = cut_at(batch, dims, (0, 1, count))
    return whole, [dataclasses.replace(part, number=i) for i, part in enumerate(parts, 1)]


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
    """Decides how calls of a model are cut, once for each kind of call.

    Args:
        model: the user's.
        stages: those of this rank.
        tokens: how activations between blocks are shards of the sequence; None: they are whole.
    """

    def __init__(
        self, model: nn.Module, stages: LocalStages, tokens: TokenShards | None = None
    ) -> None:
        self._model, self._stages, self._tokens = model, stages, tokens
        self._modules = list(model.modules())
        self._known: dict[Hashable, Division] = {}

    def kind(self, batch: MicroBatch) -> Hashable:
        """Return the kind of a call: its inputs, and the state of the model."""
        modes = tuple(module.training for module in self._modules)
        return kind_of(*batch.flat()), modes, torch.is_grad_enabled()

    def division(self, kind: Hashable, batch: MicroBatch, *, cuts: bool = True) -> Division:
        """Return how a call is cut; ranks that must run the same forwards agree.

        Args:
            kind: of the call.
            batch: its inputs and targets.
            cuts: whether micro-batches are wanted.
        """
        leaves, _ = batch.flat()
        first_rows(leaves)  # a batch with rows
        key = kind, cuts
        found = self._known.get(key)
        # Extents that agreed by chance at first are no rows of a batch.
        stale = found is not None and found.dims is not None and not rows_of(leaves, found.dims)
        is_new = self._stages.is_new(found is None or stale)
        if found is None or is_new:
            with untouched(self._model), self._stages.dropout.left_out(), torch.no_grad():
                tried = self._tried(batch, leaves, cuts)
            if found is None or stale or tried.dims is not None:  # another replica's has one row
                found = self._known[key] = tried
        return found

    def _tried(self, batch: MicroBatch, leaves: Sequence[Any], cuts: bool) -> Division:
        with self._stages.left.noting():
            outline = self._stages.outline(batch)
        _check_seen(outline)
        proxies = [x for x in tree_leaves(outline) if isinstance(x, StageProxy)]
        self._check_alike(tree_flatten(outline)[1], proxies)
        kept = frozenset[int]().union(*(proxy.blocks for proxy in proxies))
        failure = ""
        candidates = list(_candidates(leaves)) if cuts else []
        most, least = self._stages.agree([len(candidates), -len(candidates)])
        # Ranks with unequal numbers of them have batches of unlike shapes: each stays whole.
        for dims in candidates if most == -least else ():
            joins, error = self._joins(batch, dims, kept)
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
        facts = str(tree), [(p.dim(), p.dtype, sorted(p.blocks)) for p in proxies]
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
        self, batch: MicroBatch, dims: Dims, kept: frozenset[int]
    ) -> tuple[tuple[Dims, ...] | None, str]:
        """Return the dims of the blocks' tensors, if parts along some dims make up the whole.

        Else None, and the error that was raised, if there was any.
        """
        stages = [worker.stage for worker in self._stages.workers.values()]
        try:
            whole, parts = trial_parts(batch, dims)
            metas = stages[0].left(whole)
            joins = _joins_of(metas, [stages[0].left(p) for p in parts])
            fits = not self._cuts_shards(metas, joins) and all(
                self._fits(stage, whole, parts, joins, kept) for stage in stages
            )
        except CollectiveError:
            raise  # another rank has failed: no answer of this one would reach it
        except Exception as error:  # whatever a model raises for parts along a wrong dim
            return None, f"{type(error).__name__}: {error}"
        return (joins if fits else None), ""

    def _cuts_shards(self, whole: Metas, joins: Sequence[Dims]) -> bool:
        """Whether a cut goes along the dim of which ranks have shards: those of parts are others.

        Of three tokens they may be the same ones by chance, as where tokens are equal.
        """
        if self._tokens is None:
            return False
        for metas, dims in zip(whole, joins, strict=True):
            activations = (
                dim == len(meta.shape) + self._tokens.dim
                for meta, dim in zip(metas, dims, strict=True)
                if meta.dtype.is_floating_point
            )
            if next(activations, False):
                return True
        return False

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
        before = stage.receives(whole)
        received = random_tensors([meta[:2] for meta in before], self._stages.device)
        along = joins[stage.blocks.start - 1][: len(before)] if before else ()
        sizes = [stage.receives(part) for part in parts]
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
        with self._stages.dropout.forward(batch.number), self._stages.inner.running():
            return stage.run(batch, views, kept).made


# --- whether the loss of a batch is a weighted sum of its micro-batches' losses ---

# The last stage makes the loss of a few rows, whole and in parts, of random tensors in the place of
# its blocks' outputs and with random parameters after them. The loss can be cut if the gradient of
# the whole, on the rows of a part, is the part's gradient times the part's weight, and the losses
# times their weights add up. Integers, masks and numbers of the batch are changed before, and some
# targets ignored, so that weights show which depend on them. A loss that compares such values may
# count in ways that no trial exhausts: it is not cut.


logger = get_logger(__name__)

_Given = Mapping[int, Sequence[Tensor]]
_Answer = TypeVar("_Answer")


class LossTrial:
    """Decides how losses are cut, once for each kind of call."""

    def __init__(self, model: nn.Module, stages: LocalStages) -> None:
        self._model, self._stages = model, stages
        self._known: dict[Hashable, Weights] = {}
        self._dims: dict[Hashable, Dims | None] = {}

    def weights(self, call: DividedCall, loss_of: LossOf, *, handed_over: bool = False) -> Weights:
        """Return the weights of micro-batches; the ranks of a cell agree.

        Args:
            call: divided.
            loss_of: makes the loss of the model's output and the targets.
            handed_over: whether the script gave the function, in this call.

        Raises:
            UsageError: ranks were given different functions; on each of them.
        """
        negative = has_negative(call.whole)
        key = call.kind, _identity(loss_of), _plain(vars(self._model)), negative
        unknown = key not in self._known
        if self._is_new(loss_of, unknown) if handed_over else self._stages.is_new(unknown):
            found = Weights.ROWS
            if (last := self._stages.last) is not None:
                tried = self._tried(last.stage, call, lambda t: t.weights(call.whole, loss_of))
                found = Weights.NONE if tried is None else tried
            self._known[key] = Weights(*self._stages.agree([found]))
        known = self._known[key]
        return Weights.ROWS if known is Weights.TARGETS and not negative else known

    def _is_new(self, loss_of: LossOf, is_new: bool) -> bool:
        """Return whether some rank has no decision for a loss function: then all try anew.

        In every call, since a rank that tries alone would wait for the others.
        """
        digest = zlib.crc32(repr(_code(loss_of)).encode())
        new, most, least = self._stages.agree([is_new, digest, -digest])
        if most != -least:
            raise UsageError(
                "expected the same loss function on every rank of a pipeline, found another one "
                f"than {_code(loss_of)[1]} of this rank: the last stage makes the loss, and the "
                "others must know how; hand one function over on all ranks"
            )
        return bool(new)

    def outputs(self, call: DividedCall) -> Dims | None:
        """Return the dims along which outputs are joined; None if they are no parts of the whole.

        Stages before the last need not know them: they get an empty tuple.
        """
        if self._stages.is_new(call.kind not in self._dims):
            found: Dims | None = ()
            if (last := self._stages.last) is not None:
                found = self._tried(last.stage, call, lambda t: t.outputs(call.whole))
            (failed,) = self._stages.agree([found is None])
            self._dims[call.kind] = None if failed else found
        return self._dims[call.kind]

    def _tried(
        self, last: Stage, call: DividedCall, ask: Callable[["_LastStage"], _Answer]
    ) -> _Answer | None:
        """Return the answer of a trial on the last stage; None if the model refuses the values."""
        trial = _LastStage(self._stages, last, call.division)
        try:
            with untouched(self._model):
                _take_hooks(self._model)
                with trial.set_up():
                    return ask(trial)
        except CollectiveError:
            raise  # another rank has failed: no answer of this one would reach it
        except Exception as error:  # whatever a model raises for other values
            logger.warning_once(
                f"pipeline: a trial with other values raised {type(error).__name__}: {error}; what "
                "follows the blocks is made of the whole batch",
                main_process_only=False,
            )
            return None


def _take_hooks(model: nn.Module) -> None:
    """Take off the hooks of the data-parallel strategy, which would wait for a backward."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in list(hooks.items()):
                if isinstance(hook, UninheritedHook):
                    del hooks[number]


def _identity(function: Any) -> Hashable:
    """Return the identity of a loss function: its code, and its plain values."""
    inner = getattr(function, "func", None)  # of a functools.partial
    cells = enumerate(getattr(function, "__closure__", None) or ())
    held = {
        **{str(place): cell.cell_contents for place, cell in cells},
        **getattr(function, "__dict__", {}),
        **getattr(getattr(function, "__self__", None), "__dict__", {}),
        **getattr(function, "keywords", {}),
    }
    code = getattr(function, "__code__", type(function))
    return code, _plain(held), None if inner is None else _identity(inner)


def _code(function: Any) -> tuple[str, str, int]:
    """Return where the code of a loss function is: module, name, line."""
    inner = getattr(function, "func", None)  # of a functools.partial
    if inner is not None:
        return _code(inner)
    named = function if hasattr(function, "__qualname__") else type(function)
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
    return named.__module__, named.__qualname__, line


def _plain(held: Mapping[str, Any]) -> Hashable:
    """Return the plain values among attributes; of numbers, such as factors, which are zero."""
    return tuple(
        (name, value == 0 if isinstance(value, int | float) else value)
        for name, value in held.items()
        if isinstance(value, bool | int | float | str | None)
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """A loss, its gradients by the tensors of blocks, and its counted targets."""

    loss: Tensor
    gradients: Sequence[Tensor]
    counter: "_Observer"
    rows: int


class _Observer(TargetCounter):
    """Sees, too, whether values of the batch are compared after the blocks."""

    def __init__(self) -> None:
        super().__init__(ignores_zeros=True)
        self.watched: StagePass | None = None
        self.compares = False

    def watch(self, stage_pass: StagePass) -> AbstractContextManager[None]:
        """Return the context of a pass, in which comparisons count after its blocks."""
        self.watched = stage_pass
        return nullcontext()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Call a function of torch; note comparisons of tensors without gradient."""
        result = super().__torch_function__(func, types, args, kwargs)
        after = self.watched is None or self.watched.is_after_blocks
        if after and isinstance(result, Tensor) and result.dtype is torch.bool:
            given = list(tensors_in((args, kwargs or {})))
            compared = any(tensor.dtype is not torch.bool for tensor in given)
            self.compares |= compared and not any(tensor.requires_grad for tensor in given)
        return result


class _LastStage:
    """One trial on the last stage."""

    def __init__(self, stages: LocalStages, stage: Stage, division: Division) -> None:
        self._stages, self._stage, self._division = stages, stage, division

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Context in which parameters outside of blocks are random, and nothing is dropped."""
        places = []
        for several in self._stage.outer.values():
            values = [_random_parameter(place.proxy, self._stages.device) for place in several[:1]]
            places += [ProxyPlace(place.module, place.name, values[0]) for place in several]
        kind = self._stages.device.type
        exact = torch.autocast(kind, enabled=False)
        with hidden(places), self._stages.dropout.left_out(), torch.enable_grad(), exact:
            yield

    def weights(self, batch: MicroBatch, loss_of: LossOf) -> Weights:
        """Return the weights that fit."""
        whole, *parts = (self._made(*each, loss_of) for each in self._small(batch))
        if any(made.counter.compares for made in (whole, *parts)):
            return Weights.NONE
        joins = self._division.joins
        along = [dim for block in sorted(self._division.kept) for dim in joins[block]]
        return _fitting(whole, parts, along)

    def outputs(self, batch: MicroBatch) -> Dims | None:
        """Return the dims along which outputs make up the whole output; None if one does not."""
        outputs = [
            self._stage_output(*each, lambda _: nullcontext()) for each in self._small(batch)
        ]
        dims = []
        for whole, *parts in zip(*map(tree_leaves, outputs), strict=True):
            if isinstance(whole, StageProxy):
                return None
            dim = None
            if isinstance(whole, Tensor):
                dim = joined_dim(tuple(whole.shape), [tuple(part.shape) for part in parts])
                # Without rows it may be a mean or a count, which are equal here by chance.
                if dim is None or not is_same(join(parts, dim), whole):
                    return None
            dims.append(dim)
        return tuple(dims)

    def _small(self, batch: MicroBatch) -> tuple[tuple[MicroBatch, _Given], ...]:
        """Return a small batch of other values, and its parts, each with tensors of blocks."""
        dims = self._division.dims or ()
        leaves, tree = batch.flat()
        some, _ = trial_parts(batch, dims)[0].flat()
        changed = [
            x if dim is None else _changed(x, dim, _one(all_rows))
            for x, all_rows, dim in zip(some, leaves, dims, strict=True)
        ]
        args, kwargs, targets = tree_unflatten(changed, tree)
        whole, parts = trial_parts(MicroBatch(args, kwargs, targets=targets), dims)
        metas = [self._stage.given(part) for part in (whole, *parts)]
        given = {
            block: random_tensors(
                [(shape, precise(dtype)) for shape, dtype, _ in metas[0][block]],
                self._stages.device,
            )
            for block in sorted(self._division.kept)
        }
        cut = [
            {
                block: cut_tensors(
                    tensors,
                    self._division.joins[block][: len(tensors)],
                    [m[block] for m in metas[1:]],
                )[index]
                for block, tensors in given.items()
            }
            for index in range(len(parts))
        ]
        return (whole, given), *zip(parts, cut, strict=True)

    def _stage_output(self, batch: MicroBatch, given: _Given, watch: Watch) -> Any:
        with self._stages.dropout.forward(batch.number), self._stages.inner.running():
            return self._stage.finish(batch, given, watch)

    def _made(self, batch: MicroBatch, given: _Given, loss_of: LossOf) -> _Made:
        """Make the loss of a batch and given tensors of blocks."""
        leaves = {
            block: [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
            for block, tensors in given.items()
        }
        views = {block: [x.view_as(x) for x in tensors] for block, tensors in leaves.items()}
        observer = _Observer()
        with observer:
            loss = loss_of(self._stage_output(batch, views, observer.watch), batch.targets)
        wanted = [x for tensors in leaves.values() for x in tensors if x.requires_grad]
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        by_leaf = dict(zip(map(id, wanted), found, strict=True))
        flat = [x for tensors in leaves.values() for x in tensors]
        gradients = [by_leaf.get(id(x), torch.zeros_like(x)) for x in flat]
        return _Made(loss.detach(), gradients, observer, batch.rows)


def _fitting(whole: _Made, parts: Sequence[_Made], dims: Sequence[int | None]) -> Weights:
    """Return the first weights with which the parts make up the whole."""
    rows = [made.rows for made in parts]
    counts = [made.counter.counts for made in parts]
    choices: list[tuple[Weights, list[float]]] = []
    if all(len(each) == 1 for each in counts):
        lengths = [made.counter.lengths[0] / count for made, count in zip(parts, rows, strict=True)]
        varies = whole.counter.varies or len(set(lengths)) > 1
        kind = Weights.COUNTED if varies else Weights.TARGETS
        total = sum(each[0] for each in counts)
        choices.append((kind, [each[0] / total for each in counts]))
    choices.append((Weights.ROWS, [count / sum(rows) for count in rows]))
    choices.append((Weights.ONES, [1.0] * len(rows)))
    for kind, weights in choices:
        if _holds(whole, parts, dims, weights):
            return kind
    return Weights.NONE


def _holds(
    whole: _Made, parts: Sequence[_Made], dims: Sequence[int | None], weights: Sequence[float]
) -> bool:
    """Whether weighted losses add up to the whole one, and their gradients are the whole's."""
    pairs = list(zip(weights, parts, strict=True))
    total = torch.stack([weight * made.loss for weight, made in pairs]).sum()
    limit = tolerance(total.dtype)
    if not bool((total - whole.loss).abs() <= limit * whole.loss.abs()):
        return False
    moved = False
    for place, dim in enumerate(dims):
        shares = [weight * made.gradients[place] for weight, made in pairs]
        found = torch.stack(shares).sum(0) if dim is None else torch.cat(shares, dim)
        expected = whole.gradients[place]
        size = torch.linalg.vector_norm(expected)
        if not bool(torch.linalg.vector_norm(found - expected) <= limit * size):
            return False
        moved |= bool(size > 0)
    return moved


def _random_parameter(like: Tensor, device: torch.device) -> Tensor:
    """Return random numbers for a parameter, of a size at which outputs are about 1."""
    (found,) = random_tensors([(tuple(like.shape), precise(like.dtype))], device)
    return found / max(like.shape[-1], 1) ** 0.5 if like.dim() > 1 else 1.0 + 0.1 * found


def _one(leaf: Tensor) -> int:
    """Return one, where an input may have such a value: a class, a word, an element of a mask."""
    if leaf.is_floating_point() or leaf.dtype is torch.bool:
        return 1
    return min(max(int(leaf.max()), 0), 1)


def _changed(leaf: Tensor, dim: int, one: int) -> Tensor:
    """Return an input with other values: the first row counts, the next does not, the last partly.

    Zero is a value of every vocabulary, class and mask.
    """
    rows = leaf.movedim(dim, 0).clone()
    rows[0] = rows[0].masked_fill(rows[0] <= 0, one)
    rows[1:-1] = 0
    generator = torch.Generator(device="cpu").manual_seed(1)
    drawn = torch.rand(rows[-1].shape, generator=generator, device="cpu").to(leaf.device)
    rows[-1] = rows[-1].masked_fill(drawn < 0.5, 0)
    corner = (0,) * (rows.dim() - 1)
    rows[(-1, *corner)] = rows[(0, *corner)]
    return rows.movedim(0, dim)
