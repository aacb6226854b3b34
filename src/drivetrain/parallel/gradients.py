"""The gradients of one unit on one rank, from autograd to the optimizer's step; what p.grad shows.

::

    autograd's --x 1/N--> buffer --reduce-scatter in place--> own pieces --> kept --> fragments

A rank that keeps whole gradients keeps the buffer: where its own pieces are one range, the
fragments' gradients are views of it, and micro-batches may add to it without sending anything.
Otherwise the buffer is lent between the first gradient and the end of the reduction. Gradients of
low precision are added up in fp32. With replicas, the reduce-scatter adds up within the ranks that
share the unit, and an all-reduce of the owned pieces adds up over the replicas. A rank alone has
nothing to reduce: fragments get the tensors that autograd has made, and no buffer is there.

What stands at ``p.grad`` where each rank holds a piece of the gradient has the parameter's shape,
dtype and device, and no memory. What a script does with it means what it means with a whole
gradient::

    p.grad = None; p.grad.zero_()            cleared on this rank; no gradient, no step
    p.grad.mul_(x), clamp_, p.grad * 2       element by element: done with the piece
    p.grad.add_(whole, alpha=a), p.grad[i]=x a rank takes its part of the other operand
    torch.nn.utils.clip_grad_norm_(...)      norms are global: one collective for all gradients
    .sum(), .numpy(), x + p.grad, ...        the whole is brought together: a collective
    p.grad.normal_(), torch.randn_like(...)  refused: ranks draw different numbers
    kept = p.grad; p.grad = None             kept goes on with a copy of the piece

Collectives are for all ranks that share the parameter: they must do the same. Autograd adds to it
as to any gradient; what it adds waits in ``arrived`` for the strategy.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.communicator import ReduceChannel, SumChannel, Tensors, copy_all
from drivetrain.collectives.volume import FlatSlice, SlicesByRank
from drivetrain.compression.one_bit_adam import FrozenAdam
from drivetrain.errors import DrivetrainError, StorageError, UsageError
from drivetrain.model.guard import Arguments, Function, Keywords, read_only, sealed
from drivetrain.parallel.backward import in_backward
from drivetrain.parallel.layout import FlatLayout, ParameterSlot, flat_slices_of, offsets_in_bytes
from drivetrain.parallel.placement import Ranks
from drivetrain.parallel.unit import FlatParameter, Unit, make_placeholder
from drivetrain.runtime.precision import Precision


class GradientKind(NamedTuple):
    """The gradients of one flat tensor, as they cross ranks.

    Attributes:
        layout: of the flat tensor.
        wire: their dtype.
    """

    layout: FlatLayout
    wire: torch.dtype


class Reduction(NamedTuple):
    """How the gradients of one model are reduced.

    Attributes:
        ranks: those that train the model.
        precision: the dtypes in which gradients cross ranks, and in which they are added up.
        adam: turns gradients for replicas into momenta; None: gradients cross.
        scale: of every gradient: sums over ranks become means; None: there is no other rank, and no
            store.
        stays: whether buffers are kept for good; otherwise they are lent.
    """

    ranks: Ranks
    precision: Precision
    adam: FrozenAdam | None
    scale: float | None
    stays: bool


# --- the gradients ---


class FlatGradients:
    """The gradients of one flat tensor: the buffer of their arrival, and this rank's kept pieces.

    Args:
        flat: the flat tensor.
        how: they are reduced.

    Attributes:
        alone: whether gradients become those of fragments as they came, without a buffer.
        kind: its layout and the dtype of the wire.
        buffer: 1-D, where gradients arrive; None while there is none.
        handed_out: whether fragments have the gradients of this round before its end.
        filled: the parameters whose places in the buffer hold a gradient.
    """

    def __init__(self, flat: FlatParameter, how: Reduction) -> None:
        self.flat, rank = flat, how.ranks.sharing.rank
        self._scale = 1.0 if how.scale is None else how.scale
        # A product with a number makes a tensor of it each time, which takes longer than to
        # multiply a small gradient. Of fp32 at least: 1/3 has more digits than bf16.
        wide = flat.layout.dtype.itemsize > torch.float32.itemsize
        digits = torch.float64 if wide else torch.float32
        self._factor = torch.tensor(self._scale, dtype=digits, device="cpu")  # no device is awaited
        self.wire = how.precision.reduce_dtype(flat.layout.dtype)
        self.kind = GradientKind(flat.layout, self.wire)
        self.nbytes = flat.layout.numel * self.wire.itemsize
        self.buffer: Tensor | None = None
        self.filled: set[ParameterSlot] = set()
        self.handed_out = False
        self._total = how.precision.accumulate_dtype(flat.layout.dtype)
        self.alone = how.scale is None and flat.layout.master is self._total
        self._came: dict[ParameterSlot, Tensor] = {}
        self._owned = [slot for slot in flat.slots if slot.owned_numel]
        self._pieces = [slice(start, stop) for start, stop in flat.pieces[rank]]
        self._lengths = [stop - start for start, stop in flat.pieces[rank]]
        self._stays = how.stays
        self._kept: Tensor | None = None
        self._replica_sum: Tensor | None = None

    # --- filling ---

    def receive(self, slot: ParameterSlot, grad: Tensor, *, own: bool = False) -> None:
        """Move a parameter's fresh gradient into the buffer, times the scale; keep it if alone.

        Args:
            slot: the parameter's.
            grad: the gradient.
            own: whether nobody else holds the tensor.

        Raises:
            UsageError: the gradient is sparse or part of a graph.
        """
        if grad.requires_grad or grad.layout is not torch.strided:
            found = "part of a graph" if grad.requires_grad else f"{grad.layout}"
            raise UsageError(
                f"the gradient of {slot.name!r} is {found}, expected a dense one outside of "
                "autograd; use torch.autograd.grad for gradients of gradients, and sparse=False "
                "for embeddings"
            )
        if self.buffer is None:
            self._came[slot] = self._taken(slot, grad, own=own)
            self.filled.add(slot)
        elif slot in self.filled:
            self.buffer = self.buffer.to(self._total)  # a sum is about to be made
            slot.view(self.buffer).add_(grad, alpha=self._scale)
        else:
            view = slot.view(self.buffer)
            if grad.dtype.itemsize < view.dtype.itemsize:
                # One product would be rounded to the gradient's dtype first, and take longer.
                view.copy_(grad).mul_(self._scale)
            else:
                torch.mul(grad, self._factor, out=view)  # one pass over memory
            self.filled.add(slot)

    def _taken(self, slot: ParameterSlot, grad: Tensor, *, own: bool) -> Tensor:
        """Return what is kept of a gradient that came as it is: the first one without a copy."""
        if slot in self.filled:
            return self._came[slot].to(self._total).add_(grad)
        if not own or grad.stride() != slot.strides:
            grad = grad.new_empty(slot.numel).as_strided(slot.shape, slot.strides).copy_(grad)
        return grad.to(self.wire)

    def scale(self, factor: float) -> None:
        """Multiply gradients that were received."""
        for slot in self.filled:
            came = self._came[slot] if self.buffer is None else slot.view(self.buffer)
            came.mul_(factor)
        if self._replica_sum is not None:
            self._replica_sum.mul_(factor)

    def set_aside(self) -> None:
        """Save gradients that lie in the buffer and were not cleared: this round adds to them."""
        if self._kept is not None and _share(self._kept, self.buffer):
            self._move(self._kept)

    def drop(self, slots: Collection[ParameterSlot]) -> None:
        """Forget gradients that were received, or wait for replicas, of some parameters."""
        self.filled.difference_update(slots)
        self._came = {slot: came for slot, came in self._came.items() if slot not in slots}
        if self._replica_sum is not None:
            for slot in self.flat.slots:
                if slot in slots:
                    self._replica_sum[slot.local].zero_()

    def _move(self, kept: Tensor) -> None:
        """Keep the gradients that fragments have, if any, in other memory."""
        having = self.flat.with_gradients()
        self._kept = kept.clone() if having else self._kept
        for slot in having:
            self._follow(slot)
            self.hand_out(slot)

    def waits(self, slot: ParameterSlot) -> bool:
        """Return whether gradients of a parameter wait here to be averaged."""
        return slot in self.filled or self._replica_sum is not None

    def has(self, slot: ParameterSlot) -> bool:
        """Return whether a parameter has a gradient here, averaged or not."""
        if slot in self.filled or self._replica_sum is not None:  # waits(): asked for each gradient
            return True
        fragment = self.flat.fragments.get(slot)
        return fragment is not None and fragment.grad is not None

    # --- reducing ---

    def outgoing(self) -> Tensor:
        """Return the gradients to reduce, 1-D, in the dtype of the wire; zeros where none came."""
        buffer = self.buffer
        assert buffer is not None
        for slot in self.flat.slots:
            if slot not in self.filled:
                slot.view(buffer).zero_()
        return buffer.to(self.wire)

    def take_owned(self, sent: Tensor, *, replicas: bool) -> None:
        """Keep this rank's pieces of the sum over ranks; the rest is of no use.

        Args:
            sent: the whole flat tensor.
            replicas: whether to add them to the sum that is to cross to replicas.
        """
        total, pieces = self._replica_sum, [sent[piece] for piece in self._pieces]
        if not replicas:
            self._keep(pieces)
        elif total is None:
            total = torch.empty(self.flat.owned, dtype=self._total, device=sent.device)
            copy_all(total.split_with_sizes(self._lengths), pieces)
            self._replica_sum = total
        else:
            for place, piece in zip(total.split_with_sizes(self._lengths), pieces, strict=True):
                place.add_(piece)

    def add_up(self) -> None:
        """Add the gradients that came to those that fragments have already."""
        having = self.flat.with_gradients()
        if found := [slot for slot in having if slot in self._came]:
            torch._foreach_add_([having[s] for s in found], [self._piece_of(s) for s in found])

    def _piece_of(self, slot: ParameterSlot) -> Tensor:
        came = self._came.pop(slot).to(self.wire).to(self._total)  # rounded as if it had crossed
        return came.as_strided(slot.fragment_shape, slot.fragment_strides, came.storage_offset())

    def crossing(self) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
        """Return the gradients to add up over replicas, 1-D, and each fragment's place in them."""
        assert self._replica_sum is not None
        total = self._replica_sum.to(self.wire)
        return total, {held: slot.piece(total) for slot, held in self.flat.fragments.items()}

    def keep_crossed(self, crossed: Tensor) -> None:
        """Keep the sum over replicas."""
        self._keep(crossed.split_with_sizes(self._lengths))
        self._replica_sum = None

    # --- keeping ---

    def _keep(self, pieces: Tensors) -> None:
        """Add this rank's pieces to the gradients of fragments; keep them where there is none."""
        flat, device = self.flat, self.flat.gradient_device
        if having := flat.with_gradients():
            for slot in having:
                self._follow(slot)
            self.to_sum_dtype()
            if self._kept is not None:
                fresh = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                for slot in self._owned:
                    kept, values = self._kept[slot.local], fresh[slot.local]
                    if slot in having:
                        kept.add_(values.to(kept.device))
                    else:
                        kept.copy_(values)
            return
        # The first gradient of a window waits as it came where a store has the master.
        dtype = self.wire if flat.masters_left else self._total
        in_place = self._stays and len(pieces) == 1 and _share(pieces[0], self.buffer)
        if in_place and pieces[0].device == device and pieces[0].dtype is dtype:
            self._kept = pieces[0]
            return
        whole = self._kept
        if whole is None or whole.dtype is not dtype or _share(whole, self.buffer):
            self._kept = whole = flat.gradient_memory(flat.owned, dtype=dtype)
        copy_all(whole.split_with_sizes(self._lengths), pieces)

    def to_sum_dtype(self) -> None:
        """Keep gradients in the dtype of sums: they are about to be changed in place."""
        if self._kept is not None and self._kept.dtype is not self._total:
            self._kept = self._kept.to(self._total)
            for slot in self.flat.with_gradients():
                self.hand_out(slot)

    def give_away(self) -> None:
        """Let go of the memory of taken gradients: the taker reads this memory.

        Those that fragments still have, as where another optimizer steps them, move.
        """
        kept, self._kept = self._kept, None
        if kept is not None:
            self._move(kept)
            if _share(kept, self.buffer):
                self.buffer = None

    # --- handing out ---

    def hand_out(self, slot: ParameterSlot) -> None:
        """Give a parameter's fragment its gradient."""
        fragment = self.flat.fragment(slot) if slot.owned_numel else None
        if fragment is not None and slot in self._came:
            fragment.grad = self._piece_of(slot)
        if fragment is None or self._kept is None:
            return
        piece = slot.piece(self._kept)
        if self.flat.masters_left and fragment.dtype is not piece.dtype:
            make_placeholder(slot, fragment, piece.dtype)
        fragment.grad = piece if piece.dtype is fragment.dtype else piece.to(fragment.dtype)

    def assign(self, slot: ParameterSlot, values: Tensor) -> None:
        """Let a parameter have a gradient that the script has made.

        Args:
            slot: the parameter's.
            values: this rank's piece, in fragment shape.
        """
        flat = self.flat
        fragment = flat.fragment(slot) if slot.owned_numel else None
        if fragment is None:
            return
        if self.alone:
            fragment.grad = values.to(self._total, copy=True)
            return
        if self._kept is None:
            self._kept = flat.gradient_memory(flat.owned, dtype=self._total).zero_()
        slot.piece(self._kept).copy_(values)
        self.hand_out(slot)

    def _follow(self, slot: ParameterSlot) -> None:
        """Take over changes of a handed out gradient without a share in the kept memory.

        Elements that nobody changed keep the digits that the fragment's dtype has no room for.
        """
        grad = self.flat.fragments[slot].grad
        if grad is not None and self._kept is not None and not _share(grad, self._kept):
            piece = slot.piece(self._kept)
            piece.copy_(torch.where(piece.to(grad.dtype) == grad, piece, grad))


