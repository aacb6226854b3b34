"""Steps shards whose states lie on a disk, tile by tile."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain_offload.buffers import ALIGNMENT, aligned_empty, padded
from drivetrain_offload.pipeline import SETS, Job, Pipeline, cut
from drivetrain_offload.rules import Rule
from drivetrain_offload.stepping import MASTER, Block, Shard, Stepper, Then, Work

if TYPE_CHECKING:
    from drivetrain_offload.nvme import NvmeStore

TILE_BYTES = 8 << 20
"""Of each state and of masters in a tile."""

WORKING_BYTES = SETS * 3 * TILE_BYTES
"""Sets of buffers for the masters and two states of Adam."""


class NvmeStepper(Stepper):
    """Keeps states, and masters if asked, in the file of a store.

    A step reads and writes them once: 12 bytes per parameter each way for AdamW with fp32 masters,
    8 where masters stay in memory, and what fills up the last 4096 bytes of every shard. Its end
    says that memory holds the results; the writes go on.

    Args:
        rule: how the optimizer updates.
        store: where the file is.
        prefix: of its keys there, which nobody else has.
        threads: that compute; None means as many as torch uses in the calling thread.
    """

    def __init__(
        self, rule: Rule, store: "NvmeStore", prefix: str, threads: int | None = None
    ) -> None:
        super().__init__(rule, ALIGNMENT)
        self._store = store
        self._prefix = prefix
        self._tile_bytes = _tile_bytes(store.request_bytes)
        self._pipeline = Pipeline(store, self._tile_bytes, threads)

    @override
    def _take_room(self, block: Block) -> None:
        room = {
            self._key(block, name): torch.empty(nbytes, dtype=torch.uint8, device="meta")
            for name, nbytes in block.nbytes.items()
        }
        self._store.reserve(room)
        self._pipeline.provide([name for name, nbytes in block.nbytes.items() if nbytes])

    @override
    def _start(self, block: Block, works: Sequence[Work], then: Then) -> "Future[None]":
        states = {name: self._key(block, name) for name in sorted(block.states)}
        keys = {False: states, True: states | {MASTER: self._key(block, MASTER)}}
        job = Job(keys, cut(works, self._tile_bytes), block.last, then)
        self._pipeline.submit(job)
        return job.future

    @override
    def _fetch(self, block: Block, shard: Shard, name: str) -> Tensor:
        buffer = aligned_empty(padded(shard.nbytes), torch.uint8)
        stop = shard.offset + len(buffer)
        self._store.read_into(self._key(block, name), buffer, shard.offset, stop).wait()
        return buffer[: shard.nbytes].view(shard.spec.dtype)

    @override
    def _keep(self, block: Block, shard: Shard, name: str, values: Tensor) -> None:
        buffer = aligned_empty(padded(shard.nbytes), torch.uint8)
        copy = buffer[: shard.nbytes].view(shard.spec.dtype)
        copy.copy_(values.detach().reshape(-1))
        stop = shard.offset + len(buffer)
        self._store.write_from(self._key(block, name), buffer, shard.offset, stop).wait()

    @override
    def _release(self) -> None:
        self._pipeline.close()

    def _key(self, block: Block, name: str) -> str:
        return f"{self._prefix}/{block.name}/{name}"


def _tile_bytes(request_bytes: int) -> int:
    """Return whole requests; a longer one is cut to the tile."""
    return TILE_BYTES // request_bytes * request_bytes or TILE_BYTES
