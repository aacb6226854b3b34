"""The contract of compression methods, and sums of codes with error feedback.

Encoded tensors over hosts: their codes and messages, sums with error feedback, gathers, seeds.

The rank that is to keep a part of the sum gets the encoded parts of all others, and adds them up
in fp32, its own as it is. If all ranks are to have the sum, each then sends its encoded part
around::

    rank p to rank q     encoded gradients + error of part q          all-to-all
    rank q               sum of part q, fp32
    rank q to all        encoded sum + error of part q                all-gather

So H hosts send (H-1)/H of the encoded tensor in each phase, and a number is rounded once or
twice, not H times as in a ring. What an encoding has lost is kept, and added before the next
encoding; of a sum with an infinite or NaN gradient on any host, nothing is kept:

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
2019; in both phases as Tang et al., "DoubleSqueeze", ICML 2019. The quantised all-to-all is that of
Wang et al., "ZeRO++", 2023 (arXiv 2306.10209), which keeps no errors.

Parameters are gathered in one phase, and their owner keeps the exact ones::

    values     rank q to all    encoded values                            ZeRO++, section 3.1
    updates    rank q to all    encoded (exact values - values of the last gather)

All ranks, the owner too, go on with what the message says. So with updates the error of a gather
is part of the next update, and nothing is lost for good: Gruntkowska, Tyurin, Richtarik, "EF21-P
and Friends", ICML 2023 (arXiv 2209.15218), algorithm 1.

A seed of numbers that are rounded by chance is a function of the parameter, the rank and how many
sums there were, so that no message has the draws of another one. The counts are in checkpoints,
and go back where a step is skipped: a run that goes on draws what it would have drawn.
"""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, Handle, Parts, Route, sent_bytes
from drivetrain.collectives.volume import FlatSlice, ParameterSpan, Sent, SlicesByRank
from drivetrain.runtime.mesh import Axis

# --- the contract of methods for slow links ---

MethodConfigT = TypeVar("MethodConfigT")


OnWire: TypeAlias = Callable[[torch.dtype], torch.dtype]
"""Maps the dtype of numbers to the dtype in which they cross."""


def as_it_is(dtype: torch.dtype) -> torch.dtype:
    """Return the same dtype."""
    return dtype


