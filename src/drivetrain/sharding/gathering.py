"""Units are gathered just before use and freed after; who needs a unit next is remembered.

Three mechanisms, from the fastest to the one that nothing escapes:

- Hooks on a unit's module gather it before forward, free it after, and free it again in backward
  when the gradients of the module's inputs are there.
- The unit that followed this one last time (in forward, in backward, in evaluation: each by itself)
  is gathered ahead. If the order changes, the wrong unit was ahead, and nothing else happens.
- Whatever touches a parameter that is away gets its unit gathered on the spot: code outside of the
  module by the parameter's guard, backward by hooks on the tensors that autograd saved.

Every rank must need the same units in the same order. The communicator checks the order, so ranks
that take different paths end with an error that names the units.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.errors import StorageError, UsageError
from drivetrain.parts.rounds import after_backward, in_backward
from drivetrain.sharding.absent import AbsentGuard, LeftGuard, shares_memory
from drivetrain.sharding.hooks import UnitHook
from drivetrain.sharding.layout import ROOT
from drivetrain.sharding.module_units import ModuleUnits, users
from drivetrain.sharding.order import UsualOrder
from drivetrain.sharding.saving import without_values
from drivetrain.sharding.unit import Unit, storages

Until: TypeAlias = Literal["forward", "backward", "step"]


class Gatherer:
    """Gathers and frees the sharded units of one model.

    Args:
        model: the user's model.
        units: its sharded units.
        ahead: how many units are gathered ahead.
        until: when a unit is freed that a training forward has gathered: after that ``forward``,
            in ``backward``, or only when the optimizer steps (``step``).
        neighbors: when they are freed after forward, the ranks that hold them together until
            backward; None leaves each rank its range, as between steps.
        most_live: how many units may be whole or on their way at once, the rest of the model not
            counted: nothing is gathered ahead beyond that. None: as many as are asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        ahead: int,
        until: Until = "forward",
        neighbors: Communicator | None = None,
        most_live: int | None = None,
    ) -> None:
        self._units = units
        self._storages = storages(units)
        self._ahead = ahead
        self._until = until
        self._neighbors = neighbors
        self._most_live = most_live
        self._viewed: set[Unit] = set()
        self._keeping = False
        self._order = UsualOrder()
        self._forwards: list[tuple[object, AbstractContextManager[Any]]] = []
        self._cleaning = False
        for unit in units:
            unit.guard = AbsentGuard(unit, self)
            unit.free()
        self._handles = self._register(model)

    # --- bringing and freeing ---

    def fetch(self, unit: Unit) -> None:
        """Return when a unit is whole; start those that followed it last time in this phase."""
        if not unit.whole:
            if unit.arrival is None:
                self._make_room()
                unit.start()
            if self.in_forward:  # nobody would free what was started ahead between steps
                phase = self._phase()
                self._order.needed(phase, unit)
                self._start_ahead(phase, unit)
            unit.arrive()

    def release(self, unit: Unit) -> None:
        """Free a unit that nobody holds; one that is kept until the step is parked."""
        if unit.holds or not unit.live or unit in self._viewed:
            return
        if not self._keeping:
            unit.free()
        elif unit.whole and not self._forwards:
            unit.park()  # until its next use: what a loss reads of it is saved without values

    def keep_views(self, unit: Unit) -> None:
        """Keep a unit until the outermost forward ends: the script has a view of its values."""
        self._viewed.add(unit)

    def release_all(self) -> None:
        """Release every unit, and what neighbors keep of it."""
        if not self._forwards:
            self._viewed.clear()
        for unit in self._units:
            self.release(unit)
            unit.near = None
        self._order.interrupt()

    def step_taken(self) -> None:
        """Free every unit that nobody holds: its values are no longer the right ones."""
        self._keeping = False
        self._viewed.clear()
        self.release_all()

    @contextmanager
    def holding(self, units: Sequence[Unit]) -> Iterator[None]:
        """Context in which units stay whole; all ranks must enter it with the same units."""
        for unit in units:
            unit.holds += 1
        try:
            for index, unit in enumerate(units):
                for one in units[index : index + 2]:  # the next one travels meanwhile
                    if not one.whole and one.arrival is None:
                        one.start()
                unit.arrive()
            yield
        finally:
            for unit in units:
                unit.holds -= 1
                self.release(unit)

    @property
    def in_forward(self) -> bool:
        """Whether the model runs forward or backward now, which free at their end."""
        return bool(self._forwards) or in_backward()

    def close(self) -> None:
        """Take the hooks off. Units stay divided; the only rank has those in memory whole."""
        self.leave_forward()  # an interrupt may have cut one short
        for handle in self._handles:
            handle.remove()
        for unit in self._units:
            unit.guard = LeftGuard(unit)
            if unit.communicator.size == 1 and all(flat.share.at_hand for flat in unit.flats):
                with suppress(StorageError):  # told before; what is lost stays guarded
                    unit.start()
            elif not unit.holds:
                unit.free()

    def _phase(self) -> str:
        if in_backward():
            return "backward"
        return "forward" if torch.is_grad_enabled() else "evaluation"

    def _start_ahead(self, phase: str, unit: Unit) -> None:
        for following in self._order.after(phase, unit, self._ahead):
            if not following.live:
                if self._full():
                    return
                following.start()

    def _full(self) -> bool:
        """Whether no further unit may be gathered ahead. What is kept by intent does not count."""
        if self._most_live is None or self._until != "forward":
            return False
        live = sum(unit.live for unit in self._units if unit.layout.key != ROOT)
        return live >= self._most_live

    def _make_room(self) -> None:
        """Free what was gathered ahead in vain, if a unit that is needed would be one too many."""
        if self._full():
            for unit in self._units:
                if unit.arrival is not None and not unit.whole and not unit.holds:
                    unit.free()

    # --- hooks ---

    def _register(self, model: nn.Module) -> list[RemovableHandle]:
        handles = [
            model.register_forward_pre_hook(UnitHook(self._enter_model), prepend=True),
            model.register_forward_hook(UnitHook(self._leave_model), always_call=True),
        ]
        for module, units in users(model, self._units).items():
            hook = ModuleUnits(self, units)
            handles.append(module.register_forward_pre_hook(UnitHook(hook.enter), with_kwargs=True))
            handles.append(module.register_forward_hook(UnitHook(hook.leave), always_call=True))
        return handles

    def _enter_model(self, module: nn.Module, inputs: Any) -> None:
        if not self.in_forward:
            self._order.begin()
            self._cleaning = False  # a backward that raised has not cleaned
            if self._until == "step" and torch.is_grad_enabled():
                self._keeping = True
        self.enter_forward(self)

    def _leave_model(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.leave_forward(self)
        if self.in_forward:
            return
        # Backward begins with the last unit, and gathers so many ahead: they need not be freed.
        self._order.end(spared=1 + self._ahead)
        if not torch.is_grad_enabled() or outputs is None:
            self.release_all()  # evaluation, or an exception
        for unit in self._units:
            if shares_memory(outputs, unit):
                raise UsageError(
                    f"expected a forward that computes its result, found that it returns a view "
                    f"of parameters of {unit.label}, which are freed; return a clone() of it"
                )

    def enter_forward(self, owner: object) -> None:
        """Begin the forward of the model or of a unit's module; the outermost one counts."""
        context = nullcontext() if self.in_forward else self.saving()
        context.__enter__()
        self._forwards.append((owner, context))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a forward of the model that does not go through a call of it."""
        owner = object()
        if not self.in_forward:
            self._order.begin()
        self.enter_forward(owner)
        try:
            yield
        finally:
            self.leave_forward(owner)

    def leave_forward(self, owner: object = None) -> None:
        """End a forward and those inside of it that an exception cut short; without owner, all.

        Until backward, what is still whole is used through guards only: the values that a loss
        reads from such a unit must be saved without values, too.
        """
        found = owner is None or any(entered is owner for entered, _ in self._forwards)
        while found and self._forwards:
            entered, context = self._forwards.pop()
            context.__exit__(None, None, None)
            found = entered is not owner
        if not self.in_forward:
            self._viewed.clear()
            for unit in self._units:
                if unit.whole and not unit.holds:
                    unit.park()

    def leave_unit(self, unit: Unit) -> None:
        """Free a unit after its forward, unless its backward is next."""
        if in_backward():
            return  # recomputed: its backward follows
        if not torch.is_grad_enabled():
            self.release(unit)
        elif self._until == "forward" and not self._order.left_for_good(unit):
            self._free_until_backward(unit)

    def _free_until_backward(self, unit: Unit) -> None:
        needed = unit.holds or unit in self._viewed
        if self._neighbors is not None and unit.whole and not needed:
            unit.free_but_near(self._neighbors)
        else:
            self.release(unit)

    # --- what autograd saves ---

    def saving(self) -> saved_tensors_hooks:
        """Return the context in which autograd saves views of units without their values."""
        return without_values(self._storages, self._bring_back)

    def _bring_back(self, unit: Unit) -> None:
        """Make a unit whole for backward; what is left is freed at its end."""
        if in_backward() and not self._cleaning:
            self._cleaning = True
            after_backward(self._clean)
        self.fetch(unit)

    def _clean(self) -> None:
        self._cleaning = False
        self.release_all()
