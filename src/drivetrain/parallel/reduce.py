"""Averages gradients over ranks while backward runs, and leaves each rank its own ranges.

One synchronised backward is a round::

    first gradient      begin: count down from all parameters of every unit
    each gradient       add: move it into its unit's buffer, count down
    unit at zero        send its reduce-scatter, and those after it that are complete: always in the
                        order of the units, which is the same on all ranks
    end of backward     finish: zeros for what is missing, send the rest, wait, hand gradients out

A parameter that got no gradient on any rank must not move, not even by an optimizer's momentum; so
the ranks take the maximum of one byte per parameter: whether any of them had a gradient for it.

Where units have replicas, rounds of an accumulation window end without handing gradients out: what
is added up over replicas is the window's sum.

Between backward and step the gradients can be read, scaled and clipped. A factor for what a store
steps is not multiplied in: it goes with the step, which reads each gradient once anyway. Whoever
asks for the gradients themselves gets them with their factors.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.compression.one_bit_adam import FrozenAdam, refuse_clipping
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.parallel.backward import (
    Rounds,
    check_alike,
    clip_,
    clip_factor,
    global_norm,
    norms_of_each,
    sum_of_words,
)
from drivetrain.parallel.gradients import (
    DividedGradient,
    FlatGradients,
    Reduction,
    UnitGradients,
)
from drivetrain.parallel.layout import ParameterSlot
from drivetrain.parallel.placement import Placement, Ranks
from drivetrain.parallel.unit import Unit
from drivetrain.strategy import Gradients, Only, Run

logger = get_logger(__name__)

PATIENCE_S = 5.0
"""How long backward waits for a buffer before taking another: far longer than a reduction."""

_NAP_S, _NAP_SHARE = 50e-6, 0.02
"""Seconds between two looks whether a reduction is over; or a share of the time that has passed."""


# --- byte buffers of one constant size, lent and reused: ZeRO-R's constant buffers ---

# However large a model is, tensors fused for one message are cut to one size, and a fixed number of
# buffers serves a whole run. Memory does not grow with the model, and the allocator has no holes to
# fill.


class LentBuffers:
    """Buffers for a few borrowers at once: a few that are lent again, and further ones in need.

    The buffer that was given back longest ago is lent next, to leave work that still reads a buffer
    the most time. Nobody is waited for: a buffer is given back when nothing reads it any more. One
    thread at a time.

    Args:
        in_flight: how many may be lent at once; 0: none are.
        nbytes: size of the buffers that are lent again.
        device: where they live.
    """

    def __init__(self, in_flight: int, nbytes: int, device: torch.device) -> None:
        self.in_flight = in_flight
        self._each = nbytes
        self._device = device
        self._free: list[Tensor] = []
        self._out: dict[int, Tensor | None] = {}  # by storage; None: not to be lent again

    @property
    def exhausted(self) -> bool:
        """Whether as many are out as there may be."""
        return len(self._out) >= self.in_flight

    def take(self, nbytes: int) -> Tensor:
        """Lend a buffer of so many bytes, 1-D; one in need is not kept afterwards."""
        kept = nbytes <= self._each and not self.exhausted
        if kept and self._free:
            buffer = self._free.pop(0)
        else:
            size = self._each if kept else nbytes
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._out[buffer.untyped_storage()._cdata] = buffer if kept else None
        return buffer[:nbytes]

    def take_back(self, buffer: Tensor) -> None:
        """Take a lent buffer back."""
        kept = self._out.pop(buffer.untyped_storage()._cdata, None)
        if kept is not None:
            self._free.append(kept)

    def close(self) -> None:
        """Forget every buffer; lent ones live on with their borrowers."""
        self._free.clear()
        self._out.clear()


# --- the reduction ---


class Reduce(Gradients):
    """The reduction of one model's gradients, and this rank's share of the result.

    Args:
        placement: the model's units, the ranks that train it, and who steps the gradients.
        end: called when a synchronised backward ends; must send the rest.
        run: dtypes of gradients, and the device of the model.
        buffers: gradients pass through them; if none are lent, every unit keeps one of its own.
        adam: turns gradients for replicas into momenta; None: gradients cross.

    Attributes:
        rounds: its synchronised backwards.
        replicating: whether replicas then add theirs up, and gradients are handed out.
        steps_follow: whether optimizers step after them; not in an accumulation window.
        factor: what the gradients of a backward will be multiplied by after it.
        backend: who steps the gradients.
        units: the gradients of each unit, in the order in which units are sent.
        shown: what stands at the parameters' ``grad``.
        buffers: those that gradients pass through, if they do not stay.
    """

    def __init__(
        self,
        placement: Placement,
        end: Callable[[], None],
        run: Run,
        buffers: LentBuffers,
        adam: FrozenAdam | None = None,
    ) -> None:
        self.replicating = True
        self.steps_follow = True
        self.factor = 1.0
        self._scaled: set[ParameterSlot] = set()  # before the backward was over
        self.units: list[UnitGradients] = []
        self._placement, ranks, backend = placement, placement.ranks, placement.backend
        self._ranks, self.backend = ranks, backend
        self.rounds = Rounds(self.begin, end)
        self.buffers = buffers
        stays, size = not buffers.in_flight, ranks.everyone.size
        alone = size == 1 and ranks.replicas is None and not backend.active
        self._adam = adam
        self._how = Reduction(ranks, run.precision, adam, None if alone else 1.0 / size, stays)
        self._device = run.world.device
        self.shown = ShownGradients(ranks, self, self._device)
        self._active: list[UnitGradients] = []
        self._sent = 0
        self._replicates = True
        self._patience_s = PATIENCE_S
        self._flying: deque[UnitGradients] = deque()  # sent, the oldest first

    def watch(self, units: Sequence[Unit]) -> None:
        """Reduce the gradients of more units, after those of the others."""
        for unit in units:
            self.units.append(UnitGradients(unit, self._how))
            self.shown.watch(self.units[-1])

    def open_channels(self) -> None:
        """Make the channels of all units: a checkpoint is about to be loaded into them."""
        for unit in self.units:
            unit.open_channels()

    def close(self) -> None:
        """Give up a round that was cut short, and the buffers."""
        self.rounds.give_up()
        self.shown.clear(self.shown.of)
        self.buffers.close()

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a round, or for the replicas of one."""
        return self.rounds.kept or not self._replicates

    # --- during backward ---

    def begin(self) -> None:
        """Begin a round: count down from all parameters of every unit.

        Raises:
            UsageError: steps that began in the round before were not taken.
        """
        if self.backend.in_backward:
            self.backend.check_free("another backward")
        self._active, self._sent = [], 0
        self._scaled.clear()
        for unit in self.units:
            unit.begin()
            if unit.pending:
                self._active.append(unit)
        self.shown.changed()
        self.shown.drop_cleared()
        # For the whole round: one cut short may end where the script synchronises again.
        self._replicates = self.replicating

    def came(self, unit: UnitGradients, slot: ParameterSlot, _: Tensor) -> None:
        """Move a gradient that autograd has accumulated into its unit's buffer; send what is due.

        In a synchronised backward those are the units up to the first one that is not complete.

        Raises:
            UsageError: the gradient came before, and was sent.
        """
        counts = self.rounds.synchronizing
        if not counts:
            self.rounds.kept = True
        else:
            self.rounds.enter()
            if slot in unit.came:
                self._came_again(unit, slot)
                counts = False
        flat, shown = unit.of[slot], self.shown.of
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter answers slowly
            grad = slot.parameter.grad
            own = grad is not shown[slot]
            if not own:
                grad, shown[slot].arrived = shown[slot].arrived, None
            else:
                self.shown.come(slot)
        if grad is not None:
            if not unit.opened:
                self._open(unit)
            flat.receive(slot, grad, own=own)
        if not counts:
            return
        unit.came.add(slot)
        unit.pending -= 1
        if not unit.pending and not self.rounds.reentrant:
            while self._sent < len(self._active) and not self._active[self._sent].pending:
                self._send_next()

    def finish(self) -> None:
        """End a round: send the rest, wait, and give fragments their gradients."""
        while self._sent < len(self._active):
            self._send_next()
        agreed = self._agree_on_present() if self._replicates else None
        while self._flying:
            self._keep_oldest()
        if self._ranks.replicas is not None:
            for unit in self._active:
                unit.finish()
        if agreed is not None:
            present = iter(agreed())
            for unit in self._active:
                for slot in unit.deliver(present):
                    self.shown.show(slot)
        if self.backend.in_backward and self.steps_follow:
            self.backend.freeze([slot for unit in self._active for slot in unit.awaited])

    def _came_again(self, unit: UnitGradients, slot: ParameterSlot) -> None:
        """A gradient grew after it was complete: fine unless it was sent already."""
        self.rounds.reentrant = True
        if unit.reduction or self._active.index(unit) < self._sent:
            raise UsageError(
                f"{slot.name!r} got its gradient twice in one backward, the second time after it "
                "was sent; use torch.utils.checkpoint with use_reentrant=False"
            )

    def _open(self, unit: UnitGradients) -> None:
        """Let gradients arrive; when all buffers are lent, wait for the oldest reduction first.

        But not for long: another rank may send that unit only when its backward ends, since it has
        no gradient for a parameter of it, and may need this rank for a gather until then.
        """
        self.settle(unit)
        nbytes, lent = unit.buffer_nbytes(), None
        if self.buffers.in_flight and nbytes:
            while self._flying and self.buffers.exhausted and self._oldest_is_over():
                self._keep_oldest()
            lent = self.buffers.take(nbytes)
        unit.open(lent)

    def _send_next(self) -> None:
        unit = self._active[self._sent]
        if not unit.opened:
            self._open(unit)
        unit.reduce_scatter()
        self._flying.append(unit)
        self._sent += 1
        while self._flying and self._flying[0].done:  # its buffer is free, and replicas can begin
            self._keep_oldest()

    def _keep_oldest(self) -> None:
        unit = self._flying.popleft()
        lent = unit.wait_for_reduce_scatter(replicate=self._replicates)
        if lent is not None:
            self.buffers.take_back(lent)
        if self.backend.in_backward and self.steps_follow and unit.hand_out_complete():
            if self.factor != 1.0:
                self._to_sum_dtype(unit.awaited)  # as a step would multiply them
                self._multiply(unit.awaited, self.factor)
                self._scaled.update(unit.awaited)
            self.backend.begin(unit.unit, unit.awaited)

    def _agree_on_present(self) -> Callable[[], Sequence[int]]:
        """Begin to agree on one byte per active parameter, 1 where some rank has a gradient.

        A rank that has all gradients knows the answer. It does not read it, since a read would
        wait until the device has done the whole backward.
        """
        mine = [int(slot in unit.present) for unit in self._active for slot in unit.awaited]
        everyone, every = self._ranks.everyone, all(mine)
        if everyone.size == 1 or not mine:
            return lambda: mine
        flags = (
            torch.ones(len(mine), dtype=torch.uint8, device=self._device)
            if every
            else torch.tensor(mine, dtype=torch.uint8, device=self._device)
        )
        handle = everyone.all_reduce(
            flags, reduction="max", label="which parameters have gradients"
        )

        def agreed() -> Sequence[int]:
            handle.wait()
            return mine if every else flags.tolist()

        return agreed

    def _oldest_is_over(self) -> bool:
        """Return whether the oldest reduction ended within the patience that is left."""
        if self._device.type != "cpu":
            return True  # this thread does not wait there, only the stream does
        start = time.monotonic()
        while not self._flying[0].done:
            waited = time.monotonic() - start
            if waited > self._patience_s:
                self._patience_s = 0.0  # such a model does it again: it is not asked twice
                return False
            time.sleep(max(_NAP_S, _NAP_SHARE * waited))
        return True

    # --- between backward and step ---

    def __call__(self, only: Only = None) -> Iterator[Tensor]:
        """Yield this rank's gradients, of some parameters or of all, to be read and changed."""
        self.rounds.finish()
        found = self._complete(only)
        self.shown.changed()
        self._to_sum_dtype([s for s in found if self._placement.flat_of(s).masters_left])
        yield from self._placement.gradients(only).values()

    def will_scale(self, factor: float) -> None:
        """Let the next backward's momenta have this factor before they cross, or steps begin.

        Raises:
            UsageError: steps began, whose gradients would be multiplied, too.
        """
        if factor != 1.0:
            self.backend.check_free("another backward, whose factor is for all gradients")
        self.factor = factor
        if self._adam:
            self._adam.factor = factor or 1.0  # times 0 nothing is left to take care of

    def step_decided(self, *, taken: bool) -> None:
        """Let sums that keep errors go on, or back to those of before a skipped step."""
        for communicator in self._ranks.summing:
            communicator.step_decided(taken=taken)

    def scale(self, factor: float) -> None:
        """Multiply this rank's gradients, also in buffers.

        Raises:
            UsageError: steps began with other gradients.
        """
        self.rounds.finish()
        if factor != self.factor:
            self.backend.check_free("gradients that are multiplied")
        rest = [slot for slot in self._complete(None) if slot not in self._scaled]
        self.factor, self._scaled = 1.0, set()
        self._multiply(self.backend.scale(rest, factor), factor)
        self.shown.changed()
        for unit in self.units:
            for flat in () if unit.reduction else unit.flats:
                flat.scale(factor)

    def clip(self, max_norm: float, norm_type: float = 2.0, *, only: Only = None) -> Tensor:
        """Scale this rank's gradients to a global norm of at most max_norm.

        One number crosses the wire.

        Returns:
            The norm before, 0-d.

        Raises:
            UsageError: steps began with the gradients as they are, or momenta are exchanged.
        """
        refuse_clipping(self._adam)
        self.rounds.finish()
        if max_norm != math.inf:
            self.backend.check_free("gradients that are clipped")
        found = self._complete(only)
        over = [self._ranks.sharing] if self._ranks.sharing.size > 1 else []  # replicas have equals
        gradients = list(found.values())
        norm = global_norm(gradients, norm_type, over=over, device=self._device)
        self.shown.changed()
        if not self.backend.active:
            clip_(gradients, norm, max_norm)
        elif found:
            factor = float(clip_factor(norm, max_norm))
            self._multiply(self.backend.scale(found, factor), factor)
        return norm

    def forget(self, only: Iterable[ParameterSlot] | None, *, set_to_none: bool) -> None:
        """Drop gradients that wait to be sent or multiplied, before gradients are cleared.

        Args:
            only: whose gradients; None: all.
            set_to_none: whether they are dropped; otherwise zeros are written.

        Raises:
            UsageError: steps began with them.
        """
        slots = None if only is None else set(only)
        self.backend.check_free("gradients that are cleared", slots)
        self.shown.changed()
        for unit in self.units:
            lent = unit.forget(set(unit.unit.slots) if slots is None else slots)
            if lent is not None:
                self.buffers.take_back(lent)
        self.backend.forget(slots)
        if not set_to_none:  # a step under way reads where zeros are about to be written
            self._placement.wait_for_steps()

    def give_away(self, slots: Collection[ParameterSlot]) -> None:
        """Let go of the memory of these parameters' gradients: somebody else reads it."""
        for flat in self._flats(slots):
            flat.give_away()

    def _complete(self, only: Collection[nn.Parameter] | None) -> dict[ParameterSlot, Tensor]:
        """Return gradients that nobody changes any more, and that wait for no factor."""
        self.shown.follow(only if only is None else self._placement.slots_of(only))
        if self.backend.active:
            wanted = {self._placement.unit_of(slot) for slot in self._placement.gradients(only)}
            for unit in self.units:
                if unit.unit in wanted:
                    self.settle(unit)
        return self._placement.gradients(only)

    def settle(self, unit: UnitGradients) -> None:
        """Make a unit's gradients ready for a change."""
        unit.unit.wait_for_step()  # a step under way reads them
        if self.backend.active and (late := self.backend.due(unit.unit.slots)):
            self._to_sum_dtype(late)
            for slot, factor in late.items():
                self._multiply([slot], factor)

    def _to_sum_dtype(self, slots: Collection[ParameterSlot]) -> None:
        for flat in self._flats(slots):
            self.widen(flat)

    def widen(self, flat: FlatGradients) -> None:
        """Keep gradients in the dtype of sums, unless steps that began in backward read them."""
        if not (flat.handed_out and self.backend.holds(flat.flat.slots)):
            flat.to_sum_dtype()

    def _flats(self, slots: Collection[ParameterSlot]) -> Iterator[FlatGradients]:
        for unit in self.units if slots else ():
            yield from {unit.of[slot] for slot in slots if slot in unit.of}

    def _multiply(self, slots: Iterable[ParameterSlot], factor: float) -> None:
        for slot in slots if factor != 1.0 else ():  # a step may read what lies beside
            fragment = self._placement.fragment_of(slot)
            if fragment is not None and fragment.grad is not None:
                fragment.grad.mul_(factor)


