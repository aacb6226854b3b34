"""Bytes that a rank keeps between steps on the device, in host memory and on a disk: arithmetic.

Per parameter that is trained, with optimizer state in a store:

=========== ======================================= ==============================================
kind        how much                                where
=========== ======================================= ==============================================
parameters  whole, or this rank's share             the device; shares in the store of parameters,
            where they are divided                  if there is one
masters     this rank's share, where a master is    the store of the optimizer
            not the parameter itself
optimizer   this rank's share of every state        the store of the optimizer
gradients   this rank's share                       host memory; also whole on the device where
                                                    they are kept whole during a window
=========== ======================================= ==============================================

A master is the parameter itself where both have one dtype and the device is the host itself, unless
updates are taken over late: their results wait in host memory, too, with the gradients that they
come from.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from drivetrain.cost import ModelSpec
from drivetrain.runtime.precision import Precision
from drivetrain.sharding.layout import FlatLayout, UnitLayout

Tier: TypeAlias = Literal["device", "host", "disk"]
"""A kind of memory; the host's is not called device where it is both."""

TierBytes: TypeAlias = dict[Tier, Counter[str]]
"""Bytes by tier and kind."""

Line: TypeAlias = tuple[Tier, str, int]
"""Tier, kind and bytes."""

TIERS: tuple[Tier, ...] = ("device", "host", "disk")


@dataclass(frozen=True, kw_only=True, slots=True)
class TierChoice:
    """The choice of a tier for each kind of state.

    Attributes:
        device: of whole parameters and of units in use; ``host`` on ranks without an accelerator.
        optimizer: of masters and states in the store of the optimizer.
        parameters: of this rank's share of divided parameters, if a store keeps them.
        ratio: the share of parameters whose state stores keep, in whole units.
        delayed: whether updates are taken over a step late.
    """

    device: Tier
    optimizer: Tier
    parameters: Tier | None = None
    ratio: float = 1.0
    delayed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """A model as one rank keeps it.

    Attributes:
        model: its parameters and buffers.
        units: its units.
        precision: dtypes of gradients.
        rank: this rank among the ranks of a unit.
        states: how many tensors of its size an optimizer keeps for a parameter, by name; 0 where
            there is no name.
        lent: bytes of the buffers that gradients pass through; 0 where whole gradients are kept.
    """

    model: ModelSpec
    units: Sequence[UnitLayout]
    precision: Precision
    rank: int
    states: Mapping[str, int]
    lent: int


def held(plan: TierPlan, tiers: TierChoice) -> TierBytes:
    """Return the bytes that one rank keeps between steps, and of one unit in use."""
    placed = {place.name for unit in plan.units for place in unit.places}
    rest = sum(spec.nbytes for spec in plan.model.parameters if spec.name not in placed)
    total: TierBytes = {tier: Counter() for tier in TIERS}
    device = total[tiers.device]
    device["parameters"] += rest
    device["buffers"] += sum(spec.nbytes for spec in plan.model.buffers)
    device["buffers of gradients"] += plan.lent
    device["largest unit in use"] += max(
        (unit.nbytes for unit in plan.units if unit.sharded), default=0
    )
    chosen = offloaded(plan.units, tiers.ratio)
    for index, unit in enumerate(plan.units):
        for flat in unit.flats:
            account = _Account(plan, tiers, flat, sharded=unit.sharded)
            for tier, kind, nbytes in account.lines(offloaded=index < chosen):
                total[tier][kind] += nbytes
    return {tier: Counter({k: n for k, n in kinds.items() if n}) for tier, kinds in total.items()}


def offloaded(units: Sequence[UnitLayout], ratio: float) -> int:
    """Return of how many units stores keep the state: the first ones, which forward needs last.

    Args:
        units: in the order in which backward usually reaches them.
        ratio: of the trained parameters; with 1, also of frozen ones, which may train later.
    """
    if ratio == 1 or not units:
        return len(units)
    numels = [sum(flat.numel for flat in unit.trainable) for unit in units]
    before = itertools.accumulate(numels[:-1], initial=0)
    wanted = math.ceil(ratio * sum(numels))
    return sum(sum_before < wanted for sum_before in before)


