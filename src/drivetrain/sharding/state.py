"""The training state in global coordinates: saving and loading this rank's share.

A unit holds parameters in the order of their memory. For a contiguous parameter the owned range is
a range of the flattened parameter; for any other (channels_last, transposed) it is a few boxes.
"""

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import CheckpointError
from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.saved_state import ReplicatedState, check_fits, state_keys, weights_in
from drivetrain.sharding.home import BoundOptimizer, Held, Home
from drivetrain.sharding.layout import ParameterSlot
from drivetrain.sharding.placement import Placement, Ranks
from drivetrain.sharding.shard import FlatTensor, followed
from drivetrain.sharding.unit import is_ahead
from drivetrain.shards import Part, Reader, Shard, boxes

_SCALARS = frozenset({"step", "mu_product", "mu", "eta"})
"""State of torch's optimizers that is one number, whatever the parameter's shape."""


class ShardedState:
    """Parameters, buffers and optimizer state of one model.

    Args:
        model: the user's model.
        placement: the parameters that lie in units.
        optimizers: those that train them, in the order of ``prepare``.
        home: where masters and states lie.
        ranks: those that train the model; the first one saves what all of them hold.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        optimizers: Iterable[BoundOptimizer],
        home: Home,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._placement = placement
        self._slots = {slot.name: slot for slot in placement}
        self._optimizers = list(optimizers)
        self._beside = ReplicatedState(model, [bound.optimizer for bound in self._optimizers])
        self._home = home
        self._ranks = ranks

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this rank saves; together the ranks yield each element once."""
        if self._ranks.first:
            for name, tensor in self._whole().items():
                shape = tuple(tensor.shape)
                yield Shard(name, "", tensor.detach(), shape, Part.whole(shape))
            for index in range(len(self._optimizers)):
                yield from self._beside.states(index, self._whole().keys())
        if not self._ranks.original:
            return
        units = self._placement.units
        replaced = {slot for unit in units for slot in unit.replaced()}
        ahead = {flat for unit in units for flat in unit.flats if is_ahead(unit, flat)}
        for name, slot in self._slots.items():
            if slot.owned_numel:
                held = self._weight(slot, replaced, ahead)
                yield from _shards(name, "", slot, held)
            elif not slot.numel and self._ranks.first:
                empty = torch.empty(slot.shape, dtype=slot.master, device="cpu")
                yield Shard(name, "", empty, slot.shape, Part.whole(slot.shape))
        for index, bound in enumerate(self._optimizers):
            yield from self._fragments_states(index, [slot.name for slot in bound.held])

    def states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        """Yield this rank's share of an optimizer's state for some parameters."""
        if self._ranks.first:
            yield from self._beside.states(index, names)
        if self._ranks.original:
            yield from self._fragments_states(index, names)

    def _fragments_states(self, index: int, names: Iterable[str]) -> Iterator[Shard]:
        bound = self._optimizers[index]
        for slot in (bound.slots[name] for name in names if name in bound.slots):
            if slot in bound.held:
                yield from self._optimizer_shards(index, bound, slot)

    def check(self, reader: Reader) -> None:
        """Raise a CheckpointError if names or shapes of a checkpoint differ."""
        expected = {(name, ""): tuple(t.shape) for name, t in self._whole().items()}
        expected |= {(name, ""): slot.shape for name, slot in self._slots.items()}
        held = {(i, name) for i, bound in enumerate(self._optimizers) for name in bound.slots}
        check_fits(reader, expected, held | self._beside.held())
        keys = state_keys(reader)
        for index, bound in enumerate(self._optimizers):
            for name, slot in bound.slots.items():
                for key in keys.get((name, index), []):
                    _check_state(reader, slot, index, key)

    def load(self, reader: Reader) -> None:
        """Load this rank's share, and read nothing else.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        self.check(reader)
        with torch.no_grad():
            for name, tensor in weights_in(reader, self._whole()).items():
                tensor.copy_(reader.read(name))
            for slot in weights_in(reader, self._slots).values():
                self._load_master(reader, slot)
        for index, bound in enumerate(self._optimizers):
            self._load_states(index, reader, {*bound.slots, *self._whole()})

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Load this rank's share of an optimizer's state for some parameters.

        Raises:
            CheckpointError: shapes differ; nothing was changed.
        """
        self.check(reader)
        self._load_states(index, reader, names)

    @torch.no_grad()
    def _load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        bound, keys = self._optimizers[index], state_keys(reader)
        self._beside.load_states(index, reader, names)
        for slot in (bound.slots[name] for name in names if name in bound.slots):
            found = keys.get((slot.name, index), [])
            if found:  # schedule-free optimizers change frozen ones, too
                self._placement.flat_of(slot).trained = True
            if slot in bound.held:
                states: dict[str, Any] = dict(reader.scalars(slot.name, index))
                for key in found:
                    states[key] = _read_state(reader, f"{index}.{key}", key, slot)
                self._home.set_states(bound, slot, states)

    def _whole(self) -> dict[str, Tensor]:
        """Return the tensors of every rank: buffers, and parameters outside of units."""
        rest = {
            name: parameter
            for name, parameter in named_parameters(self._model).items()
            if name not in self._slots
        }
        return {**rest, **persistent_buffers(self._model)}

    def _weight(
        self,
        slot: ParameterSlot,
        replaced: Collection[ParameterSlot],
        ahead: Collection[FlatTensor],
    ) -> Held:
        """Return this rank's share of a parameter, with what the script wrote beside a master."""
        flat = self._placement.flat_of(slot)
        held = self._home.master(flat, slot)
        if slot in replaced:
            return _followed(held, _owned_data(slot))
        return _followed(held, flat.values[slot.own]) if flat in ahead else held

    def _optimizer_shards(
        self, index: int, bound: BoundOptimizer, slot: ParameterSlot
    ) -> Iterator[Shard]:
        for key, held in self._home.states(bound, slot):
            name, values = f"{index}.{key}", held.values
            if slot.divided and values.shape == slot.fragment_shape:
                in_order = held._replace(values=slot.fragment_in_order(values))
                yield from _shards(slot.name, name, slot, in_order)
            elif slot.owned[0] == 0:  # the owner of the first element speaks for all
                shape = tuple(values.shape)
                yield Shard(slot.name, name, values, shape, Part.whole(shape), held.fresh)

    def _load_master(self, reader: Reader, slot: ParameterSlot) -> None:
        if slot.owned_numel:
            values = torch.empty(slot.owned_numel, dtype=slot.master, device="cpu")
            _read(reader, "", slot, values)
            self._home.set_master(self._placement.flat_of(slot), slot, values)


