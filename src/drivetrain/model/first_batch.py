"""A batch of the script's loader as arguments of its model: by name, by position, shorter.

Nobody says how the script calls its model with a batch, so the likely ways are tried in turn.
Sequences are cut, if the model takes shorter ones: a plan does not depend on their length, and is
tried in a fraction of the time.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.data.examples import ExampleBatch

LENGTH = 17
"""Of cut sequences: a prime, which is no model's number of heads or features."""


TARGETS = ("label", "target")
"""How the names of arguments begin that a forward may do without."""


class Candidate(NamedTuple):
    """Arguments with which a model can perhaps be called.

    Attributes:
        what: in a few words.
        args: by position.
        kwargs: by name.
        problem: why there are none; else empty.
    """

    what: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    problem: str = ""


def batches_as_arguments(
    model: nn.Module, examples: Iterable[ExampleBatch], *, cuts: bool = True
) -> Iterator[Candidate]:
    """Yield the ways to call a model with batches, the likely ones first.

    Args:
        model: the user's.
        examples: batches, or problems.
        cuts: whether sequences are cut, if the model takes shorter ones.
    """
    for example in examples:
        if example.problem:
            yield Candidate(example.origin, problem=example.problem)
            continue
        for how, args, kwargs in _calls(model, example.batch):
            what = f"{example.origin}{how}"
            for changed, (given, named) in _variants(model, (args, kwargs), cuts=cuts):
                yield Candidate(f"{what}{changed}", given, named)


_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _calls(model: nn.Module, batch: Any) -> Iterator[_Call]:
    """Yield how a batch may be handed over, the arguments by position, and those by name."""
    if isinstance(batch, Mapping):
        taken = {key: batch[key] for key in batch if key in _names(model)}
        inputs = {key: value for key, value in taken.items() if not key.startswith(TARGETS)}
        for named in (taken, inputs) if len(inputs) < len(taken) else (taken,):
            if named:
                yield f", {', '.join(named)} by name", (), named
        values = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        yield from _by_position(tuple(values.values()))
        for key in list(values)[1:]:
            yield f", {key} alone", (values[key],), {}
    elif isinstance(batch, list | tuple) and batch:
        yield from _by_position(tuple(batch))
        if not isinstance(batch[0], Tensor):  # ((image, words), target) or ({...}, target)
            for how, args, kwargs in _calls(model, batch[0]):
                yield f", its first item{how}", args, kwargs
    elif not isinstance(batch, list | tuple):
        yield "", (batch,), {}


def _by_position(items: tuple[Any, ...]) -> Iterator[_Call]:
    """Yield all items, then always one less: the last ones may be targets."""
    for count in range(len(items), 0, -1):
        yield f", {count} of {len(items)} items", items[:count], {}


def _names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a forward that can be given by name."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name for each in parameters if each.kind in by_name}


def _variants(model: nn.Module, call: Any, *, cuts: bool) -> Iterator[tuple[str, Any]]:
    """Yield a call in the model's dtype, and as it is; each with sequences cut, and whole."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    calls = [("", call)]
    if dtype is not None and {t.dtype for t in _tensors(call) if t.is_floating_point()} - {dtype}:
        calls.insert(0, (f" in {dtype}", tree_map(lambda leaf: _cast(leaf, dtype), call)))
    for what, each in calls:
        short = _cut(each) if cuts else None
        if short is not None:
            yield f"{what}, cut to {LENGTH}", short
        yield what, each


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _cut(call: Any) -> Any:
    """Return a call with shorter sequences, where they have most content; None without any.

    Integers of shape (rows, length) are sequences; other tensors are cut where they are as long,
    as masks are.
    """
    counts: dict[int, Tensor] = {}
    for tensor in _tensors(call):
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] > LENGTH:
            length = tensor.shape[1]
            filled = (tensor != 0).sum(0)
            counts[length] = counts.get(length, torch.zeros_like(filled)) + filled
    if not counts:
        return None
    starts = {length: _fullest(count) for length, count in counts.items()}

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            for dim in range(1, leaf.dim()):
                if leaf.shape[dim] in starts:
                    leaf = leaf.narrow(dim, starts[leaf.shape[dim]], LENGTH).contiguous()
        return leaf

    return tree_map(cut, call)


def _fullest(count: Tensor) -> int:
    """Return where the window with the highest sum begins, the first of several."""
    sums = count.unfold(0, LENGTH, 1).sum(1).tolist()
    return max(range(len(sums)), key=sums.__getitem__)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
