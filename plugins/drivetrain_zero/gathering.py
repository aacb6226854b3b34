"""Stage 3: units are gathered just before use and freed after; who needs a unit next is remembered.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from drivetrain.errors import UsageError
from drivetrain.parts.collectives import Communicator
from drivetrain.parts.naming import clean_name
from drivetrain.parts.rounds import after_backward, in_backward
from drivetrain_zero.absent import AbsentGuard, DetachedGuard, refusal, shares_memory
from drivetrain_zero.hooks import UnitHook, is_compiled
from drivetrain_zero.layout import ROOT
from drivetrain_zero.unit import FlatUnit, storages

_AS_IT_IS: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (
    lambda tensor: tensor,
    lambda packed: packed,
)


class Gatherer:
    """Gathers and frees the sharded units of one model.

    Args:
        model: the user's model.
        units: its sharded units.
        ahead: how many units are gathered ahead.
        reshard_after_forward: whether units are freed between forward and backward.
        neighbors: when they are freed then, the ranks that hold them together until backward; None
            leaves each rank its range, as between steps.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[FlatUnit],
        *,
        ahead: int,
        reshard_after_forward: bool,
        neighbors: Communicator | None = None,
    ) -> None:
        self._units = units
        self._storages = storages(units)
        self._ahead = ahead
        self._reshard = reshard_after_forward
        self._neighbors = neighbors
        self._next: dict[tuple[str, FlatUnit], FlatUnit] = {}
        self._latest: dict[str, FlatUnit] = {}
        self._order: dict[FlatUnit, None] = {}
        self._spared: frozenset[FlatUnit] = frozenset()
        self._forwards: list[tuple[object, AbstractContextManager[Any]]] = []
        self._cleaning = False
        for unit in units:
            unit.guard = AbsentGuard(unit, self)
            unit.free()
        self._handles = self._register(model)

    # --- bringing and freeing ---

    def fetch(self, unit: FlatUnit) -> None:
        """Return when a unit is whole; start those that followed it last time in this phase."""
        if not unit.whole:
            if unit.arrival is None:
                unit.start()
            if self.in_forward:  # nobody would free what was started ahead between steps
                phase = self._phase()
                self._remember(phase, unit)
                self._start_ahead(phase, unit)
            unit.arrive()

    def release(self, unit: FlatUnit) -> None:
        """Free a unit that nobody holds."""
        if not unit.holds and (unit.whole or unit.arrival is not None):
            unit.free()

    def release_all(self) -> None:
        """Free every unit that nobody holds, and what neighbors keep of it."""
        for unit in self._units:
            self.release(unit)
            unit.near = None
        self._latest.clear()

    @contextmanager
    def holding(self, units: Sequence[FlatUnit]) -> Iterator[None]:
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
        """Take the hooks off. Units stay divided; the only rank of an axis has them whole."""
        self.leave_forward()  # an interrupt may have cut one short
        for handle in self._handles:
            handle.remove()
        for unit in self._units:
            unit.guard = DetachedGuard(refusal(unit))
            if unit.communicator.size == 1:
                unit.start()
            elif not unit.holds:
                unit.free()

    def _phase(self) -> str:
        if in_backward():
            return "backward"
        return "forward" if torch.is_grad_enabled() else "evaluation"

    def _remember(self, phase: str, unit: FlatUnit) -> None:
        before = self._latest.get(phase)
        if before is not None:
            self._next[phase, before] = unit
        self._latest[phase] = unit
        if phase == "forward":
            self._order.pop(unit, None)
            self._order[unit] = None

    def _start_ahead(self, phase: str, unit: FlatUnit) -> None:
        for _ in range(self._ahead):
            following = self._next.get((phase, unit))
            if following is None:
                return
            if not following.whole and following.arrival is None:
                following.start()
            unit = following

    # --- hooks ---

    def _register(self, model: nn.Module) -> list[RemovableHandle]:
        modules = {clean_name(name): module for name, module in model.named_modules()}
        by_module: dict[nn.Module, list[FlatUnit]] = {}
        for unit in self._units:
            # The inside of a compiled model is one graph: hooks on parts of it would break it.
            module = model if is_compiled(model) else modules.get(unit.layout.key)
            if module is not None and (unit.layout.key != ROOT or is_compiled(model)):
                by_module.setdefault(module, []).append(unit)
        handles = [
            model.register_forward_pre_hook(UnitHook(self._enter_model), prepend=True),
            model.register_forward_hook(UnitHook(self._leave_model), always_call=True),
        ]
        for module, units in by_module.items():
            hook = ModuleUnits(self, units)
            handles.append(module.register_forward_pre_hook(UnitHook(hook.enter), with_kwargs=True))
            handles.append(module.register_forward_hook(UnitHook(hook.leave), always_call=True))
        return handles

    def _enter_model(self, module: nn.Module, inputs: Any) -> None:
        if not self.in_forward:
            self._latest.clear()
            self._order.clear()
            self._cleaning = False  # a backward that raised has not cleaned
        self.enter_forward(self)

    def _leave_model(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.leave_forward(self)
        if self.in_forward:
            return
        if self._order:
            # Backward begins with the last unit, and gathers so many ahead: they need not be freed.
            self._spared = frozenset(list(self._order)[-1 - self._ahead :])
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
            for unit in self._units:
                if unit.whole and not unit.holds:
                    unit.park()

    def leave_unit(self, unit: FlatUnit) -> None:
        """Free a unit after its forward, unless its backward is next."""
        if in_backward():
            return  # recomputed: its backward follows
        if not torch.is_grad_enabled():
            self.release(unit)
        elif self._reshard and unit not in self._spared:
            if self._neighbors is not None and unit.whole and not unit.holds:
                unit.free_but_near(self._neighbors)
            else:
                self.release(unit)

    # --- what autograd saves ---

    def saving(self) -> saved_tensors_hooks:
        """Return the context in which autograd saves views of units without their values.

        Hooks around it, such as those of checkpoints and of offloading, go on working.
        """
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or _AS_IT_IS

        def save(tensor: Tensor) -> Any:
            dense = tensor.layout is torch.strided  # others have no storage to ask for
            unit = self._storages.get(tensor.untyped_storage()._cdata) if dense else None
            return unit, pack(tensor if unit is None else tensor.detach())

        def restore(packed: Any) -> Tensor:
            unit, inner = packed
            if unit is None:
                return unpack(inner)
            self._clean_after_backward()
            self.fetch(unit)
            values = unpack(inner)
            # A graph of this backward would save the view itself, without these hooks.
            return values.detach().clone() if torch.is_grad_enabled() else values

        return saved_tensors_hooks(save, restore)

    def _clean_after_backward(self) -> None:
        if in_backward() and not self._cleaning:
            self._cleaning = True
            after_backward(self._clean)

    def _clean(self) -> None:
        self._cleaning = False
        self.release_all()


class ModuleUnits:
    """The units of one module: what its hooks do.

    Args:
        gatherer: gathers and frees.
        units: the units, those of several dtypes apart.
    """

    def __init__(self, gatherer: Gatherer, units: Sequence[FlatUnit]) -> None:
        self._gatherer = gatherer
        self._units = units

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather before forward; free when backward has passed through the inputs."""
        self._gatherer.enter_forward(self)
        for unit in self._units:
            self._gatherer.fetch(unit)
        if torch.is_grad_enabled():
            inputs = [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf
            ]
            hook = CountedHook(len(inputs), self._passed)
            for leaf in inputs:
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # dies with the graph

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Free after forward; after an exception the model's own hook does."""
        if outputs is not None:
            for unit in self._units:
                if not shares_memory(outputs, unit):  # such as rows of a table of positions
                    self._gatherer.leave_unit(unit)
        self._gatherer.leave_forward(self)

    def _passed(self) -> None:
        for unit in self._units:
            self._gatherer.release(unit)


class CountedHook:
    """A hook of several tensors' gradients that acts when all of them have come.

    It holds nothing of the graph: autograd's nodes keep their hooks, and a hook that keeps nodes
    makes a cycle that is never freed. (``register_multi_grad_hook`` does.)

    Args:
        count: how many gradients there are.
        action: what to do then.
    """

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._count = count
        self._action = action
        self._seen = 0

    def __call__(self, gradient: Tensor) -> None:
        """Count one gradient."""
        self._seen += 1
        if self._seen % self._count == 0:
            self._action()
