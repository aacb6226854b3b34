"""Fixtures that run the command in a process of its own and see what it leaves behind."""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from drivetrain_launch.cli import run
from waits import wait_until

THIRD_PARTY = Path(__file__).parent / "thirdparty"
"""A folder on the path with a distribution that is not ours: it provides the strategy ``toy``."""

MARK = "LAUNCH_TEST_MARK"


@dataclass
class Sandbox:
    """A folder, an environment with a mark of its own, and the processes that carry the mark."""

    folder: Path
    temporary: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return name

    def install(self, module: str, strategies: Mapping[str, str]) -> None:
        """Let the folder provide strategies: classes of a module of it, by their names."""
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        entries = (f"{name} = {module}:{kind}\n" for name, kind in strategies.items())
        (info / "entry_points.txt").write_text("[drivetrain.strategies]\n" + "".join(entries))

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DRIVETRAIN_", "TORCHELASTIC_", "GLOO_"))
        }
        # Behind it the copy of the tree that is tested, if it is not the installed one.
        search = [str(THIRD_PARTY), kept.get("PYTHONPATH", "")]
        return kept | {
            "PYTHONPATH": os.pathsep.join(filter(None, search)),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            MARK: self.mark,
            **(extra or {}),
        }

    def command(self, *arguments: str) -> list[str]:
        # As the installed command does: modules here hide none of the standard library.
        return [sys.executable, "-P", "-m", "drivetrain_launch", *arguments]

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def begun(
        self, text: str, ranks: int, *words: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Launch a script, and wait until each of its ranks has written ``ready-RANK``."""
        words = ("launch", "--strategy", "toy", *words, self.script(text))
        process = self.start(*words, env=env)
        ready = [self.folder / f"ready-{rank}" for rank in range(ranks)]
        wait_until(lambda: all(each.exists() for each in ready))
        return process

    def run(
        self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command, which ends with this exit code."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done

    def launch(
        self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.run("launch", "--strategy", "toy", *arguments, code=code, env=env)

    def alive(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARK) == self.mark
            )
        except psutil.Error:
            return False


@pytest.fixture
def hears() -> str:
    """Return the text of a script that prints the notice that it hears; rank 0 waits for one."""
    return """
import os, sys, time
from drivetrain.runtime.board import Notice
notice = Notice()
notice.listen()
end = time.monotonic() + (300 if os.environ["RANK"] == "0" else 0)
while not notice.heard and time.monotonic() < end:
    time.sleep(0.01)
print(notice.heard, flush=True)
"""


@pytest.fixture
def noticed() -> str:
    """Return the text of a script that saves when it hears a notice that its worker does not hear.

    Rank 0 does so two seconds before rank 1.
    """
    return """
import os, signal, subprocess, sys, time
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: heard.append(number))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
rank = os.environ["RANK"]
open(f"ready-{rank}", "w").close()
while not heard:
    time.sleep(0.01)
time.sleep(0.5 + 2 * int(rank))
assert worker.poll() is None, "the worker heard the notice"
worker.kill()
open(f"saved-{rank}", "w").write(str(heard))
sys.exit(75)
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    """Run commands here; afterwards no process and no temporary file of theirs may be left."""
    # Of a short path: a loader's workers open Unix sockets there (names of 107 bytes at most).
    with tempfile.TemporaryDirectory(prefix="dt-") as temporary:
        yield from _used(Sandbox(tmp_path, Path(temporary)))


def _used(box: Sandbox) -> Iterator[Sandbox]:
    yield box
    left = box.alive()
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"
    # torch itself makes an empty cache folder when an optimizer is built.
    files = [path for path in box.temporary.iterdir() if not path.name.startswith("torchinductor")]
    assert files == []


class CommandLine:
    """Runs a command that starts nothing inside this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code, the output and the errors."""
        code = run(arguments)
        return code, *self._capsys.readouterr()

    def output(self, *arguments: str) -> str:
        """Return the output of a command that ends well."""
        code, out, err = self(*arguments)
        assert code == 0, (arguments, err)
        return out

    def error(self, *arguments: str, code: int = 2, lines: int | None = None) -> str:
        """Return what is said of a command that is refused; it has no output."""
        found, out, err = self(*arguments)
        assert (found, out) == (code, ""), (arguments, err)
        assert lines in (None, err.count("\n")), (arguments, err)
        return err


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """Run a command here; it finds the distribution that is not ours."""
    monkeypatch.syspath_prepend(str(THIRD_PARTY))
    monkeypatch.chdir(tmp_path)
    return CommandLine(capsys)


@pytest.fixture
def completed(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Return what the command offers bash for the last of these words."""

    def offered(words: str) -> str:
        monkeypatch.setenv("_DRIVETRAIN_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", f"drivetrain {words}")
        monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
        with pytest.raises(SystemExit):
            command()
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return offered