class _Account:
    """The bytes of one flat tensor, tier by tier.

    Args:
        plan: the model.
        tiers: the tier of each kind of state.
        flat: the layout of the tensor.
        sharded: whether the values are freed between uses.
    """

    def __init__(
        self, plan: TierPlan, tiers: TierChoice, flat: FlatLayout, *, sharded: bool
    ) -> None:
        self._plan = plan
        self._tiers = tiers
        self._flat = flat
        self._sharded = sharded
        self._owned = flat.owned(plan.rank)
        self._wire = plan.precision.reduce_dtype(flat.dtype)
        self._total = plan.precision.accumulate_dtype(flat.dtype)

    def lines(self, *, offloaded: bool) -> list[Line]:
        """Return its bytes.

        Args:
            offloaded: whether a store keeps the state of its optimizer.
        """
        if not self._flat.trainable:
            return self._frozen_in_store() if self._stored else self._values_on_device()
        whole = 0 if self._plan.lent else self._flat.numel * self._wire.itemsize
        gradients = (self._tiers.device, "gradients", whole)
        return [gradients, *(self._in_stores() if offloaded else self._on_device())]

    def _frozen_in_store(self) -> list[Line]:
        share = self._owned * self._flat.dtype.itemsize
        return [(self._stored or self._tiers.device, "parameters", share)]

    def _in_stores(self) -> list[Line]:
        tiers, flat, owned = self._tiers, self._flat, self._owned
        values = owned if self._sharded else flat.numel
        dtype = flat.master if self._is_master else flat.dtype
        masters = 0 if self._is_master else owned * flat.master.itemsize
        # Without an accelerator a share of a whole buffer can be read where it is.
        there = tiers.device == "host" and self._in_whole_buffer
        # The first gradient of a window waits as it came when the master is not the parameter.
        kept = self._total if self._is_master else self._wire
        gradients, late = owned * kept.itemsize, owned * flat.dtype.itemsize
        return [
            (self._stored or tiers.device, "parameters", values * dtype.itemsize),
            (tiers.optimizer, "masters", masters),
            (tiers.optimizer, "optimizer", self._state_bytes()),
            ("host", "gradients", 0 if there else gradients),
            ("host", "late updates", gradients + late if tiers.delayed else 0),
        ]

    def _on_device(self) -> list[Line]:
        flat, owned, device = self._flat, self._owned, self._tiers.device
        same = self._total is flat.master
        # Fragments of another dtype have gradients of their own.
        each = self._total.itemsize + (0 if same else flat.master.itemsize)
        gradients = 0 if self._in_whole_buffer and same else owned * each
        return [
            *self._values_on_device(),
            (device, "optimizer", self._state_bytes()),
            (device, "gradients", gradients),
        ]

    def _values_on_device(self) -> list[Line]:
        flat, device = self._flat, self._tiers.device
        shard = self._owned * flat.master.itemsize
        if self._sharded:
            return [(device, "parameters", shard)]
        has_master = flat.master is not flat.dtype
        return [
            (device, "parameters", flat.nbytes),
            (device, "masters", shard if has_master else 0),
        ]

    @property
    def _stored(self) -> Tier | None:
        """Where a store keeps this rank's share of the values; None: no store does."""
        return self._tiers.parameters if self._sharded else None

    @property
    def _is_master(self) -> bool:
        """Whether the parameters themselves are stepped, at their place between uses."""
        tiers = self._tiers
        if self._stored is not None or tiers.device != "host" or tiers.delayed:
            return False
        # The shard of what is freed may as well have the dtype of the master.
        freely = self._sharded and tiers.optimizer == "host"
        return freely or self._flat.master is self._flat.dtype

    @property
    def _in_whole_buffer(self) -> bool:
        """Whether this rank's share of gradients is a part of a buffer that is kept whole."""
        in_order = self._wire is self._total and len(self._flat.pieces(self._plan.rank)) <= 1
        return in_order and not self._plan.lent

    def _state_bytes(self) -> int:
        elements = 0
        for place in self._flat.places:
            start, stop = place.shares[self._plan.rank]
            elements += self._plan.states.get(place.name, 0) * (stop - start)
        return elements * self._flat.master.itemsize
