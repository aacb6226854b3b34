"""The records of a run put together: all starts that continue each other, on all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.telemetry.figures import RUN, RankJournal, StartFolder, StepFigures, starts_of


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """One start of the script, in words.

    Attributes:
        name: of its folder.
        began: seconds since 1970; None where nothing says so.
        first: number of its first step; 0 without a step.
        last: number of its last step.
        resumed: the checkpoint that it went on from; "" for none.
        outcome: how it ended.
        good: whether that is the end of a whole run.
    """

    name: str
    began: float | None
    first: int
    last: int
    resumed: str
    outcome: str
    good: bool


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run from its first step to its last known step.

    Attributes:
        name: of the run, for titles.
        folder: the folder with its starts.
        facts: of the last start: configuration, environment, models.
        starts: the starts that belong to the run.
        ranks: the records of each rank, without those that a later start has repeated.
        headers: facts of each rank in the last start: its host, and who does the same work.
        repeated: how many steps were taken again after a restart.
        remarks: what is missing or torn, in sentences.
    """

    name: str
    folder: Path
    facts: Mapping[str, Any]
    starts: Sequence[StartOutcome]
    ranks: Mapping[int, Sequence[StepFigures]]
    headers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    repeated: int = 0
    remarks: Sequence[str] = field(default_factory=tuple)

    @property
    def main(self) -> Sequence[StepFigures]:
        """The records of the lowest rank that wrote any; empty in an empty run."""
        return next((records for records in self.ranks.values() if records), ())

    @property
    def restarts(self) -> Sequence[int]:
        """The first step of each start after the first one."""
        return [start.first for start in self.starts[1:] if start.first]

    @property
    def skipped(self) -> Sequence[int]:
        """The skipped steps; the last step of a record stands for all of its steps."""
        return [each.step for each in self.main if each.skipped]


def load_history(folder: str | Path) -> RunHistory:
    """Read a run, as far as it is there; it may still be going on.

    Args:
        folder: of the project, of its run, or of one start.

    Raises:
        ConfigError: no run was recorded there.
    """
    every = starts_of(folder)
    journals = [start.journals() for start in every]
    first = max(i for i in range(len(every)) if i == 0 or not _continues(every[i], journals[i]))
    starts, read = every[first:], journals[first:]
    remarks = _remarks(starts, read)
    if first:
        remarks.append(
            f"{first} earlier start{'s' * (first > 1)} in this folder began anew, and are not "
            "shown; name the folder of a start to see it alone"
        )
    ranks: dict[int, list[StepFigures]] = {}
    repeated = 0
    for found in read:
        for rank, journal in found.items():
            kept = ranks.setdefault(rank, [])
            begin = journal.records[0].step if journal.records else None
            while kept and begin is not None and kept[-1].step >= begin:
                again = kept.pop().steps
                repeated += again if rank == min(found) else 0  # once, and not for each rank
            kept.extend(journal.records)
    path = every[0].path.parent
    return RunHistory(
        name=(path.parent if path.name == RUN else path).resolve().name,
        folder=path,
        facts=next((facts for start in reversed(starts) if (facts := start.facts())), {}),
        starts=[_outcome(*pair) for pair in zip(starts, read, strict=True)],
        ranks=dict(sorted(ranks.items())),
        headers={rank: journal.header for rank, journal in read[-1].items()},
        repeated=repeated,
        remarks=remarks,
    )


def _continues(start: StartFolder, journals: Mapping[int, RankJournal]) -> bool:
    """Whether a start goes on with the run before it: restarted, or resumed from a checkpoint."""
    return bool(start.facts().get("restarts")) or bool(_event(journals, "resumed"))


def _event(journals: Mapping[int, RankJournal], name: str) -> Mapping[str, Any]:
    """Return the first event of a name on any rank; empty where there is none."""
    events = (event for journal in journals.values() for _, event in journal.events)
    return next((event for event in events if event.get("event") == name), {})


def _outcome(start: StartFolder, journals: Mapping[int, RankJournal]) -> StartOutcome:
    records = next((each.records for each in journals.values() if each.records), ())
    failed, ended = _event(journals, "failed"), _event(journals, "ended")
    outcome = "no end is recorded: it is running, or was killed"
    if failed:
        outcome = f"failed: {failed.get('error', 'no reason given')}"
    elif ended:
        outcome = "ended"
    return StartOutcome(
        name=start.path.name,
        began=records[0].time - records[0].seconds if records else start.facts().get("started"),
        first=records[0].step - records[0].steps + 1 if records else 0,
        last=records[-1].step if records else 0,
        resumed=str(_event(journals, "resumed").get("source", "")),
        outcome=outcome,
        good=bool(ended and not failed),
    )


def _remarks(starts: Sequence[StartFolder], read: Sequence[Mapping[int, RankJournal]]) -> list[str]:
    """Return in sentences which parts of the records are missing."""
    remarks = []
    for start, journals in zip(starts, read, strict=True):
        facts = start.facts()
        if not facts:
            remarks.append(f"{start.path.name}: run.json is missing or torn: no configuration")
        missing = sorted(set(range(int(facts.get("ranks", 0)))) - set(journals))
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            remarks.append(
                f"{start.path.name}: no records of rank{'s' * (len(missing) > 1)} {shown}: they "
                "lie on another host, or the run ended before their first line"
            )
        for rank, journal in journals.items():
            if journal.torn:
                lines = f"{journal.torn} torn line{'s' * (journal.torn > 1)}"
                remarks.append(f"{start.path.name}: {lines} of rank {rank} left out")
    if not any(journal.records for journals in read for journal in journals.values()):
        remarks.append("no step has been recorded yet")
    return remarks
