"""The cost of dividing a model in units, from the same plan of units as training.

With P parameter elements, N ranks, f = (N-1)/N and A micro-batches per step, in elements:

========================= ==================  ==========================================
divided                   sent per step       held
========================= ==================  ==========================================
optimizer states          f P + f P           P + P gradients + states P/N
and gradients             A f P + f P         P + P/N gradients + states P/N
and parameters            A (f P + 2 f P)     P/N + P/N gradients + states P/N
========================= ==================  ==========================================

With R replicas of N ranks, a rank also sends 2 (R-1)/R P/N to them, once per step.

With secondary shards on H hosts of k ranks, a rank holds P/k more. It gathers over the k ranks of
its host, and sends (H-1)/H P/k of new values to other hosts, once per step.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from torch import nn

from drivetrain.collectives import Route, chunk_bounds
from drivetrain.collectives.volume import FlatSlice, SlicesByRank
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.errors import ConfigError
from drivetrain.model.modules import clean_name, named_parameters
from drivetrain.parallel.layout import (
    ROOT,
    FlatLayout,
    UnitLayout,
    flat_slices_of,
    is_block,
    offsets_in_bytes,
    owned_by_all,
)
from drivetrain.parallel.options import UnitsOptions
from drivetrain.parallel.unit import SecondaryLines
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.precision import Precision
from drivetrain.simulator.contract import Sharing
from drivetrain.simulator.step import Stored, Tier

_ADAM_STATES = 2
"""An optimizer with this many states is Adam, which also counts steps per fragment."""


KINDS = ("parameters", "secondary", "masters", "gradients", "lent", "optimizer", "buffers")
"""Of bytes that a rank keeps between steps."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The ranks that a cost is about: see ``drivetrain.parallel.placement.Ranks``."""

    everyone: Route
    sharing: Route
    replicas: Route | None = None
    secondary: SecondaryLines | None = None


@dataclass(frozen=True, slots=True)
class Regather:
    """How units that are freed after forward come back for backward.

    Attributes:
        over: the ranks that they are gathered over.
        times: how often each unit is gathered after the first time, by its key.
    """

    over: Axis
    times: Mapping[str, int]


class FlatBytes:
    """The bytes of one flat tensor that a rank keeps on its device between steps.

    Args:
        flat: the layout of the tensor.
        rank: this rank among those that share it.
        precision: dtypes of gradients.
        sharded: whether the values are freed between uses.
        lent: whether gradients pass through buffers that are lent; else whole ones are kept.
        apart: whether owners keep values apart from gathered ones.
    """

    def __init__(
        self,
        flat: FlatLayout,
        rank: int,
        precision: Precision,
        *,
        sharded: bool,
        lent: bool,
        apart: bool = False,
    ) -> None:
        self.flat, self.rank, self.sharded = flat, rank, sharded
        self.owned = flat.owned(rank)
        self.wire = precision.reduce_dtype(flat.dtype)
        self.total = precision.accumulate_dtype(flat.dtype)
        self.whole = 0 if lent else flat.numel * self.wire.itemsize
        # Whether gradients of the share are views of the whole ones, which lie in one piece.
        in_order = self.wire is self.total and len(flat.pieces(rank)) <= 1
        self.in_whole_buffer = in_order and not lent
        separate = apart or flat.master is not flat.dtype or len(flat.pieces(rank)) > 1
        self._has_masters = not sharded and separate  # as OptimizerBackend.shard decides

    def on_device(self, states: Mapping[str, int]) -> Mapping[str, int]:
        """Return bytes by kind, where no store has any; ``lent``: whole gradients beside a share.

        Args:
            states: how many tensors of its size an optimizer keeps for a parameter, by name.
        """
        flat, shard = self.flat, self.owned * self.flat.master.itemsize
        held = {
            "parameters": shard if self.sharded else flat.nbytes,
            "masters": shard if self._has_masters else 0,
        }
        if flat.trainable:
            held["optimizer"] = self.state_bytes(states)
            if self.in_whole_buffer and self.total is flat.master:
                held["gradients"] = self.whole
            else:  # fragments of another dtype have gradients of their own
                converted = 0 if self.total is flat.master else shard
                held["gradients"] = self.owned * self.total.itemsize + converted
                held["lent"] = self.whole
        return held

    def state_bytes(self, states: Mapping[str, int]) -> int:
        """Return the bytes of the share's optimizer state."""
        elements = 0
        for place in self.flat.places:
            start, stop = place.shares[self.rank]
            elements += states.get(place.name, 0) * (stop - start)
        return elements * self.flat.master.itemsize


