"""What stands for tensors and parameters whose values exist on another pipeline stage.

A parameter of another stage is a proxy, and so is whatever it touches: a tensor without values
(``drivetrain.model``) with errors of its own. After backward the loss of the last stage reaches
every rank. Until then the script's further operations on the loss, such as ``loss.detach() / 4``,
are kept as an expression (``LazyValue``).

``parameters()`` lists the same parameters on every stage, and those of other stages are the objects
that they were in the user's whole model, without memory: facts here, values inside of ``gathered``.
Whoever reads what is computed with one hears where the values are. What every rank writes reaches
the values there.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.collectives import Communicator
from drivetrain.collectives.facts import gather_facts
from drivetrain.errors import UsageError
from drivetrain.model.deferred import become
from drivetrain.model.guard import (
    STANDS_FOR,
    Arguments,
    Elsewhere,
    Function,
    Keywords,
    StandIn,
    Unlisted,
    guard,
)
from drivetrain.model.modules import clean_name
from drivetrain.model.valueless import Facts, Refusals, ValuelessTensor
from drivetrain.nested import tensors_in
from drivetrain.strategy import Run

_DEPTH = 100
"""Operations in a row that an expression keeps; a running sum that is never read stops there."""

_LOOK = 4
"""Operations in a row after which it is worth a trace whether the values have come by now."""


class LazyValue:
    """A value that is known now, or follows from others, or is still to come.

    Args:
        function: makes the value from the arguments; None when another stage sends it.
        args: arguments, in which ``LazyValue`` objects stand for tensors.
        kwargs: the same by name.
    """

    def __init__(
        self, function: Function | None = None, args: Arguments = (), kwargs: Keywords | None = None
    ) -> None:
        self._value: Tensor | None = None
        self._depth: int
        self._function = function
        self._args, self._kwargs = tuple(args), dict(kwargs or {})
        leaves = tree_leaves((self._args, self._kwargs))
        parents = [leaf for leaf in leaves if isinstance(leaf, LazyValue)]
        for parent in parents:
            if parent._depth > _LOOK:
                parent.value()
        self._depth = 1 + max((parent._depth for parent in parents), default=0)
        if self._depth > _DEPTH:
            self._function, self._args, self._kwargs, self._depth = None, (), {}, 1

    def settle(self, value: Tensor) -> None:
        """Give the value, and let the expression go."""
        self._value = value
        self._function, self._args, self._kwargs, self._depth = None, (), {}, 1

    def value(self) -> Any:
        """Return the value, or None while a value inside of the expression is still to come."""
        if self._value is None and self._function is not None:
            with torch.no_grad():
                found = self._made_of(LazyValue.value)
            if found is not None:
                self.settle(found)
        return self._value

    def assuming(self, other: "LazyValue", point: Tensor) -> Any:
        """Return the value with another one assumed; None if it does not follow from known ones."""
        if self is other:
            return point
        if self._function is None:
            return self._value
        return self._made_of(lambda leaf: leaf.assuming(other, point))

    def _made_of(self, value_of: Callable[["LazyValue"], Any]) -> Any:
        """Return what the function makes of values; None where one is still to come."""

        def known(leaf: Any) -> Any:
            if not isinstance(leaf, LazyValue):
                return leaf
            found = value_of(leaf)
            if found is None:
                raise _MissingError
            # A copy, since an operation in place must not change what others follow from.
            return found.clone() if isinstance(found, Tensor) else found

        try:
            args, kwargs = tree_map(known, (self._args, self._kwargs))
        except _MissingError:
            return None
        return cast(Function, self._function)(*args, **kwargs)


class _MissingError(Exception):
    """A value inside of an expression is still to come."""


def _no_slope(found: str) -> UsageError:
    return UsageError(
        f"expected the model's loss times numbers, found {found}: under pipeline parallelism "
        "backward begins while forward still runs; make the loss in a function and hand it over "
        "(accelerator.pipeline_step), or return it from the model"
    )


_SMALL = 64
"""Elements that a real tensor may have to be copied into an expression of values to come."""

OWN_BACKWARD = (
    "expected accelerator.backward(loss), found a backward of its own on what a pipeline returned "
    "(loss.backward(), torch.autograd.grad): the pipeline runs backward on all stages together, "
    "once for each forward, and no stage has a graph of the whole model. So there are no gradients "
    "of gradients either (create_graph, a gradient penalty): train with such a loss by a strategy "
    "without stages (pp: 1)"
)

CALL = "drivetrain_megatron.call"
"""Under which a node of autograd's graph keeps the call that it came out of."""