class Rounded:
    """Tensors as they cross: they themselves, or rounded copies of them.

    Args:
        tensors: whose values are to cross.
        on_wire: says in which dtype.

    Attributes:
        sent: crosses for each of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], on_wire: OnWire) -> None:
        dtypes = [on_wire(each.dtype) for each in tensors]
        self.sent = [
            each if dtype == each.dtype else torch.empty_like(each, dtype=dtype)
            for each, dtype in zip(tensors, dtypes, strict=True)
        ]
        pairs = zip(tensors, self.sent, strict=True)
        self._rounded = [(each, sent) for each, sent in pairs if sent is not each]

    def leave(self) -> None:
        """Round the values that are about to cross."""
        for each, sent in self._rounded:
            sent.copy_(each)

    def arrive(self) -> None:
        """Give the tensors the values that have come."""
        for each, sent in self._rounded:
            each.copy_(sent)


class Fidelity(StrEnum):
    """How far training under a method may be from exact training, the nearest class first."""

    EXACT = "exact"
    """The same sums, up to their order."""
    ROUNDING = "rounding"
    """Each number is rounded, as a dtype of lower precision rounds it; sums are of fp32."""
    THEORY = "theory"
    """A trajectory of its own, with a proof of convergence at the rate of exact training."""
    EMPIRICAL = "empirical"
    """A trajectory of its own, which experiments found as good; nobody has proved it."""

    def within(self, allowed: "Fidelity") -> bool:
        """Whether a user who allows a class allows this one."""
        order = list(Fidelity)
        return order.index(self) <= order.index(allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoMethodOptions:
    """The options of a method without options."""


class Kept(NamedTuple):
    """The errors of some of a parameter's elements that earlier sums have kept back on a rank.

    Attributes:
        span: the elements.
        errors: fp32, 1-D, no copy; the next sum adds it.
        without: the one rank along the axis between hosts that keeps none of these; None: all do.
    """

    span: ParameterSpan
    errors: Tensor
    without: int | None = None


class FarReduction(ABC):
    """The sum over hosts of one set of gradients, time and again.

    Every rank of the axis between hosts starts the same reductions in the same order.
    """

    @abstractmethod
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        """Start to put the sums over hosts into this rank's tensors, or into all of them.

        Args:
            parts: for each rank of the axis, its tensors, as the slices describe them.
            first: called once, before the tensors are read; maybe in another thread.
            label: names the reduction in errors.
        """

    def feedback(self) -> Iterator[Kept]:
        """Yield the errors that earlier sums have kept back on this rank. By default none are."""
        return iter(())

    def factors(self) -> Iterator[tuple[ParameterSpan, Tensor]]:
        """Yield further tensors for the next sum, no copies: equal on all hosts, of any shape."""
        return iter(())


class FarGather(ABC):
    """The gather over hosts of one set of parameters, time and again."""

    @abstractmethod
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        """Start to fill all tensors, this rank's too: every host gets the same values.

        Args:
            parts: for each rank of the axis, its tensors.
            first: called once, before this rank's tensors are read; maybe in another thread.
            label: names the gather in errors.
        """


class Compressor(ABC, Generic[MethodConfigT]):
    """A method with its options; its reductions keep state from step to step.

    Attributes:
        summary: a sentence for help pages.
        fidelity: how far training may be from exact training.
        gradients: whether it can sum gradients.
        parameters: whether it can gather values of parameters.
        updates: whether it can gather updates of parameters.
        keeps_feedback: whether an error of one step is added to the next; options may decide it.
        sparse: whether most numbers are not sent at all, but wait among the errors for later sums.
        Config: a frozen dataclass whose fields are declared with ``option()``.
    """

    summary: ClassVar[str]
    fidelity: ClassVar[Fidelity]
    gradients: ClassVar[bool] = True
    parameters: ClassVar[bool] = False
    updates: ClassVar[bool] = False
    keeps_feedback: bool = False
    sparse: ClassVar[bool] = False
    Config: ClassVar[type] = NoMethodOptions

    def __init__(self, config: MethodConfigT) -> None:
        self.config = config

    def fidelity_of(self, use: str) -> Fidelity:
        """Return how far training may be from exact training, for one use of these options.

        Args:
            use: ``gradients``, ``parameters`` (their values) or ``updates`` (of parameters).
        """
        return self.fidelity

    def get_ready(self, device: torch.device) -> None:
        """Prepare for tensors of a device, once in a process; by default nothing is needed.

        Called in ``prepare()`` on ranks of several hosts.
        """

    @abstractmethod
    def approximates(self, slices: SlicesByRank) -> bool:
        """Return whether any element is approximated; otherwise the sum is taken as ever."""

    @abstractmethod
    def reduction(
        self, far: Communicator, slices: SlicesByRank, *, everywhere: bool
    ) -> FarReduction:
        """Return a reduction over hosts.

        Args:
            far: the ranks at one place of each host.
            slices: for each of them, the tensors whose sum it gets.
            everywhere: whether all of them get all sums.
        """

    @abstractmethod
    def sent(self, far: Route, slices: SlicesByRank, *, everywhere: bool) -> Sent:
        """Return the bytes that a rank sends in one reduction, by (axis, operation)."""

    @abstractmethod
    def held(self, far: Axis, slices: SlicesByRank, *, everywhere: bool) -> int:
        """Return the bytes of errors and factors that a rank keeps between two reductions."""

    @abstractmethod
    def rehearse(self, matrix: Tensor) -> None:
        """Do the arithmetic of one sum of a matrix, without messages, to be timed.

        Args:
            matrix: fp32, 2-D; may be changed.
        """

    def gathering(self, far: Communicator, slices: SlicesByRank, *, updates: bool) -> FarGather:
        """Return a gather of parameters; asked only of a method with ``parameters`` or ``updates``.

        Args:
            far: the ranks at one place of each host.
            slices: for each of them, the tensors that it holds.
            updates: whether all ranks hold the values of the gather before.
        """
        raise TypeError(f"{type(self).__name__} declares that it gathers no parameters")

    def sent_gathering(self, far: Axis, slices: SlicesByRank) -> Sent:
        """Return the bytes that a rank sends in one gather, of values or of updates."""
        raise TypeError(f"{type(self).__name__} declares that it gathers no parameters")


# --- encoded tensors over hosts ---

SMALLEST = 2048
"""Elements of the smallest matrix that is encoded: smaller ones save nothing worth an error."""

_FP32 = 4


class Codec(Compressor[MethodConfigT]):
    """A method whose message for n numbers is a known number of bytes.

    Arguments of the codes are of one range of numbers: values and errors fp32, 1-D and contiguous,
    and a message of ``nbytes`` elements, uint8, at an address that fp32 may have.

    Attributes:
        parameters: whether it can gather values of parameters.
        updates: whether it can gather updates of parameters: by default, as gradients.
        draws: whether gradients are rounded by chance; options may decide it.
    """

    parameters: ClassVar[bool] = True
    updates: ClassVar[bool] = True
    draws: bool = False

    @property
    @abstractmethod
    def group(self) -> int:
        """Numbers that can be encoded by themselves, in as many bytes as within a longer range.

        The bytes are a multiple of 4.
        """

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many encoded elements."""

    # --- numbers and bytes ---

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write numbers as bytes; where one is infinite or NaN, decoding must give such a one."""

    def encode_gradients(
        self,
        values: Tensor,
        message: Tensor,
        *,
        errors: Tensor | None = None,
        draws: torch.Generator | None = None,
    ) -> None:
        """Write gradients as bytes: as all numbers, unless these are rounded by chance."""
        self.encode(values if errors is None else values + errors, message)

    @abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Write the numbers that bytes stand for."""

    def add(self, message: Tensor, values: Tensor) -> None:
        """Add the numbers that bytes stand for."""
        found = torch.empty_like(values)
        self.decode(message, found)
        values.add_(found)

    def keep(self, values: Tensor, message: Tensor, errors: Tensor) -> None:
        """Replace errors by values plus errors minus the numbers of a message."""
        found = torch.empty_like(values)
        self.decode(message, found)
        errors.add_(values).sub_(found)

    # --- sums and gathers of them ---

    def encodes(self, span: ParameterSpan, dtype: torch.dtype) -> bool:
        """Return whether a parameter's elements are encoded: those of large matrices."""
        return dtype.is_floating_point and span.is_matrix and span.numel >= SMALLEST

    @override
    def approximates(self, slices: SlicesByRank) -> bool:
        each = (flat_slice for part in slices for flat_slice in part)
        return any(
            self.encodes(span, flat_slice.dtype) for flat_slice in each for span in flat_slice.spans
        )

    @override
    def reduction(
        self, far: Communicator, slices: SlicesByRank, *, everywhere: bool
    ) -> FarReduction:
        return EncodedReduction(self, far, slices, everywhere=everywhere)

    @override
    def sent(self, far: Route, slices: SlicesByRank, *, everywhere: bool) -> Sent:
        lengths = [MessageLayout(self, each).nbytes for each in slices]
        swapped = sent_bytes("all_to_all", lengths, far.axis.rank)
        sent = Counter({(far.axis.name, "all_to_all"): swapped})
        return sent + far.passed("all_gather", lengths) if everywhere else sent

    @override
    def held(self, far: Axis, slices: SlicesByRank, *, everywhere: bool) -> int:
        layouts = [MessageLayout(self, each) for each in slices]
        counts = sum(len(layout.spans) for layout in layouts) if self.draws else 0
        held = torch.int64.itemsize * counts
        if not self.keeps_feedback:
            return held
        numels = [layout.numel for layout in layouts]
        return held + _FP32 * (sum(numels) - (0 if everywhere else numels[far.rank]))

    @override
    def rehearse(self, matrix: Tensor) -> None:
        values = matrix.view(-1)
        span = ParameterSpan("", matrix.numel(), matrix.shape[1], 0, 0, matrix.numel())
        layout = MessageLayout(self, [FlatSlice(matrix.numel(), matrix.dtype, (span,))])
        message = layout.room(matrix.device)
        draws = torch.Generator(matrix.device).manual_seed(0) if self.draws else None
        errors = None
        for _, place, room in layout.pieces(matrix.device):
            numbers, bytes_ = values[place], message[room]
            if self.keeps_feedback and (errors is None or len(errors) != len(numbers)):
                errors = torch.zeros_like(numbers)
            self.encode_gradients(numbers, bytes_, errors=errors, draws=draws)
            if errors is not None:
                self.keep(numbers, bytes_, errors)
            self.add(bytes_, numbers)  # as if from another host
            self.decode(bytes_, numbers)  # the sum

    @override
    def gathering(self, far: Communicator, slices: SlicesByRank, *, updates: bool) -> FarGather:
        return EncodedGather(self, far, slices, updates=updates)

    @override
    def sent_gathering(self, far: Axis, slices: SlicesByRank) -> Sent:
        lengths = [MessageLayout(self, each).nbytes for each in slices]
        return Counter({(far.name, "all_gather"): sent_bytes("all_gather", lengths, far.rank)})