def _owned_data(slot: ParameterSlot) -> Tensor:
    """Return this rank's share of the data that the script set on a parameter."""
    return slot.in_memory_order(slot.parameter.detach())[slice(*slot.owned)]


def _followed(held: Held, own: Tensor) -> Held:
    """Return a master with what the script wrote into the parameter's values beside it.

    The master itself stays: an average may be swapped out again before the next step.
    """
    own = own.detach().to(held.values.device)
    if torch.equal(held.values.to(own.dtype), own):
        return held
    return Held(followed(held.values, own), fresh=True)


def _check_state(reader: Reader, slot: ParameterSlot, index: int, key: str) -> None:
    """Refuse state of whole parameters where ranks own ranges, before any value changes."""
    shape = reader.shape(slot.name, f"{index}.{key}")
    if shape and shape != slot.shape and slot.divided:
        raise CheckpointError(
            f"expected state {key!r} of {slot.name!r} to have the parameter's shape {slot.shape}, "
            f"or none, found {shape}; it belongs to a whole parameter: set partition: parameter, "
            "or take a strategy that has it"
        )


def _shards(name: str, state: str, slot: ParameterSlot, held: Held) -> Iterator[Shard]:
    for part, piece in _pieces(slot, held.values):
        yield Shard(name, state, piece, slot.shape, part, held.fresh)


def _read_state(reader: Reader, state: str, key: str, slot: ParameterSlot) -> Tensor:
    """Return this rank's share of a state tensor, in the fragment's shape; others whole."""
    shape = reader.shape(slot.name, state)
    scalar = shape == () and key in _SCALARS
    if not slot.divided or shape != slot.shape or scalar:
        return reader.read(slot.name, state)
    owned = torch.empty(slot.owned_numel, dtype=slot.master, device="cpu")
    _read(reader, state, slot, owned)
    return owned.as_strided(slot.fragment_shape, slot.fragment_strides)


def _read(reader: Reader, state: str, slot: ParameterSlot, owned: Tensor) -> None:
    """Fill the owned range of a parameter from a checkpoint."""
    if slot.contiguous:
        if slot.owned_numel:
            owned.copy_(reader.read(slot.name, state, Part.range_of(slot.shape, *slot.owned)))
        return
    for part, piece in _pieces(slot, owned, copy=False):
        piece.copy_(reader.read(slot.name, state, part))


def _pieces(
    slot: ParameterSlot, owned: Tensor, *, copy: bool = True
) -> Iterator[tuple[Part, Tensor]]:
    """Yield the parts that the owned range consists of, with their elements.

    Args:
        slot: the parameter.
        owned: 1-D, its owned elements in the order of memory.
        copy: whether elements that are not in the part's order are copied into it; without, the
            tensor is a view of ``owned`` that can be written.
    """
    if slot.contiguous:
        yield Part.range_of(slot.shape, *slot.owned), owned
        return
    dims = sorted(range(len(slot.shape)), key=lambda dim: -slot.strides[dim])
    memory = Part.range_of(tuple(slot.shape[dim] for dim in dims), *slot.owned)
    back = [dims.index(dim) for dim in range(len(dims))]
    for box in boxes(memory):
        piece = owned[box.start : box.start + prod(box.sizes)].view(box.sizes).permute(back)
        part = Part(
            tuple(box.offsets[i] for i in back),
            tuple(box.sizes[i] for i in back),
        )
        yield part, piece.contiguous() if copy else piece
