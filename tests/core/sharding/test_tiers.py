"""What lies where when stores keep state: bytes by hand, the table, and what does not fit."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Rprop

from drivetrain.collectives import Route
from drivetrain.cost import ModelSpec
from drivetrain.errors import PreflightError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.room import group_rooms
from drivetrain.runtime.world import World
from drivetrain.sharding.estimate import Estimate, Lines
from drivetrain.sharding.layout import UnitLayout, arrange
from drivetrain.sharding.options import OffloadOptions
from drivetrain.strategy import Run
from drivetrain.traffic import Traffic
from drivetrain_offload import tiers as tiers_module
from drivetrain_offload.tier_bytes import TierChoice, TierPlan, held
from drivetrain_offload.tiers import Tiers, announce_tiers, plan_of, tiers_of

FULL = Precision.of("no")
LOW = Precision.of("bf16", param=torch.bfloat16)
PARAMETERS = 1000  # of one matrix
STATES = {"weight": 2}


def plan(*, precision=FULL, sharded=False, ranks=2, lent=80, frozen=False, states=2):
    """A matrix of 1000 parameters, of which each of two ranks owns 500."""
    model = nn.Linear(50, 20, bias=False).requires_grad_(not frozen)
    spec = ModelSpec.of(model, states=states)
    flat = arrange(spec.parameters, precision, ranks, "flat")
    return TierPlan(
        model=spec,
        units=[UnitLayout("", (flat,), sharded)],
        precision=precision,
        rank=1,
        states={} if frozen else {"weight": states},
        lent=lent,
    )


def rounded(found):
    return {tier: dict(kinds) for tier, kinds in found.items() if kinds}


@pytest.mark.parametrize("precision", [FULL, LOW], ids=["full", "low"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("lent", [0, 80])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_stays_on_the_device_is_what_cost_says(precision, sharded, lent, frozen):
    given = plan(precision=precision, sharded=sharded, lent=lent, frozen=frozen)
    ours = held(given, TierChoice(device="device", optimizer="host", ratio=0.0))["device"]
    axis = Mesh.plan({"dp": 2}, World(rank=1, size=2, hosts=("a", "a")))["dp"]
    estimate = Estimate(given.units, precision, Lines(Route(axis), Route(axis)))
    theirs = estimate.held(given.model, lent_buffers=1 if lent else 0)
    steps = 0 if frozen else 4
    assert ours["parameters"] == theirs["parameters"]
    assert ours["masters"] == theirs["masters"]
    assert ours["optimizer"] == theirs["optimizer"] - steps
    gradients = theirs["gradients"] + (0 if lent else theirs["lent"])
    assert ours["gradients"] == gradients


def test_on_a_cpu_parameters_of_the_masters_dtype_are_stepped_where_they_are():
    found = held(plan(), TierChoice(device="host", optimizer="disk"))
    assert rounded(found) == {
        "host": {"parameters": 4000, "gradients": 2000, "buffers of gradients": 80},
        "disk": {"optimizer": 4000},
    }


def test_masters_of_another_dtype_lie_with_the_states():
    found = held(plan(precision=LOW), TierChoice(device="host", optimizer="disk"))
    assert rounded(found) == {
        "host": {"parameters": 2000, "gradients": 1000, "buffers of gradients": 80},
        "disk": {"optimizer": 4000, "masters": 2000},
    }


def test_a_share_that_is_stepped_in_memory_is_kept_once():
    found = held(plan(precision=LOW, sharded=True), TierChoice(device="host", optimizer="host"))
    assert rounded(found) == {
        "host": {
            "parameters": 2000,  # in fp32
            "gradients": 2000,
            "optimizer": 4000,
            "buffers of gradients": 80,
            "largest unit in use": 2000,  # in bf16
        }
    }


def test_on_an_accelerator_the_host_has_masters_of_all():
    found = held(plan(), TierChoice(device="device", optimizer="host"))
    assert rounded(found) == {
        "device": {"parameters": 4000, "buffers of gradients": 80},
        "host": {"masters": 2000, "optimizer": 4000, "gradients": 2000},
    }


def test_divided_parameters_in_a_store():
    homes = TierChoice(device="device", optimizer="disk", parameters="disk")
    assert rounded(held(plan(precision=LOW, sharded=True), homes)) == {
        "device": {"buffers of gradients": 80, "largest unit in use": 2000},
        "host": {"gradients": 1000},
        "disk": {"parameters": 1000, "masters": 2000, "optimizer": 4000},
    }
    frozen = plan(precision=LOW, sharded=True, frozen=True)
    assert rounded(held(frozen, homes))["disk"] == {"parameters": 1000}


def test_parameters_that_stay_whole_are_in_no_store():
    homes = TierChoice(device="device", optimizer="host", parameters="disk")
    assert held(plan(), homes)["device"]["parameters"] == 4000
    assert not held(plan(), homes)["disk"]


def test_whole_gradients_are_on_the_device_too():
    found = held(plan(lent=0), TierChoice(device="device", optimizer="host"))
    assert found["device"]["gradients"] == 4000
    assert found["host"]["gradients"] == 2000
    assert (
        held(plan(lent=0), TierChoice(device="host", optimizer="host"))["host"]["gradients"] == 4000
    )


@pytest.mark.parametrize(
    ("ratio", "chosen"), [(0.0, 0), (0.001, 1), (0.25, 1), (0.26, 2), (0.75, 2), (1.0, 3)]
)
def test_a_part_of_the_state_in_whole_units(ratio, chosen):
    """Three units of 250, 500 and 250 parameters, in the order of backward."""
    shapes = [(25, 10), (50, 10), (25, 10)]
    model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])
    specs = ModelSpec.of(model).parameters
    units = [UnitLayout("", (arrange([spec], FULL, 1, "flat"),), False) for spec in specs]
    states = {spec.name: 2 for spec in specs}
    given = TierPlan(
        model=ModelSpec.of(model), units=units, precision=FULL, rank=0, states=states, lent=0
    )
    found = held(given, TierChoice(device="device", optimizer="host", ratio=ratio))
    moved = sum([250, 500, 250][:chosen])
    assert found["host"]["optimizer"] == 8 * moved
    assert found["device"]["optimizer"] == 8 * (1000 - moved)
    assert found["device"]["parameters"] == 4000


def test_late_updates_take_memory_of_their_own():
    found = held(plan(), TierChoice(device="host", optimizer="disk", delayed=True))
    assert rounded(found) == {
        "host": {
            "parameters": 4000,
            "gradients": 2000,
            "late updates": 4000,
            "buffers of gradients": 80,
        },
        "disk": {"optimizer": 4000, "masters": 2000},
    }


def test_what_lies_in_no_unit_stays_on_the_device():
    model = nn.Sequential(nn.Linear(50, 20, bias=False), nn.BatchNorm1d(20))
    given = plan()
    both = TierPlan(
        model=ModelSpec.of(model),
        units=[],
        precision=FULL,
        rank=0,
        states=given.states,
        lent=0,
    )
    found = held(both, TierChoice(device="device", optimizer="host"))
    assert rounded(found) == {"device": {"parameters": 4160, "buffers": 168}}


# --- what optimizers keep ---


def run_of(world=None):
    world = world or World()
    return Run(
        world=world,
        mesh=Mesh.plan({"dp": world.size}, world),
        precision=FULL,
        accumulation=1,
        traffic=Traffic(),
    )


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (AdamW, 2),
        (lambda p: Adam(p, amsgrad=True), 3),
        (lambda p: SGD(p, lr=0.1), 0),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 1),
        (Adagrad, 1),
        (Rprop, 2),
    ],
    ids=["adamw", "amsgrad", "sgd", "momentum", "adagrad", "another"],
)
def test_states_of_optimizers(make, states):
    model = nn.Linear(3, 2)
    optimizer = make([model.weight])
    found = plan_of(model, [optimizer], [], run_of(), rank=0, lent=0)
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
        "bytes of one rank               host     disk",
        "optimizer                      8 GiB        -",
        "gradients                    512 MiB        -",
        "masters                            -    4 GiB",
        "together, 2 ranks of a host   17 GiB    8 GiB",
        "there is                      64 GiB  unknown",
    ]


def test_what_fits_passes():
    tiers(host=17 * GIB, disk=8 * GIB).check()
    tiers().check()  # nothing known is nothing to refuse


def test_what_does_not_fit_is_refused_with_the_numbers_and_a_way_out():
    with pytest.raises(PreflightError) as caught:
        tiers(host=17 * GIB - 1, disk=8 * GIB).check()
    message = str(caught.value)
    assert "host memory: expected at least 17 GiB (optimizer 8 GiB, gradients 512 MiB" in message
    assert "each of 2 ranks" in message
    assert "such as nvme" in message
    assert "the disk" not in message
    with pytest.raises(PreflightError, match=r"the disk: expected at least 8 GiB.*offload\.path"):
        tiers(host=17 * GIB, disk=8 * GIB - 1).check()


class Store:
    working_bytes = 1000

    def __init__(self, in_memory):
        self.in_memory = in_memory


STORES = {"memory": Store(True), "file": Store(False)}


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
    run = run_of()
    given = plan_of(model, [AdamW(model.parameters())], units, run, rank=0, lent=4_000_000)
    options = OffloadOptions(optimizer="file", path=str(tmp_path))
    announce_tiers(given, options, STORES, run)


def test_the_table_is_announced(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    announced(monkeypatch, tmp_path, host=8_001_000, disk=8_000_000)
    assert "what lies where" in caplog.text
    assert "optimizer" in caplog.text


@pytest.mark.parametrize(
    ("host", "disk", "what"),
    [(8_000_999, 8_000_000, "host memory"), (8_001_000, 7_999_999, "the disk")],
)
def test_too_little_of_the_machine(monkeypatch, tmp_path, host, disk, what):
    """The model's own 4 MB are there already; gradients, their buffer and the store's are not."""
    with pytest.raises(PreflightError, match=f"^{what}( of .*)?: expected at least"):
        announced(monkeypatch, tmp_path, host=host, disk=disk)


@pytest.mark.ranks(2)
def test_all_ranks_refuse_what_one_of_them_has_no_room_for():
    world = World.discover(cpu=True)
    run = Run(
        world=world,
        mesh=Mesh.build({"dp": 2}, world),
        precision=FULL,
        accumulation=1,
        traffic=Traffic(),
    )
    states = 10**9 if world.rank == 1 else 2  # 2 TB: more than there is
    options = OffloadOptions(optimizer="memory")
    with pytest.raises(PreflightError, match=r"host memory: expected at least .*1\.82 TiB"):
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
    group(
        root / "run",
        memory__max=100,
        memory__current=80,
        memory__stat="anon 3\ninactive_file 5",
    )
    assert list(group_rooms(root, member)) == [25]


def test_limits_of_control_groups_of_version_1(tmp_path):
    root, member = tmp_path / "groups", tmp_path / "membership"
    member.write_text("5:devices:/x\n4:memory:/seen/outside\n0::/\n")
    group(
        root / "memory",
        memory__limit_in_bytes=100,
        memory__usage_in_bytes=120,
        memory__stat="inactive_file 1\ntotal_inactive_file 30",
    )
    assert list(group_rooms(root, member)) == [10]


def test_no_control_groups(tmp_path):
    assert list(group_rooms(tmp_path, tmp_path / "none")) == []
