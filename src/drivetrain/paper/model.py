"""A model on paper: anything that lists its units for a micro-batch, or looks at a module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import ConfigError
from drivetrain.model import Look, look_at
from drivetrain.model.first_batch import Candidate
from drivetrain.paper.work import (
    ATTENTION,
    LOSS,
    TABLE,
    Boundary,
    MatrixProduct,
    MemoryPass,
    Operation,
    PaperUnit,
    Recompute,
    Saved,
    UnitWork,
    widened,
)
from drivetrain.parts.blocks import model_units


class PaperModel(Protocol):
    """A model on paper: sizes alone, or a module that was looked at."""

    @property
    def layers(self) -> int:
        """Number of repeated blocks, between which a pipeline may be cut."""
        ...

    @property
    def heads(self) -> int:
        """Heads of attention that tensor parallelism divides; 0 without attention."""
        ...

    @property
    def seq(self) -> int:
        """Tokens of a sample; 1 where a sample is no sequence."""
        ...

    @property
    def parameters(self) -> int:
        """Number of distinct parameters."""
        ...

    def model_flops(self, batch: int) -> float:
        """Return the operations of a step on a batch of samples, without recomputation."""
        ...

    def units(
        self, micro_batch: int, recompute: Recompute, *, fused: bool, width: int = 2
    ) -> Sequence[PaperUnit]:
        """Return the units in the order of forward; equal ones are the same object.

        Args:
            micro_batch: samples.
            recompute: what blocks compute again in backward.
            fused: whether attention is one kernel that keeps no scores.
            width: bytes of a number.
        """
        ...


# --- from looks at the module itself: any architecture, with no value computed ---

# Two looks with different numbers of samples say how each number grows with the batch. The units
# are the repeated blocks; the operations before the first block, and those behind the last block,
# are one unit each. Where nothing repeats, the children of the model are the units.


ROWS = (2, 4)
"""Samples of the two looks: one sample alone is refused by batch norms."""

LOSS_PASSES: Mapping[int, tuple[int, int]] = {2: (18, 18), 4: (12, 12)}
"""Bytes per logit of a cross entropy by torch's kernels, in forward and backward, by the bytes of a
logit: a cast to fp32 (2 + 4), the logarithm of the softmax (4 + 4), the read for the loss (4); in
backward the result read and the gradient written (4 + 4), read once more (4), and cast (4 + 2)."""

_SHOWN = 3
"""Problems of inputs that an error names."""


@dataclass
class SeenModel:
    """A module on paper.

    Attributes:
        name: of its class.
        looks: at the module, by the number of samples.
        parts: names of modules that are the units where no blocks repeat.
        heads: of attention, which tensor parallelism divides; 0 without.
        seq: tokens of a sample; 1 where a sample is no sequence.
    """

    name: str
    looks: Mapping[int, Look]
    parts: Sequence[str]
    heads: int
    seq: int
    _known: dict[tuple[int, bool], list[PaperUnit]] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> int:
        """Number of repeated blocks."""
        return len([call for call in self._look.blocks if call.caller is None])

    @property
    def parameters(self) -> int:
        """Number of distinct parameters."""
        numbers = self._look.parameters.values()
        return sum(prod(self._look.tensors[number].facts.shape) for number in numbers)

    @property
    def width(self) -> int:
        """Bytes of a number in the module."""
        numbers = self._look.parameters.values()
        return max((self._look.tensors[n].facts.dtype.itemsize for n in numbers), default=4)

    def model_flops(self, batch: int) -> float:
        """Return the operations of a step: backward has twice those of forward."""
        (few, less), (many, more) = ((rows, look.work) for rows, look in self.looks.items())
        return 3.0 * (less + (batch - few) * (more - less) / (many - few))

    def units(
        self, micro_batch: int, recompute: Recompute, *, fused: bool, width: int = 2
    ) -> Sequence[PaperUnit]:
        """Return the units for a micro-batch: see ``PaperModel``."""
        few, many = self.looks
        part = (micro_batch - few) / (many - few)
        made: dict[int, PaperUnit] = {}
        found = []
        for one, other in zip(self._drawn(few, fused), self._drawn(many, fused), strict=True):
            if id(one) not in made:
                unit = widened(_between(one, other, part), width / self.width)
                made[id(one)] = replace(unit, recompute=recompute)
            found.append(made[id(one)])
        less, more = map(_logits, self.looks.values())
        found[-1] = with_loss(found[-1], less + part * (more - less), width)
        return found

    @property
    def _look(self) -> Look:
        return self.looks[ROWS[0]]

    def _drawn(self, rows: int, fused: bool) -> list[PaperUnit]:
        """Return the units of a look; equal ones are the same object."""
        if (rows, fused) not in self._known:
            found: dict[Any, PaperUnit] = {}
            units = [self._shared(found, unit) for unit in self._fresh(self.looks[rows], fused)]
            self._known[rows, fused] = units
        return self._known[rows, fused]

    @staticmethod
    def _shared(found: dict[Any, PaperUnit], unit: PaperUnit) -> PaperUnit:
        key = unit.forward, unit.saved, unit.parameters, unit.enters, unit.repeated
        return found.setdefault(key, unit)

    def _fresh(self, look: Look, fused: bool) -> Iterator[PaperUnit]:
        owned, kept = set[int](), set[int]()
        spans = list(_spans(look, self.parts))
        for place, (name, operations, enters) in enumerate(spans):
            repeated = name == BLOCK
            last = place == len(spans) - 1
            work = UnitWork(look, look.operations[operations.start : operations.stop], head=last)
            read = work.parameters()
            parameters = {n: cut for n, cut in read.items() if n not in owned}
            tied = {n: cut for n, cut in read.items() if n in owned}
            owned |= set(parameters)
            yield PaperUnit(
                name, work.forward(fused=fused), work.saved(kept, fused=fused),
                _counts(look, parameters), enters=enters, repeated=repeated,
                heads=self.heads if repeated else 0,
                sizes=tuple(prod(look.tensors[n].facts.shape) for n in parameters),
                borrowed=sum(count for count, _ in _counts(look, tied)),
            )  # fmt: skip


BLOCK = "block"
SIZES = ("rows", "inner", "columns", "copies")


def _spans(look: Look, parts: Sequence[str]) -> Iterator[tuple[str, range, int]]:
    """Yield (name, operations, bytes that enter) of units that together cover a look."""
    calls = [call for call in look.blocks if call.caller is None]
    if not calls:
        yield from _of_parts(look, parts)
        return
    last = 0
    for call in calls:
        if not last:
            yield "embedding", range(call.operations.start), 0
            last = call.operations.start
        yield BLOCK, range(last, call.operations.stop), _entering(look, call.given)
        last = call.operations.stop
    yield "head", range(last, len(look.operations)), 0


def _of_parts(look: Look, parts: Sequence[str]) -> Iterator[tuple[str, range, int]]:
    """Yield the calls of named modules; operations between two belong to the second one."""
    calls = sorted(
        (call for call in look.modules if call.name in parts),
        key=lambda call: call.operations.start,
    )
    last = 0
    for index, call in enumerate(calls):
        stop = len(look.operations) if index == len(calls) - 1 else call.operations.stop
        if stop > last:
            yield call.name, range(last, stop), _entering(look, call.inputs)
            last = stop
    if not calls:
        yield "model", range(len(look.operations)), 0


def _entering(look: Look, given: Iterable[int | None]) -> int:
    """Return the bytes of the activations among the arguments of a block."""
    numbers = {number for number in given if number is not None}
    return sum(look.tensors[n].facts.nbytes for n in numbers if look.tensors[n].requires_grad)


def _counts(look: Look, parameters: Mapping[int, bool]) -> tuple[tuple[int, bool], ...]:
    counts = {True: 0, False: 0}
    for number, cut in parameters.items():
        counts[cut] += prod(look.tensors[number].facts.shape)
    return (counts[True], True), (counts[False], False)


def _logits(look: Look) -> int:
    """Return the elements that go into the loss: a cross entropy in the model, or its output."""
    losses = [each.inputs[0] for each in look.operations if each.name == LOSS]
    numbers = losses or [number for _, number in look.output if number is not None]
    return prod(look.tensors[numbers[0]].facts.shape) if numbers else 0


def with_loss(unit: PaperUnit, logits: float, width: int) -> PaperUnit:
    """Return the last unit with a cross entropy, which computes and keeps numbers of 4 bytes.

    The logits stay as well: a script holds the model's output until backward has ended.
    """
    forward, back = LOSS_PASSES[width]
    loss = MemoryPass(forward * logits, back * logits, 6, "features", kind=LOSS)
    kept = Saved(4 * logits, "features"), Saved(width * logits, "features")
    return replace(unit, forward=(*unit.forward, loss), saved=(*unit.saved, *kept))


# --- between two looks ---


def _between(one: PaperUnit, other: PaperUnit, part: float) -> PaperUnit:
    """Return a unit whose numbers go on in a line from those of two units of unlike batches."""

    def at(first: float, second: float) -> float:
        return first + part * (second - first)

    return replace(
        one,
        forward=tuple(
            _operation_between(*pair, part) for pair in zip(one.forward, other.forward, strict=True)
        ),
        saved=tuple(
            replace(first, nbytes=at(first.nbytes, second.nbytes))
            for first, second in zip(one.saved, other.saved, strict=True)
        ),
        enters=at(one.enters, other.enters),
    )


def _operation_between(one: Operation, other: Operation, part: float) -> Operation:
    def at(name: str) -> float:
        first, second = getattr(one, name), getattr(other, name)
        return float(first + part * (second - first))

    match one:
        case MatrixProduct():
            rows, inner, columns, copies = (max(1, round(at(name))) for name in SIZES)
            return replace(one, rows=rows, inner=inner, columns=columns, copies=copies)
        case MemoryPass():
            return replace(one, nbytes=at("nbytes"), back=at("back"))
        case Boundary():
            return replace(one, nbytes=round(at("nbytes")))
    return one


# --- looking ---


def seen_model(model: nn.Module, candidates: Iterable[Candidate]) -> SeenModel:
    """Look at a model with the first inputs that its forward accepts.

    Args:
        model: with or without values; not changed.
        candidates: inputs to try, of one sample or more along the first dim.

    Raises:
        ConfigError: it accepts none of them.
    """
    problems: list[str] = []
    for candidate in candidates:
        if candidate.problem:
            problems.append(f"{candidate.what}: {candidate.problem}")
            continue
        try:
            return _seen(model, candidate)
        except Exception as error:  # whatever the user's forward raises means no
            text = " ".join(str(error).split())[:120]
            problems.append(f"{candidate.what}: {type(error).__name__}: {text}")
    shown = "; ".join(problems[:_SHOWN]) or "no batch was found, and none could be guessed"
    raise ConfigError(
        f"expected inputs with which {type(model).__name__} can be called once, found none that it "
        f"accepts: {shown}; pass the loader to prepare() together with the model"
    )


def _seen(model: nn.Module, candidate: Candidate) -> SeenModel:
    looks = {rows: look_at(model, *_of_rows(candidate, rows), training=True) for rows in ROWS}
    first, second = looks.values()
    if [each.name for each in first.operations] != [each.name for each in second.operations]:
        raise ConfigError(
            f"expected a forward with the same operations for {ROWS[0]} and {ROWS[1]} samples, "
            f"found others in {type(model).__name__}"
        )
    parts = [] if first.blocks else list(model_units(model))
    inputs = [t for t in tree_leaves((candidate.args, dict(candidate.kwargs)))
              if isinstance(t, Tensor)]  # fmt: skip
    return SeenModel(
        type(model).__name__, looks, parts, _heads(model, first), _tokens(first, inputs)
    )


def _of_rows(candidate: Candidate, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs with so many samples: the given samples, again and again."""
    leaves = tree_leaves((candidate.args, dict(candidate.kwargs)))
    given = next((t.shape[0] for t in leaves if isinstance(t, Tensor) and t.dim()), 0)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != given:
            return leaf
        times = -(-rows // given)
        return leaf.repeat(times, *[1] * (leaf.dim() - 1))[:rows]

    args, kwargs = tree_map(resized, (tuple(candidate.args), dict(candidate.kwargs)))
    return args, kwargs


def _heads(model: nn.Module, look: Look) -> int:
    """Return the number that a division of attention must divide: of keys, where queries share."""
    counts = [
        look.tensors[number].facts.shape[1]
        for operation in look.operations
        if operation.name == ATTENTION
        for number in operation.inputs[:2]
        if len(look.tensors[number].facts.shape) == 4
    ]
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads", "n_head"):
        if isinstance(each := getattr(config, name, None), int):
            counts.append(each)
    return gcd(*counts) if counts else 0


def _tokens(look: Look, inputs: Sequence[Tensor]) -> int:
    """Return the tokens of a sample: the length of integers that go into an embedding."""
    embeds = any(operation.name == TABLE for operation in look.operations)
    lengths = [t.shape[1] for t in inputs if t.dim() == 2 and not t.is_floating_point()]
    return lengths[0] if embeds and lengths else 1
