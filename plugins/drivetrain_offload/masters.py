"""The state that a store keeps for parameters, and the new values that its steps make."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.sharding.home import BoundOptimizer
from drivetrain.sharding.layout import ParameterSlot
from drivetrain.sharding.options import OffloadOptions
from drivetrain.sharding.shard import FlatTensor, followed, make_placeholder
from drivetrain.sharding.unit import Unit
from drivetrain.store import ShardSpec, ShardStepper, SteppingStore
from drivetrain_offload.tier_bytes import offloaded

logger = get_logger(__name__)


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
    flat: FlatTensor
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

    Attributes:
        units: the chosen units, in the order in which backward usually reaches them.
        parameters: by slot.
        steppers: of the parameters, by optimizer.
    """

    def __init__(self, options: OffloadOptions, store: SteppingStore) -> None:
        self.units: list[Unit] = []
        self.parameters: dict[ParameterSlot, OffloadedParameter] = {}
        self.steppers: dict[BoundOptimizer, ShardStepper] = {}
        self._options = options
        self._store = store
        self._places: dict[ParameterSlot, tuple[Unit, FlatTensor]] = {}

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
        self._check_stepped_once(bound)
        new = [s for s in bound.held if s in self._places and s not in self.parameters]
        if not new:
            return
        stepper = self.steppers.get(bound) or self._store.stepper(bound.optimizer)
        if stepper is None:
            self._leave(bound.optimizer, new)
            return
        self.steppers.setdefault(bound, stepper)
        _wait_for_steps({self._places[slot][0] for slot in new})
        number = len(self.steppers)
        groups = bound.optimizer.param_groups
        for (unit, group), slots in self._by_unit_and_group(new, bound).items():
            block = f"{number}: {unit.label}, {slots[0].name} and on"
            self._adopt_block(bound, stepper, block, slots, groups[group])
        for flat in {self._places[slot][1] for slot in new}:
            self._leave_masters(flat)

    def _adopt_block(
        self,
        bound: BoundOptimizer,
        stepper: ShardStepper,
        block: str,
        slots: Sequence[ParameterSlot],
        group: Mapping[str, Any],
    ) -> None:
        specs = [
            ShardSpec(slot.owned_numel, slot.master, self._keeps_master(slot)) for slot in slots
        ]
        stepper.adopt(block, specs, group)
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
            if one.master:
                one.set_master(flat.shard.read(slot).to("cpu"))
                if unit.resident:
                    unit.notice_all_writes()
            state = bound.optimizer.state.pop(one.fragment, None)
            if state:
                one.set_states(state)

    def _leave_masters(self, flat: FlatTensor) -> None:
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


def _wait_for_steps(units: Iterable[Unit]) -> None:
    """Return when no step is on its way into these units."""
    for unit in units:
        if unit.resident:
            unit.wait_for_values()
        unit.wait_for_step()


class PendingValues:
    """The new values of one unit that a store's steps make, until forward may see them.

    Memory for them is taken when a step comes to them.

    Attributes:
        parameters: the parameters with new values.
        awaited: how many steps are still to write values.
    """

    def __init__(self) -> None:
        self.parameters: list[OffloadedParameter] = []
        self.awaited = 0
        self._buffers: dict[FlatTensor, Tensor] = {}

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
            with torch.inference_mode(False):
                self._buffers[flat] = torch.empty(flat.owned, dtype=flat.shard.dtype, device="cpu")
        return self._buffers[flat][one.slot.local]