# --- what stands at ``p.grad``, and what a script has done to it ---

# Between steps a parameter has a ``DividedGradient``, made once; a script that clears it, or puts a
# tensor in its place, is followed before anybody uses the gradients.


class ShownGradients:
    """The gradients of one model as its script sees them.

    Args:
        ranks: those that train the model.
        reduce: the model's reduction.
        device: that of the model.

    Attributes:
        of: what stands at each parameter's ``grad`` while there is a gradient.
    """

    def __init__(self, ranks: Ranks, reduce: Reduce, device: torch.device) -> None:
        self.ranks = ranks
        self.of: dict[ParameterSlot, DividedGradient] = {}
        self._units: dict[ParameterSlot, UnitGradients] = {}
        self._assigned: dict[ParameterSlot, Tensor] = {}
        """Sums of the words of whole gradients, by which ranks compare them."""
        self._reduce = reduce
        self._device = device
        self._norms: dict[float, dict[ParameterSlot, Tensor]] = {}
        self._told = False
        self._alone = 0

    def watch(self, unit: UnitGradients) -> None:
        """Show the gradients of one more unit."""
        for slot in unit.unit.slots:
            self._units[slot] = unit
            self.of[slot] = DividedGradient(slot.parameter, SlotPlace(self, slot))
            self._alone = sys.getrefcount(self.of[slot])

    def changed(self) -> None:
        """Forget what was measured: gradients are about to change."""
        self._norms.clear()

    def check_free(self, *slots: ParameterSlot) -> None:
        """Refuse that a script changes gradients with which steps began."""
        self._reduce.backend.check_free("gradients that are changed", slots)

    # --- what the script did ---

    def follow(self, slots: Iterable[ParameterSlot] | None = None) -> None:
        """Drop gradients that the script has cleared, and take those that it has assigned.

        Args:
            slots: of the parameters to look at; None: all.
        """
        chosen = self._units if slots is None else [slot for slot in slots if slot in self._units]
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter answers slowly
            touched = {
                slot: grad for slot in chosen if (grad := slot.parameter.grad) is not self.of[slot]
            }
        self._drop([slot for slot, grad in touched.items() if grad is None])
        for slot, grad in touched.items():
            if grad is not None:
                self._assign(slot, grad)

    def come(self, slot: ParameterSlot) -> None:
        """Show a gradient in the place of a fresh one: the script has cleared what was there."""
        if self._units[slot].of[slot].has(slot):
            self.drop_cleared(slot)
        else:
            self.leave_kept([slot])
        slot.parameter.grad = self.of[slot]

    def drop_cleared(self, *arrived: ParameterSlot) -> None:
        """Drop what parameters had before the script cleared them.

        Args:
            arrived: those with a fresh gradient already.
        """
        with torch._C.DisableTorchFunctionSubclass():
            cleared = [each for each in self._units if each.parameter.grad is None]
        self._drop([*arrived, *cleared])

    def _drop(self, slots: Sequence[ParameterSlot]) -> None:
        """Let parameters have no gradient: neither what was averaged nor what waits."""
        if self._reduce.backend.in_backward:  # refused also where nothing is owned
            self.check_free(*(slot for slot in slots if slot in self._units[slot].came))
        self.leave_kept(slots)
        having = [slot for slot in slots if self._units[slot].of[slot].has(slot)]
        if not having:
            return
        self._reduce.forget(having, set_to_none=True)
        for slot in having:
            fragment = self._units[slot].of[slot].flat.fragments.get(slot)
            if fragment is not None:
                fragment.grad = None

    def _assign(self, slot: ParameterSlot, given: Tensor) -> None:
        if isinstance(given, DividedGradient) and given.place is self.of[slot].place:
            values = given.piece()
        else:
            values = slot.cut(given.whole() if isinstance(given, DividedGradient) else given)
        self._drop([slot])
        self._put(slot, values)
        if not isinstance(given, DividedGradient):
            self._assigned[slot] = sum_of_words(given)

    def check_assigned(self, slots: Sequence[ParameterSlot]) -> None:
        """Refuse gradients that ranks have assigned, and that differ. Collective."""
        nothing = torch.zeros((), dtype=torch.int64)
        sums = {slot.name: self._assigned.get(slot, nothing) for slot in slots}
        check_alike(sums, self.ranks.everyone, self._device)

    def _put(self, slot: ParameterSlot, values: Tensor) -> None:
        unit = self._units[slot]
        self.check_free(slot)
        self._reduce.settle(unit)
        unit.of[slot].assign(slot, values)
        self.changed()
        self.show(slot)

    def leave_kept(self, slots: Iterable[ParameterSlot]) -> None:
        """Let objects that the script keeps of gradients that it has cleared keep their values."""
        for slot in slots:
            self._assigned.pop(slot, None)
            if sys.getrefcount(self.of[slot]) > self._alone:
                self.of[slot].leave()
                self.of[slot] = DividedGradient(slot.parameter, self.of[slot].place)

    def zero(self, slot: ParameterSlot) -> None:
        """Let a parameter's gradient be zero."""
        self._reduce.forget([slot], set_to_none=True)
        self._put(slot, slot.cut(torch.zeros((), device=self._device).expand(slot.shape)))

    def show(self, slot: ParameterSlot) -> None:
        """Let a parameter have a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            slot.parameter.grad = self.of[slot]

    def clear(self, slots: Iterable[ParameterSlot]) -> None:
        """Let parameters have none, before their gradients are dropped."""
        chosen = list(slots)
        with torch._C.DisableTorchFunctionSubclass():
            for slot in chosen:
                slot.parameter.grad = None
        self.leave_kept(chosen)

    # --- what the script reads ---

    def norm(self, slot: ParameterSlot, norm_type: float) -> Tensor:
        """Return the norm of a whole gradient; those of all are measured together. Collective."""
        if norm_type not in self._norms:
            self._check_averaged(slot)
            self.follow()
            having = {slot for slot, unit in self._units.items() if unit.of[slot].has(slot)}
            pieces = [self.piece(slot) if slot in having else None for slot in self._units]
            norms = norms_of_each(pieces, norm_type, over=self._sharing(), device=self._device)
            self._norms[norm_type] = dict(zip(self._units, norms.unbind(), strict=True))
        return self._norms[norm_type][slot]

    def _sharing(self) -> Sequence[Communicator]:
        return [self.ranks.sharing] if self.ranks.sharing.size > 1 else []

    def piece(self, slot: ParameterSlot) -> Tensor:
        """Return this rank's piece of a gradient.

        Raises:
            UsageError: it waits to be averaged, or a store's step has taken it.
        """
        self._check_averaged(slot)
        unit = self._units[slot]
        flat = unit.of[slot]
        if not slot.owned_numel:
            return torch.empty(0, dtype=slot.master, device=self._device)
        self._reduce.settle(unit)
        self._reduce.widen(flat)
        fragment = flat.flat.fragment(slot)
        if fragment is None or fragment.grad is None:
            raise UsageError(
                f"expected the gradient of {slot.name!r} before the optimizer's step, found that "
                "the step has taken it; read it between backward() and step()"
            )
        return fragment.grad

    def _check_averaged(self, slot: ParameterSlot) -> None:
        if self._units[slot].of[slot].waits(slot):
            raise UsageError(
                f"expected the gradient of {slot.name!r} after the last micro-batch of an "
                "accumulation window, found it in mid-window, where ranks have not averaged it; "
                "read and change gradients where accelerator.sync_gradients is true"
            )

    def whole(self, slot: ParameterSlot, piece: Tensor) -> Tensor:
        """Return a tensor whose pieces lie on ranks. Collective."""
        if not self._told:
            self._told = True
            logger.announce(
                f"the gradient of {slot.name!r} is read whole: all ranks bring their pieces "
                "together each time; every rank must read it. Norms and changes element by "
                "element need no such exchange"
            )
        narrow = piece.dtype is torch.bool
        values = torch.zeros(
            slot.numel, dtype=torch.uint8 if narrow else piece.dtype, device=self._device
        )
        if slot.owned_numel:
            values[slice(*slot.owned)] = slot.fragment_in_order(piece).to(values)
        for communicator in self._sharing():
            communicator.all_reduce(values, label=f"gradient of {slot.name}").wait()
        whole = values.as_strided(slot.shape, slot.strides)
        return whole.bool() if narrow else whole


class SlotPlace:
    """Where the piece of one parameter's gradient lies.

    It keeps neither: what stands at ``p.grad`` is unseen by Python's garbage collector.

    Args:
        shown: the gradients of the model.
        slot: the parameter's.
    """

    def __init__(self, shown: ShownGradients, slot: ParameterSlot) -> None:
        self.name = slot.name
        self._shown, self._slot = ref(shown), ref(slot)

    def piece(self) -> Tensor:
        """Return this rank's piece."""
        shown, slot = self._found()
        return shown.piece(slot)

    def look(self) -> None:
        """Follow what the script has done to the parameter."""
        shown, slot = self._found()
        shown.follow([slot])

    def clear(self) -> None:
        """Write zeros."""
        shown, slot = self._found()
        shown.zero(slot)

    def changed(self) -> None:
        """Forget what was measured."""
        shown, slot = self._found()
        shown.check_free(slot)
        shown.changed()

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the parameter's shape."""
        return self._found()[1].cut(whole)

    def whole(self, piece: Tensor) -> Tensor:
        """Bring the pieces of all ranks together. Collective."""
        shown, slot = self._found()
        return shown.whole(slot, piece)

    def norm(self, norm_type: float) -> Tensor:
        """Return the norm of the whole gradient. Collective, once for all gradients."""
        shown, slot = self._found()
        return shown.norm(slot, norm_type)

    def _found(self) -> tuple[ShownGradients, ParameterSlot]:
        shown, slot = self._shown(), self._slot()
        if shown is None or slot is None:
            raise UsageError(
                f"expected the gradient of {self.name!r} while its prepared model is there, found "
                "that the model is gone; keep it, or whole values of the gradient"
            )
        return shown, slot
