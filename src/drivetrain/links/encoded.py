"""Sums and gathers of encoded tensors over hosts, with error feedback.

The rank that is to keep a part of the sum gets the encoded parts of all others, and adds them up in
fp32, its own as it is. If all ranks are to have the sum, each then sends its encoded part around::

    rank p to rank q     encoded gradients + error of part q          all-to-all
    rank q               sum of part q, fp32
    rank q to all        encoded sum + error of part q                all-gather

So H hosts send (H-1)/H of the encoded tensor in each phase, and a number is rounded once or twice,
not H times as in a ring. What an encoding has lost is kept, and added before the next encoding;
of a sum with an infinite or NaN gradient on any host, nothing is kept:
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
2019; in both phases as Tang et al., "DoubleSqueeze", ICML 2019. The quantised all-to-all is that of
Wang et al., "ZeRO++", 2023 (arXiv 2306.10209), which keeps no errors.

Parameters are gathered in one phase, and their owner keeps the exact ones::

    values     rank q to all    encoded values                            ZeRO++, section 3.1
    updates    rank q to all    encoded (exact values - values of the last gather)

All ranks, the owner too, go on with what the message says. So with updates the error of a gather is
part of the next update, and nothing is lost for good: Gruntkowska, Tyurin, Richtarik, "EF21-P and
Friends", ICML 2023 (arXiv 2209.15218), algorithm 1.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, Handle, Parts
from drivetrain.collectives.stretch import ParameterSpan, StretchParts
from drivetrain.links.compressor import FarGather, FarReduction, Kept
from drivetrain.links.message import Encoding, MessageLayout, is_marked_finite, mark
from drivetrain.links.seeds import SeedCounts


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
        stretches: for each of them, the tensors whose sum it gets.
        everywhere: whether all of them get all sums.
        feedback: whether errors are kept and added to the next sum.
        draws: whether numbers are rounded by chance.
    """

    def __init__(
        self,
        encoding: Encoding,
        far: Communicator,
        stretches: StretchParts,
        *,
        everywhere: bool,
        feedback: bool,
        draws: bool = False,
    ) -> None:
        self._far = far
        self._everywhere = everywhere
        self._layouts = [MessageLayout(encoding, each) for each in stretches]
        self._others = [rank for rank in range(far.size) if rank != far.rank]
        keeping = self._layouts if everywhere else [self._layouts[rank] for rank in self._others]
        # On the CPU until the first gradients say on which device they are.
        self._errors = {layout: torch.zeros(layout.numel) for layout in keeping if feedback}
        spans = [span for layout in self._layouts for span in layout.spans]
        self._counts = SeedCounts(spans if draws else [])
        self._keeps = feedback or draws

    @override
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        far, mine = self._far, self._layouts[self._far.rank]
        device = next(tensor.device for tensors in parts for tensor in tensors)
        outgoing = [layout.room(device) for layout in self._layouts]
        incoming = [mine.room(device) for _ in self._layouts]

        def encode() -> None:
            first()
            finite = not self._keeps or are_finite(parts)
            mark(outgoing[far.rank], finite=finite)
            for rank in self._others:
                layout, message = self._layouts[rank], outgoing[rank]
                layout.write_plain(parts[rank], message)
                mark(message, finite=finite)
                values = self._with_errors(rank, parts, finite=finite)
                layout.encode_gradients(values, message, self._seed(layout))

        sent = far.all_to_all(outgoing, incoming, label=label, first=encode)
        message = outgoing[far.rank]

        def add_up() -> None:
            theirs = [incoming[rank] for rank in self._others]
            finite = all(is_marked_finite(each) for each in (message, *theirs))
            if self._errors and finite:
                for rank in self._others:
                    sent_values = self._with_errors(rank, parts, finite=finite)
                    self._keep_errors(self._layouts[rank], sent_values, outgoing[rank])
            self._add_up(parts[far.rank], theirs, message, finite=finite)
            if finite:
                self._counts.advance()

        summed = Followed(sent, add_up)
        if not self._everywhere:
            return summed
        # What was sent is read no more: the same memory gets the sums of the others.
        held = [[each] for each in outgoing]
        gathered = far.gather_parts(held, label=label, first=summed.wait)
        return Followed(gathered, lambda: self._read(parts, outgoing))

    @override
    def feedback(self) -> Iterator[Kept]:
        for rank, layout in enumerate(self._layouts):
            if layout in self._errors:
                errors, without = self._errors[layout], None if self._everywhere else rank
                for span in layout.spans:
                    yield Kept(span, errors[span.start : span.stop], without)

    @override
    def factors(self) -> Iterator[tuple[ParameterSpan, Tensor]]:
        yield from self._counts

    def _seed(self, layout: MessageLayout) -> int:
        """Return the seed of this rank's message about a part: no other message has the same."""
        return self._counts.seed(layout.spans, self._far.rank)

    def _with_errors(self, rank: int, parts: Parts, *, finite: bool) -> Tensor:
        """Return the numbers to encode for a rank: its part of the gradients, and the errors."""
        layout, tensors = self._layouts[rank], parts[rank]
        if not self._errors or not finite:  # then NaN is all that anybody reads of the message
            return layout.load(tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        return layout.load(tensors, errors=self._errors_of(layout, device))

    def _keep_errors(self, layout: MessageLayout, values: Tensor, message: Tensor) -> None:
        """Keep the difference between numbers and their message as errors."""
        errors = self._errors_of(layout, values.device)
        layout.decode(message, errors)
        torch.sub(values, errors, out=errors)

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
        layout = self._layouts[self._far.rank]
        total = layout.load(own)
        theirs = torch.empty_like(total)
        for each in incoming:
            layout.add_plain(each, own)
            layout.decode(each, theirs)
            total.add_(theirs)
        if not self._everywhere:
            layout.store(total, own)
            return
        layout.write_plain(own, message)
        keeps = bool(self._errors) and finite and are_finite([[total]])  # a sum may overflow
        if keeps:
            total.add_(self._errors_of(layout, total.device))
        layout.encode_gradients(total, message, self._seed(layout))
        if keeps:
            self._keep_errors(layout, total, message)

    def _read(self, parts: Parts, messages: Sequence[Tensor]) -> None:
        for layout, tensors, message in zip(self._layouts, parts, messages, strict=True):
            read_message(layout, message, tensors)

    def _errors_of(self, layout: MessageLayout, device: torch.device) -> Tensor:
        errors = self._errors[layout]
        if errors.device != device:
            errors = self._errors[layout] = errors.to(device)
        return errors


class EncodedGather(FarGather):
    """A gather over hosts whose messages are encoded; the sender reads its own message, too.

    Args:
        encoding: of matrices.
        far: the ranks at one place of each host.
        stretches: for each of them, the tensors that it holds.
        updates: whether all ranks hold the values of the gather before: then differences are sent.
    """

    def __init__(
        self, encoding: Encoding, far: Communicator, stretches: StretchParts, *, updates: bool
    ) -> None:
        self._far = far
        self._updates = updates
        self._layouts = [MessageLayout(encoding, each) for each in stretches]

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
            values = layout.load(own)
            if before is not None:
                layout.store(before, own)  # to which all ranks, this one too, add the same
                values.sub_(before)
            layout.encode(values, message)

        held = [[each] for each in messages]
        gathered = self._far.gather_parts(held, label=label, first=encode)

        def read() -> None:
            for each, message, tensors in zip(self._layouts, messages, parts, strict=True):
                read_message(each, message, tensors, add=self._updates)

        return Followed(gathered, read)


def read_message(
    layout: MessageLayout, message: Tensor, tensors: Sequence[Tensor], *, add: bool = False
) -> None:
    """Replace the elements of tensors by those of a message, or add the encoded ones to them."""
    layout.read_plain(message, tensors)
    values = torch.empty(layout.numel, dtype=torch.float32, device=message.device)
    layout.decode(message, values)
    if add:
        values.add_(layout.load(tensors))
    layout.store(values, tensors)


def are_finite(parts: Parts) -> bool:
    """Return whether all elements of all tensors are finite; each is read once."""
    # A sum is finite only if all elements are; one of half precision could overflow.
    sums = (
        tensor.sum(dtype=torch.float32 if tensor.element_size() < 4 else None)
        for tensors in parts
        for tensor in tensors
    )
    return all(bool(torch.isfinite(total)) for total in sums)
