"""Kernels by kind: their prices, and figures that give the measured times back."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from drivetrain.data.examples import Candidate
from drivetrain.hardware import measure as measured
from drivetrain.hardware.description import KernelFacts, load_hardware
from drivetrain.hardware.measure import Clock
from drivetrain.hardware.prices import HardwarePrices
from drivetrain.simulator.step import (
    AxisPlace,
    Collective,
    MatrixProduct,
    MemoryPass,
    SimulatedTask,
    SimulatedUnit,
    TierCopy,
    axis_places,
    in_fp8,
)
from drivetrain.simulator.traced import traced_model

CPU = load_hardware("cpu")


def with_kernels(**found):
    """Return the description of processors with some kinds."""
    device = CPU.device.model_copy(
        update={"kernels": {kind: KernelFacts(times=times, start_us=start)
                            for kind, (times, start) in found.items()}}
    )  # fmt: skip
    return HardwarePrices(CPU.model_copy(update={"device": device}), {}, "no")


def test_kinds_have_factors_and_starts_of_their_own():
    plain, kinds = with_kernels(), with_kernels(gelu=(3.0, 40.0), update=(2.0, 7.0))
    gelu = MemoryPass(1e6, 1e6, kind="gelu")
    assert kinds.price(gelu) == pytest.approx(3 * plain.price(gelu))
    assert plain.start(gelu) == pytest.approx(15e-6)  # dispatch_us
    assert kinds.start(gelu) == pytest.approx(40e-6)
    update = MemoryPass(8e6, 0, kind="update", starts=8)
    assert kinds.start(update) == pytest.approx(56e-6)
    assert kinds.price(update) == pytest.approx(2 * plain.price(update))

    plain = with_kernels()
    prices = with_kernels(gelu=([(1e5, 4.0), (1e7, 2.0)], 0.0), linear=([(1e6, 1.0)], 0.0))
    for nbytes, times in ((1e3, 4.0), (1e5, 4.0), (1e6, 3.0), (1e9, 2.0)):
        gelu = MemoryPass(nbytes, nbytes, kind="gelu")
        assert prices.price(gelu) == pytest.approx(times * plain.price(gelu))
    several = MemoryPass(2e6, 2e6, launches=2, kind="gelu")
    assert prices.price(several) == pytest.approx(3 * plain.price(several))

    prices = with_kernels(gelu=(1.0, 40.0))
    gelu = MemoryPass(1e6, 1e6, kind="gelu")
    seconds = prices.seconds(SimulatedTask("a", (gelu, gelu)))
    assert seconds == pytest.approx(2 * (prices.price(gelu) + 40e-6))
    ahead = HardwarePrices(load_hardware("h100"), {}, "bf16")
    operations = (gelu,) * 3
    device = sum(map(ahead.price, operations))
    starts = sum(map(ahead.start, operations))
    assert ahead.seconds(SimulatedTask("a", operations)) == pytest.approx(max(device, starts))


def test_messages_wait_for_processors_and_share_links():
    links = CPU.links.model_copy(update={"in_training_us": 500.0})
    waits = CPU.model_copy(update={"links": links})
    message = Collective("dp", "all_reduce", 1e6)
    for together, more in ((2, 500e-6), (1, 0.0)):
        places = {"dp": AxisPlace(2, together, 1)}
        plain, inside = (HardwarePrices(each, places, "no") for each in (CPU, waits))
        assert inside.price(message) - plain.price(message) == pytest.approx(more)
        bare = inside.without_latency()
        halves = 2 * bare.price(Collective("dp", "all_reduce", 5e5))
        assert halves == pytest.approx(bare.price(message))
        assert halves < plain.price(message)
        gathered = bare.price(Collective("dp", "all_gather", 1e6))  # a sum passes all ranks twice
        assert bare.price(message) == pytest.approx(2 * gathered)

    message = Collective("dp", "all_reduce", 1e9)
    one, other = (
        HardwarePrices(CPU, {"dp": AxisPlace(4, 1, beside)}, "no").without_latency().price(message)
        for beside in (32, 64)
    )
    assert other == pytest.approx(2 * one)

    few, many = (
        HardwarePrices(CPU, {"dp": AxisPlace(8, together, 1)}, "no") for together in (4, 2)
    )
    tiny = Collective("dp", "all_reduce", 1)
    assert few.price(tiny) < many.price(tiny), "the more hosts, the more hops between them"


def test_axes_lie_on_hosts_the_closest_first():
    assert axis_places({"tp": 2, "dp": 4}, 4) == {
        "tp": AxisPlace(2, 2, 2), "dp": AxisPlace(4, 2, 2)
    }  # fmt: skip
    levels = axis_places({"dp": 8, "dp.near": 2, "dp.far": 4}, 4)
    assert (levels["dp.near"], levels["dp.far"]) == (AxisPlace(2, 2, 2), AxisPlace(4, 2, 2))


def test_a_host_shares_its_disk_and_a_device_its_tiles():
    one, four = (
        HardwarePrices(
            CPU.model_copy(update={"host": CPU.host.model_copy(update={"devices": devices})}),
            {},
            "no",
        ).price(TierCopy("disk", 1e9))
        for devices in (1, 4)
    )
    assert four == pytest.approx(4 * one, rel=0.01)
    h100 = load_hardware("h100")
    products = {"processors": 4, "tiles": [(16, 16, 1.0)], "depth": 0, "shares": [(1.0, 1.0)]}
    facts = {"products": h100.device.products.model_copy(update=products)}
    device = h100.device.model_copy(update={**facts, "teraflops": {"bf16": 1.0}})
    prices = HardwarePrices(h100.model_copy(update={"device": device}), {}, "bf16")
    waves = [prices.plain(MatrixProduct(16, 4096, 16 * tiles)) for tiles in (4, 5, 8)]
    assert waves[0] < waves[1] == waves[2], "five tiles on four processors take two rounds"
    assert 2 * waves[0] - waves[2] == pytest.approx(h100.device.launch_us * 1e-6)


def test_products_of_backward_and_those_in_fp8():
    # Inputs of a model get no gradient.
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    paper = traced_model(model, [Candidate("x", (torch.zeros(2, 8),), {})])
    units = paper.units(4, "none", fused=True)
    products = [each for u in units for each in u.backward if isinstance(each, MatrixProduct)]
    back = [(each.kind, each.for_weights) for each in products]
    assert sorted(back) == [("linear backward", False), *[("linear backward", True)] * 2]
    assert sum(len(unit.sizes) for unit in units) == 4
    left, right = MatrixProduct(2, 3, 5, divided="inner", weights=False).backward()
    assert left == MatrixProduct(2, 5, 3, divided="columns", weights=False)
    assert right == MatrixProduct(3, 2, 5, divided="rows", weights=False)
    products = [MatrixProduct(1, *sizes) for sizes in ((16, 32), (16, 24), (24, 16))]
    products.append(MatrixProduct(1, 16, 32, weights=False))
    unit = SimulatedUnit("a block", tuple(products), (), ())
    assert [each.narrow for each in in_fp8(unit, 16).forward] == [True, False, False, False]
    assert in_fp8(replace(unit, repeated=False), 16).narrow == ()


def test_measured_kinds_are_priced_as_they_were_measured(monkeypatch):
    """Forward of every kind takes 1, 4 and 10 ms by its size, and backward twice as long."""

    def timed(self, name, work, *, times=1, before=lambda: None):
        before()
        work()
        calls = measured.TINY_CALLS if name.startswith("small") else measured.KEPT_CALLS
        calls = measured.PARAMETERS if "update" in name else calls
        small = name.startswith("small") or "of 64 " in name
        each = 1e-3 if small else 4e-3 if name.startswith("middle") else 1e-2
        return each * (2 if "backward" in name else 1) * calls

    chosen = ("linear", "gelu", "convolution", "attention", "cross_entropy", "layer_norm")
    monkeypatch.setattr(measured, "_SUBJECTS", {name: measured._SUBJECTS[name] for name in chosen})
    monkeypatch.setattr(Clock, "time", timed)
    found = measured.measure_kernels(Clock(torch.device("cpu")), CPU)
    assert set(found) == {
        *chosen, *(f"{name} backward" for name in chosen), "update", "fused update"
    }  # fmt: skip
    kinds = {kind: (each["times"], each["start_us"]) for kind, each in found.items()}
    prices = with_kernels(**kinds)
    linear = MatrixProduct(512, 256, 1024, kind="linear")
    for operations, seconds in (
        ((MemoryPass(2.0 * 512 * 1024 * 4, 0, kind="gelu"),), 1e-2),
        ((MemoryPass(2.0 * 128 * 512 * 4, 0, kind="gelu"),), 4e-3),
        ((MatrixProduct(64, 256, 1024, kind="linear"),), 4e-3),
        ((linear,), 1e-2),
    ):
        assert prices.seconds(SimulatedTask("a", operations)) == pytest.approx(seconds, rel=0.01)
    assert prices.seconds(SimulatedTask("a", linear.backward())) == pytest.approx(2e-2, rel=0.02)
