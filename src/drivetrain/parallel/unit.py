"""One unit on one rank: gathered and freed together; its flat tensors, and this rank's shards.

A resident unit keeps its parameters whole: an all-gather in place brings the other ranks' updates.
A sharded unit keeps only this rank's shards; its flat tensors get memory before use and lose it
after, unless they are the shard of the only rank. The parameter objects and their views stay, so
autograd's saved views are valid again then.

The values of a unit that few neighbors hold together: until backward, or for good.

A part until backward is a copy of whole values. A part for good is the secondary partition of
Wang et al., "ZeRO++", 2023 (arXiv 2306.10209, section 4.2), which keeps every gather inside of a
host. In the paper, and with parts until backward, the gather for forward still crosses hosts and
writes the parts. Parts for good are brought up to date by the ranks that step the parameters::

    step       rank at place j of each host    sends its new values to the ranks at place j  (far)
    gathers    ranks of a host                 exchange their parts                          (near)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator, Handle, Route, connect
from drivetrain.collectives.communicator import Finished, First, GatherChannel
from drivetrain.collectives.volume import SlicesByRank
from drivetrain.compression.communicator import connect_replicas, route_of_replicas
from drivetrain.errors import CollectiveError, StorageError, UsageError
from drivetrain.log import get_logger
from drivetrain.memory import offer
from drivetrain.model.deferred import become
from drivetrain.model.guard import Guard, RefusingGuard, check_ordinary, guard, unguard
from drivetrain.parallel.layout import FlatLayout, ParameterSlot, UnitLayout, flat_slices_of
from drivetrain.parallel.options import UnitsOptions
from drivetrain.runtime.mesh import Axis
from drivetrain.store import Pending
from drivetrain.strategy import Run

logger = get_logger(__name__)

# --- a flat tensor, and its shard: where the part that this rank owns lies between uses ---


class ShardStorage(ABC):
    """Where this rank's shard of one flat parameter lies between the uses of its values.

    Args:
        numel: how many elements.
        dtype: their dtype: that of the optimizer's masters, until somebody else keeps those.
        own: where they belong among the values of the flat tensor: 1-D views, in order.

    Attributes:
        dtype: their dtype.
        numel: how many elements.
        tensor: 1-D, all of them, if they lie in memory as one range; otherwise None.
        separate: whether they are kept besides the values of the flat tensor.
        in_store: whether a store keeps them.
        at_hand: whether ``fill`` need not wait for anything.
    """

    separate: ClassVar[bool] = True
    in_store: ClassVar[bool] = False
    at_hand: ClassVar[bool] = True

    def __init__(self, numel: int, dtype: torch.dtype, own: Sequence[Tensor]) -> None:
        self.numel = numel
        self.dtype = dtype
        self.tensor: Tensor | None = None
        self._own = list(own)
        self._lengths = [part.numel() for part in own]

    @property
    def untouched(self) -> bool:
        """Whether it is besides the values, and was the same when it was last written."""
        return False

    @abstractmethod
    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Copy everything into its places among the values, which have memory now.

        Args:
            places: others of the same lengths, perhaps of another dtype, that are filled instead.
        """

    @abstractmethod
    def take(self) -> None:
        """Copy everything from its places back, where it changed.

        Elements that nobody changed keep the digits that the dtype of forward has no room for.
        """

    @abstractmethod
    def read(self, slot: ParameterSlot) -> Tensor:
        """Return the owned share of a parameter, 1-D, perhaps a view."""

    @abstractmethod
    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Replace the owned share of a parameter by a 1-D tensor."""

    @abstractmethod
    def replace(self, values: Tensor) -> None:
        """Replace everything by a 1-D tensor of any floating dtype, on any device."""

    @abstractmethod
    def narrow(self, dtype: torch.dtype) -> None:
        """Go on in the dtype of forward: somebody else keeps the masters."""

    def flush(self) -> None:
        """Keep the first written values for good."""
        return

    def ahead(self) -> None:
        """Start to bring the values that ``fill`` will need soon."""
        return

    def place(self, slot: ParameterSlot) -> Tensor | None:
        """Return where an update can write a parameter's new values, 1-D; None: nowhere."""
        return None if self.tensor is None else self.tensor[slot.local]

    def _pieces(self, values: Tensor) -> list[Tensor]:
        return list(torch.split(values, self._lengths))

    @torch.no_grad()
    def _taken_back(self, values: Tensor) -> None:
        for own, piece in zip(self._own, self._pieces(values), strict=True):
            # A device would have to be waited for; and on the CPU most passes end here.
            if not own.is_cpu or not torch.equal(piece.to(own.dtype), own):
                piece.copy_(followed(piece, own))


