"""One recorded operation: the operator, its arguments, and the state of the random generator.

Tensors are written down as places: a storage and the geometry in it. So views need no recording,
and an operation can be repeated on any memory that stands for the storages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError

Memory = dict[int, torch.UntypedStorage]
"""Real storages by the identity of the meta storage that they stand for."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """Where a tensor without values lies.

    Attributes:
        storage: identity of its storage on the meta device.
        offset: elements before its first one.
        conjugate: whether it is a lazy conjugate.
        negative: whether it is a lazy negative.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "StorageView":
        """Describe a tensor of the meta device."""
        return cls(
            storage_key(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def tensor(self, memory: Memory) -> Tensor:
        """Return the tensor that lies here in real memory."""
        storage = memory[self.storage]
        plain = torch.empty(0, dtype=self.dtype, device=storage.device)
        plain.set_(storage, self.offset, self.shape, self.strides)
        plain = plain.conj() if self.conjugate else plain
        return torch._neg_view(plain) if self.negative else plain


class Captured:
    """A tensor made outside, with its values at the time of reading.

    Memory that others may write unseen, such as an array's, is copied at once; other memory is
    copied before an operation inside the recording changes the values.
    """

    __slots__ = ("_copied", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._copied = tensor.is_inference() or not tensor.untyped_storage().resizable()
        # Not detach(): below autograd that would not share the version.
        self._tensor = tensor.clone() if self._copied else tensor
        self._version = 0 if self._copied else tensor._version

    def keep(self) -> None:
        """Copy the values, since they are about to change."""
        if not self._copied:
            self._tensor, self._copied = self._tensor.clone(), True

    @property
    def tensor(self) -> Tensor:
        """The tensor with the values that were read.

        Raises:
            UsageError: they were changed since.
        """
        if not self._copied and self._tensor._version != self._version:
            raise UsageError(
                f"expected a tensor of shape {tuple(self._tensor.shape)} that was read inside of "
                "building() to keep its values until prepare(), found that it was changed in "
                "place; pass a clone() of it to the model"
            )
        return self._tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """The state of a generator before an operation drew from it.

    Attributes:
        device: of the generator.
        state: as of ``torch.Generator.get_state``.
        explicit: whether the operation was given the generator, or took the device's own.
    """

    device: torch.device
    state: Tensor
    explicit: bool


@dataclass(slots=True, eq=False)
class Operation:
    """One call of an operator whose results or changes matter.

    Attributes:
        function: the operator.
        args: its arguments; a ``StorageView``, ``Captured`` or ``Draw`` stands for a tensor or a
            generator.
        kwargs: the same.
        outputs: where its new results lie, in order; None for results that are no new tensors.
        reads: storages that the arguments lie in.
        draw: the generator's state if the operator is random.
        dtype: the default dtype at the call.
        overwrites: the storage of which it sets every byte without reading it, or None.
    """

    function: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[StorageView | None, ...]
    reads: frozenset[int]
    draw: Draw | None
    dtype: torch.dtype
    overwrites: int | None

    def run(self, memory: Memory) -> None:
        """Repeat it on real memory, which also gets the storages of its new results."""

        def real(value: Any) -> Any:
            if isinstance(value, StorageView):
                return value.tensor(memory)
            if isinstance(value, Captured):
                return value.tensor
            if isinstance(value, Draw):
                return torch.Generator(value.device).set_state(value.state)
            return value

        with _as_recorded(self.draw, self.dtype):
            results = self.function(*tree_map(real, self.args), **tree_map(real, self.kwargs))
        for place, result in zip(self.outputs, tree_leaves(results), strict=False):
            if place is not None:
                memory[place.storage] = _laid_out(result, place).untyped_storage()

    def touched(self) -> frozenset[int]:
        """Return the storages of its arguments and its new results."""
        return self.reads | {place.storage for place in self.outputs if place is not None}


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; it lasts as long as the storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations on a device take by themselves."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


@contextmanager
def _as_recorded(draw: Draw | None, dtype: torch.dtype) -> Iterator[None]:
    """Context with the generator's state and default dtype of the recording."""
    before = torch.get_default_dtype()
    generator = None if draw is None or draw.explicit else default_generator(draw.device)
    state = None if generator is None else generator.get_state()
    torch.set_default_dtype(dtype)
    try:
        if generator is not None and draw is not None:
            generator.set_state(draw.state)
        yield
    finally:
        torch.set_default_dtype(before)
        if generator is not None and state is not None:
            generator.set_state(state)


def _laid_out(result: Tensor, place: StorageView) -> Tensor:
    """Return a result as its place says; some operators lay real ones out in another way."""
    found = tuple(result.shape), result.stride(), result.storage_offset()
    if found == (place.shape, place.strides, place.offset):
        return result
    if not result.numel():
        return result
    extents = zip(place.shape, place.strides, strict=True)
    size = place.offset + 1 + sum((extent - 1) * stride for extent, stride in extents)
    whole = torch.empty(size, dtype=place.dtype, device=result.device)
    return whole.as_strided(place.shape, place.strides, place.offset).copy_(result)
