"""Whether the optimizers and layers of a script fit what ranks do: asked by experiment.

A copy of the optimizer steps small tensors as one process would, and two copies step them as two
ranks would, each its parts. Element-wise optimizers give the same values. Optimizers that look at
whole matrices (Muon, Shampoo, Adafactor, LAMB) do not, and optimizers that look at all parameters
at once (LBFGS, a clip of their own) do not even where each tensor is whole on one rank. Only the
element-wise classes of torch, as they come, are known without a trial: a test holds them to it.

An experiment proves what it touches. So each group of other options has tensors, shaped like its
parameters; gradients are small, usual and large; and rules of every few steps have their turn.

A copy of an optimizer, for an experiment: it steps other tensors, and shares nothing but code.

Lists, dicts, tensors, generators and optimizers inside are copies, also behind closures and bound
methods: whatever the copy does, the script's object stays as it was. ``copy.deepcopy`` would lose
the attributes of optimizers, and copy the state of all parameters.

Parameters that a forward writes by its own batch: ranks with other batches would go apart.

Torch has two layers of this kind. Writes of other forwards are met where the ranks' values are
compared, before the first gradients are averaged (``drivetrain.facade.weights``).
"""

import copy
import functools
import gc
import math
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import optimizer as of_torch

from drivetrain.errors import UsageError
from drivetrain.model.modules import clean_name
from drivetrain.runtime import rng
from drivetrain.shards import is_dense, outer_dim

# --- a copy of an optimizer, for an experiment ---

_SIMPLE = (int, float, complex, str, bool, bytes, type(None), torch.dtype, torch.device, type)

_CALLED = (MethodType, FunctionType, functools.partial, BuiltinMethodType, MethodWrapperType)

_PROTOCOL = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__del__")
"""What a class defines that knows by itself how its objects are copied, or ends something."""

_LARGEST = 1 << 16
"""Elements of a tensor that is copied with its values: an optimizer of parts has no use for more,
and those of parameters, and their averages, may be large."""


class NotCopiedError(Exception):
    """An optimizer cannot be copied: a step of the copy would step the script's own."""


def copied(
    optimizer: Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    others: Mapping[nn.Parameter, nn.Parameter],
) -> Any:
    """Return an optimizer with the same attributes and options, other parameters, and no state.

    Args:
        optimizer: of any class, perhaps around others.
        groups: the parameters of each of its groups.
        others: what it holds in the place of parameters outside of these groups, as in a list of
            its own; by default parameters without values and gradients.

    Raises:
        NotCopiedError: it holds another optimizer in an object that cannot be copied, or one that
            changes whenever somebody asks.
    """
    copies = _Copies()
    for parameter, other in others.items():
        copies.take(parameter, other)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        rest = {key: value for key, value in group.items() if key != "params"}
        copies.take(group, {**copies.of(rest), "params": list(parameters)})
    return copies.of(optimizer)