class Estimate:
    """Adds up the units of one rank.

    Args:
        units: the plan.
        precision: dtypes of gradients.
        lines: the ranks.
        in_bytes: names of the weights that are gathered in fp8 where their units are sharded.
    """

    def __init__(
        self,
        units: Sequence[UnitLayout],
        precision: Precision,
        lines: Lines,
        in_bytes: Collection[str] = (),
    ) -> None:
        self.units = units
        places = (place for unit in units if unit.sharded for place in unit.places)
        self._in_bytes = {place.name for place in places} & set(in_bytes)
        self._trainable = [unit for unit in units if unit.trainable]
        self._precision = precision
        self._lines = lines
        self.rank = lines.sharing.axis.rank

    def sent(
        self,
        *,
        reductions: int,
        gathers: int,
        buffers: Iterable[TensorSpec],
        regather: Regather | None = None,
    ) -> dict[tuple[str, str], int]:
        """Return the bytes of one optimizer step by (axis, operation).

        Args:
            reductions: backwards per step that reduce gradients.
            gathers: how often sharded units are gathered for a forward.
            buffers: those that are sent around after each of these backwards.
            regather: how they come back for backward; None: they were not freed.
        """
        lines, sent = self._lines, Counter[tuple[str, str]]()
        for unit in self.units:
            again = 0 if regather is None else regather.times.get(unit.key, 0)
            if unit.sharded and lines.secondary is not None:
                add(sent, self._gather_inside(unit, lines.secondary), gathers * (1 + again))
                add(sent, self._refresh(unit, lines.secondary), 1)
            elif unit.sharded or unit.trainable:
                add(sent, self._gather(unit), gathers if unit.sharded else 1)
                if unit.sharded and regather is not None:
                    add(sent, self._regather(unit, regather.over), gathers * again)
        add(sent, Route(lines.sharing.axis).all_reduced(len(self._in_bytes), 4), gathers)
        for unit in self._trainable:
            add(sent, self._reduce(unit), reductions)
            if lines.replicas is not None:
                sent += self._cross(unit, lines.replicas)
        flags = sum(len(flat.places) for unit in self._trainable for flat in unit.trainable)
        agreements = reductions if lines.replicas is None else 1
        # A maximum takes one ring, also over hosts.
        add(sent, Route(lines.everyone.axis).all_reduced(flags, 1), agreements)
        add(sent, lines.everyone.broadcast(sum(spec.nbytes for spec in buffers)), reductions)
        return {key: nbytes for key, nbytes in sent.items() if nbytes}

    def held(self, model: ModelSpec, *, lent_buffers: int) -> dict[str, int]:
        """Return the bytes between steps by kind.

        Args:
            model: parameters, buffers and states.
            lent_buffers: how many buffers gradients pass through; 0 keeps whole gradients.

        Returns:
            ``lent`` are buffers that gradients pass through, besides those that fragments have.
        """
        placed = {place.name for unit in self.units for place in unit.places}
        rest = sum(spec.nbytes for spec in model.parameters if spec.name not in placed)
        states = {spec.name: model.states for spec in model.parameters}
        total = Counter(
            parameters=rest,
            gradients=self._kept_back(),
            lent=lent_buffers * self.lent_bytes(),
            buffers=sum(spec.nbytes for spec in model.buffers),
        )
        lent, apart = lent_buffers > 0, self._lines.sharing.owns_apart
        for unit in self.units:
            for flat in unit.flats:
                place = (flat, self.rank, self._precision)
                account = FlatBytes(*place, sharded=unit.sharded, lent=lent, apart=apart)
                total.update(account.on_device(states))
                if unit.sharded:
                    total["secondary"] += self._secondary(flat)
                if flat.trainable and model.states >= _ADAM_STATES:
                    total["optimizer"] += 4 * self._fragments(flat)
        return {kind: total[kind] for kind in KINDS}

    def lent_bytes(self) -> int:
        """Return the bytes of one lent buffer: those of the largest unit but large single layers.

        A buffer for the gradients of an embedding would be too large for all others; it is
        allocated when it is needed.
        """
        sizes = [
            offsets_in_bytes(flat.numel * self._wire(flat) for flat in unit.trainable)[-1]
            for unit in self._trainable
        ]
        usual = [
            size
            for size, unit in zip(sizes, self._trainable, strict=True)
            if not unit.sharded or is_block(unit.key)
        ]
        return max(usual or sizes, default=0)

    # --- one unit ---

    def _gather(self, unit: UnitLayout) -> Counter[tuple[str, str]]:
        route = self._lines.sharing
        if route.approximates_parameters:
            dtypes = [flat.dtype for flat in unit.flats]
            return route.parameters_gathered(flat_slices_of(unit.flats, dtypes))
        return route.passed("all_gather", owned_by_all(unit.flats, _values, self._in_bytes))

    def _reduce(self, unit: UnitLayout) -> Counter[tuple[str, str]]:
        route = self._lines.sharing
        if route.between is not None:
            return route.gradients_scattered(self._stretches(unit))
        return route.passed("reduce_scatter", owned_by_all(unit.trainable, self._wire))

    def _cross(self, unit: UnitLayout, replicas: Route) -> Counter[tuple[str, str]]:
        sent = Counter[tuple[str, str]]()
        for flat in unit.trainable:
            if replicas.between is not None:
                sent += replicas.gradients_summed(self._crossing(flat))
            else:
                sent += replicas.all_reduced(flat.owned(self.rank), self._wire(flat))
        return sent

    def _crossing(self, flat: FlatLayout) -> FlatSlice:
        """Describe this rank's pieces of the gradients, side by side."""
        dtype = self._precision.reduce_dtype(flat.dtype)
        return FlatSlice.joined(flat.flat_slices(dtype)[self.rank], dtype)

    def _kept_back(self) -> int:
        """Return the bytes that are kept of one sum of gradients for the next."""
        replicas = self._lines.replicas
        if replicas is not None and replicas.between is not None:
            flats = [flat for unit in self._trainable for flat in unit.trainable]
            return sum(replicas.kept_back(self._crossing(flat)) for flat in flats)
        route = self._lines.sharing
        if route.between is None:
            return 0
        return sum(route.kept_back_of(self._stretches(unit)) for unit in self._trainable)

    def _stretches(self, unit: UnitLayout) -> SlicesByRank:
        """Describe the gradients that each rank gets the sums of."""
        dtypes = [self._precision.reduce_dtype(flat.dtype) for flat in unit.trainable]
        return flat_slices_of(unit.trainable, dtypes)

    def _gather_inside(self, unit: UnitLayout, lines: SecondaryLines) -> Counter[tuple[str, str]]:
        """Return the bytes that this rank sends when a host's ranks exchange secondary shards."""
        owned, size = owned_by_all(unit.flats, _values), lines.near.size
        lengths = [sum(owned[place::size]) for place in range(size)]
        return Route(lines.near).passed("all_gather", lengths)

    def _refresh(self, unit: UnitLayout, lines: SecondaryLines) -> Counter[tuple[str, str]]:
        """Return the bytes that this rank sends of new values for secondary shards."""
        if not (flats := unit.trainable):
            return Counter()
        slices = flat_slices_of(flats, [flat.dtype for flat in flats])
        return lines.far.parameters_gathered(slices[lines.near.rank :: lines.near.size])

    def _regather(self, unit: UnitLayout, over: Axis) -> Counter[tuple[str, str]]:
        """Return the bytes that this rank sends when a unit's values come back for backward."""
        if over == self._lines.sharing.axis:
            return self._gather(unit)
        bounds = [
            [
                (stop - start) * flat.dtype.itemsize
                for start, stop in chunk_bounds(flat.numel, over.size)
            ]
            for flat in unit.flats
        ]
        lengths = [sum(each) for each in zip(*bounds, strict=True)]
        return Route(over).passed("all_gather", lengths)

    # --- one flat tensor ---

    def _wire(self, flat: FlatLayout) -> int:
        return self._precision.reduce_dtype(flat.dtype).itemsize

    def _secondary(self, flat: FlatLayout) -> int:
        """Return the bytes of this rank's secondary shard."""
        lines = self._lines.secondary
        if lines is None:
            return 0
        return sum(owned_by_all([flat], _values)[lines.near.rank :: lines.near.size])

    def _fragments(self, flat: FlatLayout) -> int:
        """Return how many parameters this rank owns a piece of."""
        shares = [place.shares[self.rank] for place in flat.places]
        return sum(stop > start for start, stop in shares)


