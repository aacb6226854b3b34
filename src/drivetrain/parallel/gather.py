"""Units are gathered just before use and freed after, by the hooks of a step.

Three mechanisms, from the fastest to the one that nothing escapes:

- Hooks on a unit's module bring it before forward, free it after, and free it again in backward
  when the gradients of the module's inputs are there.
- The unit that followed this one last time (in forward, in backward, in evaluation: each by itself)
  is gathered ahead. If the order changes, the wrong unit was ahead, and nothing else happens.
- Whatever touches a parameter that is away gets its unit gathered on the spot: code outside of the
  module by the parameter's guard, backward by hooks on the tensors that autograd saved.

Every rank must need the same units in the same order. The communicator checks the order, so ranks
that take different paths end with an error that names the units.

The hooks of one model: the named methods of its strategy that a step calls, and where.

Everything that happens in a step begins in one of these hooks, in an optimizer's hooks
(``optimizers.py``) or in ``backward``. Copies and pickles of the model do not inherit them: these
are ordinary models.

Weights of products in fp8 are gathered in 8 bits: the same products, from fewer bytes. The bytes
are those that a product makes of the whole weight: a rank casts its share with the scale
of all shares. Every rank writes values in the dtype of forward in their places, which a product
casts to the same bytes again, with the same scale: the largest magnitude comes back exactly, and
each of the others closer to the value of its byte than to that of another::

    master -> value in forward -> largest of all ranks -> scale -> byte -> gather -> value
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator, Handle
from drivetrain.collectives.communicator import Deferred
from drivetrain.errors import StorageError, UsageError
from drivetrain.memory import Heap
from drivetrain.model.fp8 import FP8, LEAST_LARGEST
from drivetrain.model.guard import RefusingGuard, guard, read_only, refuse_transforms, writes
from drivetrain.model.modules import UninheritedHook, clean_name
from drivetrain.parallel.backward import after_backward, in_backward, on_gradient
from drivetrain.parallel.gradients import UnitGradients
from drivetrain.parallel.layout import ROOT, ParameterSlot
from drivetrain.parallel.optimizer_backend import BoundOptimizer
from drivetrain.parallel.options import UnitsOptions
from drivetrain.parallel.reduce import Reduce
from drivetrain.parallel.replicated import ForwardHook
from drivetrain.parallel.unit import FlatParameter, NearPart, Unit

_MOST = torch.finfo(FP8).max


class Weight(NamedTuple):
    """A weight that is gathered in 8 bits, and its place."""

    flat: FlatParameter
    slot: ParameterSlot


class Largest:
    """The largest magnitudes of all weights of a model that are gathered in 8 bits.

    The ranks find them together at the first gather of each forward: between two forwards a script
    may change its fragments, as schedule-free optimizers do, and nobody is told.
    """

    def __init__(self) -> None:
        self._weights: list[Weight] = []
        self._found: dict[Weight, Tensor] = {}

    def watch(self, weights: Sequence[Weight]) -> None:
        """Find those of more weights, too."""
        self._weights += weights

    def forget(self) -> None:
        """Let the next gather find them again."""
        self._found = {}

    def of(self, weights: Sequence[Weight], communicator: Communicator) -> list[Tensor]:
        """Return those of some weights, in fp32. Collective, the first time.

        Args:
            weights: some of those that are watched.
            communicator: the ranks that share all of them.
        """
        if not self._found:
            self._find(communicator)
        return [self._found[weight] for weight in weights]

    @torch.no_grad()
    def _find(self, communicator: Communicator) -> None:
        owned = [weight.slot.owned_numel > 0 for weight in self._weights]
        mine = itertools.compress(self._weights, owned)
        shares = [weight.flat.shard.read(weight.slot) for weight in mine]
        norms = iter(torch._foreach_norm(shares, ord=math.inf) if shares else ())
        none = torch.zeros((), device=self._weights[0].flat.values.device)
        found = torch.stack([next(norms).float() if one else none for one in owned])
        label = "largest magnitudes of weights in fp8"
        communicator.all_reduce(found, reduction="max", label=label).wait()
        # Rounded after the maximum: the largest is so in the dtype of forward, too.
        dtypes = [weight.flat.layout.dtype for weight in self._weights]
        rounded = {dtype: found.to(dtype).float().unbind() for dtype in set(dtypes)}
        for index, (weight, dtype) in enumerate(zip(self._weights, dtypes, strict=True)):
            self._found[weight] = rounded[dtype][index]


class GatherInBytes:
    """The gathers of one unit, some of whose weights cross in 8 bits.

    Args:
        unit: the unit.
        names: of these weights, and perhaps of others.
        largest: finds their scales.
    """

    def __init__(self, unit: Unit, names: Collection[str], largest: Largest) -> None:
        self._communicator = unit.communicator
        self._largest = largest
        weights = [Weight(flat, slot) for flat in unit.flats for slot in flat.slots]
        self._weights = [each for each in weights if each.slot.name in names]
        largest.watch(self._weights)
        self._bytes = {
            weight: weight.flat.values.new_empty(weight.slot.numel, dtype=FP8)
            for weight in self._weights
        }
        self._flats = unit.flats
        self._parts: list[list[Tensor]] = []  # views need memory: the first gather makes them
        self._resize(whole=False)

    def gather(self, label: str) -> Handle:
        """Start to gather the values, of which this rank's share is in its place."""
        largest = self._largest.of(self._weights, self._communicator)
        self._resize(whole=True)
        self._encode(largest)
        self._parts = self._parts or self._cut()
        arrival = self._communicator.gather_parts(self._parts, label=label)
        return Deferred(lambda: self._finish(arrival, largest))

    def _cut(self) -> list[list[Tensor]]:
        """Return what each rank sends: bytes, or values where weights do not cross in 8 bits."""
        parts: list[list[Tensor]] = [[] for _ in range(self._communicator.size)]
        for flat in self._flats:
            for place, slot in zip(flat.layout.places, flat.slots, strict=True):
                sent = self._bytes.get(Weight(flat, slot), flat.values[slot.span])
                for rank, mine in enumerate(parts):
                    start, stop = place.shares[rank]
                    if start < stop:
                        mine.append(sent[start:stop])
        return parts

    def _finish(self, arrival: Handle, largest: list[Tensor]) -> None:
        arrival.wait()
        self._decode(largest)
        self._resize(whole=False)

    @torch.no_grad()
    def _encode(self, largest: list[Tensor]) -> None:
        # In fp64, as torchao does: there, eager and compiled divisions are equal.
        scales = _MOST / torch.stack(largest).double().clamp(min=LEAST_LARGEST)
        for (weight, sent), scale in zip(self._bytes.items(), scales.float().unbind(), strict=True):
            scaled = weight.flat.values[weight.slot.own].float() * scale
            sent[slice(*weight.slot.owned)] = scaled.clamp_(-_MOST, _MOST)

    @torch.no_grad()
    def _decode(self, largest: list[Tensor]) -> None:
        # A little below the least, so that none is rounded to above it and to another scale.
        factors = torch.stack(largest).clamp(min=0.99 * LEAST_LARGEST)
        for (weight, sent), factor in zip(self._bytes.items(), factors.unbind(), strict=True):
            # The largest must become one: so it does by the reciprocal, too, as CUDA divides.
            weight.flat.values[weight.slot.span].copy_(sent).div_(_MOST).mul_(factor)

    def _resize(self, *, whole: bool) -> None:
        for one in self._bytes.values():
            one.untyped_storage().resize_(one.numel() if whole else 0)


