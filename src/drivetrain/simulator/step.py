"""A simulated step: kernels and messages as tasks with lanes and memory, played.

A strategy draws the graph once. The bytes held and sent follow from it, and, with a description of
the hardware, the time, the peak of memory and the picture.

The facts for drawing a simulated step: sizes of axes, micro-batches, bytes, methods of links.

The work of a step's kernels: products, passes over memory, messages; and its division.

An operation says what there is to compute, never how long it takes: ``drivetrain.hardware`` prices
it. Operations are those of a whole model; ``divided`` says along which direction a strategy may
share one out among the ranks of a tensor-parallel axis (Shoeybi et al. 2019, arXiv 1909.08053).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from drivetrain.errors import UsageError, write_text

# --- the work of a step's kernels ---

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
        narrow: whether its factors are numbers of 8 bits.
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
    narrow: bool = False

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
class SimulatedUnit:
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

    @cached_property
    def narrow(self) -> tuple[int, ...]:
        """Elements of each parameter that a product reads in 8 bits."""
        products = (each for each in self.forward if isinstance(each, MatrixProduct))
        return tuple(each.inner * each.columns for each in products if each.narrow)

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


def in_fp8(unit: SimulatedUnit, multiple: int) -> SimulatedUnit:
    """Return a block whose products with weights have factors of 8 bits.

    Args:
        unit: blocks change, no others.
        multiple: both sizes of such a weight are multiples of it.
    """
    if not unit.repeated:
        return unit

    def narrow(operation: Operation) -> Operation:
        if not (isinstance(operation, MatrixProduct) and operation.weights):
            return operation
        if operation.kind not in ("", LINEAR):
            return operation
        fits = operation.inner % multiple == operation.columns % multiple == 0
        return replace(operation, narrow=fits)

    return replace(unit, forward=tuple(map(narrow, unit.forward)))


def widened(unit: SimulatedUnit, factor: float) -> SimulatedUnit:
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


# --- the facts for drawing a simulated step ---

PASSES = 4.5
"""Bytes that an encoding reads and writes per byte of gradients: gradient and kept error read, the
error written, codes written and read, and the sum of the others' numbers; an estimate."""


@dataclass(frozen=True, slots=True)
class FarMethod:
    """A method for gradients between hosts.

    Attributes:
        name: of the method.
        sent: bytes that a rank sends per exact byte of its part, where all ranks get the sum.
        sent_divided: the same where each rank gets a share.
        held: bytes that are kept from step to step, likewise.
    """

    name: str
    sent: float
    sent_divided: float
    held: float

    def messages(
        self, axis: str, nbytes: float, together: int, hosts: int, *, divided: bool
    ) -> Iterator[tuple[str, tuple[Operation, ...]]]:
        """Yield (axis, operations) of one sum.

        Args:
            axis: over which gradients are summed.
            nbytes: of the gradients.
            together: ranks of the axis on one host.
            hosts: that the axis is over.
            divided: whether each rank gets a share of the sum alone.
        """
        part = nbytes / together
        near = f"{axis}.near"
        if together > 1:
            yield near, (Collective(near, "reduce_scatter", nbytes),)
        # An exchange of m bytes sends m (hosts - 1) / hosts.
        ratio = self.sent_divided if divided else self.sent
        exchange = Collective(f"{axis}.far", "all_to_all", part * ratio * hosts / (hosts - 1))
        encoding = MemoryPass(PASSES * part, 0, kind=f"encode {self.name}")
        yield f"{axis}.far", (encoding, exchange)
        if together > 1 and not divided:
            yield near, (Collective(near, "all_gather", nbytes),)


# --- the facts of a run ---


@dataclass(frozen=True, slots=True)
class BytesPerElement:
    """Bytes of the state of one parameter under a policy.

    Attributes:
        parameter: as forward reads it.
        gradient: as it is summed and sent.
        optimizer: masters, moments, and gradients that are kept in the master's dtype.
        update: read and written by the optimizer for one element, with the check for infinities,
            the norm and the cast to the parameter.
    """

    parameter: int
    gradient: int
    optimizer: int
    update: int


FP8 = "fp8"
"""The precision that is bf16 with products of blocks in 8 bits, and such weights on the wire."""