def followed(master: Tensor, own: Tensor) -> Tensor:
    """Return a master with the values of forward where these are not its own, rounded.

    Elements that nobody changed keep the digits that the dtype of forward has no room for.
    """
    return torch.where(master.to(own.dtype) == own, master, own.to(master.dtype))


class InPlaceShard(ShardStorage):
    """A shard that lies among the values, which are never freed: nothing has to move."""

    separate: ClassVar[bool] = False

    def __init__(self, values: Tensor, own: Sequence[Tensor]) -> None:
        super().__init__(sum(part.numel() for part in own), values.dtype, own)
        self._values = values
        if len(own) <= 1:
            self.tensor = own[0] if own else values[:0]

    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Copy into other places; among the values everything lies already."""
        if places:
            with torch.no_grad():
                torch._foreach_copy_(list(places), self._own)

    def take(self) -> None:
        """Do nothing."""

    def read(self, slot: ParameterSlot) -> Tensor:
        """Return a view of the values."""
        return self._values[slot.own]

    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Write into the values."""
        self._values[slot.own].copy_(values)

    def replace(self, values: Tensor) -> None:
        """Write into the values."""
        for own, piece in zip(self._own, self._pieces(values), strict=True):
            own.copy_(piece)

    def narrow(self, dtype: torch.dtype) -> None:
        """Do nothing: this is the dtype of forward."""

    def place(self, slot: ParameterSlot) -> Tensor:
        """Return a view of the values."""
        return self._values[slot.own]


