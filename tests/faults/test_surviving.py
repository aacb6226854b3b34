"""Runs on two hosts lose ranks, hosts and links at random, and end as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from emulated_hosts import Host, Hosts, why_not
from waits import PATIENCE_S

pytestmark = [pytest.mark.alone, pytest.mark.exhaustive]

SAVE_EVERY = 3
ENDLESS = 10_000
AHEAD = 20
"""Steps until the last one: two seconds, in which the test writes its number."""
TRAIN = f"""
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
from drivetrain import Accelerator, ProjectConfiguration
folder, steps, pause, dropout = Path(sys.argv[1]), *map(float, sys.argv[2:5])
last = folder / "last step"
def steps_in_all():
    return int(last.read_text()) if last.exists() else steps
every = int(sys.argv[5]) if sys.argv[5:] else {SAVE_EVERY}
torch.manual_seed(0)
project = ProjectConfiguration(
    project_dir=str(folder / "run"), automatic_checkpoint_naming=True, total_limit=2
)
accelerator = Accelerator(project_config=project)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
rows = torch.randn(2 * 2 * 10, 8)  # 10 steps of an epoch
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(rows), batch_size=2, shuffle=True
)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
accelerator.resume()
while optimizer.steps < steps_in_all():
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        time.sleep(pause)
        if not accelerator.sync_gradients:
            continue
        line = dict(
            step=optimizer.steps, ranks=accelerator.num_processes, time=time.time(),
            attempt=os.environ["TORCHELASTIC_RESTART_COUNT"],
        )
        if accelerator.is_main_process:
            with (folder / "steps").open("a") as file:
                file.write(json.dumps(line) + "\\n")
        if optimizer.steps % every == 0:
            accelerator.save_state()
        if optimizer.steps >= steps_in_all():
            break
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(weights, folder / "weights.part")
    (folder / "weights.part").rename(folder / "weights.pt")
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    own_memory = "mount -t tmpfs tmpfs /dev/shm"
    with Hosts(tmp_path_factory.mktemp("hosts"), setup=own_memory) as made:
        yield made


