"""Optimizer steps that stores take in the background, unit by unit.

::

    optimizer.step()   one update per unit is submitted, in the order in which forward needs them;
                       the optimizer itself finds gradients of what is not offloaded only
    next forward       each unit waits for its own update, the others go on meanwhile

With ``delayed``, what an update brings is taken over at the following step instead. Clipping costs
no pass over the gradients: its factor goes with the update.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.sharding.binding import Bound
from drivetrain.sharding.fresh import FreshValues
from drivetrain.sharding.kept import Kept, stand_in
from drivetrain.sharding.offload_options import OffloadOptions
from drivetrain.sharding.opened_stores import OpenedStores
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.state_hooks import KeptState, flat_state
from drivetrain.sharding.tier_bytes import Plan, offloaded
from drivetrain.sharding.tiers import announce_tiers
from drivetrain.sharding.unit import Unit
from drivetrain.store import Pending, ShardSpec, ShardStep, ShardStepper, SteppingStore
from drivetrain.strategy import Run

logger = get_logger(__name__)


class Offload:
    """What lies in stores for one model.

    Args:
        options: what, and in which stores.
        device: that of the model.
    """

    def __init__(self, options: OffloadOptions, device: torch.device) -> None:
        options.check()
        self._options = options
        self._device = device
        self._stores = OpenedStores(options)
        self._steppers: list[ShardStepper] = []
        self._units: list[Unit] = []
        self._factors: dict[Slot, float] = {}
        self._taken: dict[nn.Parameter, Tensor] = {}
        self._late: list[tuple[Bound, Pending, FreshValues]] = []

    @property
    def active(self) -> bool:
        """Whether anything lies in a store."""
        return bool(self._options.optimizer)

    def announce(self, plan: Plan, run: Run) -> None:
        """Show what will lie where, and refuse what does not fit. Collective over ``dp``.

        Raises:
            PreflightError: some rank has too little of something.
        """
        if self.active:
            announce_tiers(plan, self._options, self._stores.opened, run)

    @property
    def parameters(self) -> SteppingStore | None:
        """The store of the parameters; None where they lie in the memory of their device."""
        store = self._stores.get(self._options.params)
        in_place = store is not None and store.in_memory and store.device == self._device
        return None if in_place else store

    def choose(self, units: Sequence[Unit]) -> None:
        """Choose the units whose state is offloaded: the last ones that forward needs.

        Args:
            units: more units, in the order in which backward usually reaches them.
        """
        chosen = offloaded([unit.layout for unit in units], self._options.ratio)
        self._units += units[:chosen]

    # --- taking over optimizers ---

    def adopt(self, bound: Bound) -> None:
        """Let a store keep what an optimizer needs for parameters that are new to it.

        Raises:
            UsageError: only the optimizer itself can step them, and its state is not in memory; or
                a store steps some of them for another optimizer.
        """
        optimizer = bound.optimizer
        _check_stepped_once(bound)
        fresh = self._new_slots(bound)
        if not self.active or not fresh:
            return
        store = self._stores.get(self._options.optimizer)
        stepper = bound.stepper or (store.stepper(optimizer) if store is not None else None)
        if store is None or stepper is None:
            self._leave(optimizer, fresh)
            return
        if bound.stepper is None:
            bound.stepper = stepper
            self._steppers.append(stepper)
            bound.handles += KeptState(lambda: bound.fragments).connect(optimizer)
        _wait_for_steps({slot.unit for slot in fresh})
        number = len(self._steppers)
        for (unit, group), slots in _by_unit_and_group(fresh, optimizer).items():
            block = f"{number}: {unit.label}, {slots[0].name} and on"
            self._adopt_block(bound, stepper, block, slots, optimizer.param_groups[group])
        for flat in {slot.flat for slot in fresh}:
            mine = [slot for slot in flat.slots if slot.owned_numel]
            if all(slot.kept is not None and slot.kept.master for slot in mine):
                flat.leave_masters()
                for slot in mine:
                    stand_in(slot, slot.flat.layout.master)

    def _new_slots(self, bound: Bound) -> list[Slot]:
        return [
            slot
            for slot in bound.slots.values()
            if slot.kept is None and slot.fragment is not None and slot.unit in self._units
        ]

    def _adopt_block(
        self,
        bound: Bound,
        stepper: ShardStepper,
        block: str,
        slots: Sequence[Slot],
        group: Mapping[str, Any],
    ) -> None:
        specs = [
            ShardSpec(slot.owned_numel, slot.flat.layout.master, self._keeps_master(slot))
            for slot in slots
        ]
        stepper.adopt(block, specs, group)
        for index, (slot, spec) in enumerate(zip(slots, specs, strict=True)):
            slot.kept = Kept(stepper, block, index, spec.kept, self._in_memory)
            slot.flat.gradient_device = torch.device("cpu")
            if spec.kept:
                stepper.set_master(block, index, slot.flat.share.read(slot).to("cpu"))
            state = bound.optimizer.state.pop(slot.fragment, None)  # type: ignore[arg-type]
            if state:
                slot.kept.set_states(flat_state(slot, state))

    def _keeps_master(self, slot: Slot) -> bool:
        """Whether the store keeps the master: it cannot be stepped where it lies, or should not."""
        flat = slot.flat
        return (
            self._options.delayed
            or flat.share.place(slot) is None
            or flat.values.device.type != "cpu"
            or (flat.has_master and not self._in_memory)
        )

    def _leave(self, optimizer: Optimizer, slots: Sequence[Slot]) -> None:
        name, store = type(optimizer).__name__, self._options.optimizer
        usual = "AdamW, Adam, SGD or Adagrad of torch.optim that may take its fused kernel"
        if any(self._keeps_master(slot) for slot in slots) or not self._in_memory:
            raise UsageError(
                f"expected an optimizer that the store {store!r} can step, found {name}; take "
                f"{usual}, or on ranks without an accelerator offload: {{optimizer: cpu}}"
            )
        logger.warning_once(
            f"{name} steps by itself, while everything waits: the store {store!r} steps {usual}"
        )

    @property
    def _in_memory(self) -> bool:
        store = self._stores.get(self._options.optimizer)
        return store is not None and store.in_memory

    # --- the step ---

    def submit(self, bound: Bound) -> None:
        """Submit a step of what is offloaded, and hide its gradients from the optimizer."""
        if bound.stepper is None:
            return
        self.take_over_late(bound)
        blocks: dict[Unit, dict[str, list[ShardStep]]] = defaultdict(lambda: defaultdict(list))
        fresh: dict[Unit, FreshValues] = defaultdict(FreshValues)
        for slot, fragment, group in bound.members():
            if slot.kept is None or fragment.grad is None:
                continue
            step = self._step_of(slot, fragment.grad, group, fresh[slot.unit])
            blocks[slot.unit][slot.kept.block].append(step)
            self._taken[fragment] = fragment.grad
            fragment.grad = None
        for unit in reversed([unit for unit in self._units if unit in blocks]):
            if any(flat.share.in_store for flat in unit.flats):
                unit.settle()  # another optimizer may be writing its part of the same share
            values = fresh[unit]
            values.awaited = len(blocks[unit])
            then = None if self._options.delayed else values.arrive
            for block, steps in blocks[unit].items():
                update = bound.stepper.submit(block, steps, then)
                if self._options.delayed:
                    self._late.append((bound, update, values))
                else:
                    unit.updates.append(update)

    def _step_of(
        self, slot: Slot, grad: Tensor, group: Mapping[str, Any], fresh: FreshValues
    ) -> ShardStep:
        if slot.kept is None:
            raise UsageError(f"{slot.name!r} is not offloaded")
        flat, master = slot.flat, None
        out: Tensor | Callable[[], Tensor] | None
        if slot.kept.master:
            out = fresh.of(slot, in_place=not self._options.delayed)
        else:
            master = flat.share.read(slot).detach()
            resident = not slot.unit.layout.sharded
            out = flat.values[slot.own] if resident and flat.share.separate else None
        return ShardStep(
            slot.kept.index,
            group,
            _one_dim(slot, grad),
            master,
            out,
            self._factors.get(slot, 1.0),  # a gradient that stays goes on waiting for it
        )

    def give_back(self, bound: Bound, give_away: Callable[[Iterable[Slot]], None]) -> None:
        """Show the gradients again, as after any step; late updates keep them for themselves."""
        if self._options.delayed:
            taken = [slot for slot in bound.slots.values() if slot.fragment in self._taken]
            self.forget(taken)
            give_away(taken)
        else:
            for fragment, grad in self._taken.items():
                fragment.grad = grad
        self._taken = {}

    @property
    def late(self) -> bool:
        """Whether there are updates that forward does not see yet."""
        return bool(self._late)

    def take_over_late(self, bound: Bound | None = None) -> None:
        """Wait for late updates of one optimizer, or of all, and let forward see them."""
        due = [late for late in self._late if bound is None or late[0] is bound]
        for _, update, _ in due:
            update.wait()
        for late in due:
            late[2].install()
            self._late.remove(late)

    def drop_late(self) -> None:
        """Wait for late updates, and let forward never see them: other values come."""
        for _, update, _ in self._late:
            update.wait()
        self._late = []

    # --- gradients ---

    def scale(self, slots: Iterable[Slot], factor: float) -> list[Slot]:
        """Let gradients be multiplied when they are stepped with; return those to multiply now."""
        now = []
        for slot in slots:
            if slot.kept is None or slot in self._factors:
                now.append(slot)
            elif factor != 1.0:
                self._factors[slot] = factor
        return now

    def factors(self, only: Collection[Slot] | None = None) -> Iterator[tuple[Slot, float]]:
        """Yield what gradients are still to be multiplied by, and forget it."""
        for slot in list(self._factors):
            if only is None or slot in only:
                yield slot, self._factors.pop(slot)

    def forget(self, slots: Iterable[Slot] | None = None) -> None:
        """Drop factors: the gradients are cleared."""
        for slot in list(self._factors) if slots is None else slots:
            self._factors.pop(slot, None)

    def close(self) -> None:
        """End what was submitted, and release memory and files."""
        for stepper in self._steppers:
            stepper.close()
        self._stores.close()


def _wait_for_steps(units: Iterable[Unit]) -> None:
    """Return when no step is on its way into these units."""
    for unit in units:
        if unit.resident:
            unit.arrive()
        unit.settle()


def _check_stepped_once(bound: Bound) -> None:
    """Refuse a second optimizer for what a store steps: two steps at once would mix."""
    twice = [
        slot.name
        for slot in bound.slots.values()
        if slot.kept is not None and slot.kept.stepper is not bound.stepper
    ]
    if twice:
        raise UsageError(
            f"expected one optimizer for each offloaded parameter, found a second one for "
            f"{twice[0]!r}; change the param groups of the first one, or call "
            "accelerator.free_memory() and prepare the model anew with the second"
        )


def _one_dim(slot: Slot, grad: Tensor) -> Tensor:
    """Return a fragment's gradient in the order of its memory, 1-D, on the CPU."""
    grad = grad.detach()
    if grad.stride() == slot.fragment_strides:
        return grad.as_strided((slot.owned_numel,), (1,)).to("cpu")
    return slot.share_in_order(grad).to("cpu")


def _by_unit_and_group(
    slots: Iterable[Slot], optimizer: Optimizer
) -> dict[tuple[Unit, int], list[Slot]]:
    groups = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    found: dict[tuple[Unit, int], list[Slot]] = defaultdict(list)
    for slot in slots:
        if slot.fragment is not None:
            found[slot.unit, groups[slot.fragment]].append(slot)
    return found
