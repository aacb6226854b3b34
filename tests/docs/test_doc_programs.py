"""The Python blocks of README and docs run, in order, as the programs and tests that they show."""

import re
from pathlib import Path

import pytest

from forked_programs import run_python

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

QUICKSTART = """
import torch
from types import SimpleNamespace

class Model(torch.nn.Linear):
    def forward(self, x, y=None):
        out = super().forward(x)
        if y is None:
            return out
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(out, y))

rows = [{"x": torch.randn(3), "y": torch.tensor(i % 2)} for i in range(10)]
model = Model(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(rows, batch_size=2)
evaluation_loader = torch.utils.data.DataLoader([(r["x"], r["y"]) for r in rows], batch_size=4)
"""

README = """
import torch

loss_function = torch.nn.functional.mse_loss

def build():
    model = torch.nn.Linear(2, 1)
    data = [(torch.ones(2), torch.ones(1)) for _ in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, torch.utils.data.DataLoader(data, batch_size=2)
"""

NOTEBOOK = """
import torch
from drivetrain import Accelerator

def train(rate):
    accelerator = Accelerator()
    assert accelerator.num_processes == 2 and rate == 0.1
"""


def blocks(name: str, language: str = "python") -> list[str]:
    """Return the blocks of one language of a page."""
    return [text for kind, text in FENCE.findall((ROOT / name).read_text()) if kind == language]


@pytest.fixture
def python(tmp_path):
    """Run a program in a folder of its own, on the CPU, as a user would; it must end well."""

    def run(program: str, *arguments: str) -> str:
        (tmp_path / "program.py").write_text(program)
        done = run_python(*(arguments or ("program.py",)), folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_every_python_block_compiles():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for text in blocks(str(page.relative_to(ROOT))):
            compile(text, str(page), "exec")


def test_loop_of_the_readme(python):
    (diff,) = blocks("README.md", "diff")
    lines = [line[1:] for line in diff.splitlines() if line[:1] in ("+", " ")]
    python(README + "\n".join(lines) + "\nprint(loss.item())\n")


def test_blocks_of_the_quickstart(python, tmp_path):
    program = QUICKSTART + "".join(blocks("docs/quickstart.md"))
    accuracy = float(
        python(program + "\nprint(accuracy.item(), sum(map(len, correct)) == 10)\n").split()[0]
    )
    assert 0 <= accuracy <= 1
    assert (tmp_path / "runs/mine/checkpoints/checkpoint_2/manifest.json").is_file()


def test_block_of_the_precision_page(python):
    (text,) = blocks("docs/precision.md")
    schedule = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)"
    after = "assert accelerator.scaler.get_scale() <= 2.0**12\nprint(scheduler.get_last_lr())"
    python(f"{README}\nmodel, optimizer, loader = build()\n{schedule}\n{text}\n{after}\n")


def test_blocks_of_the_page_about_faults(python, tmp_path):
    start, loop, *_ = blocks("docs/faults.md")
    program = f"""{README}
import os, signal
model, optimizer, loader = build()
{start}
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.preempted  # from here on it is the script that hears the notice

def train_step(batch):
    accelerator.backward(loss_function(model(batch[0]), batch[1]))
    optimizer.step()
    os.kill(os.getpid(), signal.SIGUSR1)

try:
{"".join("    " + line + chr(10) for line in loop.splitlines())}
except SystemExit as end:
    assert end.code == 75
"""
    python(program)
    assert (tmp_path / "runs/mine/checkpoints/checkpoint_0/manifest.json").is_file()


def test_blocks_of_the_large_models_page(python):
    python("".join(blocks("docs/large-models.md")))


def test_blocks_of_the_trainer_page(python, tmp_path):
    program, subclass = blocks("docs/trainer.md")
    ours = "from drivetrain.integrations.transformers import Trainer"
    before = program.replace(ours, "from transformers import Trainer").replace('"run', '"before')
    assert before.count("integrations") == 0
    loss = 'trainer.state.log_history[-1]["train_loss"]'
    python(
        f"{before}\nbefore = {loss}\n{program}\nassert abs({loss} - before) < 1e-4 * before\n"
        f"{subclass}\nassert issubclass(Seq2SeqTrainer, type(trainer).__mro__[1])\n"
    )
    assert (tmp_path / "run/export/model.safetensors").is_file()
    assert (tmp_path / "run/checkpoint-8/drivetrain/manifest.json").is_file()


def test_block_of_the_fabric_page(python, tmp_path):
    (program,) = blocks("docs/fabric.md")
    python(program)
    assert (tmp_path / "run/checkpoint/manifest.json").is_file()


def test_blocks_of_the_page_about_watching(python, tmp_path):
    program = "".join(blocks("docs/watch-a-run.md"))
    said = python(f"{program}\nassert share == [1, 2, 3, 4, 5]\n")
    assert "45" in said.splitlines()
    settings, *values = (tmp_path / "runs/mine/my-project.jsonl").read_text().splitlines()
    assert '"lr": 0.1' in settings
    assert all('"loss": ' in line for line in values)


def test_block_of_the_page_about_profiles(python, tmp_path):
    (program,) = blocks("docs/profiling.md")
    python(program)
    files = {path.name for path in (tmp_path / "runs/mine/trace").iterdir()}
    assert files == {"profile_0.json", "trace.json.gz", "costs.txt", "costs.json"}


def test_blocks_of_the_page_on_reports(python, tmp_path):
    said = python("".join(blocks("docs/reports.md")))
    assert said.splitlines()[-1].startswith("0 16 ")
    assert 'id="own-figures"' in (tmp_path / "runs/mine/run/report.html").read_text()


def test_notebook_block_of_the_cli_page(python):
    (text,) = blocks("docs/cli.md")
    python(NOTEBOOK + text)


def test_blocks_of_the_plugin_page(python):
    config, nested, strategy, conformance, own_test, command = blocks("docs/writing-a-plugin.md")
    python(
        f"{config}\n{nested}\n{strategy}\n{conformance}\n"
        "from drivetrain.config import options_of\n"
        "(knob,) = options_of(FlatConfig)\n"
        "assert knob.question and knob.default is True\n"
        "assert TestFlat.worlds == (1, 2, 3, 4)\n"
        "from drivetrain import Accelerator\n"
        "accelerator = Accelerator()\n"
        "inner = inner_of(OuterConfig(inner=NestedStrategy('zero1')), accelerator.run)\n"
        "assert type(inner) is strategies().load('zero1')\n"
        "assert type(inner_of(OuterConfig(), accelerator.run)).default\n"
    )
    done = python(own_test, "-m", "pytest", "-q", "-p", "no:cacheprovider", "program.py")
    assert "1 passed" in done
    assert python(f"{command}\ntoast()\n", "program.py", "--slices", "3") == "3 slices\n"