# --- units are gathered just before use and freed after ---

_DETACHED = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""Functions that give the parameter without its history: a rank may look at its facts by itself."""


def refusal(unit: Unit, *used: Any) -> UsageError:
    """Return the error for a use of values that are not there.

    Args:
        unit: the unit.
        used: arguments of the use; the error names the first of the unit's parameters in there.
    """
    return UsageError(
        f"expected a parameter with values, found {_name(unit, used)} divided over the ranks "
        "between steps: it can be read, but not changed; do that inside "
        "'with accelerator.gathered(model):' on every rank, take "
        "accelerator.get_state_dict(model) or save_model(), or, where an optimizer changes it, "
        "give that to accelerator.prepare()"
    )


def _name(unit: Unit, used: Any) -> str:
    names = {id(slot.parameter): slot.name for slot in unit.slots}
    found = (names[id(leaf)] for leaf in tree_leaves(used) if id(leaf) in names)
    return repr(next(found, unit.slots[0].name))


def shares_memory(result: Any, unit: Unit) -> bool:
    """Return whether a result, or a tensor inside it, is a view of a unit's values."""
    for leaf in (result,) if type(result) is Tensor else _leaves(result):
        dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        if dense and leaf.untyped_storage()._cdata in unit.storages:
            return True
    return False


