"""Rank 0 reads for everybody: each global step travels as one header and one block of bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.digests import meet_everyone
from drivetrain.data.division import OrderDivision
from drivetrain.data.steps import BatchSource, GlobalStep, Start
from drivetrain.errors import CollectiveError
from drivetrain.nested import recursively_apply
from drivetrain.runtime.world import World


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    """Stands in a batch for a tensor: where its bytes are in the block."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class _Block:
    """The bytes of many tensors, one after the other."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._size = 0

    def put(self, tensor: Tensor) -> _PackedTensor:
        """Append a tensor; returns its place in the block."""
        slot = _PackedTensor(self._size, tuple(tensor.shape), tensor.dtype)
        self._parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        self._size += slot.nbytes
        return slot

    def payload(self) -> Tensor:
        """Return all bytes, (size,) uint8."""
        return (
            torch.cat(self._parts)
            if self._parts
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )


@dataclass(frozen=True, slots=True)
class _Header:
    """The message before the block: a step without its tensors, or the end, or a failure."""

    step: GlobalStep | None
    nbytes: int = 0
    failure: str = ""


class DispatchSource:
    """Gives every rank its share of the data that rank 0 reads; the others touch no data.

    Args:
        source: reads the shares of all ranks; iterated on rank 0 only.
        world: the ranks, all of which must iterate together.
        share: index of this rank's share; ranks of one model-parallel cell have the same.
        on_device: leave received batches on the device of the group, instead of the CPU.

    Attributes:
        is_dispatched: True.
    """

    is_dispatched = True

    def __init__(self, source: BatchSource, world: World, share: int, *, on_device: bool) -> None:
        self._source = source
        self._world = world
        self._share = share
        self._on_device = on_device

    def __len__(self) -> int:
        return len(self._source)

    @property
    def division(self) -> OrderDivision:
        """How the order is divided."""
        return self._source.division

    @division.setter
    def division(self, division: OrderDivision) -> None:
        self._source.division = division

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of an epoch's order; only rank 0's counts."""
        return self._source.draw_seed(seed, epoch) if self._world.is_main else seed + epoch

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch."""
        return self._source.batches(rank, seed, epoch)

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read and send on rank 0, receive elsewhere; one rank's share per step.

        Raises:
            CollectiveError: on the other ranks, when reading failed on rank 0; on all, when ranks
                do not read together.
        """
        steps = self._send(start) if self._world.is_main else self._receive(start)
        for step in steps:
            yield replace(step, shares=(step.shares[self._share],))

    def _send(self, start: Start) -> Iterator[GlobalStep]:
        steps = self._source.steps(start)
        final, here = False, start
        while not final:
            failed: Exception | None = None
            try:
                step = next(steps, None)
                header, payload = _packed(step)
            except Exception as error:  # reading or collating failed: the others wait for a header
                failed, header = error, _failure(error)
            self._meet(start, here)
            try:
                self._broadcast_header(header)
            except Exception as error:  # pickling failed
                failed = error
                self._broadcast_header(_failure(error))
            if failed is not None:
                raise failed
            if len(payload):
                dist.broadcast(payload.to(self._device), src=0)
            final = step is None or step.final
            if step is not None:
                here = step.start
                yield step
        next(steps, None)  # lets the source see its end

    def _receive(self, start: Start) -> Iterator[GlobalStep]:
        final, here = False, start
        while not final:
            self._meet(start, here)
            header = self._broadcast_header(None)
            if header.failure:
                raise CollectiveError(
                    f"expected a batch from rank 0, found that reading failed there: "
                    f"{header.failure}; see the traceback of rank 0"
                )
            if header.step is None:
                return
            payload = torch.empty(header.nbytes, dtype=torch.uint8, device=self._device)
            if header.nbytes:
                dist.broadcast(payload, src=0)
            final, here = header.step.final, header.step.start
            yield self._unpacked(header.step, payload if self._on_device else payload.cpu())

    def _meet(self, start: Start, here: Start) -> None:
        """Let no rank take a batch of another pass, which one rank alone has begun."""
        beside = ", beside another pass" if start.aside else ""
        meet_everyone(f"reading of batch {here.position} of epoch {here.epoch}{beside} by rank 0")

    def _unpacked(self, step: GlobalStep, payload: Tensor) -> GlobalStep:
        shares = list(step.shares)
        mine = shares[self._share]
        if mine is not None:
            shares[self._share] = mine._replace(batch=_unpack(mine.batch, payload))
        return replace(step, shares=tuple(shares))

    def _broadcast_header(self, header: _Header | None) -> _Header:
        held: list[Any] = [header]
        dist.broadcast_object_list(held, src=0)
        received: _Header = held[0]
        return received

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if "gloo" in self._world.backend else self._world.device


def _failure(error: Exception) -> _Header:
    return _Header(None, failure=f"{type(error).__name__}: {error}")


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose bytes can travel; others travel in the header."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def _packed(step: GlobalStep | None) -> tuple[_Header, Tensor]:
    """Return the header and the block of bytes of a step."""
    block = _Block()
    if step is None:
        return _Header(None), block.payload()
    shares = tuple(
        share
        and share._replace(batch=recursively_apply(block.put, share.batch, test_type=_is_plain))
        for share in step.shares
    )
    start = replace(step.start, dataset_state=None)  # rank 0 keeps it
    payload = block.payload()
    return _Header(replace(step, shares=shares, start=start), nbytes=len(payload)), payload


def _unpack(batch: Any, payload: Tensor) -> Any:
    """Return the batch with tensors for slots."""

    def take(slot: _PackedTensor) -> Tensor:
        # Cloned: a view would keep everybody's bytes alive and may start at an odd address.
        part = payload[slot.offset : slot.offset + slot.nbytes].clone()
        return part.view(slot.dtype).reshape(slot.shape)

    return recursively_apply(take, batch, test_type=_is_slot)


def _is_slot(value: Any) -> bool:
    return isinstance(value, _PackedTensor)