def _values(flat: FlatLayout) -> int:
    return flat.dtype.itemsize


def add(sent: Counter[tuple[str, str]], each: Mapping[tuple[str, str], int], times: int) -> None:
    """Add bytes by (axis, operation), so many times."""
    for key, nbytes in each.items():
        sent[key] += times * nbytes


# --- how often units are gathered in a forward and its backward ---
#
# A forward usually uses modules in the order in which they are registered, each once, and backward
# the other way round. The model decides in the end; gathering follows it.

_LOOKUPS = nn.Embedding | nn.EmbeddingBag
"""Layers whose backward reads no values."""


class UnitUse(NamedTuple):
    """A module that needs a unit in forward.

    Attributes:
        key: the unit's.
        read_back: whether its backward reads values again.
    """

    key: str
    read_back: bool


def gathers_again(
    units: Sequence[UnitLayout], model: nn.Module | None, spared: int
) -> Counter[str]:
    """Return how often each unit is gathered after its first time in a forward with its backward.

    Args:
        units: the plan; those that stay whole, and what is left of the model, are not freed.
        model: says which layers are tied, and which only look values up; None: none.
        spared: how many units are not freed because forward ends and backward begins with them.
    """
    uses = usual_uses(units, model)
    last = list(dict.fromkeys(use.key for use in reversed(uses)))[:spared]
    gathers: Counter[str] = Counter(dict.fromkeys((use.key for use in uses), -1))
    for use in uses:
        gathers[use.key] += 1
    live = set(last)
    for use in reversed(uses):
        if not use.read_back:
            continue
        if use.key in live:
            live.discard(use.key)  # freed when its backward is over
        else:
            gathers[use.key] += 1
    return gathers


