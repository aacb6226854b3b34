"""The work of a step's kernels: products, passes over memory, messages; and its division.

An operation says what there is to compute, never how long it takes: ``drivetrain.hardware`` prices
it. Operations are those of a whole model; ``divided`` says along which direction a strategy may
share one out among the ranks of a tensor-parallel axis (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

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