def _leaves(result: Any) -> Iterator[Any]:
    """Yield the parts of a result, the attributes of plain objects too."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
            yield leaf
        else:
            yield from tree_leaves(list(vars(leaf).values()))


class AbsentGuard:
    """The guard of a sharded unit's parameters: a use gathers the unit, or is refused.

    Args:
        unit: the unit.
        gather: gathers and frees it.
    """

    def __init__(self, unit: Unit, gather: "Gather") -> None:
        self._unit = unit
        self._gather = gather

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Gather the unit for one use; between steps it is freed again after it.

        A forward may also write into the values: it runs on every rank, and so does its write.

        Raises:
            UsageError: a write outside of a forward, which is refused on each rank by itself.
        """
        if writes(function, args, kwargs) and (in_backward() or not self._gather.in_forward):
            raise refusal(self._unit, args, kwargs)
        if self._gather.in_forward:
            self._gather.unshard(self._unit)
            result = function(*args, **kwargs)
            if shares_memory(result, self._unit):
                self._gather.keep_views(self._unit)
            return result
        if function in _DETACHED:
            return self._without_values(*args)
        with ExitStack() as stack:
            stack.enter_context(self._gather.saving())
            stack.enter_context(self._gather.holding([self._unit]))
            result = function(*args, **kwargs)
            if self._unit.changed() and self._unit.frees:  # forgotten: no shard follows
                raise refusal(self._unit, args, kwargs)
            return self._copied(result, args)

    def _copied(self, result: Any, used: Any) -> Any:
        """Return a result with copies in the place of views of values that are about to be freed.

        Gradients flow through a copy as through a view, as where a method beside ``forward`` reads
        some rows of a table.

        Raises:
            UsageError: the result holds more than tensors.
        """
        if not shares_memory(result, self._unit):
            return result
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            raise refusal(self._unit, used)  # such as a pickle, which would drag the unit along
        return tree_map(lambda leaf: self._copy(leaf, used), result)

    def _copy(self, leaf: Any, used: Any) -> Any:
        if not isinstance(leaf, Tensor) or not shares_memory(leaf, self._unit):
            return leaf
        return read_only(leaf.clone(), refusal(self._unit, used))

    def _without_values(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter for a state dict: its facts, and an error for its values."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = parameter.detach()
        absent = UsageError(
            f"expected values, found those of {_name(self._unit, parameter)} divided over the "
            "ranks between steps: state_dict(), .data and .detach() have shapes and dtypes alone, "
            "and torch.save() of them on one rank has none. On every rank read the parameter, "
            "as p.clone() or p.norm(), call accelerator.get_state_dict(model) or "
            "save_model(model, directory), or write inside 'with accelerator.gathered(model):'"
        )
        guard(shown, RefusingGuard(lambda *_: absent))
        return shown


def left_divided(unit: Unit, *used: Any) -> UsageError:
    """Return the error for a use of a unit that is still divided when its strategy is taken off."""
    return UsageError(
        f"expected a parameter with values, found {_name(unit, used)}, which was divided over the "
        "ranks, or lay in a store, when its strategy was taken off, as by free_memory(); take "
        "accelerator.get_state_dict(model) or save_model() before"
    )


# --- gathering and freeing ---


class Need(NamedTuple):
    """A need of a unit: in a phase of training, for the first or a later time.

    Attributes:
        phase: ``forward``, ``backward`` or ``evaluation``.
        unit: the unit.
        time: how often it was needed before in this phase, plus one: another unit follows a tied
            head than follows the embedding.
    """

    phase: str
    unit: Unit
    time: int


class PrefetchOrder:
    """The order in which units were needed the last time, in each phase by itself."""

    def __init__(self) -> None:
        self._next: dict[Need, Need] = {}
        self._latest: dict[str, Need] = {}
        self._times: Counter[tuple[str, Unit]] = Counter()
        self._forward: dict[Unit, None] = {}  # in the order of the last need
        self._left: Counter[Unit] = Counter()
        self._usual: Counter[Unit] = Counter()
        self._spared: frozenset[Unit] = frozenset()

    def begin(self) -> None:
        """Begin a forward of the model."""
        self.interrupt()
        self._forward.clear()
        self._left.clear()

    def interrupt(self) -> None:
        """Forget which unit was needed last: the next one does not follow it."""
        self._latest.clear()
        self._times.clear()

    def needed(self, phase: str, unit: Unit, count: int) -> list[Unit]:
        """Note a need; return the units that followed the last time, so many at most."""
        self._times[phase, unit] += 1
        need, before = Need(phase, unit, self._times[phase, unit]), self._latest.get(phase)
        if before is not None:
            self._next[before] = need
        self._latest[phase] = need
        if phase == "forward" and unit.layout.key != ROOT:
            self._forward.pop(unit, None)
            self._forward[unit] = None
        found: list[Unit] = []
        following = self._next.get(need)
        while following is not None and len(found) < count:
            found.append(following.unit)
            following = self._next.get(following)
        return found

    def spares(self, unit: Unit) -> bool:
        """Return whether backward begins with a unit."""
        return unit in self._spared

    def left_for_good(self, unit: Unit) -> bool:
        """Note the end of a unit's module; return whether backward begins with the unit."""
        self._left[unit] += 1
        # A tied layer that comes later needs it once more, and may be far away.
        return unit in self._spared and self._left[unit] >= self._usual[unit]

    def end(self, *, spared: int) -> None:
        """End a forward of the model: with so many units at its end backward begins."""
        if self._forward:
            self._spared = frozenset(list(self._forward)[-spared:])
            self._usual = self._left.copy()


LOOKS = 64
"""So many forwards look for writes that leave no trace, and later one in so many."""


class Gather:
    """The gathering and freeing of one model's sharded units.

    Args:
        units: its sharded units.
        config: says how many units are gathered ahead; when a unit is freed that a training forward
            has gathered; and how many units may be whole or on their way at once, the rest of the
            model not counted: nothing is gathered ahead beyond that.
        neighbors: when they are freed after forward, the ranks that hold them together until
            backward; None leaves each rank its range, as between steps.
        keep_changes: lets the shards of a whole unit follow its values.
        in_bytes: names of the weights that are gathered in fp8.

    Attributes:
        units: its sharded units.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        config: UnitsOptions,
        neighbors: Communicator | None,
        keep_changes: Callable[[Unit], None],
        in_bytes: Collection[str],
    ) -> None:
        self.units = units
        self._forward = 0
        self._looked: Unit | None = None
        self._keep_changes = keep_changes
        self._freed = [unit for unit in units if unit.frees]
        self._by_storage = {storage: unit for unit in self._freed for storage in unit.storages}
        self._counted = [unit for unit in units if unit.layout.key != ROOT]
        self._ahead, self._until, self._max_live = config.ahead, config.until, config.max_live
        self._neighbors = neighbors
        self._viewed: set[Unit] = set()
        self._heap = Heap()
        self._keeping = False
        self._order = PrefetchOrder()
        self._forwards: list[object] = []  # those under way, the outermost first
        self._saving: saved_tensors_hooks | None = None  # during the outermost
        self._cleaning = False
        self._largest = Largest()
        for unit in units:
            if any(slot.name in in_bytes for slot in unit.slots):
                unit.in_bytes = GatherInBytes(unit, in_bytes, self._largest).gather
        for unit in units:
            unit.absent = AbsentGuard(unit, self)
            unit.reshard()

    # --- bringing and freeing ---

    def unshard(self, unit: Unit) -> None:
        """Return when a unit is whole; start the next units, in the order of the last pass."""
        if unit.whole:
            return
        if unit.arrival is None:
            if self._full():
                idle = [each for each in self.units if each.arrival is not None and not each.whole]
                for other in sorted(idle, key=self._order.spares):  # in vain, or not needed soonest
                    if not other.holds and self._full():
                        other.reshard()
            unit.unshard()
        backward = in_backward()
        if backward or self._forwards:  # else nobody would free a unit that was started ahead
            grad = torch.is_grad_enabled()
            phase = "backward" if backward else "forward" if grad else "evaluation"
            for following in self._order.needed(phase, unit, self._ahead):
                if not following.live:
                    if self._full():
                        break
                    following.unshard()
        unit.wait_for_unshard()

    def post_forward(self, unit: Unit, outputs: Any) -> None:
        """Free a unit after its forward, unless its backward is next or the output is a view."""
        if shares_memory(outputs, unit):  # such as rows of a table of positions
            self.keep_views(unit)
        elif in_backward():
            return  # recomputed: its backward follows
        elif not torch.is_grad_enabled():
            self.reshard(unit)
        elif self._until == "forward" and not self._order.left_for_good(unit):
            needed = unit.holds or unit in self._viewed
            if self._neighbors is not None and unit.whole and not needed:
                if unit.changed():
                    self._keep_changes(unit)
                unit.near = NearPart(unit.values, self._neighbors)
                unit.reshard()
            else:
                self.reshard(unit)

    def reshard(self, unit: Unit) -> None:
        """Free a unit that nobody holds, or park a unit that is kept until the step."""
        if unit.holds or not unit.live or unit in self._viewed:
            return
        if unit.whole and unit.changed():
            self._keep_changes(unit)
        if replaced := unit.replaced():
            raise refusal(unit, replaced[0].parameter)
        if not self._keeping:
            unit.reshard()
        elif unit.whole and not self._forwards:
            unit.park()  # until its next use: a loss that reads it saves views without values

    def keep_views(self, unit: Unit) -> None:
        """Keep a unit until the outermost forward ends: the script has a view of its values."""
        self._viewed.add(unit)

    def reshard_all(self) -> None:
        """Release every unit, and its parts on neighbors."""
        self._cleaning = False
        if not self._forwards:
            self._viewed.clear()
        for unit in self.units:
            self.reshard(unit)
            unit.near = None
        self._order.interrupt()

    def values_changed(self) -> None:
        """Free every unit that nobody holds: its values are no longer the right ones."""
        self._keeping = False
        self._viewed.clear()
        self.reshard_all()
        if self.units:
            self._heap.relieve_growth()

    @contextmanager
    def holding(self, units: Sequence[Unit]) -> Iterator[None]:
        """Context in which units stay whole; all ranks must enter it with the same units.

        Their values are exact, also where a slow link approximates those of a forward.
        """
        for unit in units:
            if unit.approximate and unit.live and not unit.holds and unit not in self._viewed:
                unit.reshard()
            unit.holds += 1
        try:
            for index, unit in enumerate(units):
                for one in units[index : index + 2]:  # the next one travels meanwhile
                    if not one.live:
                        one.unshard(exact=True)
                unit.wait_for_unshard()
            yield
        finally:
            for unit in units:
                unit.holds -= 1
                self.reshard(unit)

    def close(self) -> None:
        """Leave units divided; the only rank has those in memory whole."""
        self.leave()  # an interrupt may have cut a forward short
        for unit in self.units:
            unit.absent = RefusingGuard(partial(left_divided, unit))
            if unit.communicator.size == 1 and all(flat.shard.at_hand for flat in unit.flats):
                with suppress(StorageError):  # told before; what is lost stays guarded
                    unit.unshard()
            elif not unit.holds:
                unit.reshard()

    def _full(self) -> bool:
        """Whether no further unit may be gathered ahead. Units kept on purpose do not count."""
        if self._max_live is None or self._until != "forward":
            return False
        # Asked for each unit that is gathered, so it is one pass without calls.
        live = [unit for unit in self._counted if unit.whole or unit.arrival is not None]
        return len(live) >= self._max_live

    # --- forwards of the model, and of modules in it ---

    @property
    def in_forward(self) -> bool:
        """Whether the model runs forward or backward now, which free at their end."""
        return bool(self._forwards) or in_backward()

    def begin_forward(self) -> None:
        """Begin a forward of the model."""
        if not self.in_forward:
            self._order.begin()
            self._cleaning = False  # a backward that raised has not cleaned
            if self._until == "step" and torch.is_grad_enabled():
                self._keeping = True
        self.enter(self)

    def end_forward(self, outputs: Any) -> None:
        """End a forward of the model; after evaluation, or an exception, everything is freed.

        Raises:
            UsageError: the result is a view of parameters that are freed.
        """
        self.leave(self)
        if self.in_forward:
            return
        # Backward begins with the last unit, and gathers so many ahead: they need not be freed.
        self._order.end(spared=1 + self._ahead)
        if not torch.is_grad_enabled() or outputs is None:
            self.reshard_all()
        for unit in self.units:
            if shares_memory(outputs, unit):
                raise UsageError(
                    f"expected a forward that computes its result, found that it returns a view "
                    f"of parameters of {unit.label}, which are freed; return a clone() of it"
                )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a forward of the model without a call of the model."""
        owner = object()
        if not self.in_forward:
            self._order.begin()
        self.enter(owner)
        try:
            yield
        finally:
            self.leave(owner)

    def enter(self, owner: object) -> None:
        """Begin the forward of the model or of a unit's module; the outermost one counts."""
        if not self.in_forward:
            refuse_transforms()
            self._largest.forget()
            self._look_at_next()
            if self._freed:
                self._saving = self.saving()
                self._saving.__enter__()
        self._forwards.append(owner)

    def _look_at_next(self) -> None:
        """Look for writes that leave no trace in one unit for each forward, in turns.

        A look waits for an accelerator, so after the first forwards it becomes rare.
        """
        if self._looked is not None:
            self._looked.digests = None
        self._looked, self._forward = None, self._forward + 1
        number, rest = (
            (self._forward, 0) if self._forward <= LOOKS else divmod(self._forward, LOOKS)
        )
        if self._freed and not rest:
            self._looked = self._freed[number % len(self._freed)]
            self._looked.notice_all_writes()

    def leave(self, owner: object = None) -> None:
        """End a forward and all forwards inside that an exception cut short; without owner, all.

        Until backward, what is still whole is used through guards only: the values that a loss
        reads from such a unit must be saved without values, too.
        """
        found = owner is None or owner in self._forwards
        while found and self._forwards:
            found = self._forwards.pop() is not owner
        if self._saving is not None and not self._forwards:
            self._saving.__exit__()
            self._saving = None
        if not self.in_forward:
            self._viewed.clear()
            for unit in self.units:
                if unit.whole and not unit.holds:
                    if unit.changed():
                        self._keep_changes(unit)
                    unit.park()

    # --- what autograd saves ---

    def saving(self) -> saved_tensors_hooks:
        """Return the context in which autograd saves views of units without their values.

        Hooks around it, such as those of checkpoints and of offloading, go on working.
        """
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = around or (None, None)

        def save(tensor: Tensor) -> Any:
            dense = tensor.layout is torch.strided  # others have no storage to ask for
            unit = self._by_storage.get(tensor.untyped_storage()._cdata) if dense else None
            # A node of the graph that kept its own output with the graph would never be freed.
            kept = tensor if unit is None and pack is not None else tensor.detach()
            return unit, tensor._version, kept if pack is None else pack(kept)

        def bring_back(packed: Any) -> Tensor:
            unit, version, kept = packed
            if unit is not None:
                # Autograd itself checks no such tensor.
                if unpack is None and kept._version != version:
                    raise UsageError(
                        f"expected the parameters of {unit.label} as forward has read them, found "
                        "that one was changed in place before backward: change it before its first "
                        "use in forward, or after backward"
                    )
                if not self._cleaning and in_backward():  # units that are left are freed at its end
                    self._cleaning = True
                    after_backward(self.reshard_all)
                self.unshard(unit)
            values: Tensor = kept if unpack is None else unpack(kept)
            if unit is None:
                return values
            # A graph of this backward would save the view itself, without these hooks.
            return values.detach().clone() if torch.is_grad_enabled() else values

        return saved_tensors_hooks(save, bring_back)


# --- the hooks of one model ---


class StepEvents(Protocol):
    """The events of a step, in their order: a strategy has a method for each event."""

    def before_forward(self) -> None:
        """A training forward of the model begins."""

    def before_compiled_forward(self) -> None:
        """A forward of a compiled model begins, which asks no guards."""

    def before_step(self, bound: BoundOptimizer) -> None:
        """An optimizer is about to step."""

    def after_step(self, bound: BoundOptimizer) -> None:
        """An optimizer has stepped."""

    def before_zero_grad(self, bound: BoundOptimizer | None, *, set_to_none: bool) -> None:
        """Gradients are about to be cleared: those of an optimizer, or of the whole model."""


class StepHooks:
    """The hooks on one model, its modules and its parameters.

    Args:
        model: the user's model.
        gather: gathers its sharded units.
        step: is told what happens.
    """

    def __init__(self, model: nn.Module, gather: Gather, step: StepEvents) -> None:
        self._model = model
        self._gradients: dict[ParameterSlot, RemovableHandle] = {}
        self._handles = [model.register_forward_pre_hook(ForwardHook(step.before_forward))]
        if is_compiled(model):
            wait = UnitHook(lambda module, inputs: step.before_compiled_forward())
            self._handles.append(model.register_forward_pre_hook(wait))
        model.__dict__["zero_grad"] = ZeroGrad(model, step)
        if gather.units:
            held = UnitHook(lambda *_: _check_held(gather.units))  # torch wraps guards' errors
            loads = model.register_load_state_dict_pre_hook(held)  # type: ignore[no-untyped-call]
            self._handles.append(loads)
            self._watch_modules(gather)

    def watch_gradients(self, reduce: Reduce) -> None:
        """Follow changes of ``requires_grad``; every rank must make the same ones."""
        # A guarded parameter answers slowly, and here every one is asked, twice per step.
        with torch._C.DisableTorchFunctionSubclass():
            for unit in reduce.units:
                slots, hooked = unit.unit.slots, self._gradients
                changed = [s for s in slots if s.parameter.requires_grad is not (s in hooked)]
                for slot in changed:
                    self._follow(reduce, unit, slot)
                if changed:
                    unit.trained = [slot for slot in slots if slot in hooked]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in (*self._handles, *self._gradients.values()):
            handle.remove()
        self._handles, self._gradients = [], {}
        self._model.__dict__.pop("zero_grad", None)

    def _follow(self, reduce: Reduce, unit: UnitGradients, slot: ParameterSlot) -> None:
        fragment = unit.of[slot].flat.fragments.get(slot)
        if fragment is not None:  # a strategy around this one asks which fragments are stepped
            fragment.requires_grad_(slot.parameter.requires_grad)
        if slot in self._gradients:
            self._gradients.pop(slot).remove()
            return
        # For good: a gradient of today still steps a parameter that is frozen tomorrow.
        unit.of[slot].flat.trained = True
        self._gradients[slot] = on_gradient(slot.parameter, partial(reduce.came, unit, slot))

    def _watch_modules(self, gather: Gather) -> None:
        model = self._model
        begin = UnitHook(lambda module, inputs: gather.begin_forward())
        end = UnitHook(lambda module, inputs, outputs: gather.end_forward(outputs))
        self._handles += [
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        ]
        for module, units in users(model, gather.units).items():
            hook = ModuleHook(gather, units)
            self._handles += [
                module.register_forward_pre_hook(UnitHook(hook.enter), with_kwargs=True),
                module.register_forward_hook(UnitHook(hook.leave), always_call=True),
            ]


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is the result of ``torch.compile``."""
    return isinstance(getattr(model, "_orig_mod", None), nn.Module)


def _check_held(units: Sequence[Unit]) -> None:
    """Refuse writes into all parameters, unless the script has gathered them.

    Raises:
        UsageError: a unit is divided.
    """
    for unit in units:
        if not unit.holds:
            raise refusal(unit, unit.parameters[0])


class UnitHook(UninheritedHook):
    """A hook that copies of a module do not inherit, and that a compiler does not look into."""

    @_disable_dynamo  # in a block that compiles its own hooks too: a gap in the graph
    def __call__(self, *arguments: Any) -> None:
        """Act."""
        if self._action is not None:
            self._action(*arguments)


class ZeroGrad:
    """Stands in for a model's ``zero_grad``: clears the fragments' gradients too.

    It lies in the module's ``__dict__``; copies and pickles of the model clear their own gradients.

    Args:
        module: the model.
        step: is told; None: nobody is.
    """

    def __init__(self, module: nn.Module, step: StepEvents | None) -> None:
        self._module = module
        self._step = step

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the model."""
        type(self._module).zero_grad(self._module, set_to_none)
        if self._step is not None:
            self._step.before_zero_grad(None, set_to_none=set_to_none)

    def __reduce__(self) -> tuple[type["ZeroGrad"], tuple[nn.Module, None]]:
        return ZeroGrad, (self._module, None)


# --- modules ---


def users(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Return which units each module needs whole while its forward runs.

    Those are the unit that is named after it, and units of parameters that are tied to its own.
    """
    if is_compiled(model):
        # Its inside is one graph, which hooks on parts of it would break.
        return {model: list(units)} if units else {}
    modules = {clean_name(name): module for name, module in model.named_modules()}
    holders: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), []).append(name)
    found: dict[nn.Module, list[Unit]] = {}
    for unit in units:
        key = unit.layout.key
        if key == ROOT:
            continue
        names = [name for each in unit.parameters for name in holders.get(id(each), ())]
        tied = (name for name in names if not name.startswith(f"{key}."))
        for name in dict.fromkeys((key, *tied) if key in modules else tied):
            found.setdefault(modules[name], []).append(unit)
    return found


class ModuleHook:
    """The hooks of one module around its forward and its backward.

    Args:
        gather: gathers the units before the forward, and frees them after each of both.
        units: the units that the module needs, those of several dtypes apart.
    """

    def __init__(self, gather: Gather, units: Sequence[Unit]) -> None:
        self._gather = gather
        self._units = units

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather the units, and free them when backward has passed the inputs."""
        self._gather.enter(self)
        for unit in self._units:
            self._gather.unshard(unit)
        if torch.is_grad_enabled():
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            inputs = [leaf for leaf in leaves if leaf.requires_grad and not leaf.is_leaf]
            # It holds nothing of the graph: autograd's nodes keep their hooks, and a hook that
            # keeps nodes, as that of ``register_multi_grad_hook``, makes a cycle, never freed.
            hook = partial(self._passed, itertools.count(1), len(inputs))
            for leaf in inputs:
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # dies with the graph

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Free the units after forward; after an exception the model's own hook does."""
        if outputs is not None:
            for unit in self._units:
                self._gather.post_forward(unit, outputs)
        self._gather.leave(self)

    def _passed(self, seen: Iterator[int], inputs: int, gradient: Tensor) -> None:
        """Free the units when the gradients of all inputs have come; retained graphs come again."""
        if next(seen) % inputs == 0:
            for unit in self._units:
                self._gather.reshard(unit)
