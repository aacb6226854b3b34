"""Finds by trial whether the loss of a batch is a weighted sum of its micro-batches' losses.

The last stage makes the loss of a few rows, whole and in parts, of random tensors in the place of
its blocks' outputs and with random parameters after them. The loss can be cut if the gradient of
the whole, on the rows of a part, is the part's gradient times the part's weight, and the losses
times their weights add up. Integers, masks and numbers of the batch are changed before, and some
targets ignored, so that weights show which depend on them. A loss that compares such values may
count in ways that no trial exhausts: it is not cut.
"""

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from drivetrain.errors import CollectiveError, UsageError
from drivetrain.log import get_logger
from drivetrain.model import untouched
from drivetrain.model.look import tensors_in
from drivetrain.parts.wrapping import UninheritedHook
from drivetrain_megatron.pipeline.batch_trial import (
    Division,
    cut_tensors,
    precise,
    random_tensors,
    trial_parts,
)
from drivetrain_megatron.pipeline.batches import (
    Dims,
    MicroBatch,
    is_same,
    join,
    joined_dim,
    tolerance,
)
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.other_stages import ProxyPlace, hidden
from drivetrain_megatron.pipeline.shares import TargetCounter, Weights, has_negative
from drivetrain_megatron.pipeline.stage_pass import StagePass
from drivetrain_megatron.pipeline.stages import Stage, Watch
from drivetrain_megatron.pipeline.worker import LossOf
from drivetrain_megatron.recording.proxy import StageProxy

logger = get_logger(__name__)

_Given = Mapping[int, Sequence[Tensor]]
_Answer = TypeVar("_Answer")


class LossTrial:
    """Decides how losses are cut, once for each kind of call."""

    def __init__(self, model: nn.Module, stages: LocalStages) -> None:
        self._model, self._stages = model, stages
        self._known: dict[Hashable, Weights] = {}
        self._dims: dict[Hashable, Dims | None] = {}

    def weights(
        self,
        kind: Hashable,
        whole: MicroBatch,
        division: Division,
        loss_of: LossOf,
        *,
        handed_over: bool = False,
    ) -> Weights:
        """Return the weights of micro-batches; the ranks of a cell agree.

        Args:
            kind: of the call.
            whole: the batch of the call.
            division: how it is cut.
            loss_of: makes the loss of the model's output and the targets.
            handed_over: whether the script gave the function, in this call.

        Raises:
            UsageError: ranks were given different functions; on each of them.
        """
        negative = has_negative(whole)
        key = kind, _identity(loss_of), _plain(vars(self._model)), negative
        unknown = key not in self._known
        if self._is_new(loss_of, unknown) if handed_over else self._stages.is_new(unknown):
            found = Weights.ROWS
            if self._stages.last is not None:
                tried = self._tried(division, lambda trial: trial.weights(whole, loss_of))
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

    def outputs(self, kind: Hashable, whole: MicroBatch, division: Division) -> Dims | None:
        """Return the dims along which outputs are joined; None if they are no parts of the whole.

        Stages before the last need not know them: they get an empty tuple.
        """
        if division.dims is None:
            return None
        if self._stages.is_new(kind not in self._dims):
            found: Dims | None = ()
            if self._stages.last is not None:
                found = self._tried(division, lambda trial: trial.outputs(whole))
            (failed,) = self._stages.agree([found is None])
            self._dims[kind] = None if failed else found
        return self._dims[kind]

    def _tried(self, division: Division, ask: Callable[["_LastStage"], _Answer]) -> _Answer | None:
        """Return the answer of a trial on the last stage; None if the model refuses the values."""
        last = self._stages.last
        if last is None:
            return None
        trial = _LastStage(self._stages, last.stage, division)
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

    @contextmanager
    def watch(self, stage_pass: StagePass) -> Iterator[None]:
        """Context of a pass, in which comparisons count after its blocks."""
        self.watched = stage_pass
        yield

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
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
        for several in self._stage.outer_places().values():
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
        leaves, tree = tree_flatten((batch.args, dict(batch.kwargs), batch.targets))
        few, _ = trial_parts(batch.args, batch.kwargs, batch.targets, dims)
        some = tree_leaves((few.args, dict(few.kwargs), few.targets))
        changed = [
            x if dim is None else _changed(x, dim, _one(all_rows))
            for x, all_rows, dim in zip(some, leaves, dims, strict=True)
        ]
        args, kwargs, targets = tree_unflatten(changed, tree)
        whole, parts = trial_parts(args, kwargs, targets, dims)
        metas = [self._stage.given(part.args, part.kwargs) for part in (whole, *parts)]
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
        dropout = self._stages.dropout
        with dropout.forward(dropout.forwards), self._stages.inner.running():
            return self._stage.finish(batch.args, batch.kwargs, given, watch)

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
