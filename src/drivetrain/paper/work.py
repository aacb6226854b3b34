"""The work of a step's kernels: products, passes over memory, messages; and its division.

An operation says what there is to compute, never how long it takes: ``drivetrain.hardware`` prices
it. Operations are those of a whole model; ``divided`` says along which direction a strategy may
share one out among the ranks of a tensor-parallel axis (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias

from drivetrain.model.look import Look, ModelOperation

Direction: TypeAlias = Literal["", "tokens", "features", "rows", "columns", "inner", "copies"]
"""How an operation may be shared out: ``tokens`` only where norms are divided by tokens, too."""


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A product of matrices: rows x inner times inner x columns, several copies at once.

    Attributes:
        rows: of the left factor.
        inner: the common size.
        columns: of the right factor.
        copies: independent products in one kernel, such as those of attention heads.
        divided: which size tensor parallelism divides: ``columns``, ``inner`` or ``copies``.
        core: whether it belongs to attention between queries and keys, which selective
            recomputation computes again.
        weights: whether the right factor is a parameter.
        for_weights: whether the product is the gradient of a parameter, for which no stage waits.
        work: floating-point operations over those of the full product: 0.5 where a kernel skips
            the masked half.
        kind: names kernels that are no plain product: ``convolution``, ``attention``; see
            ``KernelFacts`` in ``drivetrain.hardware.description``.
        passes_back: whether the left factor needs a gradient; inputs of a model need none.
    """

    rows: int
    inner: int
    columns: int
    copies: int = 1
    divided: Direction = ""
    core: bool = False
    weights: bool = True
    for_weights: bool = False
    work: float = 1.0
    kind: str = ""
    passes_back: bool = True

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.rows * self.inner * self.columns * self.copies * self.work

    def elements(self) -> int:
        """Return the numbers read and written, each once."""
        each = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return each * self.copies

    def backward(self) -> "tuple[MatrixProduct, ...]":
        """Return the products for the gradients of the left, if needed, and the right factor."""
        swapped: dict[Direction, Direction] = {"columns": "inner", "inner": "columns"}
        left = swapped.get(self.divided, self.divided)
        right: Direction = "rows" if self.divided == "inner" else self.divided
        kind = back_kind(self.kind)
        of_left = replace(self, inner=self.columns, columns=self.inner, divided=left, kind=kind)
        of_right = replace(
            self,
            rows=self.inner,
            inner=self.rows,
            divided=right,
            for_weights=self.weights,
            kind=kind,
        )
        return (of_left, of_right) if self.passes_back else (of_right,)


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """Kernels that do little but read and write memory: norms, softmax, dropout, activations.

    Attributes:
        nbytes: read and written in forward.
        back: read and written in backward.
        launches: kernels in forward; backward has as many.
        divided: ``features``, ``tokens`` or nothing.
        core: see ``MatrixProduct``.
        kind: names the function, such as ``gelu``; "" for kernels that only move values.
        starts: how often the host starts kernels of the kind, if not as often as ``launches``.
    """

    nbytes: float
    back: float
    launches: int = 1
    divided: Direction = ""
    core: bool = False
    kind: str = ""
    starts: int = 0


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where activations enter or leave the layers that the ranks of an axis share.

    Attributes:
        enters: True before the shared layers, False behind them.
        nbytes: of the whole activation.
    """

    enters: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over all ranks of an axis.

    Attributes:
        axis: its name in the mesh.
        operation: all_reduce, reduce_scatter, all_gather or send.
        nbytes: of the whole tensor.
    """

    axis: str
    operation: str
    nbytes: float

    def sent(self, ranks: int) -> float:
        """Return the bytes that one rank sends, in a ring."""
        if self.operation == "send":
            return self.nbytes
        rounds = 2 if self.operation == "all_reduce" else 1
        return rounds * self.nbytes * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class TierCopy:
    """A copy between a device and its host, or between a host and its disk.

    Attributes:
        link: ``bus`` or ``disk``.
        nbytes: of one rank.
    """

    link: Literal["bus", "disk"]
    nbytes: float


@dataclass(frozen=True, slots=True)
class HostPass:
    """Work of the host's processor that does little but read and write host memory.

    Attributes:
        nbytes: read and written for one rank.
    """

    nbytes: float