def usual_uses(units: Sequence[UnitLayout], model: nn.Module | None) -> list[UnitUse]:
    """Return the units that a forward needs and frees afterwards, in order.

    Backward reads a layer's values if the layer's inputs need gradients, and those of a module
    with layers inside also if one of these is trained.
    """
    freed = [unit for unit in reversed(units) if unit.sharded and unit.key != ROOT]
    return _of_names(freed, units) if model is None else _of_modules(freed, model)


def _of_names(freed: Sequence[UnitLayout], units: Sequence[UnitLayout]) -> list[UnitUse]:
    elsewhere = any(unit.trainable for unit in units if unit not in freed)
    flows, uses = False, []  # whether gradients flow back to here
    for unit in freed:
        trained = bool(unit.trainable)
        inside = trained and not _is_layer(unit.key, freed)
        uses.append(UnitUse(unit.key, read_back=flows or inside))
        flows = flows or trained or elsewhere
    return uses


def _of_modules(units: Sequence[UnitLayout], model: nn.Module) -> list[UnitUse]:
    parameters = named_parameters(model)
    owner = {id(parameters[place.name]): unit.key for unit in units for place in unit.places}
    keys = {unit.key for unit in units}
    flows = waits = False  # whether gradients flow back to here
    uses = []
    for name, module in model.named_modules():
        own = clean_name(f"{name}.")[:-1]
        tied = {owner.get(id(parameter)) for parameter in module._parameters.values()}
        outside = {key for key in tied if key is not None and not f"{own}.".startswith(f"{key}.")}
        for key in sorted(outside | ({own} & keys)):
            inside = key == own and not _is_layer(key, units) and _trains(module)
            read_back = (flows or inside) and not isinstance(module, _LOOKUPS)
            uses.append(UnitUse(key, read_back))
        # What a module around others has for itself, it usually uses after the first of them.
        waits = waits or _trains(module, inside=False)
        flows = flows or (waits and next(module.children(), None) is None)
    return uses


def _trains(module: nn.Module, *, inside: bool = True) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=inside))


def _is_layer(key: str, units: Sequence[UnitLayout]) -> bool:
    """Return whether a unit is one layer: a module with nothing inside but parameters."""
    names = [place.name for unit in units if unit.key == key for place in unit.places]
    return all(name.rpartition(".")[0] == key for name in names)


# --- strategies over units in plans: how ranks share state, and which stores keep state ---


OFFLOAD, NOWHERE = "offload", "none"
DISK = "nvme"
PLACE = "offloaded"
"""The directory of a planned store on a disk: below the run's own; users name a better one."""


def sharing_of(
    options: UnitsOptions, *, group: int = 0, bucket: int = 0, whole_below: int = 0
) -> Sharing:
    """Return how ranks share the state of a model under these options.

    Args:
        options: of a strategy over units.
        group: see ``Sharing``.
        bucket: see ``Sharing``.
        whole_below: see ``Sharing``.

    Raises:
        ConfigError: as ``stored_in`` does.
    """
    return Sharing(
        optimizer=True,
        gradients=options.reduces_each,
        parameters=options.divides_parameters,
        keeps=options.until != "forward",
        ahead=options.ahead,
        whole_below=whole_below,
        group=group,
        secondary=options.keeps_secondary,
        fused=options.fused,
        lent=options.lent_buffers,
        bucket=bucket,
        stored=stored_in(options),
    )


def stored_in(options: UnitsOptions) -> Stored:
    """Return the state in stores.

    Raises:
        ConfigError: a store is not one whose time can be drawn.
    """
    offload = options.offload
    tiers: dict[str, Tier] = {tier: tier for tier in get_args(Tier)}
    for name in (offload.optimizer, offload.params):
        if name not in tiers:
            raise ConfigError(
                f"expected an offload store of {', '.join(filter(None, tiers))} in a step on "
                f"paper, found {name!r}, whose time is not drawn; take another store"
            )
    return Stored(
        optimizer=tiers[offload.optimizer],
        parameters=tiers[offload.params],
        share=offload.ratio,
        delayed=offload.delayed,
    )