class _Copies:
    """The copies of one optimizer's objects, each made once."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._alive: list[Any] = []  # an identity must not be given to another object meanwhile

    def take(self, value: Any, made: Any) -> Any:
        """Let ``made`` be the copy of an object."""
        self._alive.append(value)
        self._made[id(value)] = made
        return made

    def of(self, value: Any) -> Any:
        """Return the copy of an object; one that cannot be copied, such as a lock, itself."""
        if isinstance(value, _SIMPLE):
            return value
        if id(value) not in self._made:
            self.take(value, self._copied(value))
        return self._made[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _without_large_values(value)
        if isinstance(value, dict | list | deque):
            return self._filled(value)
        if isinstance(value, tuple | set | frozenset):
            items = list(map(self.of, value))
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, _CALLED):
            return self._function(value)
        if isinstance(value, Optimizer | nn.Module) or not _copies_itself(type(value)):
            return self._object(value)
        return self._by_its_class(value)

    def _filled(self, value: Any) -> Any:
        made = self.take(value, copy.copy(value))  # before its items, which may hold it
        made.clear()
        if isinstance(value, dict):
            made.update((self.of(key), self.of(each)) for key, each in value.items())
        else:
            made.extend(map(self.of, value))
        return made

    def _function(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, BuiltinMethodType | MethodWrapperType):  # such as append of a list
            return getattr(self.of(value.__self__), value.__name__) if _is_bound(value) else value
        if isinstance(value, functools.partial):
            args, keywords = map(self.of, value.args), self.of(value.keywords)
            return functools.partial(self.of(value.func), *args, **keywords)
        if not value.__closure__:
            return value
        closure = value.__closure__
        cells = tuple(CellType() for _ in closure)
        name, defaults = value.__name__, value.__defaults__
        made = FunctionType(value.__code__, value.__globals__, name, defaults, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        self.take(value, made)  # before its cells, which may hold it
        vars(made).update(vars(value))
        for cell, given in zip(cells, closure, strict=True):
            if given != CellType():  # a name without a value yet
                cell.cell_contents = self.of(given.cell_contents)
        return made

    def _object(self, value: Any) -> Any:
        try:
            made = object.__new__(type(value))
            attributes = vars(value)
        except TypeError:  # made in another language, or without attributes
            return self._by_its_class(value)
        self.take(value, made)
        if isinstance(value, Optimizer):
            attributes = dict(self._attributes(value))
        vars(made).update((name, self.of(each)) for name, each in attributes.items())
        return made

    def _attributes(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        """Yield what an optimizer has without its state, its hooks, and what replaced methods."""
        for name, value in vars(optimizer).items():
            if name == "state" and id(value) not in self._made:
                self.take(value, defaultdict(dict))
            elif name.endswith("_hooks"):
                self.take(value, OrderedDict())
            if not callable(getattr(type(optimizer), name, None)):  # as a scheduler puts there
                yield name, value

    def _by_its_class(self, value: Any) -> Any:
        if isinstance(value, GeneratorType):
            raise NotCopiedError("a generator cannot be copied")
        inside = [value()] if isinstance(value, weakref.ref) else gc.get_referents(value)
        inside += list(vars(value).values()) if hasattr(value, "__dict__") else []
        if any(isinstance(each, Optimizer) for each in inside):
            raise NotCopiedError(f"an object of class {type(value).__name__} cannot be copied")
        if hasattr(type(value), "__del__"):
            return value
        try:
            return copy.deepcopy(value, self._made)
        except Exception:  # anything: of a lock, a file, a group of processes
            return value


def _is_bound(value: Any) -> bool:
    """Whether a function of another language belongs to an object, and not to a module."""
    return value.__self__ is not None and not isinstance(value.__self__, ModuleType | type)


def _copies_itself(kind: type) -> bool:
    return any(getattr(kind, n, None) is not getattr(object, n, None) for n in _PROTOCOL)


def _without_large_values(value: Tensor) -> Tensor:
    """Return a copy; parameters, of which groups get others, and large tensors lie on meta."""
    if isinstance(value, nn.Parameter) or value.numel() > _LARGEST:
        made = torch.empty(value.shape, dtype=value.dtype, device="meta")
        is_parameter = isinstance(value, nn.Parameter)
        return nn.Parameter(made, value.requires_grad) if is_parameter else made
    return value.detach().clone().requires_grad_(value.requires_grad)


# --- whether an optimizer may step a rank's part of the parameters ---

Cut: TypeAlias = Literal["flat", "rows", "whole"]
"""Ranks have ranges of flattened parameters, some rows of each, or some whole parameters."""

ShapeOf: TypeAlias = Callable[[nn.Parameter], tuple[int, ...]]

ELEMENT_WISE = (
    *(ASGD, SGD, Adadelta, Adagrad, Adam, Adamax),
    *(AdamW, NAdam, RAdam, RMSprop, Rprop),
)
"""Classes of torch that step each element by itself, whatever their options."""

_RATE = 0.1
_MAGNITUDES = (1e-3, 1.0, 1e3)
"""Of gradients, one after the other: averages soon forget those that were smaller."""

_STEPS = 4
"""With gradients of each magnitude."""

_LONGEST = {"flat": 256, "rows": 256, "whole": 64}
"""Elements of a dim at most. A rule for whole matrices takes longer than one for elements."""

_ELEMENTS = (1 << 15) - 1
"""Of a tensor at most: torch computes more on several threads, which may wait for a processor."""

_SHAPES = 6
"""Different shapes of a group's tensors at most."""

