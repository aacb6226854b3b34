"""Outside of the model's computing, a parameter of which a rank has a share stands for the whole.

Layers, backward and optimizers compute with the share, which the parameter's object has for values.
Everybody else finds the whole: its shape; its values, which the ranks gather together; hooks that
see whole gradients; and each rank takes its share of what is written. Only the class of the
parameter changes between the two, as for parameters whose values are away
(``drivetrain.parts.guard``), which a strategy inside of the cell may have at the same time.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.parts.divided_gradient import DividedGradient
from drivetrain.parts.guard import FACTS, Arguments, Function, Keywords, writes_first
from drivetrain.parts.rounds import in_backward, is_of_strategy
from drivetrain_megatron.shares.gradient import SharePlace
from drivetrain_megatron.shares.hooks import GradientHook, seen_behind, seen_whole
from drivetrain_megatron.shares.whole import WholeCopy, WholeTensor
from drivetrain_megatron.tensor.behavior import SHARE, computing
from drivetrain_megatron.tensor.operators import gather, gathered
from drivetrain_megatron.tensor.partition import Partition

_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data


class SharesOfModel(Protocol):
    """The shares of all parameters of a model, as one of them sees the others.

    Attributes:
        ranks: the axis ``tp``.
        steps: changes of values by optimizers and loads so far.
        closed: whether nobody can gather values any more.
    """

    ranks: Communicator
    steps: int
    closed: bool

    def open(self) -> AbstractContextManager[None]:
        """Context in which parameters are shares: the strategy inside may bring several."""

    def open_until_backward_ends(self) -> None:
        """Let parameters be shares: a backward runs that no strategy has begun."""

    def norm(self, share: "Share", norm_type: float) -> Tensor:
        """Return the norm of a whole gradient. Collective, once for all gradients."""

    def forget_norms(self) -> None:
        """Forget norms: gradients have changed."""


class Share:
    """A rank's share of one parameter, of the model or of a copy.

    Args:
        name: of the parameter.
        parameter: has the share.
        partition: what each rank has.
        shape: of the whole.
        model: the shares of the model.
        copied: whether the parameter is a copy's, and so changes by itself.

    Attributes:
        parameter: as given.
        model: as given.
        beneath: the class of the parameter as the strategy inside of the cell knows it.
        place: of the gradient.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        partition: Partition,
        shape: tuple[int, ...],
        model: SharesOfModel,
        *,
        copied: bool = False,
    ) -> None:
        self.parameter = parameter
        self.beneath: type = type(parameter)
        self._name = name
        self._partition = partition
        self._shape = shape
        self.model = model
        self._copied = copied
        self._shown: Callable[[], WholeCopy | None] = lambda: None
        self._gradient: DividedGradient | None = None
        self.place = SharePlace(
            name,
            model.ranks,
            partition,
            self._held_gradient,
            lambda norm_type: model.norm(self, norm_type),
            model.forget_norms,
        )
        setattr(parameter, SHARE, self)

    def cover(self) -> None:
        """Let the parameter stand for the whole."""
        if type(self.parameter) is not ShareParameter:
            self.beneath = type(self.parameter)
            self.parameter.__class__ = ShareParameter

    def outline(self) -> Tensor:
        """Return a tensor with the facts of the whole, without values."""
        return torch.empty(self._shape, dtype=self.parameter.dtype, device="meta")

    def tracked(self) -> Tensor:
        """Return the whole values, whose gradients reach the shares. Collective."""
        ranks = self._ranks()
        with self._bare():
            return gather(self.parameter, ranks, self._partition)

    def whole(self) -> WholeTensor:
        """Return the whole values outside of autograd. Collective."""
        ranks, label = self._ranks(), f"values of {self._name!r}"
        with torch.no_grad(), self._bare():
            values = gathered(self.parameter, ranks, self._partition, label=label)
        known = self._shown()
        if known is None:
            known = WholeCopy(self._name, values, self._put, self._moment)
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
        share = self.place.cut(whole.detach())
        known, self._shown = self._shown(), lambda: None
        if known is not None:
            known.cut()
        with self._bare():
            self.parameter.data = share

    def whole_of(self, gradient: Tensor) -> Tensor:
        """Return the whole of which ranks have shares. Collective."""
        return gather(gradient, self._ranks(), self._partition)

    def gradient(self) -> DividedGradient | None:
        """Return the whole gradient; None if there is none."""
        if self._held_gradient() is None:
            return None
        if self._gradient is None:
            like = self.parameter.new_empty(self._shape)  # for its facts: no memory is touched
            self._gradient = DividedGradient(like, self.place)
        return self._gradient

    def assign_gradient(self, given: Tensor | None) -> None:
        """Let the parameter have a share of another gradient, or none.

        Raises:
            UsageError: it has another shape.
        """
        if given is self._gradient and given is not None:
            return
        share = None
        if given is not None:
            self._check_whole(given)
            if isinstance(given, DividedGradient):
                share = (
                    given.piece() if given.place is self.place else self.place.cut(given.whole())
                )
            else:
                share = self.place.cut(given)
        with bare([self.parameter]):
            self.parameter.grad = share
        self.model.forget_norms()

    def _held_gradient(self) -> Tensor | None:
        with bare([self.parameter]):
            return self.parameter.grad

    def _check_whole(self, given: Tensor) -> None:
        if tuple(given.shape) != self._shape:
            raise UsageError(
                f"expected a tensor of shape {self._shape} for {self._name!r}, found "
                f"{tuple(given.shape)}; give a whole one: each rank takes its part of it"
            )

    def hook(self, seeing: GradientHook) -> Callable[[Tensor | None], Tensor | None]:
        """Return a hook of the share that lets a script's hook see the whole gradient."""
        return seen_whole(seeing, self.model.ranks, self._partition)

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
        """Return a hook behind the accumulation that a script's hook runs in when it may."""
        return seen_behind(seeing, self._name)

    def hook_behind_later(self, seeing: Callable[[nn.Parameter], None]) -> RemovableHandle:
        """Register a script's hook behind the accumulation."""
        with bare([self.parameter]):
            return self.parameter.register_post_accumulate_grad_hook(self.hook_behind(seeing))  # type: ignore[no-untyped-call,no-any-return]

    def copy(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy that stands for the whole, too."""
        with self._bare():
            new: nn.Parameter = copy.deepcopy(self.parameter, memo)
        Share(self._name, new, self._partition, self._shape, self.model, copied=True).cover()
        return new

    def _ranks(self) -> Communicator:
        if self.model.closed:
            raise UsageError(
                f"expected a parameter with values, found {self._name!r}, of which each rank has a "
                "share since its strategy was taken off, as by free_memory(); "
                "take accelerator.get_state_dict(model) or save_model() before"
            )
        return self.model.ranks

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Context in which the parameter is the share; a copy's is none of the model's."""
        with self.model.open(), bare([self.parameter]):
            yield

    def _put(self, whole: Tensor) -> None:
        share = self.place.cut(whole)
        with torch.no_grad(), self._bare():
            self.parameter.copy_(share)

    def _moment(self) -> tuple[int, int]:
        with bare([self.parameter]):
            return self.parameter._version, 0 if self._copied else self.model.steps


class ShareParameter(nn.Parameter):
    """A parameter that stands for the whole, while its memory has a rank's share."""

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
        whole = nn.Parameter(self._share.whole().plain(), self.requires_grad)
        return whole.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(divided over ranks, shape {tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)  # as repr: one rank may print by itself


@contextmanager
def bare(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which some parameters that stand for the whole are shares."""
    covered: list[Any] = [p for p in dict.fromkeys(parameters) if type(p) is ShareParameter]
    for parameter in covered:
        parameter.__class__ = parameter._share.beneath
    try:
        yield
    finally:
        for parameter in covered:
            parameter._share.cover()


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
            stand_ins[parameter] = known.whole().requires_grad_(tracked)
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
        else one._share.whole_of(gradient)
        for one, gradient in zip(inputs, found, strict=True)
    )


def _replaced(
    func: Function, args: Arguments, kwargs: Keywords, stand_ins: Mapping[Any, Tensor]
) -> Any:
    args, kwargs = tree_map(
        lambda leaf: stand_ins[leaf] if type(leaf) is ShareParameter else leaf, (args, kwargs)
    )
    return func(*args, **kwargs)


_SPECIAL: Mapping[Function, Callable[..., Any]] = {
    Tensor.register_hook: Share.hook_later,
    Tensor.register_post_accumulate_grad_hook: Share.hook_behind_later,
    _DATA.__set__: Share.replace,
    _GRADIENT.__get__: lambda share, *_: share.gradient(),
    _GRADIENT.__set__: Share.assign_gradient,
    _GRADIENT.__delete__: lambda share: share.assign_gradient(None),
}

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
