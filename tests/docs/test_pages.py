"""What README and docs claim is so: links lead somewhere, commands run, lists are whole."""

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
from functools import cache
from pathlib import Path

import click
import pytest
import yaml
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)

import drivetrain
import generate
from doc_pages import DOCS, PAGES, ROOT, blocks, rows
from drivetrain import errors, registry
from drivetrain.store import ShardStepper, SteppingStore, TensorStore
from drivetrain_fsdp.options import FsdpConfig
from drivetrain_launch.cli import COMMANDS, group, run
from drivetrain_launch.ranks.failure import CANNOT_HEAL
from drivetrain_megatron.plan.named import STYLES
from drivetrain_migration.launchers import table_of
from drivetrain_offload.nvme import ADAM_BYTES
from drivetrain_offload.stepping import SETS, TILE_BYTES
from foreign_files import FILES, LINES

OURS = [*COMMANDS, *generate.ours(registry.COMMANDS)]
COMMAND = re.compile(r"drivetrain ((?:{})\b[^#;&|\")\n]*)".format("|".join(OURS)))
QUICK = ("config ", "env", "schedule")
PAIRS = {
    "source": "the test",
    "hosts": ["n1", "n2", "n3"],
    "gigabytes_per_second": [[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]],
}
MISTAKES = "precison: bf16\nlaunch:\n  nproc_per_node: 0\n"
"""The file that docs/cli.md lets ``config check`` find wrong."""


# --- links and paths ---


def broken(page, target):
    """Tell whether a link leads nowhere."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return not file.exists() or (bool(anchor) and anchor not in anchors(file))


@cache
def anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        assert slug not in found, f"{page.name} has two headings {title!r}"
        found.add(slug)
    return found


def without_blocks(page):
    return re.sub(r"^\s*```.*?^\s*```\s*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_links_lead_somewhere():
    links = [
        (page, target)
        for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
        for target in re.findall(
            r"\[[^\]]*\]\(([^)\s]+)\)", re.sub("`[^`]*`", "CODE", without_blocks(page))
        )
        if "://" not in target
    ]
    assert sum("#" in target for _, target in links) > 20
    assert [(page.name, target) for page, target in links if broken(page, target)] == []
    for target in ("nowhere.md", "quickstart.md#7-evaluate", "#no-heading"):
        assert broken(DOCS / "cli.md", target)


def test_paths_in_code_exist():
    paths = [
        (page.name, path.rstrip("./"))
        for page in PAGES
        for path in re.findall(
            r"(?<![\w/.])(?:examples|tests|docs|src|plugins)/[\w/.*-]+", page.read_text()
        )
    ]
    assert len(paths) > 50
    assert [(page, path) for page, path in paths if not list(ROOT.glob(path))] == []


def test_ways_of_the_architecture_page_are_there_and_short():
    text = (DOCS / "architecture.md").read_text()
    for title in ("A parameter's way", "A gradient's way"):
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        stops = re.findall(r"`([\w/]+\.py):(\w+)`", section)
        assert 6 < len(stops) <= 10
        assert len({file for file, _ in stops}) <= 6
        missing = [
            f"{file}:{function}"
            for file, function in stops
            if not re.search(rf"^ *def {function}\(", (ROOT / file).read_text(), re.MULTILINE)
        ]
        assert missing == []


# --- commands and configurations ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A function that makes a folder with the files that docs name, the working directory."""
    described = yaml.safe_load((ROOT / "src/drivetrain/hardware/builtin/cpu.yaml").read_text())
    described["links"]["pairs"] = PAIRS

    def make():
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        (path / "run.yaml").write_text(MISTAKES)
        (path / "train.py").write_text("")
        (path / "accelerate.yaml").write_text(FILES["zero_3.yaml"])
        (path / "ds_config.json").write_text(FILES["zero_1.json"])
        (path / "run.sh").write_text(LINES["torchrun"])
        (path / "mine.yaml").write_text(yaml.safe_dump(described))
        monkeypatch.chdir(path)
        monkeypatch.setenv("COLUMNS", "80")
        return path

    return make


def command_lines():
    """Return (page, arguments) of every command line in a block of a shell."""
    return sorted(
        {
            (str(page.relative_to(ROOT)), line.strip())
            for page in PAGES
            for text in blocks(page, "sh", "console", "")
            for line in COMMAND.findall(text)
        }
    )


