"""Islands of ranks that a description of hardware declares: levels, bytes, results, bad input."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, RankMismatchError
from drivetrain.hardware.catalog import hardware_text
from drivetrain.links.islands import declared_islands, in_islands
from drivetrain.runtime.world import World
from drivetrain_launch.cli import run

WIDTH, ROWS, STEPS = 64, 8, 3
FILE = "islands.yaml"
"""Relative: each rank has a folder of its own, and all ranks must have equal configurations."""


def describe(folder: Path, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the description of this rank, and go to its folder."""
    own = folder / os.environ.get("RANK", "0")
    own.mkdir(exist_ok=True)
    text = hardware_text("cpu")
    assert text.count("  devices: 1\n") == 1
    (own / FILE).write_text(text.replace("  devices: 1\n", f"  devices: {devices}\n"))
    monkeypatch.chdir(own)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def loss_of(each: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return each(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()


def alone(ranks: int) -> dict[str, Tensor]:
    """Train in one process on the batches of all ranks."""
    each = model()
    optimizer = SGD(each.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(each, step, rank) / ranks).backward()
        optimizer.step()
    return each.state_dict()


def trained(strategy: object, **links: object) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the parameters after training, and the bytes of a step by axis, as promised, too."""
    config = {"strategy": strategy, "links": links}
    accelerator = Accelerator(config=config, cpu=True)
    each = model()
    each, optimizer = accelerator.prepare(each, SGD(each.parameters(), lr=0.5))
    before: dict[tuple[str, str], int] = {}
    for step in range(STEPS):
        before = dict(accelerator.traffic.sent())
        optimizer.zero_grad()
        accelerator.backward(loss_of(each, step, accelerator.process_index))
        optimizer.step()
    after = accelerator.traffic.sent()
    found = {key: count - before.get(key, 0) for key, count in after.items()}
    held = accelerator.strategy_of(each)
    promised = type(held).cost(held.config, ModelSpec.of(model(), states=0), held.run).sent
    if accelerator.is_main_process:
        assert {key: count for key, count in found.items() if count} == promised
    state = {name: value.clone() for name, value in accelerator.get_state_dict(each).items()}
    accelerator.free_memory()
    by_axis: dict[str, int] = {}
    for (axis, _), count in found.items():
        by_axis[axis] = by_axis.get(axis, 0) + count
    return state, by_axis


def numel() -> int:
    return sum(each.numel() for each in model().parameters())


def check_exact(state: dict[str, Tensor]) -> None:
    for name, value in alone(4).items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(4)
def test_ranks_reduce_inside_of_declared_islands_and_then_between_them(tmp_path, monkeypatch):
    rank = int(os.environ["RANK"])
    monkeypatch.setenv("GROUP_RANK", str(rank // 2))
    by_names, sent_by_names = trained("ddp")
    describe(tmp_path, 2, monkeypatch)
    for host in (0, rank):  # all ranks on one host, or each rank with a host name of its own
        monkeypatch.setenv("GROUP_RANK", str(host))
        state, sent = trained("ddp", hardware=FILE)
        check_exact(state)
        # Two islands: each sends 2 (H-1)/H = 1 times all gradients, half of them by each rank, and
        # a flag for each of the 4 parameters.
        assert sent["dp.far"] == 4 * (numel() + 4) // 2
        assert sent == sent_by_names
        assert all(torch.equal(state[name], value) for name, value in by_names.items())


@pytest.mark.ranks(4)
def test_strategies_and_methods_follow_the_islands(tmp_path, monkeypatch):
    describe(tmp_path, 2, monkeypatch)
    state, sent = trained("zero2", hardware=FILE)
    check_exact(state)
    assert sent["dp.far"] == 4 * numel() // 2
    # Of gradients alone: parameters stay inside of islands.
    state, sent = trained({"name": "fsdp", "sharding": "hybrid"}, hardware=FILE)
    check_exact(state)
    assert sent["dp.far"] == 4 * numel() // 2
    state, rounded = trained("ddp", hardware=FILE, far={"gradients": "bf16"})
    assert rounded["dp.far"] < 0.6 * sent["dp.far"]
    auto = {"hardware": FILE, "far": "auto", "allow": "rounding", "mbit_per_s": 1.0}
    auto["backward_s"] = 1e-9  # which hides nothing
    _, chosen = trained("ddp", **auto)
    assert chosen == rounded
    describe(tmp_path, 4, monkeypatch)
    state, sent = trained("ddp", hardware=FILE, far={"gradients": "bf16"})
    check_exact(state)
    assert set(sent) == {"dp"}, "all ranks are on one island"


@pytest.mark.ranks(4)
def test_all_ranks_refuse_islands_that_do_not_fit_or_on_which_they_disagree(tmp_path, monkeypatch):
    rank = int(os.environ["RANK"])

    def start() -> None:
        Accelerator(config={"strategy": "ddp", "links": {"hardware": FILE}}, cpu=True)

    describe(tmp_path, 3, monkeypatch)
    with pytest.raises(ConfigError, match=r"host.devices divides, found 4 ranks and host.devices"):
        start()
    describe(tmp_path, 2 if rank < 3 else 4, monkeypatch)
    with pytest.raises(RankMismatchError, match="found 2 on rank 0 and 4 on rank 3"):
        start()
    if rank == 2:
        Path(FILE).unlink()
    with pytest.raises(ConfigError, match=r"links.hardware: rank 2: cannot read the hardware file"):
        start()


def hosts_of(names: str, size: int) -> tuple[str, ...]:
    return in_islands(World(size=len(names), hosts=tuple(names)), size).islands


def test_an_island_holds_whole_hosts_or_a_part_of_one_host():
    first, second = "island 0", "island 1"
    assert hosts_of("aaaa", 2) == hosts_of("aabb", 2) == hosts_of("abcd", 2)
    assert hosts_of("abcd", 2) == (first, first, second, second)
    assert hosts_of("aabb", 4) == (first,) * 4
    for names, size in (("aaabbb", 2), ("abab", 2), ("aaab", 2)):
        with pytest.raises(ConfigError, match="expected islands that lie on one host"):
            hosts_of(names, size)


def test_hosts_stay_hosts_for_all_that_is_not_about_links():
    world = declared_islands(World(size=1, hosts=("a",)), FILE)
    assert world.islands == ("a",), "one rank has no links, and reads no description"
    world = in_islands(World(size=4, local_size=4, hosts=("a",) * 4), 2)
    assert (world.spans_hosts, world.island_size, world.local_size) == (True, 2, 4)
    assert set(world.hosts) == {"a"}


def test_a_dry_run_and_a_check_know_the_islands(tmp_path, monkeypatch, capsys):
    words = ["launch", "--dry-run", "--cpu", "--nproc-per-node", "4"]
    words += ["--set", "strategy.name=ddp", "--set", f"links.hardware={FILE}"]
    describe(tmp_path, 2, monkeypatch)
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "all_reduce over dp.far" in said or "reduce_scatter over dp.far" in said
    assert "island 1" in said
    describe(tmp_path, 3, monkeypatch)
    assert run(words) == 2
    assert "found 4 ranks and host.devices: 3" in capsys.readouterr().err
    Path("run.yaml").write_text(
        "strategy: ddp\nlaunch: {nproc_per_node: 4}\nlinks: {hardware: " + FILE + "}\n"
    )
    assert run(["config", "check", "run.yaml"]) == 2
    assert "found 4 ranks and host.devices: 3" in capsys.readouterr().err
    Path(FILE).unlink()  # it may lie on the hosts of the run
    assert run(["config", "check", "run.yaml"]) == 0