OTHER = "a tensor from outside of any call that wants a gradient"
"""Stands among the origins of a tensor for what came from outside of any call."""


class StageProxy(ValuelessTensor):
    """Facts of a tensor without its values; a 0-d one may get its value later.

    Attributes:
        origins: where its gradient would go: calls of the model, and ``OTHER``.
        blocks: indices of the blocks whose outputs it follows from, with or without a gradient.
    """

    origins: frozenset[object]
    blocks: frozenset[int]
    _later: LazyValue | None
    refusals = Refusals(
        "expected values for {use}, found a tensor whose values exist on another pipeline stage: "
        "its shape and dtype are known here, its numbers are not. Return the loss from the model, "
        "or call .item() after accelerator.backward(loss), in an accumulation window after the "
        "last one, and after backward(loss / n) of loss / n alone; for choices that depend on "
        "values, compute them inside of the model's blocks. What a model returns beside its loss "
        "has values under torch.no_grad(); parameters of other stages have them inside of 'with "
        "accelerator.gathered(model):' and in accelerator.get_state_dict(model)",
        "expected values for {name}() to write, found a tensor whose values exist on another "
        "pipeline stage, and a real tensor of shape {shape} as the target: make a new tensor "
        "instead (torch.where, torch.cat, a + b), or do this inside of one of the model's blocks; "
        "with parameters, inside of 'with accelerator.gathered(model):' on every rank; buffers of "
        "all stages are in accelerator.get_state_dict(model)",
        "expected a tensor that keeps its shape, found {name}() on a tensor whose values exist on "
        "another pipeline stage: use the form that returns a new tensor",
        OWN_BACKWARD,
        "expected to read .data, found an assignment to the .data of a tensor whose values exist "
        "on another pipeline stage: change it before accelerator.prepare()",
    )

    def __new__(cls, facts: Facts, requires_grad: bool = False, work: int = 0) -> "StageProxy":
        """Make one without a known expression."""
        self = super().__new__(cls, facts, requires_grad, work)
        self.origins = frozenset()
        self.blocks = frozenset()
        self._later = None if facts.shape else LazyValue()
        return self

    def value(self) -> Tensor | None:
        """Return its value, or None as long as it is not known here."""
        value: Tensor | None = None if self._later is None else self._later.value()
        return value

    def derived_from(self, tensors: Sequence[Tensor]) -> None:
        """Note the blocks that a result follows from, and where its gradient would go."""
        for tensor in tensors:
            if isinstance(tensor, StageProxy):
                self.blocks |= tensor.blocks
        if torch.is_grad_enabled() and (self.requires_grad or any(t is self for t in tensors)):
            self.origins |= _origins(tensors)

    @classmethod
    def remember(cls, result: Any, function: Function, args: Arguments, kwargs: Any) -> None:
        """Keep how results follow from values to come."""
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, StageProxy):
                if tensor._later is None:
                    return
            elif tensor.numel() > _SMALL:
                return
        later = LazyValue(function, *tree_map(_stand_in, (tuple(args), dict(kwargs))))
        if isinstance(result, StageProxy):
            result._later = later
        elif isinstance(result, list | tuple):
            for i, item in enumerate(result):
                if isinstance(item, StageProxy):
                    item._later = LazyValue(operator.getitem, (later, i))

    @classmethod
    def drawn(cls, result: Any, function: Function, args: Arguments, kwargs: Any) -> None:
        """Draw as many random numbers as the stage with the values, whose generators move on."""
        given = tuple(args), dict(kwargs)
        if any(isinstance(x, StageProxy) and x.blocks for x in tensors_in(given)):
            with torch.no_grad():
                ones, named = tree_map(_ones, given)
                function(*ones, **named)
        if isinstance(result, StageProxy) and result._later is not None:
            result._later = LazyValue()  # nobody else knows what it has become

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = self.value()
        if value is not None:
            return f"StageProxy({value}, from another pipeline stage)"
        shape, _, dtype, device = self.facts
        return f"StageProxy(values on another pipeline stage, {shape}, {dtype}, device='{device}')"

    def __format__(self, spec: str) -> str:
        value = self.value()
        if value is not None:
            return format(value.item() if not value.dim() else value, spec)
        if not spec:
            return repr(self)
        raise self.values_needed(f"format(tensor, {spec!r})")


