"""Which workers exchange, and over what: the agreement, late workers, and the communicators.

Workers agree by two kinds of keys in the store where the ranks of the run met. Nobody waits longer
than ``late_s``, whoever stands still::

    decision    {"number": 7, "workers": [0, 2]}    the latest exchange, and its participants
    ready/2     8                                   the exchange for which worker 2 stands ready

A worker that stands ready for exchange 8 waits until all stand ready or its time is over, and then
puts decision 8 in the place of decision 7. The store lets only one of them do so (compare and set),
and all read the decision that stands there. A worker that was ready in time finds itself in it, and
the others know that it will come; a worker that is late finds a decision without itself.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from typing_extensions import override

from drivetrain.collectives import Communicator, connect
from drivetrain.compression.communicator import LinkedCommunicator
from drivetrain.compression.methods import LinkMethods
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError, ConfigError
from drivetrain.log import get_logger
from drivetrain.runtime.mesh import Axis, HostLevels, subset
from drivetrain.runtime.world import World
from drivetrain.strategy import Run
from drivetrain_local.options import AXIS, LocalOptions

_POLL_SHARE, _SHORTEST_POLL_S, _LONGEST_POLL_S = 0.1, 1e-3, 0.05
"""The store is asked after pauses of this share of the time waited, within these bounds."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who takes part in an exchange.

    Attributes:
        number: of the exchange, from 1; 0 before the first one.
        workers: those that take part, in ascending order.
    """

    number: int
    workers: Sequence[int]


class Quorum:
    """Decides who takes part in each exchange of one order.

    Args:
        store: the keys of this order, on all workers the same.
        worker: number of this worker.
        workers: how many there are.
        late_s: seconds that this worker waits for others.
    """

    def __init__(self, store: Any, worker: int, workers: int, late_s: float) -> None:
        self._store = store
        self._worker = worker
        self._workers = workers
        self._late_s = late_s

    def decide(self, number: int, *, opens: bool) -> Decision | None:
        """Return the decision about an exchange, or about a later one if this worker is late.

        Args:
            number: of the exchange that follows the one of which this worker has the result.
            opens: whether to wait for others if none of them stands ready yet.

        Returns:
            The decision; None if nobody stands ready, and this worker does not open the exchange.
        """
        _, latest = self._latest()
        if latest.number >= number:
            return latest
        if not opens and not self._ready(number):
            return None
        self._store.set(f"ready/{self._worker}", str(number))
        start = time.monotonic()
        while True:
            found, latest = self._latest()
            if latest.number >= number:
                return latest
            waited = time.monotonic() - start
            ready = self._ready(number)
            if len(ready) == self._workers or waited >= self._late_s:
                proposal = json.dumps(asdict(Decision(number, ready)))
                self._store.compare_set("decision", found, proposal)
            else:
                pause(waited)

    def _latest(self) -> tuple[str, Decision]:
        """Return the latest decision, also as the store has it."""
        if not self._store.check(["decision"]):
            return "", Decision(0, ())
        found = self._store.get("decision").decode()
        return found, Decision(**json.loads(found))

    def _ready(self, number: int) -> list[int]:
        """Return the workers that stand ready for an exchange."""
        keys = {worker: f"ready/{worker}" for worker in range(self._workers)}
        return [
            worker
            for worker, key in keys.items()
            if self._store.check([key]) and int(self._store.get(key)) == number
        ]


def pause(waited: float) -> None:
    """Let some time pass before the store is asked again, given the seconds waited so far."""
    time.sleep(min(max(_POLL_SHARE * waited, _SHORTEST_POLL_S), _LONGEST_POLL_S))


# --- outer state that late workers take, in that store ---

# Whoever took part in an exchange goes on training, and cannot serve a worker that comes later. So
# a participant puts the result into the store whenever some worker was left out::
#
#     newest            {"number": 8, "kept": [7]}    the latest result, and older ones still there
#     8/0/3             bytes                         piece 3 of the tensors of rank 0 of a worker
#     readers           1                             workers that are reading
#
# A result is deleted when there is a newer one, and no worker that could be reading the old one.


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


# --- exchanges that leave out workers which come late ---

# Every worker counts the exchanges that its script has passed, and knows of which exchange it has
# the result. Both are equal as long as nobody is late::
#
#   in time    the workers that the quorum names exchange, and have the result of the next exchange
#   late       the exchange was without this worker: take the newest result instead
#   behind     the result is newer than the script's exchange: take part if the others stand ready
#              for the next exchange, else go on training
#
# So a worker that has lost time joins again as soon as its exchange falls into a time in which the
# others wait, and when all scripts have come to the same line, all workers have the same result.


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


@dataclass(eq=False)
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

    name: str
    late_s: float
    workers: Communicator
    connect: Callable[[Sequence[int]], Communicator]
    ranks: Communicator
    missed: int = 0
    idle: bool = False
    _passed: int = 0
    _held: int = 0

    def __post_init__(self) -> None:
        store = PrefixStore(f"local/{self.name}", dist.distributed_c10d._get_default_store())
        self._quorum = Quorum(store, self.workers.rank, self.workers.size, self.late_s)
        self._handed = HandedState(store, self.ranks, self.workers.timeout)

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
        if decision.number > number or self.workers.rank not in decision.workers:
            self._held = self._handed.take(number, state())
            self.missed += 1
            logger.warning(
                f"local: worker {self.workers.rank} came late to exchange {number}, and goes on "
                f"from the outer weights of exchange {self._held}",
                main_process_only=False,
            )
            return True
        self._held = number
        if len(decision.workers) == self.workers.size:
            step(self.workers)
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
        here, first = self.workers.rank, decision.workers[0]
        if here == first:
            absent = sorted({*range(self.workers.size)} - {*decision.workers})
            logger.warning(
                f"local: exchange {decision.number} runs without the workers "
                f"{', '.join(map(str, absent))}: they did not come within {self.late_s:g} s",
                main_process_only=False,
            )
        among = self.connect(decision.workers)
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
        told = torch.zeros(told_numbers(self.workers.size), dtype=torch.int64, device="cpu")
        if self.ranks.rank == 0:
            decision = self._quorum.decide(number, opens=opens)
            if decision is not None:
                told[0] = decision.number
                told[[1 + worker for worker in decision.workers]] = 1
        self.ranks.broadcast(told, label="participants of an exchange").wait()
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


# --- workers as one rank sees them: the ranks at its place of each ---


class WorkerLine:
    """The communicators between workers.

    Args:
        config: the options.
        run: its links say how all workers exchange.
        near: the ranks of this worker.
        far: the ranks at this rank's place of each worker.
        ranks: the communicator of this worker.

    Attributes:
        everyone: the communicator of all workers.
    """

    def __init__(
        self, config: LocalOptions, run: Run, near: Axis, far: Axis, ranks: Communicator
    ) -> None:
        self._config = config
        self._run = run
        self._far = far
        self._ranks = ranks
        self._traffic = run.traffic
        self._name, self._stream = "", 0
        if config.late_s and far.size > 1:
            check_world(config.late_s, run.world)
            self._traffic = ExchangeTraffic(run.traffic)
            dp = run.mesh[AXIS]
            self._name = f"{getattr(dp.group, 'group_name', '')}/{next(dp.streams)}"
            self._stream = next(far.streams)
        self.everyone = self._connect_all(HostLevels(near.alone, far))

    def _connect_all(self, levels: HostLevels) -> Communicator:
        """Connect all workers, by the methods of the run for slow links."""
        run, far = self._run, levels.far
        if far.size == 1 or not run.links.in_channels:
            return self._connect(far)
        return LinkedCommunicator(far, levels, self._traffic, run.world, links_of_workers(run))

    def _connect(self, axis: Axis) -> Communicator:
        world = self._run.world
        return connect(axis, self._traffic, world.device, world.timeout)

    def _connect_some(self, workers: Sequence[int]) -> Communicator:
        """Connect the workers that are there: the others may be anywhere in their scripts."""
        return self._connect(subset(self._far, workers, self._stream))

    def late(self, optimizer: int) -> list[LateWorkers]:
        """Return the exchanges of each fragment, where late workers are left out."""
        config = self._config
        return [
            LateWorkers(
                f"{self._name}/{optimizer}/{fragment}",
                config.late_s,
                self.everyone,
                self._connect_some,
                self._ranks,
            )
            for fragment in range(config.fragments if config.late_s else 0)
        ]

    def close(self) -> None:
        """Close the communicator of all workers."""
        self.everyone.close()


def run_inside(run: Run, near: Axis) -> Run:
    """Return the run of a worker as the strategy inside of it sees it: nothing beside it."""
    return replace(run, mesh=run.mesh.inside(AXIS, near), links=LinkMethods())


def links_of_workers(run: Run) -> LinkMethods:
    """Return the methods between workers, who exchange after a step: none of it is skipped."""
    return replace(run.links, undoable=False)