Operation: TypeAlias = MatrixProduct | MemoryPass | Boundary | Collective | TierCopy | HostPass


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of activations that forward keeps for backward.

    Attributes:
        nbytes: on one rank, were nothing divided.
        divided: ``features`` (shared by tensor parallelism) or ``tokens``.
        core: kept by attention between queries and keys; selective recomputation drops it.
        gradients: tensors of its size that backward has at a time besides: gradients of an
            operation's output and input; 1 where a kernel writes one over the other.
    """

    nbytes: float
    divided: Direction = ""
    core: bool = False
    gradients: int = 2


LINEAR = "linear"
"""The kind of the products of linear layers."""

Recompute: TypeAlias = Literal["none", "selective", "full"]


@dataclass(frozen=True, eq=False)
class PaperUnit:
    """A block, the embedding or the head: the work and the activations of a micro-batch.

    Attributes:
        name: for pictures.
        forward: the operations, in order.
        saved: what forward keeps.
        parameters: numbers of elements, by whether tensor parallelism divides them.
        enters: bytes of the activation that enters, which full recomputation keeps.
        enters_divided: whether the entering activation is divided by tokens.
        repeated: whether it is one of the repeated blocks, which recomputation is about.
        recompute: what is computed again in backward.
        heads: of attention; ranks that share the unit must divide them.
        sizes: elements of each parameter; empty: not known.
        borrowed: elements of tied parameters that it reads, and that belong to an earlier unit.
        back: the operations of backward, where they do not follow from those of forward.
    """

    name: str
    forward: tuple[Operation, ...]
    saved: tuple[Saved, ...]
    parameters: tuple[tuple[int, bool], ...]
    enters: float = 0.0
    repeated: bool = True
    recompute: Recompute = "none"
    heads: int = 0
    sizes: tuple[int, ...] = ()
    borrowed: int = 0
    back: tuple[Operation, ...] | None = None

    @cached_property
    def elements(self) -> int:
        """Parameters that one rank holds."""
        return sum(count for count, _ in self.parameters)

    @property
    def longest(self) -> int:
        """Elements of the largest parameter; 0: not known."""
        return max(self.sizes, default=0)

    @cached_property
    def read_in_backward(self) -> bool:
        """Whether backward reads parameters: a linear layer whose input needs no gradient does not.

        A convolution's backward asks for its weight all the same.
        """
        products = [
            each for each in self.forward if isinstance(each, MatrixProduct) and each.weights
        ]
        return not products or any(each.passes_back or each.kind != LINEAR for each in products)

    @property
    def again(self) -> tuple[Operation, ...]:
        """The operations of forward to be repeated in backward, before its own work."""
        if not self.repeated or self.recompute == "none":
            return ()
        if self.recompute == "full":
            return self.forward
        return tuple(op for op in self.forward if getattr(op, "core", False))

    @cached_property
    def computed_backward(self) -> tuple[Operation, ...]:
        """Everything in backward: recomputation first."""
        return (*self.again, *self.backward)

    @cached_property
    def passing(self) -> float:
        """Most bytes of gradients of activations that backward has at a time."""
        return max((each.nbytes * each.gradients for each in self.saved), default=0.0)

    @property
    def backward(self) -> tuple[Operation, ...]:
        """The operations of backward without recomputation: forward's, the other way round."""
        return tuple(backward_of(self.forward)) if self.back is None else self.back

    @cached_property
    def kept(self) -> float:
        """Bytes of activations from forward to backward."""
        if self.repeated and self.recompute == "full":
            return self.enters
        drop = self.repeated and self.recompute == "selective"
        return sum(each.nbytes for each in self.saved if not (drop and each.core))

    @cached_property
    def transient(self) -> float:
        """Bytes that exist only while this unit runs backward, because they are computed again."""
        return sum(each.nbytes for each in self.saved) - self.kept


def backward_of(forward: Sequence[Operation]) -> Iterable[Operation]:
    """Yield the operations of backward, last layer first."""
    for operation in reversed(forward):
        match operation:
            case MatrixProduct():
                yield from operation.backward()
            case MemoryPass():
                yield replace(operation, nbytes=operation.back, kind=back_kind(operation.kind))
            case Boundary():
                yield Boundary(not operation.enters, operation.nbytes)
            case _:
                yield operation


def back_kind(kind: str) -> str:
    """Return the name of the kernels of backward of a kind."""
    return f"{kind} backward" if kind else ""


