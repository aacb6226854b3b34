"""One unit on one rank: gathered and freed together; and values that few neighbors hold.

A resident unit keeps its parameters whole: an all-gather in place brings the other ranks' updates.
A sharded unit keeps only this rank's shards; its flat tensors get memory before use and lose it
after. The parameter objects and their views stay, so autograd's saved views are valid again then.

The values of a unit that few neighbors hold together: until backward, or for good.

A part until backward is a copy of whole values. A part for good is the secondary partition of
Wang et al., "ZeRO++", 2023 (arXiv 2306.10209, section 4.2), which keeps every gather inside of a
host. In the paper, and with parts until backward, the gather for forward still crosses hosts and
writes the parts. Parts for good are brought up to date by the ranks that step the parameters::

    step       rank at place j of each host    sends its new values to the ranks at place j  (far)
    gathers    ranks of a host                 exchange their parts                          (near)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, Handle, Route, connect
from drivetrain.collectives.communicator import Finished, GatherChannel
from drivetrain.collectives.volume import StretchParts
from drivetrain.compression.communicator import connect_replicas, route_of_replicas
from drivetrain.errors import CollectiveError, StorageError, UsageError
from drivetrain.log import get_logger
from drivetrain.memory import offer
from drivetrain.model.guard import Guard, guard, unguard
from drivetrain.parallel.layout import ParameterSlot, UnitLayout, stretches_of
from drivetrain.parallel.options import UnitsOptions
from drivetrain.parallel.shard import FlatTensor, WholeValues
from drivetrain.runtime.mesh import Axis
from drivetrain.store import Pending
from drivetrain.strategy import Run

# --- the values of a unit that few neighbors hold together ---

logger = get_logger(__name__)


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
    a gather in levels (``drivetrain.collectives.hierarchy``) brings to this rank between hosts.
    On all of these ranks the values are equal, also where a link approximates their updates.

    Args:
        flats: the unit's flat tensors.
        near: the ranks of this host.
        far: the ranks at this rank's place of each host.
    """

    def __init__(self, flats: Sequence[FlatTensor], near: Communicator, far: Communicator) -> None:
        self._near = near
        self._far = far
        self._kept: dict[FlatTensor, list[list[Tensor]]] = {}
        self._parts: list[list[Tensor]] = [[] for _ in range(near.size)]
        self._refreshed: Handle = Finished()
        self._channels: dict[tuple[FlatTensor, ...], GatherChannel] = {}
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

    def _fill_own(self, moving: Sequence[FlatTensor], after: Sequence[Pending]) -> None:
        for update in after:
            update.wait()
        for flat in moving:
            flat.shard.fill(self._kept[flat][self._far.rank])

    def _channel(self, moving: tuple[FlatTensor, ...], label: str) -> GatherChannel:
        """Return the channel of updates of some flat tensors: frozen ones may begin to train."""
        if moving not in self._channels:
            layouts = [flat.layout for flat in moving]

            def describe() -> StretchParts:
                dtypes = [layout.dtype for layout in layouts]
                return stretches_of(layouts, dtypes)[self._near.rank :: self._near.size]

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
        whole: whether the parameters' values are there.
        absent: decides what happens when a parameter is used that is not whole.
        arrival: the all-gather under way.
        updates: steps of this rank's shards that are under way.
        holds: how many users keep the unit whole.
        near: a copy of a part of the values, from which few neighbors can restore them.
        secondary: a part that is kept for good, from which the ranks of this host can.
        storages: the identities of the values' storages, which last as long as the unit.
        versions: of the parameters when ``changed`` was last asked; None before their values came.
        digests: of the values then, or when they came; None where nobody looks for writes that
            leave no trace.
    """

    def __init__(
        self,
        layout: UnitLayout,
        flats: Sequence[FlatTensor],
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
        self.absent: Guard = self
        self._guarded_by: Guard | None = None
        self.versions: list[int] | None = None
        self.digests: list[Tensor] | None = None
        self.storages = {flat.untyped_storage()._cdata for flat in self.values}
        self._channel: GatherChannel | None = None
        self._memory = [(flat.values.untyped_storage(), flat.layout.nbytes) for flat in flats]
        by_rank = zip(*(flat.parts for flat in flats), strict=True)
        self._parts = [list(chain.from_iterable(parts)) for parts in by_rank]
        with torch.no_grad():
            for flat in flats:
                flat.adopt(values)
        self.versions = [parameter._version for parameter in self.parameters]
        if layout.sharded:
            self.free()  # before the next unit gets memory

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
        return self.communicator.approximates_parameters

    def start(self, *, exact: bool = False) -> None:
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
        label = f"parameters of {self.label}"
        secondary = None if exact and self.approximate else self.secondary
        if (held := self.near or secondary) is not None:
            self.arrival = held.restore(label)
            self.near = None
            self.guard()
            return
        if self.approximate:
            fill = partial(self._fill_own, tuple(self.updates))  # after a look at the old values
            if exact:
                self.arrival = self.communicator.gather_parts(self._parts, label=label, first=fill)
            else:
                self.arrival = self._approximation(label)(self._parts, fill)
            self.guard()
            return
        first = None if self._at_hand() else partial(self._fill_own, tuple(self.updates))
        if first is None:
            self._fill_own()
        if self.communicator.size == 1 and self.resident and first is None:
            self.unguard()
            return
        self.arrival = self.communicator.gather_parts(self._parts, label=label, first=first)
        self.guard()

    def _approximation(self, label: str) -> GatherChannel:
        """Return the channel between hosts: of values, or where these stay, of updates."""
        if self._channel is None:
            line, layouts = self.communicator, [flat.layout for flat in self.flats]
            make = line.parameters_updated if self.resident else line.parameters_gathered
            dtypes = [layout.dtype for layout in layouts]
            self._channel = make(lambda: stretches_of(layouts, dtypes), label)
        return self._channel

    def _at_hand(self) -> bool:
        """Return whether this rank's shards are there; start to fetch shards from a store."""
        if self.updates:
            return False
        away = [flat.shard for flat in self.flats if not flat.shard.at_hand]
        for shard in away:
            shard.ahead()
        return not away

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

    def wait_for_values(self) -> None:
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
        self._guarded_by = None
        for parameter in self.parameters:
            unguard(parameter)
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
        if untraced and not self.resident:
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
        self.wait_for_values()
        return function(*args, **kwargs)

    def free(self) -> None:
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

    def free_but_near(self, neighbors: Communicator) -> None:
        """Free a whole unit, but keep parts from which a few neighbors can restore the unit."""
        self.near = NearPart(self.values, neighbors)
        self.free()

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


def is_ahead(unit: Unit, flat: FlatTensor) -> bool:
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