def _share(one: Tensor, other: Tensor | None) -> bool:
    """Return whether two tensors lie in the same memory."""
    if other is None:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class UnitGradients:
    """The gradients of one unit, reduced together by one reduce-scatter.

    Args:
        unit: the unit.
        how: they are reduced.

    Attributes:
        flats: the gradients of each of its flat tensors.
        of: those that each parameter's gradient belongs to.
        trained: the parameters that require a gradient, as their hooks say.
        awaited: the parameters with a gradient to come in this round.
        came: the parameters whose gradients have come in this round.
        pending: how many gradients are still to come.
        present: those with a gradient on this rank since gradients were last handed out.
        opened: whether there are buffers for gradients to arrive in.
        reduction: the reduce-scatter under way.
    """

    def __init__(self, unit: Unit, how: Reduction) -> None:
        self.unit = unit
        self.trained: list[ParameterSlot] = []
        self.awaited = self.trained
        self.came: set[ParameterSlot] = set()
        self.pending = 0
        self.present: set[ParameterSlot] = set()
        self.opened = False
        self.reduction: Handle | None = None
        self._stays, self._adam = how.stays, how.adam
        self._reducing, self._replicas = how.ranks.reducing, how.ranks.replicas
        self.flats = [FlatGradients(flat, how) for flat in unit.flats]
        self.of = {slot: flat for flat in self.flats for slot in flat.flat.slots}
        self._active: list[FlatGradients] = []
        self._kinds: list[GradientKind] = []
        self._opened_for = self.trained
        self._starts = [0]
        self._lent: Tensor | None = None
        self._sent: list[tuple[FlatGradients, Tensor]] = []
        self._reduced: list[GradientKind] = []
        self._reduce: ReduceChannel | None = None
        self._crossings: dict[int, SumChannel] = {}  # by identity: a layout is slow to compare
        self._crossing: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Begin a round: a gradient is expected of each parameter that is trained."""
        self.awaited = self.trained
        self.pending = len(self.awaited)
        self.came.clear()
        for flat in self.flats:
            flat.handed_out = False

    @property
    def done(self) -> bool:
        """Whether the reduction is over."""
        return self.reduction is None or self.reduction.done()

    # --- filling ---

    def buffer_nbytes(self) -> int:
        """Return the bytes of a buffer for gradients of the parameters that are trained now."""
        if self._opened_for is not self.trained:
            self._opened_for = self.trained
            active = {self.of[slot] for slot in self.trained}
            self._active = [flat for flat in self.flats if flat in active]
            self._kinds = [flat.kind for flat in self._active]
            sizes = [0 if flat.alone else flat.nbytes for flat in self._active]
            self._starts = offsets_in_bytes(sizes)
        return self._starts[-1]

    def open(self, lent: Tensor | None) -> None:
        """Let gradients arrive in a lent buffer, or else in the buffers that stay."""
        for flat, start in zip(self._active, self._starts, strict=False):
            if flat.alone:
                continue
            if lent is not None:
                flat.buffer = lent[start : start + flat.nbytes].view(flat.wire)
            elif flat.buffer is None:
                flat.buffer = torch.zeros_like(flat.flat.values, dtype=flat.wire)
            else:
                flat.set_aside()
        self.opened, self._lent = True, lent  # not where memory ran out

    def forget(self, slots: Collection[ParameterSlot]) -> Tensor | None:
        """Drop received gradients; return the lent buffer once it is empty."""
        self.present.difference_update(slots)
        idle = self.opened and self.reduction is None
        for flat in self.flats:
            flat.drop(slots)
            idle &= not flat.filled
        return self._close() if idle else None

    # --- reducing ---

    def open_channels(self) -> None:
        """Make the channels now, before the first round: a checkpoint is about to be loaded."""
        if self.buffer_nbytes():
            self._channel()

    def _channel(self) -> ReduceChannel:
        """Return the channel of the buffers, after those of replicas; made where needed."""
        kinds = self._kinds
        if self._reduce is None or kinds != self._reduced:  # the same objects, or other parameters

            def describe() -> SlicesByRank:
                return flat_slices_of([kind.layout for kind in kinds], [k.wire for k in kinds])

            self._reduce = self._reducing.gradients_scattered(
                describe, f"gradients of {self.unit.label}", replaces=self._reduce
            )
            self._reduced = kinds
        for kind in kinds:
            if self._replicas is not None and id(kind) not in self._crossings:
                pieces = kind.layout.flat_slices(kind.wire)[self._reducing.rank]
                self._crossings[id(kind)] = self._replicas.gradients_summed(
                    FlatSlice.joined(pieces, kind.wire),
                    f"gradients of replicas of {self.unit.label}",
                )
        return self._reduce

    def reduce_scatter(self) -> None:
        """Send the buffers on their way; parameters without a gradient count as zeros."""
        channel = self._channel()
        # Where memory runs out until here, the gradients wait as they were.
        self._sent = [(flat, flat.outgoing()) for flat in self._active if not flat.alone]
        parts: list[list[Tensor]] = [[] for _ in range(self._reducing.size)]
        for flat in self._active:
            self.present |= flat.filled
            flat.filled.clear()
        for flat, sent in self._sent:
            for part, pieces in zip(parts, flat.flat.pieces, strict=True):
                for start, stop in pieces:
                    part.append(sent[start:stop])
        if not self.present.issuperset(self.awaited):
            self._reducing.before_sums_without(self._lacking())
        self.reduction = channel(parts)

    def _lacking(self) -> list[str]:
        """Return the names of awaited parameters without any gradient on this rank."""
        lacking = [slot for slot in self.awaited if slot not in self.present]
        with torch._C.DisableTorchFunctionSubclass():  # or it was handed out in this window
            return [slot.name for slot in lacking if slot.parameter.grad is None]

    def wait_for_reduce_scatter(self, *, replicate: bool) -> Tensor | None:
        """Wait for the reduction and keep this rank's pieces; return the lent buffer.

        Args:
            replicate: whether replicas are about to hand gradients out: what they own is added up.
        """
        if self.reduction is None:
            return None
        self.reduction.wait()
        self.reduction = None
        sent, self._sent = self._sent, []
        replicas = self._replicas
        for flat, reduced in sent:
            flat.take_owned(reduced, replicas=replicas is not None)
        for flat in self._active:
            if flat.alone:
                flat.add_up()
        if replicas is not None and replicate:
            if not self.present.issuperset(self.awaited):
                replicas.before_sums_without(self._lacking())
            for flat in self._active:
                self._crossing.append(self._cross(flat, replicas))
        return self._close()

    def _cross(self, flat: FlatGradients, replicas: Communicator) -> Callable[[], None]:
        """Start to sum this rank's pieces over the replicas; return what waits for the sum."""
        total, pieces = flat.crossing()
        turn_back = None if self._adam is None else self._adam.exchange(pieces, replicas.size)
        handle = self._crossings[id(flat.kind)](total)

        def finish() -> None:
            handle.wait()
            if turn_back is not None:
                turn_back()
            flat.keep_crossed(total)

        return finish

    def finish(self) -> None:
        """Wait for the replicas, and keep their sums in the order in which they were sent."""
        crossing, self._crossing = self._crossing, []
        for finish in crossing:
            finish()

    def _close(self) -> Tensor | None:
        """Take away the buffers that do not stay; return the lent buffer."""
        self.opened = False
        lent, self._lent = self._lent, None
        for flat in self._active:
            # A buffer that sums were made in is larger than one that stays.
            if not self._stays or (flat.buffer is not None and flat.buffer.dtype is not flat.wire):
                flat.buffer = None
        return lent

    # --- handing out ---

    def hand_out_complete(self) -> bool:
        """Give fragments their gradients before the round ends, if this rank lacks none.

        Returns:
            Whether it did: no other rank and no replica has a say.
        """
        if self._replicas is not None or not self.present.issuperset(self.awaited):
            return False
        for slot in self.awaited:
            self.of[slot].hand_out(slot)
        for flat in self._active:
            flat.handed_out = True
        return True

    def deliver(self, present: Iterator[int]) -> list[ParameterSlot]:
        """Give fragments their gradients, where some rank had one for the awaited parameter.

        Args:
            present: goes on with a number per awaited parameter, 0 where no rank had a gradient.

        Returns:
            The parameters that have a gradient, and had none on this rank.
        """
        elsewhere, complete = [], self.present.issuperset(self.awaited)
        unused = set() if complete else set(self._lacking())
        for slot, some in zip(self.awaited, present, strict=False):
            if some:
                unused.discard(slot.name)
                if not self.of[slot].handed_out:
                    self.of[slot].hand_out(slot)
                if slot not in self.came:
                    elsewhere.append(slot)
        self.present.clear()
        for communicator in (self._reducing, self._replicas) if unused else ():
            if communicator is not None:
                communicator.give_back(unused)
        return elsewhere


