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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import nn

from drivetrain.collectives import Route, chunk_bounds
from drivetrain.collectives.volume import FlatSlice, SlicesByRank
from drivetrain.cost import ModelSpec
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
from drivetrain.simulator.contract import UnitUse, times_again
from drivetrain.simulator.step import Stored, Tier
from drivetrain.strategy import Run

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
        self.precision = precision
        self.lines = lines
        self.rank = lines.sharing.axis.rank

    def sent(self, config: UnitsOptions, model: ModelSpec, run: Run) -> dict[tuple[str, str], int]:
        """Return the bytes of one optimizer step by (axis, operation): the sum over its messages.

        Args:
            config: the options.
            model: its buffers, and the module where it is known.
            run: see there.
        """
        sent = Counter[tuple[str, str]]()
        for message, times in self._messages(config, model, run):
            add(sent, message, times)
        return dict(+sent)

    def _messages(
        self, config: UnitsOptions, model: ModelSpec, run: Run
    ) -> Iterator[tuple[Counter[tuple[str, str]], int]]:
        """Yield the bytes of each message of a step, and how often it is sent."""
        lines, again = self.lines, Counter[str]()
        reductions = run.accumulation if config.reduces_each else 1
        gathers = 1 if config.until == "step" else run.accumulation
        over = config.near(run.mesh) or lines.sharing.axis
        if config.until != "step":  # a unit that is freed comes back for its next use
            # Backward begins with as many as it holds then: the last one and those gathered ahead.
            spared = 1 + config.ahead if config.until == "forward" else None
            again = times_again(usual_uses(self.units, model.module), spared)
        for unit in self.units:
            if unit.sharded and lines.secondary is not None:
                yield self._gather_inside(unit, lines.secondary), gathers * (1 + again[unit.key])
                yield self._refresh(unit, lines.secondary), 1
            elif unit.sharded or unit.trainable:
                yield self._gather(unit), gathers if unit.sharded else 1
                if unit.sharded and again[unit.key]:
                    yield self._regather(unit, over), gathers * again[unit.key]
        yield Route(lines.sharing.axis).all_reduced(len(self._in_bytes), 4), gathers
        for unit in self._trainable:
            yield self._reduce(unit), reductions
            if lines.replicas is not None:
                yield self._cross(unit, lines.replicas), 1
        flags = sum(len(flat.places) for unit in self._trainable for flat in unit.trainable)
        agreements = reductions if lines.replicas is None else 1
        # A maximum takes one ring, also over hosts.
        yield Route(lines.everyone.axis).all_reduced(flags, 1), agreements
        if config.buffers == "broadcast":
            nbytes = sum(spec.nbytes for spec in model.buffers)
            yield lines.everyone.broadcast(nbytes), reductions

    def held(self, model: ModelSpec, *, lent_buffers: int) -> dict[str, int]:
        """Return the bytes between steps by kind.

        Args:
            model: parameters, buffers and states.
            lent_buffers: how many buffers gradients pass through; 0 keeps whole gradients.

        Returns:
            ``lent`` are buffers that gradients pass through, besides those that fragments have.
        """
        states = {spec.name: model.states for spec in model.parameters}
        total, secondary = self.beside(model), self.lines.secondary
        total["lent"] += lent_buffers * self.lent_bytes()
        for unit in self.units:
            for flat in unit.flats:
                account = FlatBytes(self, flat, sharded=unit.sharded, lent=lent_buffers > 0)
                total.update(account.on_device(states))
                if unit.sharded and secondary is not None:
                    owned = owned_by_all([flat], _values)
                    total["secondary"] += sum(owned[secondary.near.rank :: secondary.near.size])
        return {kind: total[kind] for kind in KINDS}

    def beside(self, model: ModelSpec) -> Counter[str]:
        """Return the bytes between steps by kind that are beside all flat tensors."""
        placed = {place.name for unit in self.units for place in unit.places}
        return Counter(
            parameters=sum(spec.nbytes for spec in model.parameters if spec.name not in placed),
            gradients=self._kept_back(),
            buffers=sum(spec.nbytes for spec in model.buffers),
        )

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
        route = self.lines.sharing
        if route.approximates_parameters:
            dtypes = [flat.dtype for flat in unit.flats]
            return route.parameters_gathered(flat_slices_of(unit.flats, dtypes))
        return route.passed("all_gather", owned_by_all(unit.flats, _values, self._in_bytes))

    def _reduce(self, unit: UnitLayout) -> Counter[tuple[str, str]]:
        route = self.lines.sharing
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
        dtype = self.precision.reduce_dtype(flat.dtype)
        return FlatSlice.joined(flat.flat_slices(dtype)[self.rank], dtype)

    def _kept_back(self) -> int:
        """Return the bytes that are kept of one sum of gradients for the next."""
        replicas = self.lines.replicas
        if replicas is not None and replicas.between is not None:
            flats = [flat for unit in self._trainable for flat in unit.trainable]
            return sum(replicas.kept_back(self._crossing(flat)) for flat in flats)
        route = self.lines.sharing
        if route.between is None:
            return 0
        return sum(route.kept_back_of(self._stretches(unit)) for unit in self._trainable)

    def _stretches(self, unit: UnitLayout) -> SlicesByRank:
        """Describe the gradients that each rank gets the sums of."""
        dtypes = [self.precision.reduce_dtype(flat.dtype) for flat in unit.trainable]
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
        if over == self.lines.sharing.axis:
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
        return self.precision.reduce_dtype(flat.dtype).itemsize