def flops_of(operations: Iterable[Operation]) -> float:
    """Return the floating-point operations of matrix products."""
    return sum(each.flops for each in operations if isinstance(each, MatrixProduct))


def attention(
    copies: int,
    queries: int,
    keys: int,
    features: int,
    *,
    fused: bool,
    causal: bool = True,
    dropout: bool = True,
) -> tuple[Operation, ...]:
    """Return the operations between queries and keys, with scores in two-byte numbers.

    Args:
        copies: heads of all samples.
        queries: length of the queries.
        keys: length of the keys.
        features: of a head.
        fused: whether one kernel keeps the scores to itself; it skips what a causal mask hides.
        causal: whether a query sees only the keys before it.
        dropout: whether the probabilities of unfused attention are dropped out.
    """
    work = 0.5 if fused and causal else 1.0
    kind = "attention" if fused else ""
    scores = 2.0 * copies * queries * keys
    passes: tuple[Operation, ...] = ()
    if not fused:
        passes = (MemoryPass(2 * scores, 3 * scores, 1, "features", True),)
        if dropout:
            passes += (MemoryPass(2.5 * scores, 2.5 * scores, 1, "features", True),)
    return (
        MatrixProduct(queries, features, keys, copies, "copies", True, False, work=work, kind=kind),
        *passes,
        MatrixProduct(queries, keys, features, copies, "copies", True, False, work=work, kind=kind),
    )


def widened(unit: PaperUnit, factor: float) -> PaperUnit:
    """Return a unit whose numbers have more or fewer bytes; parameters are counted in elements."""
    if factor == 1:
        return unit

    def wide(operation: Operation) -> Operation:
        match operation:
            case MemoryPass():
                return replace(
                    operation, nbytes=operation.nbytes * factor, back=operation.back * factor
                )
            case Boundary():
                return replace(operation, nbytes=round(operation.nbytes * factor))
        return operation

    return replace(
        unit,
        forward=tuple(map(wide, unit.forward)),
        saved=tuple(replace(each, nbytes=each.nbytes * factor) for each in unit.saved),
        enters=unit.enters * factor,
    )


# --- the work of a unit, from a look at a model: products, passes, activations ---

# Products of activations and weights are shared out in pairs, as Shoeybi et al. 2019 (arXiv
# 1909.08053, section 3) do it: the first by columns, the second by the inner size; what lies
# between the two is divided by features. A product without a partner stays whole on every rank,
# except for the last product of the head, whose result the loss takes in parts.


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
    """The work of consecutive operations of a look.

    Attributes:
        look: the look.
        operations: of the unit, in order.
        head: whether the last product's result goes into the loss.
    """

    look: Look
    operations: Sequence[ModelOperation]
    head: bool = False
    _bases: dict[int, int] = field(default_factory=dict)
    _sources: dict[int, frozenset[int]] = field(default_factory=dict)
    _role: dict[int, Direction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weights = {self.look.parameters[name] for name in self.look.parameters}
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
            and self.look.tensors[n].requires_grad
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
        return self.look.tensors[number].facts.shape

    # --- the work ---

    def forward(self, *, fused: bool) -> tuple[Operation, ...]:
        """Return the operations on paper, in order."""
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
            self.look.tensors[number].requires_grad for number in self._given(operation)
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
            match each:
                case MemoryPass():
                    yield MemoryPass(
                        each.nbytes * share, each.back * share, 1, each.divided, each.core
                    )
                case _:
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
            yield from (n for n in given if weighs or self.look.tensors[n].requires_grad)

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
        return max((self.look.tensors[n].facts.dtype.itemsize for n in self._weights), default=4)

    def _direction(self, number: int) -> Direction:
        cut = number in self._sources or self.base(number) in self._sources
        return "features" if cut else "tokens"

    def _trains(self, operation: ModelOperation) -> bool:
        return any(self.look.tensors[number].requires_grad for number in operation.outputs)

    def _floats(self, number: int) -> bool:
        return self.look.tensors[number].facts.dtype.is_floating_point

    def _nbytes(self, number: int) -> int:
        return self.look.tensors[number].facts.nbytes

    def _is_table(self, operation: ModelOperation) -> bool:
        """Whether an operation looks words up in the model's largest table."""
        return operation.name == TABLE and operation.inputs[-1] == self._table

    @cached_property
    def _table(self) -> int | None:
        tables = {each.inputs[-1] for each in self.look.operations if each.name == TABLE}
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