def test_command_lines_parse(folder):
    folder()
    wrong = []
    for page, line in command_lines():
        command, words = group, shlex.split(line)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name, *words = words
            command = command.get_command(click.Context(command), name)
        try:
            command.make_context("drivetrain", words)
        except (click.ClickException, AttributeError) as error:
            wrong.append((page, line, str(error)))
    assert wrong == []
    assert {line.split()[0] for _, line in command_lines()} == set(OURS)


def test_launch_lines_resolve(folder, capsys):
    wrong = []
    for page, line in command_lines():
        if line.startswith("launch"):
            folder()
            run(["config", "--default", "--output", "drivetrain.yaml"])
            code = run(["launch", "--dry-run", "--cpu", *shlex.split(line)[1:]])
            out, err = capsys.readouterr()
            if code or not re.search(r"^Mesh: .*\bdp=", out, re.MULTILINE):
                wrong.append((page, line, err))
    assert wrong == []


def sessions():
    """Yield page, variables, arguments and the shown lines of each command that is run here."""
    for page in PAGES:
        for text in blocks(page, "sh", "console", ""):
            for line in re.finditer(r"^(\$ )?((?:\w+=\S+ )*)(?=drivetrain )(.*)\n", text, re.M):
                arguments = "".join(COMMAND.findall(line[3])[:1]).strip()
                if arguments.startswith(QUICK) or (line[1] and "--dry-run" in arguments):
                    after = re.split(r"^\$ ", text[line.end() :], maxsplit=1, flags=re.M)[0]
                    yield page.name, line[2].split(), arguments, after if line[1] else ""


def test_quick_commands_print_the_shown_lines(folder, capsys, monkeypatch):
    wrong, shown_lines = [], 0
    for page, variables, line, shown in sessions():
        folder()
        words = shlex.split(line)
        if "--output" not in words:
            run(["config", "--default", "--output", "drivetrain.yaml"])
            if "launch" in words:
                Path("drivetrain.yaml").unlink()
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for variable in variables:
                patch.setenv(*variable.split("=", 1))
            code = run(words)
        out, err = capsys.readouterr()
        said = [text.split() for text in f"{out}{err}{code}".splitlines()]
        lines = [text.split() for text in shown.splitlines() if text.strip() not in ("", "...")]
        if line == "env":  # versions are those of a machine
            lines = []
            names = ", ".join(sorted(generate.ours(registry.STRATEGIES)))
            assert f"- drivetrain.strategies: {names}\n" in shown
        shown_lines += len(lines)
        expected = errors.ConfigError.exit_code if "run.yaml" in words else 0
        missing = [" ".join(words) for words in lines if words not in said]
        if code != expected or missing or not out + err:
            wrong.append((page, line, code, missing))
    assert wrong == []
    assert shown_lines > 40


def test_yaml_blocks_are_valid_configurations(folder, capsys):
    folder()
    wrong = []
    for page in PAGES:
        for text in blocks(page, "yaml"):
            Path("block.yaml").write_text(text)
            if run(["config", "check", "block.yaml"]):
                wrong.append((page.name, capsys.readouterr().err))
    assert wrong == []


