"""Islands that a description of hardware declares: whole hosts or parts of one, and bad input."""

import os
from pathlib import Path

import pytest

from drivetrain import Accelerator
from drivetrain.compression.communicator import declared_islands, in_islands
from drivetrain.errors import ConfigError, RankMismatchError
from drivetrain.hardware.description import hardware_text
from drivetrain.runtime.world import World

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
