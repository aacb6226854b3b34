"""Steps shards whose states lie in host memory, on a thread of its own."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain_offload.buffers import aligned_empty
from drivetrain_offload.rules import Rule
from drivetrain_offload.stepping import MASTER, Block, Shard, Stepper, Then, Work
from drivetrain_offload.threads import computing_pool
from drivetrain_offload.tiles import Tiler

ALIGNMENT = 64
"""Bytes; a line of the cache, so that no two shards share one."""


class HostStepper(Stepper):
    """Keeps states in host memory; the pages of states are taken by the first step.

    One thread takes the steps in their order and computes, together with those of the tiler. It
    ends with the stepper: ``close`` waits for steps that were submitted.

    Args:
        rule: how the optimizer updates.
        page_locked: whether states are in page-locked memory.
        threads: that compute; None means as many as torch uses in the calling thread.
    """

    def __init__(self, rule: Rule, *, page_locked: bool, threads: int | None = None) -> None:
        super().__init__(rule, ALIGNMENT)
        self._page_locked = page_locked
        self._tiler = Tiler(threads)
        self._thread = computing_pool(1, "drivetrain-step")
        self._tensors: dict[str, list[dict[str, Tensor]]] = {}

    @override
    def _take_room(self, block: Block) -> None:
        whole = {name: self._memory(nbytes) for name, nbytes in block.nbytes.items()}
        whole[MASTER].zero_()
        self._tensors[block.name] = [
            {name: shard.of(whole[name]) for name in block.names(shard)} for shard in block.shards
        ]

    @override
    def _start(self, block: Block, works: Sequence[Work], then: Then) -> "Future[None]":
        return self._thread.submit(self._run, block, works, then)

    def _run(self, block: Block, works: Sequence[Work], then: Then) -> None:
        tensors = self._tensors[block.name]
        with torch.no_grad():
            self._tiler.update_all(
                [(work.step, work.piece(tensors[work.shard.index], slice(None))) for work in works]
            )
        if then is not None:
            then()

    @override
    def _fetch(self, block: Block, shard: Shard, name: str) -> Tensor:
        return self._tensors[block.name][shard.index][name]

    @override
    def _keep(self, block: Block, shard: Shard, name: str, values: Tensor) -> None:
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