_OF_CHANGE, _OF_VALUES = 1e-4, 4e-6
"""The difference that rounding may make: loops over a part begin and end elsewhere."""


class Misfit(NamedTuple):
    """Why an optimizer cannot step parts of the parameters.

    Attributes:
        why: goes on after "whose step".
        needs_matrices: whether it can step some parameters, if each of them is whole.
    """

    why: str
    needs_matrices: bool = False


_OTHER_VALUES = (
    "needs all parameters at once, or some beside its param_groups, or draws random numbers"
)


def misfit(
    optimizer: Optimizer, cut: Cut, shape_of: ShapeOf = lambda parameter: tuple(parameter.shape)
) -> Misfit | None:
    """Return why an optimizer's steps of parts are not the step of one process; None if they are.

    Args:
        optimizer: left as it is, to the bit; so are all generators.
        cut: the parts of ranks.
        shape_of: gives the whole shape of a parameter, of which a rank may have a part by now.
    """
    if _is_known(optimizer):
        return None
    generators = rng.capture()
    try:
        with _without_global_hooks():
            why = _PartsTrial(optimizer, cut, shape_of).difference()
            if why == _OTHER_VALUES and cut != "whole":
                why = _PartsTrial(optimizer, "whole", shape_of).difference()
                if not why:
                    return Misfit("needs whole matrices", needs_matrices=True)
    except NotCopiedError as error:
        why = f"cannot be tried on a copy ({error})"
    finally:
        rng.restore(generators)
    return Misfit(why) if why else None


