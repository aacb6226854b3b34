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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn
from torch.optim import Optimizer

from drivetrain.collectives.facts import gather_facts
from drivetrain.cost import DISK, HOST, ModelSpec, TensorSpec, states_of
from drivetrain.errors import PreflightError
from drivetrain.hardware.sizes import size_text
from drivetrain.log import get_logger
from drivetrain.memory import device_room, disk_room, host_room
from drivetrain.model.modules import named_parameters
from drivetrain.parallel.estimate import Estimate, FlatBytes
from drivetrain.parallel.layout import FlatLayout, UnitLayout
from drivetrain.parallel.options import OffloadOptions
from drivetrain.registry import stores
from drivetrain.runtime.world import World
from drivetrain.store import SteppingStore
from drivetrain.strategy import Run

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
        in_backward: whether they begin in backward.
    """

    device: Tier
    optimizer: Tier
    parameters: Tier | None = None
    ratio: float = 1.0
    delayed: bool = False
    in_backward: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """A model as one rank keeps it.

    Attributes:
        model: its parameters and buffers.
        estimate: its units, this rank, and dtypes of gradients.
        states: how many tensors of its size an optimizer keeps for a parameter, by name; 0 where
            there is no name.
        lent: bytes of the buffers that gradients pass through; 0 where whole gradients are kept.
    """

    model: ModelSpec
    estimate: Estimate
    states: Mapping[str, int]
    lent: int


def held(plan: TierPlan, tiers: TierChoice) -> TierBytes:
    """Return the bytes that one rank keeps between steps, and of one unit in use."""
    units, total = plan.estimate.units, {tier: Counter[str]() for tier in TIERS}
    device = total[tiers.device]
    device.update(plan.estimate.beside(plan.model))
    device["buffers of gradients"] += plan.lent
    device["largest unit in use"] += max((unit.nbytes for unit in units if unit.sharded), default=0)
    chosen, values = offloaded(units, tiers.ratio), list[int]()
    for index, unit in enumerate(units):
        for flat in unit.flats:
            account = _Account(plan, tiers, flat, sharded=unit.sharded)
            if flat.trainable and index < chosen:
                values.append(account.owned * flat.dtype.itemsize)
            for tier, kind, nbytes in account.lines(offloaded=index < chosen):
                total[tier][kind] += nbytes
    if tiers.device == "device":
        # A buffer for each size: updates come one after the other. Those that begin in backward may
        # all wait for the step, and late ones are counted.
        waiting = values if tiers.in_backward else set(values)
        total["host"]["values on their way"] += 0 if tiers.delayed else sum(waiting)
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


class _Account(FlatBytes):
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
        super().__init__(plan.estimate, flat, sharded=sharded, lent=bool(plan.lent))
        self._states = plan.states
        self._tiers = tiers

    def lines(self, *, offloaded: bool) -> list[Line]:
        """Return its bytes.

        Args:
            offloaded: whether a store keeps the state of its optimizer.
        """
        device, stored = self._tiers.device, self._stored
        if self.flat.trainable and offloaded:
            return [(device, "gradients", self.whole), *self._in_stores()]
        if not self.flat.trainable and stored is not None:
            return [(stored, "parameters", self.owned * self.flat.dtype.itemsize)]
        kinds = self.on_device(self._states).items()
        return [(device, "gradients" if kind == "lent" else kind, n) for kind, n in kinds]

    def _in_stores(self) -> list[Line]:
        tiers, flat, owned = self._tiers, self.flat, self.owned
        values = owned if self.sharded else flat.numel
        dtype = flat.master if self._is_master else flat.dtype
        masters = 0 if self._is_master else owned * flat.master.itemsize
        # Without an accelerator a share of a whole buffer can be read where it is.
        there = tiers.device == "host" and self.in_whole_buffer
        # The first gradient of a window waits as it came when the master is not the parameter.
        kept = self.total if self._is_master else self.wire
        gradients, late = owned * kept.itemsize, owned * flat.dtype.itemsize
        return [
            (self._stored or tiers.device, "parameters", values * dtype.itemsize),
            (tiers.optimizer, "masters", masters),
            (tiers.device, "masters", self._beside()),
            (tiers.optimizer, "optimizer", self.state_bytes(self._states)),
            ("host", "gradients", 0 if there else gradients),
            ("host", "late updates", gradients + late if tiers.delayed else 0),
        ]

    def _beside(self) -> int:
        """Return the bytes of this rank's share beside values that stay whole, out of stores."""
        flat, tiers = self.flat, self._tiers
        if self._is_master:
            return self.owned * flat.master.itemsize if self.has_masters else 0
        in_memory = tiers.device == tiers.optimizer == "host" and not tiers.delayed
        return self.owned * flat.dtype.itemsize if self.apart and not in_memory else 0

    @property
    def _stored(self) -> Tier | None:
        """Where a store keeps this rank's share of the values; None: no store does."""
        return self._tiers.parameters if self.sharded else None

    @property
    def _is_master(self) -> bool:
        """Whether the parameters themselves are stepped, at their place between uses."""
        tiers = self._tiers
        apart = tiers.delayed or tiers.in_backward
        if self._stored is not None or tiers.device != "host" or apart:
            return False
        # The shard of what is freed may as well have the dtype of the master.
        freely = self.sharded and tiers.optimizer == "host"
        return freely or self.flat.master is self.flat.dtype


