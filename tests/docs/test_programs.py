"""The Python blocks of README and docs run, in order, as the programs and tests that they show."""

import re
import subprocess
import sys
import tomllib

import pytest
import torch

from doc_pages import ROOT, blocks
from forked_programs import launch, run_python
from trainers import sentence, tiny_llama, tokenizer

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

PIECES = f"""{README}
from drivetrain import Accelerator

accelerator = Accelerator(config={{"micro_batch": "auto"}})
model, optimizer, loader = accelerator.prepare(*build())
"""

NOTEBOOK = """
import torch
from drivetrain import Accelerator

def train(rate):
    accelerator = Accelerator()
    assert accelerator.num_processes == 2 and rate == 0.1
"""

INTERRUPTIONS = """
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
{loop}
except SystemExit as end:
    assert end.code == 75
"""

WATCHED = """
from pathlib import Path
settings, *values = Path("runs/mine/my-project.jsonl").read_text().splitlines()
assert '"lr": 0.1' in settings
assert sum('"loss": ' in line for line in values) == 16
"""

PLUGIN_FILE = ROOT / "examples/third_party_plugin/src/drivetrain_flat/strategy.py"

PLUGIN = """
from drivetrain.config import options_of
knob, size = options_of(FlatConfig)
assert knob.question and knob.default is True and size.default == 1
assert TestFlat.worlds == (1, 2, 3, 4)
from drivetrain import Accelerator
accelerator = Accelerator()
inner = inner_of(OuterConfig(inner=NestedStrategy('zero1')), accelerator.run)
assert type(inner) is find_strategy('zero1')[0]
assert type(inner_of(OuterConfig(), accelerator.run)) is find_strategy('')[0]
"""


def the_loop_of_the_readme():
    (diff,) = blocks("README.md", "diff")
    lines = [line[1:] for line in diff.splitlines() if line[:1] in ("+", " ")]
    return README + "\n".join(lines) + "\nprint(loss.item())\n"


def precision():
    text, *_ = blocks("docs/precision.md", "python")
    return (
        f"{README}\nmodel, optimizer, loader = build()\n"
        f"scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n{text}\n"
        "assert accelerator.scaler.get_scale() <= 2.0**12\nscheduler.get_last_lr()\n"
    )


def interruptions():
    start, loop, *_ = blocks("docs/interruptions.md", "python")
    loop = "".join(f"    {line}\n" for line in loop.splitlines())
    return README + INTERRUPTIONS.format(start=start, loop=loop)


def whole(page, before="", after=""):
    return before + "".join(blocks(f"docs/{page}.md", "python")) + after


def programs():
    """Yield name, program, the files that it leaves, and a pattern of what it prints."""
    saved = "runs/mine/checkpoints/checkpoint_{}/manifest.json"
    accuracy = "print(accuracy.item(), sum(map(len, correct)))"
    trace = ("profile_0.json", "trace.json.gz", "costs.txt", "costs.json")
    yield "README", the_loop_of_the_readme(), (), r"\d"
    yield (
        "quickstart",
        whole("quickstart", QUICKSTART, accuracy),
        (saved.format(2),),
        r"^(0\.\d+|1\.0|0\.0) 10$",
    )
    yield "precision", precision(), (), ""
    yield "interruptions", interruptions(), (saved.format(0),), ""
    yield "checkpoints", whole("checkpoints"), ("runs/mine/step-0/manifest.json",), ""
    watched = ("runs/mine/run/report.html", *(f"runs/mine/trace/{name}" for name in trace))
    yield "reports", whole("reports", "", WATCHED), watched, r"^0 16 "
    _, pieces, again, *rest = blocks("docs/precision.md", "python")
    yield "pieces", PIECES + pieces + again, (), ""
    recompute = "".join(rest)
    yield "recompute", f"{recompute}\naccelerator.end_training()\n", (), ""
    yield "notebook", whole("cli", NOTEBOOK), (), ""


@pytest.mark.timeout(1800)  # ten programs
def test_programs_of_one_process_run(tmp_path):
    failed = []
    for name, program, files, printed in programs():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "program.py").write_text(program)
        done = run_python("program.py", folder=folder)
        missing = [file for file in files if not (folder / file).is_file()]
        if done.returncode or missing or not re.search(printed, done.stdout, re.MULTILINE):
            failed.append((name, missing, done.stdout, done.stderr))
    assert not failed, failed
    assert 'id="own-figures"' in (tmp_path / "reports/runs/mine/run/report.html").read_text()


# --- on two ranks ---


