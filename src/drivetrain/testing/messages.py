"""The messages between pytest and the processes that run the ranks of a test."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["passed", "failed", "skipped", "xfailed", "died", "hung"]

WarningFilter: TypeAlias = tuple[str, str, type[Warning], str, int]
"""The arguments of ``warnings.filterwarnings``."""

PRELOADED = ("drivetrain.testing.body", "torch._dynamo", "drivetrain.accelerator")
"""What rank processes have imported when they start: torch's compiler is imported by the first step
of an optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTest:
    """One rank's share of one test.

    Attributes:
        path: the file of the test.
        module: the name under which pytest imported it.
        owner: names of the classes around the function, outermost first.
        function: name of the test function.
        arguments: fixtures and parameters, each pickled by itself.
        rank: this rank.
        size: number of ranks.
        store_port: where the store listens through which the ranks find each other.
        rendezvous: prefix of their keys in the store, which no other test has.
        timeout_s: seconds that a collective may wait.
        filters: the warning filters of the test, in the order pytest applies them.
        search_path: the import path of the pytest process.
    """

    path: str
    module: str
    owner: tuple[str, ...]
    function: str
    arguments: Mapping[str, bytes]
    rank: int
    size: int
    store_port: int
    rendezvous: str
    timeout_s: float
    filters: tuple[WarningFilter, ...]
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started and imported torch."""


@dataclass(frozen=True, slots=True)
class Release:
    """Every rank has left the body: the process group may go."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How the test ended on one rank.

    Attributes:
        rank: the rank.
        kind: ``died`` and ``hung`` are the words of the pytest process about a silent rank.
        headline: one line: the exception, the reason of a skip, how the process ended.
        details: traceback or stacks.
        when: wall clock in seconds, comparable between the processes of one machine.
        worn: groups of earlier tests live on in the process, and their threads slow it down.
    """

    rank: int
    kind: Kind
    headline: str = ""
    details: str = ""
    when: float = field(default_factory=time.time)
    worn: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether this rank makes the test fail."""
        return self.kind in ("failed", "died", "hung")
