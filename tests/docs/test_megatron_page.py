"""The page on Megatron agrees with its options, files, schedules and bytes; its blocks run."""

import copy
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import forked_programs
from drivetrain import Accelerator
from drivetrain.config import options_of
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.paper.simulate import UNIT_DURATIONS, simulate
from drivetrain_megatron.pipeline.schedules import SCHEDULES, ActionKind, make_schedule
from drivetrain_megatron.plan.named import STYLES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/strategies/megatron.md"
PACKAGE = ROOT / "plugins/drivetrain_megatron"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
RANKS, MICRO_BATCHES, CHUNKS = 4, 8, 2


def rows(header, index=0):
    """Return the cells of a table under a header line, of the one with that index."""
    lines = PAGE.read_text().split(f"| {header} |\n")[1 + index].splitlines()[1:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def programs():
    return [text for language, text in BLOCKS if language == "python"]


def timeline(name):
    """Run a schedule on paper; return it and its chunks."""
    chunks = CHUNKS if name == "interleaved" else 1
    durations = {kind: duration / chunks for kind, duration in UNIT_DURATIONS.items()}
    return simulate(make_schedule(name, RANKS, MICRO_BATCHES, chunks), durations), chunks


def test_table_of_options_equals_the_config():
    table = {
        name.strip("`"): default for name, default, _ in rows("option | default | what it does")
    }
    assert table.pop("data_parallel") == "default strategy"
    shown = {name: yaml.safe_load(default) for name, default in table.items()}
    known = {knob.name: knob.default for knob in options_of(MegatronConfig)}
    assert not known.pop("data_parallel").name
    assert shown == known


def test_table_of_styles_holds_every_style():
    shown = [
        name for row in rows("style | what it means") for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert sorted(shown) == sorted(STYLES)


FOLDERS = ("", "recording", "tensor", "dropout", "plan", "pipeline", "paper")


@pytest.mark.parametrize(("index", "folder"), list(enumerate(FOLDERS)))
def test_file_map_names_every_file(index, folder):
    shown = [n for row in rows("file | idea", index) for n in re.findall(r"\w+\.py", row[0])]
    files = {path.name for path in (PACKAGE / folder).glob("*.py")} - {"__init__.py"}
    assert sorted(shown) == sorted(files)


def test_figures_of_schedules_are_those_of_the_simulator():
    table = rows("schedule | makespan | idle | kept by ranks 0 to 3")
    assert [name.strip("`") for name, *_ in table] == list(SCHEDULES)
    for name, makespan, idle, kept in table:
        found, chunks = timeline(name.strip("`"))
        assert makespan == f"{found.makespan:g}"
        assert idle == f"{found.idle:.1%}"
        assert kept == ", ".join(f"{found.kept(rank) / chunks:g}" for rank in range(RANKS))


def test_formulas_of_schedules_are_those_of_the_simulator():
    table = rows("schedule | makespan | idle | most kept, in micro-batches")
    assert [name.strip("`") for name, *_ in table] == list(SCHEDULES)
    p, m, v = RANKS, MICRO_BATCHES, CHUNKS
    forward = UNIT_DURATIONS[ActionKind.FORWARD]
    values = {"p": p, "m": m, "v": v, "F": forward, "B": UNIT_DURATIONS[ActionKind.BACKWARD]}
    for name, makespan, idle, _ in table:
        found, _ = timeline(name.strip("`"))
        assert evaluated(makespan, values) == pytest.approx(found.makespan)
        assert evaluated(idle, values) == pytest.approx(found.idle)


def evaluated(formula, values):
    """Return the value of a formula, in which things side by side are multiplied."""
    product = re.sub(r"(?<=[\dmv)])(?=[a-zA-Z(])", "*", formula)
    return eval(product, {"__builtins__": {}}, dict(values))


def test_blocks_print_what_the_page_says(tmp_path):
    """What ``prepare`` prints of the example is on the page."""
    lines = next(text for _, text in BLOCKS if text.startswith("tensor parallel over")).splitlines()
    code = (
        "import sys, torch\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "from train_gpt import GPT\n"
        "from drivetrain import Accelerator\n"
        "accelerator = Accelerator()\n"
        "accelerator.prepare(GPT(128, 4, 4, 64))\n"
        "accelerator.end_training()\n"
    )
    said = launch(tmp_path, code, 2, "tp=2")
    assert [line for line in lines if line not in said] == []


CHECK = """
assert logits.shape == (8, 7, 97)
accelerator.print(f"evaluated {loss_function(logits, tokens).item():.4f}")
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process."""
    return losses(launch(tmp_path_factory.mktemp("alone"), "".join(programs()) + CHECK, 1))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("tp=2", "sequence_parallel=true"), marks=pytest.mark.exhaustive),
        ("pp=2", "schedule=zb-h1", "micro_batches=4", "trace_dir=traces"),
        pytest.param(
            ("pp=2", "schedule=interleaved", "chunks=2", "data_parallel.name=zero1"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=",".join,
)
def test_programs_run_on_two_ranks(tmp_path, alone, options):
    """The same losses however ranks share the model; the whole comes back from its files."""
    found = losses(launch(tmp_path, "".join(programs()) + CHECK, 2, *options))
    assert found == pytest.approx(alone, abs=2e-4)
    if "trace_dir=traces" in options:
        names = sorted(path.name for path in (tmp_path / "traces").iterdir())
        assert names[0] == "pipeline-dp0-tp0-step00001.json"
        assert len(names) == 3


def losses(said):
    """Return the losses that the programs print: of three steps, and of the reloaded model."""
    found = [float(text) for text in re.findall(r"(?:loss|evaluated) (\d+\.\d+)", said)]
    assert len(found) == 4
    return found


def test_plan_of_the_page_is_fulfilled(tmp_path):
    (plan,) = (text for language, text in BLOCKS if language == "yaml" and "plan:" in text)
    (tmp_path / "run.yaml").write_text(plan)
    program = programs()[0] + "accelerator.end_training()\n"
    said = launch(tmp_path, program, 2, config="run.yaml")
    assert "4 blocks blocks.0 to blocks.3: up -> down" in said
    assert "by words: embedding, head" in said


def launch(folder, program, ranks, *options, config=None):
    """Run a program on the CPU under the strategy; return what it printed."""
    (folder / "program.py").write_text(program)
    words = ["--cpu", "--nproc-per-node", str(ranks)]
    words += ["--config", config] if config else ["--strategy", "megatron"]
    for option in options:
        words += ["--set", f"strategy.{option}"]
    done = forked_programs.launch(*words, "program.py", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[r0\] ", "", done.stdout + done.stderr, flags=re.MULTILINE)


# --- bytes ---

ROWS, LENGTH, WIDTH, WORDS = 4, 6, 32, 64
A = ROWS * LENGTH * WIDTH * 4
"""Bytes of one activation in fp32."""


class Block(nn.Module):
    """An MLP with whole parameters beside it: one group of a column and a row."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sent(blocks, **options):
    """Return the bytes that a third step sends, which compares no batches any more."""
    torch.manual_seed(0)
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    model = accelerator.prepare(copy.deepcopy(Words(blocks)))
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS
    for _ in range(3):
        accelerator.run.traffic.clear()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
    found = accelerator.run.traffic.sent()
    accelerator.free_memory()
    return found


@pytest.mark.ranks(2)
def test_bytes_sent_over_tp_are_those_of_the_page():
    f, words = 1 / 2, ROWS * LENGTH * 4
    outside = 2 * f * A + 2 * f * A + 3 * 2 * f * words  # embedding, head, loss
    for blocks in (2, 3):
        assert sent(blocks, tp=2) == {("tp", "all_reduce"): blocks * 4 * f * A + outside}
        partial = blocks * 3 * WIDTH * 4  # norm, and the row's bias
        assert sent(blocks, tp=2, sequence_parallel=True) == {
            ("tp", "all_reduce"): outside + 2 * f * partial,
            ("tp", "all_gather"): blocks * 2 * f * A + 2 * f * A,
            ("tp", "reduce_scatter"): blocks * 2 * f * A,
        }


@pytest.mark.ranks(2)
def test_bytes_sent_over_pp_are_those_of_the_page():
    """A boundary costs an activation each way; the loss goes from the last rank to the first."""
    found = sent(2, pp=2, micro_batches=2)
    assert found.pop(("pp", "send")) == A
    assert all(key == ("pp", "broadcast") and count <= 8 for key, count in found.items())
