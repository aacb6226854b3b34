"""The store ``cpu``: tensors in host memory (ZeRO-Offload, Ren et al. 2021, section 4).

Where there is an accelerator the memory is page-locked, so that copies go on beside computation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.config.option import option
from drivetrain_offload.resources.buffers import aligned_empty, can_page_lock
from drivetrain_offload.steps.rules import update_rule
from drivetrain_offload.steps.steppers import HostStepper
from drivetrain_offload.steps.tiles import TILE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    """Options of the store ``cpu``."""

    page_locked: bool = option(
        True,
        help="whether memory is page-locked where there is an accelerator, so that copies do not "
        "wait",
    )


class HostStore:
    """Keeps tensors in host memory, one allocation per tensor.

    A copy from an accelerator is asynchronous, in the order of the stream that is current in
    ``put``; ``fetch`` waits for the copies to its own key, ``flush`` for all of them.

    Args:
        config: the options.
    """

    Config = HostConfig
    in_memory: ClassVar[bool] = True
    working_bytes: ClassVar[int] = TILE_BYTES

    def __init__(self, config: HostConfig | None = None) -> None:
        config = config or HostConfig()
        self._page_locked = config.page_locked and can_page_lock()
        self._tensors: dict[str, Tensor] = {}
        self._copies: dict[str, torch.Event] = {}

    @property
    def device(self) -> torch.device:
        """The device of the tensors that ``fetch`` returns: the processor."""
        return torch.device("cpu")

    def stepper(self, optimizer: Optimizer) -> HostStepper | None:
        """Return a stepper of an optimizer's shards in host memory; the caller closes it.

        Returns:
            None for optimizers that only torch can step; see ``rules.update_rule``.
        """
        rule = update_rule(optimizer)
        return None if rule is None else HostStepper(rule, page_locked=self._page_locked)

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor under a key, in the memory that the key already has.

        A copy from an accelerator goes on after this returns: the tensor may be changed or freed in
        the order of the current stream, and ``fetch`` waits for the copy.
        """
        kept = self._tensors.get(key)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            self._await_copy(key)  # before the memory that it writes to goes
            kept = self._tensors[key] = self._empty_like(tensor)
        if tensor.device.type == "cpu":
            self._await_copy(key)  # else an older value could come after this one
            kept.copy_(tensor.detach())
        else:
            self._copy_from(tensor.detach(), kept, key)

    def fetch(self, key: str) -> Tensor:
        """Return the kept tensor itself; raises KeyError when it was never put.

        Asynchronous copies to an accelerator must be done before the key is put again from host
        memory, and before the last reference to the tensor goes.
        """
        self._await_copy(key)
        return self._tensors[key]

    def prefetch(self, keys: Iterable[str]) -> None:
        """Check that the keys are there: nothing has to move."""
        for key in keys:
            self._tensors[key]

    def flush(self) -> None:
        """Wait for copies from accelerators that are still under way."""
        for key in tuple(self._copies):
            self._await_copy(key)

    def close(self) -> None:
        """Drop every tensor."""
        self.flush()
        self._tensors.clear()

    def _empty_like(self, tensor: Tensor) -> Tensor:
        if not self._page_locked:
            with torch.inference_mode(False):  # else it could be written in inference mode alone
                return torch.empty(tensor.shape, dtype=tensor.dtype)
        return aligned_empty(tensor.numel(), tensor.dtype, page_locked=True).view(tensor.shape)

    def _copy_from(self, tensor: Tensor, kept: Tensor, key: str) -> None:
        stream = torch.accelerator.current_stream(tensor.device)
        earlier = self._copies.get(key)
        if earlier is not None:
            earlier.wait(stream)  # two streams may put one key: the later call's values stay
        kept.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device)
        event.record(stream)
        self._copies[key] = event

    def _await_copy(self, key: str) -> None:
        event = self._copies.pop(key, None)
        if event is not None:
            event.synchronize()
