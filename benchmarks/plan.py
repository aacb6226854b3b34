"""Compares predictions of the planner with measured steps and peaks."""

import argparse
import csv
import gc
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from peers import AllocatedPeak, allocated
from programs import run_program
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.communication import gather_object
from drivetrain.data.examples import Candidate
from drivetrain.errors import DrivetrainError
from drivetrain.hardware.description import Hardware, load_hardware
from drivetrain.planner.layout import layout_of, plain, read_layout
from drivetrain.planner.search import Prediction, Predictor, Task
from drivetrain.simulator.traced import TracedModel, traced_model
from drivetrain.simulator.transformer import GptShape

# --- error ---


FloatArray: TypeAlias = NDArray[np.float64]
AXES = ("tp", "pp", "dp", "micro_batch", "hidden")


def error_predicted(row: Mapping[str, str], hardware: Hardware, fixed: Mapping[str, str]) -> float:
    """Return the milliseconds of a step that are predicted for a row of the table."""
    count = {key: int(value) for key, value in row.items() if key != "iteration_ms"}
    shape = GptShape(
        layers=count["layers"], hidden=count["hidden"], heads=count["heads"], seq=count["seq"]
    )
    per_host = min(count["gpus"], hardware.host.devices)
    task = Task(shape, count["global_batch"], hardware, count["gpus"] // per_host, per_host)
    keys = {key: row[key] for key in ("tp", "pp", "dp", "micro_batch")}
    predictor = Predictor(task)
    planned = layout_of({**keys, **fixed}, predictor.installed)
    return 1e3 * predictor.predict(planned).step_seconds


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the ranks (Spearman), for values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def draw(rows: Sequence[Mapping[str, str]], measured: FloatArray, planned: FloatArray,
         file: Path) -> None:  # fmt: skip
    """Draw predicted over measured steps, colored by tensor parallelism, with a band of 10%."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 5.2), layout="constrained")
    ends = np.array([min(measured.min(), planned.min()), max(measured.max(), planned.max())]) / 1e3
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color="0.9", label="within 10%", linewidth=0)
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    ranks = np.array([int(row["tp"]) for row in rows])
    for tp, marker in zip(sorted(set(ranks)), "os^D", strict=False):
        of = ranks == tp
        axes.scatter(measured[of] / 1e3, planned[of] / 1e3, s=9, marker=marker, label=f"tp={tp}",
                     alpha=0.6, linewidth=0)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="measured step, seconds",
             ylabel="predicted step, seconds", title=f"{len(rows)} published steps")  # fmt: skip
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def error_main() -> None:
    """The error of ``drivetrain plan`` against a table of measured steps of GPT models.

    The table is a CSV file with the columns gpus, global_batch, micro_batch, hidden, heads, layers,
    seq, tp, dp, pp and iteration_ms, one measured layout per row, as planners publish them.

        python benchmarks/plan.py error measured.csv --hardware a100-80gb --recompute full

    ``--figure FILE`` draws the rows (needs matplotlib): docs/pictures/planned.png is made so.
    """
    parser = argparse.ArgumentParser(description=str(error_main.__doc__))
    parser.add_argument("table", type=Path)
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--figure", type=Path, help="a PNG or SVG file to draw the rows to")
    options = parser.parse_args()
    hardware = load_hardware(options.hardware)
    fixed = {"recompute": options.recompute, "precision": options.precision}
    rows = list(csv.DictReader(options.table.open(encoding="utf-8")))
    measured = [float(row["iteration_ms"]) for row in rows]
    times = [error_predicted(row, hardware, fixed) for row in rows]
    errors = np.array(times) / np.array(measured) - 1
    if options.figure:
        draw(rows, np.array(measured), np.array(times), options.figure)
    print(
        f"{len(rows)} rows: mean absolute error {abs(errors).mean():.1%}, bias "
        f"{errors.mean():+.1%}, from {errors.min():+.1%} to {errors.max():+.1%}, rank correlation "
        f"{rank_correlation(times, measured):.3f}"
    )
    for axis in AXES:
        groups = defaultdict(list)
        for row, error in zip(rows, errors, strict=True):
            groups[int(row[axis])].append(error)
        parts = (f"{value}: {np.abs(group).mean():.1%}" for value, group in sorted(groups.items()))
        print(f"{axis:12} {', '.join(parts)}")


# --- held ---


ROOT = Path(__file__).parents[1]
WARM_UPS, STEPS, ROUNDS = 3, 10, 3
MILLI, MIB = 1e3, 2**20


class Layer(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Words(nn.Module):
    """A decoder: an embedding, blocks, and a head that shares its weight."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Logits of a usual size: with those of the default table, gradients become denormal
        # numbers, with which a processor computes many times slower.
        nn.init.normal_(self.table.weight, std=width**-0.5)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def wide() -> nn.Module:
    """Return a perceptron with far more parameters than activations."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 16))


def pixels() -> nn.Module:
    """Return a convolutional network with far more activations than parameters."""
    widths = (3, 16, 32, 32)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(less, more, 3, padding=1), nn.ReLU())
        for less, more in itertools.pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16))


@dataclass(frozen=True)
class Subject:
    """One of the three models: its inputs for a rank's batch, its classes, rows and targets."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    rows: int
    targets: int
    layouts: tuple[str, ...]


REPLICAS = ("ddp", "zero1", "zero2", "zero3", "fsdp")
PLAIN = tuple(f"data_parallel={name}" for name in REPLICAS)
SUBJECTS = {
    "words": Subject(
        lambda: Words(192, 4, 2048),
        lambda rows: torch.randint(2048, (rows, 64)),
        2048,
        8,
        8 * 64,
        (*PLAIN, "tp=2", "pp=2,schedule=gpipe"),
    ),
    "wide": Subject(wide, lambda rows: torch.randn(rows, 1024), 16, 64, 64, PLAIN),
    "pixels": Subject(pixels, lambda rows: torch.randn(rows, 3, 32, 32), 16, 16, 16, PLAIN),
}


def predicted(
    paper: TracedModel, subject: Subject, text: str, hardware: Hardware, accelerator: Accelerator
) -> Prediction:
    """Return the prediction for a layout whose replicas each train the subject's rows."""
    world = accelerator.world
    planned = read_layout(f"{text},precision=no,micro_batch={subject.rows}")
    hosts = len(set(world.hosts))
    dp = planned.kind.axes(planned.config, world.size)["dp"]
    task = Task(paper, subject.rows * dp, hardware, hosts, world.local_size)
    return Predictor(task).predict(planned)


def measured(
    accelerator: Accelerator, subject: Subject, section: dict[str, Any], steps: int = STEPS
) -> tuple[list[float], float]:
    """Return the seconds of steps, each of the slowest rank, and the peak of memory in bytes."""
    torch.manual_seed(0)
    gc.collect()
    before = allocated()
    model = subject.make()
    model.example_inputs = (subject.inputs(2),)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer, strategy=section)

    def take_step() -> float:
        x = subject.inputs(subject.rows)
        target = torch.randint(subject.classes, (subject.targets,))
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        logits = model(x)
        accelerator.backward(nn.functional.cross_entropy(logits.flatten(0, -2), target))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.wait_for_everyone()
        return time.perf_counter() - start

    seconds = [max(gather_object([take_step()])) for _ in range(WARM_UPS + steps)][WARM_UPS:]
    gc.collect()  # what prepare() and the first step left in cycles
    with AllocatedPeak() as memory:
        take_step()
    peak = max(gather_object([memory.peak - before]))
    accelerator.free_memory()
    return seconds, peak