class Training:
    """A training on emulated hosts, each with one launcher and one rank.

    Args:
        hosts: all of them.
        folder: for its results.
        options: of the launchers.
        arguments: of the script, without the folder.
    """

    def __init__(
        self, hosts: Hosts, folder: Path, options: tuple[str, ...], arguments: tuple[object, ...]
    ) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        self.hosts, self.folder = hosts, folder
        self._options = options
        self._arguments = [str(folder), *map(str, arguments)]
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        """Start the launcher of a host, whose link is up again."""
        host = self.hosts[index]
        host.mend()
        if index in self.launchers:
            self.launchers[index].wait()
        command = [
            *(sys.executable, "-m", "drivetrain_launch", "launch", "--cpu"),
            *("--nproc-per-node", "1", "--node-rank", str(index)),
            *("--rdzv-endpoint", f"{self.hosts[0].address}:29611", "--max-restarts", "90"),
            *(*self._options, str(self.folder / "train.py"), *self._arguments),
        ]
        kept = {name: text for name, text in os.environ.items() if "TORCHELASTIC" not in name}
        environment = kept | {"DRIVETRAIN_SECRET": "a secret of tests", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"host-{index}.log").open("ab") as log:
            self.launchers[index] = subprocess.Popen(
                host.command(command, folder=self.folder),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def steps(self) -> list[dict[str, float]]:
        """Return the steps so far, those that were lost and taken again included."""
        path = self.folder / "steps"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def last(self) -> dict[str, float]:
        found = self.steps()
        return found[-1] if found else {"step": 0, "ranks": 0, "time": 0.0}

    def end_soon(self) -> int:
        """Set a last step that no rank has reached, and return its number."""
        number = int(self.last()["step"]) + AHEAD
        (self.folder / "last step.part").write_text(str(number))
        (self.folder / "last step.part").rename(self.folder / "last step")
        assert self.last()["step"] < number - 1, "the ranks may not have read the same number"
        return number

    def wait(self, what: str, reached: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        end = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > end:
                pytest.fail(f"not {what} after {seconds:g} s:\n{self.said()}")
            time.sleep(0.05)

    def said(self) -> str:
        logs = sorted(self.folder.glob("host-*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    def saved(self) -> list[str]:
        """Return the whole checkpoints."""
        manifests = self.folder.glob("run/checkpoints/checkpoint_*/manifest.json")
        return sorted(path.parent.name for path in manifests)

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "weights.pt", weights_only=True)

    def end(self) -> None:
        for launcher in self.launchers.values():
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def ranks_on(host: Host) -> list[int]:
    """Return the processes of ranks on a host."""
    found = []
    for pid in host.processes():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"drivetrain_launch.ranks.worker" in words:
                found.append(pid)
    return found


@pytest.fixture
def training(hosts, tmp_path) -> Iterator[Callable[..., Training]]:
    with ExitStack() as stack:

        def start(folder: str, options: tuple[str, ...], arguments: tuple[object, ...]) -> Training:
            begun = Training(hosts, tmp_path / folder, options, arguments)
            stack.callback(begun.end)
            for index in range(hosts.count):
                begun.start(index)
            return begun

        yield start


def keep_running(run: Training, lost: dict[int, float]) -> bool:
    """Start launchers again as a scheduler would, hosts after an outage; whether all have ended."""
    for index, launcher in run.launchers.items():
        if launcher.poll() not in (None, 0) and time.monotonic() > lost.get(index, 0.0):
            run.start(index)
    return all(launcher.poll() == 0 for launcher in run.launchers.values())


def came_back(run: Training) -> bool:
    """Start launchers that have ended again; whether both hosts train."""
    assert not keep_running(run, {}), run.said()
    return run.last()["ranks"] == 2


def kill_at_random(run: Training, chance: random.Random, kinds: list[str]) -> None:
    """Kill a rank or lose a host after some steps, again and again; then wait for the end."""
    lost: dict[int, float] = {}
    for kind in kinds:
        saved, more = run.saved(), chance.randrange(SAVE_EVERY)
        seen: list[int] = []

        def is_time(saved: list[str] = saved, more: int = more, seen: list[int] = seen) -> bool:
            keep_running(run, lost)
            if run.saved()[-1:] != saved[-1:]:  # three attempts without a checkpoint end the run
                seen.append(len(run.steps()))
            return bool(seen) and len(run.steps()) >= seen[0] + more

        run.wait(f"at the next kill ({kind})", is_time)
        index = chance.randrange(run.hosts.count)
        time.sleep(chance.uniform(0.0, 0.3))
        if kind == "rank":
            for pid in ranks_on(run.hosts[index]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            run.hosts[index].lose()
            lost[index] = time.monotonic() + chance.uniform(1.0, 12.0)
    run.wait("at the end", lambda: keep_running(run, lost), 2 * PATIENCE_S)


MEMORY = ("--set", "checkpoint.local=memory", "--set", f"checkpoint.local_every={SAVE_EVERY}")
NEVER = 1000


def lose_with_its_memory(host: Host) -> None:
    host.lose()
    host.run(["sh", "-c", "rm -rf /dev/shm/drivetrain-memory-*"])


def in_memory(host: Host) -> list[str]:
    """Return the files of launchers in the memory of a host."""
    _, text = host.run(["find", "/dev/shm", "-name", "drivetrain-memory-*"])
    return text.split()


def test_the_state_of_a_lost_host_is_in_the_memory_of_another(training):
    calm = training("calm", ("--nnodes", "2"), (24, 0, 0.0, NEVER))
    calm.wait("at the end", lambda: keep_running(calm, {}))
    back = training("back", ("--nnodes", "2", *MEMORY), (24, 0.2, 0.0, NEVER))
    back.wait("past some saves in memory", lambda: back.last()["step"] >= 8)
    assert all(len(in_memory(host)) == 1 for host in back.hosts)
    lose_with_its_memory(back.hosts[1])
    back.start(1)
    back.wait("at the end", lambda: keep_running(back, {}))
    assert all(line["step"] > 6 for line in back.steps() if line["attempt"] == "1"), back.said()
    for name, values in calm.weights().items():
        assert torch.equal(values, back.weights()[name]), f"{name}\n{back.said()}"

    options = ("--nnodes", "1:2", "--resume", "auto", *MEMORY)
    fewer = training("fewer", options, (24, 0.2, 0.0, NEVER))
    fewer.wait("past some saves in memory", lambda: fewer.last()["step"] >= 8)
    lose_with_its_memory(fewer.hosts[1])
    fewer.wait("at the end on one host", lambda: fewer.launchers[0].poll() == 0)
    alone = [line for line in fewer.steps() if line["ranks"] == 1]
    assert alone[0]["step"] > 6, fewer.said()
    assert "the global batch stays at 2 micro-batches per step: 2 on each of 1" in fewer.said()
    for name, values in calm.weights().items():
        torch.testing.assert_close(fewer.weights()[name], values)

    for run in (back, fewer):
        assert "out of the memory of the hosts (nothing is in storage)" in run.said()
        assert run.saved() == []
        assert in_memory(run.hosts[0]) == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [3, 20])
def test_random_kills_of_ranks_and_hosts_change_no_bit(training, kills):
    seed = int(os.environ.get("DRIVETRAIN_TEST_SEED", random.randrange(2**32)))
    print(f"seed {seed}: set DRIVETRAIN_TEST_SEED to see the same kills again")
    chance = random.Random(seed)
    steps = 12 * (kills + 1)
    calm = training("calm", ("--nnodes", "2"), (steps, 0, 0.1))
    calm.wait("at the end", lambda: keep_running(calm, {}))
    kinds = ["rank", "host", *chance.choices(["rank", "host"], k=kills - 2)]
    chance.shuffle(kinds)
    run = training("disturbed", ("--nnodes", "2"), (steps, 0.1, 0.1))
    kill_at_random(run, chance, kinds)
    taken = [line["step"] for line in run.steps()]
    assert len(taken) > steps, run.said()  # some steps were lost, and taken again
    assert sorted(set(taken)) == list(range(1, steps + 1))
    for name, values in calm.weights().items():
        assert torch.equal(values, run.weights()[name]), f"{name}, {kinds}\n{run.said()}"
    assert not [pid for host in run.hosts for pid in ranks_on(host)]


def test_a_run_goes_on_without_a_lost_host_and_lets_it_in_again(training, took):
    options = ("--nnodes", "1:2", "--resume", "auto")
    run = training("elastic", options, (ENDLESS, 0.1, 0.0))
    run.wait("training on both hosts", lambda: run.last()["step"] > SAVE_EVERY)
    assert run.last()["ranks"] == 2
    run.hosts[1].lose()
    begin = time.time()
    run.wait("training on one host", lambda: run.last()["ranks"] == 1)
    alone = [line for line in run.steps() if line["ranks"] == 1]
    took("F22", "with restarts, the next step", alone[0]["time"] - begin)
    assert "the global batch stays at 2 micro-batches per step: 2 on each of 1" in run.said()
    run.start(1)
    run.wait("training on both hosts again", lambda: run.last()["ranks"] == 2)
    grown = run.steps()
    last = max(index for index, line in enumerate(grown) if line["ranks"] == 1)
    assert grown[last + 1]["step"] == 1 + grown[last]["step"]
    steps = run.end_soon()
    run.wait("at the end", lambda: keep_running(run, {}))
    said = run.said()
    assert "host 1 (n2) came: the ranks are asked to save" in said
    assert "the ranks saved, and start again on more hosts" in said
    assert "restarts left" in said
    assert "88 restarts left" not in said  # the host that came has used none
    calm = training("calm", ("--nnodes", "2"), (steps, 0, 0.0))
    calm.wait("at the end", lambda: keep_running(calm, {}))
    for name, values in calm.weights().items():
        torch.testing.assert_close(run.weights()[name], values)


@pytest.mark.parametrize(
    ("row", "loss"), [("F22", Host.lose), ("F23", Host.cut)], ids=["host", "link"]
)
def test_local_steps_go_on_with_the_host_that_is_left(training, took, row, loss):
    rounds = ("--set", "strategy.name=local", "--set", f"strategy.every={2 * SAVE_EVERY - 1}")
    run = training("local", ("--nnodes", "1:2", *rounds), (ENDLESS, 0.1, 0.0))
    run.wait("in the middle of a round", lambda: len(run.saved()) and run.last()["step"] % 5 == 2)
    assert run.last()["ranks"] == 2
    loss(run.hosts[1])
    begin = time.time()
    run.wait("training on one host", lambda: run.last()["ranks"] == 1)
    assert "host 1 (n2) is lost" in run.said()
    run.wait("without ranks on the lost host", lambda: not ranks_on(run.hosts[1]), 60)
    assert run.last()["ranks"] == 1  # whose side has no host 0, and trains no further
    alone = [line for line in run.steps() if line["ranks"] == 1]
    before = [line["step"] for line in run.steps() if line["ranks"] == 2]
    first = alone[0]["step"]
    assert 1 < first <= before[-1] + 1 < first + SAVE_EVERY + 1, run.said()
    took(row, "with restarts under `local`, the next step", alone[0]["time"] - begin)
    assert "local: one worker of 1 ranks trains as Ddp" in run.said()
    run.hosts[1].mend()  # a launcher behind a link finds host 0 again; a lost one is started again
    run.wait("training on both hosts again", lambda: came_back(run))
    run.end_soon()
    run.wait("at the end", lambda: keep_running(run, {}))
    assert all(torch.isfinite(values).all() for values in run.weights().values())
