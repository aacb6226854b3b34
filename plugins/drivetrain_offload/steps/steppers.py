"""The two steppers: ZeRO-Offload's CPU optimizer (Ren et al. 2021, section 5.1), and one on a disk.

States in host memory are updated in place, by a thread of the stepper. States on a disk pass
through a pipeline, tile by tile, as in ZeRO-Infinity (Rajbhandari et al. 2021, section 5).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain_offload.resources.buffers import ALIGNMENT, aligned_empty, padded
from drivetrain_offload.resources.threads import computing_pool
from drivetrain_offload.steps.pipeline import SETS, PipelinedStep, TilePipeline, TileStore, cut
from drivetrain_offload.steps.rules import Rule
from drivetrain_offload.steps.stepping import (
    MASTER,
    ShardBlock,
    ShardWork,
    SteppedShard,
    Stepper,
    Then,
)
from drivetrain_offload.steps.tiles import Tiler

CACHE_LINE = 64
"""Bytes; shards in memory begin at multiples, so that no two of them share a line of the cache."""

TILE_BYTES = 8 << 20
"""Of each state and of masters in a tile on its way from and to a disk."""

WORKING_BYTES = SETS * 3 * TILE_BYTES
"""Sets of buffers for the masters and two states of Adam."""


class HostStepper(Stepper):
    """Keeps states in host memory; the first step takes the pages of the states.

    One thread takes the steps in their order and computes, together with the tiler's threads. It
    ends with the stepper: ``close`` waits for submitted steps.

    Args:
        rule: how the optimizer updates.
        page_locked: whether states are in page-locked memory.
        threads: how many compute; None means as many as torch uses in the calling thread.
    """

    def __init__(self, rule: Rule, *, page_locked: bool, threads: int | None = None) -> None:
        super().__init__(rule, CACHE_LINE)
        self._page_locked = page_locked
        self._tiler = Tiler(threads)
        self._thread = computing_pool(1, "drivetrain-step")
        self._tensors: dict[str, list[dict[str, Tensor]]] = {}

    @override
    def _take_room(self, block: ShardBlock) -> None:
        whole = {name: self._memory(nbytes) for name, nbytes in block.nbytes.items()}
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

    def _memory(self, nbytes: int) -> Tensor:
        if self._page_locked:
            return aligned_empty(nbytes, torch.uint8, page_locked=True)
        with torch.inference_mode(False):  # else it could be written in inference mode alone
            return torch.empty(nbytes, dtype=torch.uint8)


class StateStore(TileStore, Protocol):
    """A store on a disk, as its stepper sees it."""

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the room of tensors, by key, whose values come later."""


class NvmeStepper(Stepper):
    """Keeps states, and masters if asked, in the file of a store.

    A step reads and writes them once: 12 bytes per parameter each way for AdamW with fp32 masters,
    8 bytes where masters stay in memory, and the padding of every shard to 4096 bytes. A step is
    over when memory holds its results; the writes go on.

    Args:
        rule: how the optimizer updates.
        store: the store whose file it is.
        prefix: of the stepper's keys there; no other keys begin so.
        request_bytes: of one request to the disk.
        threads: how many compute; None means as many as torch uses in the calling thread.
    """

    def __init__(
        self,
        rule: Rule,
        store: StateStore,
        prefix: str,
        request_bytes: int,
        threads: int | None = None,
    ) -> None:
        super().__init__(rule, ALIGNMENT)
        self._store = store
        self._prefix = prefix
        # A tile is whole requests; a request that is longer than a tile is cut to the tile.
        self._tile_bytes = TILE_BYTES // request_bytes * request_bytes or TILE_BYTES
        self._pipeline = TilePipeline(store, self._tile_bytes, threads)

    @override
    def _take_room(self, block: ShardBlock) -> None:
        room = {
            self._key(block, name): torch.empty(nbytes, dtype=torch.uint8, device="meta")
            for name, nbytes in block.nbytes.items()
        }
        self._store.reserve(room)
        self._pipeline.provide([name for name, nbytes in block.nbytes.items() if nbytes])

    @override
    def _start(self, block: ShardBlock, works: Sequence[ShardWork], then: Then) -> "Future[None]":
        states = {name: self._key(block, name) for name in sorted(block.states)}
        keys = {False: states, True: states | {MASTER: self._key(block, MASTER)}}
        step = PipelinedStep(keys, cut(works, self._tile_bytes), block.last, then)
        self._pipeline.submit(step)
        return step.future

    @override
    def _fetch(self, block: ShardBlock, shard: SteppedShard, name: str) -> Tensor:
        buffer = aligned_empty(padded(shard.nbytes), torch.uint8)
        stop = shard.offset + len(buffer)
        self._store.read_into(self._key(block, name), buffer, shard.offset, stop).wait()
        return buffer[: shard.nbytes].view(shard.spec.dtype)

    @override
    def _keep(self, block: ShardBlock, shard: SteppedShard, name: str, values: Tensor) -> None:
        buffer = aligned_empty(padded(shard.nbytes), torch.uint8)
        copy = buffer[: shard.nbytes].view(shard.spec.dtype)
        copy.copy_(values.detach().reshape(-1))
        stop = shard.offset + len(buffer)
        self._store.write_from(self._key(block, name), buffer, shard.offset, stop).wait()

    @override
    def _release(self) -> None:
        self._pipeline.close()

    def _key(self, block: ShardBlock, name: str) -> str:
        return f"{self._prefix}/{block.name}/{name}"
