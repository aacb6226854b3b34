"""Bytes: a strategy's promise of the bytes it holds and sends, and the ledger of bytes sent."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from drivetrain.shards import outer_dim


@dataclass(slots=True)
class Entry:
    """Sums over the collectives of one kind.

    Attributes:
        calls: how many collectives were submitted.
        bytes: payload bytes that this rank sent.
        seconds: time between start and end of the transfers, summed; overlapped time included.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Page(NamedTuple):
    """The place in training to which collectives belong: equal on all ranks at each collective.

    Attributes:
        steps: optimizer steps that this rank has taken.
        backwards: backwards that this rank has begun.
        rates: learning rates of the groups of its last step.
        loads: state dicts that it has loaded.
    """

    steps: int = 0
    backwards: int = 0
    rates: tuple[float, ...] = ()
    loads: int = 0


@dataclass(eq=False, repr=False)
class Traffic:
    """A ledger of collectives by (axis, operation); safe to write from several threads.

    Attributes:
        page: where training is.
        waited_s: seconds that threads of the program have waited for collectives, on all axes.
    """

    page: Page = Page()
    waited_s: float = 0.0
    _entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    _waits: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_backward(self) -> None:
        """Turn the page: a backward begins."""
        self.page = self.page._replace(backwards=self.page.backwards + 1)

    def begin_step(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Write down the learning rates of the groups that an optimizer is about to step."""
        rates = (group.get("lr") for group in groups)
        # Those in tensors may be on a device, and reading them would wait for it.
        known = tuple(float(rate) for rate in rates if isinstance(rate, float | int))
        self.page = self.page._replace(rates=known)

    def load(self) -> None:
        """Turn the page: a model, or an optimizer, loads a state dict."""
        self.page = self.page._replace(loads=self.page.loads + 1)

    @contextmanager
    def loads_for_all(self) -> Iterator[None]:
        """Context in which loads do not count: what one rank loads comes to all."""
        before = self.page.loads
        yield
        self.page = self.page._replace(loads=before)

    def end_step(self) -> None:
        """Turn the page: an optimizer has stepped, or left out a step."""
        self.page = self.page._replace(steps=self.page.steps + 1)

    def add(self, axis: str, operation: str, nbytes: int) -> None:
        """Record a collective at its submission: the payload bytes that this rank sends.

        At submission, so that the sums at one place of a program are the same in every run,
        whatever is still on its way.
        """
        with self._lock:
            entry = self._entries.setdefault((axis, operation), Entry())
            entry.calls += 1
            entry.bytes += nbytes

    def took(self, axis: str, operation: str, seconds: float) -> None:
        """Write down how long one collective took, when it is over."""
        with self._lock:
            self._entries.setdefault((axis, operation), Entry()).seconds += seconds

    def waited(self, axis: str, seconds: float) -> None:
        """Record how long the program stood still for a collective of an axis.

        A collective that is over when the program asks for its result costs no waiting. Where a
        device's stream waits instead of the program, the time is not seen here.
        """
        with self._lock:
            self._waits[axis] = self._waits.get(axis, 0.0) + seconds
            self.waited_s += seconds

    def waits(self) -> dict[str, float]:
        """Return the seconds waited so far by axis."""
        with self._lock:
            return dict(self._waits)

    def entries(self) -> Mapping[tuple[str, str], Entry]:
        """Return a copy of the sums so far."""
        with self._lock:
            return {
                key: Entry(entry.calls, entry.bytes, entry.seconds)
                for key, entry in self._entries.items()
            }

    def sent(self) -> dict[tuple[str, str], int]:
        """Return the bytes sent so far by (axis, operation), without the zeros."""
        with self._lock:
            return {key: entry.bytes for key, entry in self._entries.items() if entry.bytes}

    def total(self) -> int:
        """Return all bytes sent so far."""
        return sum(entry.bytes for entry in self.entries().values())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._waits.clear()
            self.waited_s = 0.0

    def __repr__(self) -> str:
        entries = sorted(self.entries().items())
        if not entries:
            return "Traffic: nothing sent yet"
        waits = self.waits()
        rows = [("axis", "operation", "calls", "bytes sent", "seconds")]
        rows += [
            (axis, name, f"{each.calls:,}", f"{each.bytes:,}", f"{each.seconds:.3f}")
            for (axis, name), each in entries
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"waited {seconds:.3f} s on axis {axis}" for axis, seconds in waits.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter or buffer as cost estimates see it.

    Attributes:
        name: in the user's model.
        shape: the global shape.
        dtype: as the user gave it.
        trainable: whether it requires gradients.
        outer_dim: the dim whose slices lie one after the other in memory: 0 unless transposed. Dims
            of size 1 have one slice only and do not count.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    outer_dim: int = 0

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorSpec":
        """Describe a tensor, which may live on the meta device."""
        shape = tuple(tensor.shape)
        return cls(name, shape, tensor.dtype, tensor.requires_grad, outer_dim(tensor))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a model and its optimizer that decide the cost of a strategy.

    Attributes:
        parameters: distinct parameters, tied ones once, in registration order.
        buffers: distinct buffers.
        states: parameter-shaped tensors that the optimizer keeps for each trainable parameter:
            2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
        module: the model itself, for a strategy whose cost depends on how the model computes; not
            changed. None where only sizes are known: such a strategy then estimates.
        inputs: of one forward on one data-parallel rank, positional and by name. None: unknown, and
            activations that a strategy sends are no part of its cost.
    """

    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...] = ()
    states: int = 2
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = field(
        default=None, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        states: int = 2,
        inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> "ModelSpec":
        """Describe a model as the user has it, before ``prepare``.

        Args:
            model: its parameters may live on the meta device.
            states: see the attributes.
            inputs: see the attributes.
        """
        return cls(
            tuple(TensorSpec.of(name, parameter) for name, parameter in model.named_parameters()),
            tuple(
                TensorSpec(name, tuple(b.shape), b.dtype, False)
                for name, b in model.named_buffers()
            ),
            states,
            model,
            inputs,
        )


def states_of(optimizer: Optimizer, group: Mapping[str, object]) -> int:
    """Return how many tensors like itself an optimizer keeps for a parameter of a group."""
    if isinstance(optimizer, SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, Adagrad):
        return 1
    if isinstance(optimizer, Adam):  # and AdamW
        return 3 if group["amsgrad"] else 2
    return 2  # unknown: most keep two moments


HOST, DISK = " in host memory", " on disk"
"""Ends of the names of kinds that do not lie on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A strategy's promise: a conformance test holds it to these numbers.

    Attributes:
        held: bytes kept on one rank between steps, by kind: ``parameters``, ``gradients``,
            ``optimizer``, ``buffers``; the ends of names say what does not lie on the device.
        sent: bytes that rank 0 sends in one optimizer step, by (axis, operation).
        uncounted: messages of unknown size by axis, such as ``activations`` when ``ModelSpec`` has
            no inputs.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[tuple[str, str], int] = field(default_factory=dict)
    uncounted: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_device(self) -> int:
        """Bytes kept on the device."""
        return sum(n for kind, n in self.held.items() if not kind.endswith((HOST, DISK)))

    @property
    def in_host_memory(self) -> int:
        """Bytes kept in host memory beside the device."""
        return sum(n for kind, n in self.held.items() if kind.endswith(HOST))

    @property
    def on_disk(self) -> int:
        """Bytes kept on a disk."""
        return sum(n for kind, n in self.held.items() if kind.endswith(DISK))

    @property
    def total_held(self) -> int:
        """Bytes kept on one rank."""
        return sum(self.held.values())

    @property
    def total_sent(self) -> int:
        """Bytes sent by one rank in one optimizer step, as far as they are counted."""
        return sum(self.sent.values())