def widest(precision: str) -> str:
    """Return the precision of what a precision does not compute in 8 bits."""
    return "bf16" if precision == FP8 else precision


STATE_BYTES: Mapping[str, BytesPerElement] = {
    "fp16": BytesPerElement(2, 2, 16, 40),
    "bf16": BytesPerElement(2, 4, 12, 36),
    FP8: BytesPerElement(2, 4, 12, 36),
    "no": BytesPerElement(4, 4, 8, 32),
}
"""By precision. fp16: gradients of 2 bytes, copied to 4 beside the master's 4 and the moments' 8;
bf16: gradients summed in 4 bytes (Megatron-LM, docs of the distributed optimizer: 20 and 18 bytes
per parameter). An update reads gradient, master and moments and writes master, moments and
parameter (28 + 2 with fp16), and reads gradients for the norm."""


BF16_BYTES = 2
"""Bytes of a number in bfloat16."""


NEAR = "near"
"""The part of an axis that is a group of neighbors; see ``Mesh.neighbors``."""


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """How the ranks of a line of an axis lie on hosts.

    Attributes:
        ranks: of the line.
        together: of them on one host.
        beside: lines that share a host's link to other hosts.
    """

    ranks: int
    together: int
    beside: int

    @property
    def spans_hosts(self) -> bool:
        """Whether the line crosses a network."""
        return self.together < self.ranks


