"""Sees the functions of torch that the code around a model's blocks calls, each at its place."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, Self

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from drivetrain.model.look import tensors_in
from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain_megatron.recording.crossing import CallPlace


class CodeWatcher(Protocol):
    """Decides about functions that are called around blocks."""

    def called(self, place: CallPlace, func: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Return the result of a function; it has not been called yet."""


class AroundBlocks(TorchFunctionMode):
    """Hands functions of torch to a watcher while it is entered, except inside of blocks."""

    def __init__(self, watcher: CodeWatcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._phase = 0
        self._calls: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self._is_inside = False
        self._depth = 0

    def __enter__(self) -> Self:
        """Begin to see functions."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self._depth = torch._C._len_torch_function_stack()
        return self

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Let the watcher call a function."""
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "function")
        given = tuple(tuple(tensor.shape) for tensor in tensors_in((args, kwargs)))
        place = CallPlace(self._phase, name, given, self._calls[name, given])
        self._calls[name, given] += 1
        return self._watcher.called(place, func, args, kwargs)

    def begin_phase(self, phase: int) -> None:
        """Say how many blocks have been called."""
        self._phase = phase
        self._calls.clear()

    @contextmanager
    def inside_block(self) -> Iterator[None]:
        """Context of a block's own forward, whose functions are not seen."""
        outer, self._is_inside = self._is_inside, True
        try:
            # A mode of the model's own may lie above this one.
            is_top = self._depth and torch._C._len_torch_function_stack() == self._depth
            with _pop_mode_temporarily() if is_top else nullcontext():
                yield
        finally:
            self._is_inside = outer