_SEED_BYTES = 8


def seed_of(spans: Sequence[ParameterSpan], rank: int, sums: int) -> int:
    """Return the seed of a rank's message about some ranges of parameters.

    Args:
        spans: the ranges in the message.
        rank: the sender, along the axis between hosts.
        sums: how many sums of them there were.
    """
    facts = f"{spans[0].name} {spans[0].first} {rank} {sums}" if spans else ""
    return int.from_bytes(sha256(facts.encode()).digest()[:_SEED_BYTES], "little")


# --- the message of one rank's tensors ---

# ::
#
#     | finite? | pieces of the first matrix | ... of the last matrix | other elements as they are |
#       4 bytes   as many bytes as the encoding needs                   as many as they have
#
# Vectors, small matrices and elements of no parameter are few, and count much. An encoding goes
# over its numbers several times, with one operation of torch each, and so does what is done before
# and after: errors are added, sums are made. On the CPU a piece stays in the caches all the time,
# so each number and each error is read from memory once. On other devices a few large operations
# are faster: there a matrix is one piece.


MARK_BYTES = 4
"""The first bytes of a message say whether all encoded elements are finite."""

_ALIGNMENT = 4
"""The bytes of a matrix begin at a multiple: fp32 may be among them."""

_PIECE = 2**18
"""Numbers of a piece, about: in fp32, with two scratch tensors as large, 3 MiB of a cache. With
fewer numbers the calls take longer than the arithmetic; with more, memory does."""