def test_sample_of_an_import_is_what_is_written(folder, capsys):
    folder()
    (sample,) = (text for text in blocks("docs/importing.md", "yaml") if "Imported" in text)
    assert run(["config", "import", "accelerate.yaml"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert [line for line in sample.splitlines() if line not in written] == []


# --- code and names ---


def test_python_blocks_compile():
    for page in PAGES:
        for text in blocks(page, "python"):
            compile(text, str(page), "exec")


def test_names_of_the_api_exist():
    """Imports of the page for users of other programs, and mechanisms of the page on plugins."""
    text = (DOCS / "coming-from.md").read_text()
    names = re.findall(r"^\+from drivetrain import (.*)$", text, flags=re.MULTILINE)
    assert names
    assert set(", ".join(names).split(", ")) <= set(drivetrain.__all__)
    text = (DOCS / "writing-a-plugin.md").read_text()
    mechanisms = set(re.findall(r"`((?:model|collectives|parallel)\.\w[\w.]*)", text))
    assert len(mechanisms) > 10
    for name in mechanisms:
        package, *path = name.split(".")
        found = importlib.import_module(f"drivetrain.{package}")
        for depth, part in enumerate(path, start=1):
            if not hasattr(found, part):
                importlib.import_module(".".join(["drivetrain", package, *path[:depth]]))
            found = getattr(found, part)


def public(cls):
    return {name for name in vars(cls) if name[0] != "_"}


def test_tables_by_hand_name_all_of_a_kind():
    plugin, fsdp = "docs/writing-a-plugin.md", "docs/strategies/fsdp.md"
    torch_fsdp = "docs/inside/fsdp.md"
    (units,) = [f.type for f in dataclasses.fields(FsdpConfig) if f.name == "units"]
    steppers = {*public(ShardStepper), *ShardStepper.__annotations__}
    owed = drivetrain.Strategy.__abstractmethods__ | {"gradients", "state"}
    stores = {*public(SteppingStore), *SteppingStore.__annotations__} - public(TensorStore)
    wrapper = set(inspect.signature(FullyShardedDataParallel).parameters) - {"module"}
    sharding = (set(inspect.signature(fully_shard).parameters) - {"module"}) | public(FSDPModule)
    expected = [
        (plugin, "method | what it owes", owed),
        (plugin, "member | what it owes", stores),
        (plugin, "method of a stepper | what it owes", steppers),
        (fsdp, "`units` | a unit is", set(units.__args__)),
        (torch_fsdp, "`FullyShardedDataParallel` | here", wrapper),
        (torch_fsdp, "`fully_shard` and its methods | here", sharding),
        ("docs/strategies/megatron.md", "style | what it means", set(STYLES)),
    ]
    missing = []
    for page, header, names in expected:
        first = " ".join(row[0] for row in rows(page, header))
        missing += [(header, n) for n in names if n[0] != "_" and not re.search(rf"\b{n}\b", first)]
    assert missing == []
    for page, header, names in (expected[0], expected[3], expected[6]):
        assert {n for row in rows(page, header) for n in re.findall(r"`(\w+)", row[0])} == names


def test_tables_of_importers_say_something_once_of_every_key():
    for program in ("accelerate", "deepspeed", "torchrun"):
        for table in (table_of(program).settings, table_of(program).options):
            assert len({row.key for row in table}) == len(table), program
            assert all(row.there and row.here for row in table)


def test_numbers_in_sentences_are_those_of_the_code():
    text = (DOCS / "inside/offload.md").read_text()
    assert SETS == 3
    assert f"Three sets of buffers go round, of {TILE_BYTES >> 20} MiB for each state" in text
    assert f"| masters in the store | {ADAM_BYTES} bytes | {ADAM_BYTES} bytes |" in text
    text = (DOCS / "interruptions.md").read_text()
    said = re.search(r"any failure but exit codes ([\d, and]+), which would only come again", text)
    assert {int(code) for code in re.findall(r"\d+", said[1])} == CANNOT_HEAL


# --- variables of the environment ---

SOURCES = [path for name in ("src", "launch", "plugins") for path in (ROOT / name).rglob("*.py")]
READERS = {"os.environ.get", "_integer", "variables.setdefault"}


def variables_of(tree):
    """Yield the variables that a module reads, or sets where they are not set."""
    known = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in READERS:
            first = node.args[0]
            name = getattr(first, "value", known.get(getattr(first, "id", "")))
            if isinstance(name, str):
                yield name


def test_variables_are_on_the_page_on_clusters():
    """Our own, exactly; others that every run reads. Those of schedulers are in another table."""
    found, ours = set(), set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        ours |= set(re.findall(r'"(DRIVETRAIN_[A-Z_]*[A-Z])"', text))
        if not {"testing", "compat", "hosts"} & set(path.parent.parts):
            found |= set(variables_of(ast.parse(text)))
    cells = rows("docs/clusters.md", "variable | read by")
    shown = {name for row in cells for name in re.findall(r"`(\w+)`", row[0])}
    assert ours == {name for name in shown if name.startswith("DRIVETRAIN_")}
    assert {"RANK", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS", "XDG_CONFIG_HOME"} <= found
    assert found <= shown