def slope_of(proxy: StageProxy, by: StageProxy) -> Tensor:
    """Return the derivative of a 0-d proxy by another one, fp64.

    Args:
        proxy: its value is to come.
        by: 0-d, to come inside of the expression of the first; where it stands does not matter if
            the expression is linear.

    Raises:
        ValuesNeededError: it follows from other values that are not here, too.
        UsageError: it is no multiple of the other.
    """
    of, inside = proxy._later, by._later
    if of is None or inside is None:
        raise UsageError(
            f"expected a 0-d loss, found a tensor of shape {proxy.facts.shape} whose values exist "
            "on another pipeline stage; take its mean() or sum() in the model"
        )
    slopes = []
    for point in (1.0, 2.0):
        at = torch.full((), point, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            value = of.assuming(inside, at)
            if value is None:
                raise proxy.values_needed("backward()")
            if not value.requires_grad:
                raise _no_slope("one that does not follow from it")
            slopes.append(torch.autograd.grad(value, at)[0])
    if not torch.equal(slopes[0], slopes[1]):
        raise _no_slope("an expression that is not linear")
    return slopes[0]


def with_values(loss: Tensor) -> Tensor:
    """Return a loss of the last stage.

    Raises:
        ValuesNeededError: it takes values that another stage has, and no gradient goes there.
    """
    if isinstance(loss, StageProxy):
        raise loss.values_needed("backward()")
    return loss


def same_value(proxy: StageProxy) -> StageProxy:
    """Return another proxy of the value that a proxy is to get."""
    other = StageProxy(proxy.facts)
    other._later = proxy._later
    return other


def resolve(proxy: StageProxy, value: Tensor) -> None:
    """Give a proxy its value, detached and in its dtype; results of operations on it follow."""
    later = proxy._later = proxy._later or LazyValue()
    later.settle(value.detach().to(proxy.facts.dtype).clone())


def _origins(tensors: Sequence[Tensor]) -> frozenset[object]:
    """Return where the gradient of a result of tensors would go."""
    return frozenset().union(*(origins_in(tensor) for tensor in tensors if tensor.requires_grad))


def origins_in(tensor: Tensor) -> frozenset[object]:
    """Return where the gradient of a tensor would go, by its graph down to outputs of calls.

    Proxies have a graph where a script calls an autograd function of its own.
    """
    if not tensor.requires_grad:
        return frozenset()
    with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter would be gathered
        first = tensor.grad_fn
        if isinstance(tensor, StageProxy) and (first is None or tensor.origins):
            return _origins_of_leaf(tensor)
        waiting = [first or get_gradient_edge(tensor).node]
    found, seen = set[object](), set(waiting)
    while waiting:
        node = waiting.pop()
        call = metadata(node).get(CALL)
        nexts = {following for following, _ in node.next_functions if following is not None}
        if call is not None:
            found.add(call)
        elif not nexts:
            found |= _origins_of_leaf(getattr(node, "variable", None))
        else:
            waiting += nexts - seen
            seen |= nexts
    return frozenset(found)


def _origins_of_leaf(leaf: Any) -> frozenset[object]:
    """Return the origins of a tensor at which a graph begins, and which gets a gradient."""
    known = leaf.origins if isinstance(leaf, StageProxy) else None
    return known or frozenset({OTHER})


def metadata(node: Node) -> dict[str, Any]:
    """Return what a node of autograd's graph keeps for others."""
    content: Any = node.metadata
    return content() if callable(content) else content  # type: ignore[no-any-return]


def _stand_in(leaf: Any) -> Any:
    """Return a value to come in place of a proxy, and a copy of a real tensor."""
    if isinstance(leaf, StageProxy):
        return leaf._later
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _ones(leaf: Any) -> Any:
    """Return other values in place of a proxy's, and a copy of a real tensor."""
    if isinstance(leaf, StageProxy):
        shape, _, dtype, device = leaf.facts
        return torch.ones(shape, dtype=dtype, device=device)
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


_COPIES = (nn.Parameter.__deepcopy__, nn.Parameter.__reduce_ex__)

_DETACHED = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]

_DRAWING = frozenset(
    {
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.bernoulli_),
        *(Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_),
    }
)


