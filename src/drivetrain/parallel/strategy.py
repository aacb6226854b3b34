"""The sharded engine: one step of ZeRO and of FSDP in its order, and their contract.

A strategy over units cuts a model into units (``plan``); its options say which kinds of state are
divided, and so which of the lines below do something. One step of N ranks::

    forward    all-gather a unit before its module, and the next ones ahead; free it after its
               module (where parameters stay whole: wait for the all-gather of the last step)
    backward   all-gather it again where autograd reads it; free it when its module's backward is
               over
               reduce-scatter each unit's gradients as soon as the last of them has come
    step       the user's optimizer steps this rank's fragments
               free every unit (where parameters stay whole: all-gather the stepped ones)

The training state in global coordinates: saving and loading this rank's share.

A unit holds parameters in the order of their memory. For a contiguous parameter the owned range is
a range of the flattened parameter; for any other (channels_last, transposed) it is a few boxes.
"""

from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.compression.communicator import route_linked
from drivetrain.compression.error_feedback import kept_by, take_kept
from drivetrain.compression.methods import LinkMethods
from drivetrain.compression.one_bit_adam import FrozenAdam
from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.errors import CheckpointError, CollectiveError, StorageError, UsageError
from drivetrain.log import get_logger
from drivetrain.model.fp8 import GATHERED, weights_in_fp8
from drivetrain.model.modules import held_buffers, named_parameters, persistent_buffers
from drivetrain.parallel.backward import Rounds
from drivetrain.parallel.estimate import (
    DISK,
    NOWHERE,
    OFFLOAD,
    PLACE,
    Estimate,
    Lines,
    stored_in,
)
from drivetrain.parallel.gather import Gather, StepHooks
from drivetrain.parallel.layout import ParameterSlot, UnitLayout
from drivetrain.parallel.optimizer_backend import (
    BoundOptimizer,
    Held,
    backend_kind,
    open_backend,
)
from drivetrain.parallel.optimizers import Fragments, check_suits
from drivetrain.parallel.options import UnitsOptions, UnitsOutline
from drivetrain.parallel.placement import Placement, Ranks, connect_line, edits_accepted
from drivetrain.parallel.reduce import LentBuffers, Reduce
from drivetrain.parallel.replicated import replicate
from drivetrain.parallel.unit import (
    Unit,
    followed,
    is_ahead,
    route_secondary,
    why_only_read,
)
from drivetrain.runtime.parts import Part, boxes
from drivetrain.saved_state import (
    ReplicatedState,
    TrainingState,
    check_fits,
    state_keys,
    weights_in,
)
from drivetrain.shards import ParameterPiece, Reader, Shard, TensorFacts, WeightSource
from drivetrain.simulator.contract import Sharing
from drivetrain.simulator.step import SimulatedRun
from drivetrain.strategy import DataParallelPlanning, Pace, Planning, Prepared, Run, Strategy

# --- the training state in global coordinates ---

_SCALARS = frozenset({"step", "mu_product", "mu", "eta"})
"""State of torch's optimizers that is one number, whatever the parameter's shape."""


