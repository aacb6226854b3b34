"""One recorded run of the user's script, in processes of its own, with a time limit."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from drivetrain.config.resolve import Resolved
from drivetrain.errors import CollectiveError
from drivetrain.verify import RecordRequest, RunRecord

Ending = Literal["recorded", "refused", "failed", "hung", "empty"]

STOP_S = 15.0
"""How long the launcher has to end its ranks after the time limit."""

_FAILED_FIRST = re.compile(r"^rank \d+ failed first .*$", re.MULTILINE)
_OWN_ERROR = re.compile(r"^ *(?:error: |drivetrain[\w.]*\.(\w+): )", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """How a recorded run ended.

    Attributes:
        ending: ``recorded``; ``refused`` with an error of the library that names the way out;
            ``failed`` with any other error; ``hung`` beyond the time limit; ``empty`` without a
            step.
        record: the numbers of a run that was recorded.
        reason: one line, for every other ending.
        output: the error stream; the traceback of the rank that failed first stands at its end.
        code: the exit code of the launcher.
    """

    ending: Ending
    record: RunRecord | None = None
    reason: str = ""
    output: str = ""
    code: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The script, and how it is run.

    Attributes:
        resolved: the configuration.
        arguments: of the launcher: ``(SCRIPT, ...)`` or ``("-m", MODULE, ...)``, perhaps behind
            ``--as-accelerate``.
        steps: optimizer steps to record.
        limit_s: seconds that one run may take.
        folder: for the records.
        announce: takes a line about each run before it starts.
    """

    resolved: Resolved
    arguments: Sequence[str]
    steps: int
    limit_s: float
    folder: Path
    announce: Callable[[str], None]

    def run(self, name: str, ranks: int, request: RecordRequest) -> Attempt:
        """Run the script on so many ranks, with the record in a folder of this name."""
        from drivetrain.runtime.world import RECORD_VARIABLE

        self.announce(f"{name}, on {ranks} ranks" if ranks > 1 else f"{name}, in one process")
        folder = self.folder / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(_on(self.resolved, ranks, request), encoding="utf-8")
        replace(request, steps=self.steps, folder=str(folder)).write(folder / "request.json")
        launch = ("-m", "drivetrain_launch", "launch", "--config", str(folder / "config.yaml"))
        with (
            (folder / "stdout.log").open("wb") as out,
            (folder / "stderr.log").open("wb") as err,
            subprocess.Popen(  # noqa: S603 - the user's own script
                [sys.executable, *launch, *self.arguments],
                env=os.environ | {RECORD_VARIABLE: str(folder / "request.json")},
                stdout=out,
                stderr=err,
            ) as process,
        ):
            code = _wait(process, self.limit_s)
        output = (folder / "stderr.log").read_text(encoding="utf-8", errors="replace")
        if code is None:
            reason = f"no end after {self.limit_s:g} s; raise --limit if a step takes so long"
            return Attempt(ending="hung", reason=reason, output=output, code=_HUNG)
        return _failed(output, code) if code else _ended(folder, output)


_HUNG = CollectiveError.exit_code


def _on(resolved: Resolved, ranks: int, request: RecordRequest) -> str:
    """Return the configuration file of a run on so many ranks of this host.

    The launcher, too, must find the strategy that the request puts in the place of the script's.
    """
    launch = replace(resolved.run.launch, nproc_per_node=ranks, max_restarts=0, log_dir="")
    given = replace(resolved, run=replace(resolved.run, launch=launch))
    applied = request.applied(given)
    before = {key: value for key, value, _ in given.rows()}
    kept = {key for key, value, _ in applied.rows() if key in before and before[key] == value}
    origins = {key: origin for key, origin in given.origins.items() if key in kept}
    return replace(applied, origins=origins).to_yaml(with_origins=True)


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """Return the exit code, None after the time limit; no process is left in either case."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it


def _ended(folder: Path, output: str) -> Attempt:
    try:
        record = RunRecord.read(folder)
    except FileNotFoundError:
        return Attempt(
            ending="empty", output=output, reason="the script ended without an Accelerator()"
        )
    if record.steps:
        return Attempt(ending="recorded", record=record, output=output)
    reason = "the script ended without an optimizer step through accelerator.prepare()"
    if not record.models:
        reason = "the script ended without accelerator.prepare(model)"
    return Attempt(ending="empty", output=output, reason=reason)


def _failed(output: str, code: int) -> Attempt:
    """Tell a refusal, which is an error of the library, from any other failure."""
    reports = list(_FAILED_FIRST.finditer(output))
    text = output[reports[-1].start() :] if reports else output
    own = list(_OWN_ERROR.finditer(text))
    if own and own[-1][1] != CollectiveError.__name__:
        reason = text[own[-1].end() :].partition("\nstopped with it")[0]
        return Attempt(ending="refused", reason=" ".join(reason.split()), output=output, code=code)
    lines = [line for line in text.partition("\nstopped with it")[0].splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else f"exit code {code}"
    return Attempt(ending="failed", reason=reason, output=output, code=code)
