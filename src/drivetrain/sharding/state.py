"""The training state in global coordinates: what this rank saves, and how it loads what it owns.

A unit holds parameters in the order of their memory. For a contiguous parameter the owned range is
a range of the flattened parameter; for any other (channels_last, transposed) it is a few boxes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint.assembly import boxes
from drivetrain.errors import CheckpointError
from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.saved_state import allocate_state, check_fits, group_of, state_keys
from drivetrain.sharding.kept import is_copied, master_of, set_master
from drivetrain.sharding.ranks import Ranks
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.state_hooks import flat_state
from drivetrain.shards import Part, Reader, Shard

_SCALARS = frozenset({"step", "mu_product", "mu", "eta"})
"""State of torch's optimizers that is one number, whatever the parameter's shape."""


class ShardedState:
    """Parameters, buffers and optimizer state of one model.

    Args:
        model: the user's model.
        slots: the parameters that lie in units, by name.
        held: for each optimizer, in the order of ``prepare``, the names of what it holds.
        ranks: those that train the model; the first one saves what all of them hold.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Mapping[str, Slot],
        held: Sequence[tuple[Optimizer, Collection[str]]],
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._slots = slots
        self._held = held
        self._ranks = ranks

    def shards(self) -> Iterator[Shard]:
        """Yield what this rank saves; together the ranks yield each element once."""
        if self._ranks.first:
            for name, tensor in self._whole().items():
                shape = tuple(tensor.shape)
                yield Shard(name, "", tensor.detach(), shape, Part.whole(shape))
        if not self._ranks.original:
            return
        for name, slot in self._slots.items():
            if slot.owned_numel:
                yield from _shards(name, "", slot, master_of(slot), fresh=is_copied(slot))
            elif not slot.numel and self._ranks.first:
                empty = torch.empty(slot.shape, dtype=slot.flat.layout.master, device="cpu")
                yield Shard(name, "", empty, slot.shape, Part.whole(slot.shape))
        for index, (optimizer, names) in enumerate(self._held):
            for name in names:
                yield from self._optimizer_shards(index, optimizer, self._slots[name])

    def load(self, reader: Reader) -> None:
        """Load what this rank owns, reading nothing else.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        expected = {(name, ""): tuple(t.shape) for name, t in self._whole().items()}
        expected |= {(name, ""): slot.shape for name, slot in self._slots.items()}
        check_fits(
            reader,
            expected,
            {(i, name) for i, (_, names) in enumerate(self._held) for name in names},
        )
        keys = state_keys(reader)
        for index, (_, names) in enumerate(self._held):
            for name in names:
                for key in keys.get((name, index), []):
                    _check_state(reader, self._slots[name], index, key)
        with torch.no_grad():
            for name, tensor in self._whole().items():
                tensor.copy_(reader.read(name))
            for slot in self._slots.values():
                _load_master(reader, slot)
            for index, (optimizer, names) in enumerate(self._held):
                for name in names:
                    self._load_optimizer(
                        reader, keys.get((name, index), []), index, name, optimizer
                    )

    def _whole(self) -> dict[str, Tensor]:
        """Return what every rank holds: buffers, and parameters that lie in no unit."""
        rest = {
            name: parameter
            for name, parameter in named_parameters(self._model).items()
            if name not in self._slots
        }
        return {**rest, **persistent_buffers(self._model)}

    def _optimizer_shards(self, index: int, optimizer: Optimizer, slot: Slot) -> Iterator[Shard]:
        if slot.fragment is None:
            return
        kept = slot.kept
        own = optimizer.state.get(slot.fragment, {}).items() if kept is None else kept.states()
        for key, value in own:
            if not isinstance(value, Tensor):
                continue
            name = f"{index}.{key}"
            if kept is not None and value.dim() == 1:
                yield from self._kept_shards(name, slot, value)
            elif _is_divided(slot) and value.shape == slot.fragment.shape:
                yield from _shards(slot.name, name, slot, slot.share_in_order(value.detach()))
            elif slot.owned[0] == 0:  # the owner of the first element speaks for all
                shape = tuple(value.shape)
                yield Shard(slot.name, name, value.detach(), shape, Part.whole(shape))

    def _kept_shards(self, state: str, slot: Slot, owned: Tensor) -> Iterator[Shard]:
        fresh = slot.kept is not None and not slot.kept.in_memory
        if _is_divided(slot):
            yield from _shards(slot.name, state, slot, owned, fresh=fresh)
        else:
            whole = owned.as_strided(slot.shape, slot.strides)
            yield Shard(slot.name, state, whole, slot.shape, Part.whole(slot.shape), fresh)

    def _load_optimizer(
        self, reader: Reader, keys: Sequence[str], index: int, name: str, optimizer: Optimizer
    ) -> None:
        slot = self._slots[name]
        if slot.fragment is None:
            return
        present = optimizer.state.get(slot.fragment, {})
        loaded: dict[str, Any] = dict(reader.scalars(name, index))
        for key in keys:
            loaded[key] = self._load_tensor(reader, key, index, slot, optimizer, present.get(key))
        if slot.kept is not None:
            slot.kept.set_states(flat_state(slot, loaded))
        elif loaded:
            optimizer.state[slot.fragment] = loaded
        else:
            optimizer.state.pop(slot.fragment, None)

    def _load_tensor(
        self,
        reader: Reader,
        key: str,
        index: int,
        slot: Slot,
        optimizer: Optimizer,
        kept: Any,
    ) -> Tensor:
        state, fragment = f"{index}.{key}", slot.fragment
        if fragment is None:
            raise CheckpointError(f"this rank holds nothing of {slot.name!r}, found state {key!r}")
        shape = reader.shape(slot.name, state)
        scalar = shape == () and key in _SCALARS
        if _is_divided(slot) and shape == slot.shape and not scalar:
            share = torch.empty(slot.owned_numel, dtype=slot.flat.layout.master, device="cpu")
            _read(reader, state, slot, share)
            values = share.as_strided(slot.fragment_shape, slot.fragment_strides)
        else:
            values = reader.read(slot.name, state)
        if slot.kept is not None:
            return values
        if not isinstance(kept, Tensor) or kept.shape != values.shape:
            kept = allocate_state(values, key, fragment, group_of(optimizer, fragment))
        target: Tensor = kept
        return target.copy_(values)


def _check_state(reader: Reader, slot: Slot, index: int, key: str) -> None:
    """Refuse state of whole parameters where ranks own ranges, before any value changes."""
    shape = reader.shape(slot.name, f"{index}.{key}")
    if shape and shape != slot.shape and _is_divided(slot):
        raise CheckpointError(
            f"expected state {key!r} of {slot.name!r} to have the parameter's shape {slot.shape}, "
            f"or none, found {shape}; it belongs to a whole parameter: set partition: parameter, "
            "or take a strategy that has it"
        )


def _is_divided(slot: Slot) -> bool:
    """Return whether ranks own parts of parameters, not whole ones."""
    return slot.flat.layout.cut != "whole"


def _shards(
    name: str, state: str, slot: Slot, owned: Tensor, *, fresh: bool = False
) -> Iterator[Shard]:
    for part, piece in _pieces(slot, owned):
        yield Shard(name, state, piece, slot.shape, part, fresh)


def _load_master(reader: Reader, slot: Slot) -> None:
    if slot.owned_numel:
        kept = slot.kept is not None and slot.kept.master
        dtype = slot.flat.layout.master if kept else slot.flat.share.dtype
        values = torch.empty(slot.owned_numel, dtype=dtype, device="cpu")
        _read(reader, "", slot, values)
        set_master(slot, values)


def _read(reader: Reader, state: str, slot: Slot, owned: Tensor) -> None:
    """Fill the owned range of a parameter from a checkpoint."""
    if slot.contiguous:
        if slot.owned_numel:
            owned.copy_(reader.read(slot.name, state, Part.range_of(slot.shape, *slot.owned)))
        return
    for part, piece in _pieces(slot, owned, copy=False):
        piece.copy_(reader.read(slot.name, state, part))


def _pieces(slot: Slot, owned: Tensor, *, copy: bool = True) -> Iterator[tuple[Part, Tensor]]:
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