class ShardedState(TrainingState):
    """Parameters, buffers and optimizer state of one model, behind steps under way.

    Args:
        strategy: its ranks train the model; the first one saves what all of them hold.
    """

    divided = True

    def __init__(self, strategy: "ShardedStrategy[Any]") -> None:
        self._strategy = strategy
        self._placement = strategy.placement
        self._backend = strategy.backend
        self._ranks = strategy.ranks

    @property
    def _optimizers(self) -> list[BoundOptimizer]:
        return list(self._strategy.optimizers)

    @property
    def _slots(self) -> dict[str, ParameterSlot]:
        return {slot.name: slot for slot in self._placement}

    @property
    def _beside(self) -> ReplicatedState:
        """What lies in no unit, as every rank has it."""
        return ReplicatedState(
            self._strategy.model, [bound.optimizer for bound in self._strategy.optimizers]
        )

    def _settle(self) -> None:
        self._placement.wait_for_steps()
        self._strategy.optimizers.adopt_strays()

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's range of every parameter and of its optimizer state."""
        self._settle()
        if self._ranks.first:
            beside, outside = self._beside, self._outside()
            for name, tensor in outside.items():
                yield Shard.whole(name, "", tensor)
            for index in range(len(self._optimizers)):
                yield from beside.whole_states(index, outside.keys())
        if self._ranks.original:
            yield from self._weights()
            for index, bound in enumerate(self._optimizers):
                yield from self._fragments_states(index, [slot.name for slot in bound.held])
        yield from kept_by(self._ranks.summing)

    def _weights(self) -> Iterator[Shard]:
        """Yield this rank's shares, with what the script wrote beside masters."""
        units = self._placement.units
        replaced = {slot for unit in units for slot in unit.replaced()}
        ahead = {flat for unit in units for flat in unit.flats if is_ahead(unit, flat)}
        for slot in self._placement:
            if slot.owned_numel:
                flat = self._placement.flat_of(slot)
                held = self._backend.master(flat, slot)
                if slot in replaced:
                    data = slot.in_memory_order(slot.parameter.detach())
                    held = _followed(held, data[slice(*slot.owned)])
                elif flat in ahead:
                    held = _followed(held, flat.values[slot.own])
                yield from _shards(slot.name, "", slot, held)
            elif not slot.numel and self._ranks.first:
                empty = torch.empty(slot.shape, dtype=slot.master, device="cpu")
                yield Shard.whole(slot.name, "", empty)

    def facts(self, module: nn.Module) -> Sequence[TensorFacts]:
        """Describe the tensors of the whole model's state dict, and the unit of each parameter."""
        found = {
            slot.name: f"unit {self._placement.unit_of(slot).label}" for slot in self._placement
        }
        return [replace(fact, where=found.get(fact.name, "")) for fact in super().facts(module)]

    def check(self, reader: Reader) -> None:
        """Raise a CheckpointError if names or shapes of a checkpoint differ."""
        self._settle()
        expected = {(name, ""): tuple(t.shape) for name, t in self._outside().items()}
        expected |= {(slot.name, ""): slot.shape for slot in self._placement}
        optimizers = self._optimizers
        held = {(i, name) for i, bound in enumerate(optimizers) for name in bound.slots}
        check_fits(reader, expected, held | self._beside.held())
        keys = state_keys(reader)
        for index, bound in enumerate(optimizers):
            for name, slot in bound.slots.items():
                for key in keys.get((name, index), []):
                    _check_state(reader, slot, index, key)

    def load(self, reader: Reader) -> None:
        """Load this rank's share, and read nothing else; others' arrive when they are needed.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        strategy, place = self._strategy, self._placement
        place.take_changes()
        strategy.gather.values_changed()
        place.wait_for_values()
        self._backend.drop_late()
        self.check(reader)
        outside = self._outside()
        with torch.no_grad():
            for name, tensor in weights_in(reader, outside).items():
                tensor.copy_(reader.read(name))
            for slot in weights_in(reader, self._slots).values():
                if slot.owned_numel:
                    values = torch.empty(slot.owned_numel, dtype=slot.master, device="cpu")
                    _read(reader, "", slot, values)
                    self._backend.set_master(self._placement.flat_of(slot), slot, values)
        for index, bound in enumerate(self._optimizers):
            self._load_states(index, reader, {*bound.slots, *outside})
        place.send_around(place.units, exact=True)
        place.wait_for_values()
        strategy.reduce.open_channels()
        take_kept(self._ranks.summing, reader, strategy.run.links.name_for("gradients"))

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> Iterator[None]:
        """Keep parameters whole; with ``modify``, rank 0's changes become everybody's."""
        place, gather = self._placement, self._strategy.gather
        place.wait_for_steps()
        if modify and self._backend.take_over_late():  # changes come on top of what is newest
            gather.values_changed()
            place.send_around(place.units)
        wanted = {place.unit_of(slot) for slot in place.slots_of(parameters)}
        units = [unit for unit in place.units if unit in wanted]
        for unit in units:
            if unit.resident:
                unit.wait_for_unshard()
                if unit.approximate:
                    unit.unshard(exact=True)
                    unit.wait_for_unshard()
        held = gather.holding([unit for unit in units if not unit.resident])
        accepted = edits_accepted(units, self._ranks.everyone, self._backend)
        with held, accepted if modify else nullcontext():
            yield

    # --- the fragments that optimizers hold, whose values and state a store may keep ---

    def names(self) -> Mapping[int, str]:
        """Return the parameter's name of every fragment, by identity."""
        held = ((self._placement.fragment_of(slot), slot.name) for slot in self._placement)
        return {id(fragment): name for fragment, name in held if fragment is not None}

    def states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        """Yield this rank's share of an optimizer's state for some parameters."""
        self._settle()
        if self._ranks.first:
            yield from self._beside.whole_states(index, names)
        if self._ranks.original:
            yield from self._fragments_states(index, names)

    def _fragments_states(self, index: int, names: Iterable[str]) -> Iterator[Shard]:
        bound = self._optimizers[index]
        for slot in (bound.slots[name] for name in names if name in bound.slots):
            for key, held in self._backend.states(bound, slot) if slot in bound.held else ():
                name, values = f"{index}.{key}", held.values
                if slot.divided and values.shape == slot.fragment_shape:
                    in_order = held._replace(values=slot.fragment_in_order(values))
                    yield from _shards(slot.name, name, slot, in_order)
                elif slot.owned[0] == 0:  # the owner of the first element speaks for all
                    yield Shard.whole(slot.name, name, values, fresh=held.fresh)

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
                self._backend.set_states(bound, slot, states)

    def take_changes(self, optimizer: Optimizer) -> bool:
        """Bind added parameters, and take over replaced memory: a store's step may begin."""
        self._strategy.optimizers.adopt_strays()
        self._placement.take_changes()
        return True

    def dtype(self, tensor: nn.Parameter) -> torch.dtype:
        """Return the dtype of a fragment's master: a placeholder has a gradient's at times."""
        slot = self._slot_of(tensor)
        return super().dtype(tensor) if slot is None else slot.master

    def piece(self, tensor: nn.Parameter) -> ParameterPiece:
        """Return which elements of its parameter a fragment has."""
        slot = self._slot_of(tensor)
        if slot is None:
            return super().piece(tensor)
        return ParameterPiece(slot.shape, slot.outer_dim, slot.owned[0], tensor.numel())

    def values(self, tensor: nn.Parameter) -> Tensor:
        """Return the values of a fragment, also where a store keeps them."""
        slot = self._slot_at_rest(tensor)
        if slot is None:
            return super().values(tensor)
        values = self._backend.master(self._placement.flat_of(slot), slot).values
        return values.as_strided(slot.fragment_shape, slot.fragment_strides)

    def set_values(self, tensor: nn.Parameter, values: Tensor) -> None:
        """Replace the values of a fragment, also where a store keeps them."""
        slot = self._slot_at_rest(tensor)
        if slot is None:
            super().set_values(tensor, values)
        else:
            flat = self._placement.flat_of(slot)
            self._backend.set_master(flat, slot, slot.fragment_in_order(values))

    def _slot_at_rest(self, tensor: nn.Parameter) -> ParameterSlot | None:
        """Return the place of a fragment, when no store steps it; None for other tensors."""
        slot = self._slot_of(tensor)
        if slot is not None:
            self._placement.unit_of(slot).wait_for_step()
        return slot

    def _slot_of(self, tensor: nn.Parameter) -> ParameterSlot | None:
        optimizers = self._strategy.optimizers
        return next((b.fragments[tensor] for b in optimizers if tensor in b.fragments), None)

    def _outside(self) -> dict[str, Tensor]:
        """Return the tensors of every rank: buffers, and parameters outside of units."""
        slots, model = self._slots, self._strategy.model
        rest = {name: p for name, p in named_parameters(model).items() if name not in slots}
        return {**rest, **persistent_buffers(model)}


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