class FlatBytes:
    """The bytes of one flat tensor that a rank keeps on its device between steps.

    Args:
        estimate: this rank, and dtypes of gradients.
        flat: the layout of the tensor.
        sharded: whether the values are freed between uses.
        lent: whether gradients pass through buffers that are lent; else whole ones are kept.
    """

    def __init__(self, estimate: Estimate, flat: FlatLayout, *, sharded: bool, lent: bool) -> None:
        self.flat, self.rank, self.sharded = flat, estimate.rank, sharded
        precision, apart = estimate.precision, estimate.lines.sharing.owns_apart
        self.owned = flat.owned(self.rank)
        self.wire = precision.reduce_dtype(flat.dtype)
        self.total = precision.accumulate_dtype(flat.dtype)
        self.whole = 0 if lent else flat.numel * self.wire.itemsize
        # Whether gradients of the share are views of the whole ones, which lie in one piece.
        in_order = self.wire is self.total and len(flat.pieces(self.rank)) <= 1
        self.in_whole_buffer = in_order and not lent
        separate = apart or flat.master is not flat.dtype or len(flat.pieces(self.rank)) > 1
        self.has_masters = not sharded and separate  # as OptimizerBackend.shard decides
        self.apart = not sharded and apart

    def on_device(self, states: Mapping[str, int]) -> Mapping[str, int]:
        """Return bytes by kind, where no store has any; ``lent``: whole gradients beside a share.

        Args:
            states: how many tensors of its size an optimizer keeps for a parameter, by name.
        """
        flat, shard = self.flat, self.owned * self.flat.master.itemsize
        held = {
            "parameters": shard if self.sharded else flat.nbytes,
            "masters": shard if self.has_masters else 0,
        }
        if flat.trainable:
            adam = [p for p in flat.places if states.get(p.name, 0) >= _ADAM_STATES]
            counts = sum(start < stop for start, stop in (p.shares[self.rank] for p in adam))
            held["optimizer"] = self.state_bytes(states) + 4 * counts
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


def usual_uses(units: Sequence[UnitLayout], model: nn.Module | None) -> list[UnitUse[str]]:
    """Return the units that a forward needs and frees afterwards, in order.

    Backward reads a layer's values if the layer's inputs need gradients, and those of a module
    with layers inside also if one of these is trained.

    Args:
        units: the plan; those that stay whole, and what is left of the model, are not freed.
        model: says which layers are tied, and which only look values up; None: none.
    """
    freed = [unit for unit in reversed(units) if unit.sharded and unit.key != ROOT]
    return _of_names(freed, units) if model is None else _of_modules(freed, model)


def _of_names(freed: Sequence[UnitLayout], units: Sequence[UnitLayout]) -> list[UnitUse[str]]:
    elsewhere = any(unit.trainable for unit in units if unit not in freed)
    flows, uses = False, []  # whether gradients flow back to here
    for unit in freed:
        trained = bool(unit.trainable)
        inside = trained and not _is_layer(unit.key, freed)
        uses.append(UnitUse(unit.key, read_back=flows or inside))
        flows = flows or trained or elsewhere
    return uses


def _of_modules(units: Sequence[UnitLayout], model: nn.Module) -> list[UnitUse[str]]:
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


# --- strategies over units in plans: which stores keep state ---


OFFLOAD, NOWHERE = "offload", "none"
DISK = "nvme"
PLACE = "offloaded"
"""The directory of a planned store on a disk: below the run's own; users name a better one."""


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