def _is_known(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's element-wise ones, with nothing of a script in it."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in ELEMENT_WISE and "step" not in vars(optimizer) and not hooks


class _PartsTrial:
    """The steps of one process, and those of two ranks, each with its parts."""

    def __init__(self, optimizer: Optimizer, cut: Cut, shape_of: ShapeOf) -> None:
        groups, places = _tensors(optimizer, _LONGEST[cut], shape_of)
        self._tensors = [tensor for group in groups for tensor in group]
        self._groups = groups
        self._cut = cut
        self._whole = _Copy(optimizer, [[(t, t.start) for t in group] for group in groups], places)
        self._ranks = []
        for rank in (0, 1):
            parts = [[(t, t.parts(t.start, cut)[rank]) for t in group] for group in groups]
            # Ranks put their parts into groups: what else the optimizer holds has no gradients.
            self._ranks.append(_Copy(optimizer, parts, {}))

    def difference(self) -> str:
        """Return how steps of parts differ from steps of the whole; empty if they do not."""
        moved: set[_Tensor] = set()
        for phase, magnitude in enumerate(_MAGNITUDES):
            before = {tensor: self._whole.value(tensor).clone() for tensor in self._tensors}
            for step in range(_STEPS):
                if told := self._step(phase * _STEPS + step, magnitude):
                    return told
                if step in (0, _STEPS - 1) and not self._agrees(before, moved):
                    return _OTHER_VALUES
        if any(group and moved.isdisjoint(group) for group in self._groups):
            return "left the tensors of a trial as they were, so that nothing is proved"
        return ""

    def _agrees(self, before: Mapping["_Tensor", Tensor], moved: set["_Tensor"]) -> bool:
        """Compare the parts with the whole, and add the tensors that moved."""
        for tensor, old in before.items():
            new = self._whole.value(tensor)
            change = float((new - old).abs().max())
            if change:
                moved.add(tensor)
            allowed = _OF_CHANGE * change + _OF_VALUES * float(new.abs().max())
            for rank, part in zip(self._ranks, tensor.parts(new, self._cut), strict=True):
                if part is not None and not _near(rank.value(tensor), part, allowed):
                    return False
        return True

    def _step(self, step: int, magnitude: float) -> str:
        """Take a step; return how it failed."""
        grads = {tensor: tensor.gradient(step, magnitude) for tensor in self._tensors}
        cuts = {tensor: tensor.parts(grad.clone(), self._cut) for tensor, grad in grads.items()}
        try:
            self._whole.step(grads)
        except Exception as error:  # whatever a script's optimizer raises
            told = f"{type(error).__name__}: {error}"
            return f"needs a closure, or fails in a trial on small tensors ({told})"
        try:
            for rank, copy in enumerate(self._ranks):
                copy.step({tensor: parts[rank] for tensor, parts in cuts.items()})
        except Exception:
            return _OTHER_VALUES
        return ""


class _Copy:
    """A copy of an optimizer, and the parameters that it steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[Sequence[tuple["_Tensor", Tensor | None]]],
        places: Mapping[nn.Parameter, "_Tensor"],
    ) -> None:
        self._held = {
            tensor: nn.Parameter(part.clone())
            for group in groups
            for tensor, part in group
            if part is not None
        }
        held = [[self._held[t] for t, part in group if part is not None] for group in groups]
        others = {parameter: self._held[tensor] for parameter, tensor in places.items()}
        self._optimizer = copied(optimizer, held, others)
        for group in self._optimizer.param_groups:
            if "lr" in group:
                group["lr"] = _RATE  # a warm-up may start at zero, which hides every difference
            if group.get("capturable") and all(one.is_cpu for one in group["params"]):
                group["capturable"] = False  # a kernel for other devices, where the model will be
        if callable(getattr(self._optimizer, "train", None)):
            self._optimizer.train()  # a schedule-free one steps in training mode only

    def step(self, grads: Mapping["_Tensor", Tensor | None]) -> None:
        """Take a step with gradients of the tensors that are held."""
        for tensor, parameter in self._held.items():
            parameter.grad = grads[tensor]
        self._optimizer.step()

    def value(self, tensor: "_Tensor") -> Tensor:
        """Return what has become of a tensor, or of the part that is held of it."""
        return self._held[tensor].detach()


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A small tensor in the place of parameters.

    Attributes:
        start: its first values.
        number: among those of its group.
        order: of its dims in memory, the outermost first.
        waves: two gradients, of which all others are sums.
    """

    start: Tensor
    number: int
    order: tuple[int, ...]
    waves: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls, shape: Sequence[int], order: tuple[int, ...], device: torch.device, number: int
    ) -> "_Tensor":
        """Make one whose parts differ in size of values and gradients."""
        numel = math.prod(shape)
        ramp = torch.arange(numel, dtype=torch.float32, device=device)
        sizes = (0.2 + ramp / numel) * (1 + number % 3)
        ramp += 1 + number  # no number is zero
        back = [order.index(dim) for dim in range(len(shape))]

        def shaped(values: Tensor) -> Tensor:
            return values.view([shape[dim] for dim in order]).permute(back)

        start, first, second = (shaped(torch.sin(ramp * pace) * sizes) for pace in (0.7, 1.3, 1.9))
        return cls(start, number, order, (first, second))

    def gradient(self, step: int, magnitude: float) -> Tensor:
        """Return the gradient of a step."""
        first, second = self.waves
        turn = 0.9 * step + 0.4
        return torch.add(
            first * (magnitude * math.cos(turn)), second, alpha=magnitude * math.sin(turn)
        )

    def parts(self, values: Tensor, cut: Cut) -> tuple[Tensor | None, Tensor | None]:
        """Return the parts of two ranks, as views of values like this tensor; None: it has none."""
        dim = outer_dim(self.start)
        if cut == "flat":
            values, dim = values.permute(self.order).reshape(-1), 0
        if self.number == 0:  # of some parameters a rank has nothing
            return values, None
        if cut == "whole" or not values.dim():
            return (values, None) if self.number % 2 == 0 else (None, values)
        size = values.shape[dim]
        edge = size - size * 3 // 5
        first, second = values.narrow(dim, 0, edge), values.narrow(dim, edge, size - edge)
        return first, second if size > edge else None