class ParameterProxy(StageProxy, Unlisted):
    """A parameter of another stage, as code around blocks and scripts read the attribute.

    Attributes:
        has_gradient: whether its stage has made a gradient for it, as far as this one knows.
        in_window: whether an accumulation window is under way, whose gradients come at its end.
    """

    has_gradient: Callable[[], bool] | None = None
    in_window: Callable[[], bool] | None = None

    @property
    def grad(self) -> Tensor | None:
        """The gradient, without values; None without one."""
        if not self.requires_grad or self.has_gradient is None or not self.has_gradient():
            return None
        return ParameterProxy.like(self.facts.shape, self.facts.dtype, self.facts.device)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Leave the gradient to its stage, where the script does the same.

        Raises:
            UsageError: the window goes on, and nobody has its gradients yet.
        """
        if self.in_window is not None and self.in_window():
            raise UsageError(
                "expected gradients to be cleared or set after the last micro-batch of an "
                "accumulation window, found that in mid-window: in a pipeline they come with the "
                "last one; leave the micro-batch out of the loss, or take another strategy"
            )

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Return the result of a function; random numbers are drawn as on the parameter's stage."""
        first = args[0] if args else None
        if isinstance(first, cls) and func in _DETACHED:
            return cls(first.facts)
        if isinstance(first, cls) and func in _DRAWING:
            shape, _, dtype, device = first.facts
            like = torch.empty(shape, dtype=dtype, device=device)
            made = func(like, *args[1:], **(kwargs or {}))
            return first if made is like else made
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _apply(cls, func: Function, args: Arguments, kwargs: Keywords) -> Any:
        return StageProxy._apply(func, args, kwargs)