_ATEN = torch.ops.aten

_ELEMENTWISE = frozenset(
    {
        _ATEN.zero_, _ATEN.fill_, _ATEN.copy_, _ATEN.clone, _ATEN._to_copy, _ATEN.masked_fill,
        _ATEN.masked_fill_, _ATEN.nan_to_num, _ATEN.nan_to_num_,
    }
)  # fmt: skip
"""Functions that act element by element, beside those that torch marks as such."""

_SAME = frozenset({_ATEN.detach, _ATEN.detach_, _ATEN.alias, _ATEN.lift_fresh})
"""Functions that return what they are given."""

_BLANK = frozenset(
    {
        _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.empty_like, _ATEN.new_zeros,
        _ATEN.new_ones, _ATEN.new_full, _ATEN.new_empty, _ATEN.new_empty_strided,
    }
)  # fmt: skip
"""Functions that ask for facts only, and make an ordinary tensor."""

_NORMS = frozenset({_ATEN.linalg_vector_norm.default, _ATEN.norm.Scalar})
"""Norms; all of a tensor if no dim is named."""

_IN_BACKWARD = frozenset({_ATEN.add_.Tensor, _ATEN.add.Tensor})
"""How autograd adds to a gradient that is there."""

_VALUES = frozenset(
    {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__deepcopy__, Tensor.__reduce_ex__}
)
"""Methods that read values behind the back of torch's dispatch."""

