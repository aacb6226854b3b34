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

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.rows * self.inner * self.columns * self.copies * self.work

    def elements(self) -> int:
        """Return the numbers read and written, each once."""
        each = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return each * self.copies

    def backward(self) -> "tuple[MatrixProduct, MatrixProduct]":
        """Return the products for the gradients of the left and of the right factor."""
        swapped: dict[Direction, Direction] = {"columns": "inner", "inner": "columns"}
        left = swapped.get(self.divided, self.divided)
        right: Direction = "rows" if self.divided == "inner" else self.divided
        return (
            replace(self, inner=self.columns, columns=self.inner, divided=left),
            replace(
                self,
                rows=self.inner,
                inner=self.rows,
                divided=right,
                for_weights=self.weights,
            ),
        )


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """Kernels that do little but read and write memory: norms, softmax, dropout, activations.

    Attributes:
        nbytes: read and written in forward.
        back: read and written in backward.
        launches: kernels in forward; backward has as many.
        divided: ``features``, ``tokens`` or nothing.
        core: see ``MatrixProduct``.
    """

    nbytes: float
    back: float
    launches: int = 1
    divided: Direction = ""
    core: bool = False


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


Operation: TypeAlias = MatrixProduct | MemoryPass | Boundary | Collective


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of activations that forward keeps for backward.

    Attributes:
        nbytes: on one rank, were nothing divided.
        divided: ``features`` (shared by tensor parallelism) or ``tokens``.
        core: kept by attention between queries and keys; selective recomputation drops it.
    """

    nbytes: float
    divided: Direction = ""
    core: bool = False


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
    back: tuple[Operation, ...] | None = None

    @cached_property
    def elements(self) -> int:
        """Parameters that one rank holds."""
        return sum(count for count, _ in self.parameters)

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
    def largest(self) -> float:
        """Bytes of the largest activation, which backward needs once more for its gradient."""
        return max((each.nbytes for each in self.saved), default=0.0)

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
                yield MemoryPass(operation.back, operation.back, operation.launches,
                                 operation.divided, operation.core)  # fmt: skip
            case Boundary():
                yield Boundary(not operation.enters, operation.nbytes)
            case Collective():
                yield operation


def flops_of(operations: Iterable[Operation]) -> float:
    """Return the floating-point operations of matrix products."""
    return sum(each.flops for each in operations if isinstance(each, MatrixProduct))
