"""What README and docs claim is so: links lead somewhere, commands parse, tables equal the code."""

import importlib
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
import yaml

import drivetrain
from drivetrain import errors, registry
from drivetrain.config import RunConfig, options_of
from drivetrain.runtime.notices import PREEMPTED
from drivetrain_ddp.config import DdpConfig
from drivetrain_launch.cli import COMMANDS, INTERRUPTED, group, run
from drivetrain_launch.commands.options import FLAGS
from drivetrain_launch.commands.verify import INCOMPARABLE
from drivetrain_launch.ranks.failure import KILLED, NO_PROGRESS
from foreign_files import FILES, LINES

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OURS = [
    *COMMANDS,
    *(
        e.name
        for e in entry_points(group=registry.COMMANDS)
        if e.dist and e.dist.name == "drivetrain"
    ),
]
"""Our commands, those of our plugins too, whatever else is installed."""
COMMAND = re.compile(r"drivetrain ((?:{})\b[^#;&|\")\n]*)".format("|".join(OURS)))

QUICK = ("config ", "env", "schedule")

PAIRS = {
    "source": "the test",
    "hosts": ["n1", "n2", "n3"],
    "gigabytes_per_second": [[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]],
}
MISTAKES = "precison: bf16\nlaunch:\n  nproc_per_node: 0\n"
"""The file that docs/cli.md lets ``config check`` find wrong."""


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in some languages."""
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def command_lines() -> list[tuple[str, str]]:
    """Return (page, arguments) of every command line in a block of a shell."""
    return sorted(
        {
            (str(page.relative_to(ROOT)), line.strip())
            for page in PAGES
            for text in blocks(page, "sh", "console", "")
            for line in COMMAND.findall(text)
        }
    )


def rows(page: Path, header: str) -> list[list[str]]:
    """Return the cells of the table under a header line."""
    lines = page.read_text().split(f"| {header} |\n", 1)[1].splitlines()[1:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip("|"))
        found.append([cell.strip().replace("\\|", "|") for cell in cells])
    return found


def knobs(cls: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted key and default of every knob."""
    for knob in options_of(cls):
        if knob.is_section:
            yield from knobs(knob.type, f"{prefix}{knob.name}.")
        else:
            yield prefix + knob.name, knob.default


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the docs name; the working directory."""
    (tmp_path / "run.yaml").write_text(MISTAKES)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "accelerate.yaml").write_text(FILES["zero_3.yaml"])
    (tmp_path / "ds_config.json").write_text(FILES["zero_1.json"])
    (tmp_path / "run.sh").write_text(LINES["torchrun"])
    described = yaml.safe_load((ROOT / "src/drivetrain/hardware/builtin/cpu.yaml").read_text())
    described["links"]["pairs"] = PAIRS
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(described))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_code_exist(page):
    paths = re.findall(
        r"(?<![\w/.])(?:examples|tests|docs|src|plugins)/[\w/.*-]+", page.read_text()
    )
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("./")))] == []


def test_every_command_is_shown_somewhere():
    shown = {line.split()[0] for _, line in command_lines()}
    assert shown == set(OURS)


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_command_line_parses(folder, page, line):
    command, words = group, shlex.split(line)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        command = command.get_command(click.Context(command), name)
        assert command is not None, name
    command.make_context("drivetrain", words)


@pytest.mark.parametrize(
    ("page", "line"), [pair for pair in command_lines() if pair[1].startswith("launch")]
)
def test_launch_line_resolves(folder, capsys, page, line):
    assert run(["config", "--default", "--output", "drivetrain.yaml"]) == 0
    _, *words = shlex.split(line)
    assert run(["launch", "--dry-run", "--cpu", *words]) == 0, capsys.readouterr().err
    assert re.search(r"^Mesh: .*\bdp=", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "line"), [pair for pair in command_lines() if pair[1].startswith(QUICK)]
)
def test_quick_line_runs(folder, capsys, page, line):
    words = shlex.split(line)
    if "--output" not in words:
        assert run(["config", "--default", "--output", "drivetrain.yaml"]) == 0
    assert run(words) == (errors.ConfigError.exit_code if "run.yaml" in words else 0)
    out, err = capsys.readouterr()
    assert out or err


def test_sample_of_config_check_is_what_it_says(folder, capsys):
    assert run(["config", "check", "run.yaml"]) == 2
    said = capsys.readouterr().err.strip()
    assert said in (ROOT / "docs/cli.md").read_text()


def test_sample_of_env_names_our_strategies():
    (line,) = re.findall(
        r"^- drivetrain.strategies: (.*)$", (ROOT / "docs/cli.md").read_text(), re.M
    )
    ours = [
        e for e in entry_points(group=registry.STRATEGIES) if e.dist and e.dist.name == "drivetrain"
    ]
    assert line.split(", ") == sorted(entry.name for entry in ours)


def test_sample_of_the_dry_run_is_what_it_says(folder, capsys):
    text = (ROOT / "docs/cli.md").read_text()
    sample = text.split("$ drivetrain launch --nproc-per-node 2 --dry-run\n")[1].split("```")[0]
    assert run(["launch", "--nproc-per-node", "2", "--dry-run"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [line.split() for line in sample.splitlines() if line.strip() not in ("", "...")]
    assert [line for line in shown if line not in said] == []


def test_sample_of_recognised_variables_is_what_it_says(folder, capsys, monkeypatch):
    text = (ROOT / "docs/clusters.md").read_text()
    command, _, sample = text.split("\n$ PET_NNODES=")[1].split("```")[0].partition("\n")
    given, _, arguments = f"PET_NNODES={command}".partition(" drivetrain ")
    for setting in given.split():
        monkeypatch.setenv(*setting.split("=", 1))
    assert run(arguments.split()) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [line.split() for line in sample.splitlines() if line.strip() not in ("", "...")]
    assert shown
    assert [line for line in shown if line not in said] == []


@pytest.mark.parametrize("which", ["--schedule 1f1b", "--schedule all"])
def test_samples_of_schedules_are_what_it_says(folder, capsys, monkeypatch, which):
    monkeypatch.setenv("COLUMNS", "80")
    line = f"schedule --pp 4 --micro-batches 8 {which}"
    sample = (ROOT / "docs/cli.md").read_text().split(f"$ drivetrain {line}\n")[1].split("```")[0]
    assert run(line.split()) == 0
    said = [text.rstrip() for text in capsys.readouterr().out.splitlines()]
    assert said == sample.splitlines()


def test_table_of_schedule_options_equals_the_command():
    table = rows(ROOT / "docs/cli.md", "option | default | meaning")
    shown = [re.findall(r"--[\w-]+", row[0])[0] for row in table]
    command = group.get_command(click.Context(group), "schedule")
    assert shown == [p.opts[0] for p in command.params if isinstance(p, click.Option)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_blocks_are_valid_configurations(folder, capsys, page):
    for text in blocks(page, "yaml"):
        (folder / "block.yaml").write_text(text)
        assert run(["config", "check", "block.yaml"]) == 0, capsys.readouterr().err


def test_table_of_ddp_equals_its_options():
    table = rows(ROOT / "docs/strategies/ddp.md", "option | default | meaning")
    shown = {name.strip("`"): yaml.safe_load(default) for name, default, _ in table}
    assert shown == {knob.name: knob.default for knob in options_of(DdpConfig)}


def test_table_of_keys_equals_the_schema():
    table = rows(ROOT / "docs/cli.md", "key | default | meaning")
    shown = {key.strip("`"): default.strip("`") for key, default, _ in table}
    expected = {key: _yaml_text(default) for key, default in knobs(RunConfig)}
    assert shown == expected
    meanings = {key.strip("`"): meaning for key, _, meaning in table}
    helps = {f"{prefix}{knob.name}": knob.help for prefix, knob in _declared()}
    assert meanings == helps


def test_table_of_launch_options_equals_the_flags():
    table = rows(ROOT / "docs/cli.md", "option | YAML key | default")
    shown = {tuple(re.findall(r"--[\w-]+", option)): key.strip("`") for option, key, _ in table}
    for flag in FLAGS:
        key = flag.key.removesuffix(".name") + (f": {flag.value}" if flag.value else "")
        assert shown[flag.names] == key
    others = set(shown) - {flag.names for flag in FLAGS}
    assert others == {
        ("--config",),
        ("--set",),
        ("--dry-run",),
        ("--as-accelerate",),
        ("--env-file",),
        ("--export",),
        ("--hosts",),
        ("--topology",),
        ("--hostfile",),
        ("--include",),
        ("--exclude",),
    }


def test_table_of_exit_codes_holds_every_error():
    codes = {
        int(row[0]) for row in rows(ROOT / "docs/cli.md", "code | meaning") if row[0].isdigit()
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    raised = {kind.exit_code for kind in kinds if issubclass(kind, errors.DrivetrainError)}
    assert codes == raised | {0, 1, KILLED, INCOMPARABLE, PREEMPTED, NO_PROGRESS, INTERRUPTED, 143}


def test_imports_of_the_migration_page_exist():
    text = (ROOT / "docs/migrating-from-accelerate.md").read_text()
    names = re.findall(r"^\+from drivetrain import (.*)$", text, flags=re.MULTILINE)
    assert names
    assert set(", ".join(names).split(", ")) <= set(drivetrain.__all__)


def test_summary_of_the_contract_names_its_methods():
    table = rows(ROOT / "docs/writing-a-plugin.md", "method | what it owes")
    shown = {re.match(r"`(\w+)", row[0])[1] for row in table}
    assert shown == drivetrain.Strategy.__abstractmethods__


def test_mechanisms_of_the_plugin_page_exist():
    text = (ROOT / "docs/writing-a-plugin.md").read_text()
    names = set(re.findall(r"`((?:building|collectives|parts|sharding)\.\w[\w.]*)", text))
    assert len(names) > 10
    for name in names:
        package, *path = name.split(".")
        found = importlib.import_module(f"drivetrain.{package}")
        for depth, part in enumerate(path, start=1):
            if not hasattr(found, part):
                importlib.import_module(".".join(["drivetrain", package, *path[:depth]]))
            found = getattr(found, part)


def _declared(config=RunConfig, prefix=""):
    for knob in options_of(config):
        if knob.is_section:
            yield from _declared(knob.type, f"{prefix}{knob.name}.")
        else:
            yield prefix, knob


def _yaml_text(default):
    if default == {}:
        return "{}"
    return {"": '""', None: "null"}.get(default, str(default).lower())