class InMemoryShard(ShardStorage):
    """A shard that is kept a second time, or while the values are freed."""

    tensor: Tensor

    def __init__(
        self, numel: int, dtype: torch.dtype, own: Sequence[Tensor], device: torch.device
    ) -> None:
        super().__init__(numel, dtype, own)
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._parts = self._pieces(self.tensor)
        self._version = -1  # of the tensor when the values were the same; it is also fragments'

    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Copy, with a cast where dtypes differ."""
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._own if places is None else list(places), self._parts)
        if places is None:
            self._version = self.tensor._version

    def flush(self) -> None:
        """Remember that shard and values are the same."""
        self._version = self.tensor._version

    def take(self) -> None:
        """Copy the changed values back."""
        self._taken_back(self.tensor)
        self.flush()

    @property
    def untouched(self) -> bool:
        """Whether it was the same as the values when it was last written."""
        return self._version == self.tensor._version

    def read(self, slot: ParameterSlot) -> Tensor:
        """Return a view."""
        return self.tensor[slot.local]

    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Write into it."""
        self.tensor[slot.local].copy_(values)

    def replace(self, values: Tensor) -> None:
        """Write into it."""
        self.tensor.copy_(values)

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep a narrower copy instead."""
        if dtype is not self.dtype:
            self.dtype = dtype
            self.tensor = self.tensor.to(dtype)
            self._parts = self._pieces(self.tensor)


# --- what optimizers hold in the place of a shard that a store keeps ---


def make_placeholder(slot: ParameterSlot, fragment: nn.Parameter, dtype: torch.dtype) -> None:
    """Take the values of a parameter's fragment away: schedulers and names go on working.

    Args:
        slot: the parameter.
        fragment: what the optimizer holds in its place.
        dtype: of the gradients that the fragment is to have.
    """
    empty = torch.empty_strided(slot.fragment_shape, slot.fragment_strides, dtype=dtype)
    empty.untyped_storage().resize_(0)
    grad, fragment.grad = fragment.grad, None
    with torch._C.DisableTorchFunctionSubclass():
        fragment.data = empty
    if grad is not None and grad.dtype is dtype:
        fragment.grad = grad
    refusal = RefusingGuard(
        lambda *_: UsageError(
            f"expected values, found what an offloaded optimizer holds in the place of "
            f"{slot.name!r}: a store keeps them; read the parameter of the model, or take "
            "accelerator.get_state_dict(model)"
        )
    )
    guard(fragment, refusal)


WholeValues = Callable[[str, nn.Parameter], Tensor]
"""Gives the whole values of a parameter; called once for each, in order."""


class FlatParameter:
    """The parameters of one kind in a unit, side by side in one tensor; and this rank's shard.

    Args:
        layout: which parameters it holds.
        parameters: parameters by name.
        sharing: the ranks that share the unit.
        device: where it lives.
        sharded: whether its values are freed between uses.

    Attributes:
        layout: which parameters it holds.
        sharded: whether its values are freed between uses.
        apart: whether gathered values are approximate, so that the shard never lies among them,
            but is kept a second time.
        values: 1-D, all parameters in the dtype that forward reads; without memory while freed.
        shard: what this rank owns, in the dtype that the optimizer updates.
        owned: how many elements that are.
        pieces: for each rank, what it owns as ranges of the flat tensor.
        parts: for each rank, what it owns of the values, as views.
        own: those of this rank.
        slots: its parameters, in order.
        fragments: what optimizers hold in the places of parameters.
        masters_left: whether a store keeps the masters of all its parameters.
        trained: whether one of its parameters has ever required a gradient, or has state of an
            optimizer out of a checkpoint; alike on all ranks.
        gradient_device: where the gradients of this rank's shard are kept.
        gradient_memory: takes elements and ``dtype``, and returns memory for them there, which may
            hold anything.
    """

    shard: ShardStorage

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        sharing: Communicator,
        device: torch.device,
        *,
        sharded: bool,
    ) -> None:
        self.layout = layout
        self.sharded = sharded
        self.apart = sharing.owns_apart
        self.values = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.slots: list[ParameterSlot] = []
        first = 0
        for place in layout.places:
            parameter = parameters[place.name]
            check_ordinary(place.name, parameter)
            slot = ParameterSlot.of(place, parameter, layout, sharing.rank, first)
            self.slots.append(slot)
            first += slot.owned_numel
        self.owned = first
        self.pieces = [layout.pieces(one) for one in range(len(layout.places[0].shares))]
        self.parts = [[self.values[start:stop] for start, stop in each] for each in self.pieces]
        self.own = self.parts[sharing.rank]
        self.fragments: dict[ParameterSlot, nn.Parameter] = {}
        self.masters_left = False
        self.trained = False
        self.gradient_device = device
        self.gradient_memory: Callable[..., Tensor] = partial(torch.empty, device=device)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates another dtype than forward reads."""
        return self.layout.master is not self.layout.dtype

    @property
    def moves(self) -> bool:
        """Whether an optimizer may have changed the parameters: not if all were always frozen."""
        return self.layout.trainable or self.trained

    def adopt(self, values: WholeValues) -> None:
        """Copy the parameters' whole values in, and make the parameters views of the flat tensor.

        Args:
            values: gives them.
        """
        for slot in self.slots:
            given = values(slot.name, slot.parameter)
            view = slot.view(self.values)
            if not self.sharded:
                view.copy_(given)
            if slot.owned_numel and self.shard.separate:
                self.shard.write(slot, slot.in_memory_order(given)[slice(*slot.owned)])
            if slot.parameter.is_meta:
                become(slot.parameter, view.data, slot.name)  # .data: a count of its versions
            else:
                slot.parameter.data = view  # the object and all that hold it stay
        self.shard.flush()

    def take_data(self, slot: ParameterSlot) -> None:
        """Copy in the ``data`` that the script set on a parameter, which is a view again then."""
        data, view = slot.parameter.data, slot.view(self.values)
        if data.shape != view.shape or data.dtype is not view.dtype:
            raise UsageError(
                f"expected data of shape {tuple(view.shape)} and {view.dtype} for {slot.name!r}, "
                f"found {tuple(data.shape)} and {data.dtype}, set by 'parameter.data = ...'; "
                "change shapes and dtypes before prepare()"
            )
        view.copy_(data)
        slot.parameter.data = view

    def leave_masters(self) -> None:
        """Keep only the values that forward reads: a store keeps all masters."""
        self.masters_left = True
        if self.sharded or self.apart:
            self.shard.narrow(self.layout.dtype)
        else:
            self.shard = InPlaceShard(self.values, self.own)

    def fragment(self, slot: ParameterSlot) -> nn.Parameter | None:
        """Return the fragment that an optimizer holds for a parameter; None without a share."""
        found = self.fragments.get(slot)
        if found is not None or not slot.owned_numel:
            return found
        memory = self.shard.tensor
        if memory is None:  # a store will keep the master
            fragment = nn.Parameter(torch.empty(0, dtype=self.layout.master))
            make_placeholder(slot, fragment, self.layout.master)
        else:
            fragment = nn.Parameter(slot.piece(memory))
        fragment.requires_grad_(slot.parameter.requires_grad)
        self.fragments[slot] = fragment
        return fragment

    def with_gradients(self) -> dict[ParameterSlot, Tensor]:
        """Return the gradients of this rank's fragments, in order, without None."""
        found = {}
        for slot in self.slots:
            fragment = self.fragments.get(slot)
            if fragment is not None and fragment.grad is not None:
                found[slot] = fragment.grad
        return found


