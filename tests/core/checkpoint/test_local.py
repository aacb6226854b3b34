"""Checkpoints in the memory of hosts: copies, losses, damage and room; each rank is a host here."""

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import local
from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.local import FilesToCome, MemoryCheckpoints, SpreadCheckpoint, announced
from drivetrain.checkpoint.manifest import FileRecord, HashedFile, write_bytes
from drivetrain.checkpoint.saving import Background
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World, memory_kept_mark
from drivetrain.shards import Shard

SIZE = 24


def world_of_hosts() -> World:
    """Return the world of this test, with a host for each rank."""
    world = World.discover(cpu=True)
    return replace(world, hosts=tuple(f"{rank}@n{rank}" for rank in range(world.size)))


def contents(world: World, step: int) -> Contents:
    """Return a vector divided over the ranks, and a state."""
    each = SIZE // world.size
    first, last = world.rank * each, (world.rank + 1) * each
    values = torch.arange(SIZE, dtype=torch.float32) + 100 * step
    shard = Shard("w", "", values[first:last], (SIZE,), Part((first,), (each,)))
    return Contents(
        models=[[shard]],
        state={"steps": [step], "iteration": 0},
        rank_state={"r": torch.tensor([world.rank])},
        encoded={"object-00000.encoded": b""} if world.is_main else {},
        parameters=[{"w"}],
    )


class Run:
    """The checkpoints of a run whose ranks have a folder each."""

    def __init__(self, root: Path, world: World, every: int = 2) -> None:
        self.root, self.world = root, world
        self.folder = root / world.hosts[world.rank].partition("@")[2]
        self.folder.mkdir(exist_ok=True)
        self.background = Background(world)
        self.said = ""
        self.memory = MemoryCheckpoints(self.folder, every, world, self.background)

    def save(self, step: int) -> bool:
        """Save a step, in this thread."""
        group = self.background.group()
        begun = self.memory.begin(step)
        staged = begun.stage(contents(self.world, step), torch.clone)
        return begun.finish(staged, group)

    def opened(self, stored: int | None = None) -> tuple[int, torch.Tensor] | None:
        """Return the step and the values of the newest checkpoint, as a later attempt finds it."""
        meet(self.world)
        later = Run(self.root, self.world)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            reader = later.memory.open_newest(stored, hashed=True)
        self.said = said.getvalue()
        later.background.close()
        if reader is None:
            later.memory.clear()
            return None
        with reader:
            assert reader.rank_state(0)["r"].item() == 0
            return reader.state["steps"][0], reader.model(0).read("w").clone()


