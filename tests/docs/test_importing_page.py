"""The tables of docs/importing.md are those of the importers, and its sample is what they write."""

import re
from pathlib import Path

import pytest
import yaml

from drivetrain_launch.cli import run
from drivetrain_migration.accelerate import LAUNCH_ROWS
from drivetrain_migration.accelerate import ROWS as ACCELERATE_ROWS
from drivetrain_migration.deepspeed import ROWS as DEEPSPEED_ROWS
from drivetrain_migration.launchers import DEEPSPEED_LAUNCHER_ROWS, TORCHRUN_ROWS
from foreign_files import FILES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "importing.md").read_text()

TABLES = {
    "key of the file": ACCELERATE_ROWS,
    "option of accelerate launch": LAUNCH_ROWS,
    "key of the JSON": DEEPSPEED_ROWS,
    "option of deepspeed": DEEPSPEED_LAUNCHER_ROWS,
    "option of torchrun": TORCHRUN_ROWS,
}


@pytest.mark.parametrize("head", TABLES)
def test_table_is_the_importers(head):
    shown = PAGE.split(f"| {head} | there | here |\n|---|---|---|\n")[1].split("\n\n")[0]
    assert shown.rstrip() == "\n".join(
        f"| `{row.key}` | {row.there} | {row.here} |" for row in TABLES[head]
    )


@pytest.mark.parametrize("head", TABLES)
def test_every_key_has_one_row_that_says_something(head):
    keys = [row.key for row in TABLES[head]]
    assert sorted(set(keys)) == sorted(keys)
    assert all(row.there and row.here for row in TABLES[head])


def test_keys_of_the_tables_that_are_written_by_hand_are_known():
    """Migrating pages name keys of Accelerate's files in their left column."""
    known = {row.key.rpartition(".")[2] for row in ACCELERATE_ROWS}
    pages = [DOCS / "migrating-from-accelerate.md", *(DOCS / "strategies").glob("*.md")]
    named = {
        key
        for page in pages
        for line in page.read_text().splitlines()
        if line.startswith("| ")
        for key in re.findall(r"`(fsdp_[a-z_0-9]+|parallelism_config_\w+)", line.split(" | ")[0])
    }
    assert named >= {"fsdp_offload_params", "fsdp_activation_checkpointing"}
    assert named - {"fsdp_config", "fsdp_plugin"} <= known


def test_sample_is_what_is_written(tmp_path, monkeypatch, capsys):
    sample = PAGE.split("```yaml\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    assert yaml.safe_load(sample)["strategy"] == {"name": "zero3"}
    (tmp_path / "accelerate.yaml").write_text(FILES["zero_3.yaml"])
    assert run(["config", "import", "accelerate.yaml"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert [line for line in sample.splitlines() if line not in written] == []