# --- the values of a unit that few neighbors hold together ---


class NearPart:
    """One rank's part of a unit's values that its neighbors hold together.

    Args:
        values: the flat tensors, each 1-D; this rank's part of each is copied.
        neighbors: the ranks that hold a part each.
    """

    def __init__(self, values: Sequence[Tensor], neighbors: Communicator) -> None:
        self._neighbors = neighbors
        self._parts = [
            [flat[slice(*neighbors.chunk(flat.numel())[rank])] for flat in values]
            for rank in range(neighbors.size)
        ]
        self._kept = [part.clone() for part in self._parts[neighbors.rank]]

    def restore(self, label: str) -> Handle:
        """Start to bring all values back into the flat tensors."""
        with torch.no_grad():
            torch._foreach_copy_(self._parts[self._neighbors.rank], self._kept)
        return self._neighbors.gather_parts(self._parts, label=label)


class SecondaryRanks(NamedTuple):
    """The ranks that keep secondary shards.

    Attributes:
        near: the ranks of this host, which hold all values together.
        far: the ranks at this rank's place of each host, which keep the same part.
    """

    near: Communicator
    far: Communicator


class SecondaryLines(NamedTuple):
    """The same ranks for a cost: nothing is started."""

    near: Axis
    far: Route


def connect_secondary(run: Run, config: UnitsOptions) -> SecondaryRanks | None:
    """Connect the ranks that keep secondary shards; None: none do, and a line says why. Collective.

    Raises:
        ConfigError: hosts hold different numbers of ranks, or not in a row.
    """
    mesh, world = run.mesh, run.world
    per_host = config.secondary_ranks(mesh, world)
    if not per_host:
        if config.keeps_secondary:
            logger.announce("secondary: host changes nothing: all ranks of 'dp' are on one host")
        return None
    near = mesh.start_neighbors("dp", per_host, world)
    far = mesh.start_across("dp", per_host, world)
    return SecondaryRanks(
        connect(near, run.traffic, world.device, world.timeout),
        connect_replicas(far, run.traffic, world, run.links),
    )


def route_secondary(run: Run, config: UnitsOptions) -> SecondaryLines | None:
    """Return the ranks of ``connect_secondary``, to count the bytes of a rank."""
    mesh = run.mesh
    per_host = config.secondary_ranks(mesh, run.world)
    if not per_host:
        return None
    across = mesh.across("dp", per_host)
    return SecondaryLines(mesh.neighbors("dp", per_host), route_of_replicas(across, run.links))


