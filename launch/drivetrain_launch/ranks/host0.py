"""Host 0 as the other launchers see it: the facts to share, and the way to reach it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.errors import PreflightError
from drivetrain_launch.preflight.check import Extent
from drivetrain_launch.ranks.channel import LONGEST_MESSAGE, Channel, greet_server
from drivetrain_launch.ranks.placement import Endpoint

AGAIN_S = 0.2
"""Pause between two tries to reach host 0, which may come later."""

AGAIN_LIMIT_S = 60.0
"""How long a host tries to reach host 0 again after it was lost: a link may come back."""

TRY_S = 5.0
"""How long one try may take: a host that is off answers nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """The facts about a launcher in a run over several hosts.

    Attributes:
        endpoint: of host 0.
        index: of this launcher.
        count: number of launchers, at most.
        least: number of launchers with which the run goes on when others are lost.
        ranks: number of ranks here.
        run: what tells this run from others at the same endpoint: a scheduler's job, or "".
        secret: that all launchers of the run share.
        max_restarts: how often ranks start again; host 0's counts.
        start_timeout_s: how long launchers and ranks wait for each other.
        grace_s: how long ranks have to save after SIGTERM; host 0's counts.
        software: facts that must be equal on all hosts, by their names.
        backend: the ranks' communication library.
        alone: whether a scheduler starts each rank by itself, so that several launchers may run
            on one machine.
        check: extent of the check before the first attempt; host 0's counts.
        straggler_margin: the option of this name; host 0's counts.
    """

    endpoint: Endpoint
    index: int
    count: int
    least: int
    ranks: int
    run: str
    secret: bytes
    max_restarts: int
    start_timeout_s: float
    grace_s: float
    straggler_margin: float
    software: Mapping[str, str] = field(default_factory=dict)
    backend: str = "gloo"
    alone: bool = False
    check: Extent = "short"

    @property
    def facts(self) -> dict[str, str]:
        """Values without which a launcher is not of this run."""
        few = f"{self.least} to " if self.least < self.count else ""
        return {
            "the number of hosts": f"{few}{self.count}",
            "the job": self.run,
        }


class Host0:
    """The launcher of host 0, to which the others connect.

    Args:
        party: this launcher's.
    """

    def __init__(self, party: Party) -> None:
        self._party = party

    async def connect(self) -> Channel:
        """Open a channel.

        Raises:
            NotAuthenticError: host 0 has another secret.
            OSError: it does not answer.
        """
        endpoint = self._party.endpoint
        async with asyncio.timeout(TRY_S):
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, limit=LONGEST_MESSAGE
            )
        try:
            return await greet_server(reader, writer, self._party.secret)
        except BaseException:
            writer.close()
            raise

    async def connect_soon(self) -> Channel:
        """Open a channel to a host 0 that may come later.

        Raises:
            PreflightError: it did not come in time.
        """
        deadline = time.monotonic() + self._party.start_timeout_s
        while True:
            try:
                return await self.connect()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PreflightError(
                        f"cannot reach host 0 at {self._party.endpoint} within "
                        f"{self._party.start_timeout_s:g} s: {error or 'no answer'}; check that "
                        "host 0 was started with --node-rank 0 and that the port is open"
                    ) from error
                await asyncio.sleep(AGAIN_S)

    async def connect_again(self) -> Channel:
        """Open a channel to a host 0 that was lost, as soon as the link is back.

        Raises:
            OSError: it stays away, or answers that nobody listens there any longer.
        """
        async with asyncio.timeout(AGAIN_LIMIT_S):
            while True:
                try:
                    return await self.connect()
                except ConnectionRefusedError:
                    raise
                except OSError:
                    await asyncio.sleep(AGAIN_S)
