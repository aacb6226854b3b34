"""The strategy ``offload``, and the engine that steps in the background, unit by unit.

Paper: Ren et al., "ZeRO-Offload", USENIX ATC 2021, section 4.2: ZeRO-2 on several devices, whose
shards of optimizer state lie in host memory.

The offload engine: optimizer steps that stores take in the background, unit by unit.

Papers: Ren et al., "ZeRO-Offload", USENIX ATC 2021, section 4; Rajbhandari et al., "ZeRO-Infinity",
SC 2021, section 5.

::

    optimizer.step()   one update per unit is submitted, in the order in which forward needs them;
                       the optimizer itself finds gradients of other parameters only
    next forward       each unit waits for its own update, the others go on meanwhile

With ``delayed``, the results of an update are taken over at the following step instead
(ZeRO-Offload's one-step delayed update). Clipping costs no pass over the gradients: its factor goes
with the update.

With ``in_backward``, the update of a unit begins when its gradients are reduced, as long as the
store has little to do; ``step`` submits the rest, and lets forward see all of them. Parameters
change at ``step`` as always, but states have changed before: between the two nothing may change
that a step depends on.
"""

import itertools
import sys
from abc import ABC
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.parallel.estimate import Estimate
from drivetrain.parallel.layout import ParameterSlot
from drivetrain.parallel.optimizer_backend import BoundOptimizer, Held, OptimizerBackend
from drivetrain.parallel.options import OffloadOptions, UnitsOptions, store_knobs
from drivetrain.parallel.unit import FlatParameter, ShardStorage, Unit, followed, make_placeholder
from drivetrain.registry import stores
from drivetrain.saved_state import AROUND
from drivetrain.store import Pending, ShardSpec, ShardStep, ShardStepper, SteppingStore, TensorStore
from drivetrain.strategy import Planning, Run, Strategy
from drivetrain_offload.options import OffloadConfig, OffloadOutline
from drivetrain_offload.tiers import (
    TierPlan,
    announce_tiers,
    held_by_kind,
    offloaded,
    plan_of,
)
from drivetrain_offload.tiles import AlignedPool, can_page_lock

# --- the strategy ``offload`` ---


class Offload(OffloadOutline, Strategy[OffloadConfig], ABC):
    """Stands for a data-parallel strategy whose state lies in stores, on any number of ranks.

    ``{name: offload, optimizer: cpu}`` is ``{name: zero2, offload: {optimizer: cpu}}``.
    """

    @override
    @classmethod
    def planning(cls) -> Planning:
        """Return the form that is compared."""
        return OffloadForms(cls)


