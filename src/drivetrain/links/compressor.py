"""The contract of methods for slow links."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, Handle, Parts
from drivetrain.collectives.stretch import ParameterSpan, StretchParts
from drivetrain.runtime.mesh import Axis

MethodConfigT = TypeVar("MethodConfigT")


class Honesty(StrEnum):
    """How far training under a method may be from exact training, the nearest class first."""

    EXACT = "exact"
    """The same sums, up to their order."""
    ROUNDING = "rounding"
    """Each number is rounded, as a dtype of lower precision rounds it; sums are of fp32."""
    THEORY = "theory"
    """A trajectory of its own, with a proof of convergence at the rate of exact training."""
    EMPIRICAL = "empirical"
    """A trajectory of its own, which experiments found as good; nobody has proved it."""

    def within(self, allowed: "Honesty") -> bool:
        """Whether a user who allows a class allows this one."""
        order = list(Honesty)
        return order.index(self) <= order.index(allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoMethodOptions:
    """The options of a method without options."""


class Kept(NamedTuple):
    """The errors of some of a parameter's elements that earlier sums have kept back on a rank.

    Attributes:
        span: the elements.
        errors: fp32, 1-D, no copy; the next sum adds it.
        without: the one rank along the axis between hosts that keeps none of these; None: all do.
    """

    span: ParameterSpan
    errors: Tensor
    without: int | None = None


class FarReduction(ABC):
    """The sum over hosts of one set of gradients, time and again.

    Every rank of the axis between hosts starts the same reductions in the same order.
    """

    @abstractmethod
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        """Start to put the sums over hosts into this rank's tensors, or into all of them.

        Args:
            parts: for each rank of the axis, its tensors, as the stretches describe them.
            first: called once, before the tensors are read; maybe in another thread.
            label: names the reduction in errors.
        """

    def feedback(self) -> Iterator[Kept]:
        """Yield the errors that earlier sums have kept back on this rank. By default none are."""
        return iter(())

    def factors(self) -> Iterator[tuple[ParameterSpan, Tensor]]:
        """Yield further tensors for the next sum, no copies: equal on all hosts, of any shape."""
        return iter(())


class FarGather(ABC):
    """The gather over hosts of one set of parameters, time and again."""

    @abstractmethod
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        """Start to fill all tensors, this rank's too: every host gets the same values.

        Args:
            parts: for each rank of the axis, its tensors.
            first: called once, before this rank's tensors are read; maybe in another thread.
            label: names the gather in errors.
        """


class Compressor(ABC, Generic[MethodConfigT]):
    """A method with its options; its reductions keep state from step to step.

    Attributes:
        summary: a sentence for help pages.
        honesty: how far training may be from exact training.
        gradients: whether it can sum gradients.
        parameters: whether it can gather values of parameters.
        updates: whether it can gather updates of parameters.
        keeps_feedback: whether an error of one step is added to the next; options may decide it.
        sparse: whether most numbers are not sent at all, but wait among the errors for later sums.
        Config: a frozen dataclass whose fields are declared with ``option()``.
    """

    summary: ClassVar[str]
    honesty: ClassVar[Honesty]
    gradients: ClassVar[bool] = True
    parameters: ClassVar[bool] = False
    updates: ClassVar[bool] = False
    keeps_feedback: bool = False
    sparse: ClassVar[bool] = False
    Config: ClassVar[type] = NoMethodOptions

    def __init__(self, config: MethodConfigT) -> None:
        self.config = config

    def honesty_of(self, use: str) -> Honesty:
        """Return how far training may be from exact training, for one use of these options.

        Args:
            use: ``gradients``, ``parameters`` (their values) or ``updates`` (of parameters).
        """
        return self.honesty

    def get_ready(self, device: torch.device) -> None:
        """Prepare for tensors of a device, once in a process; by default nothing is needed.

        Called in ``prepare()`` on ranks of several hosts.
        """

    @abstractmethod
    def approximates(self, stretches: StretchParts) -> bool:
        """Return whether any element is approximated; otherwise the sum is taken as ever."""

    @abstractmethod
    def reduction(
        self, far: Communicator, stretches: StretchParts, *, everywhere: bool
    ) -> FarReduction:
        """Return a reduction over hosts.

        Args:
            far: the ranks at one place of each host.
            stretches: for each of them, the tensors whose sum it gets.
            everywhere: whether all of them get all sums.
        """

    @abstractmethod
    def sent(
        self, far: Axis, stretches: StretchParts, *, everywhere: bool
    ) -> Counter[tuple[str, str]]:
        """Return the bytes that a rank sends in one reduction, by (axis, operation)."""

    @abstractmethod
    def held(self, far: Axis, stretches: StretchParts, *, everywhere: bool) -> int:
        """Return the bytes of errors and factors that a rank keeps between two reductions."""

    @abstractmethod
    def rehearse(self, matrix: Tensor) -> None:
        """Do the arithmetic of one sum of a matrix, without messages, to be timed.

        Args:
            matrix: fp32, 2-D; may be changed.
        """

    def gathering(self, far: Communicator, stretches: StretchParts, *, updates: bool) -> FarGather:
        """Return a gather of parameters; asked only of a method with ``parameters`` or ``updates``.

        Args:
            far: the ranks at one place of each host.
            stretches: for each of them, the tensors that it holds.
            updates: whether all ranks hold the values of the gather before.
        """
        raise TypeError(f"{type(self).__name__} declares that it gathers no parameters")

    def sent_gathering(self, far: Axis, stretches: StretchParts) -> Counter[tuple[str, str]]:
        """Return the bytes that a rank sends in one gather, of values or of updates."""
        raise TypeError(f"{type(self).__name__} declares that it gathers no parameters")