def _tensors(
    optimizer: Optimizer, longest: int, shape_of: ShapeOf
) -> tuple[list[list[_Tensor]], dict[nn.Parameter, _Tensor]]:
    """Return the tensors of each group: only the first one of equal options has some.

    Beside them is the tensor in the place of each parameter.
    """
    first: dict[Any, int] = {}
    kinds: list[dict[Any, torch.device]] = [{} for _ in optimizer.param_groups]
    known: list[tuple[nn.Parameter, int, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        place = first.setdefault(_options(group), index)
        for parameter in group["params"]:
            shape = shape_of(parameter)
            if math.prod(shape):
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                for small in _smaller(shape, longest):
                    kind = small, _order(parameter)
                    kinds[place].setdefault(kind, device)
                known.append((parameter, place, kind))
    groups, made = [], {}
    for place, found in enumerate(kinds):
        some = _chosen(sorted(found.items(), key=lambda pair: (math.prod(pair[0][0]), pair[0])))
        groups.append([_Tensor.of(k[0], k[1], d, number) for number, (k, d) in enumerate(some)])
        for (kind, _), tensor in zip(some, groups[-1], strict=True):
            made[place, kind] = tensor
    return groups, {p: made.get((place, k), groups[place][-1]) for p, place, k in known}


def _options(group: Mapping[str, Any]) -> Any:
    """Return what tells groups of other rules apart; rates and names do not."""
    return tuple(
        sorted(
            (str(key), repr(value))
            for key, value in group.items()
            if key not in ("params", "param_names") and not str(key).endswith("lr")
        )
    )


def _smaller(shape: Sequence[int], longest: int) -> Iterator[tuple[int, ...]]:
    """Yield a shape of few elements; of a large matrix, one of many rows, and a square one."""
    sizes = [min(size, longest) for size in shape]
    if math.prod(sizes) <= _ELEMENTS:
        yield tuple(sizes)
        return
    for kept in (1, 0):
        even = list(sizes)
        while math.prod(even) > _ELEMENTS:
            largest = max(even[kept:])
            even[even.index(largest, kept)] = largest * 15 // 16
        yield tuple(even)


def _order(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the dims in the order of memory, the outermost first."""
    dims = range(parameter.dim())
    if parameter.is_contiguous() or not is_dense(parameter):
        return tuple(dims)
    strides = parameter.stride()
    return tuple(sorted(dims, key=lambda dim: -strides[dim]))


def _chosen(found: Sequence[Any]) -> Sequence[Any]:
    """Return some of all sizes, the smallest twice: tensors may depend on each other."""
    if len(found) > _SHAPES:
        found = [found[round(i * (len(found) - 1) / (_SHAPES - 1))] for i in range(_SHAPES)]
    return [*found[:1], *found]


def _near(found: Tensor, expected: Tensor, allowed: float) -> bool:
    same = found.shape == expected.shape
    return same and bool(((found - expected).abs() <= allowed).all())


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Context in which the hooks on steps of all optimizers do not see those of copies."""
    hooks: tuple[dict[int, Any], ...] = (
        of_torch._global_optimizer_pre_hooks,
        of_torch._global_optimizer_post_hooks,
    )
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, kept in zip(hooks, before, strict=True):
            each.update(kept)


# --- parameters that a forward writes by its own batch ---


def check_forward_writes(model: nn.Module, ranks: int) -> None:
    """Refuse layers that shorten the rows of their own batch, where ranks have several batches.

    Args:
        model: as the user has it.
        ranks: those with batches of their own.

    Raises:
        UsageError: names the first such layer.
    """
    if ranks == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                f"expected layers that write no parameters in forward, found {clean_name(name)!r}, "
                f"{type(module).__name__} with max_norm={module.max_norm}, which shortens the rows "
                f"of its own batch, of which {ranks} ranks have other ones: their weights would "
                "differ. Leave max_norm out, and shorten all rows on every rank after each step: "
                "'with accelerator.gathered(model), torch.no_grad(): weight.copy_(torch.renorm("
                "weight, 2, 0, max_norm))'"
            )
