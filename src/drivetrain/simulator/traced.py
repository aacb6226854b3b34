"""A simulated model from traces of the module itself: any architecture, with no value computed.

Two traces with different numbers of samples say how each number grows with the batch. The units are
the repeated blocks; the operations before the first block, and those behind the last block, are one
unit each. Where nothing repeats, the children of the model are the units.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.data.examples import Candidate
from drivetrain.errors import ConfigError
from drivetrain.model.modules import model_units
from drivetrain.model.trace import ModelOperation, ModelTrace, trace_model
from drivetrain.simulator.step import (
    LINEAR,
    Boundary,
    Direction,
    MatrixProduct,
    MemoryPass,
    Operation,
    Recompute,
    Saved,
    SimulatedUnit,
    attention,
    widened,
)

ATTENTION = "scaled_dot_product_attention"
LOSS = "cross_entropy"
TABLE = "embedding"
DROPOUT = "dropout"
CONVOLUTION = "convolution"

_KEEP_RESULT = frozenset(
    ("relu", "tanh", "sigmoid", "exp", "softmax", "log_softmax", "sqrt", "rsqrt")
)
"""Functions whose backward reads their result."""

_MOVES = """
    add sub neg float half bfloat16 to type cat stack clone contiguous reshape view flatten mean
    sum expand pad roll where masked_fill masked_fill_ embedding dropout __add__ __iadd__ __radd__
    __sub__ __getitem__ index_select
