"""Seeds each defect of these records into a copy of the tree, and runs the tests that catch it.

::

    python tests/defects/run.py                   # all of them
    python tests/defects/run.py NAME...           # some
    python tests/defects/run.py --find            # look for texts whose file moved, and note where

First the tests run once without a defect, and must pass: a defect is caught by its mistake alone.
The exit code is 1 when a defect is missed. The copy's packages come before the installed ones.

A run of pytest is a process forked from this one, which has imported what is slow to import and
nothing of ours. As many run at a time as there are processors, each in a copy of its own.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted(Path(__file__).parent.glob("*.toml"))
PACKAGES = ("src", "plugins", "launch")
COPIED = (
    *PACKAGES,
    *("tests", "benchmarks", "examples", "docs"),
    *("pyproject.toml", "mkdocs.yml", "LICENSE"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
)
SLOW_TO_IMPORT = ("torch._dynamo", "torch.distributed.fsdp")
TIMEOUT_S = 900
HANG_S = 120
"""What runs longer with a defect waits for a rank that does not come: in the suite it fails by its
own, longer, time limit."""
POLL_S = 0.05
PASSED, FAILED, INTERNAL_ERROR = 0, 1, 3
"""Exit codes of pytest; others say that the tests did not run."""


@dataclass(frozen=True)
class Defect:
    """A mistake to seed.

    Attributes:
        name: what it is.
        file: where it is made, from the root of the repository.
        before: the right lines; they occur exactly once.
        after: the wrong ones.
        tests: files or nodes of the default selection that catch it.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """Return the file's text with the mistake.

        Raises:
            ValueError: the right lines do not occur exactly once.
        """
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        if (found := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: expected its text once in {self.file}, found {found}")
        return text.replace(self.before, self.after)


def defects() -> list[Defect]:
    """Return all seeded defects."""
    found = [each for path in RECORDS for each in tomllib.loads(path.read_text())["defect"]]
    return [Defect(**{**fields, "tests": tuple(fields["tests"])}) for fields in found]


@dataclass
class Bench:
    """A copy of the tree, in which one run of pytest is under way at a time.

    Attributes:
        copy: the copy.
        output: where the run writes.
        pid: the process of the run; 0 when there is none.
        defect: what is seeded; None for a run without a defect.
        right: the text of the file without the defect.
        since: when the run began.
    """

    copy: Path
    output: Path
    pid: int = 0
    defect: Defect | None = None
    right: str = ""
    since: float = field(default_factory=time.monotonic)

    def start(self, tests: Sequence[str], defect: Defect | None = None) -> None:
        """Seed a defect and run tests until the first one fails."""
        if defect is not None:
            self.right = (self.copy / defect.file).read_text()
            (self.copy / defect.file).write_text(defect.applied(self.copy))
        self.defect, self.since = defect, time.monotonic()
        sys.stdout.flush()
        self.output.touch()
        self.pid = os.fork()
        if not self.pid:
            code = INTERNAL_ERROR
            try:
                code = run_tests(self.copy, self.output, tests)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)

    def ended(self) -> int | None:
        """Take the defect out after the run; return the exit code, None while it is under way."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        most = TIMEOUT_S if self.defect is None else HANG_S
        if not pid and time.monotonic() - self.since > most:
            os.killpg(self.pid, signal.SIGKILL)
            pid, status = os.waitpid(self.pid, 0)
        if not pid:
            return None
        if self.defect is not None:
            (self.copy / self.defect.file).write_text(self.right)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


def run_tests(copy: Path, output: Path, tests: Iterable[str]) -> int:
    """Be pytest in a copy of the tree, with the copy's packages; return its exit code."""
    os.setsid()  # with the processes that tests start, this one can be ended as a group
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(opened, stream)
    os.chdir(copy)
    packages = [str(copy / package) for package in PACKAGES]
    os.environ.update(PYTHONPATH=os.pathsep.join(packages), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:0] = packages
    sys.argv[:] = ["pytest"]
    code = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    return int(code)


