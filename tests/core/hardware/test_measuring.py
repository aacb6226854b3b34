"""Measured descriptions of hardware: levels of links, scatter, and files that plans read."""

import itertools
import re
import time
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from drivetrain import Accelerator
from drivetrain.collectives import connect
from drivetrain.errors import ConfigError
from drivetrain.hardware import measure as links
from drivetrain.hardware import measuring
from drivetrain.hardware.description import Hardware, load_hardware
from drivetrain.hardware.measure import LOUD, Clock, levels_of, median_of
from drivetrain.hardware.measuring import described, file_text
from drivetrain.hardware.prices import HardwarePrices
from drivetrain.planner.layout import read_layout
from drivetrain.planner.search import Predictor, Task
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain.simulator.step import HostPass, TierCopy
from drivetrain.simulator.transformer import GptShape

RING = {
    "latency_us": 20.0, "hop_us": 40.0, "gigabytes_per_second": 1.5,
    "shares": [[1e5, 0.3], [1e7, 1.0]],
}  # fmt: skip


def text(rings, device=None):
    device = device or load_hardware("cpu").model_dump(mode="json")
    values = described("mine", "the test", device, rings=rings, disk=RING, beside={"slowdown": 0.2})
    return file_text(values, ["a note"])


def test_what_was_measured_is_a_description(tmp_path, monkeypatch):
    monkeypatch.setitem(links.SIDES, "cpu", (2, 4))
    monkeypatch.setitem(links.BYTES, "cpu", (64, 128))
    monkeypatch.setattr(Clock, "time", lambda *_, **__: 1e-6)
    path = tmp_path / "mine.yaml"
    device = links.measure_device(Clock(torch.device("cpu")), "the test", 2)
    path.write_text(text([RING, RING], device))
    found = load_hardware(str(path))
    assert found.device.teraflops == dict.fromkeys(("no", "bf16", "fp16"), 0.001)
    assert found.device.products.shares == [(16.0, 0.125), (128.0, 1.0)]
    assert found.links.inside.gigabytes_per_second == 1.5
    assert found.host.devices == 2
    assert path.read_text().startswith("# a note\n")


def test_a_loaded_machine_has_fewer_rounds(monkeypatch):
    assert list(measuring._rounds(5, bool)) == [0, 1, 2, 3, 4]
    assert list(measuring._rounds(5, lambda late: True)) == [0], "another rank is late"
    monkeypatch.setattr(measuring, "ENOUGH_S", -1.0)
    assert list(measuring._rounds(5, bool)) == [0]


def test_kernels_of_a_kind_are_looked_at_once_for_all_rounds(monkeypatch):
    looks, look = [], links.traced_model
    monkeypatch.setattr(links, "traced_model", lambda *given: looks.append(given) or look(*given))
    prices = HardwarePrices(load_hardware("cpu"), {}, "no")
    case = links._Case("tiny", nn.GELU, (1, 64))
    for kind in ("gelu", "gelu backward") * 2:
        assert links._planned(prices, case, kind).starts > 0
    assert len(looks) == 1


def test_what_offload_takes_is_measured_and_predicted(tmp_path, monkeypatch):
    """An update of the processor, and copies of a bus, cost in a plan what they took here."""
    monkeypatch.setattr(links, "UPDATED", 2**16)
    monkeypatch.setattr(links, "BUS", (2**20, 2**24))
    clock, ranks = Clock(torch.device("cpu")), 2
    device = load_hardware("cpu").model_dump(mode="json")
    device["host"] |= {"devices": ranks}
    device["host"]["memory"] = {"source": "the test", **links.measure_update(clock, ranks)}
    device["bus"] = links.measure_bus(clock)
    path = tmp_path / "mine.yaml"
    path.write_text(text([RING, None], device))
    hardware = load_hardware(str(path))
    prices = HardwarePrices(hardware, {}, "bf16")
    seconds, _ = median_of(clock.samples["updates in host memory"])
    assert prices.price(HostPass(2**16 * 30)) == pytest.approx(seconds, rel=0.01)
    ways = [f"copies of {2**24} bytes to the {there}" for there in ("device", "host")]
    slower = max(median_of(clock.samples[way])[0] for way in ways)
    assert prices.price(TierCopy("bus", 2**24)) == pytest.approx(slower, rel=0.01)
    layout = "dp=2,micro_batch=1,data_parallel=zero2,offload=cpu,precision=bf16"
    task = Task(GptShape(layers=2, hidden=64, heads=4, seq=16, vocab=128), 2, hardware, 1, 2)
    planned = Predictor(task).predict(read_layout(layout))
    assert planned.stored_most("host") > 0


