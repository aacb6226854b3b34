"""Averages gradients over ranks while backward runs, and leaves each rank the range that it owns.

One synchronised backward is a round::

    first gradient      begin: count down from all parameters of every unit
    each gradient       move it into its unit's buffer, count down
    unit at zero        launch its reduce-scatter, and those after it that are complete: always in
                        the order of the units, which is the same on all ranks
    end of backward     zeros for what is missing, launch the rest, wait, hand the gradients out

A parameter that got no gradient on any rank must not move, not even by an optimizer's momentum; so
the ranks take the maximum of one byte per parameter: whether any of them had a gradient for it.

Where units have replicas, rounds of an accumulation window end without handing gradients out: what
is added up over replicas is the window's sum.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Handle
from drivetrain.errors import UsageError
from drivetrain.parts.pool import BufferPool
from drivetrain.parts.rounds import Rounds, on_gradient
from drivetrain.runtime.precision import Precision
from drivetrain.sharding.flat import Flat
from drivetrain.sharding.gradients import UnitGradients
from drivetrain.sharding.ranks import Ranks
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.unit import Unit

PATIENCE_S = 5.0
"""How long backward waits for a buffer before it takes another one: far longer than a reduction."""

_NAP_S = 50e-6
"""Between two looks whether a reduction is over."""


class Reducer:
    """Owns the gradient hooks and buffers of one model.

    Args:
        ranks: those that train the model.
        precision: dtypes of gradients.
        device: where the buffers live.
        in_flight: buffers that may be lent at once; 0 keeps a buffer for every unit.
        pool_bytes: size of the buffers that are lent; larger ones are allocated when needed.
        make_way: called before a unit gets its first gradient of a backward.
        at_end: called at the end of every round.

    Attributes:
        synchronizing: whether backward sends gradients; otherwise they stay in the buffers.
        replicating: whether replicas then add theirs up, and gradients are handed out.
        rounds: the rounds so far.
    """

    def __init__(
        self,
        ranks: Ranks,
        precision: Precision,
        device: torch.device,
        *,
        in_flight: int = 0,
        pool_bytes: int = 0,
        make_way: Callable[[Unit], None] | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.synchronizing = True
        self.replicating = True
        self.rounds = Rounds(self._begin, self._end)
        self._ranks = ranks
        self._precision = precision
        self._device = device
        self._scale = 1.0 / ranks.everyone.size
        self._in_flight = in_flight
        self._pool_bytes = pool_bytes
        self._pool = BufferPool(in_flight, pool_bytes) if in_flight and pool_bytes else None
        self._lent: dict[int, bool] = {}
        self._make_way = make_way
        self._at_end = at_end
        self._gradients: list[UnitGradients] = []
        self._handles: dict[Slot, RemovableHandle] = {}
        self._active: list[UnitGradients] = []
        self._launched = 0
        self._replicates = True
        self._patience_s = PATIENCE_S
        self._flying: deque[UnitGradients] = deque()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the buffers that are kept for lending."""
        return self._pool.nbytes if self._pool is not None else 0

    def add(self, units: Sequence[Unit]) -> None:
        """Reduce the gradients of more units, after those of the others."""
        lend = self._borrow if self._in_flight else None
        for unit in units:
            gradients = UnitGradients(
                unit, self._precision, lend, self._take_back, self._ranks, self._make_way
            )
            self._gradients.append(gradients)
        self.refresh()

    def refresh(self) -> None:
        """Follow changes of ``requires_grad``; every rank must make the same ones."""
        for gradients in self._gradients:
            for slot in gradients.unit.slots:
                trainable = slot.parameter.requires_grad
                if trainable and slot not in self._handles:
                    hook = self._make_hook(slot, gradients)
                    self._handles[slot] = on_gradient(slot.parameter, hook)
                elif not trainable and slot in self._handles:
                    self._handles.pop(slot).remove()

    def scale(self, factor: float) -> None:
        """Multiply gradients of micro-batches that were not sent."""
        for gradients in self._gradients:
            gradients.scale(factor)

    def widen(self, slots: Iterable[Slot]) -> None:
        """Keep the gradients of these parameters in the dtype of sums."""
        self._each_flat(slots, UnitGradients.widen)

    def give_away(self, slots: Iterable[Slot]) -> None:
        """Let go of the memory of these parameters' gradients: somebody else reads it."""
        self._each_flat(slots, UnitGradients.give_away)

    def _each_flat(
        self, slots: Iterable[Slot], action: Callable[[UnitGradients, set[Flat]], None]
    ) -> None:
        flats = {slot.flat for slot in slots}
        for gradients in self._gradients:
            mine = flats.intersection(gradients.unit.flats)
            if mine:
                action(gradients, mine)

    def forget(self, only: Iterable[Slot] | None = None) -> None:
        """Drop gradients of micro-batches that were not sent, of some parameters or of all."""
        if only is None:
            for gradients in self._gradients:
                gradients.forget()
            return
        slots = set(only)
        for gradients in self._gradients:
            gradients.forget(slots.intersection(gradients.unit.slots))

    @contextmanager
    def accumulating(self, enabled: bool, *, reducing: bool) -> Iterator[None]:
        """Context in which gradients are not handed out.

        Args:
            enabled: False hands them out again.
            reducing: whether they are reduced all the same, and wait for the replicas' ones;
                otherwise nothing is sent.
        """
        before = self.synchronizing, self.replicating
        if reducing:
            self.replicating = not enabled
        else:
            self.synchronizing = not enabled
        try:
            yield
        finally:
            self.synchronizing, self.replicating = before

    def close(self) -> None:
        """Take the hooks off; a round cut short is given up."""
        self.rounds.give_up()
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        if self._pool is not None:
            self._pool.close()

    # --- during backward ---

    def _make_hook(self, slot: Slot, gradients: UnitGradients) -> Callable[[Tensor], None]:
        """Return a parameter's hook: a closure, since it runs once per parameter and step."""
        rounds, scale = self.rounds, self._scale

        def ready(parameter: Tensor) -> None:
            if not self.synchronizing:
                gradients.receive(slot, scale)
                return
            rounds.enter()
            if slot.round == rounds.count:
                self._came_again(slot, gradients)
                gradients.receive(slot, scale)
                return
            slot.round = rounds.count
            gradients.receive(slot, scale)
            gradients.pending -= 1
            if not gradients.pending and not rounds.reentrant:
                self._launch_complete()

        return ready

    def _begin(self) -> None:
        self._active = [gradients for gradients in self._gradients if gradients.begin()]
        self._launched = 0
        # For the whole round: one cut short may end where the script synchronises again.
        self._replicates = self.replicating

    def _came_again(self, slot: Slot, gradients: UnitGradients) -> None:
        """A gradient grew after it was complete: fine unless it was sent already."""
        self.rounds.reentrant = True
        if gradients.on_its_way or self._active.index(gradients) < self._launched:
            raise UsageError(
                f"{slot.name!r} got its gradient twice in one backward, the second time after it "
                "was sent; use torch.utils.checkpoint with use_reentrant=False"
            )

    def _launch_complete(self) -> None:
        while self._launched < len(self._active) and not self._active[self._launched].pending:
            self._launch(self._active[self._launched])

    def _launch(self, gradients: UnitGradients) -> None:
        gradients.launch()
        self._flying.append(gradients)
        self._launched += 1
        while self._flying and self._flying[0].done:  # its buffer is free, and replicas can begin
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        self._flying.popleft().settle(replicate=self._replicates)

    # --- after backward ---

    def _end(self) -> None:
        for gradients in self._active[self._launched :]:
            self._launch(gradients)
        flags, handle = self._agree_on_present() if self._replicates else (None, None)
        while self._flying:
            self._settle_oldest()
        for gradients in self._active:
            gradients.finish()
        if handle is not None:
            handle.wait()
        if flags is not None:
            self._hand_out(flags.tolist())
        if self._at_end is not None:
            self._at_end()

    def _hand_out(self, present: Sequence[int]) -> None:
        first = 0
        for gradients in self._active:
            awaited = gradients.awaited
            had = present[first : first + len(awaited)]
            gradients.deliver([slot for slot, some in zip(awaited, had, strict=True) if some])
            first += len(awaited)

    def _agree_on_present(self) -> tuple[Tensor, Handle | None]:
        """Return one byte per active parameter, 1 where some rank has a gradient, when it came."""
        flags = [
            slot in gradients.present for gradients in self._active for slot in gradients.awaited
        ]
        tensor = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        if not flags:
            return tensor, None
        return tensor, self._ranks.everyone.all_reduce(
            tensor, reduction="max", label="which parameters have gradients"
        )

    # --- buffers ---

    def _borrow(self, nbytes: int) -> Tensor:
        """Lend a buffer; when all are out, wait for the oldest reduction first.

        But not for long: another rank may send that unit only when its backward ends, since it has
        no gradient for a parameter of it, and may need this rank for a gather until then.
        """
        while self._flying and len(self._lent) >= self._in_flight and self._wait_for_oldest():
            self._settle_oldest()
        # Too many out, because gradients come in no order: one that is not kept afterwards.
        fits = nbytes <= self._pool_bytes and len(self._lent) < self._in_flight
        if self._pool is not None and fits:
            buffer = self._pool.take(nbytes, torch.uint8, self._device)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._lent[buffer.untyped_storage()._cdata] = fits
        return buffer

    def _wait_for_oldest(self) -> bool:
        """Return whether the oldest reduction ended within the patience that is left."""
        if self._device.type != "cpu":
            return True  # this thread does not wait there, only the stream does
        until = time.monotonic() + self._patience_s
        while not self._flying[0].done:
            if time.monotonic() > until:
                self._patience_s = 0.0  # such a model does it again: it is not asked twice
                return False
            time.sleep(_NAP_S)
        return True

    def _take_back(self, buffer: Tensor) -> None:
        pooled = self._lent.pop(buffer.untyped_storage()._cdata, False)
        if self._pool is not None and pooled:
            self._pool.give_back(buffer)