"""
_KEEP_NOTHING = frozenset(_MOVES.split())
"""Functions whose backward reads no activation."""

_SHARED_WEIGHTS = frozenset(("linear", "addmm", "matmul", "mm", "__matmul__", "bmm", "baddbmm"))
"""Products whose weights tensor parallelism divides; convolutions stay whole."""


@dataclass
class UnitWork:
    """The work of consecutive operations of a trace.

    Attributes:
        trace: the trace.
        operations: of the unit, in order.
        head: whether the last product's result goes into the loss.
    """

    trace: ModelTrace
    operations: Sequence[ModelOperation]
    head: bool = False
    _bases: dict[int, int] = field(default_factory=dict)
    _sources: dict[int, frozenset[int]] = field(default_factory=dict)
    _role: dict[int, Direction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weights = {self.trace.parameters[name] for name in self.trace.parameters}
        for operation in self.operations:
            for view in operation.views:
                self._bases[view.made] = self.base(view.base)
        alone: set[int] = set()
        while True:
            self._sources, self._role = {}, {}
            if not (more := self._without_partner(alone)):
                break
            alone |= more

    def base(self, number: int) -> int:
        """Return the tensor whose memory a tensor shows."""
        return self._bases.get(number, number)

    # --- which products are shared out ---

    def _without_partner(self, alone: set[int]) -> set[int]:
        """Follow divided tensors; return products by columns whose result must be whole."""
        open_, whole = set[int](), set[int]()
        last = None
        for place, operation in enumerate(self.operations):
            given = self._given(operation)
            sources = frozenset[int]().union(*(self._sources.get(n, frozenset()) for n in given))
            if self._shares_weight(operation):
                last = place
                if sources:
                    self._role[place] = "inner"
                    open_ -= sources
                    continue
                if place not in alone:
                    self._role[place] = "columns"
                    open_.add(place)
                    self._spread(operation, frozenset({place}))
            elif sources:
                if not operation.work and self._mixes(given):
                    whole |= sources
                self._spread(operation, sources)
        if self.head and last is not None:
            open_.discard(last)
        return whole | open_

    def _mixes(self, given: Sequence[int]) -> bool:
        """Whether a divided tensor meets a whole activation of the same shape."""
        cut = {self._shape(n) for n in given if n in self._sources}
        return any(
            n not in self._sources
            and self.trace.tensors[n].requires_grad
            and n not in self._weights
            and self._shape(n) in cut
            for n in given
        )

    def _spread(self, operation: ModelOperation, sources: frozenset[int]) -> None:
        for number in operation.outputs:
            self._sources[self.base(number)] = sources
            self._sources[number] = sources

    def _shares_weight(self, operation: ModelOperation) -> bool:
        return (
            bool(operation.work)
            and operation.name in _SHARED_WEIGHTS
            and any(self.base(number) in self._weights for number in operation.inputs)
        )

    def _given(self, operation: ModelOperation) -> list[int]:
        return [n for n in operation.inputs if self.base(n) not in self._weights]

    def _shape(self, number: int) -> tuple[int, ...]:
        return self.trace.tensors[number].facts.shape

    # --- the work ---

    def forward(self, *, fused: bool) -> tuple[Operation, ...]:
        """Return the operations to simulate, in order."""
        found: list[Operation] = []
        entered: set[int] = set()
        for place, operation in enumerate(self.operations):
            role = self._role.get(place, "")
            if role == "columns":
                (number, *_) = self._given(operation)
                if (base := self.base(number)) not in entered:
                    entered.add(base)
                    found.append(Boundary(True, self._nbytes(base)))
            found += self._of(operation, role, fused)
            if role == "inner" or self._is_table(operation):
                found.append(Boundary(False, self._nbytes(operation.outputs[0])))
        return tuple(found)

    def _of(self, operation: ModelOperation, role: Direction, fused: bool) -> Iterator[Operation]:
        if not operation.outputs:
            return
        if operation.name == ATTENTION:
            yield from self._attention(operation, fused)
        elif operation.work:
            yield self._product(operation, role)
        elif operation.name != LOSS and (operation.read or operation.written):
            yield self._pass(operation)

    def _pass(self, operation: ModelOperation) -> MemoryPass:
        read, written = operation.read, operation.written
        trains = self._trains(operation)
        back = 0
        if trains:
            back = written + read + (0 if operation.name in _KEEP_NOTHING else read)
            if operation.name == TABLE:  # a gradient for every word, most of them zero
                back += self._nbytes(self.base(operation.inputs[-1]))
        cut = any(number in self._sources for number in (*operation.inputs, *operation.outputs))
        divided: Direction = "features" if cut or self._is_table(operation) else "tokens"
        kind = "" if operation.name in _KEEP_NOTHING else operation.name
        return MemoryPass(read + written, back, 1, divided if trains else "", kind=kind)

    def _product(self, operation: ModelOperation, role: Direction) -> MatrixProduct:
        shape = self._shape(operation.outputs[0])
        weights = any(self.base(number) in self._weights for number in operation.inputs)
        copies, rows, columns = 1, prod(shape[:-1]), shape[-1] if shape else 1
        kind = LINEAR if weights else ""
        if operation.name.startswith("conv"):
            kind = CONVOLUTION
            columns, rows = shape[1], prod(shape) // shape[1]
        elif not weights and len(shape) > 2:
            copies, rows = prod(shape[:-2]), shape[-2]
        inner = max(1, round(operation.work / (2 * copies * rows * columns)))
        core = not weights
        if core and any(number in self._sources for number in operation.inputs):
            role = "copies"
        back = not weights or any(
            self.trace.tensors[number].requires_grad for number in self._given(operation)
        )
        return MatrixProduct(
            rows, inner, columns, copies, role, core, weights, kind=kind, passes_back=back
        )

    def _attention(self, operation: ModelOperation, fused: bool) -> Iterator[Operation]:
        queries, keys = (self._shape(number) for number in operation.inputs[:2])
        causal = bool(operation.kwargs.get("is_causal"))
        share = self._width / 2
        for each in attention(
            prod(queries[:-2]), queries[-2], keys[-2], queries[-1],
            fused=fused, causal=causal, dropout=bool(operation.kwargs.get("dropout_p")),
        ):  # fmt: skip
            if isinstance(each, MemoryPass):
                yield replace(each, nbytes=each.nbytes * share, back=each.back * share)
            else:
                yield each

    # --- what forward keeps ---

    def saved(self, before: set[int], *, fused: bool) -> tuple[Saved, ...]:
        """Return the activations that autograd keeps, each tensor once.

        Args:
            before: tensors that earlier units keep; those of this unit are added.
            fused: whether attention keeps no scores.
        """
        kept: dict[int, Saved] = {}
        extra: list[Saved] = []
        for operation in self.operations:
            if not self._trains(operation):
                continue
            for number in self._kept(operation):
                if (base := self.base(number)) not in before:
                    kept[base] = Saved(self._nbytes(base), self._direction(number))
            extra += self._kept_beside(operation, fused)
        before |= set(kept)
        return (*kept.values(), *extra)

    def _kept(self, operation: ModelOperation) -> Iterator[int]:
        """Yield the activations that an operation's backward reads."""
        given = [n for n in self._given(operation) if self._floats(n)]
        if operation.name == LOSS or operation.name in _KEEP_NOTHING:
            return
        if operation.name in _KEEP_RESULT:
            yield from operation.outputs
        elif operation.name == ATTENTION:
            yield from (*given[:3], *operation.outputs[:1])
        elif operation.name in ("mul", "__mul__", "__rmul__") and len(operation.inputs) == 1:
            return
        else:
            weighs = bool(operation.work) and len(given) < len(operation.inputs)
            yield from (n for n in given if weighs or self.trace.tensors[n].requires_grad)

    def _kept_beside(self, operation: ModelOperation, fused: bool) -> Iterator[Saved]:
        """Yield tensors that are neither arguments nor results: masks, scores, probabilities."""
        elements = prod(self._shape(operation.outputs[0]))
        if operation.name == DROPOUT:
            yield Saved(elements, self._direction(operation.outputs[0]))
        elif operation.name == ATTENTION and not fused:
            queries, keys = (self._shape(number) for number in operation.inputs[:2])
            dropped = bool(operation.kwargs.get("dropout_p"))
            scores = prod(queries[:-1]) * keys[-2]
            yield Saved((2 * self._width + 1 if dropped else self._width) * scores, "features",
                        core=True)  # fmt: skip

    # --- facts ---

    @cached_property
    def _width(self) -> int:
        """Bytes of a number of the model's parameters."""
        return max((self.trace.tensors[n].facts.dtype.itemsize for n in self._weights), default=4)

    def _direction(self, number: int) -> Direction:
        cut = number in self._sources or self.base(number) in self._sources
        return "features" if cut else "tokens"

    def _trains(self, operation: ModelOperation) -> bool:
        return any(self.trace.tensors[number].requires_grad for number in operation.outputs)

    def _floats(self, number: int) -> bool:
        return self.trace.tensors[number].facts.dtype.is_floating_point

    def _nbytes(self, number: int) -> int:
        return self.trace.tensors[number].facts.nbytes

    def _is_table(self, operation: ModelOperation) -> bool:
        """Whether an operation looks words up in the model's largest table."""
        return operation.name == TABLE and operation.inputs[-1] == self._table

    @cached_property
    def _table(self) -> int | None:
        tables = {each.inputs[-1] for each in self.trace.operations if each.name == TABLE}
        return max(tables, key=self._nbytes, default=None)

    def parameters(self) -> dict[int, bool]:
        """Return the parameters that the operations read, and whether ranks divide each."""
        found: dict[int, bool] = {}
        for place, operation in enumerate(self.operations):
            cut = self._role.get(place) is not None or self._is_table(operation)
            for number in operation.inputs:
                if (base := self.base(number)) in self._weights:
                    large = len(self._shape(base)) > 1
                    found[base] = found.get(base, False) or (cut and large)
        return found