def on_ranks(folder, program, *options, ranks=2):
    """Run a program on ranks of the CPU; return what it printed."""
    (folder / "program.py").write_text(program)
    done = launch("--cpu", "--nproc-per-node", str(ranks), *options, "program.py", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[r0\] ", "", done.stdout + done.stderr, flags=re.MULTILINE)


def test_quickstart_shows_what_its_commands_print():
    number = re.compile(r"(?<=loss )\d\.\d{4}$", re.MULTILINE)
    for shown in blocks("docs/quickstart.md", "console"):
        command, _, text = shown.removeprefix("$ ").partition("\n")
        words = re.sub("^drivetrain", "-m drivetrain_launch", command).removeprefix("python ")
        done = run_python(*words.split(), folder=ROOT)
        printed = done.stderr + done.stdout
        assert number.sub("", printed) == number.sub("", text)
        losses = [[float(loss) for loss in number.findall(side)] for side in (printed, text)]
        assert losses[0] == pytest.approx(losses[1], abs=0.01)


def test_the_page_on_fine_tuning_trains_resumes_and_saves(tmp_path):
    """Its command, with a folder as the model: an epoch, then the others, after a new start."""
    tiny, given = tmp_path / "tiny", tiny_llama()
    given.save_pretrained(tiny)
    tokenizer().save_pretrained(tiny)
    (tmp_path / "train.txt").write_text("\n".join(sentence(i, 1, 9) for i in range(40)))
    (program,) = blocks("docs/fine-tune.md", "python")
    (command,) = (t for t in blocks("docs/fine-tune.md", "sh") if "finetune.py" in t)
    words = command.replace("gpt2", str(tiny)).split()[2:]
    for epochs, expected in (("1", ["0"]), ("3", ["1", "2"])):
        (tmp_path / "finetune.py").write_text(program.replace(", 3):", f", {epochs}):"))
        done = launch("--cpu", *words, folder=tmp_path)
        found = re.findall(r"^epoch (\d) loss \d+\.\d{4}$", done.stdout, re.MULTILINE)
        assert found == expected, done.stdout + done.stderr
        went_on = re.findall(r"resumed at step 5, from .*/checkpoint_0$", done.stderr, re.MULTILINE)
        assert len(went_on) == (epochs == "3"), done.stderr
    trained = type(given).from_pretrained(tmp_path / "runs/mine/model").state_dict()
    assert not any(torch.equal(trained[name], old) for name, old in given.state_dict().items())


GPT = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import torch
from train_gpt import GPT
from drivetrain import Accelerator
tokens = torch.arange(64).view(8, 8)

def loss_function(logits, tokens):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

def prepare(accelerator):
    model = GPT(128, 4, 4, 64)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
"""
LOGGED = "import logging; logging.basicConfig(level=logging.INFO)"
PREPARE = "model, optimizer = prepare(accelerator)\n"


def test_program_of_the_page_on_loops(tmp_path):
    (program,) = blocks("docs/inside/loops.md", "python")
    after = (
        "assert accelerator.get_state_dict(model)['norm.bias'].count_nonzero() == 0\n"
        "accelerator.end_training()\n"
    )
    program = f"{GPT}\naccelerator = Accelerator()\n{PREPARE}{program}\n{after}"
    on_ranks(tmp_path, program, "--strategy", "zero3", "--set", "strategy.keep_below=0")


def test_programs_of_the_page_on_fsdp(tmp_path):
    units, tensors = blocks("docs/strategies/fsdp.md", "python")
    programs = [
        *(LOGGED, GPT, units, PREPARE),
        tensors.replace(
            "dcp.load",
            "before = accelerator.get_state_dict(model)\n"
            "with accelerator.gathered(model):\n    torch.nn.init.zeros_(model.norm.weight)\n"
            "dcp.load",
        ),
        "after = accelerator.get_state_dict(model)\n"
        "assert all(torch.equal(after[name], before[name]) for name in before)\n"
        "accelerator.end_training()\n",
    ]
    said = on_ranks(tmp_path, "\n".join(programs))
    (line,) = blocks("docs/strategies/fsdp.md", "text")
    assert line.strip() in said


def test_programs_of_the_page_on_megatron(tmp_path):
    """The same losses on shared ranks as alone; the plan of the page is printed as it shows."""
    page = "docs/strategies/megatron.md"
    (step,) = blocks(page, "python")
    pp = [
        f"strategy.{text}" for text in ("pp=2", "schedule=zb-h1", "micro_batches=4", "trace_dir=t")
    ]
    pipeline = [word for text in pp for word in ("--set", text)]
    steps = "".join(f"    {line}\n" for line in step.splitlines())
    program = (
        f"{GPT}\ntorch.manual_seed(0)\naccelerator = Accelerator()\n{PREPARE}"
        f"for _ in range(3):\n{steps}    optimizer.step()\n    optimizer.zero_grad()\n"
        "    accelerator.print(f'loss {loss.item():.4f}')\naccelerator.end_training()\n"
    )
    found = []
    for ranks, options in ((1, ()), (2, pipeline)):
        said = on_ranks(tmp_path, program, "--strategy", "megatron", *options, ranks=ranks)
        found.append([float(x) for x in re.findall(r"loss (\d+\.\d+)", said)])
    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], abs=2e-4)
    traces = sorted(path.name for path in (tmp_path / "t").iterdir())
    assert (traces[0], len(traces)) == ("pipeline-dp0-tp0-step00001.json", 3)
    (plan,) = (text for text in blocks(page, "yaml") if "plan:" in text)
    (tmp_path / "run.yaml").write_text(plan)
    shown = next(
        text for text in blocks(page, "text", "") if text.startswith("tensor parallel over")
    ).splitlines()
    program = f"{LOGGED}\n{GPT}\naccelerator = Accelerator()\n{PREPARE}accelerator.end_training()\n"
    for options in (
        ["--config", "run.yaml"],
        ["--strategy", "megatron", "--set", "strategy.tp=2"],
    ):
        said = on_ranks(tmp_path, program, *options)
        assert [line for line in shown if line not in said] == []


# --- a plugin ---


@pytest.fixture
def installed(tmp_path):
    """A folder in which the package of the page on plugins lies installed."""
    page = "docs/writing-a-plugin.md"
    project = tomllib.loads(blocks(page, "toml")[0])["project"]
    package = tmp_path / project["name"].replace("-", "_")
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN_FILE.read_text())
    info = tmp_path / f"{package.name}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )
    return tmp_path


def python(folder, *arguments):
    """Run Python in a folder whose packages it finds; return the output of a run that ends well."""
    done = run_python(*arguments, folder=folder, env={"PYTHONPATH": str(folder)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plugin_of_the_page_equals_one_process(installed):
    """Also its test, its command and the strategy inside of another one."""
    said = python(installed, "-m", "drivetrain_launch", "test", "--cpu", "--strategy", "flat")
    assert said.startswith("ok: 2 ranks on cpu and one process differ by")
    nested, conformance, own_test, command = blocks("docs/writing-a-plugin.md", "python")
    whole, alone, toast = (installed / f"{name}.py" for name in ("whole", "alone", "toast"))
    whole.write_text("\n".join([PLUGIN_FILE.read_text(), nested, conformance, PLUGIN]))
    python(installed, "whole.py")
    alone.write_text(own_test)
    done = python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "alone.py")
    assert "1 passed" in done
    toast.write_text(f"{command}\ntoast()\n")
    assert python(installed, "toast.py", "--slices", "3") == "3 slices\n"


@pytest.mark.exhaustive
def test_the_plugin_of_the_page_passes_the_conformance_tests(installed):
    (conformance,) = (
        text
        for text in blocks("docs/writing-a-plugin.md", "python")
        if "StrategyConformance" in text
    )
    (installed / "test_flat.py").write_text(conformance)
    python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "test_flat.py")


# --- a verdict ---


def without_sizes(line):
    """Return the words of a line of the report, without sizes and the number of unequal ones."""
    words = re.sub(r"\d\.\de[+-]\d\d", "", line).split()
    return words[:-1] if words[-1:] and words[-1].isdigit() else words


@pytest.mark.exhaustive
def test_sample_of_verify_is_what_it_says():
    text = (ROOT / "docs/verify.md").read_text()
    command, _, after = text.partition("$ drivetrain ")[2].partition("\n")
    words = ("-m", "drivetrain_launch", "verify", "--cpu", *command.split()[1:])
    done = run_python(*words, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    shown, found = after.partition("```")[0].splitlines(), done.stdout.splitlines()
    assert (found[0], found[-1]) == (shown[0], shown[-1])
    assert list(map(without_sizes, found)) == list(map(without_sizes, shown))


# --- how to contribute ---


@pytest.mark.exhaustive
def test_commands_for_contributors_start_and_their_paths_exist():
    """Tests are collected, not run; the defect that is shown is there."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:src|plugins|launch|tests|docs)/[\w/.]+)`", text)
    shown = " ".join(blocks("CONTRIBUTING.md", "sh")).split()
    paths = [path for path in paths if "X" not in path] + [word for word in shown if "/" in word]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    kit, kind = shown[shown.index("-k") - 1], shown[shown.index("-k") + 1]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, kit, "-k", kind], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    defect = shown[shown.index("tests/defects/run.py") + 1]
    assert f'name = "{defect}"' in (ROOT / "tests/defects/defects.toml").read_text()