def axis_places(axes: Mapping[str, int], per_host: int) -> dict[str, AxisPlace]:
    """Lay axes over hosts, the first axis on neighbors.

    Args:
        axes: sizes, the closest first.
        per_host: devices of a host.
    """
    found: dict[str, AxisPlace] = {}
    strides: dict[str, int] = {}
    stride = 1
    for name, size in axes.items():
        whole, _, part = name.partition(".")
        if part:  # groups of neighbors, or the lines across them
            near = axes.get(f"{whole}.{NEAR}", 1)
            start = strides[whole] * (near if part != NEAR else 1)
        else:
            start = strides[name] = stride
            stride *= size
        together = max(1, min(size, per_host // start))
        found[name] = AxisPlace(size, together, max(1, per_host // together))
    return found


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The run of which a step is drawn.

    Attributes:
        axes: the size of each axis, the closest first.
        micro_batches: of one step.
        precision: a key of ``STATE_BYTES``.
        per_host: ranks of a host.
        far: approximates sums of gradients between hosts; None: they are exact.
        on_host: whether ranks compute in the host's memory: sums then go through receive buffers,
            and an optimizer that is not fused steps one parameter after the other.
        rounds_activations: whether activations between stages on different hosts, and their
            gradients, are sent in bfloat16.
    """

    axes: Mapping[str, int]
    micro_batches: int
    precision: str
    per_host: int = 8
    far: FarMethod | None = None
    on_host: bool = False
    rounds_activations: bool = False

    def together(self, axis: str) -> int:
        """Return how many ranks of an axis lie on one host."""
        place = axis_places(self.axes, self.per_host).get(axis)
        return 1 if place is None else place.together

    def between_hosts(self, activation: float) -> float:
        """Return the bytes that an activation of so many bytes takes between hosts."""
        if not self.rounds_activations:
            return activation
        return activation * min(1.0, BF16_BYTES / self.bytes.parameter)

    @property
    def bytes(self) -> BytesPerElement:
        """Bytes of the state of one element."""
        return STATE_BYTES[self.precision]


# --- a simulated step ---

COMPUTE = "compute"
"""The lane of kernels; every axis has a lane of its own, named like the axis."""

LENT, ARRIVALS = "lent", "receive buffers"
"""Kinds of held bytes that all units use in turn: buffers of gradients and of messages."""


@dataclass(slots=True)
class SimulatedTask:
    """A piece of a rank's work, or a collective beside it.

    Attributes:
        name: for pictures.
        operations: run one after the other; a collective among the operations of the lane
            ``compute`` makes the rank wait.
        lane: ``compute``, or the axis over which a collective runs beside compute. The tasks of a
            lane run in the order of the step.
        after: indices of tasks of the step that must have ended.
        stage: which of the ranks that a step describes runs it: its pipeline stage.
        takes: bytes of memory from the start of the task on.
        frees: bytes given back when it ends.
        during: bytes that exist only while it runs.
        repeat: how often the operations run.
        phase: ``forward``, ``backward``, or nothing for work of the whole step.
        micro_batch: which one the phase is about.
    """

    name: str
    operations: tuple[Operation, ...] = ()
    lane: str = COMPUTE
    after: tuple[int, ...] = ()
    stage: int = 0
    takes: float = 0.0
    frees: float = 0.0
    during: float = 0.0
    repeat: int = 1
    phase: str = ""
    micro_batch: int = 0


@dataclass(slots=True)
class SimulatedStep:
    """One optimizer step of the ranks of one data-parallel replica.

    Attributes:
        tasks: in an order in which every task comes after those it waits for, or at least so in
            each lane.
        held: bytes between steps by stage and kind.
        axes: the number of ranks of each axis.
        stored: bytes between steps in host memory and on a disk, by stage.
    """

    tasks: list[SimulatedTask]
    held: Sequence[Mapping[str, float]]
    axes: Mapping[str, int] = field(default_factory=dict)
    stored: Sequence[Mapping[str, float]] = ()

    def sent(self) -> Sequence[Mapping[tuple[str, str], float]]:
        """Return the bytes that a rank of each stage sends, by axis or link, and operation."""
        stages: list[Counter[tuple[str, str]]] = [Counter() for _ in self.held]
        for task in self.tasks:
            for operation in task.operations:
                if isinstance(operation, Collective):
                    ranks = self.axes.get(operation.axis, 1)
                    key = (operation.axis, operation.operation)
                    stages[task.stage][key] += operation.sent(ranks) * task.repeat  # type: ignore[assignment]
                elif isinstance(operation, TierCopy):
                    key = (operation.link, task.lane)
                    stages[task.stage][key] += operation.nbytes * task.repeat  # type: ignore[assignment]
        return stages


# --- offloaded state: transfers over the bus and to the disk, and updates on the host ---

# Gradients go to the host when a step is taken; the processor updates unit by unit, and the next
# forward waits for each of its units (Ren et al. 2021, arXiv 2101.06840, section 4.2; Rajbhandari
# et al. 2021, arXiv 2104.07857, section 5). A simulated step begins with the updates of the step
# before.


TO_HOST, HOST, DISK, FROM_HOST = "to the host", "host", "disk", "from the host"
"""Lanes beside those of compute and of axes; the bus carries both directions at once."""

STORE_LANES = frozenset((TO_HOST, HOST, DISK, FROM_HOST))

STATE = 12
"""Bytes of masters and moments; gradients that wait beside a master are no state of a store."""

Tier: TypeAlias = Literal["", "cpu", "nvme"]
"""Where state lies: on the device, in host memory, on a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """State in stores between its uses.

    Attributes:
        optimizer: where the optimizer's state lies.
        parameters: where this rank's share of divided parameters lies.
        share: of the parameters whose optimizer state is stored.
        delayed: whether forward does not wait for updates, and uses values of one step before.
    """

    optimizer: Tier = ""
    parameters: Tier = ""
    share: float = 1.0
    delayed: bool = False

    @property
    def part(self) -> float:
        """Share of the optimizer's state that is not on the device."""
        return self.share if self.optimizer else 0.0

    def update(
        self, unit: SimulatedUnit, elements: float, each: BytesPerElement, first: int
    ) -> list[SimulatedTask]:
        """Return the update of this rank's share of a unit; the last task brings new values.

        Args:
            unit: for names.
            elements: of this rank's share whose state is stored.
            each: bytes of an element.
            first: the index in the step of the first task.
        """
        state = elements * min(STATE, each.optimizer)
        moved = elements * (each.gradient + each.parameter)
        chain: list[tuple[str, str, Operation]] = [
            ("gradients of", TO_HOST, TierCopy("bus", elements * each.gradient)),
            ("read", DISK, TierCopy("disk", state)),
            ("update", HOST, HostPass(2 * state + moved)),
            ("write", DISK, TierCopy("disk", state)),
            ("values of", FROM_HOST, TierCopy("bus", elements * each.parameter)),
        ]
        if self.optimizer != "nvme":
            chain = [link for link in chain if link[1] != DISK]
        return list(_tasks(chain, unit.name, first))

    def fetch(self, unit: SimulatedUnit, nbytes: float, first: int) -> list[SimulatedTask]:
        """Return the tasks that bring this rank's share of a unit's parameters to the device."""
        chain: list[tuple[str, str, Operation]] = [("fetch", FROM_HOST, TierCopy("bus", nbytes))]
        if self.parameters == "nvme":
            chain.insert(0, ("read", DISK, TierCopy("disk", nbytes)))
        return list(_tasks(chain, unit.name, first)) if self.parameters else []

    def held(self, optimizer: float, gradients: float, parameters: float) -> Mapping[str, float]:
        """Return the bytes that a rank keeps in host memory and on the disk.

        Args:
            optimizer: bytes of this rank's share of the optimizer's state.
            gradients: of its gradients.
            parameters: of its parameters.
        """
        found = {"cpu": self.part * gradients, "nvme": 0.0, "": 0.0}
        found[self.optimizer] += self.part * optimizer
        found[self.parameters] += parameters
        return {"host": found["cpu"], "disk": found["nvme"]}


def _tasks(
    chain: list[tuple[str, str, Operation]], name: str, first: int
) -> Iterator[SimulatedTask]:
    for index, (verb, lane, operation) in enumerate(chain):
        after = (first + index - 1,) if index else ()
        yield SimulatedTask(f"{verb} {name}", (operation,), lane, after)


# --- played against prices: when each task runs, and the memory at every moment ---

# Tasks of a lane run one after the other, and start when all they wait for has ended. Collectives
# beside compute slow both down while they run together, as Galvatron measured (arXiv 2211.13878,
# section 4: factors of 1.1 to 1.3).


class Prices(Protocol):
    """How long work takes on some hardware."""

    @property
    def slowdown(self) -> float:
        """Seconds of compute lost for each second beside a collective."""

    def seconds(self, task: SimulatedTask) -> float:
        """Return how long a task runs alone."""


@dataclass(frozen=True, slots=True)
class PlayedTask:
    """When a task ran, in seconds from the start of the step."""

    task: SimulatedTask
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step that was played.

    Attributes:
        tasks: in the order of the step.
        peaks: the most bytes in use at a time, by stage.
        computing: seconds that each stage's lane of compute was busy.
    """

    tasks: Sequence[PlayedTask]
    peaks: Sequence[float]
    computing: Sequence[float]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((each.stop for each in self.tasks), default=0.0)


def play(step: SimulatedStep, prices: Prices) -> PlayedStep:
    """Run a simulated step.

    Raises:
        UsageError: tasks wait for each other for ever.
    """
    tasks = step.tasks
    starts, stops = _played(step, prices)
    computing = [0.0] * len(step.held)
    for index, task in enumerate(tasks):
        if task.lane == COMPUTE:
            computing[task.stage] += stops[index] - starts[index]
    return PlayedStep(
        [PlayedTask(*each) for each in zip(tasks, starts, stops, strict=True)],
        _peaks(step, starts, stops),
        computing,
    )


_End: TypeAlias = tuple[float, int]
"""When a task ends, and its index."""


def _played(step: SimulatedStep, prices: Prices) -> tuple[list[float], list[float]]:
    """Return when each task starts and stops, in the order of time."""
    tasks = step.tasks
    needs, followers = _needs(tasks)
    starts, stops = [0.0] * len(tasks), [0.0] * len(tasks)
    stages = [_Stage(prices.slowdown) for _ in step.held]
    ends: list[_End] = []
    ready = [index for index, count in enumerate(needs) if not count]
    now = 0.0
    while ready or ends:
        for index in ready:
            starts[index] = now
            task = tasks[index]
            for end in stages[task.stage].start(index, task.lane, prices.seconds(task), now):
                heappush(ends, end)
        ready = []
        now, index = heappop(ends)
        stage = stages[tasks[index].stage]
        if not stage.is_over(index, now):
            continue
        for end in stage.stop(index, now):
            heappush(ends, end)
        stops[index] = now
        for follower in followers[index]:
            needs[follower] -= 1
        ready = [each for each in followers[index] if not needs[each]]
    if any(needs):
        stuck = next(task.name for task, count in zip(tasks, needs, strict=True) if count)
        raise UsageError(f"expected a step that ends, found that {stuck!r} waits for ever")
    return starts, stops


def _needs(tasks: Sequence[SimulatedTask]) -> tuple[list[int], list[list[int]]]:
    """Return how many tasks each one waits for, and who waits for it; lanes run in order."""
    followers: list[list[int]] = [[] for _ in tasks]
    needs = [0] * len(tasks)
    last: dict[tuple[int, str], int] = {}
    for index, task in enumerate(tasks):
        before = set(task.after)
        if (previous := last.get((task.stage, task.lane))) is not None:
            before.add(previous)
        last[task.stage, task.lane] = index
        needs[index] = len(before)
        for each in before:
            followers[each].append(index)
    return needs, followers


@dataclass(slots=True)
class _UnderWay:
    """A task under way.

    Attributes:
        left: seconds that it would still take alone, at the moment ``since``.
        since: when its pace last changed.
        until: when it ends at this pace.
        pace: seconds alone per second.
    """

    left: float
    since: float
    until: float
    pace: float = 1.0


@dataclass(slots=True)
class _Stage:
    """The tasks of a stage that run at a moment: compute and collectives slow each other down."""

    slowdown: float
    computing: dict[int, _UnderWay] = field(default_factory=dict)
    beside: dict[int, _UnderWay] = field(default_factory=dict)
    apart: dict[int, _UnderWay] = field(default_factory=dict)

    def start(self, index: int, lane: str, seconds: float, now: float) -> Iterator[_End]:
        """Start a task; yield when it ends, and the new ends of tasks with another pace."""
        if lane in STORE_LANES:
            group = self.apart
        else:
            group = self.computing if lane == COMPUTE else self.beside
        group[index] = _UnderWay(seconds, now, now + seconds)
        yield now + seconds, index
        yield from self._paced(now)

    def is_over(self, index: int, now: float) -> bool:
        """Return whether a task ends now; it does not where its pace has changed meanwhile."""
        return any(index in each and each[index].until == now for each in self._groups)

    def stop(self, index: int, now: float) -> Iterator[_End]:
        """End a task; yield the new ends of tasks with another pace."""
        for group in self._groups:
            group.pop(index, None)
        yield from self._paced(now)

    @property
    def _groups(self) -> tuple[dict[int, _UnderWay], ...]:
        return self.computing, self.beside, self.apart

    def _paced(self, now: float) -> Iterator[_End]:
        for group, others in ((self.computing, self.beside), (self.beside, self.computing)):
            pace = 1 / (1 + self.slowdown * len(others))
            for index, task in group.items():
                if task.pace != pace:
                    task.left = max(0.0, task.left - (now - task.since) * task.pace)
                    task.since, task.pace = now, pace
                    task.until = now + task.left / pace
                    yield task.until, index


def _peaks(step: SimulatedStep, starts: Sequence[float], stops: Sequence[float]) -> list[float]:
    changes: list[list[tuple[float, float]]] = [[] for _ in step.held]
    for task, start, stop in zip(step.tasks, starts, stops, strict=True):
        if task.takes or task.frees or task.during:
            mine = changes[task.stage]
            mine += [(start, task.takes + task.during), (stop, -task.frees - task.during)]
    return [
        sum(held.values()) + max(accumulate((change for _, change in sorted(of)), initial=0.0))
        for held, of in zip(step.held, changes, strict=True)
    ]


# --- as a Chrome trace: one process per stage, one row per lane ---


MICROSECONDS = 1e6


def trace_events(played: PlayedStep) -> list[dict[str, Any]]:
    """Return the events of a trace, which ``chrome://tracing`` and Perfetto read."""
    rows = sorted({(each.task.stage, each.task.lane) for each in played.tasks})
    numbers = {row: index for index, row in enumerate(rows)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": stage, "tid": number, "args": {"name": lane}}
        for (stage, lane), number in numbers.items()
    ]
    events += [
        {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
        for stage in sorted({stage for stage, _ in rows})
    ]
    return events + [
        {
            "ph": "X",
            "name": each.task.name,
            "pid": each.task.stage,
            "tid": numbers[each.task.stage, each.task.lane],
            "ts": each.start * MICROSECONDS,
            "dur": (each.stop - each.start) * MICROSECONDS,
        }
        for each in played.tasks
        if each.stop > each.start
    ]


def write_trace(played: PlayedStep, path: Path) -> None:
    """Write a trace.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps({"traceEvents": trace_events(played), "displayTimeUnit": "ms"}))