# --- the model ---


ROWS = (2, 4)
"""Samples of the two traces: one sample alone is refused by batch norms."""

LOSS_PASSES: Mapping[int, tuple[int, int]] = {2: (18, 18), 4: (12, 12)}
"""Bytes per logit of a cross entropy by torch's kernels, in forward and backward, by the bytes of a
logit: a cast to fp32 (2 + 4), the logarithm of the softmax (4 + 4), the read for the loss (4); in
backward the result read and the gradient written (4 + 4), read once more (4), and cast (4 + 2)."""

_SHOWN = 3
"""Problems of inputs that an error names."""


@dataclass
class TracedModel:
    """A simulated module.

    Attributes:
        name: of its class.
        traces: of the module, by the number of samples.
        parts: names of modules that are the units where no blocks repeat.
        heads: of attention, which tensor parallelism divides; 0 without.
        seq: tokens of a sample; 1 where a sample is no sequence.
    """

    name: str
    traces: Mapping[int, ModelTrace]
    parts: Sequence[str]
    heads: int
    seq: int
    _known: dict[tuple[int, bool], list[SimulatedUnit]] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> int:
        """Number of repeated blocks."""
        return len([call for call in self._trace.blocks if call.caller is None])

    @property
    def parameters(self) -> int:
        """Number of distinct parameters."""
        numbers = self._trace.parameters.values()
        return sum(prod(self._trace.tensors[number].facts.shape) for number in numbers)

    @property
    def width(self) -> int:
        """Bytes of a number in the module."""
        numbers = self._trace.parameters.values()
        return max((self._trace.tensors[n].facts.dtype.itemsize for n in numbers), default=4)

    def model_flops(self, batch: int) -> float:
        """Return the operations of a step: backward has twice those of forward."""
        (few, less), (many, more) = ((rows, trace.work) for rows, trace in self.traces.items())
        return 3.0 * (less + (batch - few) * (more - less) / (many - few))

    def units(
        self, micro_batch: int, recompute: Recompute, *, fused: bool, width: int = 2
    ) -> Sequence[SimulatedUnit]:
        """Return the units for a micro-batch: see ``GptShape.units``."""
        few, many = self.traces
        part = (micro_batch - few) / (many - few)
        made: dict[int, SimulatedUnit] = {}
        found = []
        for one, other in zip(self._drawn(few, fused), self._drawn(many, fused), strict=True):
            if id(one) not in made:
                unit = widened(_between(one, other, part), width / self.width)
                made[id(one)] = replace(unit, recompute=recompute)
            found.append(made[id(one)])
        found[-1] = with_loss(found[-1], self.logits(micro_batch), width)
        return found

    def logits(self, micro_batch: int) -> float:
        """Return the elements that go into the loss of a micro-batch."""
        few, many = self.traces
        less, more = map(_logits, self.traces.values())
        return less + (micro_batch - few) / (many - few) * (more - less)

    @property
    def _trace(self) -> ModelTrace:
        return self.traces[ROWS[0]]

    def _drawn(self, rows: int, fused: bool) -> list[SimulatedUnit]:
        """Return the units of a trace; equal ones are the same object."""
        if (rows, fused) not in self._known:
            found: dict[Any, SimulatedUnit] = {}
            units = self._known[rows, fused] = []
            for unit in self._fresh(self.traces[rows], fused):
                key = unit.forward, unit.saved, unit.parameters, unit.enters, unit.repeated
                units.append(found.setdefault(key, unit))
        return self._known[rows, fused]

    def _fresh(self, trace: ModelTrace, fused: bool) -> Iterator[SimulatedUnit]:
        owned, kept = set[int](), set[int]()
        spans = list(_spans(trace, self.parts))
        for place, (name, operations, enters) in enumerate(spans):
            repeated = name == BLOCK
            last = place == len(spans) - 1
            work = UnitWork(trace, trace.operations[operations.start : operations.stop], head=last)
            read = work.parameters()
            parameters = {n: cut for n, cut in read.items() if n not in owned}
            tied = {n: cut for n, cut in read.items() if n in owned}
            owned |= set(parameters)
            yield SimulatedUnit(
                name, work.forward(fused=fused), work.saved(kept, fused=fused),
                _counts(trace, parameters), enters=enters, repeated=repeated,
                heads=self.heads if repeated else 0,
                sizes=tuple(prod(trace.tensors[n].facts.shape) for n in parameters),
                borrowed=sum(count for count, _ in _counts(trace, tied)),
            )  # fmt: skip