Compared: TypeAlias = tuple[str, str, float, float, float, float]
"""(model, layout, predicted seconds, measured seconds, predicted peak, measured peak)."""


def compared(hardware: Hardware, accelerator: Accelerator) -> Iterator[Compared]:
    """Yield every layout of every model that runs on these ranks."""
    for name, subject in SUBJECTS.items():
        inputs = subject.inputs(2)
        paper = traced_model(subject.make(), [Candidate("example", (inputs,), {})])
        plans: dict[str, Prediction] = {}
        for text in subject.layouts:
            try:
                plans[text] = predicted(paper, subject, text, hardware, accelerator)
                # Some memory of the first steps stays for ever.
                measured(accelerator, subject, plain_section(plans[text]), steps=1)
            except DrivetrainError as error:
                plans.pop(text, None)
                problem = str(error).splitlines()[0][:90]
                accelerator.print(f"{name:8} {text:28} cannot run: {problem}")
                accelerator.free_memory()
        seconds: dict[str, list[float]] = {text: [] for text in plans}
        peaks: dict[str, float] = {}
        for text in ROUNDS * list(plans):
            found, peaks[text] = measured(accelerator, subject, plain_section(plans[text]))
            seconds[text] += found
        for text, plan in plans.items():
            median = statistics.median(seconds[text])
            yield name, text, plan.step_seconds, median, plan.peak_bytes, peaks[text]