# --- compares the bytes that a rank will keep with the room of the machine, before laying out ---


Store: TypeAlias = SteppingStore | type[SteppingStore]
"""A store that steps, or the class: both know whether kept tensors lie in memory."""

_NAMES: Mapping[Tier, str] = {"device": "the device", "host": "host memory", "disk": "the disk"}

_WAYS_OUT: Mapping[Tier, str] = {
    "device": "divide the model over more ranks, name a store in offload.params where the strategy "
    "divides parameters, or raise offload.ratio where it is below 1",
    "host": "name a store on a disk in offload.optimizer (and in offload.params), such as nvme, "
    "take more hosts, or lower offload.ratio where the device has room",
    "disk": "make room there, name another directory in offload.path, take more hosts, or lower "
    "offload.ratio where memory has room",
}

_WAY_OUT_BESIDE_DISK = (
    "name the store on the disk in offload.params, too, where the strategy divides parameters, "
    "run fewer ranks on a host, or take more hosts"
)
"""For host memory, where a store on a disk has the optimizer's state already."""

_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """The bytes that a rank keeps between steps, by tier, and the room of each tier.

    Attributes:
        needed: bytes of one rank, by tier and kind.
        room: bytes of each tier, for all ranks that share the tier; absent where unknown.
        sharing: how many ranks share host memory and disk.
        path: the directory on the disk.
    """

    needed: TierBytes
    room: Mapping[Tier, int]
    sharing: int = 1
    path: str = ""

    @property
    def used(self) -> list[Tier]:
        """The tiers that something lies on."""
        return [tier for tier in TIERS if self.needed[tier]]

    def total(self, tier: Tier) -> int:
        """Return the bytes that the ranks that share a tier need there."""
        return self.needed[tier].total() * (1 if tier == "device" else self.sharing)

    def describe(self) -> str:
        """Return a table: a line for each kind, a column for each tier."""
        used = self.used
        kinds = dict.fromkeys(kind for tier in used for kind in self.needed[tier])
        rows = [["bytes of one rank", *used]]
        for kind in kinds:
            counts = (self.needed[tier][kind] for tier in used)
            rows.append([kind, *(size_text(count) if count else "-" for count in counts)])
        ranks = "together" if self.sharing == 1 else f"together, {self.sharing} ranks of a host"
        rows.append([ranks, *(size_text(self.total(tier)) for tier in used)])
        rooms = (self.room.get(tier) for tier in used)
        rows.append(["there is", *("unknown" if n is None else size_text(n) for n in rooms)])
        return "\n".join(_aligned(rows))

    def shortages(self) -> list[str]:
        """Return a sentence for each tier with too little room: needed, found, the way out."""
        return [
            f"{self._name(tier)}: expected at least {self._needs(tier)}, found "
            f"{size_text(self.room[tier])}; {self._way_out(tier)}"
            for tier in self.used
            if self.total(tier) > self.room.get(tier, self.total(tier))
        ]

    def _way_out(self, tier: Tier) -> str:
        moved = self.needed["disk"].total() and not self.needed["host"]["optimizer"]
        return _WAY_OUT_BESIDE_DISK if tier == "host" and moved else _WAYS_OUT[tier]

    def _name(self, tier: Tier) -> str:
        return f"{_NAMES[tier]} of {self.path}" if tier == "disk" and self.path else _NAMES[tier]

    def _needs(self, tier: Tier) -> str:
        kinds = ", ".join(f"{kind} {size_text(n)}" for kind, n in self.needed[tier].most_common())
        many = tier != "device" and self.sharing > 1
        each = f", each of {self.sharing} ranks of this host" if many else ""
        return f"{size_text(self.total(tier))} ({kinds}{each})"