class OtherStage:
    """The guard of a stand-in: its proxy takes part in every use.

    Args:
        proxy: of the parameter.
        name: of it.
        rank: of the pipeline, which has the values.
    """

    def __init__(self, proxy: ParameterProxy, name: str, rank: int) -> None:
        self.proxy = proxy
        self._name, self._rank = name, rank

    def run(self, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Call a function with proxies.

        Raises:
            UsageError: it copies or pickles the parameter, or as ``StageProxy`` says.
        """
        if function in _COPIES:
            raise UsageError(
                f"expected a model that this rank has whole, to copy or pickle it, found "
                f"{self._name!r}, which pipeline stage {self._rank} has; copy it before "
                "accelerator.prepare() or inside of 'with accelerator.gathered(model):', and take "
                "accelerator.get_state_dict(model) or save_model() for the weights"
            )
        return function(*tree_map(_proxy, tuple(args)), **tree_map(_proxy, dict(kwargs)))


class StageParameter(StandIn):
    """A parameter that another stage owns, and of which this one may have a copy.

    Its values may be those of before a step, and its gradient a part: a proxy is used for it.
    """

    _guard: OtherStage

    @property
    def grad(self) -> Tensor | None:
        """As of the proxy."""
        return self._guard.proxy.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Leave the gradient to the owner."""
        self._guard.proxy.grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Let the proxy want a gradient, too."""
        self._guard.proxy.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)


def _proxy(leaf: Any) -> Any:
    guarding = getattr(leaf, "_guard", None) if isinstance(leaf, StandIn) else None
    return guarding.proxy if isinstance(guarding, OtherStage) else leaf


class StandIns:
    """The parameters of one model that other stages of a pipeline own.

    Args:
        model: before it is cut.
        shapes: of the whole parameters, by name: ranks may share what is in the model.
        homes: rank of the pipeline that owns a parameter, by its first name.
        axis: of the pipeline.
        run: in whose dtypes the owners hold them.

    Attributes:
        in_window: whether an accumulation window is under way, whose gradients come at its end.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, Sequence[int]],
        homes: Mapping[str, int],
        axis: Communicator,
        run: Run,
    ) -> None:
        self._homes = {
            p: homes[clean_name(name)]
            for name, p in model.named_parameters()
            if clean_name(name) in homes
        }
        self._names = {p: clean_name(name) for name, p in model.named_parameters()}
        self._axis, self._shapes = axis, shapes
        self._device, self._precision = run.world.device, run.precision
        self._model = model
        self._before = [(module, dict(module._parameters)) for module in model.modules()]
        self._buffers = [(module, list(module._buffers)) for module in model.modules()]
        self._guards: dict[nn.Parameter, OtherStage] = {}
        self._here: list[nn.Parameter] = []
        self._without: frozenset[str] | None = None
        self.in_window: Callable[[], bool] = lambda: False

    def learn(self) -> None:
        """Tell other stages once, after a backward, which parameters here got no gradient."""
        if self._without is None:
            mine = [self._names[p] for p in self._here if p.requires_grad and p.grad is None]
            told = gather_facts(mine, list[str], doing="the first gradients of a pipeline")
            self._without = frozenset(name for each in told for name in each)

    def free(self) -> None:
        """Let go of the values of what other stages own, after the model was cut."""
        here = {id(p) for _, p in self._model.named_parameters()}
        self._here = [p for p in self._homes if id(p) in here]
        for parameter, rank in self._homes.items():
            if id(parameter) not in here:
                self._guards[parameter] = self._stand_in(parameter, rank)

    def put(self) -> None:
        """List them as parameters of their modules again, and proxies of other stages' buffers."""
        for module, names in self._buffers:
            here = frozenset(module._buffers)
            for name in names:
                if name not in here:
                    setattr(module.__dict__[name], STANDS_FOR, None)
                module._buffers[name] = module._buffers.pop(name, module.__dict__.get(name))
        for module, before in self._before:
            now = module._parameters
            if now.keys() != before.keys():
                listed = {name: now.get(name, p) for name, p in before.items()}
                found = {**listed, **now}
                now.clear()
                now.update(found)
                for name, parameter in found.items():
                    shown = module.__dict__.get(name)
                    if parameter in self._guards and shown is not None:
                        setattr(shown, STANDS_FOR, parameter)
                        if type(shown) is ParameterProxy:
                            self._connect(shown, parameter)

    @contextmanager
    def whole(self, parameters: Sequence[nn.Parameter], *, modify: bool) -> Iterator[None]:
        """Context in which parameters of all stages have their values on every stage. Collective.

        Args:
            parameters: the same on every stage; those of this one are whole.
            modify: whether changes are kept: those of the first rank of the pipeline.
        """
        chosen = [p for p in self._homes if p in {*parameters}]
        visiting = {p for p in chosen if p in self._guards}
        hidden = [
            (module.__dict__, name, module.__dict__.pop(name))
            for module, before in self._before
            for name, p in before.items()
            if p in visiting and name in module.__dict__
        ]
        try:
            for parameter in visiting:
                parameter.__class__ = Elsewhere
            for parameter in chosen:
                if parameter in visiting:
                    parameter.data = torch.empty(
                        parameter.shape, dtype=parameter.dtype, device=self._device
                    )
                self._share(parameter, self._homes[parameter])
            yield
            if modify:
                for parameter in chosen:
                    self._share(parameter, 0)
        finally:
            for parameter in visiting:
                self._empty(parameter)
                guard(parameter, self._guards[parameter], StageParameter)
            for own, name, value in hidden:
                own[name] = value

    def _share(self, parameter: nn.Parameter, source: int) -> None:
        """Give every stage the values of one rank of the pipeline."""
        values = parameter.data.contiguous()
        self._axis.broadcast(values, source, label="parameters of all stages").wait()
        if values is not parameter.data:
            parameter.data.copy_(values)

    def _stand_in(self, parameter: nn.Parameter, rank: int) -> OtherStage:
        parameter.grad = None
        self._empty(parameter)
        proxy = ParameterProxy.like(
            parameter.shape, parameter.dtype, self._device, parameter.requires_grad
        )
        self._connect(proxy, parameter)
        made = OtherStage(proxy, self._names[parameter], rank)
        guard(parameter, made, StageParameter)
        return made

    def _empty(self, parameter: nn.Parameter) -> None:
        """Leave a parameter the shape of the whole, and memory for one element."""
        name = self._names[parameter]
        shape = tuple(self._shapes[name])
        if parameter.is_meta:
            nothing = torch.zeros((), dtype=parameter.dtype, device=self._device)
            become(parameter, nothing.expand(parameter.shape), name)
        dtype = self._precision.forward_dtype(parameter.dtype, shape)
        parameter.data = torch.zeros((), dtype=dtype, device=self._device).expand(shape)

    def _connect(self, proxy: ParameterProxy, parameter: nn.Parameter) -> None:
        name = self._names[parameter]
        proxy.in_window = lambda: self.in_window()  # noqa: PLW0108 - the strategy sets it later
        proxy.has_gradient = lambda: self.has_gradients() and name not in (self._without or ())

    def has_gradients(self) -> bool:
        """Whether backward has run: then parameters of this stage have gradients, too."""
        trained = [p for p in self._here if p.requires_grad]
        return not trained or any(p.grad is not None for p in trained)