def plain_section(plan: Prediction) -> dict[str, Any]:
    """Return the section of a configuration that names the predicted strategy."""
    return plain({"name": plan.planned.strategy, **plan.planned.values})


def report(rows: Sequence[Compared], write: Callable[[str], object]) -> None:
    """Write the table, the errors, and the regret of each model."""
    write("| model | layout | planned, ms | measured | error | peak, MiB | measured | error |")
    write("|---|---|---|---|---|---|---|---|")
    for name, text, plan, found, peak, most in rows:
        times = f"{plan * MILLI:.1f} | {found * MILLI:.1f} | {plan / found - 1:+.1%}"
        memory = f"{peak / MIB:.1f} | {most / MIB:.1f} | {peak / most - 1:+.1%}"
        write(f"| {name} | `{text}` | {times} | {memory} |")
    for what, at in (("time", 2), ("peak", 4)):
        errors = [row[at] / row[at + 1] - 1 for row in rows]
        sizes = list(map(abs, errors))
        write(
            f"{what}: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, "
            f"lowest {min(errors):+.1%}"
        )
    for name in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == name]
        chosen, best = min(mine, key=lambda row: row[2]), min(mine, key=lambda row: row[3])
        slower = chosen[3] / best[3] - 1
        write(f"{name}: chosen {chosen[1]}, {slower:.1%} slower than {best[1]}")


def on_hosts(rate: str) -> None:
    """Run this file on two emulated hosts with one rank each, behind links of a rate."""
    sys.path.append(str(ROOT / "tests" / "shared"))
    from emulated_hosts import Hosts

    folder = Path.cwd()
    # Both hosts have this machine's cores, and would each start a thread for every core.
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    drivetrain = [sys.executable, "-m", "drivetrain_launch"]
    with tempfile.TemporaryDirectory() as place, Hosts(Path(place), 2, rate) as hosts:
        for words in (
            ["hardware", "measure", f"hosts-{rate}.yaml", "--cpu", "--nproc-per-node", "1"],
            ["launch", "--cpu", "--nproc-per-node", "1"],
        ):
            meeting = ["--nnodes", "2", "--rdzv-endpoint", f"{hosts[0].address}:29400"]
            tail = [str(Path(__file__).resolve()), "held", "--hardware", f"hosts-{rate}.yaml"]
            running = [
                host.start(
                    [*drivetrain, *words, *meeting, "--node-rank", str(index),
                     *(tail if words[0] == "launch" else [])],
                    folder=folder,
                    env=alone,
                )
                for index, host in enumerate(hosts)
            ]  # fmt: skip
            for each in running:
                out, err = each.communicate()
                sys.stdout.write(out)
                if each.returncode:
                    raise subprocess.CalledProcessError(each.returncode, each.args, out, err)


def held_main() -> None:
    """Predicted and measured step times side by side: every strategy, three models, on these ranks.

        drivetrain hardware measure mine.yaml --cpu --nproc-per-node 2
        drivetrain launch --cpu --nproc-per-node 2 benchmarks/plan.py held --hardware mine.yaml

    Each layout trains the same batches, in three rounds over all layouts of a model. The median of
    its steps, each as long as that of the slowest rank, is compared with the prediction for the
    described hardware; the description is made of medians, too. The peak of memory is the most
    bytes that the rank with most has allocated since before the model was made, looked at behind
    every operator of a later step. The last lines are the median and the worst errors, and by how
    much the layout with the best prediction is slower than the quickest measured layout. With
    ``--hosts`` the program starts two emulated hosts (as root, with iproute2) behind links of a
    rate, measures them, and compares there:

        python benchmarks/plan.py held --hosts 100mbit
        python benchmarks/plan.py held --hosts 1gbit
    """
    parser = argparse.ArgumentParser(description=str(held_main.__doc__).splitlines()[0])
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--hosts", metavar="RATE", help="two emulated hosts behind such a link")
    options = parser.parse_args()
    if options.hosts:
        on_hosts(options.hosts)
        return
    accelerator = Accelerator()
    rows = list(compared(load_hardware(options.hardware), accelerator))
    report(rows, accelerator.print)
    accelerator.end_training()


if __name__ == "__main__":
    run_program({"error": error_main, "held": held_main})
