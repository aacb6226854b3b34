"""Real ranks that stand still under the launcher: who is named, how soon, and what follows."""

import json
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from drivetrain_launch.ranks.channel import SECRET_VARIABLE
from forked_programs import Started

pytestmark = pytest.mark.alone

SHORTEST_S = 2.0
"""A wait of the test that counts as a hang; the launcher's own is longer."""

LAUNCHER = f"""
import sys
from drivetrain_launch.ranks import watch as diagnosis
diagnosis.SHORTEST_S = diagnosis.START_S = diagnosis.SHORTEST_REST_S = {SHORTEST_S}
from drivetrain_launch.ranks import watch
watch.SHOW_S = 0.5
from drivetrain_launch.cli import main
sys.argv[0] = "drivetrain"
main()
"""

SCRIPT = """
import ctypes, os, signal, sys, time
import torch
from drivetrain import Accelerator
kind = sys.argv[1]
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if kind in ("data", "tokenized") and accelerator.process_index == 1 and index >= 6:
            global slept
            if not slept:
                slept = True
                time.sleep(5.0)  # the slow sample
        return torch.ones(4) * index
slept = False
accelerator = Accelerator(cpu=True)
with accelerator.main_process_first():
    if kind == "tokenized" and accelerator.is_main_process:
        time.sleep(4.0)  # the others wait before training
model = torch.nn.Linear(4, 2)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1),
    torch.utils.data.DataLoader(Rows(), batch_size=2),
)
for step, batch in enumerate(loader):
    if step == 1 and accelerator.process_index == 1:
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "lock":
            ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock
    if step == 2 and kind == "alone":
        time.sleep(5.0)  # the long work
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
time.sleep(1.0)  # until the launcher has looked once more
print("done", accelerator.process_index)
"""


def start(folder: Path, kind: str, *options: str) -> Started:
    (folder / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = ("launcher.py", "launch", "--cpu", *options, "train.py", kind)
    return Started(*words, folder=folder, env={SECRET_VARIABLE: "a secret of sixteen bytes"})


def launch(folder: Path, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
    with start(folder, kind, "--nproc-per-node", "2", *options) as run:
        return run.wait()


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["data", "tokenized"])
def test_a_slow_sample_is_named_and_the_run_goes_on(tmp_path, kind):
    done = launch(tmp_path, kind, "--log-dir", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    sentence = (
        r"rank 1 on \S+ has been in the data loader for \d+ s "
        rf"\(train\.py:{line_of('the slow')}\); rank 0 waits for it in all_reduce \d+ '.*' "
        rf"at train\.py:{line_of('backward(model')}"
    )
    assert re.search(sentence, done.stderr), done.stderr
    assert "stacks of rank 1 on" in done.stderr
    assert "the ranks go on" in done.stderr
    # A busy machine may be slow elsewhere, too, for as long as counts as a hang here.
    files = (tmp_path / "logs").rglob("hang-*.json")
    told = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    of_rank_1 = [each for each in told if each["culprits"] == [1] and each["kind"] == "absent"]
    views = [view for each in of_rank_1 for view in each["ranks"] if view["rank"] == 1]
    assert "data" in [view["section"] for view in views], told


@pytest.mark.exhaustive
def test_a_rank_that_nobody_waits_for_is_named_and_the_run_goes_on(tmp_path):
    with start(tmp_path, "alone", "--nproc-per-node", "1", "--on-hang", "stop") as run:
        done = run.wait()
    said = done.stderr
    assert done.returncode == 0, said
    line = line_of("the long work")
    assert re.search(rf"rank 0 on \S+ has been in .* for \d+ s \(train\.py:{line}\); no rank", said)
    assert "the ranks go on" in said


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stop", r"rank 1 on \S+, pid \d+, was stopped by a signal"),
        pytest.param(
            "lock",
            r"rank 1 on \S+ has been in .* for \d+ s \(train\.py:{line}\)",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_on_hang_stop_ends_the_run(tmp_path, kind, words):
    done = launch(tmp_path, kind, "--on-hang", "stop")
    assert done.returncode == 5, done.stderr
    assert re.search(words.format(line=line_of("sleep(600)")), done.stderr), done.stderr
    assert "rank 1 failed first" in done.stderr


@pytest.mark.exhaustive
def test_host_0_names_a_rank_of_another_host_with_its_line(tmp_path, port):
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                start(tmp_path, "data", "--nproc-per-node", "1", "--nnodes", "2",
                      "--node-rank", str(index), "--rdzv-endpoint", f"127.0.0.1:{port}")
            )
            for index in range(2)
        ]  # fmt: skip
        done = [host.wait() for host in hosts]
    said = [host.stderr for host in done]
    assert [host.returncode for host in done] == [0, 0], said
    sentence = rf"rank 1 on \S+ has been in the data loader .*train\.py:{line_of('the slow')}\)"
    assert re.search(sentence, said[0]), said[0]
    assert "stacks of rank 1" in said[0]
    assert "has been in" not in said[1]  # one launcher judges