BLOCK = "block"
SIZES = ("rows", "inner", "columns", "copies")


def _spans(trace: ModelTrace, parts: Sequence[str]) -> Iterator[tuple[str, range, int]]:
    """Yield (name, operations, bytes that enter) of units that together cover a trace."""
    calls = [call for call in trace.blocks if call.caller is None]
    if not calls:
        yield from _of_parts(trace, parts)
        return
    last = 0
    for call in calls:
        if not last:
            yield "embedding", range(call.operations.start), 0
            last = call.operations.start
        yield BLOCK, range(last, call.operations.stop), _entering(trace, call.given)
        last = call.operations.stop
    yield "head", range(last, len(trace.operations)), 0


def _of_parts(trace: ModelTrace, parts: Sequence[str]) -> Iterator[tuple[str, range, int]]:
    """Yield the calls of named modules; operations between two belong to the second one."""
    calls = sorted(
        (call for call in trace.modules if call.name in parts),
        key=lambda call: call.operations.start,
    )
    last = 0
    for index, call in enumerate(calls):
        stop = len(trace.operations) if index == len(calls) - 1 else call.operations.stop
        if stop > last:
            yield call.name, range(last, stop), _entering(trace, call.inputs)
            last = stop
    if not calls:
        yield "model", range(len(trace.operations)), 0


