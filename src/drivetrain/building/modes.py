"""The two modes that hand a construction's operations, and its reads of values, to a recording."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from drivetrain.building.schema import mapped
from drivetrain.errors import UsageError

_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_APPEARANCE: dict[Callable[..., Any], Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda home: home,
    Tensor.is_meta.__get__: lambda home: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda home: home.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda home: home.type == "cuda",  # type: ignore[attr-defined]
}
"""What a tensor answers about where it lives: torch's initialisations do nothing on meta."""


class Recorder(Protocol):
    """What the modes need of a recording."""

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values can be made."""

    def home(self, tensor: Tensor) -> torch.device:
        """Return where a known tensor would ordinarily live."""

    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return real tensors."""

    def perform(
        self, function: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Do one operation."""


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands over every operation, below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do one operation."""
        # What the recording asks a tensor must not be answered by the other mode.
        with torch._C.DisableTorchFunction():
            return self._recorder.perform(func, args, kwargs or {})


class ValueMode(TorchFunctionMode):
    """Answers what needs no operation: where a tensor lives, and what lies in its memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _MAKERS:
            return func(*mapped(list(args), self._read_leaf), **kwargs)
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

    def _read(
        self,
        func: Callable[..., Any],
        tensor: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
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