def test_shipped_numbers_are_published_or_estimates():
    """Each section says which; what was measured is in files of ``hardware measure``."""

    def sources(section):
        for key, value in section.items():
            if key == "source":
                yield value
            elif isinstance(value, dict):
                yield from sources(value)

    for name in ("h100", "h100-pcie", "h200"):
        said = list(sources(load_hardware(name).model_dump(mode="json")))
        assert len(said) >= 9
        for source in said:
            assert re.search("data sheet|estimate|SC 2023|NCCL|each level says its own", source), (
                source
            )
            assert not source.startswith("measured")


def test_links_that_nobody_measured_say_so():
    links_of = yaml.safe_load(text([RING, None]))["links"]
    assert links_of["inside"]["source"] == "the test"
    assert links_of["between"]["source"].startswith("NOT MEASURED")
    links_of = yaml.safe_load(text([None, RING]))["links"]
    assert links_of["inside"]["source"].startswith("NOT MEASURED")
    assert links_of["between"]["source"] == "the test"
    hardware = Hardware.model_validate(yaml.safe_load(text([None, RING])))
    hardware.check_measured(2, 1)
    with pytest.raises(ConfigError, match="links inside of a host were not measured"):
        hardware.check_measured(1, 2)
    hardware = Hardware.model_validate(yaml.safe_load(text([RING, None])))
    hardware.check_measured(1, 2)
    with pytest.raises(ConfigError, match="links between hosts were not measured"):
        hardware.check_measured(2, 1)


def test_levels_follow_from_the_matrix(monkeypatch):
    """Two hosts of two devices on a network a tenth as fast; pairs inside scatter a little."""
    rates = {
        (one, other): 9.0 + one if one // 2 == other // 2 else 0.9 + 0.1 * one
        for one, other in itertools.combinations(range(4), 2)
    }
    assert levels_of(rates, 4) == [[(0, 1), (2, 3)], [(0, 1, 2, 3)]]
    assert levels_of({(0, 1): 1.0}, 2) == [[(0, 1)]]

    monkeypatch.setattr(measuring, "connect", lambda axis, *_: axis.ranks)
    for hosts, lines in (
        ("aaa", [((0, 1, 2), 1), None]),
        ("abc", [None, ((0, 1, 2), 1)]),
        ("aabbcc", [((0, 1), 1), ((0, 2, 4), 2)]),
    ):
        world = World(size=len(hosts), hosts=tuple(hosts))
        mesh = Mesh.plan({"dp": world.size}, world)
        monkeypatch.setattr(mesh, "start_levels", mesh.levels)
        assert measuring._lines(SimpleNamespace(world=world, mesh=mesh, traffic=None)) == lines


def test_rounds_are_pooled_and_scatter_noted_by_name():
    # Three slow rounds of seven say more than the one quick round at their end.
    clock = Clock(torch.device("cpu"))
    for milliseconds in (4, 4, 4, 1):
        seconds = clock.time("work", lambda ms=milliseconds: time.sleep(ms / 1e3))
    assert seconds > 3.9e-3
    assert median_of([3.0, 1.0, 2.0])[0] == 2.0

    times = itertools.chain([0.0] * 2, itertools.cycle([0.001, 0.004]))
    clock = Clock(torch.device("cpu"))
    clock.time("steady", lambda: time.sleep(0.005))
    clock.time("jumpy", lambda: time.sleep(next(times)))
    assert "jumpy" in clock.loud
    assert clock.loud["jumpy"] > LOUD
    assert median_of([1.0, 1.0, 1.0]) == (1.0, 0)
    assert median_of([1.0, 9.0, 1.0, 0.1, 1.0])[1] == 0  # without the two extremes


class Line:
    """Four ranks of a line, whose messages are over at once."""

    size, axis = 4, SimpleNamespace(name="dp")

    def all_reduce(self, tensor, **_):
        return self

    all_gather = reduce_scatter = all_reduce

    def wait(self):
        """Nothing is under way."""