# --- the sharded engine ---

logger = get_logger(__name__)

ConfigT = TypeVar("ConfigT", bound=UnitsOptions)


class ShardedStrategy(UnitsOutline[ConfigT], Strategy[ConfigT], Generic[ConfigT]):
    """A strategy over units, over the mesh axis ``dp``; one object per prepared model.

    A subclass cuts the model (``plan``); its options say what is divided. ``prepare`` returns the
    very objects it was given: parameters become views of units, and the optimizers' groups hold
    this rank's fragments of them.

    Attributes:
        model: the user's model, once there is one.
        backend: where shards lie between steps.
        ranks: those that train the model.
        neighbors: the ranks that keep freed units together until backward; None: there are none.
        placement: the model's units.
        rounds: the synchronised backwards.
        reduce: averages gradients.
        gather: brings and frees sharded units.
        optimizers: they hold this rank's fragments.
        hooks: on the model, its modules and its parameters.
        adam: steps with frozen variances, where momenta cross a link; None: gradients do.
    """

    adam: FrozenAdam | None = None
    rounds: Rounds
    reduce: Reduce
    gather: Gather
    optimizers: Fragments
    hooks: StepHooks

    def __init__(self, config: ConfigT, run: Run) -> None:
        near = config.near(run.mesh)
        super().__init__(config, run)
        self.model = nn.Module()  # until there is one
        self.backend = open_backend(config.offload, run)
        self.ranks = self.connect()
        self.placement = Placement(
            self.ranks, self.backend, self._cut, config.places, run.world.device
        )
        self.state = ShardedState(self)
        self.neighbors = None
        self._made = ExitStack()  # what close() takes off, the latest first
        self._made.callback(self.backend.close)
        self._made.callback(self.ranks.close)
        if near is not None:
            axis = run.mesh.start_neighbors("dp", near.size, run.world)
            self.neighbors = connect_line(run, axis)
            self._made.callback(self.neighbors.close)
        self._made.callback(self._leave)

    def connect(self) -> Ranks:
        """Connect the ranks that share the model; divided parameters have queues of their own."""
        if self.config.divides_parameters:
            return Ranks.in_queues(self.run, keeping=self.config)
        return Ranks.in_one_queue(self.run)

    def _cut(
        self, specs: Sequence[TensorSpec], devices: Sequence[Hashable] | None = None
    ) -> Sequence[UnitLayout]:
        spec = ModelSpec(tuple(specs), module=self.model)
        return self.plan(self.config, spec, self.run, devices)

    @property
    def pace(self) -> Pace:
        """All ranks step together; they run the same forwards where these gather units."""
        divided = any(not unit.resident for unit in self.placement.units)
        forwards = divided and self.ranks.sharing.size > 1
        return Pace(
            forwards=forwards,
            backwards=self.config.reduces_each,
            begun=self.config.offload.in_backward,
            waits=self.reduce.waits,
        )

    # --- taking over ---

    def materialize(self, model: nn.Module, source: WeightSource) -> None:
        """Remember where the values come from: units ask for them one by one."""
        self.placement.remember(model, source)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make everything that a step needs, once; parameters become views of units."""
        config = self.config
        self.model = model
        self.check(optimizers)
        buffers = self.lent_buffers(model, optimizers)
        place = self.placement
        reduce = Reduce(place, self.after_backward, self.run, buffers, self.adam)
        self.gradients = self.reduce = self._made.enter_context(closing(reduce))
        self.rounds = reduce.rounds
        self.take(place.lay_out(model))
        fused = config.fused and self.adam is None  # whose steps take the state of torch's loops
        held = Fragments(place, self, fused)
        self.optimizers = self._made.enter_context(closing(held))
        for optimizer in optimizers:
            self.give_fragments(optimizer)
        divided = [unit for unit in place.units if not unit.resident]
        in_bytes = self.in_bytes(config, model, self.run)
        in_bytes &= {slot.name for unit in divided for slot in unit.slots}
        if self.run.precision.recipe is not None and config.divides_parameters:
            why = self.why_not_in_bytes(config, self.run)
            logger.announce(
                f"precision: fp8: {len(in_bytes)} weights are gathered in fp8{why and f': {why}'}"
            )
        gather = Gather(divided, config, self.neighbors, self.keep_changes, in_bytes)
        self.gather = self._made.enter_context(closing(gather))
        self.hooks = self._made.enter_context(closing(StepHooks(model, gather, self)))
        self.hooks.watch_gradients(self.reduce)
        return Prepared(model, tuple(optimizers))

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse optimizers that cannot step a rank's fragments.

        Raises:
            ConfigError: momenta are exchanged, and an optimizer is no plain Adam or AdamW.
            UsageError: says which partition they need.
        """
        for optimizer in optimizers:
            check_suits(optimizer, self.config.cut)
            if self.adam:
                self.adam.check(optimizer)

    def lent_buffers(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> LentBuffers:
        """Plan the units, and show the place of each state; return the buffers of gradients.

        Raises:
            PreflightError: some rank has too little room for its part.
        """
        specs = [TensorSpec.of(name, p) for name, p in named_parameters(model).items()]
        units, lent = self._cut(specs), self.config.lent_buffers
        estimate = self.estimate(self.config, units, self.run)
        each = estimate.lent_bytes() if lent else 0
        self.backend.announce(model, optimizers, estimate, self.run, lent=lent * each)
        return LentBuffers(lent, each, self.run.world.device)

    def take(self, units: Sequence[Unit]) -> None:
        """Choose optimizer_backends for more units, and reduce their gradients."""
        self.backend.choose(units)
        self.reduce.watch(units)

    def follow(self) -> None:
        """Follow changes of ``requires_grad``; every rank must make the same ones."""
        if self.placement.outside and (thawed := self.placement.follow()):
            self.take(thawed)
        self.hooks.watch_gradients(self.reduce)

    def keep_changes(self, unit: Unit) -> None:
        """Let shards and masters follow values that a forward has written into parameters.

        Raises:
            UsageError: updates are held back, which the forward has not seen; a slow link sent
                approximate values, from which no shard can follow; or other hosts, which keep the
                values for good, would not learn of the changes.
        """
        if reason := why_only_read(unit, delayed=self.config.offload.delayed):
            raise UsageError(
                "expected a forward that only reads parameters, found that it changes some of "
                f"{unit.label}, {reason}"
            )
        unit.keep_changes()
        self.backend.values_changed(unit)
        self.placement.note_written(unit)

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Give one more optimizer its fragments."""
        self.check([optimizer])
        self.give_fragments(optimizer)
        return optimizer

    def give_fragments(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was checked step this rank's fragments."""
        self.optimizers.add(optimizer)
        if self.adam:
            self.adam.add(optimizer)

    # --- one step, in its order ---

    def before_forward(self) -> None:
        """Make ready for a training forward; parameters that began to train join the units.

        Its modules gather their units and free them: ``hooks.ModuleHook``.
        """
        if self.rounds.synchronizing:
            self.rounds.finish()  # what an exception in backward cut short
            self.follow()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless gradients stay local, return with this rank's part of the mean."""
        self.gather.leave()  # no forward is under way here, only ones that an interrupt cut short
        run = partial(loss.backward, **options)
        if not self.rounds.synchronizing:
            self.rounds.kept = True
            run()
            return
        self.follow()
        self.rounds.run(run)

    def after_backward(self) -> None:
        """Wait for the reduce-scatters: each fragment's gradient is its part of the mean.

        Buffers follow rank 0's here, so that every rank evaluates with the same ones.
        """
        self.reduce.finish()
        self.gather.reshard_all()
        if self.config.buffers == "broadcast" and (buffers := held_buffers(self.model)):
            replicate(buffers.values(), self.ranks.everyone, "buffers after backward")

    def before_step(self, bound: BoundOptimizer) -> None:
        """Submit the step of state that a store keeps; the optimizer itself steps the rest."""
        self.rounds.finish()
        self.reduce.shown.follow(bound.slots.values())
        if self.ranks.everyone.size > 1 and not self.rounds.came_since(bound.optimizer):
            self.reduce.shown.check_assigned(list(bound.slots.values()))
        self.rounds.stepped(bound.optimizer)
        self.placement.take_changes()
        self.backend.submit(bound)

    def after_step(self, bound: BoundOptimizer) -> None:
        """Free every unit, whose values are no longer the right ones; what stays whole follows."""
        self.gather.values_changed()
        self.reduce.give_away(self.backend.give_back(bound))
        self.placement.send_around(bound.units)

    # --- around the step ---

    def before_compiled_forward(self) -> None:
        """Wait for all values: a compiled forward does not ask the parameters' guards."""
        self.placement.wait_for_values()

    def running(self) -> AbstractContextManager[None]:
        """Gather the units of a forward that does not call the model."""
        return self.gather.running()

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Keep gradients local inside, or where they are reduced each time, from replicas only."""
        reduce, rounds = self.reduce, self.rounds
        before = rounds.synchronizing, reduce.replicating, reduce.steps_follow
        reduce.steps_follow = not enabled
        if not self.config.reduces_each:
            rounds.synchronizing = not enabled
        elif self.ranks.replicas is not None:
            reduce.replicating = not enabled
        try:
            yield
        finally:
            rounds.synchronizing, reduce.replicating, reduce.steps_follow = before

    def take_links(self, links: LinkMethods) -> None:
        """Let every connection go on with methods that were chosen between two steps."""
        super().take_links(links)
        for communicator in self.ranks.communicators:
            communicator.take_links(links)

    def before_zero_grad(self, bound: BoundOptimizer | None, *, set_to_none: bool) -> None:
        """Drop gradients of micro-batches that were not sent, too; without optimizer, all."""
        self.rounds.finish()  # what an exception cut short must not come after this
        slots = None if bound is None else bound.slots.values()
        if set_to_none:
            self.reduce.shown.clear(self.reduce.shown.of if slots is None else slots)
        self.reduce.forget(slots, set_to_none=set_to_none)
        if bound is None:
            for slot, gradient in self.placement.gradients().items():
                fragment = self.placement.fragment_of(slot)
                if fragment is not None and set_to_none:
                    fragment.grad = None
                else:
                    gradient.zero_()

    def close(self) -> None:
        """Take everything off; parameters that are whole become ordinary ones.

        Divided parameters stay divided, unless this is the only rank. Where a rank or a store
        failed, what did not arrive stays guarded.
        """
        self._made.close()

    def _leave(self) -> None:
        with suppress(CollectiveError, StorageError):
            self.placement.wait_for_values()
            self.placement.wait_for_steps()

    # --- before a run: what it holds and sends ---

    @classmethod
    @abstractmethod
    def plan(
        cls,
        config: ConfigT,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut parameters into units, in the order in which backward usually reaches them.

        Args:
            config: the options.
            model: its parameters; those that lie in no unit, too.
            run: its mesh and dtypes.
            devices: the device of each parameter; only equal ones share a unit.
        """

    @classmethod
    def in_bytes(cls, config: ConfigT, model: nn.Module | None, run: Run) -> set[str]:
        """Return the names of weights that are gathered in fp8 where their units are divided."""
        if model is None or cls.why_not_in_bytes(config, run):
            return set()
        return weights_in_fp8(model)

    @classmethod
    def why_not_in_bytes(cls, config: ConfigT, run: Run) -> str:
        """Return why weights of products in fp8 are gathered as all others; empty: in fp8."""
        recipe = run.precision.recipe
        if recipe != GATHERED:
            rows = ", whose scales need whole rows" if str(recipe).startswith("row") else ""
            return f"dtypes.fp8 is {recipe}{rows}"
        lines = cls.lines(config, run)
        reasons = {
            "other axes than dp divide the model": any(
                run.mesh[axis].size > 1 for axis in run.mesh if axis != "dp"
            ),
            "one rank has them": lines.sharing.axis.size == 1,
            "secondary: host keeps them": lines.secondary is not None,
            "a store keeps them": bool(config.offload.optimizer),
            "links.far may approximate them": lines.sharing.owns_apart,
        }
        return next((reason for reason, found in reasons.items() if found), "")

    @classmethod
    def lines(cls, config: ConfigT, run: Run) -> Lines:
        """Return the ranks that the cost is about."""
        everyone = route_linked(run.mesh, "dp", run.world, run.links)
        return Lines(everyone, everyone, secondary=route_secondary(run, config))

    @classmethod
    def estimate(
        cls,
        config: ConfigT,
        units: Sequence[UnitLayout],
        run: Run,
        in_bytes: Collection[str] = (),
    ) -> Estimate:
        """Return the sums over a plan of units."""
        return Estimate(units, run.precision, cls.lines(config, run), in_bytes)

    @classmethod
    def cost(cls, config: ConfigT, model: ModelSpec, run: Run) -> Cost:
        """Return the cost by ``drivetrain.parallel.estimate``."""
        units = cls.plan(config, model, run)
        estimate = cls.estimate(config, units, run, cls.in_bytes(config, model.module, run))
        held = backend_kind(config.offload).held(estimate, model, config, run)
        return Cost(held=held, sent=estimate.sent(config, model, run))

    @classmethod
    def sharing(cls, config: ConfigT, run: SimulatedRun) -> Sharing:
        """Return what the ranks divide, for plans: by default what the options say.

        Raises:
            ConfigError: state lies in a store whose time is not known.
        """
        return Sharing(
            optimizer=True,
            gradients=config.reduces_each,
            parameters=config.divides_parameters,
            keeps=config.until != "forward",
            ahead=config.ahead,
            secondary=config.keeps_secondary,
            fused=config.fused,
            lent=config.lent_buffers,
            stored=stored_in(config),
        )

    @classmethod
    def planning(cls) -> Planning:
        """Return plans of the step of data parallelism over what the options divide."""
        return ShardedPlanning(cls, cls.sharing)


class ShardedPlanning(DataParallelPlanning):
    """Plans of a strategy over units, whose optimizer state may lie in a store."""

    layout_keys: ClassVar[Mapping[str, str]] = {OFFLOAD: OFFLOAD}

    def changes_links(self, config: Any) -> bool:
        """Return True: every channel goes on with methods that are chosen later."""
        return True

    def stepped(self, config: Any, model: ModelSpec, run: Run) -> Mapping[str, tuple[int, int]]:
        """Return the range of each trainable parameter of which this rank has a fragment."""
        rank = self.kind.lines(config, run).sharing.axis.rank
        flats = [flat for unit in self.kind.plan(config, model, run) for flat in unit.trainable]
        return {place.name: place.shares[rank] for flat in flats for place in flat.places}

    def options_of_layout(self, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options of the keys; a store on a disk gets a directory."""
        options = dict(super().options_of_layout(keys))
        store = options.pop(OFFLOAD, NOWHERE)
        if store != NOWHERE:
            place = {"path": PLACE} if store == DISK else {}
            options[OFFLOAD] = {"optimizer": store, **place}
        return options

    def layouts(
        self, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return state on the device, in host memory, and on a disk."""
        return ({}, {OFFLOAD: "cpu"}, {OFFLOAD: DISK})
