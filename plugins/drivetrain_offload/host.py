"""The store ``cpu``: tensors in host memory, and their steps (ZeRO-Offload, Ren et al. 2021).

Section 4 of the paper puts optimizer state there; section 5.1 is the CPU optimizer, whose states
are updated in place by a thread of the stepper. Where there is an accelerator the memory is
page-locked, so that copies go on beside computation.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from drivetrain_offload.options import HostConfig
from drivetrain_offload.stepping import (
    MASTER,
    ShardBlock,
    ShardWork,
    SteppedShard,
    Stepper,
    Then,
)
from drivetrain_offload.tiles import (
    TILE_BYTES,
    Rule,
    Tiler,
    aligned_empty,
    can_page_lock,
    computing_pool,
    update_rule,
)

CACHE_LINE = 64
"""Bytes; shards in memory begin at multiples, so that no two of them share a line of the cache."""


class HostStepper(Stepper):
    """Keeps states in host memory, page-locked if asked; the first step takes the pages.

    One thread takes the steps in their order and computes, together with the tiler's threads;
    ``close`` waits for submitted steps.
    """

    def __init__(self, rule: Rule, *, page_locked: bool) -> None:
        super().__init__(rule, CACHE_LINE)
        self._page_locked = page_locked
        self._tiler = Tiler()
        self._thread = computing_pool(1, "drivetrain-step")
        self._tensors: dict[str, list[dict[str, Tensor]]] = {}

    @override
    def _take_room(self, block: ShardBlock) -> None:
        whole = {
            name: _empty(nbytes, torch.uint8, page_locked=self._page_locked)
            for name, nbytes in block.nbytes.items()
        }
        whole[MASTER].zero_()
        self._tensors[block.name] = [
            {name: shard.of(whole[name]) for name in block.names(shard)} for shard in block.shards
        ]

    @override
    def _start(self, block: ShardBlock, works: Sequence[ShardWork], then: Then) -> "Future[None]":
        return self._thread.submit(self._run, block, works, then)

    def _run(self, block: ShardBlock, works: Sequence[ShardWork], then: Then) -> None:
        tensors = self._tensors[block.name]
        with torch.no_grad():
            self._tiler.update_all(
                [(work.step, work.piece(tensors[work.shard.index], slice(None))) for work in works]
            )
        if then is not None:
            then()

    @override
    def _fetch(self, block: ShardBlock, shard: SteppedShard, name: str) -> Tensor:
        return self._tensors[block.name][shard.index][name]

    @override
    def _keep(self, block: ShardBlock, shard: SteppedShard, name: str, values: Tensor) -> None:
        self._fetch(block, shard, name).copy_(values.detach().reshape(-1))

    @override
    def _release(self) -> None:
        self._thread.shutdown()
        self._tiler.close()
        self._tensors.clear()


class HostStore:
    """Keeps tensors in host memory, one allocation per tensor.

    A copy from an accelerator is asynchronous, in the order of the stream that is current in
    ``put``; ``fetch`` waits for the copies to its own key, ``flush`` for all of them.
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
            empty = _empty(tensor.numel(), tensor.dtype, page_locked=self._page_locked)
            kept = self._tensors[key] = empty.view(tensor.shape)
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


def _empty(numel: int, dtype: torch.dtype, *, page_locked: bool) -> Tensor:
    if page_locked:
        return aligned_empty(numel, dtype, page_locked=True)
    with torch.inference_mode(False):  # else it could be written in inference mode alone
        return torch.empty(numel, dtype=dtype)