class SecondaryShard:
    """One rank's part of a unit's values that the ranks of its host hold together for good.

    The part has the values of all ranks at this rank's place of each host: the same ranges that
    a gather in levels (``drivetrain.collectives.ring``) brings to this rank between hosts.
    On all of these ranks the values are equal, also where a link approximates their updates.

    Args:
        flats: the unit's flat tensors.
        near: the ranks of this host.
        far: the ranks at this rank's place of each host.
    """

    def __init__(
        self, flats: Sequence[FlatParameter], near: Communicator, far: Communicator
    ) -> None:
        self._near = near
        self._far = far
        self._kept: dict[FlatParameter, list[list[Tensor]]] = {}
        self._parts: list[list[Tensor]] = [[] for _ in range(near.size)]
        self._refreshed: Handle = Finished()
        self._channels: dict[tuple[FlatParameter, ...], GatherChannel] = {}
        for flat in flats:
            for place, part in enumerate(self._parts):
                part += [piece for pieces in flat.parts[place :: near.size] for piece in pieces]
            mine = flat.parts[near.rank :: near.size]
            self._kept[flat] = [[torch.empty_like(piece) for piece in pieces] for pieces in mine]

    @property
    def kept(self) -> list[Tensor]:
        """The tensors of this part, in the order of their places among the values."""
        return [piece for hosts in self._kept.values() for pieces in hosts for piece in pieces]

    def refresh(self, after: Sequence[Pending], label: str, *, exact: bool = False) -> None:
        """Start to send this rank's shards to the other hosts, and to receive those of their ranks.

        Args:
            after: steps of this rank's shards that are under way.
            label: names the values in errors.
            exact: whether all values cross as they are, those too that no optimizer changes, and
                whatever the run's method.
        """
        moving = tuple(flat for flat in self._kept if exact or flat.moves)
        if not moving:
            return
        self.wait()
        hosts = range(self._far.size)
        parts = [[piece for flat in moving for piece in self._kept[flat][host]] for host in hosts]
        fill = partial(self._fill_own, moving, tuple(after))
        if exact or not self._far.approximates_parameters:
            self._refreshed = self._far.gather_parts(parts, label=label, first=fill)
        else:
            self._refreshed = self._channel(moving, label)(parts, fill)

    def restore(self, label: str) -> Handle:
        """Start to bring all values into the flat tensors, once this part is up to date."""
        return self._near.gather_parts(self._parts, label=label, first=self._copy_out)

    def take(self) -> None:
        """Follow values that a script has changed, alike on all ranks."""
        self.wait()
        torch._foreach_copy_(self.kept, self._parts[self._near.rank])

    def wait(self) -> None:
        """Return when this part is up to date.

        Raises:
            CollectiveError: another rank failed, or the connection to it.
        """
        self._refreshed.wait()

    def _copy_out(self) -> None:
        self.wait()
        with torch.no_grad():
            torch._foreach_copy_(self._parts[self._near.rank], self.kept)

    def _fill_own(self, moving: Sequence[FlatParameter], after: Sequence[Pending]) -> None:
        for update in after:
            update.wait()
        for flat in moving:
            flat.shard.fill(self._kept[flat][self._far.rank])

    def _channel(self, moving: tuple[FlatParameter, ...], label: str) -> GatherChannel:
        """Return the channel of updates of some flat tensors: frozen ones may begin to train."""
        if moving not in self._channels:
            layouts = [flat.layout for flat in moving]

            def describe() -> SlicesByRank:
                dtypes = [layout.dtype for layout in layouts]
                return flat_slices_of(layouts, dtypes)[self._near.rank :: self._near.size]

            self._channels[moving] = self._far.parameters_updated(describe, label)
        return self._channels[moving]


# --- one unit on one rank ---


