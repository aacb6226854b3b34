"""The ways in which uses of tensors without values are noticed, during a construction and after."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from drivetrain.building.schema import Operator
from drivetrain.errors import UsageError
from drivetrain.parts.guard import Arguments, Function, Keywords

_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_APPEARANCE: dict[Callable[..., Any], Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda home: home,
    Tensor.is_meta.__get__: lambda home: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda home: home.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda home: home.type == "cuda",  # type: ignore[attr-defined]
}
"""A tensor's answers about its device: torch's initialisations do nothing on meta."""


class OperationRecorder(Protocol):
    """The part of a recording that the modes use."""

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values can be made."""

    def home(self, tensor: Tensor) -> torch.device:
        """Return where a known tensor would ordinarily live."""

    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return real tensors."""

    def perform(self, function: Operator, args: Arguments, kwargs: Keywords) -> Any:
        """Do one operation."""


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands over every operation, below autograd."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Do one operation."""
        # What the recording asks a tensor must not be answered by the other mode.
        with torch._C.DisableTorchFunction():
            return self._recorder.perform(func, args, kwargs or {})


class ValueMode(TorchFunctionMode):
    """Answers questions without an operation: the device of a tensor, and the values in memory."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _MAKERS:
            return func(*tree_map(self._read_leaf, tuple(args)), **kwargs)
        subject = args[0] if args else None
        if func is Tensor.__deepcopy__ and not self._recorder.knows(args[0]):
            with _disable_current_modes():  # it works on the storage
                return func(*args, **kwargs)
        if not isinstance(subject, Tensor) or not self._recorder.knows(subject):
            return func(*args, **kwargs)
        if func in _APPEARANCE:
            return _APPEARANCE[func](self._recorder.home(subject))
        if func in _READERS:
            return self._read(func, subject, args[1:], kwargs)
        if func is Tensor.data_ptr:
            raise UsageError(
                "expected tensors to be used through torch inside of building(), found "
                "data_ptr() of one that has no memory yet; ask for it after prepare()"
            )
        return func(*args, **kwargs)

    def _read(self, func: Function, tensor: Tensor, args: Arguments, kwargs: Keywords) -> Any:
        values = self._recorder.materialize([tensor])[0].requires_grad_(tensor.requires_grad)
        result = func(values, *args, **kwargs)
        if func is not Tensor.tolist:
            result.setflags(write=False)  # ordinarily writes would reach the tensor
        return result

    def _read_leaf(self, value: Any) -> Any:
        """Return an element of data: torch reads those of lists behind the modes' back."""
        if isinstance(value, Tensor) and self._recorder.knows(value):
            return self._recorder.materialize([value])[0]
        return value


class Versions:
    """The versions of all tensors of a construction at its end.

    torch counts changes in place per tensor. Changes through ``.data`` are not counted.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def note(self, belongs: Callable[[Tensor], bool]) -> None:
        """Note the versions of the tensors that are alive now.

        Args:
            belongs: whether a tensor is of the construction.
        """
        for item in gc.get_objects():
            # By type: isinstance would ask objects for __class__, and some of them warn.
            if issubclass(type(item), Tensor) and not item.is_inference() and belongs(item):
                self._noted[id(item)] = weakref.ref(item), item._version

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare tensors with their noted versions.

        Raises:
            UsageError: one was changed in place since.
        """
        for name, tensor in tensors.items():
            reference, version = self._noted.get(id(tensor), (None, 0))
            if reference is not None and reference() is tensor and tensor._version != version:
                raise UsageError(
                    f"expected {name!r} to be initialised inside of building(), found that it was "
                    "changed after the context ended and before prepare(), where it has no values; "
                    "do that inside, or after prepare() in gathered()"
                )
