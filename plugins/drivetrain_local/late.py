"""Exchanges that leave out workers which come late, so that the others need not wait for them.

Every worker counts the exchanges that its script has passed, and knows of which exchange it has the
result. Both are equal as long as nobody is late::

    in time    the workers that the quorum names exchange, and have the result of the next exchange
    late       the exchange was without this worker: take the newest result instead
    behind     the result is newer than the script's exchange: take part if the others stand ready
               for the next exchange, else go on training

So a worker that has lost time joins again as soon as its exchange falls into a time in which the
others wait, and when all scripts have come to the same line, all workers have the same result.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from typing_extensions import override

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError
from drivetrain.log import get_logger
from drivetrain.runtime.world import World
from drivetrain.traffic import Traffic
from drivetrain_local.handed import HandedState
from drivetrain_local.quorum import Decision, Quorum

logger = get_logger(__name__)


class ExchangeTraffic(Traffic):
    """A ledger's entrance for exchanges: workers meet in them at different steps of their scripts.

    The page, which the check of the order of operations compares, is never turned here.

    Args:
        ledger: of the run.
    """

    def __init__(self, ledger: Traffic) -> None:
        super().__init__()
        self._ledger = ledger

    @override
    def add(self, axis: str, operation: str, nbytes: int) -> None:
        self._ledger.add(axis, operation, nbytes)

    @override
    def took(self, axis: str, operation: str, seconds: float) -> None:
        self._ledger.took(axis, operation, seconds)

    @override
    def waited(self, axis: str, seconds: float) -> None:
        self._ledger.waited(axis, seconds)


class LateWorkers:
    """Runs the exchanges of one order among the workers that are there.

    Args:
        name: of the order, on all ranks the same.
        late_s: seconds that workers wait for each other at an exchange.
        workers: all of them, at this rank's place.
        connect: makes a communicator for some of the workers.
        ranks: of this worker.

    Attributes:
        missed: exchanges that were without this worker.
        idle: whether the last call exchanged nothing: this worker is behind, and nobody was there.
    """

    def __init__(
        self,
        name: str,
        late_s: float,
        workers: Communicator,
        connect: Callable[[Sequence[int]], Communicator],
        ranks: Communicator,
    ) -> None:
        self.missed = 0
        self.idle = False
        self._late_s = late_s
        self._workers = workers
        self._connect = connect
        self._ranks = ranks
        store = PrefixStore(f"local/{name}", dist.distributed_c10d._get_default_store())
        self._quorum = Quorum(store, workers.rank, workers.size, late_s)
        self._handed = HandedState(store, ranks, workers.timeout)
        self._passed = self._held = 0

    def exchange(
        self, step: Callable[[Communicator], None], state: Callable[[], Sequence[Tensor]]
    ) -> bool:
        """Exchange with the workers that are there, or catch up with them.

        Args:
            step: exchanges with the participants, and takes the result.
            state: gives the tensors of the result on this rank, to be read or filled.

        Returns:
            Whether this worker was left out, and the tensors were filled with a newer result.
        """
        self._passed += 1
        number = self._held + 1
        decision = self._told(number, opens=self._passed == number)
        self.idle = decision is None
        if decision is None:
            return False
        if decision.number > number or self._workers.rank not in decision.workers:
            self._held = self._handed.take(number, state())
            self.missed += 1
            logger.warning(
                f"local: worker {self._workers.rank} came late to exchange {number}, and goes on "
                f"from the outer weights of exchange {self._held}",
                main_process_only=False,
            )
            return True
        self._held = number
        if len(decision.workers) == self._workers.size:
            step(self._workers)
        else:
            self._run_without(decision, step, state)
        return False

    def _run_without(
        self,
        decision: Decision,
        step: Callable[[Communicator], None],
        state: Callable[[], Sequence[Tensor]],
    ) -> None:
        """Exchange among the workers that are there, and leave the result for the others."""
        here, first = self._workers.rank, decision.workers[0]
        if here == first:
            absent = sorted({*range(self._workers.size)} - {*decision.workers})
            logger.warning(
                f"local: exchange {decision.number} runs without the workers "
                f"{', '.join(map(str, absent))}: they did not come within {self._late_s:g} s",
                main_process_only=False,
            )
        among = self._connect(decision.workers)
        try:
            step(among)
            if here == first:
                self._handed.put(decision.number, state())
            # Nobody opens the next exchange before: one worker at a time writes, and the time that
            # it takes does not make it late.
            among.barrier()
        finally:
            among.close()

    def _told(self, number: int, *, opens: bool) -> Decision | None:
        """Return the decision that the first rank of this worker has got, on all its ranks."""
        told = torch.zeros(told_numbers(self._workers.size), dtype=torch.int64, device="cpu")
        if self._ranks.rank == 0:
            decision = self._quorum.decide(number, opens=opens)
            if decision is not None:
                told[0] = decision.number
                told[[1 + worker for worker in decision.workers]] = 1
        self._ranks.broadcast(told, label="participants of an exchange").wait()
        first, *flags = told.tolist()
        if not first:
            return None
        return Decision(first, [worker for worker, flag in enumerate(flags) if flag])


def told_numbers(workers: int) -> int:
    """Return how many numbers of 8 bytes the first rank of a worker tells the others."""
    return 1 + workers


def check_world(late_s: float, world: World) -> None:
    """Refuse worlds in which no worker can be left out.

    Raises:
        ConfigError: the ranks do not exchange data over gloo, or their patience is shorter.
    """
    if world.device.type != "cpu" or "gloo" not in world.backend:
        raise ConfigError(
            f"strategy.late_s: expected ranks on the CPU that exchange data over gloo, found "
            f"{world.device.type} and {world.backend}: exchanges without late workers are not "
            "tested on other backends; leave late_s at 0"
        )
    if late_s >= world.timeout.total_seconds():
        raise ConfigError(
            f"strategy.late_s: expected less than the {world.timeout.total_seconds():g} s that a "
            f"collective may take, found {late_s:g} s; make it shorter, or the timeout of the run "
            "longer"
        )
