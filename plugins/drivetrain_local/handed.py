"""The outer state that late workers take, in the store where the ranks of the run met.

Whoever took part in an exchange goes on training, and cannot serve a worker that comes later. So a
participant puts the result into the store whenever some worker was left out::

    newest            {"number": 8, "kept": [7]}    the latest result, and older ones still there
    8/0/3             bytes                         piece 3 of the tensors of rank 0 of a worker
    readers           1                             workers that are reading

A result is deleted when there is a newer one, and no worker that could be reading the old one.
"""

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import CollectiveError
from drivetrain_local.quorum import pause

PIECE_BYTES = 4 << 20
"""Bytes of one value: torch's store refuses values of more than 8 MiB."""


class HandedState:
    """The results of one order of exchanges, for workers that were left out.

    All ranks of a worker call each method, with the tensors that they hold.

    Args:
        store: the keys of this order, on all workers the same.
        ranks: of this worker; rank 0 speaks for it.
        timeout: how long a late worker waits for a result.
    """

    def __init__(self, store: Any, ranks: Communicator, timeout: timedelta) -> None:
        self._store = store
        self._ranks = ranks
        self._timeout = timeout

    def put(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Leave the result of an exchange. Only one worker at a time may do so."""
        packed = _packed(tensors)
        for key, start in self._pieces(number, packed.numel()):
            self._store.set(key, packed[start : start + PIECE_BYTES].numpy().tobytes())
        self._ranks.barrier()  # all ranks' pieces are there
        if self._ranks.rank == 0:
            self._store.set("dropped", json.dumps(self._renew(number)))
        self._ranks.barrier()
        for old in json.loads(self._store.get("dropped")):
            for key, _ in self._pieces(old, packed.numel()):
                self._store.delete_key(key)

    def _renew(self, number: int) -> list[int]:
        """Name the newest result; return older results without readers."""
        newest, kept = self._newest()
        old = [*kept, newest] if newest else []
        self._store.set("newest", json.dumps({"number": number, "kept": old}))
        # A worker first says that it reads, and then looks for the newest result. So a reader that
        # is not counted here will find this one.
        if self._store.add("readers", 0):
            return []
        self._store.set("newest", json.dumps({"number": number, "kept": []}))
        return old

    def take(self, number: int, tensors: Sequence[Tensor]) -> int:
        """Fill tensors with the newest result.

        Args:
            number: of the oldest exchange whose result will do.
            tensors: of the same shapes and dtypes as those of the other workers.

        Returns:
            The number of the exchange.

        Raises:
            CollectiveError: nobody has left such a result in time.
        """
        told = torch.zeros(1, dtype=torch.int64, device="cpu")
        if self._ranks.rank == 0:
            self._store.add("readers", 1)
            told.fill_(self._wait_for(number))
        self._ranks.broadcast(told, label="exchange that a late worker takes").wait()
        found = int(told)
        packed = torch.empty(sum(each.nbytes for each in tensors), dtype=torch.uint8)
        for key, start in self._pieces(found, packed.numel()):
            piece = torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.uint8)
            packed[start : start + piece.numel()] = piece
        values = packed.split_with_sizes([each.nbytes for each in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value.clone().view(tensor.dtype).view(tensor.shape))  # aligned
        self._ranks.barrier()
        if self._ranks.rank == 0:
            self._store.add("readers", -1)
        return found

    def _wait_for(self, number: int) -> int:
        start = time.monotonic()
        while (newest := self._newest()[0]) < number:
            waited = time.monotonic() - start
            if waited > self._timeout.total_seconds():
                raise CollectiveError(
                    f"expected the outer weights of exchange {number} from a worker that took part "
                    f"in it, found those of exchange {newest} after {waited:.0f} s; look for the "
                    "worker that failed first"
                )
            pause(waited)
        return newest

    def _newest(self) -> tuple[int, list[int]]:
        """Return the numbers of the newest result, or 0, and of older results."""
        if not self._store.check(["newest"]):
            return 0, []
        found = json.loads(self._store.get("newest"))
        return found["number"], found["kept"]

    def _pieces(self, number: int, nbytes: int) -> list[tuple[str, int]]:
        """Return the key and the first byte of each piece of this rank's tensors."""
        return [
            (f"{number}/{self._ranks.rank}/{index}", start)
            for index, start in enumerate(range(0, nbytes, PIECE_BYTES))
        ]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other; a rank may hold none."""
    rows = [tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
