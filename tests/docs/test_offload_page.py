"""The page on offload agrees with options, files and messages; its programs run on two ranks."""

import inspect
import re
from pathlib import Path

import pytest
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy

from drivetrain.config import options_of
from drivetrain.sharding.options import OffloadOptions
from drivetrain.store import ShardStepper, SteppingStore, TensorStore
from drivetrain_offload import HostConfig, NvmeConfig, OffloadConfig
from drivetrain_offload.disk_speed import ADAM_BYTES
from drivetrain_offload.steps.pipeline import SETS, TILE_BYTES
from forked_programs import launch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/strategies/offload.md"
PLUGIN_PAGE = ROOT / "docs/writing-a-plugin.md"


def rows(header, page=PAGE):
    """Return the cells of the table under a header line."""
    lines = page.read_text().split(f"| {header} |\n", 1)[1].splitlines()[1:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def defaults(cls):
    return {knob.name: knob.default for knob in options_of(cls)}


def test_table_of_the_section_equals_its_options():
    table = rows("option of the section | default | what it trades")
    shown = {name.strip("`"): yaml.safe_load(default) for name, default, _ in table}
    assert shown == defaults(OffloadOptions)


def test_table_of_the_strategy_equals_its_options():
    table = rows("option of the strategy | default | what it does")
    shown = {name.strip("`"): yaml.safe_load(default) for name, default, _ in table}
    known = defaults(OffloadConfig)
    known["data_parallel"] = known["data_parallel"].name
    assert shown == known


@pytest.mark.parametrize(("store", "config"), [("cpu", HostConfig), ("nvme", NvmeConfig)])
def test_table_of_stores_equals_their_options(store, config):
    table = rows("option of a store | store | default | what it trades")
    shown = {
        name.strip("`"): yaml.safe_load(default)
        for name, where, default, _ in table
        if where.strip("`") == store
    }
    assert shown == defaults(config)


def test_file_map_names_every_file():
    shown = {name for row in rows("file | idea") for name in re.findall(r"\w+\.py", row[0])}
    files = {path.name for path in (ROOT / "plugins/drivetrain_offload").rglob("*.py")}
    assert shown == files - {"__init__.py"}


def test_numbers_of_the_pipeline_are_those_of_the_code():
    text = PAGE.read_text()
    assert SETS == 3
    assert f"Three sets of buffers go round, of {TILE_BYTES >> 20} MiB for each state" in text
    assert f"| masters in the store | {ADAM_BYTES} bytes | {ADAM_BYTES} bytes |" in text


def test_migration_names_what_torch_has():
    table = "\n".join(row[0] for row in rows("there | here"))
    assert set(inspect.signature(CPUOffloadPolicy).parameters) == {"pin_memory"}
    assert "CPUOffloadPolicy(pin_memory=True)" in table


@pytest.mark.parametrize(
    ("header", "contract", "known"),
    [
        ("member | what it owes", SteppingStore, TensorStore),
        ("method of a stepper | what it owes", ShardStepper, object),
    ],
)
def test_contract_of_the_plugin_page_is_whole(header, contract, known):
    shown = " ".join(row[0] for row in rows(header, PLUGIN_PAGE))
    members = {*vars(contract), *contract.__annotations__} - set(dir(known))
    missing = [name for name in members if name[0] != "_" and f"`{name}" not in shown]
    assert missing == []


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the programs print on two ranks; they must end well, and leave no file of a store."""
    folder = tmp_path_factory.mktemp("offload")
    programs = blocks("python")
    assert len(programs) == 2
    (folder / "program.py").write_text("".join(programs) + "accelerator.end_training()\n")
    options = ["--cpu", "--nproc-per-node", "2", "--set", "launch.threads_per_rank=1"]
    done = launch(*options, "program.py", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in folder.iterdir()} == {"program.py", "state"}
    return done.stdout + done.stderr


def test_programs_train(said):
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2


def test_table_of_the_page_is_what_prepare_prints(said):
    (table,) = blocks("text")
    *lines, room = table.splitlines()
    assert room.startswith("there is")
    assert [line for line in lines if line not in said] == []