def test_figures_follow_from_the_times_of_links_and_disks(monkeypatch):
    """Rings: 20 us, 20/3 us a hop, 1 GB/s on each of two lines. Times not named are 1 s."""
    monkeypatch.setattr(links, "RINGS", (2**14, 2**16))
    monkeypatch.setattr(links, "BUS", (10**6, 10**7))
    ring = {2**14: 60e-6 + 6 * 2**14 / 0.5e9, 2**16: 60e-6 + 6 * 2**16 / 1e9}
    times = {
        "the smallest ring on dp": 60e-6,
        "the smallest all_gather on dp": 40e-6,
        **{f"rings of {size} bytes on dp": seconds for size, seconds in ring.items()},
        **{f"all_gather of {size} bytes on dp": each / 4 for size, each in ring.items()},
        "a ring alone": 0.4,
        "a training alone": 0.1,
        "4 trainings alone": 0.5,
        "4 trainings beside a ring": 1.1,
        "a smallest ring alone": 1e-3,
        "short trainings alone": 8e-3,
        "short trainings beside smallest rings": 32e-3,
        "files of 100000 bytes": 1e-3,
        "files of 1000000 bytes": 4e-3,
        "files of 32000000 bytes": 0.16,
        **{f"copies of 8 bytes to the {there}": 1e-3 for there in ("device", "host")},
        **{f"copies of {10**6} bytes to the {there}": 3e-3 for there in ("device", "host")},
        **{f"copies of {10**7} bytes to the {there}": 11e-3 for there in ("device", "host")},
        "starts of kernels": links.STARTS * 2e-6,
        "starts with autograd": links.STARTS * 8e-6,
    }
    monkeypatch.setattr(Clock, "time", lambda self, name, work, **_: times.get(name, 1.0))
    clock = Clock(torch.device("cpu"))
    found = links.measure_ring(clock, Line(), 1e9, beside=2)
    assert (found["latency_us"], found["hop_us"], found["gigabytes_per_second"]) == (20, 6.67, 2)
    assert found["shares"] == [[2**14, 0.5], [2**16, 1]]
    assert found["operations"]["all_gather"] == 0.5
    assert links.measure_beside(clock, Line(), 1e9) == {"in_training": 1.5, "slowdown": 1}
    times["4 trainings beside a ring"] = 0.7
    assert links.measure_beside(clock, Line(), 1e9) == {"in_training": 1, "slowdown": 0.5}
    assert links.measure_waiting(clock, Line()) == pytest.approx(2e-3)
    disk = links.measure_disk(clock)
    assert disk["gigabytes_per_second"] == 0.25
    assert [share for _, share in disk["shares"]] == [0.4, 1, 1]
    bus = links.measure_bus(clock)
    assert (bus["latency_us"], bus["gigabytes_per_second"]) == (1000, 1)
    assert [share for _, share in bus["shares"]] == [0.5, 1]
    assert links._starts(clock) == pytest.approx((2e-6, 4e-6))


def test_notes_of_a_measurement_name_the_loudest_and_sides_of_squares():
    notes = measuring._notes([{"a": 0.5}, {"a": 0.3}], {}, 1, [(2.0 * 64**3, 0.5)])
    loud, squares, _ = notes
    assert loud.startswith("WARNING: a scattered by 50%")
    assert squares.endswith("by rows: 64: 50%")


@pytest.mark.ranks(2)
def test_pairs_and_rings_of_two_ranks():
    links.RINGS, links.LARGE = (2**12, 2**14, 2**16), 2**16
    accelerator = Accelerator(cpu=True)
    world = accelerator.world
    clock = Clock(world.device)
    pairs = links.measure_pairs(clock, world)
    assert set(pairs) == {(0, 1)}
    if world.rank == 1:  # every rank has the figures of the last one of a pair
        small, large = (median_of(each)[0] / 2 for each in clock.samples.values())
        assert pairs[0, 1] == (small, links.LARGE / max(large - small, 1e-9))
    ranks = connect(accelerator.mesh["dp"], accelerator.traffic, world.device, world.timeout)
    ring = links.measure_ring(clock, ranks, pairs[0, 1][1])
    # Another line, such as that between hosts, has timings of its own.
    assert {name.rpartition(" ")[2] for name in clock.samples if "ring" in name} == {"dp"}
    shares = [share for _, share in ring["shares"]]
    assert max(shares) == 1.0
    assert ring["gigabytes_per_second"] > 0
    assert 0 <= links.measure_beside(clock, ranks, pairs[0, 1][1])["slowdown"] <= 1
    assert links.measure_waiting(clock, ranks) >= 0
    assert len(clock.samples["short trainings alone"]) == len(clock.samples["a ring alone"])
    ranks.close()


def test_a_file_with_another_ending_is_refused(tmp_path):
    from drivetrain_launch.cli import run

    assert run(["hardware", "measure", str(tmp_path / "mine.json")]) == ConfigError.exit_code
    assert run(["hardware", "measure", str(tmp_path / "no" / "m.yaml")]) == ConfigError.exit_code