class Unit:
    """Parameters that are gathered and freed together.

    Args:
        layout: which parameters it holds, and who owns what of them.
        flats: its flat tensors, one for each kind.
        communicator: the ranks that share it.
        values: gives the whole values of a parameter.

    Attributes:
        layout: which parameters it holds, and who owns what of them.
        flats: its parameters by kind.
        slots: its parameters, in order.
        parameters: the user's own objects, in order.
        values: the flat tensors, each 1-D.
        communicator: the ranks that share it.
        label: names it in errors.
        resident: whether the parameters stay whole between uses.
        frees: whether their memory is given back between uses.
        whole: whether the parameters' values are there.
        absent: decides what happens when a parameter is used that is not whole.
        arrival: the all-gather under way.
        updates: steps of this rank's shards that are under way.
        holds: how many users keep the unit whole.
        near: a copy of a part of the values, from which few neighbors can restore them.
        secondary: a part that is kept for good, from which the ranks of this host can.
        in_bytes: starts to gather the values, weights of products in fp8 in 8 bits; takes a label.
            None: there are no such weights.
        storages: the identities of the values' storages, which last as long as the unit.
        versions: of the parameters when ``changed`` was last asked; None before their values came.
        digests: of the values then, or when they came; None where nobody looks for writes that
            leave no trace.
    """

    def __init__(
        self,
        layout: UnitLayout,
        flats: Sequence[FlatParameter],
        communicator: Communicator,
        values: WholeValues,
    ) -> None:
        self.layout = layout
        self.flats = flats
        self.communicator = communicator
        self.label = layout.key or "the rest of the model"
        self.slots = [slot for flat in flats for slot in flat.slots]
        self.parameters = [slot.parameter for slot in self.slots]
        self.values = [flat.values for flat in flats]
        self.resident = not layout.sharded
        self.whole = True
        self.arrival: Handle | None = None
        self.updates: list[Pending] = []
        self.holds = 0
        self.near: NearPart | None = None
        self.secondary: SecondaryShard | None = None
        self.in_bytes: Callable[[str], Handle] | None = None
        self.absent: Guard = self
        self._guarded_by: Guard | None = None
        self.versions: list[int] | None = None
        self.digests: list[Tensor] | None = None
        self.storages = {flat.untyped_storage()._cdata for flat in self.values}
        self._channel: GatherChannel | None = None
        freed = [flat for flat in flats if flat.sharded]
        self.frees = bool(freed)
        self._memory = [(flat.values.untyped_storage(), flat.layout.nbytes) for flat in freed]
        by_rank = zip(*(flat.parts for flat in flats), strict=True)
        self._parts = [list(chain.from_iterable(parts)) for parts in by_rank]
        with torch.no_grad():
            for flat in flats:
                flat.adopt(values)
        self.versions = [parameter._version for parameter in self.parameters]
        if layout.sharded:
            self.reshard()  # before the next unit gets memory

    @property
    def live(self) -> bool:
        """Whether the values are there or on their way."""
        return self.whole or self.arrival is not None

    @property
    def moves(self) -> bool:
        """Whether an optimizer may have changed the parameters: not if all were always frozen."""
        return any(flat.moves for flat in self.flats)

    @property
    def live_bytes(self) -> int:
        """Bytes of memory that the flat tensors have now."""
        return sum(memory.nbytes() for memory, _ in self._memory)

    # --- values on their way ---

    @property
    def approximate(self) -> bool:
        """Whether gathered values may differ from the values of their owners."""
        return self.communicator.approximates_parameters or self.in_bytes is not None

    def unshard(self, *, exact: bool = False) -> None:
        """Send the all-gather; the parameters are guarded until their values are there.

        Where few neighbors hold the values together, they restore them; exact values come from
        their owners where a link approximates the values that neighbors hold. A shard that is being
        stepped, or lies in a store, is waited for in the background, just before it is sent.

        Args:
            exact: whether a slow link sends the values as they are, whatever the run's method.
        """
        if self.layout.sharded:
            for memory, nbytes in self._memory:
                memory.resize_(nbytes)
        line, label = self.communicator, f"parameters of {self.label}"
        held = None if exact and self.approximate else self.near or self.secondary
        self.near = None
        if held is not None:
            self.arrival = held.restore(label)
        elif self.approximate and not exact:
            self.arrival = self._unshard_approximate(label)
        else:
            away = [flat.shard for flat in self.flats if not flat.shard.at_hand]
            first: First = None
            if self.approximate or away or self.updates:
                first = partial(self._fill_own, tuple(self.updates))
                for shard in () if self.updates else away:
                    shard.ahead()  # start to fetch it from its store
            else:
                self._fill_own()
                if line.size == 1 and self.resident:
                    self.unguard()
                    return
            self.arrival = line.gather_parts(self._parts, label=label, first=first)
        self.guard()

    def _unshard_approximate(self, label: str) -> Handle:
        fill = partial(self._fill_own, tuple(self.updates))  # after a look at the old values
        if self.in_bytes is None:
            return self._approximation(label)(self._parts, fill)
        fill()
        return self.in_bytes(label)

    def _approximation(self, label: str) -> GatherChannel:
        """Return the channel between hosts: of values, or where these stay, of updates."""
        if self._channel is None:
            line, layouts = self.communicator, [flat.layout for flat in self.flats]
            make = line.parameters_updated if self.resident else line.parameters_gathered
            dtypes = [layout.dtype for layout in layouts]
            self._channel = make(lambda: flat_slices_of(layouts, dtypes), label)
        return self._channel

    def _fill_own(self, after: Sequence[Pending] = ()) -> None:
        for update in after:
            update.wait()
        for flat in self.flats:
            flat.shard.fill()

    def wait_for_step(self) -> None:
        """Return when this rank's shards have been stepped.

        Raises:
            StorageError: the store could not.
        """
        for update in self.updates:
            update.wait()
        self.updates = []

    def wait_for_unshard(self) -> None:
        """Return when the values are there, with the parameters unguarded.

        Raises:
            StorageError: this rank's store failed.
            CollectiveError: another rank did, or the connection to it.
        """
        if self.arrival is not None:
            if self.updates:
                self.wait_for_step()  # its own error, not that of the operation that waits for it
            try:
                self.arrival.wait()
            except CollectiveError as error:
                if isinstance(error.__cause__, StorageError):  # what this rank was to send
                    raise error.__cause__ from None
                raise
            self.arrival = None
            self.unguard()

    def park(self) -> None:
        """Keep the values, but let nobody use the parameters without asking the guard."""
        self.arrival = Finished()
        self.guard()

    def guard(self) -> None:
        """Let nobody use the parameters without asking the guard."""
        self.whole = False
        if self._guarded_by is not self.absent:
            for parameter in self.parameters:
                guard(parameter, self.absent)
            self._guarded_by = self.absent

    def unguard(self) -> None:
        """Let everybody use the parameters: their values are there."""
        self.whole = True
        for parameter in self.parameters if self._guarded_by is not None else ():
            unguard(parameter)
        self._guarded_by = None
        if self.versions is None:
            self.versions = [parameter._version for parameter in self.parameters]
        if self.digests is not None:
            self.digests = [digest(flat) for flat in self.values]

    def notice_all_writes(self) -> None:
        """Let ``changed`` find writes that leave no trace, too, from now on."""
        self.digests = [digest(flat) for flat in self.values] if self.whole else []

    def changed(self) -> bool:
        """Whether the script has written into parameters since their values came, or since asked.

        What the library writes goes to the flat tensors, and changes no version of a parameter.

        Raises:
            UsageError: a forward has written into freed units, and it was noticed, without a trace.
        """
        if self.versions is None:
            return False
        before, self.versions = self.versions, [p._version for p in self.parameters]
        untraced, known = False, self.digests
        if known and self.whole:  # somebody looks, and values have come since
            self.digests = [digest(flat) for flat in self.values]
            differ = any(not torch.equal(*pair) for pair in zip(known, self.digests, strict=True))
            untraced = differ and before == self.versions
        if untraced and self.frees:
            raise UsageError(
                f"expected a forward that writes into parameters themselves, found one that wrote "
                f"into some of {self.label} through .data, which leaves no trace: write as in "
                "'with torch.no_grad(): parameter.clamp_(-1, 1)', or inside "
                "'with accelerator.gathered(model):'"
            )
        return untraced or before != self.versions

    def replaced(self) -> list[ParameterSlot]:
        """Return the parameters of a whole unit that the script gave other memory (``p.data =``).

        A guarded parameter has none: a guard brings the values before the script can set them.
        """
        found = self.slots if self.whole else []
        return [s for s in found if s.parameter.untyped_storage()._cdata not in self.storages]

    def take_data(self, replaced: Collection[ParameterSlot]) -> None:
        """Copy in data that the script has set on parameters; another shape or dtype is refused."""
        self.wait_for_step()
        with torch.no_grad():
            for flat in self.flats:
                for slot in replaced:
                    if slot in flat.slots:
                        flat.take_data(slot)
                        if self.approximate and slot.owned_numel:
                            flat.shard.write(slot, flat.values[slot.own])
                if not self.approximate:  # there, what nobody set differs from its owner's
                    flat.shard.take()

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Wait for the values, then handle the use: a resident unit guards itself."""
        self.wait_for_unshard()
        return function(*args, **kwargs)

    def reshard(self) -> None:
        """Give the memory of a sharded unit back; its shards stay.

        A gather that failed is an error for those who need the values, not here.
        """
        if self.arrival is not None:
            # The communication thread may still be writing into the memory that is about to go.
            with suppress(CollectiveError, StorageError):
                self.arrival.wait()
            self.arrival = None
        self.guard()
        self.versions = None
        for memory, _ in self._memory:
            offer(memory)
            memory.resize_(0)

    def accept(self, everyone: Communicator, source: int = 0) -> None:
        """Make one rank's whole values those of all ranks, and this rank's shards follow."""
        for flat in self.flats:
            label = f"changed parameters of {self.label}"
            everyone.broadcast(flat.values, source, label=label).wait()
        for parameter in self.parameters:  # on every rank, for what autograd has saved
            torch.autograd.graph.increment_version(parameter)
        self.keep_changes()
        self.changed()  # and known

    def keep_changes(self) -> None:
        """Let this rank's shards follow the values, without a rounding where none changed."""
        self.wait_for_step()
        with torch.no_grad():
            for flat in self.flats:
                flat.shard.take()
            if self.secondary is not None:
                self.secondary.take()


