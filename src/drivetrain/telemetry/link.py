"""The load of the link between hosts: the bytes that a step sends, and the seconds they take."""

from collections.abc import Callable, Mapping

from drivetrain.strategy import Run
from drivetrain.telemetry.figures import StepFigures

WARM_UP, COUNTED = 2, 3
"""Steps that do not count, because allocators and connections begin, and steps that do."""


def bytes_between_hosts(sent: Mapping[tuple[str, str], int], run: Run) -> int:
    """Return the bytes that leave rank 0's host, where messages go around in rings of neighbors.

    Of the ranks that a host has on a ring, one sends to another host; a host has several rings
    where each takes a part of its ranks. The stages of a pipeline are a chain: a rank that sends to
    a stage on its own host stands for the rank of this host that sends to the next host, as many
    bytes, or half as many where these are rounded.

    Args:
        sent: bytes that one rank sends by (axis, operation), from a ledger or a ``Cost``.
        run: knows the axes.
    """
    total = 0
    for (name, operation), nbytes in sent.items():
        try:
            line = run.mesh[name.partition(".")[0]] if operation == "send" else run.mesh.line(name)
        except KeyError:
            continue  # of another strategy's mesh
        if line.spans_hosts:
            total += nbytes * run.world.island_size // line.hosts.count(line.hosts[line.rank])
    return total


class LinkLoad:
    """Warns once where the link takes longer than the work of a step: then steps wait for it.

    The time of the link is the bytes over the measured bandwidth. Where a rank's waiting is not
    known, because its device waits, the time of the link is taken for it.

    Args:
        run: the run of the strategy.
        link: bytes per second between hosts, as the launchers measured it.
        warn: shows a line.
    """

    def __init__(self, run: Run, link: float, warn: Callable[[str], None]) -> None:
        self._run, self._link, self._warn = run, link, warn
        self._steps = 0
        self._seconds = self._waiting = 0.0
        self._bytes = 0

    def take(self, figures: StepFigures) -> None:
        """Take the record of a step."""
        self._steps += figures.steps
        if not WARM_UP < self._steps <= WARM_UP + COUNTED:
            return
        sent = {tuple_of(key): nbytes for key, nbytes in figures.sent.items()}
        self._bytes += bytes_between_hosts(sent, self._run)
        self._seconds += figures.seconds
        self._waiting += sum(figures.waiting.values())
        if self._steps == WARM_UP + COUNTED:
            self._judge()

    def _judge(self) -> None:
        link_s = self._bytes / self._link
        working_s = self._seconds - (self._waiting or min(link_s, self._seconds))
        if link_s <= working_s:
            return
        self._warn(
            f"the link between hosts is too slow for this strategy: a step sends "
            f"{self._bytes / COUNTED / 1e6:,.1f} MB from each host, {link_s / COUNTED:.3g} s at "
            f"the measured {self._link / 1e6:,.4g} MB/s, and works for {working_s / COUNTED:.3g} "
            "s; accumulate more micro-batches per step, keep sharding inside of hosts, or send "
            "less: 'drivetrain estimate' lists the bytes of every strategy"
        )


def tuple_of(key: str) -> tuple[str, str]:
    """Return axis and operation of a record's key ``AXIS/OPERATION``."""
    axis, _, operation = key.partition("/")
    return axis, operation
