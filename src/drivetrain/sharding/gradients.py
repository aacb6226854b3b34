"""One unit's gradients on one rank: reduced together, by one reduce-scatter over its flat tensors.

With replicas, a reduce-scatter adds up within the ranks that share the unit, and an all-reduce of
what a rank owns adds up over the replicas: at once, or for several micro-batches together.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from drivetrain.collectives import Handle
from drivetrain.runtime.precision import Precision
from drivetrain.sharding.flat import Flat
from drivetrain.sharding.flat_gradients import FlatGradients
from drivetrain.sharding.layout import offsets_in_bytes
from drivetrain.sharding.ranks import Ranks
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.unit import Unit

Lend = Callable[[int], Tensor]
"""Lends a buffer of so many bytes: 1-D, of bytes."""


class UnitGradients:
    """The gradients of one unit.

    Args:
        unit: the unit.
        precision: the dtypes of gradients.
        lend: lends a buffer; None keeps one for good.
        take_back: takes a lent buffer back.
        ranks: those that train the model.
        make_way: called before the first gradient of a backward.

    Attributes:
        unit: the unit.
        awaited: the parameters that gradients are expected for in this round.
        pending: how many of them have not come.
        present: those with a gradient on this rank since gradients were last handed out.
    """

    def __init__(
        self,
        unit: Unit,
        precision: Precision,
        lend: Lend | None,
        take_back: Callable[[Tensor], None],
        ranks: Ranks,
        make_way: Callable[[Unit], None] | None = None,
    ) -> None:
        self.unit = unit
        self.awaited: list[Slot] = []
        self.pending = 0
        self.present: set[Slot] = set()
        self._lend = lend
        self._take_back = take_back
        self._make_way = make_way
        self._reducing = ranks.reducing
        self._replicas = ranks.replicas
        self._flats = {flat: self._make(flat, precision) for flat in unit.flats}
        self._active: list[FlatGradients] = []
        self._opened = False
        self._lent: Tensor | None = None
        self._reduction: Handle | None = None
        self._replication: list[Handle] = []

    def _make(self, flat: Flat, precision: Precision) -> FlatGradients:
        dtype = flat.layout.dtype
        wire, total = precision.reduce_dtype(dtype), precision.accumulate_dtype(dtype)
        return FlatGradients(flat, wire, total, stays=self._lend is None)

    def begin(self) -> bool:
        """Begin a round; return whether any gradient is expected."""
        self.awaited = [slot for slot in self.unit.slots if slot.parameter.requires_grad]
        self.pending = len(self.awaited)
        return bool(self.awaited)

    @property
    def on_its_way(self) -> bool:
        """Whether the buffers are being reduced."""
        return self._reduction is not None

    @property
    def done(self) -> bool:
        """Whether the reduction is over."""
        return self._reduction is None or self._reduction.done()

    # --- filling ---

    def receive(self, slot: Slot, scale: float) -> None:
        """Move a parameter's fresh gradient into its buffer, times a scale.

        Raises:
            UsageError: the gradient is sparse or part of a graph.
        """
        if slot.parameter.grad is None:
            return
        if not self._opened:
            self._open()
        self._flats[slot.flat].receive(slot, scale)

    def scale(self, factor: float) -> None:
        """Multiply what was received and not handed out."""
        if self._reduction is None:
            for gradients in self._flats.values():
                gradients.scale(factor)

    def forget(self, only: Collection[Slot] | None = None) -> None:
        """Drop what was received and not handed out, of some parameters or of all."""
        slots = self.unit.slots if only is None else only
        self.present.difference_update(slots)
        for slot in slots:
            slot.filled = False
            self._flats[slot.flat].drop_waiting([slot])
        waiting = any(slot.filled for slot in self.unit.slots)
        if self._opened and self._reduction is None and not waiting:
            self._close()

    def _open(self) -> None:
        self._opened = True
        if self._make_way is not None:
            self._make_way(self.unit)
        trained = {slot.flat for slot in self.unit.slots if slot.parameter.requires_grad}
        self._active = [self._flats[flat] for flat in self.unit.flats if flat in trained]
        if self._lend is not None:
            self._borrow(self._lend)
            return
        for gradients in self._active:
            if gradients.buffer is None:
                values = gradients.flat.values
                gradients.use(torch.zeros_like(values, dtype=gradients.wire))
            else:
                gradients.set_aside()

    def _borrow(self, lend: Lend) -> None:
        sizes = [
            gradients.flat.layout.numel * gradients.wire.itemsize for gradients in self._active
        ]
        starts = offsets_in_bytes(sizes)
        self._lent = lend(starts[-1])
        for gradients, start, size in zip(self._active, starts, sizes, strict=False):
            gradients.use(self._lent[start : start + size].view(gradients.wire))

    # --- reducing ---

    def launch(self) -> None:
        """Send the buffers on their way; parameters without a gradient count as zeros."""
        if not self._opened:
            self._open()
        missing = {slot for gradients in self._active for slot in gradients.fill_gaps()}
        self.present.update(slot for slot in self.awaited if slot not in missing)
        outgoing = [gradients.outgoing() for gradients in self._active]
        self._reduction = self._reducing.reduce_parts(
            [
                [part for parts in outgoing for part in parts[rank]]
                for rank in range(self._reducing.size)
            ],
            label=f"gradients of {self.unit.label}",
        )

    def settle(self, *, replicate: bool) -> None:
        """Wait for the reduction and keep what this rank owns.

        Args:
            replicate: whether replicas are about to hand gradients out: what they own is added up.
        """
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        for gradients in self._active:
            if self._replicas is None:
                gradients.settle()
            else:
                gradients.put_by()
        self._close()
        if self._replicas is not None and replicate:
            label = f"gradients of replicas of {self.unit.label}"
            self._replication = [
                self._replicas.all_reduce(gradients.crossing(), label=label)
                for gradients in self._active
            ]

    def finish(self) -> None:
        """Wait for the replicas."""
        if not self._replication:
            return
        for handle in self._replication:
            handle.wait()
        self._replication = []
        for gradients in self._active:
            gradients.arrive()

    def _close(self) -> None:
        self._opened = False
        if self._lent is not None:
            self._take_back(self._lent)
            self._lent = None
        for gradients in self._active:
            low = gradients.buffer is not None and gradients.buffer.dtype is gradients.wire
            if self._lend is not None or not low:  # what sums were made in is larger
                gradients.use(None)

    # --- handing out ---

    def widen(self, flats: Collection[Flat]) -> None:
        """Keep gradients in the dtype of sums: they are about to be changed in place."""
        for flat in flats:
            self._flats[flat].widen()

    def give_away(self, flats: Collection[Flat]) -> None:
        """Let go of the memory of gradients that were handed out: somebody else reads it."""
        for flat in flats:
            self._flats[flat].give_away()

    def deliver(self, slots: Sequence[Slot]) -> None:
        """Give these parameters' fragments their gradients."""
        for slot in slots:
            self._flats[slot.flat].hand_out(slot)
        self.present.clear()