class OffloadForms(Planning):
    """The form of ``offload`` that is compared; plans ask the strategy for which it stands."""

    def variants(self, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return the form with the optimizer's state in host memory."""
        return ({"optimizer": "cpu"},)


# --- the offload engine ---

logger = get_logger(__name__)


# --- the state that a store keeps for parameters, and the new values that its steps make ---

Memory: TypeAlias = Callable[[int, torch.dtype], Tensor]
"""Takes elements and a dtype, and returns a 1-D tensor in host memory, which may hold anything."""


def host_memory(options: OffloadOptions) -> Memory:
    """Return who gives memory for what crosses the bus: gradients, and new values coming back.

    It is page-locked where there is an accelerator: from pageable memory the driver would copy
    everything once more. Pages that are free again wait for the next use, since to lock takes long.
    """
    if can_page_lock() and options.store_options.get("page_locked", True):
        return AlignedPool(page_locked=True, spare=sys.maxsize).empty
    return _pageable


def _pageable(numel: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # else it could be written in inference mode alone
        return torch.empty(numel, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedParameter:
    """A parameter whose optimizer state a store keeps and steps.

    Attributes:
        slot: the parameter's place.
        fragment: the tensor that the optimizer holds in the parameter's place.
        flat: the flat tensor around the slot.
        unit: the unit of the flat tensor.
        stepper: steps the parameter.
        block: the parameter's block in the stepper.
        index: the parameter's place in the block.
        master: whether the store keeps the master, too.
        in_memory: whether the state lies in memory; otherwise a state that is read is a copy.
    """

    slot: ParameterSlot
    fragment: nn.Parameter
    flat: FlatParameter
    unit: Unit
    stepper: ShardStepper
    block: str
    index: int
    master: bool
    in_memory: bool

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the states as torch names them, in the fragment's shape; none before a step."""
        slot = self.slot
        for key, value in self.stepper.states(self.block, self.index):
            if value.dim() == 1 and value.numel() == slot.owned_numel:
                yield key, value.as_strided(slot.fragment_shape, slot.fragment_strides)
            else:
                yield key, value

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Replace the states; tensors of the fragment's shape become 1-D."""
        slot = self.slot
        flat = {
            key: slot.fragment_in_order(value)
            if isinstance(value, Tensor) and value.shape == slot.fragment_shape and value.dim()
            else value
            for key, value in states.items()
        }
        self.stepper.set_states(self.block, self.index, flat)

    def read_master(self) -> Tensor:
        """Return the master that the store keeps, 1-D."""
        return self.stepper.master(self.block, self.index)

    def set_master(self, values: Tensor) -> None:
        """Replace the master that the store keeps by a 1-D tensor of its dtype."""
        self.stepper.set_master(self.block, self.index, values)

    def follow_values(self) -> None:
        """Let the master follow the parameter's whole values where those changed.

        Elements that nobody changed keep the digits that the dtype of forward has no room for.
        """
        master = self.read_master()
        own = self.flat.values[self.slot.own].detach().to(master.device)
        self.set_master(followed(master, own))


class OffloadedParameters:
    """The parameters of one model whose optimizer state a store keeps.

    Args:
        options: say which state lies in stores.
        store: keeps and steps optimizer state.
        memory: gives room in host memory for gradients on their way there.

    Attributes:
        units: the chosen units, in the order in which backward usually reaches them.
        parameters: by slot.
        steppers: of the parameters, by optimizer.
        optimizers: those whose steps some rank's store takes, the same on every rank.
    """

    def __init__(self, options: OffloadOptions, store: SteppingStore, memory: Memory) -> None:
        self.units: list[Unit] = []
        self.parameters: dict[ParameterSlot, OffloadedParameter] = {}
        self.steppers: dict[BoundOptimizer, ShardStepper] = {}
        self.optimizers: set[BoundOptimizer] = set()
        self._options = options
        self._store = store
        self._memory = memory
        self._places: dict[ParameterSlot, tuple[Unit, FlatParameter]] = {}

    def choose(self, units: Sequence[Unit]) -> None:
        """Choose among more units, in backward's order, the last ones that forward needs."""
        chosen = units[: offloaded([unit.layout for unit in units], self._options.ratio)]
        self.units += chosen
        for unit in chosen:
            for flat in unit.flats:
                self._places.update(dict.fromkeys(flat.slots, (unit, flat)))

    def adopt(self, bound: BoundOptimizer) -> None:
        """Let a store keep the states and masters of an optimizer's new parameters.

        Raises:
            UsageError: only the optimizer itself can step them, and its state is not in memory; or
                a store steps some of them for another optimizer.
        """
        if not self._places.keys().isdisjoint(bound.slots.values()):
            self.optimizers.add(bound)
        self._check_stepped_once(bound)
        new = [s for s in bound.held if s in self._places and s not in self.parameters]
        if not new:
            return
        stepper = self.steppers.get(bound) or self._store.stepper(bound.optimizer)
        if stepper is None:
            self._leave(bound.optimizer, new)
            return
        self.steppers.setdefault(bound, stepper)
        for unit in {self._places[slot][0] for slot in new}:
            if unit.resident:
                unit.wait_for_unshard()
            unit.wait_for_step()
        number = len(self.steppers)
        for (unit, group), slots in self._by_unit_and_group(new, bound).items():
            block = f"{number}: {unit.label}, {slots[0].name} and on"
            self._adopt_block(bound, block, slots, group)
        for flat in {self._places[slot][1] for slot in new}:
            self._leave_masters(flat)

    def _adopt_block(
        self, bound: BoundOptimizer, block: str, slots: Sequence[ParameterSlot], group: int
    ) -> None:
        specs = [
            ShardSpec(slot.owned_numel, slot.master, self._keeps_master(slot)) for slot in slots
        ]
        stepper = self.steppers[bound]
        stepper.adopt(block, specs, bound.optimizer.param_groups[group])
        for index, (slot, spec) in enumerate(zip(slots, specs, strict=True)):
            unit, flat = self._places[slot]
            one = OffloadedParameter(
                slot=slot,
                fragment=bound.held[slot],
                flat=flat,
                unit=unit,
                stepper=stepper,
                block=block,
                index=index,
                master=spec.kept,
                in_memory=self._store.in_memory,
            )
            self.parameters[slot] = one
            flat.gradient_device = torch.device("cpu")
            flat.gradient_memory = self._memory
            if one.master:
                one.set_master(flat.shard.read(slot).to("cpu"))
                if unit.resident:
                    unit.notice_all_writes()
            state = bound.optimizer.state.pop(one.fragment, None)
            if state:
                one.set_states(state)

    def _leave_masters(self, flat: FlatParameter) -> None:
        """Keep a flat tensor in the dtype of forward only, if a store has all of its masters."""
        mine = [self.parameters.get(slot) for slot in flat.slots if slot.owned_numel]
        if all(one is not None and one.master for one in mine):
            flat.leave_masters()
            for one in mine:
                if one is not None:
                    make_placeholder(one.slot, one.fragment, one.slot.master)

    def _keeps_master(self, slot: ParameterSlot) -> bool:
        """Whether the store keeps the master: it cannot be stepped where it lies, or should not."""
        flat = self._places[slot][1]
        return (
            self._options.delayed
            or self._options.in_backward
            or flat.shard.place(slot) is None
            or flat.values.device.type != "cpu"
            or (flat.has_master and not self._store.in_memory)
        )

    def _leave(self, optimizer: Optimizer, slots: Sequence[ParameterSlot]) -> None:
        name, store = type(optimizer).__name__, self._options.optimizer
        usual = "AdamW, Adam, SGD or Adagrad of torch.optim that may take its fused kernel"
        if any(self._keeps_master(slot) for slot in slots) or not self._store.in_memory:
            raise UsageError(
                f"expected an optimizer that the store {store!r} can step, found {name}; take "
                f"{usual}, or on ranks without an accelerator offload: {{optimizer: cpu}}"
            )
        logger.warning_once(
            f"{name} steps by itself, while everything waits: the store {store!r} steps {usual}"
        )

    def _check_stepped_once(self, bound: BoundOptimizer) -> None:
        """Refuse a second optimizer for shards that a store steps: two steps at once would mix."""
        kept = (self.parameters[slot] for slot in bound.slots.values() if slot in self.parameters)
        stepper = self.steppers.get(bound)
        twice = [one.slot.name for one in kept if one.stepper is not stepper]
        if twice:
            raise UsageError(
                f"expected one optimizer for each offloaded parameter, found a second one for "
                f"{twice[0]!r}; change the param groups of the first one, or call "
                "accelerator.free_memory() and prepare the model anew with the second"
            )

    def _by_unit_and_group(
        self, slots: Iterable[ParameterSlot], bound: BoundOptimizer
    ) -> dict[tuple[Unit, int], list[ParameterSlot]]:
        groups = {
            parameter: index
            for index, group in enumerate(bound.optimizer.param_groups)
            for parameter in group["params"]
        }
        found: dict[tuple[Unit, int], list[ParameterSlot]] = defaultdict(list)
        for slot in slots:
            found[self._places[slot][0], groups[bound.held[slot]]].append(slot)
        return found


class PendingValues:
    """The new values of one unit that a store's steps make, until forward may see them.

    Memory for them is taken when a step comes to them.

    Args:
        memory: gives it.

    Attributes:
        parameters: the parameters with new values.
        awaited: how many steps are still to write values.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.parameters: list[OffloadedParameter] = []
        self.awaited = 0
        self._buffers: dict[FlatParameter, Tensor] = {}

    def of(self, one: OffloadedParameter, *, in_place: bool) -> Tensor | Callable[[], Tensor]:
        """Return the tensor for a parameter's new values, 1-D, on the CPU.

        Args:
            one: the parameter.
            in_place: whether forward may read the tensor itself.
        """
        place = one.flat.shard.place(one.slot)
        if in_place and place is not None and place.device.type == "cpu":
            return place.detach()
        self.parameters.append(one)
        return partial(self._room, one)

    def arrive(self) -> None:
        """Let forward see them when the last awaited step has written its part."""
        self.awaited -= 1
        if not self.awaited:
            self.install()

    def install(self) -> None:
        """Let forward see them."""
        for flat, values in self._buffers.items():
            changed = [one.slot for one in self.parameters if one.flat is flat]
            with torch.no_grad():
                if sum(slot.owned_numel for slot in changed) == flat.owned:
                    flat.shard.replace(values)
                else:
                    for slot in changed:
                        flat.shard.write(slot, values[slot.local])
        self._buffers = {}

    def _room(self, one: OffloadedParameter) -> Tensor:
        flat = one.flat
        if flat not in self._buffers:
            self._buffers[flat] = self._memory(flat.owned, flat.shard.dtype)
        return self._buffers[flat][one.slot.local]


# --- steps that begin in backward ---

Member: TypeAlias = tuple[OffloadedParameter, nn.Parameter, Mapping[str, Any]]
"""A parameter, what the optimizer holds in its place, and the param group."""

MOST_BEGUN = 2
"""Updates under way in backward: one is computed, one waits. Units that are complete meanwhile may
have to wait until the optimizer steps; then those come first that forward needs first."""


@dataclass(frozen=True, slots=True, eq=False)
class BegunUpdate:
    """The update of one unit by one optimizer, begun in backward.

    Attributes:
        updates: by block.
        values: what forward sees once the optimizer steps.
        gradients: those of fragments that the update has read, with their versions.
    """

    updates: Mapping[str, Pending]
    values: PendingValues
    gradients: Mapping[nn.Parameter, tuple[Tensor, int]]

    def done(self) -> bool:
        """Whether it is over, or failed."""
        return all(update.done() for update in self.updates.values())


class BegunSteps:
    """The steps of a model's optimizers, from the backward in which they begin until they are due.

    Attributes:
        updates: by optimizer and unit.
    """

    def __init__(self) -> None:
        self.updates: dict[BoundOptimizer, dict[Unit, BegunUpdate]] = defaultdict(dict)
        self._ready: deque[tuple[Unit, Collection[ParameterSlot]]] = deque()
        self._groups: dict[BoundOptimizer, dict[nn.Parameter, Mapping[str, Any]]] = {}
        self._frozen: dict[BoundOptimizer, list[dict[str, Any]]] = {}

    def next_after(
        self, unit: Unit, fresh: Collection[ParameterSlot]
    ) -> Iterator[tuple[Unit, Collection[ParameterSlot]]]:
        """Yield the units whose update is to begin, now that this one is complete, too."""
        self._ready.append((unit, fresh))
        while self._ready and self._under_way() < MOST_BEGUN:
            yield self._ready.popleft()

    def _under_way(self) -> int:
        begun = itertools.chain.from_iterable(units.values() for units in self.updates.values())
        return sum(not one.done() for one in begun)

    def groups_of(self, bound: BoundOptimizer) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """Return the group of each fragment of an optimizer, in this backward."""
        if bound not in self._groups:
            self._groups[bound] = {held: group for _, held, group in bound.members()}
        return self._groups[bound]

    def freeze(self, optimizers: Iterable[BoundOptimizer]) -> None:
        """Let nothing change that steps depend on until these optimizers step."""
        self._ready.clear()
        self._groups.clear()
        for bound in optimizers:
            self._frozen[bound] = _options_of(bound)

    def holds(self, slots: Iterable[ParameterSlot]) -> bool:
        """Return whether an optimizer of some of these parameters is to step."""
        bound = self._frozen
        return bool(bound) and any(b.slots.get(s.name) is s for s in slots for b in bound)

    def check_free(self, found: str, slots: Iterable[ParameterSlot] | None = None) -> None:
        """Refuse a change of what steps depend on, on every rank, whether or not it has begun any.

        Raises:
            UsageError: an optimizer is to step before.
        """
        if self._frozen and (slots is None or self.holds(slots)):
            raise UsageError(
                "expected optimizer.step() right after the backward in which its updates began, "
                f"found {found}; change that before backward or after the step, or take "
                "offload.in_backward: false"
            )

    def take(self, bound: BoundOptimizer) -> Mapping[Unit, BegunUpdate]:
        """Return what an optimizer has begun: it steps.

        Raises:
            UsageError: gradients, or options of param groups, have changed since.
        """
        if bound in self._frozen and self._frozen[bound] != _options_of(bound):
            self.check_free("other options of param groups")
        for one in self.updates[bound].values():
            for fragment, (grad, version) in one.gradients.items():
                if fragment.grad is not grad or grad._version != version:
                    self.check_free("gradients that are changed")
        self._frozen.pop(bound, None)
        return self.updates.pop(bound)

    def drop(self) -> None:
        """Wait for all, and let forward never see them: other values come."""
        for units in self.updates.values():
            for one in units.values():
                wait_for_all(one.updates.values())
        self.updates.clear()
        self._frozen.clear()


def _options_of(bound: BoundOptimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups; a tensor may change where it is."""
    return [
        {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in bound.optimizer.param_groups
    ]


def wait_for_all(updates: Iterable[Pending]) -> None:
    """Return when all are over; raises the error of the first that failed."""
    for update in updates:
        update.wait()


# --- the engine ---


class OffloadEngine(OptimizerBackend):
    """The backend whose stores keep optimizer state, and step it where it lies.

    Parameters that are not offloaded lie on the device, as in any other run.

    Args:
        options: which state lies in stores, and in which ones.
        device: that of the model.

    Raises:
        ConfigError: a store cannot keep optimizer state, or has no option of a name.
    """

    active: ClassVar[bool] = True

    def __init__(self, options: OffloadOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._stores = open_stores(options)
        self._memory = host_memory(options)
        self._kept = OffloadedParameters(options, self._stores[options.optimizer], self._memory)
        self._offloaded = self._kept.parameters
        self._factors: dict[ParameterSlot, float] = {}
        self._hidden: dict[nn.Parameter, Tensor] = {}
        self._late: list[tuple[BoundOptimizer, Pending, PendingValues]] = []
        self._begun = BegunSteps()

    @classmethod
    def held(
        cls, estimate: Estimate, model: ModelSpec, config: UnitsOptions, run: Run
    ) -> dict[str, int]:
        """Return the bytes that a rank keeps between steps, by kind; a kind may be on disk."""
        states = {spec.name: model.states for spec in model.parameters}
        lent = config.lent_buffers * estimate.lent_bytes()
        plan = TierPlan(model=model, estimate=estimate, states=states, lent=lent)
        return held_by_kind(plan, config.offload, run.world)

    # --- laying out ---

    def announce(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        estimate: Estimate,
        run: Run,
        *,
        lent: int,
    ) -> None:
        """Show the table of tiers, and refuse a model that does not fit. Collective over ``dp``."""
        plan = plan_of(model, optimizers, estimate, lent=lent)
        announce_tiers(plan, self.options, self._stores, run)

    def shard(self, flat: FlatParameter, label: str) -> ShardStorage:
        """Keep the shard of a freed flat tensor in the store of parameters, if any."""
        store = self._stores.get(self.options.params)
        in_place = store is not None and store.in_memory and store.device == self.device
        if store is None or in_place or not flat.sharded:
            return super().shard(flat, label)
        key = f"parameters of {label}, {flat.slots[0].name} and on"
        return InStoreShard(flat.owned, flat.layout.master, flat.own, store, key)

    def choose(self, units: Sequence[Unit]) -> None:
        """Choose the units whose state is offloaded: the last ones that forward needs."""
        self._kept.choose(units)

    def adopt(self, bound: BoundOptimizer) -> None:
        """Let a store keep the states and masters of an optimizer's new parameters.

        Raises:
            UsageError: as ``OffloadedParameters.adopt``.
        """
        self._kept.adopt(bound)

    # --- the step ---

    def steps(self, bound: BoundOptimizer) -> bool:
        """Return whether a store takes an optimizer's steps, so that no closure can be called."""
        return bound in self._kept.steppers

    def submit(self, bound: BoundOptimizer) -> None:
        """Submit a step of the offloaded shards, and hide their gradients from the optimizer."""
        stepper = self._kept.steppers.get(bound)
        begun = self._begun.take(bound)
        if stepper is None:
            return
        self._take_over(bound)
        members = self._with_gradients(bound)
        for unit, one in begun.items():
            self._let_others_write(unit)
            blocks = list(one.updates)
            arrival = stepper.submit(blocks[-1], (), one.values.arrive)
            unit.updates += [*one.updates.values(), arrival]
            self._hide(members.pop(unit))
        # Forward needs the last unit first: its step is the first to be over.
        for unit in reversed([unit for unit in self._kept.units if unit in members]):
            self._let_others_write(unit)
            updates, values = self._update(stepper, members[unit])
            self._hide(members[unit])
            if self.options.delayed:
                self._late += [(bound, update, values) for update in updates.values()]
            else:
                unit.updates += updates.values()

    def _let_others_write(self, unit: Unit) -> None:
        """Wait for another optimizer that may be writing its part of the same shard in a store."""
        if any(flat.shard.in_store for flat in unit.flats):
            unit.wait_for_step()

    def _with_gradients(self, bound: BoundOptimizer) -> dict[Unit, list[Member]]:
        """Return the offloaded parameters of an optimizer that have a gradient, by unit."""
        found: dict[Unit, list[Member]] = defaultdict(list)
        for slot, fragment, group in bound.members():
            one = self._offloaded.get(slot)
            if one is not None and fragment.grad is not None:
                found[one.unit].append((one, fragment, group))
        return found

    def _update(
        self, stepper: ShardStepper, members: Iterable[Member], *, held: bool = False
    ) -> tuple[dict[str, Pending], PendingValues]:
        """Submit the update of one unit.

        Args:
            stepper: of the optimizer.
            members: its parameters in the unit.
            held: whether forward sees the values only after one more arrival.

        Returns:
            What is submitted, by block, and the new values.
        """
        values, blocks = PendingValues(self._memory), defaultdict[str, list[ShardStep]](list)
        for one, fragment, group in members:
            assert fragment.grad is not None
            blocks[one.block].append(self._step_of(one, fragment.grad, group, values))
        values.awaited = len(blocks) + held
        then = None if self.options.delayed else values.arrive
        return {block: stepper.submit(block, blocks[block], then) for block in blocks}, values

    def _hide(self, members: Iterable[Member]) -> None:
        for _, fragment, _ in members:
            assert fragment.grad is not None
            self._hidden[fragment], fragment.grad = fragment.grad, None

    def begin(self, unit: Unit, fresh: Collection[ParameterSlot]) -> None:
        """Begin updates of units whose gradients are complete, as long as few are under way."""
        for ready, arrived in self._begun.next_after(unit, fresh):
            mine = [self._offloaded[slot] for slot in ready.slots if slot in self._offloaded]
            for bound, stepper in self._kept.steppers.items():
                groups = self._begun.groups_of(bound)
                members = [
                    (one, one.fragment, groups[one.fragment])
                    for one in mine
                    if one.stepper is stepper and one.fragment.grad is not None
                ]
                if not bound.slots.keys().isdisjoint(slot.name for slot in arrived) and members:
                    updates, values = self._update(stepper, members, held=True)
                    read = {
                        held: (held.grad, held.grad._version)
                        for _, held, _ in members
                        if held.grad is not None
                    }
                    self._begun.updates[bound][ready] = BegunUpdate(updates, values, read)

    def freeze(self, fresh: Collection[ParameterSlot]) -> None:
        """Hold back what was begun, when a backward is over, until the optimizers step."""
        names = {slot.name for slot in fresh}
        self._begun.freeze(
            bound for bound in self._kept.optimizers if not names.isdisjoint(bound.slots)
        )

    def holds(self, slots: Iterable[ParameterSlot]) -> bool:
        """Return whether steps of some of these parameters are held back since a backward."""
        return self._begun.holds(slots)

    def check_free(self, found: str, slots: Iterable[ParameterSlot] | None = None) -> None:
        """Refuse a change between a backward and the steps that began in it.

        Raises:
            UsageError: steps began.
        """
        self._begun.check_free(found, slots)

    def _step_of(
        self,
        one: OffloadedParameter,
        grad: Tensor,
        group: Mapping[str, Any],
        pending: PendingValues,
    ) -> ShardStep:
        slot, flat, master = one.slot, one.flat, None
        out: Tensor | Callable[[], Tensor] | None
        if one.master:
            out = pending.of(one, in_place=not (self.options.delayed or self.in_backward))
        else:
            master = flat.shard.read(slot).detach()
            beside = one.unit.resident and flat.shard.separate and not flat.apart
            out = flat.values[slot.own] if beside else None
        return ShardStep(
            one.index,
            group,
            _one_dim(slot, grad),
            master,
            out,
            self._factors.get(slot, 1.0),  # a gradient that stays goes on waiting for it
        )

    def give_back(self, bound: BoundOptimizer) -> Collection[ParameterSlot]:
        """Show the gradients again, as after any step; late updates keep them for themselves."""
        hidden, self._hidden = self._hidden, {}
        if self.options.delayed:
            taken = [slot for slot, fragment in bound.held.items() if fragment in hidden]
            self.forget(taken)
            return taken
        for fragment, grad in hidden.items():
            fragment.grad = grad
        return ()

    def take_over_late(self) -> bool:
        """Wait for late updates, and let forward see them; return whether there were any.

        Raises:
            UsageError: steps have begun in backward.
        """
        self.check_free("gathered()")
        found = bool(self._late)
        self._take_over(None)
        return found

    def _take_over(self, bound: BoundOptimizer | None) -> None:
        due = [late for late in self._late if bound is None or late[0] is bound]
        wait_for_all(update for _, update, _ in due)
        for late in due:
            late[2].install()
            self._late.remove(late)

    def drop_late(self) -> None:
        """Wait for what is held back, and let forward never see it: other values come."""
        wait_for_all(update for _, update, _ in self._late)
        self._late = []
        self._begun.drop()

    # --- gradients ---

    def scale(self, slots: Iterable[ParameterSlot], factor: float) -> Collection[ParameterSlot]:
        """Let gradients be multiplied when they are stepped with; return those to multiply now."""
        now = []
        for slot in slots:
            if slot not in self._offloaded or slot in self._factors:
                now.append(slot)
            elif factor != 1.0:
                self._factors[slot] = factor
        return now

    def due(self, slots: Iterable[ParameterSlot]) -> Mapping[ParameterSlot, float]:
        """Return the factors that gradients still wait for, and forget them."""
        if not self._factors:
            return {}
        return {slot: self._factors.pop(slot) for slot in slots if slot in self._factors}

    def forget(self, slots: Iterable[ParameterSlot] | None) -> None:
        """Drop factors: the gradients are cleared."""
        for slot in list(self._factors) if slots is None else slots:
            self._factors.pop(slot, None)

    # --- state ---

    def master(self, flat: FlatParameter, slot: ParameterSlot) -> Held:
        """Return the master that a store keeps; otherwise the part of the shard.

        Raises:
            UsageError: a step that began in backward was not taken.
        """
        self.check_free("a use of the optimizer's state", [slot])
        one = self._offloaded.get(slot)
        if one is None or not one.master:
            return super().master(flat, slot)
        return Held(one.read_master(), not one.in_memory)

    def set_master(self, flat: FlatParameter, slot: ParameterSlot, values: Tensor) -> None:
        """Write into the store, and into the shard."""
        one = self._offloaded.get(slot)
        if one is not None and one.master:
            one.set_master(values)
        super().set_master(flat, slot, values)

    def values_changed(self, unit: Unit) -> None:
        """Let masters that stores keep follow whole values that a script has changed.

        Raises:
            UsageError: updates are held back, which the values lack.
        """
        self.check_free("parameters that are changed", unit.slots)
        if self._late:
            raise UsageError(
                "expected no writes into parameters outside of gathered() with offload.delayed: "
                f"true, found some into {unit.label}, whose latest update is held back; write "
                "inside 'with accelerator.gathered(model):' on every rank, or take "
                "offload.delayed: false"
            )
        for slot in unit.slots:
            one = self._offloaded.get(slot)
            if one is not None and one.master:
                one.follow_values()

    def states(self, bound: BoundOptimizer, slot: ParameterSlot) -> Iterator[tuple[str, Held]]:
        """Yield the states that the store keeps, or else the states of the optimizer itself.

        Raises:
            UsageError: a step that began in backward was not taken.
        """
        self.check_free("a use of the optimizer's state", [slot])
        one = self._offloaded.get(slot)
        if one is None:
            yield from super().states(bound, slot)
            return
        for key, value in one.states():
            yield key, Held(value, not one.in_memory and value.shape == slot.fragment_shape)
        beside = bound.optimizer.state.get(one.fragment, {})
        yield from ((key, Held(beside[key])) for key in AROUND if key in beside)

    def set_states(
        self, bound: BoundOptimizer, slot: ParameterSlot, states: Mapping[str, Any]
    ) -> None:
        """Fill the store, and put the state of a strategy around into the optimizer."""
        one = self._offloaded.get(slot)
        if one is None:
            super().set_states(bound, slot, states)
            return
        around = {key: states[key].to(slot.master) for key in AROUND if key in states}
        one.set_states({key: value for key, value in states.items() if key not in AROUND})
        bound.optimizer.state.pop(one.fragment, None)
        if around:
            bound.optimizer.state[one.fragment] = around

    def close(self) -> None:
        """End submitted updates, and release memory and files."""
        for stepper in self._kept.steppers.values():
            stepper.close()
        for store in self._stores.values():
            store.close()


def _one_dim(slot: ParameterSlot, grad: Tensor) -> Tensor:
    """Return a fragment's gradient in the order of its memory, 1-D, on the CPU."""
    grad = grad.detach()
    if grad.stride() == slot.fragment_strides:
        return grad.as_strided((slot.owned_numel,), (1,)).to("cpu")
    return slot.fragment_in_order(grad).to("cpu")


# --- the stores that options name, and the shards of flat tensors that lie in them ---


class InStoreShard(ShardStorage):
    """A shard that lies in a store and comes for every use, as the same tensor as in memory.

    ``key`` names the shard in the store; the other arguments are those of ``ShardStorage``.
    """

    in_store: ClassVar[bool] = True
    at_hand: ClassVar[bool] = False

    def __init__(
        self, numel: int, dtype: torch.dtype, own: Sequence[Tensor], store: TensorStore, key: str
    ) -> None:
        super().__init__(numel, dtype, own)
        self._store = store
        self._key = key
        self._fresh: Tensor | None = torch.empty(numel, dtype=dtype)  # until it is full

    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Bring it, and copy it."""
        if self._own:
            chosen = self._own if places is None else list(places)
            with torch.no_grad():
                torch._foreach_copy_(chosen, self._pieces(self._fetch()))

    def take(self) -> None:
        """Put the changed values back."""
        values = self._fetch().clone()
        self._taken_back(values)
        self.replace(values)

    def read(self, slot: ParameterSlot) -> Tensor:
        """Bring all of it, and return a copy of a part, which does not hold the rest."""
        return self._fetch()[slot.local].clone()

    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Bring it, change it and put it back; at first, wait until it was written for good."""
        if self._fresh is not None:
            self._fresh[slot.local].copy_(values)
            return
        whole = self._fetch().clone()
        whole[slot.local].copy_(values)
        self.replace(whole)

    def replace(self, values: Tensor) -> None:
        """Put it."""
        self._fresh = None
        self._store.put(self._key, values.to(self.dtype))

    def flush(self) -> None:
        """Put the first values into the store; from here on no shard stays in memory."""
        if self._fresh is not None:
            self.replace(self._fresh)

    def narrow(self, dtype: torch.dtype) -> None:
        """Put a narrower copy in its place."""
        if dtype is not self.dtype:
            values = self._fetch()
            self.dtype = dtype
            self.replace(values)

    def ahead(self) -> None:
        """Let the store read ahead."""
        if self._fresh is None:
            self._store.prefetch([self._key])

    def _fetch(self) -> Tensor:
        return self._store.fetch(self._key) if self._fresh is None else self._fresh


def open_stores(options: OffloadOptions) -> dict[str, SteppingStore]:
    """Open the stores that the options of one model name, each once; return them by name.

    Args:
        options: as ``check`` found them right.

    Raises:
        ConfigError: a store cannot keep optimizer state.
    """
    kinds = {n: stores().load(n) for n in sorted({options.optimizer, options.params} - {""})}
    settings = dict(options.store_options)
    if options.path:
        settings["path"] = options.path
    return {name: _open(name, kind, settings) for name, kind in kinds.items()}


def _open(name: str, kind: Any, settings: dict[str, Any]) -> SteppingStore:
    knobs = store_knobs(kind)
    chosen = {key: value for key, value in settings.items() if key in knobs}
    store = kind(kind.Config(**chosen)) if knobs else kind()
    if not isinstance(store, SteppingStore):
        raise ConfigError(
            f"expected a store that keeps optimizer state, found {name!r}, which keeps tensors "
            "only; take one that has stepper(), such as cpu"
        )
    return store
