"""Compares the bytes that a rank will keep with the room of the machine, before laying out."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from drivetrain.collectives.facts import gather_facts
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.errors import PreflightError
from drivetrain.log import get_logger
from drivetrain.parts.naming import named_parameters
from drivetrain.registry import stores
from drivetrain.runtime.room import device_room, disk_room, host_room
from drivetrain.runtime.world import World
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.options import OffloadOptions
from drivetrain.store import SteppingStore
from drivetrain.strategy import Run
from drivetrain_offload.tier_bytes import TIERS, Tier, TierBytes, TierChoice, TierPlan, held

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
            rows.append([kind, *(_size(self.needed[tier][kind]) for tier in used)])
        ranks = "together" if self.sharing == 1 else f"together, {self.sharing} ranks of a host"
        rows.append([ranks, *(_size(self.total(tier)) for tier in used)])
        rooms = (self.room.get(tier) for tier in used)
        rows.append(["there is", *("unknown" if n is None else _size(n) for n in rooms)])
        return "\n".join(_aligned(rows))

    def shortages(self) -> list[str]:
        """Return a sentence for each tier with too little room: needed, found, the way out."""
        return [
            f"{self._name(tier)}: expected at least {self._needs(tier)}, found "
            f"{_size(self.room[tier])}; {self._way_out(tier)}"
            for tier in self.used
            if self.total(tier) > self.room.get(tier, self.total(tier))
        ]

    def check(self) -> None:
        """Refuse a model that does not fit.

        Raises:
            PreflightError: names the bytes needed in each tier, and the way out.
        """
        shortages = self.shortages()
        if shortages:
            raise PreflightError("\n".join(shortages))

    def _way_out(self, tier: Tier) -> str:
        moved = self.needed["disk"].total() and not self.needed["host"]["optimizer"]
        return _WAY_OUT_BESIDE_DISK if tier == "host" and moved else _WAYS_OUT[tier]

    def _name(self, tier: Tier) -> str:
        return f"{_NAMES[tier]} of {self.path}" if tier == "disk" and self.path else _NAMES[tier]

    def _needs(self, tier: Tier) -> str:
        kinds = ", ".join(f"{kind} {_size(n)}" for kind, n in self.needed[tier].most_common())
        many = tier != "device" and self.sharing > 1
        each = f", each of {self.sharing} ranks of this host" if many else ""
        return f"{_size(self.total(tier))} ({kinds}{each})"


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
    units: Sequence[UnitLayout],
    run: Run,
    *,
    rank: int,
    lent: int,
) -> TierPlan:
    """Describe a model that was not laid out yet; arguments as in ``Home.announce``."""
    parameters = named_parameters(model)
    spec = ModelSpec(
        tuple(TensorSpec.of(name, parameter) for name, parameter in parameters.items()),
        tuple(TensorSpec.of(name, buffer) for name, buffer in model.named_buffers()),
        module=model,
    )
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = {
        names[id(parameter)]: _states(optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }
    return TierPlan(
        model=spec, units=units, precision=run.precision, rank=rank, states=states, lent=lent
    )


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
    )


def held_by_kind(plan: TierPlan, options: OffloadOptions, world: World) -> dict[str, int]:
    """Return the bytes that a rank keeps between steps, by kind.

    The name of a kind says where the bytes lie, if they do not lie on the device.
    """
    ends: dict[Tier, str] = {"device": "", "host": " in host memory", "disk": " on disk"}
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


def _states(optimizer: Optimizer, group: Mapping[str, object]) -> int:
    """Return how many tensors like itself an optimizer keeps for a parameter of a group."""
    if isinstance(optimizer, SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, Adagrad):
        return 1
    if isinstance(optimizer, Adam):  # and AdamW
        return 3 if group["amsgrad"] else 2
    return 2  # unknown: most keep two moments


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


def _size(nbytes: int) -> str:
    """Return a number of bytes with a unit in which it has few digits."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}" if nbytes else "-"
