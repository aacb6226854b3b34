"""The workers as one rank sees them: the ranks at its place of each worker, all or some of them."""

from collections.abc import Sequence

from drivetrain.collectives import Communicator, connect
from drivetrain.links.linked import LinkedCommunicator
from drivetrain.runtime.mesh import Axis, HostLevels, subset
from drivetrain.strategy import Run
from drivetrain_local.late import ExchangeTraffic, LateWorkers, check_world
from drivetrain_local.options import AXIS, LocalOptions
from drivetrain_local.worker import alone, links_of_workers


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
        self.everyone = self._connect_all(alone(near))

    def _connect_all(self, here: Axis) -> Communicator:
        """Connect all workers, by the methods of the run for slow links."""
        run, far = self._run, self._far
        if far.size == 1 or not run.links.in_channels:
            return self._connect(far)
        return LinkedCommunicator(
            far,
            HostLevels(here, far),
            self._connect,
            self._traffic,
            run.world,
            links_of_workers(run),
        )

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
