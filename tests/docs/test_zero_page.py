"""The page on ZeRO agrees with its options, files and costs; its Python blocks run on two ranks."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from drivetrain.config import options_of
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.sharding.options import OffloadOptions
from drivetrain.strategy import Run
from drivetrain.traffic import Traffic
from drivetrain_ddp import Ddp
from drivetrain_zero import Zero1, Zero2, Zero3
from forked_programs import launch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/strategies/zero.md"
STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
BF16 = torch.bfloat16
ROWS = {
    "fp32, or autocast (`precision: bf16`)": Precision.of("bf16"),
    "`precision: bf16`, `dtypes: {param: bf16}`": Precision.of("bf16", param=BF16),
    "the same, `reduce: fp32`": Precision.of("bf16", param=BF16, reduce=torch.float32),
}
WIRE = [(Zero1, {}), (Zero2, {}), (Zero3, {}), (Zero3, {"reshard_after_forward": False})]
POLICIES = {
    "param: bf16": {"param": BF16},
    "param: bf16, reduce: fp32": {"param": BF16, "reduce": torch.float32},
    "param: bf16, master: none": {"param": BF16, "master": None},
    "param: fp16": {"param": torch.float16},
    "reduce: bf16": {"reduce": BF16},
    "": {},
}
BLOCKS, SIDE = 100, 1000


def rows(page, header):
    """Return the cells of the table under a header line."""
    lines = page.read_text().split(f"| {header} |\n", 1)[1].splitlines()[1:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def model():
    """Describe equal square blocks in fp32."""
    shape = (SIDE, SIDE)
    return ModelSpec(
        tuple(TensorSpec(f"layers.{i}.weight", shape, torch.float32, True) for i in range(BLOCKS))
    )


def run_on(ranks, precision, accumulation=1):
    world = World(size=ranks, local_size=ranks, hosts=("host",) * ranks)
    return Run(
        world=world,
        mesh=Mesh.plan({"dp": ranks}, world),
        precision=precision,
        accumulation=accumulation,
        traffic=Traffic(),
    )


def held(strategy, precision, ranks):
    """Return the bytes held per element, without the lent buffers."""
    cost = strategy.cost(strategy.Config(), model(), run_on(ranks, precision))
    lends = strategy is not Zero1  # whose buffers stay
    kept = sum(count for kind, count in cost.held.items() if kind != "lent" or not lends)
    return kept / (BLOCKS * SIDE * SIDE)


def formula(text, ranks):
    """Return the value of a sum such as ``4 + 12/N``."""
    numbers = re.fullmatch(r"(?:(\d+) \+ )?(?:(\d+)/N)|(\d+)", text)
    assert numbers, text
    fixed, shared, alone = (int(number or 0) for number in numbers.groups())
    return alone + fixed + shared / ranks


def test_table_of_options_equals_those_of_the_stages():
    table = rows(PAGE, "option | stages | default | what it trades")
    for number, stage in enumerate(STAGES.values(), start=1):
        shown = {
            name.strip("`"): yaml.safe_load(default)
            for name, stages, default, _ in table
            if str(number) in stages
        }
        known = {knob.name: knob.default for knob in options_of(stage.Config)}
        assert (shown.pop("offload"), known.pop("offload")) == ("none", OffloadOptions())
        assert shown == known


def test_file_map_names_every_file():
    shown = {name for row in rows(PAGE, "file | idea") for name in re.findall(r"\w+\.py", row[0])}
    files = {path.name for path in (ROOT / "plugins/drivetrain_zero").glob("*.py")}
    assert shown == files - {"__init__.py"}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_held_are_those_of_the_costs(ranks):
    header = (
        "bytes per element in all, without the lent buffers | `ddp` | `zero1` | `zero2` | `zero3`"
    )
    table = {name: cells for name, *cells in rows(PAGE, header)}
    assert table.keys() == ROWS.keys()
    for name, precision in ROWS.items():
        for text, strategy in zip(table[name], (Ddp, *STAGES.values()), strict=True):
            if text != "refused":
                expected = formula(text, ranks)
                found = held(strategy, precision, ranks)
                assert found == pytest.approx(expected, rel=1e-3), (name, strategy)


@pytest.mark.parametrize(("strategy", "options"), WIRE)
def test_bytes_sent_are_those_of_the_costs(strategy, options):
    ranks, window, elements = 4, 3, BLOCKS * SIDE * SIDE
    f, b, g = (ranks - 1) / ranks, 2, 4
    precision = ROWS["the same, `reduce: fp32`"]
    cost = strategy.cost(strategy.Config(**options), model(), run_on(ranks, precision, window))
    reductions = 1 if strategy is Zero1 else window
    stays = 3 / BLOCKS  # the last two units, and the first layer, whose values are not read back
    gathers = {Zero1: 1, Zero2: 1, Zero3: window if options else (2 - stays) * window}
    assert cost.sent == pytest.approx(
        {
            ("dp", "reduce_scatter"): reductions * f * g * elements,
            ("dp", "all_gather"): gathers[strategy] * f * b * elements,
            ("dp", "all_reduce"): reductions * 2 * f * BLOCKS,
        }
    )


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.exhaustive), "zero3"])
def test_blocks_run_on_two_ranks(strategy, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    check = (
        "norm = accelerator.clip_grad_norm_([model[2].weight], float('inf'))\n"
        "assert torch.isclose(gradient.norm(), norm.float())\n"
    )
    last = (
        "assert accelerator.get_state_dict(model)['2.bias'].count_nonzero() == 0\n"
        "accelerator.end_training()\n"
    )
    program = tmp_path / "program.py"
    program.write_text(blocks[0] + check + blocks[1] + last)
    options = ["--cpu", "--nproc-per-node", "2", "--strategy", strategy]
    if strategy == "zero3":
        options += ["--set", "strategy.keep_below=0"]
    done = launch(*options, str(program), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_of_the_precision_page_are_those_of_the_costs(ranks):
    header = (
        "`precision` | `dtypes` | param | compute | reduce | master | "
        "`ddp` | `zero1` | `zero2` | `zero3`"
    )
    table = rows(ROOT / "docs/precision.md", header)
    assert {cells[1].strip("`") for cells in table} == POLICIES.keys()
    for name, dtypes, _, _, _, _, *texts in table:
        precision = Precision.of(name.strip("`"), **POLICIES[dtypes.strip("`")])
        for text, strategy in zip(texts, (Ddp, *STAGES.values()), strict=True):
            if text != "refused":
                expected = formula(text, ranks)
                found = held(strategy, precision, ranks)
                assert found == pytest.approx(expected, rel=1e-3), (name, dtypes, strategy)