def check_control(chosen: Sequence[Defect], benches: Sequence[Bench]) -> None:
    """Run the tests of all chosen defects once, without a defect.

    Raises:
        RuntimeError: some fail, or did not run.
    """
    tests = sorted({test for defect in chosen for test in defect.tests})
    share = -(-len(tests) // len(benches))
    used = [bench for i, bench in enumerate(benches) if tests[i * share :]]
    for i, bench in enumerate(used):
        bench.start(tests[i * share : (i + 1) * share])
    for bench in used:
        while (code := bench.ended()) is None:
            time.sleep(POLL_S)
        if code != PASSED:
            raise RuntimeError(f"tests fail without a defect\n{bench.output.read_text()}")


def caught(chosen: Sequence[Defect], benches: Sequence[Bench]) -> Iterator[tuple[Defect, bool]]:
    """Seed each defect, run its tests, and yield whether one of them failed.

    Raises:
        RuntimeError: the tests did not run.
    """
    left = list(reversed(chosen))
    while left or any(bench.pid for bench in benches):
        for bench in benches:
            defect = bench.defect
            if bench.pid and defect is not None and (code := bench.ended()) is not None:
                output = bench.output.read_text()
                failed = (code == FAILED and " failed" in output) or code < 0  # a crash
                if not failed and code != PASSED:
                    raise RuntimeError(f"{defect.name}: its tests did not run\n{output}")
                seconds = time.monotonic() - bench.since
                print(f"{'caught' if failed else 'MISSED'} {seconds:6.1f} s  {defect.name}")
                yield defect, failed
            if left and not bench.pid:
                defect = left.pop()
                bench.start(defect.tests, defect)
        time.sleep(POLL_S)


def moved() -> Iterator[tuple[Defect, str]]:
    """Yield defects whose text is not in their file, with the one file that has it."""
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    for defect in defects():
        try:
            defect.applied(ROOT)
        except ValueError as error:
            places = [path for path in sources if path.read_text().count(defect.before) == 1]
            if len(places) == 1:
                yield defect, places[0].relative_to(ROOT).as_posix()
            else:
                print(f"{error}; {len(places)} other files have it")


def note_moves() -> None:
    """Write the new files of defects into the records."""
    for defect, place in moved():
        print(f"{defect.name}: {defect.file} -> {place}")
        entry = f'name = "{defect.name}"\nfile = "{defect.file}"'
        for record in RECORDS:
            text = record.read_text()
            record.write_text(text.replace(entry, f'name = "{defect.name}"\nfile = "{place}"'))


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which defects; all by default")
    parser.add_argument("--find", action="store_true", help="note files that texts moved to")
    options = parser.parse_args()
    if options.find:
        note_moves()
        return 0
    known = {defect.name: defect for defect in defects()}
    if unknown := set(options.names) - known.keys():
        parser.error(f"expected names of defects, found {sorted(unknown)}")
    chosen = [known[name] for name in options.names] or list(known.values())
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drivetrain-defects-") as folder:
        benches = []
        for place in range(os.cpu_count() or 1):
            copy = Path(folder) / str(place)
            copy_tree(copy)
            benches.append(Bench(copy, copy / "output"))
        check_control(chosen, benches)
        print(f"passed {time.monotonic() - start:6.1f} s  without a defect", flush=True)
        results = dict(caught(chosen, benches))
    missed = sorted(defect.name for defect, failed in results.items() if not failed)
    print(*(f"missed {name}" for name in missed), sep="\n", end="\n" if missed else "")
    seconds = time.monotonic() - start
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught in {seconds:.0f} s")
    return 1 if missed else 0


def copy_tree(copy: Path) -> None:
    """Copy what tests need."""
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)


if __name__ == "__main__":
    sys.exit(main())
