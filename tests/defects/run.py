"""Seeds each defect of ``defects.toml`` into a copy of the tree and runs the tests that catch it.

::

    python tests/defects/run.py                   # all of them
    python tests/defects/run.py NAME...           # some
    python tests/defects/run.py --find            # look for texts whose file moved, and note where

First the tests run once without a defect, and must pass: a defect is caught by its mistake alone.
The exit code is 1 when a defect is missed. The copy's packages come before the installed ones.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("defects.toml")
PACKAGES = ("src", "plugins", "launch")
COPIED = (
    *PACKAGES,
    *("tests", "benchmarks", "examples", "docs"),
    *("pyproject.toml", "mkdocs.yml", "README.md", "CHANGELOG.md"),
)
TIMEOUT_S = 900
PASSED, FAILED = 0, 1
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
    record = tomllib.loads(RECORD.read_text())["defect"]
    return [Defect(**{**fields, "tests": tuple(fields["tests"])}) for fields in record]


def check_control(chosen: Sequence[Defect], copy: Path) -> None:
    """Run the tests of all chosen defects once, without a defect.

    Raises:
        RuntimeError: some fail, or did not run.
    """
    tests = dict.fromkeys(test for defect in chosen for test in defect.tests)
    done = run_tests(copy, tests)
    if done.returncode != PASSED:
        raise RuntimeError(f"tests fail without a defect\n{done.stdout}{done.stderr}")


def is_caught(defect: Defect, copy: Path) -> bool:
    """Seed a defect into a copy of the tree, run its tests there, and take it out again.

    Raises:
        RuntimeError: the tests did not run.
    """
    path = copy / defect.file
    right = path.read_text()
    path.write_text(defect.applied(copy))
    try:
        done = run_tests(copy, defect.tests, timeout_s=TIMEOUT_S)
    finally:
        path.write_text(right)
    failed = done.returncode == FAILED and " failed" in done.stdout
    if not failed and done.returncode != PASSED:
        raise RuntimeError(f"{defect.name}: its tests did not run\n{done.stdout}{done.stderr}")
    return failed


def run_tests(
    copy: Path, tests: Iterable[str], timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy of the tree with the copy's packages, until the first one fails."""
    search = os.pathsep.join(str(copy / package) for package in PACKAGES)
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


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
    """Write the new files of defects into the record."""
    for defect, place in moved():
        print(f"{defect.name}: {defect.file} -> {place}")
        text = RECORD.read_text()
        entry = f'name = "{defect.name}"\nfile = "{defect.file}"'
        RECORD.write_text(text.replace(entry, f'name = "{defect.name}"\nfile = "{place}"'))


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
        parser.error(f"expected names of {RECORD.name}, found {sorted(unknown)}")
    chosen = [known[name] for name in options.names] or list(known.values())
    missed = []
    with tempfile.TemporaryDirectory(prefix="drivetrain-defects-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        start = time.monotonic()
        check_control(chosen, copy)
        print(f"passed {time.monotonic() - start:6.1f} s  without a defect", flush=True)
        for defect in chosen:
            start = time.monotonic()
            caught = is_caught(defect, copy)
            missed += [] if caught else [defect.name]
            seconds = time.monotonic() - start
            print(f"{'caught' if caught else 'MISSED'} {seconds:6.1f} s  {defect.name}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return 1 if missed else 0


def copy_tree(copy: Path) -> None:
    """Copy what tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)


if __name__ == "__main__":
    sys.exit(main())
