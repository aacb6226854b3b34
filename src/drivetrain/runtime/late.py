"""Numbers that a device is still computing: copied without a wait, read when they are there."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class LateNumbers:
    """Numbers of the host, and scalar tensors of any device, by name.

    Args:
        values: by name, or another key; each tensor has one element. Tensors of an accelerator are
            copied in the order of its stream, to memory where the host finds them later.
    """

    def __init__(self, values: Mapping[Any, float | Tensor]) -> None:
        self._numbers: dict[Any, float] = {}
        self._names: Sequence[Any] = ()
        self._event: torch.Event | None = None
        waiting: dict[Any, Tensor] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                self._numbers[name] = float(value)
            elif value.device.type == "cpu":
                self._numbers[name] = float(value.detach())
            else:
                waiting[name] = value.detach().reshape(()).to(torch.float32)
        if waiting:
            self._names = tuple(waiting)
            stacked = torch.stack(list(waiting.values()))
            self._copy = torch.empty(len(waiting), dtype=torch.float32, pin_memory=True)
            self._copy.copy_(stacked, non_blocking=True)
            self._event = torch.Event(stacked.device)
            self._event.record(torch.accelerator.current_stream(stacked.device))

    def ready(self) -> bool:
        """Whether ``read`` would return at once."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Mapping[Any, float]:
        """Return all numbers by name; waits for those of a device."""
        if self._event is not None:
            self._event.synchronize()
            self._numbers.update(zip(self._names, self._copy.tolist(), strict=True))
            self._event = None
        return self._numbers