def _entering(trace: ModelTrace, given: Iterable[int | None]) -> int:
    """Return the bytes of the activations among the arguments of a block."""
    numbers = {number for number in given if number is not None}
    return sum(trace.tensors[n].facts.nbytes for n in numbers if trace.tensors[n].requires_grad)


def _counts(trace: ModelTrace, parameters: Mapping[int, bool]) -> tuple[tuple[int, bool], ...]:
    counts = {True: 0, False: 0}
    for number, cut in parameters.items():
        counts[cut] += prod(trace.tensors[number].facts.shape)
    return (counts[True], True), (counts[False], False)


def _logits(trace: ModelTrace) -> int:
    """Return the elements that go into the loss: a cross entropy in the model, or its output."""
    losses = [each.inputs[0] for each in trace.operations if each.name == LOSS]
    numbers = losses or [number for _, number in trace.output if number is not None]
    return prod(trace.tensors[numbers[0]].facts.shape) if numbers else 0


def with_loss(unit: SimulatedUnit, logits: float, width: int) -> SimulatedUnit:
    """Return the last unit with a cross entropy, which computes and keeps numbers of 4 bytes.

    The logits stay as well: a script holds the model's output until backward has ended.
    """
    forward, back = LOSS_PASSES[width]
    loss = MemoryPass(forward * logits, back * logits, 6, "features", kind=LOSS)
    kept = Saved(4 * logits, "features"), Saved(width * logits, "features")
    return replace(unit, forward=(*unit.forward, loss), saved=(*unit.saved, *kept))


# --- between two traces ---


def _between(one: SimulatedUnit, other: SimulatedUnit, part: float) -> SimulatedUnit:
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


def traced_model(model: nn.Module, candidates: Iterable[Candidate]) -> TracedModel:
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


def _seen(model: nn.Module, candidate: Candidate) -> TracedModel:
    traces = {rows: trace_model(model, *_of_rows(candidate, rows), training=True) for rows in ROWS}
    first, second = traces.values()
    if [each.name for each in first.operations] != [each.name for each in second.operations]:
        raise ConfigError(
            f"expected a forward with the same operations for {ROWS[0]} and {ROWS[1]} samples, "
            f"found others in {type(model).__name__}"
        )
    parts = [] if first.blocks else list(model_units(model))
    inputs = [t for t in tree_leaves((candidate.args, dict(candidate.kwargs)))
              if isinstance(t, Tensor)]  # fmt: skip
    return TracedModel(
        type(model).__name__, traces, parts, _heads(model, first), _tokens(first, inputs)
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


def _heads(model: nn.Module, trace: ModelTrace) -> int:
    """Return the number that a division of attention must divide: of keys, where queries share."""
    counts = [
        trace.tensors[number].facts.shape[1]
        for operation in trace.operations
        if operation.name == ATTENTION
        for number in operation.inputs[:2]
        if len(trace.tensors[number].facts.shape) == 4
    ]
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads", "n_head"):
        if isinstance(each := getattr(config, name, None), int):
            counts.append(each)
    return gcd(*counts) if counts else 0


def _tokens(trace: ModelTrace, inputs: Sequence[Tensor]) -> int:
    """Return the tokens of a sample: the length of integers that go into an embedding."""
    embeds = any(operation.name == TABLE for operation in trace.operations)
    lengths = [t.shape[1] for t in inputs if t.dim() == 2 and not t.is_floating_point()]
    return lengths[0] if embeds and lengths else 1