_MEMORY = frozenset(
    {
        *(Tensor.data_ptr, Tensor.storage, Tensor.__dlpack__),
        *(Tensor.apply_, Tensor.map_, Tensor.map2_),
    }
)
"""Methods that ask for memory, or end the process where there is none."""


class GradientPlace(Protocol):
    """Where the piece of one gradient lies on this rank."""

    name: str

    def look(self) -> None:
        """Notice what the script has done to the parameter's ``grad``."""

    def piece(self) -> Tensor:
        """Return this rank's piece, to be read and changed.

        Raises:
            UsageError: micro-batches wait to be averaged.
        """

    def clear(self) -> None:
        """Write zeros, also where micro-batches wait to be averaged."""

    def changed(self) -> None:
        """Learn that the piece was changed."""

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the parameter's shape, shaped as its piece."""

    def whole(self, piece: Tensor) -> Tensor:
        """Bring the pieces of all ranks together. Collective."""

    def norm(self, norm_type: float) -> Tensor:
        """Return the norm of the whole gradient, 0-d. Collective, once for all gradients."""


class DividedGradient(Tensor):
    """A gradient of which this rank holds a piece.

    Args:
        like: the parameter.
        place: where the piece lies.
        values: the piece of a tensor that was computed from the gradient; None: the gradient.

    Attributes:
        place: as given.
        arrived: what autograd has added, and the strategy has not taken yet.
    """

    place: GradientPlace
    arrived: Tensor | None
    _computed: Tensor | None
    _gone: DrivetrainError | None

    @staticmethod
    def __new__(  # noqa: D102
        cls: type["DividedGradient"],
        like: Tensor,
        place: GradientPlace,
        values: Tensor | None = None,
    ) -> "DividedGradient":
        with torch._C.DisableTorchFunctionSubclass():  # a parameter may have its guard
            made: DividedGradient = Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                strides=like.stride(),
                dtype=like.dtype if values is None else values.dtype,
                device=like.device,
            )
        made.place, made.arrived, made._computed, made._gone = place, None, values, None
        return made

    def __init__(
        self, like: Tensor, place: GradientPlace, values: Tensor | None = None
    ) -> None: ...

    def piece(self) -> Tensor:
        """Return this rank's piece: the one that is stepped with, or computed values."""
        if self._gone is not None:
            raise copy(self._gone)
        return self.place.piece() if self._computed is None else self._computed

    def leave(self) -> None:
        """Go on with a copy of the piece: the parameter is about to have another gradient."""
        try:
            self._computed = self._read().clone()
        except (UsageError, StorageError) as error:  # nobody can read it any more
            self._gone = error.with_traceback(None)  # which would hold the script's variables

    def whole(self) -> Tensor:
        """Return the whole as an ordinary tensor. Collective."""
        return self.place.whole(self._read()).to(self.device)

    def _read(self) -> Tensor:
        return self.piece().to(self.dtype)  # a piece that is stepped with may be of a master's

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Take what torch would do without its dispatch."""
        if not all(issubclass(kind, cls) or kind is Tensor for kind in types):
            return NotImplemented  # a guarded parameter brings its values first
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and func in _VALUES:
            return sealed(func, func(own.whole(), *args[1:], **kwargs))
        if own is not None and func in _MEMORY:
            raise UsageError(
                f"expected a tensor with memory, found the gradient of {own.place.name!r}, of "
                "which every rank holds a piece; p.grad.clone().sum() and the like work on it"
            )
        if own is not None and func is Tensor.untyped_storage:
            nothing: Any = torch.UntypedStorage
            return nothing(0)  # who adds up memory finds none
        with torch._C.DisableTorchFunctionSubclass():
            if own is not None and func in _SETTERS:
                return _SETTERS[func](*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Do with pieces what is asked of whole gradients."""
        kwargs = kwargs or {}
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if func in _IN_BACKWARD and args[0] is first and first._computed is None and in_backward():
            first.arrived = args[1] if first.arrived is None else first.arrived + args[1]
            return first
        return _answer(first, func, args, kwargs)

    def _set(self, index: Any, value: Any) -> None:
        """Write into elements: every rank into those of its piece."""
        wanted = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        values = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        wanted[index] = True
        values[index] = value.whole() if isinstance(value, DividedGradient) else value
        piece, place = self.piece(), self.place
        cut = place.cut(values).to(piece.device, piece.dtype)
        piece.copy_(torch.where(place.cut(wanted).to(piece.device), cut, piece))
        self._changed()

    def _take(self, whole: Tensor) -> None:
        """Take this rank's part of other values."""
        if whole.shape != self.shape:
            raise UsageError(
                f"expected the gradient of {self.place.name!r} to keep its shape "
                f"{tuple(self.shape)}, found {tuple(whole.shape)}: every rank holds a piece of it"
            )
        piece = self.piece()
        piece.copy_(self.place.cut(whole))
        self._changed()

    def _fill_diagonal(self, *args: Any, **kwargs: Any) -> "DividedGradient":
        """Fill the diagonal, which torch does by a view."""
        self._take(self.whole().fill_diagonal_(*args, **kwargs))
        return self

    def _changed(self) -> None:
        if self._computed is None:
            self.place.changed()

    def _assign(self, values: Tensor) -> None:
        """Take other values, as ``p.grad.data = values`` says."""
        self.copy_(values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DividedGradient(of {self.place.name}, shape {tuple(self.shape)}, {self.dtype}; "
            "every rank holds a piece)"
        )

    def __format__(self, spec: str) -> str:
        return format(self.whole(), spec) if not self.dim() else object.__format__(self, spec)


_SETTERS: Mapping[Function, Callable[..., Any]] = {
    Tensor.__setitem__: DividedGradient._set,
    Tensor.fill_diagonal_: DividedGradient._fill_diagonal,
    Tensor.data.__set__: DividedGradient._assign,  # type: ignore[attr-defined]
}
"""Ways to write that torch does without its dispatch, or by views."""


def _answer(first: DividedGradient, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Choose how a function is called: by facts, by pieces, or with whole gradients."""
    packet = func.overloadpacket
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, DividedGradient) and leaf._computed is None:
            leaf.place.look()  # it may have left p.grad
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise UsageError(
            f"expected no random numbers from a gradient, found {packet.__name__} of "
            f"{first.place.name!r}: ranks would draw different ones; draw a tensor of the "
            "parameter's shape from a generator with one seed on all ranks, and add that"
        )
    if packet in _BLANK:
        blank = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
        return func(blank, *args[1:], **kwargs)
    if packet in _SAME:
        return first
    if packet.__name__.startswith("_foreach"):
        return _each(func, args, kwargs)
    if func in _NORMS and (found := _norm(first, *args[1:], **kwargs)) is not None:
        return found
    by_elements = packet in _ELEMENTWISE or torch.Tag.pointwise in func.tags
    # Not those that give an answer, or several tensors, as torch.equal and torch.frexp.
    by_elements &= [str(each.type) for each in func._schema.returns] == ["Tensor"]
    if by_elements and "out" not in kwargs and _alike(first, args, kwargs):
        return _by_pieces(first, func, args, kwargs)
    return _by_wholes(func, args, kwargs)


def _alike(first: DividedGradient, args: Arguments, kwargs: Keywords) -> bool:
    """Return whether a function's result has the elements of the gradient."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not isinstance(args[0], DividedGradient):
        return False  # the script goes on with an ordinary tensor
    places = {id(leaf.place) for leaf in tensors if isinstance(leaf, DividedGradient)}
    shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return len(places) == 1 and shape == first.shape


def _by_pieces(first: DividedGradient, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function that acts element by element with this rank's parts of its operands."""
    written = args[0] if func._schema.is_mutable else None
    if func is _ATEN.zero_.default and first._computed is None:
        first.place.clear()
        return first
    target = first.piece() if written is first else first._read()

    def part(leaf: Any) -> Any:
        if leaf is first:
            return target
        if isinstance(leaf, DividedGradient):
            return leaf._read().to(target.device)
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return first.place.cut(leaf.expand(first.shape)).to(target.device)

    result = func(*tree_map(part, args), **tree_map(part, dict(kwargs)))
    if written is not None:
        first._changed()
        return first
    return DividedGradient(first, first.place, result)


def _by_wholes(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function with whole gradients; what it writes into one goes back into the pieces."""
    first = args[0] if args else None

    def whole(leaf: Any) -> Any:
        return leaf.whole() if isinstance(leaf, DividedGradient) else leaf

    given = tree_map(whole, tuple(args))
    outs = [
        kwargs.get(each.name)
        for each in func._schema.arguments
        if each.kwarg_only and each.alias_info is not None and each.alias_info.is_write
    ]
    if any(isinstance(leaf, DividedGradient) for leaf in tree_leaves(outs)):
        raise UsageError(
            "expected an ordinary tensor as out, found a gradient of which every rank holds a "
            "piece; use p.grad.copy_(result)"
        )
    result = func(*given, **tree_map(whole, dict(kwargs)))
    if func.namespace == "c10d":
        work: Any = result[-1] if isinstance(result, tuple) else result
        work.wait()
    for was, now in _written(func, args, given):
        was._take(now)
    if func._schema.is_mutable and isinstance(first, DividedGradient):
        return first
    if any(each.alias_info is not None for each in func._schema.returns):
        name = next(a.place.name for a in tree_leaves(args) if isinstance(a, DividedGradient))
        refused = UsageError(
            f"expected a view of the gradient of {name!r} to be read, found that it is written "
            "into, and every rank holds a piece of the gradient; write p.grad[index] = value, or "
            "assign a whole tensor to p.grad"
        )
        return tree_map(lambda leaf: read_only(leaf.clone(), refused), result)
    return result


def _written(
    func: Any, args: Arguments, given: Arguments
) -> Iterator[tuple[DividedGradient, Tensor]]:
    """Yield the gradients that a function writes into, and what it wrote.

    torch's collectives write into their first argument, which they do not say.
    """
    for place, argument in enumerate(func._schema.arguments[: len(args)]):
        alias = argument.alias_info
        if not place if func.namespace == "c10d" else alias is not None and alias.is_write:
            pairs = zip(tree_leaves(args[place]), tree_leaves(given[place]), strict=True)
            yield from ((was, now) for was, now in pairs if isinstance(was, DividedGradient))


def _norm(
    gradient: DividedGradient,
    norm_type: float = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Return the norm of a gradient; None if it is not one that a rank's part helps with."""
    if gradient._computed is not None or dim or keepdim or not norm_type > 0:
        return None
    return gradient.place.norm(float(norm_type)).to(gradient.device, dtype or gradient.dtype)


def _each(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function of lists: of the pieces in the place of gradients."""
    lists: Sequence[Sequence[Any]] = [each for each in args if isinstance(each, list | tuple)]
    leads = lists[0]
    if func.overloadpacket is _ATEN._foreach_norm:
        norm_type = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
        dtype = kwargs.get("dtype")
        return [torch.linalg.vector_norm(each, norm_type, dtype=dtype) for each in leads]
    named = func.overloadpacket.__name__.removeprefix("_foreach_")
    one: Callable[..., Any] = getattr(_ATEN, named)
    rest = [each if isinstance(each, list | tuple) else [each] * len(leads) for each in args[1:]]
    results = []
    for lead, *others in zip(leads, *rest, strict=True):
        # A factor of addcmul and addcdiv has a name where there is one tensor.
        named_too = {**kwargs, "value": others.pop()} if len(others) > 2 else kwargs
        results.append(one(lead, *others, **named_too))
    return None if func._schema.is_mutable else results