def meet(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def saved(root: Path, *steps: int) -> tuple[World, Run]:
    """Return the world and the ended run of a rank that has saved these steps."""
    world = world_of_hosts()
    run = Run(root, world)
    for step in steps:
        assert run.save(step)
    run.background.close()
    return world, run


def folders(run: Run) -> list[str]:
    return sorted(path.name for path in run.folder.iterdir())


def holds(found, step):
    return found[0] == step and torch.equal(found[1], torch.arange(float(SIZE)) + 100 * step)


@pytest.mark.ranks(3)
def test_each_host_has_its_own_files_those_of_another_and_the_common_ones(tmp_path):
    world, run = saved(tmp_path, 2, 4, 6)
    assert folders(run) == ["checkpoint_1", "checkpoint_2"]
    names = {path.name for path in (run.folder / "checkpoint_2").iterdir()}
    owners = {world.rank, (world.rank - 1) % 3}
    common = {"manifest.json", "state.json", "object-00000.encoded"}
    files = {f"model-0-weights-0000{r}-of-00003.safetensors" for r in owners}
    assert names == files | {f"rank-0000{r}.safetensors" for r in owners} | common
    assert holds(run.opened(), 6)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("lost", [[1], [1, 2]], ids=["one", "two in a row"])
def test_a_lost_host_gets_all_files_from_the_others(tmp_path, lost):
    world, run = saved(tmp_path, 2, 4)
    if world.rank in lost:
        shutil.rmtree(run.folder)
    if len(lost) == 1:
        assert holds(run.opened(stored=2), 4)
        assert folders(run) == ["checkpoint_1"]
        return
    assert run.opened(stored=1) is None
    assert folders(run) == []  # useless, and in the way of the next save


@pytest.mark.ranks(2)
def test_storage_counts_only_if_it_is_newer_and_one_host_has_all(tmp_path):
    world, run = saved(tmp_path, 4)
    assert holds(run.opened(stored=4), 4)
    left = Run(tmp_path, World(hosts=(world.hosts[world.rank],)))  # each rank is a run of its own
    assert holds(left.opened(), 4)
    assert run.opened(stored=5) is None


@pytest.mark.ranks(3)
def test_a_kill_between_two_commits_falls_back_to_the_one_before(tmp_path):
    world, run = saved(tmp_path, 2, 4)
    if world.rank != 1:  # killed before their commits
        shutil.rmtree(run.folder / "checkpoint_1")
    assert holds(run.opened(), 2)
    _, again = saved(tmp_path, 4)
    assert holds(again.opened(), 4)


@pytest.mark.ranks(2)
def test_a_save_that_fails_anywhere_leaves_nothing_anywhere(tmp_path, monkeypatch):
    world = world_of_hosts()
    run = Run(tmp_path, world)
    run.save(2)
    for failing in ("_copy", "_spread", "_commit"):
        real = getattr(local.MemorySave, failing)

        def fails(save, *given, real=real, failing=failing):
            if failing != "_commit" or world.is_main:
                real(save, *given)
            if world.rank == 1:
                raise OSError(28, "No space left on device", "x")

        with monkeypatch.context() as patch:
            patch.setattr(local.MemorySave, failing, fails)
            with pytest.raises(CheckpointError, match="rank 1: No space left on device"):
                run.save(4)
        assert folders(run) == ["checkpoint_0"], failing
    run.background.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("both", [False, True], ids=["one", "both"])
def test_damaged_files_come_from_the_other_host_or_the_checkpoint_is_left_out(tmp_path, both):
    world, run = saved(tmp_path, 2, 4)
    if both or world.rank == 0:
        path = run.folder / "checkpoint_1" / "model-0-weights-00001-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert holds(run.opened(), 2 if both else 4)
    if world.is_main and both:
        assert "model-0-weights-00001-of-00002.safetensors changed" in run.said


def damage_arrivals(monkeypatch, names):
    """Change the first byte of files of these names that arrive at this rank."""
    real = local.ArrivingFile.add

    def add(arrival, chunk):
        path = arrival._file.path
        if path.parent.name in names and path.name.startswith("model-"):
            chunk[0] ^= 1
        real(arrival, chunk)

    monkeypatch.setattr(local.ArrivingFile, "add", add)


@pytest.mark.ranks(2)
def test_damage_on_the_way_falls_back_to_the_checkpoint_before(tmp_path, monkeypatch):
    world, run = saved(tmp_path, 2, 4)
    if world.rank == 1:
        shutil.rmtree(run.folder)
        damage_arrivals(monkeypatch, {"checkpoint_1"})
    assert holds(run.opened(), 2)
    assert folders(run) == ["checkpoint_0"]
    if world.is_main:
        assert "after its way from another host" in run.said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("why", ["room", "damage"])
@pytest.mark.parametrize("stored", [None, 1])
def test_what_cannot_be_read_stays_where_nothing_is_in_storage(tmp_path, monkeypatch, why, stored):
    world, run = saved(tmp_path, 2, 4)
    kept = {path.name: path.read_bytes() for path in (run.folder / "checkpoint_1").iterdir()}
    if world.rank == 1:
        shutil.rmtree(run.folder)
        if why == "room":
            monkeypatch.setattr(local.MemoryHomes, "room", lambda _: 100)
        else:
            damage_arrivals(monkeypatch, {"checkpoint_0", "checkpoint_1"})
    if stored is not None:
        assert run.opened(stored) is None
        assert folders(run) == []
        return
    places = ", ".join(f"{tmp_path}/n{rank}/checkpoint_1 of n{rank}" for rank in range(2))
    expected = f"checkpoint_1 of step 4 .* none in storage.*{places}"
    with pytest.raises(CheckpointError, match=expected):
        run.opened()
    assert memory_kept_mark(run.folder).exists()  # the launcher leaves the folder, too
    names = {path.name for path in run.folder.glob("checkpoint_*")}
    assert names == (set() if world.rank == 1 else {"checkpoint_0", "checkpoint_1"})
    if world.rank == 0:
        found = {path.name: path.read_bytes() for path in (run.folder / "checkpoint_1").iterdir()}
        assert found == kept
        with open_checkpoint(run.folder / "checkpoint_1", World()) as reader:  # as the message says
            assert reader.state["steps"] == [4]


@pytest.mark.ranks(2)
def test_no_room_is_an_error_on_all_ranks_before_a_byte_and_uses_a_number(tmp_path, monkeypatch):
    world = world_of_hosts()
    run = Run(tmp_path, world)
    needed = 2 * SIZE * 4  # two checkpoints, of one rank and of its neighbor
    with monkeypatch.context() as patch:
        patch.setattr(local.MemoryHomes, "room", lambda _: needed - 1 if world.rank else 2**30)
        with pytest.raises(CheckpointError, match=rf"rank 1: expected {needed} bytes .* of n1"):
            run.save(2)
    assert folders(run) == []
    assert not run.memory.is_due(3)
    run.save(4)
    assert folders(run) == ["checkpoint_1"]
    run.background.close()


@pytest.mark.ranks(2)
def test_weights_that_are_not_finite_are_not_kept(tmp_path):
    world, run = saved(tmp_path, 2)
    begun = run.memory.begin(4)
    bad = contents(world, 4)
    if world.rank:
        bad.models[0][0].tensor[0] = float("nan")
    assert not begun.finish(begun.stage(bad, torch.clone), run.background.group())
    assert folders(run) == ["checkpoint_0"]
    assert holds(run.opened(), 2)
    run.background.close()


@pytest.mark.ranks(2)
def test_files_cross_in_chunks_both_ways_at_once(tmp_path, monkeypatch):
    world = world_of_hosts()
    monkeypatch.setattr(local, "CHUNK_BYTES", 8)
    background = Background(world)
    for size in (0, 1, 40, 41):
        folder = tmp_path / f"{world.rank}-{size}"
        folder.mkdir()
        record = write_bytes(folder / f"from-{world.rank}", bytes(range(size)))
        plan = [local.FileTransfer(r, 1 - r, f"from-{r}", record) for r in range(2)]
        local.exchange(plan, world.rank, folder, background.group())
        assert (folder / f"from-{1 - world.rank}").read_bytes() == bytes(range(size))
    background.close()


def test_homes_and_neighbors_of_hosts_with_different_numbers_of_ranks(monkeypatch):
    monkeypatch.setattr(local, "gather", lambda world, mine, *_, **__: [mine] * world.size)
    world = World(size=5, hosts=("0@n0",) * 3 + ("1@n1",) * 2)
    found = local.MemoryHomes(Path("/of/one/path"), world)
    assert [home.ranks for home in found.all] == [(0, 1, 2), (3, 4)]
    assert [found.neighbor(rank) for rank in range(5)] == [3, 4, 3, 0, 1]


def one_host() -> World:
    return replace(World(), hosts=("0@n0",))


def test_a_file_cut_short_is_not_announced(tmp_path):
    run = Run(tmp_path, one_host())
    run.save(2)
    (found,) = announced(run.folder)
    assert set(found.held) == set(found.files)
    path = run.folder / "checkpoint_0" / "model-0-weights-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert set(announced(run.folder)[0].held) == set(found.files) - {path.name}


def test_files_that_are_here_make_no_room_for_those_to_come(tmp_path, monkeypatch):
    run = Run(tmp_path, one_host())
    for step in (2, 4):
        run.save(step)
    other = sum(path.stat().st_size for path in (run.folder / "checkpoint_0").iterdir())
    monkeypatch.setattr(local.MemoryHomes, "room", lambda _: 0)
    mine = local.MemoryHomes(run.folder, run.world)
    for size in (other, other + 1):
        record = FileRecord(size, "")
        spread = SpreadCheckpoint("checkpoint_1", 4, {"new": record}, (frozenset({"old"}),))
        coming = FilesToCome(spread, [local.FileTransfer(0, 0, "new", record)], mine)
        with pytest.raises(CheckpointError) if size > other else contextlib.nullcontext():
            coming.check_room()


def test_a_file_that_fails_on_arrival_is_closed(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HashedFile, "write", fail)
    opened = Path("/proc/self/fd")
    failures, before = [], len(list(opened.iterdir()))
    arrival = local.ArrivingFile(tmp_path / "f", FileRecord(2, ""), failures)
    for chunk in (b"a", b"b"):
        arrival.add(memoryview(chunk))
    arrival.end()
    assert [error.errno for error in failures] == [28]
    assert len(list(opened.iterdir())) == before


def test_a_checkpoint_is_due_after_the_first_step_and_then_after_each_few(tmp_path):
    run = Run(tmp_path, one_host(), every=5)
    due = []
    for step in range(3, 17):
        if run.memory.is_due(step):
            run.memory.begin(step)
            due.append(step)
    assert due == [3, 5, 10, 15]
    assert not Run(tmp_path, run.world).memory.is_due(0)


@pytest.mark.ranks(2)
def test_the_first_call_makes_the_buffers_and_the_second_saves(tmp_path):
    world = world_of_hosts()
    run, saved = Run(tmp_path, world), []
    for step in (1, 2):
        assert run.memory.is_due(step)
        assert list(run.folder.iterdir()) == []
        run.memory.save(step, lambda: contents(world, step), saved.append)  # noqa: B023 - called now
    run.background.wait()
    assert saved == ([{"steps": [2], "iteration": 0}] if world.is_main else [])
    assert not run.memory.is_due(3)
    assert holds(run.opened(), 2)
    run.background.close()


@pytest.mark.ranks(2)
def test_buffers_for_which_one_rank_has_no_memory_are_an_error_on_all(tmp_path, monkeypatch):
    world = world_of_hosts()
    run = Run(tmp_path, world)
    if world.rank:

        def none(kinds):
            raise RuntimeError("no memory")

        monkeypatch.setattr(run.background.buffers, "reserve", none)
    with pytest.raises(CheckpointError, match=r"cannot make buffers .*rank 1: \w+: no memory"):
        run.memory.save(1, lambda: contents(world, 1), lambda state: None)
    run.background.close()
