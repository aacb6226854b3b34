"""Parameters of other stages under the user's names: facts here, values inside of ``gathered``.

``parameters()`` lists the same parameters on every stage, and those of other stages are the objects
that they were in the user's whole model, without memory. Whatever is computed with one is a tensor
without values (``StageProxy``): who reads it hears where the values are. What every rank writes
reaches the values there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from drivetrain.collectives import Communicator
from drivetrain.collectives.facts import gather_facts
from drivetrain.errors import UsageError
from drivetrain.model.deferred import become
from drivetrain.model.guard import (
    Arguments,
    Elsewhere,
    Function,
    Keywords,
    StandIn,
    Unlisted,
    guard,
)
from drivetrain.model.modules import clean_name
from drivetrain_megatron.recording.proxy import StageProxy

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
        device: where the model computes.

    Attributes:
        in_window: whether an accumulation window is under way, whose gradients come at its end.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, Sequence[int]],
        homes: Mapping[str, int],
        axis: Communicator,
        device: torch.device,
    ) -> None:
        self._homes = {
            p: homes[clean_name(name)]
            for name, p in model.named_parameters()
            if clean_name(name) in homes
        }
        self._names = {p: clean_name(name) for name, p in model.named_parameters()}
        self._axis, self._device, self._shapes = axis, device, shapes
        self._model = model
        self._before = [(module, dict(module._parameters)) for module in model.modules()]
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
        """List them as parameters of their modules again."""
        for module, before in self._before:
            now = module._parameters
            if now.keys() != before.keys():
                listed = {name: now.get(name, p) for name, p in before.items()}
                found = {**listed, **now}
                now.clear()
                now.update(found)
                for name, parameter in found.items():
                    shown = module.__dict__.get(name)
                    if parameter in self._guards and type(shown) is ParameterProxy:
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
            for parameter in chosen:
                if parameter in visiting:
                    parameter.__class__ = Elsewhere
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
        nothing = torch.zeros((), dtype=parameter.dtype, device=self._device)
        if parameter.is_meta:
            become(parameter, nothing.expand(parameter.shape), name)
        parameter.data = nothing.expand(tuple(self._shapes[name]))

    def _connect(self, proxy: ParameterProxy, parameter: nn.Parameter) -> None:
        name = self._names[parameter]
        proxy.in_window = lambda: self.in_window()  # noqa: PLW0108 - the strategy sets it later
        proxy.has_gradient = lambda: self.has_gradients() and name not in (self._without or ())

    def has_gradients(self) -> bool:
        """Whether backward has run: then parameters of this stage have gradients, too."""
        trained = [p for p in self._here if p.requires_grad]
        return not trained or any(p.grad is not None for p in trained)
