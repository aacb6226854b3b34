"""The operations of a look at a model, as the work of a unit: products, passes, activations.

Products of activations and weights are shared out in pairs, as Shoeybi et al. 2019 (arXiv
1909.08053, section 3) do it: the first by columns, the second by the inner size; what lies between
the two is divided by features. A product without a partner stays whole on every rank, except for
the last product of the head, whose result the loss takes in parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from drivetrain.model.look import Look, ModelOperation
from drivetrain.paper.work import (
    LINEAR,
    Boundary,
    Direction,
    MatrixProduct,
    MemoryPass,
    Operation,
    Saved,
    attention,
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
