"""What lies where when stores keep state: bytes by hand, the table, and what does not fit."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Rprop

from drivetrain.collectives import Route
from drivetrain.compression.methods import LinkMethods
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.cost import ModelSpec, Traffic
from drivetrain.errors import PreflightError
from drivetrain.memory import group_rooms
from drivetrain.parallel.estimate import Estimate, Lines
from drivetrain.parallel.layout import UnitLayout, arrange
from drivetrain.parallel.options import OffloadOptions
from drivetrain.registry import strategies
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run
from drivetrain_offload import tiers as tiers_module
from drivetrain_offload.tiers import (
    TierChoice,
    TierPlan,
    Tiers,
    announce_tiers,
    held,
    plan_of,
    tiers_of,
)

FULL = Precision.of("no")
LOW = Precision.of("bf16", param=torch.bfloat16)


def plan(*, precision=FULL, sharded=False, ranks=2, lent=80, frozen=False, states=2):
    """A matrix of 1000 parameters, of which each of two ranks owns 500."""
    model = nn.Linear(50, 20, bias=False).requires_grad_(not frozen)
    spec = ModelSpec.of(model, states=states)
    flat = arrange(spec.parameters, precision, ranks, "flat")
    return TierPlan(
        model=spec,
        estimate=estimate([UnitLayout("", (flat,), sharded)], precision, rank=1),
        states={} if frozen else {"weight": states},
        lent=lent,
    )


def estimate(units, precision=FULL, rank=0):
    axis = Axis(name="dp", size=2, rank=rank, ranks=(0, 1), hosts=("host", "host"))
    return Estimate(units, precision, Lines(Route(axis), Route(axis)))


def rounded(found):
    return {tier: dict(kinds) for tier, kinds in found.items() if kinds}


def test_bytes_by_hand():
    low, shares = plan(precision=LOW), plan(precision=LOW, sharded=True)
    lent, unit = {"buffers of gradients": 80}, {"largest unit in use": 2000}
    whole = {"parameters": 4000, "gradients": 2000, **lent}
    halves = {"parameters": 2000, "gradients": 1000, **lent}
    states, masters = {"optimizer": 4000}, {"masters": 2000}
    moved = {"gradients": 2000, **masters, **states}
    on_disk = TierChoice(device="host", optimizer="disk")
    late = TierChoice(device="host", optimizer="disk", delayed=True)
    in_memory = TierChoice(device="host", optimizer="host")
    early = replace(in_memory, in_backward=True)
    beside = TierChoice(device="device", optimizer="host")
    stores = TierChoice(device="device", optimizer="disk", parameters="disk")
    parts = {"parameters": 1000, **masters, **states}
    for given, homes, expected in (
        # On a CPU parameters of the masters' dtype are stepped where they are.
        (plan(), on_disk, {"host": whole, "disk": states}),
        (low, on_disk, {"host": halves, "disk": states | masters}),
        (plan(), late, {"host": {**whole, "late updates": 4000}, "disk": states | masters}),
        # A share that is stepped in memory is kept once, in fp32; a unit in use is in bf16.
        (shares, in_memory, {"host": {**whole, "parameters": 2000, **states, **unit}}),
        (plan(), early, {"host": {**whole, **states, **masters}}),
        # Beside an accelerator the host has masters of all.
        (
            plan(),
            beside,
            {"device": {"parameters": 4000, **lent}, "host": moved | {"values on their way": 2000}},
        ),
        (
            shares,
            stores,
            {
                "device": lent | unit,
                "host": {"gradients": 1000, "values on their way": 1000},
                "disk": parts,
            },
        ),
    ):
        assert rounded(held(given, homes)) == expected
    frozen = plan(precision=LOW, sharded=True, frozen=True)
    assert rounded(held(frozen, stores))["disk"] == {"parameters": 1000}
    # Parameters that stay whole are in no store, nor is what lies in no unit.
    homes = TierChoice(device="device", optimizer="host", parameters="disk")
    assert held(plan(), homes)["device"]["parameters"] == 4000
    assert not held(plan(), homes)["disk"]
    model = nn.Sequential(nn.Linear(50, 20, bias=False), nn.BatchNorm1d(20))
    loose = replace(plan(lent=0), model=ModelSpec.of(model), estimate=estimate([]))
    assert rounded(held(loose, beside)) == {"device": {"parameters": 4160, "buffers": 168}}
    # Whole gradients are on the device too.
    found = held(plan(lent=0), beside)
    assert (found["device"]["gradients"], found["host"]["gradients"]) == (4000, 2000)
    found = held(plan(lent=0), in_memory)
    assert found["host"]["gradients"] == 4000


def test_a_part_of_the_state_in_whole_units():
    """Three units of 250, 500 and 250 parameters, in the order of backward."""
    shapes = [(25, 10), (50, 10), (25, 10)]
    model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])
    specs = ModelSpec.of(model).parameters
    units = [UnitLayout("", (arrange([spec], FULL, 1, "flat"),), False) for spec in specs]
    states = {spec.name: 2 for spec in specs}
    given = replace(
        plan(lent=0), model=ModelSpec.of(model), estimate=estimate(units), states=states
    )
    moved_of = {0.0: (0, 0), 0.001: (250, 1), 0.25: (250, 1), 0.26: (750, 2), 1.0: (1000, 3)}
    for ratio, (moved, parameters) in moved_of.items():
        found = held(given, TierChoice(device="device", optimizer="host", ratio=ratio))
        assert found["host"]["optimizer"] == 8 * moved, ratio
        # There Adam counts the steps of each parameter, in four bytes.
        assert found["device"]["optimizer"] == 8 * (1000 - moved) + 4 * (3 - parameters)
        assert found["device"]["parameters"] == 4000


def test_errors_of_links_count_beside_stores_too():
    """What int8 keeps of gradients between two hosts lies on the device, with any optimizer."""
    kind = strategies().load("zero2")
    world = World(size=4, local_size=2, hosts=("a", "a", "b", "b"))
    mesh = Mesh.plan({"dp": 4}, world)
    model = ModelSpec.of(nn.Linear(64, 64))

    def gradients(method, **offload):
        links = LinkMethods.configured(LinksConfig(far=FarConfig(gradients=method)))
        config = kind.Config(offload=OffloadOptions(**offload))
        run = replace(run_of(world, mesh), links=links)
        return kind.cost(config, model, run).held["gradients"]

    kept = gradients("int8") - gradients("exact")
    assert gradients("int8", optimizer="cpu") - gradients("exact", optimizer="cpu") == kept > 0


# --- what optimizers keep ---


def run_of(world, mesh):
    return Run(world=world, mesh=mesh, precision=FULL, accumulation=1, traffic=Traffic())


ALONE = run_of(World(), Mesh.plan({"dp": 1}, World()))


def test_states_of_optimizers():
    for make, states in (
        (AdamW, 2),
        (lambda p: Adam(p, amsgrad=True), 3),
        (lambda p: SGD(p, lr=0.1), 0),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 1),
        (Adagrad, 1),
        (Rprop, 2),
    ):
        model = nn.Linear(3, 2)
        optimizer = make([model.weight])
        found = plan_of(model, [optimizer], estimate([]), lent=0)
        assert found.states == {"weight": states}  # the bias is in no optimizer
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        kept = [t for t in state.values() if torch.is_tensor(t) and t.shape == model.weight.shape]
        assert len(kept) == states


# --- the table ---

GIB = 2**30


def tiers(**room):
    needed = {
        "device": Counter(),
        "host": Counter({"optimizer": 8 * GIB, "gradients": GIB // 2}),
        "disk": Counter({"masters": 4 * GIB}),
    }
    return Tiers(needed=needed, room=room, sharing=2)


def test_the_table():
    assert tiers(host=64 * GIB).describe().splitlines() == [
        "bytes of one rank                 host     disk",
        "optimizer                      8.0 GiB        -",
        "gradients                    512.0 MiB        -",
        "masters                              -  4.0 GiB",
        "together, 2 ranks of a host   17.0 GiB  8.0 GiB",
        "there is                      64.0 GiB  unknown",
    ]


def test_what_does_not_fit_is_refused_with_the_numbers_and_a_way_out():
    (message,) = tiers(host=17 * GIB - 1, disk=8 * GIB).shortages()
    assert "host memory: expected at least 17.0 GiB (optimizer 8.0 GiB, gradients 512.0" in message
    assert "each of 2 ranks" in message
    assert "such as nvme" in message
    (message,) = tiers(host=17 * GIB, disk=8 * GIB - 1).shortages()
    assert message.startswith("the disk: expected at least 8.0 GiB")
    assert "offload.path" in message
    needed = {"device": Counter(), "host": Counter(gradients=GIB), "disk": Counter(optimizer=GIB)}
    (message,) = Tiers(needed=needed, room={"host": GIB}, sharing=2).shortages()
    assert "offload.params, too" in message
    assert not tiers(host=17 * GIB, disk=8 * GIB).shortages()
    assert not tiers().shortages()  # nothing known is nothing to refuse


STORES = {
    name: SimpleNamespace(working_bytes=1000, in_memory=name == "memory")
    for name in ("memory", "file")
}


def test_homes():
    options = OffloadOptions(optimizer="memory", params="file", ratio=0.5, delayed=True)
    accelerated = World(device=torch.device("cuda", 0))
    assert tiers_of(options, STORES, accelerated) == TierChoice(
        device="device", optimizer="host", parameters="disk", ratio=0.5, delayed=True
    )
    plain = OffloadOptions(optimizer="file", params="memory")  # where they lie anyway
    assert tiers_of(plain, STORES, World()) == TierChoice(device="host", optimizer="disk")


def announced(monkeypatch, tmp_path, *, host, disk):
    """Prepare 4 MB of parameters with Adam and its state in a file."""
    monkeypatch.setattr(tiers_module, "host_room", lambda: host)
    monkeypatch.setattr(tiers_module, "disk_room", lambda path: disk)
    model = nn.Linear(1000, 1000, bias=False)
    flat = arrange(ModelSpec.of(model).parameters, FULL, 1, "flat")
    units = [UnitLayout("", (flat,), False)]
    given = plan_of(model, [AdamW(model.parameters())], estimate(units), lent=4_000_000)
    options = OffloadOptions(optimizer="file", path=str(tmp_path))
    announce_tiers(given, options, STORES, ALONE)


def test_the_table_is_announced_or_too_little_of_the_machine_refused(monkeypatch, tmp_path, caplog):
    """The model's own 4 MB are there already; gradients, their buffer and the store's are not."""
    caplog.set_level("INFO")
    announced(monkeypatch, tmp_path, host=8_001_000, disk=8_000_000)
    assert "what lies where" in caplog.text
    assert "optimizer" in caplog.text
    lacking = {"host memory": (8_000_999, 8_000_000), "the disk": (8_001_000, 7_999_999)}
    for what, (host, disk) in lacking.items():
        with pytest.raises(PreflightError, match=f"^{what}( of .*)?: expected at least"):
            announced(monkeypatch, tmp_path, host=host, disk=disk)


@pytest.mark.ranks(2)
def test_all_ranks_refuse_what_one_of_them_has_no_room_for():
    world = World.discover(cpu=True)
    run = run_of(world, Mesh.build({"dp": 2}, world))
    states = 10**9 if world.rank == 1 else 2  # 2 TB: more than there is
    options = OffloadOptions(optimizer="memory")
    with pytest.raises(PreflightError, match=r"host memory: expected at least .*1\.8 TiB"):
        announce_tiers(plan(states=states), options, STORES, run)
    announce_tiers(plan(), options, STORES, run)


# --- the machine ---


def group(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def test_limits_of_control_groups(tmp_path):
    """Every group above counts; what files in the page cache take can be given back."""
    root, member = tmp_path / "groups", tmp_path / "membership"
    member.write_text("0::/run/job\n")
    group(root / "run/job", memory__max="max", memory__current=70)
    stat = "anon 3\ninactive_file 5"
    group(root / "run", memory__max=100, memory__current=80, memory__stat=stat)
    assert list(group_rooms(root, member)) == [25]
    member.write_text("5:devices:/x\n4:memory:/seen/outside\n0::/\n")  # the first version
    group(
        root / "memory",
        memory__limit_in_bytes=100,
        memory__usage_in_bytes=120,
        memory__stat="inactive_file 1\ntotal_inactive_file 30",
    )
    assert list(group_rooms(root, member)) == [10]
    assert list(group_rooms(tmp_path, tmp_path / "none")) == []
