"""Parameters of which each tensor-parallel rank has a share, under the names that a script knows.

Outside of the model's computing such a parameter stands for the whole. Layers, backward and
optimizers compute with the share, which the parameter's object has for values. Everybody else finds
the whole: its shape; its values, which the ranks gather together; hooks that see whole gradients;
and each rank takes its share of what is written. Only the class of the parameter changes between
the two, as for parameters whose values are away (``drivetrain.model.guard``), which a strategy
inside of the cell may have at the same time.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import Work
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.model.guard import (
    FACTS,
    Arguments,
    Function,
    Keywords,
    asks_facts,
    sealed,
    targets,
    writes_first,
)
from drivetrain.model.modules import UninheritedHook, UninheritedMethod
from drivetrain.parallel.backward import after_backward, in_backward, is_of_strategy, norms_of_each
from drivetrain.parallel.gradients import DividedGradient
from drivetrain.parallel.optimizers import outermost
from drivetrain_megatron.tensor.behavior import (
    SHARE,
    Own,
    attach,
    behavior_of,
    computing,
    know_shares,
)
from drivetrain_megatron.tensor.operators import gather, gathered, scatter
from drivetrain_megatron.tensor.partition import Partition

# --- whole values, copied for a script ---

# The copy stands for the tensor's own memory: whatever is written into it, or into a view of it,
# goes to the shares, and values of before a step are not given out.


class WholeCopy:
    """A copy of the whole values of a parameter, tied to its shares."""

    def __init__(self, share: "Share", values: Tensor) -> None:
        self._share, self._values = share, values
        self._is_tied = True
        self._seen = share.moment()

    def refresh(self, values: Tensor) -> None:
        """Take the values of now."""
        self._values.copy_(values)
        self._seen = self._share.moment()

    def shown(self) -> "WholeTensor":
        """Return the values for a script."""
        return self.view(self._values.detach())

    def view(self, view: Tensor) -> "WholeTensor":
        """Let a view of the values be one whose writes reach the shares."""
        shown: Any = view
        shown.__class__ = WholeTensor
        shown._copy = self
        return shown  # type: ignore[no-any-return]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the values."""
        dense = tensor.layout is torch.strided and not tensor.is_meta
        mine = self._values.untyped_storage()._cdata
        return dense and tensor.untyped_storage()._cdata == mine

    def check(self) -> None:
        """Refuse values of before a step.

        Raises:
            UsageError: names the parameter.
        """
        if self._is_tied and self._seen != self._share.moment():
            raise UsageError(
                f"expected values of {self._share.name!r} as they are now, found a copy from "
                "before they changed: ranks hold shares of them; read the parameter, or "
                "state_dict(), again, or keep a clone()"
            )

    def refuse_memory(self) -> NoReturn:
        """Refuse to give out memory, into which code writes that nobody sees.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"expected values of {self._share.name!r} as a tensor, found a function that asks for "
            "their memory: ranks hold shares, and what is written there would be lost; take it of "
            "a clone()"
        )

    def written(self) -> None:
        """Let the shares follow."""
        if self._is_tied:
            self._share.put(self._values)
            self._seen = self._share.moment()

    def cut(self) -> None:
        """Go on as ordinary memory: the tensor has got another one."""
        self._is_tied = False


_MEMORY = (Tensor.storage, Tensor.__dlpack__)


class WholeTensor(Tensor):
    """What a script gets of a copy: the copy itself, or a view of it."""

    _copy: WholeCopy

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Run a function; let shares follow what it writes, and its views be such tensors."""
        if any(issubclass(kind, nn.Parameter) for kind in types):
            return NotImplemented  # one of which this rank has a share: it brings its values first
        kwargs = kwargs or {}
        copies = {leaf._copy for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)}
        if asks_facts(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for one in copies:
            one.check()
            if func in _MEMORY:
                one.refuse_memory()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if isinstance(result, Work):  # of a collective that writes later
            result.wait()
        for one in _written(func, args, kwargs):
            one.written()
        return tree_map(lambda leaf: _viewed(leaf, copies), sealed(func, result))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def plain(self) -> Tensor:
        """Return an ordinary tensor with the same memory, for files and copies."""
        self._copy.check()
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()


def _written(func: Function, args: Arguments, kwargs: Keywords) -> set[WholeCopy]:
    first = [*args, *kwargs.values()][:1] if writes_first(func) else targets("", args, kwargs)
    return {leaf._copy for leaf in tree_leaves(first) if isinstance(leaf, WholeTensor)}


def _viewed(leaf: Any, copies: set[WholeCopy]) -> Any:
    """Return a view of a copy as such, and everything else as it is."""
    if type(leaf) is Tensor:
        return next((one.view(leaf) for one in copies if one.holds(leaf)), leaf)
    return leaf


# --- one parameter ---

GradientHook: TypeAlias = Callable[[Tensor], Tensor | None]


_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data


@dataclass(eq=False, repr=False)
class Share:
    """A rank's share of one parameter, of the model or of a copy; the place of its gradient, too.

    Attributes:
        name: of the parameter.
        parameter: has the share.
        partition: what each rank has.
        shape: of the whole.
        model: the shares of the model.
        copied: whether the parameter is a copy's, and so changes by itself.
        beneath: the class of the parameter as the strategy inside of the cell knows it.
    """

    name: str
    parameter: nn.Parameter
    partition: Partition
    shape: tuple[int, ...]
    model: "Shares"
    copied: bool = False
    beneath: type = field(init=False)

    def __post_init__(self) -> None:
        """Let the parameter know its share."""
        self.beneath = type(self.parameter)
        self._shown: Callable[[], WholeCopy | None] = lambda: None
        self._gradient: Callable[[], DividedGradient | None] = lambda: None
        setattr(self.parameter, SHARE, self)

    def cover(self, kind: type) -> None:
        """Let the parameter stand for the whole, or show its gradient whole."""
        if type(self.parameter) is not kind:
            self.beneath, self.parameter.__class__ = type(self.parameter), kind

    @contextmanager
    def with_values(self) -> Iterator[None]:
        """Context in which the parameter has the whole's values, and shows its gradient whole."""
        self.cover(GatheredParameter)
        try:
            yield
        finally:
            self.parameter.__class__ = self.beneath

    def outline(self) -> Tensor:
        """Return a tensor with the facts of the whole, without values."""
        return torch.empty(self.shape, dtype=self.parameter.dtype, device="meta")

    def tracked(self) -> Tensor:
        """Return the whole values, whose gradients reach the shares. Collective."""
        ranks = self.ranks()
        with self._bare():
            return gather(self.parameter, ranks, self.partition)

    def values(self) -> WholeTensor:
        """Return the whole values outside of autograd. Collective."""
        ranks, label = self.ranks(), f"values of {self.name!r}"
        with torch.no_grad(), self._bare():
            values = gathered(self.parameter, ranks, self.partition, label=label)
        known = self._shown()
        if known is None:
            known = WholeCopy(self, values)
            self._shown = weakref.ref(known)
        else:  # as in memory: what was read before sees the same
            known.refresh(values)
        return known.shown()

    def replace(self, whole: Tensor) -> None:
        """Give the parameter other memory, for its share of whole values.

        Raises:
            UsageError: they have another shape.
        """
        self._check_whole(whole)
        share = self.cut(whole.detach())
        known, self._shown = self._shown(), lambda: None
        if known is not None:
            known.cut()
        with self._bare():
            self.parameter.data = share

    def gradient(self) -> DividedGradient | None:
        """Return the whole gradient; None if there is none. One that was cleared keeps its own."""
        if (held := self.held_gradient()) is None:
            return None
        known = self._gradient()
        if known is None or cast(ShareGradient, known.place).held is not held:
            like = self.parameter.new_empty(self.shape)  # for its facts: no memory is touched
            known = DividedGradient(like, ShareGradient(self, held))
            self._gradient = weakref.ref(known)
        return known

    def assign_gradient(self, given: Tensor | None) -> None:
        """Let the parameter have a share of another gradient, or none.

        Raises:
            UsageError: it has another shape.
        """
        share = None
        if given is not None:
            self._check_whole(given)
            if isinstance(given, DividedGradient):
                of_this = isinstance(given.place, ShareGradient) and given.place.share is self
                share = given.piece() if of_this else self.cut(given.whole())
            else:
                share = self.cut(given)
        with bare([self.parameter]):
            self.parameter.grad = share
        self.model.forget_norms()

    def held_gradient(self) -> Tensor | None:
        """Return the gradient of the share, as the strategy inside of the cell shows it."""
        with bare([self.parameter]):
            return self.parameter.grad

    def counted(self) -> Tensor | None:
        """Return this rank's share of the gradient, with zeros for what an earlier rank has too."""
        held = self.held_gradient()
        if held is None or self.partition.is_plain:
            return held
        return self.partition.disown(_ordinary(held).clone(), self.model.ranks.rank)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's share of a tensor of the parameter's shape."""
        return self.partition.take(whole, self.model.ranks.rank)

    def whole(self, piece: Tensor) -> Tensor:
        """Bring the shares of a gradient together. Collective."""
        share, label = _ordinary(piece), f"gradient of {self.name!r}"
        narrow = share.dtype is torch.bool
        share = share.to(torch.uint8) if narrow else share
        whole = gathered(share, self.model.ranks, self.partition, label=label)
        return whole.bool() if narrow else whole

    def refuse_weight_norm(self, *_: Any) -> NoReturn:
        """Refuse to part a parameter into lengths and directions.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"expected no weight_norm of a layer that ranks have divided, found one of "
            f"{self.name!r}; apply it before prepare(), where such a layer stays whole on each "
            "rank, or take a strategy over the axis dp alone; for lengths alone take "
            "torch.linalg.vector_norm(weight, dim=...)"
        )

    def refuse_memory(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to give a parameter other memory, or another shape of it.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"expected {self.name!r} to keep its memory and shape, of which ranks have shares, "
            "found set_(), resize_(), t_() or the like; write values with copy_(), or set p.data "
            "to a tensor of the parameter's shape"
        )

    def _check_whole(self, given: Tensor) -> None:
        if tuple(given.shape) != self.shape:
            raise UsageError(
                f"expected a tensor of shape {self.shape} for {self.name!r}, found "
                f"{tuple(given.shape)}; give a whole one: each rank takes its part of it"
            )

    def hook(self, seeing: GradientHook) -> Callable[[Tensor | None], Tensor | None]:
        """Return a hook of the share that lets a script's hook see the whole gradient."""
        ranks, partition = self.model.ranks, self.partition

        def shared(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # a pipeline computes it later
                return None
            if not in_backward():  # it is averaged, and whole
                return seeing(gradient)
            whole = gather(gradient, ranks, partition)
            found = seeing(whole)
            return scatter(whole if found is None else found, ranks, partition)

        return shared

    def hook_later(self, seeing: GradientHook) -> RemovableHandle:
        """Register a script's hook of the whole gradient."""
        with bare([self.parameter]):
            return self.parameter.register_hook(self.hook(seeing))  # type: ignore[no-untyped-call,no-any-return]

    def wrap_hooks(self) -> None:
        """Let the hooks that a script has registered see the whole gradient."""
        known: Any = self.parameter
        for hooks, wrapped in (
            (known._backward_hooks, self.hook),
            (known._post_accumulate_grad_hooks, self.hook_behind),
        ):
            for number, seeing in (hooks or {}).items():
                if not is_of_strategy(seeing):
                    hooks[number] = wrapped(seeing)

    def hook_behind(self, seeing: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
        """Return a hook behind the accumulated gradient that never sees a share of it."""

        def behind(parameter: nn.Parameter) -> None:
            if in_backward():
                raise UsageError(
                    "expected accelerator.backward(loss), found loss.backward(), in which a hook "
                    f"behind the accumulated gradient of {self.name!r} would see this rank's "
                    "share; call accelerator.backward(loss), or take register_hook"
                )
            seeing(parameter)

        return behind

    def hook_behind_later(self, seeing: Callable[[nn.Parameter], None]) -> RemovableHandle:
        """Register a hook behind the accumulation; one of a strategy around it sees the share."""
        hook = seeing if is_of_strategy(seeing) else self.hook_behind(seeing)
        with bare([self.parameter]):
            return self.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call,no-any-return]

    def copy(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy that stands for the whole, too."""
        with self._bare():
            new: nn.Parameter = copy.deepcopy(self.parameter, memo)
        Share(self.name, new, self.partition, self.shape, self.model, copied=True).cover(
            ShareParameter
        )
        return new

    def ranks(self) -> Communicator:
        """Return the axis ``tp``, as long as values can be gathered."""
        if self.model.closed:
            raise UsageError(
                f"expected a parameter with values, found {self.name!r}, of which each rank has a "
                "share since its strategy was taken off, as by free_memory(); "
                "take accelerator.get_state_dict(model) or save_model() before"
            )
        return self.model.ranks

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Context in which the parameter is the share; a copy's is none of the model's."""
        with self.model.open(), bare([self.parameter]):
            yield

    def put(self, whole: Tensor) -> None:
        """Take this rank's share of whole values over."""
        share = self.cut(whole)
        with torch.no_grad(), self._bare():
            self.parameter.copy_(share)

    def moment(self) -> tuple[int, int]:
        """Tell one state of the values from another."""
        with bare([self.parameter]):
            return self.parameter._version, 0 if self.copied else self.model.steps


def _ordinary(piece: Tensor) -> Tensor:
    """Return a share whole over the ranks of the strategy inside of the cell."""
    return piece.whole() if isinstance(piece, DividedGradient) else piece


class ShareGradient:
    """The place of one gradient of which ranks have shares; it outlives its time at ``p.grad``.

    Args:
        share: of the parameter.
        held: the share of the gradient.

    Attributes:
        share: as given.
        held: as given.
        name: of the parameter.
    """

    def __init__(self, share: Share, held: Tensor) -> None:
        self.share, self.held, self.name = share, held, share.name

    def look(self) -> None:
        """Go on with the gradient that is held, wherever it stands."""

    def piece(self) -> Tensor:
        """Return this rank's share of the gradient."""
        return self.held

    def clear(self) -> None:
        """Write zeros into the gradient."""
        self.held.zero_()
        self.changed()

    def changed(self) -> None:
        """Forget what was measured of gradients."""
        self.share.model.forget_norms()

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's share of a tensor of the parameter's shape."""
        return self.share.cut(whole)

    def whole(self, piece: Tensor) -> Tensor:
        """Bring the shares of a gradient together. Collective."""
        return self.share.whole(piece)

    def norm(self, norm_type: float) -> Tensor:
        """Return the norm of the whole gradient. Collective, once for all that are at ``grad``."""
        if self.share.held_gradient() is self.held:
            return self.share.model.norm(self.share, norm_type)
        kept: Tensor = torch.linalg.vector_norm(self.whole(self.held), norm_type)
        return kept


class ShareParameter(nn.Parameter):
    """A parameter that stands for the whole, while its memory has a rank's share."""

    _stands_for_whole = True  # drivetrain.model.modules.WHOLE
    _share: Share

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Run a function on shares where the model computes, and on the whole elsewhere."""
        kwargs = kwargs or {}
        if func in _OF_THE_OBJECT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        covered = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls]
        if computing.depth or in_backward():
            if not computing.depth:
                covered[0]._share.model.open_until_backward_ends()
            with bare(covered):
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return _gradients_of_whole(args, kwargs, covered)
        if func in _SPECIAL and type(args[0]) is cls:
            return _SPECIAL[func](args[0]._share, *args[1:], **kwargs)
        if func in _OF_SHAPE:
            return _replaced(func, args, kwargs, {p: p._share.outline() for p in covered})
        return _on_whole(func, args, kwargs, covered)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo[id(self)] if id(self) in memo else self._share.copy(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = nn.Parameter(self._share.values().plain(), self.requires_grad)
        return whole.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse other memory: torch shows this to no ``__torch_function__``.

        Raises:
            UsageError: always.
        """
        self._share.refuse_memory()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(divided over ranks, shape {tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)  # as repr: one rank may print by itself


class GatheredParameter(nn.Parameter):
    """A parameter inside of ``gathered()``: the whole, of whose gradient ranks have shares."""

    _share: Share

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Show the whole gradient; run all other functions on the whole."""
        if func in _OF_GRADIENT and type(args[0]) is cls:
            return _SPECIAL[func](args[0]._share, *args[1:])
        with bare(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls):
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with bare([self]):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with bare([self]):
            return self.__reduce_ex__(protocol)


@contextmanager
def bare(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which some parameters are what is beneath: shares, or the gathered whole."""
    kinds = (ShareParameter, GatheredParameter)
    covered: dict[Any, type] = {p: type(p) for p in parameters if type(p) in kinds}
    for parameter in covered:
        parameter.__class__ = parameter._share.beneath
    try:
        yield
    finally:
        for parameter, kind in covered.items():
            parameter._share.cover(kind)


def _on_whole(
    func: Function, args: Arguments, kwargs: Keywords, covered: Iterable[nn.Parameter]
) -> Any:
    """Run a function on whole values, and let shares follow what it writes."""
    first = [*args, *kwargs.values()][:1] if writes_first(func) else kwargs.get("out")
    written = {id(leaf) for leaf in tree_leaves(first)}
    recorded = torch.is_grad_enabled() and func not in _DETACHED
    stand_ins: dict[Any, Tensor] = {}
    for parameter in dict.fromkeys(covered):
        known: Share = parameter._share  # type: ignore[attr-defined]
        tracked = recorded and parameter.requires_grad
        if tracked and id(parameter) not in written:
            stand_ins[parameter] = known.tracked()
        else:  # a leaf, into which autograd lets nobody write
            stand_ins[parameter] = known.values().requires_grad_(tracked)
    result = _replaced(func, args, kwargs, stand_ins)
    back = {id(stand_in): parameter for parameter, stand_in in stand_ins.items()}
    return tree_map(lambda leaf: back.get(id(leaf), leaf), result)


def _gradients_of_whole(
    args: Arguments, kwargs: Keywords, covered: Iterable[nn.Parameter]
) -> tuple[Tensor | None, ...]:
    """Return what ``torch.autograd.grad`` does, with whole gradients. Collective."""
    with bare(covered):
        found: Sequence[Tensor | None] = torch.autograd.grad(*args, **kwargs)
    asked = [*args[1:2], kwargs.get("inputs")][0]
    inputs = [asked] if isinstance(asked, Tensor) else asked
    return tuple(
        gradient
        if gradient is None or type(one) is not ShareParameter
        else gather(gradient, one._share.ranks(), one._share.partition)
        for one, gradient in zip(inputs, found, strict=True)
    )


def _replaced(
    func: Function, args: Arguments, kwargs: Keywords, stand_ins: Mapping[Any, Tensor]
) -> Any:
    args, kwargs = tree_map(
        lambda leaf: stand_ins[leaf] if type(leaf) is ShareParameter else leaf, (args, kwargs)
    )
    return func(*args, **kwargs)


_RESHAPING = """
    resize_ resize_as_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_
"""

_SPECIAL: Mapping[Function, Callable[..., Any]] = {
    Tensor.register_hook: Share.hook_later,
    Tensor.register_post_accumulate_grad_hook: Share.hook_behind_later,
    _DATA.__set__: Share.replace,
    _GRADIENT.__get__: lambda share, *_: share.gradient(),
    _GRADIENT.__set__: Share.assign_gradient,
    _GRADIENT.__delete__: lambda share: share.assign_gradient(None),
    torch.norm_except_dim: Share.refuse_weight_norm,  # which keeps the parameter in another one
    **{getattr(Tensor, name): Share.refuse_memory for name in _RESHAPING.split()},
}

_OF_GRADIENT = (_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__)

_OF_SHAPE: frozenset[Function] = frozenset(
    {
        *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_same_size),
        *(Tensor.__len__, Tensor.dim_order),
        *(Tensor.shape.__get__, Tensor.nbytes.__get__),  # type: ignore[attr-defined]
    }
)

_OF_THE_OBJECT = (FACTS | {Tensor.data_ptr}) - _SPECIAL.keys() - _OF_SHAPE
"""Functions that ask for the same facts of share and whole; whose memory it is tells ties."""

_DETACHED = (Tensor.detach, _DATA.__get__)


# --- parameters of one model of which ranks have shares: who finds shares in them, and when ---


MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_TOUCHING = ("zero_grad", "train", "eval")
"""Methods of optimizers that look at each parameter, or write into it, beside their steps."""


class Shares:
    """The parameters of one model of which ranks have shares.

    Args:
        ranks: the axis ``tp``.

    Attributes:
        ranks: as given.
        steps: changes of values by optimizers and loads so far.
        closed: whether nobody can gather values any more.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks
        self.steps = 0
        self.closed = False
        self._all: list[Share] = []
        self._depth = 0
        self._forwards = 0
        self._backward = False
        self._handles: list[RemovableHandle] = []
        self._methods: list[UninheritedMethod] = []
        self._norms: dict[float, dict[Share, Tensor]] = {}

    def add(
        self, name: str, parameter: nn.Parameter, partition: Partition, shape: tuple[int, ...]
    ) -> None:
        """Know one more parameter, and let hooks that a script has registered see the whole."""
        share = Share(name, parameter, partition, shape, self)
        share.wrap_hooks()
        self._all.append(share)

    def cover(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Let the parameters stand for the whole wherever the model does not compute."""
        if not self._all:
            return
        mine = {share.parameter for share in self._all}
        for module in model.modules():
            if know_shares(module, mine) and behavior_of(module) is None:
                attach(module, Own())  # its forward computes with the share, however it is called
        begin, end = UninheritedHook(self._begin_forward), UninheritedHook(self._end_forward)
        self._handles.append(model.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(model.register_forward_hook(end, always_call=True))
        for optimizer in optimizers:
            self.follow(optimizer)
        for share in self._all:
            share.cover(ShareParameter)

    def follow(self, optimizer: Optimizer) -> None:
        """Let one more optimizer step shares."""
        if not self._all:
            return
        self._handles.append(optimizer.register_step_pre_hook(outermost(lambda *_: self._enter())))
        self._handles.append(optimizer.register_step_post_hook(outermost(self._after_step)))
        for name in _TOUCHING:
            if callable(given := getattr(optimizer, name, None)):
                method = UninheritedMethod(optimizer, name, self._opened(given))
                method.put()
                self._methods.append(method)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context in which parameters are shares."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def without(self, parameters: Collection[nn.Parameter]) -> Iterator[None]:
        """Context, inside of ``open``, in which these parameters alone are as they are."""
        known, chosen = self._all, set(parameters)
        self._all = [share for share in known if share.parameter not in chosen]
        self._leave()
        with ExitStack() as stack:
            for share in known:
                if share.parameter in chosen:
                    stack.enter_context(share.with_values())
            try:
                yield
            finally:
                self._enter()
                self._all = known

    def close(self) -> None:
        """Take hooks off; parameters go on to show facts of the whole, and refuse their values."""
        for handle in self._handles:
            handle.remove()
        for method in reversed(self._methods):
            method.take_off()
        self._handles, self._methods = [], []
        self.closed = True

    def norm(self, share: Share, norm_type: float) -> Tensor:
        """Return the norm of a whole gradient; those of all are measured together. Collective."""
        together = self._all if share in self._all else [share]
        if share not in self._norms.get(norm_type, {}):
            counted = [each.counted() for each in together]
            device = share.parameter.device
            norms = norms_of_each(counted, norm_type, over=[self.ranks], device=device)
            self._norms[norm_type] = dict(zip(together, norms.unbind(), strict=True))
        return self._norms[norm_type][share]

    def forget_norms(self) -> None:
        """Forget norms: gradients have changed."""
        self._norms.clear()

    def open_until_backward_ends(self) -> None:
        """Let parameters be shares: a backward runs that no strategy has begun."""
        if not self._backward:
            self._backward = True
            self._uncover()
            after_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self._backward:
            self._backward = False
            self._cover()

    def _enter(self) -> None:
        computing.depth += 1
        if self._backward and not in_backward():
            self._end_backward()  # an exception has cut it short
        self._uncover()

    def _leave(self) -> None:
        computing.depth -= 1
        self._cover()

    def _uncover(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._norms.clear()
            for share in self._all:
                share.parameter.__class__ = share.beneath

    def _cover(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            for share in self._all:  # twice in each forward, backward and step: no calls
                parameter = share.parameter
                if (kind := type(parameter)) is not ShareParameter:
                    share.beneath, parameter.__class__ = kind, ShareParameter

    def _begin_forward(self, *_: Any) -> None:
        self._forwards += 1
        self._enter()

    def _end_forward(self, *_: Any) -> None:
        if self._forwards:  # not if a hook before the first of these raised
            self._forwards -= 1
            self._leave()

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        self._leave()

    def _opened(self, given: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any, **kwargs: Any) -> Any:
            with self.open():
                return given(*args, **kwargs)

        return opened


def inside(
    context: Callable[..., AbstractContextManager[object]],
) -> Callable[[MethodT], MethodT]:
    """Return a decorator of methods, which run in a context that is made of their arguments."""

    def decorated(method: MethodT) -> MethodT:
        @functools.wraps(method)
        def within(self: Any, *args: Any, **kwargs: Any) -> Any:
            with context(self, *args):
                return method(self, *args, **kwargs)

        return cast(MethodT, within)

    return decorated


on_shares = inside(lambda owner, *_: owner._shares.open())
"""Lets a method of what has ``_shares`` find shares in the parameters."""

on_share = inside(lambda owner, parameter, *_: bare([parameter]))
"""Lets a method find the share in its first argument."""
