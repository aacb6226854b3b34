"""Weights of products in fp8, gathered in 8 bits: the same products, from fewer bytes.

The bytes are those that a product makes of the whole weight: a rank casts its share with the scale
of all shares. Every rank writes values in the dtype of forward in their places, which a product
casts to the same bytes again, with the same scale: the largest magnitude comes back exactly, and
each of the others closer to the value of its byte than to that of another::

    master -> value in forward -> largest of all ranks -> scale -> byte -> gather -> value
"""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.communicator import Deferred
from drivetrain.model.fp8 import FP8, LEAST_LARGEST
from drivetrain.parallel.layout import ParameterSlot
from drivetrain.parallel.unit import FlatParameter

_MOST = torch.finfo(FP8).max


class Weight(NamedTuple):
    """A weight that is gathered in 8 bits, and its place."""

    flat: FlatParameter
    slot: ParameterSlot


class Largest:
    """The largest magnitudes of all weights of a model that are gathered in 8 bits.

    The ranks find them together at the first gather of each forward: between two forwards a script
    may change its fragments, as schedule-free optimizers do, and nobody is told.
    """

    def __init__(self) -> None:
        self._weights: list[Weight] = []
        self._found: dict[Weight, Tensor] = {}

    def watch(self, weights: Sequence[Weight]) -> None:
        """Find those of more weights, too."""
        self._weights += weights

    def forget(self) -> None:
        """Let the next gather find them again."""
        self._found = {}

    def of(self, weights: Sequence[Weight], communicator: Communicator) -> list[Tensor]:
        """Return those of some weights, in fp32. Collective, the first time.

        Args:
            weights: some of those that are watched.
            communicator: the ranks that share all of them.
        """
        if not self._found:
            self._find(communicator)
        return [self._found[weight] for weight in weights]

    @torch.no_grad()
    def _find(self, communicator: Communicator) -> None:
        owned = [weight.slot.owned_numel > 0 for weight in self._weights]
        mine = itertools.compress(self._weights, owned)
        shares = [weight.flat.shard.read(weight.slot) for weight in mine]
        norms = iter(torch._foreach_norm(shares, ord=math.inf) if shares else ())
        none = torch.zeros((), device=self._weights[0].flat.values.device)
        found = torch.stack([next(norms).float() if one else none for one in owned])
        label = "largest magnitudes of weights in fp8"
        communicator.all_reduce(found, reduction="max", label=label).wait()
        # Rounded after the maximum: the largest is so in the dtype of forward, too.
        dtypes = [weight.flat.layout.dtype for weight in self._weights]
        rounded = {dtype: found.to(dtype).float().unbind() for dtype in set(dtypes)}
        for index, (weight, dtype) in enumerate(zip(self._weights, dtypes, strict=True)):
            self._found[weight] = rounded[dtype][index]


class GatherInBytes:
    """The gathers of one unit, some of whose weights cross in 8 bits.

    Args:
        flats: the unit's flat tensors.
        names: of these weights, and perhaps of others.
        communicator: the ranks that share the unit.
        largest: finds their scales.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameter],
        names: Collection[str],
        communicator: Communicator,
        largest: Largest,
    ) -> None:
        self._communicator = communicator
        self._largest = largest
        weights = [Weight(flat, slot) for flat in flats for slot in flat.slots]
        self._weights = [each for each in weights if each.slot.name in names]
        largest.watch(self._weights)
        self._bytes = {
            weight: weight.flat.values.new_empty(weight.slot.numel, dtype=FP8)
            for weight in self._weights
        }
        self._flats = list(flats)
        self._parts: list[list[Tensor]] = []  # views need memory: the first gather makes them
        self._resize(whole=False)

    def gather(self, label: str) -> Handle:
        """Start to gather the values, of which this rank's share is in its place."""
        largest = self._largest.of(self._weights, self._communicator)
        self._resize(whole=True)
        self._encode(largest)
        self._parts = self._parts or self._cut()
        arrival = self._communicator.gather_parts(self._parts, label=label)
        return Deferred(lambda: self._finish(arrival, largest))

    def _cut(self) -> list[list[Tensor]]:
        """Return what each rank sends: bytes, or values where weights do not cross in 8 bits."""
        parts: list[list[Tensor]] = [[] for _ in range(self._communicator.size)]
        for flat in self._flats:
            for place, slot in zip(flat.layout.places, flat.slots, strict=True):
                sent = self._bytes.get(Weight(flat, slot), flat.values[slot.span])
                for rank, mine in enumerate(parts):
                    start, stop = place.shares[rank]
                    if start < stop:
                        mine.append(sent[start:stop])
        return parts

    def _finish(self, arrival: Handle, largest: list[Tensor]) -> None:
        arrival.wait()
        self._decode(largest)
        self._resize(whole=False)

    @torch.no_grad()
    def _encode(self, largest: list[Tensor]) -> None:
        # In fp64, as torchao does: there, eager and compiled divisions are equal.
        scales = _MOST / torch.stack(largest).double().clamp(min=LEAST_LARGEST)
        for (weight, sent), scale in zip(self._bytes.items(), scales.float().unbind(), strict=True):
            scaled = weight.flat.values[weight.slot.own].float() * scale
            sent[slice(*weight.slot.owned)] = scaled.clamp_(-_MOST, _MOST)

    @torch.no_grad()
    def _decode(self, largest: list[Tensor]) -> None:
        # A little below the least, so that none is rounded to above it and to another scale.
        factors = torch.stack(largest).clamp(min=0.99 * LEAST_LARGEST)
        for (weight, sent), factor in zip(self._bytes.items(), factors.unbind(), strict=True):
            # The largest must become one: so it does by the reciprocal, too, as CUDA divides.
            weight.flat.values[weight.slot.span].copy_(sent).div_(_MOST).mul_(factor)

    def _resize(self, *, whole: bool) -> None:
        for one in self._bytes.values():
            one.untyped_storage().resize_(one.numel() if whole else 0)