class ElementRange(NamedTuple):
    """A range of elements of one of several tensors.

    Attributes:
        tensor: index of the tensor.
        start: first element.
        stop: one past the last.
    """

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the elements, as a view."""
        return tensors[self.tensor][self.start : self.stop]


class MessageLayout:
    """Where the elements of one rank's tensors lie in the message about them.

    Args:
        encoding: of the matrices.
        slices: describe the tensors.

    Attributes:
        numel: how many elements are encoded.
        nbytes: of the whole message.
        spans: the encoded ranges of parameters; start and stop count encoded elements.
    """

    def __init__(self, encoding: Codec[Any], slices: Sequence[FlatSlice]) -> None:
        self._encoding = encoding
        self._encoded: list[ElementRange] = []
        self._plain: list[ElementRange] = []
        self._plain_from = MARK_BYTES
        self.spans: list[ParameterSpan] = []
        self.numel = 0
        plain_bytes = 0
        for index, flat_slice in enumerate(slices):
            edge = 0
            for span in flat_slice.spans:
                if not encoding.encodes(span, flat_slice.dtype):
                    continue
                plain_bytes += self._leave(ElementRange(index, edge, span.start), flat_slice.dtype)
                edge, start = span.stop, self.numel
                self.numel += span.stop - span.start
                self.spans.append(replace(span, start=start, stop=self.numel))
                self._encoded.append(ElementRange(index, span.start, span.stop))
                self._plain_from += self._aligned(self.numel - start)
            plain_bytes += self._leave(
                ElementRange(index, edge, flat_slice.numel), flat_slice.dtype
            )
        self.nbytes = self._plain_from + plain_bytes

    def _leave(self, elements: ElementRange, dtype: torch.dtype) -> int:
        """Send elements as they are; return their bytes."""
        if elements.numel:
            self._plain.append(elements)
        return elements.numel * dtype.itemsize

    def _aligned(self, numel: int) -> int:
        """Return the bytes of so many elements of a matrix, with those before the next matrix."""
        return -(-self._encoding.nbytes(numel) // _ALIGNMENT) * _ALIGNMENT

    def room(self, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    # --- encoded elements ---

    def pieces(self, device: torch.device) -> Iterator[tuple[ElementRange, slice, slice]]:
        """Yield the pieces of all matrices, in order, for tensors and messages on a device.

        Of each piece: the range in one of the tensors, the same elements among all that are
        encoded, and their bytes in a message.
        """
        group = self._encoding.group
        step = max(1, _PIECE // group) * group if device.type == "cpu" else max(1, self.numel)
        edge, place = MARK_BYTES, 0
        for index, first, last in self._encoded:
            room = edge
            for start in range(first, last, step):
                stop = min(start + step, last)
                end = room + self._encoding.nbytes(stop - start)
                elements = ElementRange(index, start, stop)
                yield elements, slice(place, place + stop - start), slice(room, end)
                place, room = place + stop - start, end
            edge += self._aligned(last - first)

    def load(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a copy of the elements to encode: fp32, 1-D."""
        device = tensors[0].device if tensors else None
        values = torch.empty(self.numel, dtype=torch.float32, device=device)
        places = values.split_with_sizes([each.numel for each in self._encoded])
        for each, place in zip(self._encoded, places, strict=True):
            place.copy_(each.of(tensors))
        return values

    # --- the other elements ---

    def write_plain(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Copy the other elements into a message."""
        for piece, place in self._plain_pairs(tensors, message):
            place.copy_(piece.view(torch.uint8))

    def read_plain(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the other elements from a message."""
        for piece, place in self._plain_pairs(tensors, message):
            piece.view(torch.uint8).copy_(place)

    def add_plain(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Add the other elements of a message, in their own dtype."""
        for piece, place in self._plain_pairs(tensors, message):
            theirs = torch.empty_like(piece)
            theirs.view(torch.uint8).copy_(place)
            piece.add_(theirs)

    def _plain_pairs(
        self, tensors: Sequence[Tensor], message: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        pairs, edge = [], self._plain_from
        for each in self._plain:
            piece = each.of(tensors)
            pairs.append((piece, message[edge : edge + piece.nbytes]))
            edge += piece.nbytes
        return pairs


def mark(message: Tensor, *, finite: bool) -> None:
    """Say in a message whether the encoded elements are finite."""
    message[:MARK_BYTES] = int(finite)


def is_marked_finite(message: Tensor) -> bool:
    """Return whether a message says that its encoded elements are finite."""
    return bool(message[0])


# --- sums and gathers ---


class Followed:
    """A handle of an operation that some work follows, once, on whichever thread waits first.

    Args:
        operation: under way.
        work: called when the operation is over.
    """

    def __init__(self, operation: Handle, work: Callable[[], None]) -> None:
        self._operation = operation
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the work is done.

        Raises:
            CollectiveError: the operation failed or timed out.
        """
        self._operation.wait()
        with self._lock, torch.no_grad():
            if self._work is not None:
                self._work()
                self._work = None

    def done(self) -> bool:
        """Whether the operation is over; the work never waits for another rank."""
        return self._operation.done()


class EncodedReduction(FarReduction):
    """A sum over hosts whose messages are encoded.

    Args:
        encoding: of matrices.
        far: the ranks at one place of each host.
        slices: for each of them, the tensors whose sum it gets.
        everywhere: whether all of them get all sums.
    """

    def __init__(
        self,
        encoding: Codec[Any],
        far: Communicator,
        slices: SlicesByRank,
        *,
        everywhere: bool,
    ) -> None:
        self._encoding = encoding
        self._far = far
        self._everywhere = everywhere
        self._layouts = [MessageLayout(encoding, each) for each in slices]
        self._others = [rank for rank in range(far.size) if rank != far.rank]
        keeping = self._layouts if everywhere else [self._layouts[rank] for rank in self._others]
        # On the CPU until the first gradients say on which device they are.
        self._errors = {
            layout: torch.zeros(layout.numel, dtype=torch.float32)
            for layout in keeping
            if encoding.keeps_feedback
        }
        spans = [span for layout in self._layouts for span in layout.spans]
        self._drawn = spans if encoding.draws else []
        self._sums = torch.zeros(len(self._drawn), dtype=torch.int64)
        self._keeps = encoding.keeps_feedback or encoding.draws

    @override
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        far, mine = self._far, self._layouts[self._far.rank]
        device = next(tensor.device for tensors in parts for tensor in tensors)
        outgoing = [layout.room(device) for layout in self._layouts]
        incoming = [mine.room(device) for _ in self._layouts]

        def encode() -> None:
            first()
            finite = not self._keeps or bool(are_finite(parts))
            mark(outgoing[far.rank], finite=finite)
            for rank in self._others:
                layout, message = self._layouts[rank], outgoing[rank]
                layout.write_plain(parts[rank], message)
                mark(message, finite=finite)
                self._encode(layout, parts[rank], message)

        sent = far.all_to_all(outgoing, incoming, label=label, first=encode)
        message = outgoing[far.rank]

        def add_up() -> None:
            theirs = [incoming[rank] for rank in self._others]
            finite = all(is_marked_finite(each) for each in (message, *theirs))
            if self._errors and finite:
                for rank in self._others:
                    self._keep_errors(self._layouts[rank], parts[rank], outgoing[rank])
            self._add_up(parts[far.rank], theirs, message, finite=finite)
            if finite and self._drawn:
                # Ranges that were in different sums before are in one now: no seed comes twice.
                self._sums.fill_(self._sums.max() + 1)

        summed = Followed(sent, add_up)
        if not self._everywhere:
            return summed
        # What was sent is read no more: the same memory gets the sums of the others.
        held = [[each] for each in outgoing]
        gathered = far.gather_parts(held, label=label, first=summed.wait)

        def read() -> None:
            for rank in self._others:  # this rank's part is as the others read it already
                read_message(self._encoding, self._layouts[rank], outgoing[rank], parts[rank])

        return Followed(gathered, read)

    @override
    def feedback(self) -> Iterator[Kept]:
        for rank, layout in enumerate(self._layouts):
            if layout in self._errors:
                errors, without = self._errors[layout], None if self._everywhere else rank
                for span in layout.spans:
                    yield Kept(span, errors[span.start : span.stop], without)

    @override
    def factors(self) -> Iterator[tuple[ParameterSpan, Tensor]]:
        yield from zip(self._drawn, self._sums, strict=True)

    def _draws(self, layout: MessageLayout, device: torch.device) -> torch.Generator | None:
        """Return the draws of this rank's message about a part: no other message has the same."""
        if not self._drawn:
            return None
        seed = seed_of(layout.spans, self._far.rank, int(self._sums.max()))
        return torch.Generator(device).manual_seed(seed)

    def _encode(self, layout: MessageLayout, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Write the gradients and errors of another rank's part into its message."""
        device = message.device
        errors, draws = self._errors_of(layout, device), self._draws(layout, device)
        for elements, place, room in layout.pieces(device):
            values = elements.of(tensors).to(torch.float32)
            kept = None if errors is None else errors[place]
            self._encoding.encode_gradients(values, message[room], errors=kept, draws=draws)

    def _keep_errors(
        self, layout: MessageLayout, tensors: Sequence[Tensor], message: Tensor
    ) -> None:
        """Keep the difference between gradients with errors and their message as errors."""
        errors = self._errors_of(layout, message.device)
        assert errors is not None
        for elements, place, room in layout.pieces(message.device):
            values = elements.of(tensors).to(torch.float32)
            self._encoding.keep(values, message[room], errors[place])

    def _add_up(
        self, own: Sequence[Tensor], incoming: Sequence[Tensor], message: Tensor, *, finite: bool
    ) -> None:
        """Add the other ranks' messages to this rank's part; encode the sum if all get it.

        Args:
            own: this rank's part.
            incoming: the messages of the other ranks.
            message: for the sum.
            finite: whether the gradients of all ranks are finite.
        """
        layout, device = self._layouts[self._far.rank], message.device
        for each in incoming:
            layout.add_plain(each, own)
        if self._everywhere:
            layout.write_plain(own, message)
        errors, draws = self._errors_of(layout, device), self._draws(layout, device)
        for elements, place, room in layout.pieces(device):
            part = elements.of(own)
            total = part.to(torch.float32)  # of fp32: the part itself
            for each in incoming:
                self._encoding.add(each[room], total)
            if self._everywhere:
                keeps = errors is not None and finite and is_finite(total)  # a sum may overflow
                kept = errors[place] if errors is not None and keeps else None
                bytes_ = message[room]
                self._encoding.encode_gradients(total, bytes_, errors=kept, draws=draws)
                if kept is not None:
                    self._encoding.keep(total, bytes_, kept)
                self._encoding.decode(bytes_, total)  # as all others will read it
            part.copy_(total)

    def _errors_of(self, layout: MessageLayout, device: torch.device) -> Tensor | None:
        """Return the errors of a part; none if errors are not kept."""
        errors = self._errors.get(layout)
        if errors is not None and errors.device != device:
            errors = self._errors[layout] = errors.to(device)
        return errors


class EncodedGather(FarGather):
    """A gather over hosts whose messages are encoded; the sender reads its own message, too.

    Args:
        encoding: of matrices.
        far: the ranks at one place of each host.
        slices: for each of them, the tensors that it holds.
        updates: whether all ranks hold the values of the gather before: then differences are sent.
    """

    def __init__(
        self, encoding: Codec[Any], far: Communicator, slices: SlicesByRank, *, updates: bool
    ) -> None:
        self._encoding = encoding
        self._far = far
        self._updates = updates
        self._layouts = [MessageLayout(encoding, each) for each in slices]

    @override
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        device = next(tensor.device for tensors in parts for tensor in tensors)
        messages = [layout.room(device) for layout in self._layouts]
        layout, own = self._layouts[self._far.rank], parts[self._far.rank]

        def encode() -> None:
            message = messages[self._far.rank]
            mark(message, finite=True)
            before = layout.load(own) if self._updates else None
            first()
            layout.write_plain(own, message)
            for elements, place, room in layout.pieces(device):
                part = elements.of(own)
                values = part.to(torch.float32)
                if before is not None:
                    values = values - before[place]
                    part.copy_(before[place])  # to which all ranks, this one too, add the same
                self._encoding.encode(values, message[room])

        held = [[each] for each in messages]
        gathered = self._far.gather_parts(held, label=label, first=encode)

        def read() -> None:
            for each, message, tensors in zip(self._layouts, messages, parts, strict=True):
                read_message(self._encoding, each, message, tensors, add=self._updates)

        return Followed(gathered, read)


def read_message(
    encoding: Codec[Any],
    layout: MessageLayout,
    message: Tensor,
    tensors: Sequence[Tensor],
    *,
    add: bool = False,
) -> None:
    """Replace the elements of tensors by those of a message, or add the encoded ones to them."""
    layout.read_plain(message, tensors)
    for elements, _, room in layout.pieces(message.device):
        part = elements.of(tensors)
        values = part.to(torch.float32)  # of fp32: the part itself
        if add:
            encoding.add(message[room], values)
        else:
            encoding.decode(message[room], values)
        part.copy_(values)


def is_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite; each is read once."""
    # A sum is finite only if all elements are; one of half precision could overflow.
    return torch.isfinite(tensor.sum(dtype=torch.float32 if tensor.element_size() < 4 else None))


def are_finite(parts: Parts) -> Tensor:
    """Return whether all elements of all tensors, of which there is one at least, are finite."""
    return torch.stack([is_finite(tensor) for tensors in parts for tensor in tensors]).all()
