"""The page on FSDP agrees with its options, files, costs and messages; its programs run."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from drivetrain.config import options_of
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.sharding.options import OffloadOptions
from drivetrain.strategy import Run
from drivetrain.traffic import Traffic
from drivetrain_fsdp import Fsdp, FsdpConfig
from drivetrain_zero import Zero3
from forked_programs import launch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/strategies/fsdp.md"
BF16 = torch.bfloat16
ROWS = {
    "fp32, or autocast (`precision: bf16`)": Precision.of("bf16"),
    "`precision: bf16`, `dtypes: {param: bf16}`": Precision.of("bf16", param=BF16),
    "the same, `reduce: fp32`": Precision.of("bf16", param=BF16, reduce=torch.float32),
}
POLICIES = [
    *ROWS.values(),
    Precision.of("bf16", reduce=BF16),
    Precision.of("bf16", param=BF16, master=None),
    Precision.of("fp16", param=torch.float16),
]
KINDS = {
    "`full`, `grad`": {"sharding": "grad"},
    "`hybrid`": {"sharding": "hybrid", "shard_size": 2},
    "`accumulate: local`": {"accumulate": "local"},
}
BLOCKS, SIDE = 100, 1000
ELEMENTS = BLOCKS * SIDE * SIDE
RANKS, GROUP, WINDOW = 4, 2, 3
STAYS = 3 / BLOCKS
"""Of the gathers for backward: two live units, and the first layer, whose values are not read."""


def rows(header):
    """Return the cells of the table under a header line."""
    lines = PAGE.read_text().split(f"| {header} |\n", 1)[1].splitlines()[1:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def cost(options, precision, *, ranks=RANKS, window=1, strategy=Fsdp):
    """Return the cost of equal blocks of two matrices in fp32."""
    world = World(size=ranks, local_size=ranks, hosts=("host",) * ranks)
    mesh = Mesh.plan({"dp": ranks}, world)
    run = Run(world=world, mesh=mesh, precision=precision, accumulation=window, traffic=Traffic())
    specs = [
        TensorSpec(f"layers.{i}.{name}", (SIDE, SIDE // 2), torch.float32, True)
        for i in range(BLOCKS)
        for name in ("weight", "other")
    ]
    return strategy.cost(strategy.Config(**options), ModelSpec(tuple(specs)), run)


def kept(held, *, lends=True):
    """Return the bytes held per element, without the lent buffers."""
    return sum(n for kind, n in held.items() if kind != "lent" or not lends) / ELEMENTS


def formula(text, ranks, group):
    """Return the value of a sum such as ``4 + 16/N`` or ``16/S``."""
    fixed, shared, letter = re.fullmatch(r"(?:(\d+) \+ )?(\d+)/([NS])", text).groups()
    return int(fixed or 0) + int(shared) / {"N": ranks, "S": group}[letter]


def test_table_of_options_equals_the_declarations():
    table = rows("option | default | what it trades")
    shown = {name.strip("`"): yaml.safe_load(default) for name, default, _ in table}
    known = {knob.name: knob.default for knob in options_of(FsdpConfig)}
    assert (shown.pop("offload"), known.pop("offload")) == ("none", OffloadOptions())
    assert shown == known


def test_table_of_units_names_every_way():
    shown = {row[0].strip("`") for row in rows("`units` | a unit is | take it when")}
    (annotation,) = [f.type for f in dataclasses.fields(FsdpConfig) if f.name == "units"]
    assert shown == set(annotation.__args__)


def test_file_map_names_every_file():
    shown = {name for row in rows("file | idea") for name in re.findall(r"\w+\.py", row[0])}
    files = {path.name for path in (ROOT / "plugins/drivetrain_fsdp").glob("*.py")}
    assert shown == files - {"__init__.py"}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_held_are_those_of_the_costs(ranks):
    header = (
        "bytes per element in all, without the lent buffers | `full`, `grad` | `hybrid` | "
        "`accumulate: local`"
    )
    table = {name: cells for name, *cells in rows(header)}
    assert table.keys() == ROWS.keys()
    for name, precision in ROWS.items():
        for text, options in zip(table[name], KINDS.values(), strict=True):
            expected = formula(text, ranks, GROUP)
            found = kept(
                cost(options, precision, ranks=ranks).held, lends="accumulate" not in options
            )
            assert found == pytest.approx(expected, rel=1e-3), (name, options)


@pytest.mark.parametrize("precision", POLICIES)
def test_bytes_held_are_those_of_zero3_as_the_precision_page_says(precision):
    assert "`fsdp` holds the same bytes as `zero3`" in (ROOT / "docs/precision.md").read_text()
    ours = kept(cost({}, precision).held)
    assert ours == pytest.approx(kept(cost({}, precision, strategy=Zero3).held), rel=1e-3)


def test_bytes_lent_are_two_units():
    assert cost({}, ROWS["the same, `reduce: fp32`"]).held["lent"] == 2 * 4 * SIDE * SIDE


@pytest.mark.parametrize(
    ("options", "gathers", "near"),
    [
        ({}, 2 * WINDOW - WINDOW * STAYS, 0),
        ({"live_units": 4}, 2 * WINDOW - WINDOW * (STAYS + 2 / BLOCKS), 0),
        ({"reshard_after_forward": False}, WINDOW, 0),
        ({"reshard_after_forward": 2}, WINDOW, WINDOW - WINDOW * STAYS),
        ({"sharding": "grad"}, 1, 0),
    ],
)
def test_bytes_sent_are_those_of_the_costs(options, gathers, near):
    f, b, g, k = (RANKS - 1) / RANKS, 2, 4, 2
    sent = cost(options, ROWS["the same, `reduce: fp32`"], window=WINDOW).sent
    expected = {
        ("dp", "reduce_scatter"): WINDOW * f * g * ELEMENTS,
        ("dp", "all_gather"): gathers * f * b * ELEMENTS,
        ("dp", "all_reduce"): WINDOW * 2 * f * 2 * BLOCKS,
        ("dp.near", "all_gather"): near * (k - 1) / k * b * ELEMENTS,
    }
    assert sent == pytest.approx({key: nbytes for key, nbytes in expected.items() if nbytes})


@pytest.mark.parametrize("window", [1, WINDOW])
def test_bytes_sent_by_hybrid_are_those_of_the_costs(window):
    groups, b, g = RANKS // GROUP, 2, 4
    inside, between = (GROUP - 1) / GROUP, (groups - 1) / groups
    options = {"sharding": "hybrid", "shard_size": GROUP}
    assert cost(options, ROWS["the same, `reduce: fp32`"], window=window).sent == pytest.approx(
        {
            ("dp.near", "reduce_scatter"): window * inside * g * ELEMENTS,
            ("dp.near", "all_gather"): window * (2 - STAYS) * inside * b * ELEMENTS,
            ("dp.far", "all_reduce"): 2 * between * g * ELEMENTS / GROUP,
            ("dp", "all_reduce"): 2 * (RANKS - 1) / RANKS * 2 * BLOCKS,
        }
    )


def test_local_accumulation_sends_gradients_once():
    precision = ROWS["the same, `reduce: fp32`"]
    local = cost({"accumulate": "local"}, precision, window=WINDOW).sent
    each = cost({}, precision, window=WINDOW).sent
    assert local["dp", "reduce_scatter"] * WINDOW == each["dp", "reduce_scatter"]
    assert local["dp", "all_gather"] == each["dp", "all_gather"]


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (
            "`FullyShardedDataParallel` | here",
            set(inspect.signature(FullyShardedDataParallel).parameters) - {"module"},
        ),
        (
            "`fully_shard` and its methods | here",
            (set(inspect.signature(fully_shard).parameters) - {"module"})
            | {name for name in vars(FSDPModule) if not name.startswith("_")},
        ),
    ],
)
def test_tables_of_migration_name_what_torch_has(header, names):
    table = "\n".join(row[0] for row in rows(header))
    assert {name for name in names if not re.search(rf"`{name}\b", table)} == set()


def test_programs_run_on_two_ranks(tmp_path):
    programs = blocks("python")
    assert len(programs) == 5
    units, gradient, values, adapter, tensors = programs
    programs = [
        units,
        gradient,
        "norm = accelerator.clip_grad_norm_([model.head.weight], float('inf'))\n"
        "assert torch.isclose(gradient.norm(), norm.float())\n",
        values,
        "assert accelerator.get_state_dict(model)['head.bias'].count_nonzero() == 0\n",
        tensors.replace(
            "dcp.load",
            "before = accelerator.get_state_dict(model)\n"
            "with accelerator.gathered(model):\n    nn.init.zeros_(model.head.weight)\ndcp.load",
        ),
        "after = accelerator.get_state_dict(model)\n"
        "assert all(torch.equal(after[name], before[name]) for name in before)\n",
        adapter,
        "assert len(trained) == 16\naccelerator.end_training()\n",
    ]
    (tmp_path / "program.py").write_text("\n".join(programs))
    done = launch("--cpu", "--nproc-per-node", "2", "program.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = blocks("text")
    assert line.strip() in done.stdout + done.stderr
    assert (tmp_path / "adapter/model.safetensors").is_file()
