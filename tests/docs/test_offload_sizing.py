"""The figures of the sizing guide are those of the table that ``prepare`` prints."""

import re
from pathlib import Path

import pytest
import torch

from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.registry import stores, strategies
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.sharding.options import OffloadOptions
from drivetrain.strategy import Run
from drivetrain.traffic import Traffic
from drivetrain_offload.disk_speed import ADAM_BYTES
from drivetrain_offload.tier_bytes import TierPlan, held
from drivetrain_offload.tiers import Tiers, tiers_of

PAGE = Path(__file__).parents[2] / "docs/offload-sizing.md"
BF16 = Precision.of("bf16", param=torch.bfloat16)
FP32 = Precision.of("no")
GIB = 2**30
ROOM = {"device": 24 * GIB - 600 * 2**20, "host": 60 * GIB, "disk": 900 * GIB}
BLOCKS, SIDE = 100, 1000
BETWEEN = ("buffers of gradients", "largest unit in use")
"""Kinds that the formulas leave out."""


def rows(header):
    """Return the cells of the table under a header line."""
    lines = PAGE.read_text().split(f"| {header} |\n", 1)[1].splitlines()[1:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def square_blocks():
    shape = (SIDE, SIDE)
    return [TensorSpec(f"layers.{i}.weight", shape, torch.float32, True) for i in range(BLOCKS)]


def llama_7b():
    """The shapes of Llama 2 7B."""
    width, wide, words = 4096, 11008, 32000
    shapes = {"model.embed_tokens.weight": (words, width)}
    for i in range(32):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (wide, width) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (width, wide)
        shapes[f"{layer}input_layernorm.weight"] = (width,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (width,)
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (words, width)}
    return [TensorSpec(name, shape, torch.float32, True) for name, shape in shapes.items()]


def tiers(specs, strategy, offload, precision, *, ranks=1, device="cuda"):
    """Return what one rank keeps with AdamW, as ``prepare`` finds it."""
    kind = strategies().load(strategy)
    world = World(
        size=ranks, local_size=ranks, hosts=("host",) * ranks, device=torch.device(device)
    )
    mesh = Mesh.plan({"dp": ranks}, world)
    run = Run(world=world, mesh=mesh, precision=precision, accumulation=1, traffic=Traffic())
    config = kind.Config(offload=OffloadOptions(**offload))
    model = ModelSpec(tuple(specs))
    units = kind.plan(config, model, run)
    lent = config.lent_buffers * kind.estimate(config, units, run).lent_bytes()
    states = {spec.name: 2 for spec in specs}
    plan = TierPlan(model=model, units=units, precision=precision, rank=0, states=states, lent=lent)
    named = {offload["optimizer"], offload.get("params", "")} - {""}
    opened = {name: stores().load(name) for name in named}
    needed = held(plan, tiers_of(config.offload, opened, world))
    needed["host"]["buffers of stores"] += opened[offload["optimizer"]].working_bytes
    return Tiers(needed=needed, room=ROOM, sharing=ranks)


def per_parameter(tier, **how):
    """Return the bytes of a tier per parameter of the model, as the formulas count."""
    specs = square_blocks()
    kinds = tiers(specs, **how).needed[tier]
    left_out = (*BETWEEN, "buffers of stores")
    total = sum(nbytes for kind, nbytes in kinds.items() if kind not in left_out)
    return total / (BLOCKS * SIDE * SIDE)


def formula(text, ranks):
    """Return the value of a sum such as ``2 + 14/N``."""
    terms = [re.fullmatch(r"(\d+)(/N)?", term).groups() for term in text.split(" + ")]
    return sum(int(number) / (ranks if divided else 1) for number, divided in terms)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_bytes_per_parameter(ranks, device):
    names = ("device", "host", "disk") if device == "cuda" else ("host", "disk")
    columns = [(precision, tier) for precision in ("bf16", "fp32") for tier in names]
    header = " | ".join(f"{precision}: {tier}" for precision, tier in columns)
    table = rows(f"strategy | `optimizer` | `params` | {header}")
    assert len(table) >= 6
    for which, optimizer, params, *cells in table:
        offload = {"optimizer": optimizer.strip("`"), "params": params.strip("`")}
        for strategy in re.findall(r"\w+", which):
            for (precision, tier), cell in zip(columns, cells, strict=True):
                found = per_parameter(
                    tier,
                    strategy=strategy,
                    offload=offload,
                    precision=BF16 if precision == "bf16" else FP32,
                    ranks=ranks,
                    device=device,
                )
                assert found == pytest.approx(formula(cell, ranks), rel=2e-3), (which, tier, cell)


@pytest.mark.parametrize(
    ("precision", "device", "more"),
    [(BF16, "cuda", 4), (FP32, "cuda", 8), (BF16, "cpu", 4), (FP32, "cpu", 12)],
)
def test_bytes_of_late_updates(precision, device, more):
    how = {"strategy": "zero3", "precision": precision, "device": device}
    offload = {"optimizer": "cpu"}
    late = per_parameter("host", offload={**offload, "delayed": True}, **how)
    assert late - per_parameter("host", offload=offload, **how) == pytest.approx(more)


def test_bytes_of_what_ratio_leaves_on_the_device():
    how = {"strategy": "zero2", "precision": BF16}
    half, all_of_it = (
        per_parameter("device", offload={"optimizer": "cpu", "ratio": ratio}, **how)
        for ratio in (0.5, 1.0)
    )
    assert half - all_of_it == pytest.approx(16 / 2, rel=0.05)  # in whole units


def test_printed_table_and_error():
    described = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(described) == 2
    fits = tiers(llama_7b(), "zero2", {"optimizer": "nvme"}, BF16)
    assert fits.describe() == described[0].rstrip()
    fits.check()
    (short,) = tiers(llama_7b(), "zero2", {"optimizer": "cpu"}, BF16).shortages()
    assert short == described[1].rstrip()


def test_example_of_7b():
    seen = 0
    for choice, *shown, fits in rows("choice | device | host | disk | fits"):
        strategy, *options = re.findall(r"`([^`]+)`", choice)
        if "without" in choice:
            continue
        offload = dict(option.split(": ") for option in options)
        found = tiers(llama_7b(), strategy, offload, BF16)
        assert [size(found.total(tier)) for tier in ("device", "host", "disk")] == shown
        lacking = [text.partition(":")[0] for text in found.shortages()]
        assert lacking == (["host memory"] if fits == "no: host" else [])
        assert fits in ("yes", "no: host")
        seen += 1
    assert seen == 5


def size(nbytes):
    return f"{nbytes / GIB:.3g} GiB" if nbytes else "0"


def test_example_without_offload():
    kind = strategies().load("zero2")
    world = World(device=torch.device("cuda"))
    run = Run(
        world=world,
        mesh=Mesh.plan({"dp": 1}, world),
        precision=BF16,
        accumulation=1,
        traffic=Traffic(),
    )
    total = sum(kind.cost(kind.Config(), ModelSpec(tuple(llama_7b())), run).held.values())
    (row,) = (row for row in rows("choice | device | host | disk | fits") if "without" in row[0])
    assert row[1:] == [size(total), "0", "0", "no"]


def test_times_of_updates():
    header = "| | 1e9 parameters per host | 7e9 | 70e9 |\n"
    lines = PAGE.read_text().split(header, 1)[1].splitlines()[1:6]
    for line in lines:
        name, *times = (cell.strip() for cell in line.strip("|").split("|"))
        kind, speed = re.match(r"(memory|disk) at ([\d.]+) GB/s", name).groups()
        nbytes = 28 if kind == "memory" else ADAM_BYTES
        for parameters, text in zip((1e9, 7e9, 70e9), times, strict=True):
            seconds = nbytes * parameters / float(speed) / 1e9
            assert float(text.removesuffix(" s")) == pytest.approx(seconds)