def why_only_read(unit: Unit, *, delayed: bool) -> str:
    """Return why shards cannot follow values that a forward writes; empty where they can.

    Args:
        unit: of the values.
        delayed: whether updates are held back, which the forward has not seen.
    """
    if unit.secondary is not None:
        return (
            "of which other hosts keep copies by secondary: host; change parameters under "
            "accelerator.gathered(), or leave secondary out"
        )
    if unit.in_bytes is not None:
        return "whose values are those of fp8; take dtypes.fp8: tensorwise"
    if unit.approximate:
        return "whose values are approximate; leave links.far.parameters out"
    if delayed:
        return "whose latest update is held back; take offload.delayed: false"
    return ""


# --- writes between steps, into parameters that stay whole ---

_COLUMNS = 4093
"""Words that have factors of their own: a prime, so that rows of tensors can be told apart."""


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _COLUMNS, 2, device=device)  # odd: no bit of a word is lost


@torch.no_grad()
def digest(flat: Tensor) -> Tensor:
    """Return a number that tells values apart, on their device: one pass, and nobody waits.

    Args:
        flat: 1-D, of any dtype.
    """
    raw, factors = flat.view(torch.uint8), _factors(flat.device)
    count = raw.numel() // 8
    words, rest = raw[: count * 8].view(torch.int64), raw[count * 8 :]
    table = words[: count // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    words = words[table.numel() :]
    found = (words * factors[: words.numel()]).sum()
    if table.numel():
        found += (table.sum(0) * factors).sum()
    return found + (rest * factors[: rest.numel()]).sum() if rest.numel() else found


def is_ahead(unit: Unit, flat: FlatParameter) -> bool:
    """Return whether values may be the script's, while masters beside them are not.

    Writes through ``parameter.data`` leave no trace: values and masters are to be compared, or
    where a store has these, the values with what they were.
    """
    if not (unit.resident and unit.whole) or unit.approximate:
        return False
    if flat.shard.untouched or unit.versions != [p._version for p in unit.parameters]:
        return True
    known = None if unit.digests is None else unit.digests[unit.flats.index(flat)]
    return known is not None and not torch.equal(known, digest(flat.values))


def take_written(unit: Unit, *, stores: bool) -> bool:
    """Let shards follow what the script has written into parameters.

    Args:
        unit: of the parameters.
        stores: whether a store may keep masters.

    Returns:
        Whether there were writes that left a trace, or where a store has masters, any.
    """
    copies = [flat for flat in unit.flats if flat.shard.separate]
    if not copies and not stores:
        return unit.changed()
    for flat in copies:
        if is_ahead(unit, flat):
            flat.shard.take()
    before, written = unit.versions or (), unit.changed()
    if unit.approximate and written:  # there, what nobody wrote differs from its owner's
        pairs = zip(unit.slots, before, strict=True)
        unit.take_data([slot for slot, old in pairs if slot.parameter._version != old])
    return written
