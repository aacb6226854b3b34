"""Gives one module of the user another forward, and takes it away again.

The module stays the object it is: only its class becomes a subclass, made on the fly, of the same
name. Its attributes, parameters, hooks and its place in the model are untouched. ``torch.compile``
is set aside where ranks share a forward: they exchange activations through threads that a compiler
cannot see into.
"""

import copy
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.parts.naming import uncompiled
from drivetrain_megatron.tensor.operators import Uncopied

_KEY = "_drivetrain_tensor_parallel"
_SHARED = "_drivetrain_shared_parameters"


class Computing(threading.local):
    """Context of a thread in which parameters are shares, those of any copy of a model too."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


computing = Computing()


class Behavior(Uncopied, ABC):
    """The forward of a module on ranks that share its work.

    A copy of the module (an average of weights, say) shares the behavior: it is made on every rank
    and computes with the same ranks. There are no pickles: code around the module may count with
    sizes of this rank's share.
    """

    @abstractmethod
    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the output that the module's own forward has with whole parameters."""


class Own(Behavior):
    """The forward of the module's own class."""

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute by the module's own class."""
        return original_class(module).forward(module, *args, **kwargs)


@dataclass(frozen=True)
class Surrounding(Behavior):
    """Adds something to the forward of a module, which has another behavior inside."""

    inner: Behavior


class Parallel:
    """Mixed into the class of a module that has a behavior."""

    _drivetrain_original: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute by the behavior.

        Raises:
            UsageError: another tensor stands in the place of a share.
        """
        module: Any = self
        for child, name in module.__dict__.get(_SHARED, ()):
            owner = module._modules.get(child) if child else module
            held = None if owner is None else owner._parameters.get(name)
            if type(held) in _ORDINARY and not hasattr(held, SHARE):
                raise _other_values(f"{child}.{name}" if child else name, module)
        with computing:
            return self.__dict__[_KEY].forward(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = memo[id(self)] = self.__copy__()
        state = {key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()}
        new.__dict__.update(state)
        return new

    def __copy__(self) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"expected a module to pickle that is whole, found {self._drivetrain_original.__name__}"
            ", which ranks share: save state_dict() on every rank, or "
            "accelerator.get_state_dict(model), and build the module anew"
        )


SHARE = "_share"
"""The attribute of parameters of which this rank has a share."""

_ORDINARY = (Tensor, nn.Parameter)
"""A pipeline puts others in the places of parameters, for what other stages have."""


def know_shares(module: nn.Module, mine: Collection[Tensor]) -> bool:
    """Let a module compute with shares only; return whether it has parameters that are shares.

    Those of its children count for it, too: attention reads its projection's by itself.

    Args:
        module: of any kind.
        mine: parameters of which this rank has a share.
    """
    found = tuple(
        (child, name)
        for child, part in {"": module, **module._modules}.items()
        if part is not None
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter in mine
    )
    if found:
        module.__dict__[_SHARED] = found
    return any(not child for child, _ in found)


def _other_values(name: str, module: nn.Module) -> UsageError:
    return UsageError(
        f"expected this rank's share of {name!r} in {original_class(module).__name__}, found "
        "another tensor in its place, as by torch.func.functional_call(), or in a copy that was "
        "made inside of gathered(): ranks compute together with shares of parameters. Copy the "
        "model outside of gathered(), and write other values into the parameters, or set tp: 1"
    )


def attach(module: nn.Module, behavior: Behavior, **members: Any) -> None:
    """Let a module, whose parameters are cut by somebody else, compute by a behavior.

    Its class gets further members, such as properties that hide attributes.

    Raises:
        UsageError: the module has a behavior already.
    """
    if behavior_of(module) is not None:
        raise UsageError(
            f"expected a module that is not divided yet, found {module!r} with "
            f"{behavior_of(module)}; detach() first"
        )
    original: Any = type(module)
    module.__class__ = _made(original, tuple(members.items()))
    module.__dict__[_KEY] = behavior


@functools.lru_cache(maxsize=256)
def _made(original: type[nn.Module], members: tuple[tuple[str, Any], ...]) -> type[nn.Module]:
    """Return the class of modules with a behavior, shared so that blocks remain alike."""
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (Parallel, original)
    return type(
        original.__name__, bases, {**names, "_drivetrain_original": original, **dict(members)}
    )


def detach(module: nn.Module) -> None:
    """Give a module its own forward back; its parameters stay as they are."""
    if isinstance(module, Parallel):
        restored: Any = module
        restored.__class__ = module._drivetrain_original
        module.__dict__.pop(_SHARED, None)
        del module.__dict__[_KEY]


def exchange(module: nn.Module, behavior: Behavior) -> None:
    """Replace the behavior of a module by another."""
    module.__dict__[_KEY] = behavior


def surround(module: nn.Module, make: Callable[[Behavior], Surrounding]) -> None:
    """Surround a module's behavior, or its own forward, with another; ``release`` undoes this."""
    inner = behavior_of(module)
    if inner is None:
        attach(module, make(Own()))
    else:
        module.__dict__[_KEY] = make(inner)


def release(module: nn.Module) -> None:
    """Undo the last ``surround`` of a module."""
    behavior = behavior_of(module)
    if not isinstance(behavior, Surrounding):
        return
    if isinstance(behavior.inner, Own):
        detach(module)
    else:
        module.__dict__[_KEY] = behavior.inner


def behavior_of(module: nn.Module) -> Behavior | None:
    """Return the behavior that was attached to a module, or None."""
    return module.__dict__.get(_KEY)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before anything was attached."""
    return module._drivetrain_original if isinstance(module, Parallel) else type(module)


logger = get_logger(__name__)

_COMPILED_CALL = "_compiled_call_impl"


class Uncompiled:
    """Lets compiled modules run as they are written, until ``undo``."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Callable[..., Any]]] = []

    def set(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module] | None = None,
        reason: str = "because ranks share its layers",
    ) -> None:
        """Begin; a model of which nothing is compiled stays as it is.

        Args:
            model: the user's.
            modules: those to run as written; None for all.
            reason: for the user.
        """
        for module in model.modules() if modules is None else modules:
            inner = uncompiled(module)
            if inner is not module:  # the wrapper that torch.compile(module) returned
                self._put(module, "forward", inner)
            if module.__dict__.get(_COMPILED_CALL) is not None:  # module.compile()
                self._put(module, _COMPILED_CALL, None)
        if self._before:
            logger.announce(
                f"torch.compile: {type(uncompiled(model)).__name__} runs uncompiled, {reason}"
            )

    def undo(self) -> None:
        """End; modules are compiled again."""
        for members, name, value in self._before:
            members[name] = value
        self._before = []

    def _put(self, module: nn.Module, name: str, value: Callable[..., Any] | None) -> None:
        members = module.__dict__
        self._before.append((members, name, members[name]))
        members[name] = value