def announce_tiers(
    plan: TierPlan, options: OffloadOptions, opened: Mapping[str, Store], run: Run
) -> None:
    """Show the table of tiers, and refuse a model that does not fit. Collective over ``dp``.

    To be called before the model is laid out: its memory counts as free, to be used again.

    Raises:
        PreflightError: on every rank, where a rank has too little.
    """
    chosen = tiers_of(options, opened, run.world)
    needed = held(plan, chosen)
    needed["host"]["buffers of stores"] += opened[options.optimizer].working_bytes
    room = _room(plan.model.module, chosen, options.path, run.world)
    tiers = Tiers(needed=needed, room=room, sharing=run.world.local_size, path=options.path)
    _logger.announce(f"what lies where between steps:\n{tiers.describe()}")
    mine = "\n".join(tiers.shortages())
    # Nobody takes memory before all have looked, and nobody waits for a rank that has given up.
    told = gather_facts(mine, str, doing="the look for room", group=run.mesh["dp"])
    found = [text for text in told if text]
    if found:
        raise PreflightError(mine or found[0])


def plan_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    estimate: Estimate,
    *,
    lent: int,
) -> TierPlan:
    """Describe a model that was not laid out yet; arguments as in ``OptimizerBackend.announce``."""
    parameters = named_parameters(model)
    spec = ModelSpec(
        tuple(TensorSpec.of(name, parameter) for name, parameter in parameters.items()),
        tuple(TensorSpec.of(name, buffer) for name, buffer in model.named_buffers()),
        module=model,
    )
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = {
        names[id(parameter)]: states_of(optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }
    return TierPlan(model=spec, estimate=estimate, states=states, lent=lent)


def tiers_of(options: OffloadOptions, opened: Mapping[str, Store], world: World) -> TierChoice:
    """Return the tier of each kind of state; stores are given by name."""

    def tier(name: str) -> Tier:
        return "host" if opened[name].in_memory else "disk"

    device: Tier = "host" if world.device.type == "cpu" else "device"
    parameters = tier(options.params) if options.params else None
    return TierChoice(
        device=device,
        optimizer=tier(options.optimizer),
        parameters=None if parameters == device else parameters,  # they are there already
        ratio=options.ratio,
        delayed=options.delayed,
        in_backward=options.in_backward,
    )


def held_by_kind(plan: TierPlan, options: OffloadOptions, world: World) -> dict[str, int]:
    """Return the bytes that a rank keeps between steps, by kind.

    The name of a kind says where the bytes lie, if they do not lie on the device.
    """
    ends: dict[Tier, str] = {"device": "", "host": HOST, "disk": DISK}
    if world.device.type == "cpu":
        ends["host"] = ""  # host memory is the device's
    kinds = {name: stores().load(name) for name in {options.optimizer, options.params} - {""}}
    total: Counter[str] = Counter()
    for tier, held_there in held(plan, tiers_of(options, kinds, world)).items():
        for kind, nbytes in held_there.items():
            total[kind + ends[tier]] += nbytes
    del total["largest unit in use"]  # which is freed between steps
    total["buffers of stores" + ends["host"]] += kinds[options.optimizer].working_bytes
    return dict(total)


def _room(model: nn.Module | None, tiers: TierChoice, path: str, world: World) -> dict[Tier, int]:
    """Return the room of each tier, with the room that the model takes now."""
    ranks = world.local_size
    room: dict[Tier, int] = {"host": host_room() + ranks * _present(model, "cpu")}
    if tiers.device == "device":
        free = device_room(world.device)
        if free is not None:
            room["device"] = free + _present(model, world.device.type)
    if path:
        room["disk"] = disk_room(path)
    return room


def _present(model: nn.Module | None, device_type: str) -> int:
    """Return the bytes of memory that a model takes on a kind of device."""
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == device_type
    }
    return sum(storages.values())


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells])
