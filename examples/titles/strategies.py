"""Fine-tunes one base model under every strategy, and writes the table and the curves of them all.

    drivetrain launch --nproc-per-node 2 examples/titles/train.py
    python examples/titles/strategies.py runs/titles --output runs/strategies --cpu -- --steps 150

The runs have the same base model, pairs, batches and seed, so exact strategies end with the loss
of one process. Each run that is complete is kept: the same command goes on after an interruption.
The exit code is 1 when an exact strategy differs from one process.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).with_name("train.py")
ALONE = "one process"
RUNS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    ALONE: (1, ("strategy.name=ddp",)),
    "ddp": (2, ("strategy.name=ddp",)),
    "zero1": (2, ("strategy.name=zero1",)),
    "zero2": (2, ("strategy.name=zero2",)),
    "zero3": (2, ("strategy.name=zero3",)),
    "fsdp": (2, ("strategy.name=fsdp",)),
    "offload": (2, ("strategy.name=offload",)),
    "megatron tp 2": (2, ("strategy.name=megatron", "strategy.tp=2")),
    "megatron pp 2": (2, ("strategy.name=megatron", "strategy.pp=2")),
    "ddp, powersgd": (
        2,
        ("strategy.name=ddp", "strategy.hook=powersgd", "strategy.powersgd_rank=2"),
    ),
}
"""For each row of the table its ranks, and its configuration."""
INEXACT = {"ddp, powersgd"}
EXACT_WITHIN = 1e-3
"""Nats per token: ranks add numbers in another order than one process."""


def folder_of(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def command(name: str, run: Path, output: Path, cpu: bool, words: Sequence[str]) -> list[str]:
    """Return the command line of one run."""
    ranks, settings = RUNS[name]
    chosen = [word for setting in settings for word in ("--set", setting)]
    model = json.loads((run / "settings.json").read_text())["model"] or str(run / "base")
    return [
        *(sys.executable, "-m", "drivetrain_launch", "launch", "--nproc-per-node", str(ranks)),
        *(["--cpu"] if cpu else []),
        *chosen,
        *(str(TRAIN), "--model", model, "--no-before", "--output", str(output), *words),
    ]


def train(name: str, args: argparse.Namespace) -> None:
    """Run one strategy, unless its result is there."""
    output = args.output / folder_of(name)
    if (output / "result.json").exists():
        return
    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(args.run / "pairs.json", output / "pairs.json")
    line = command(name, args.run, output, args.cpu, args.words)
    print(f"{name}: {' '.join(line[1:])}", flush=True)
    done = subprocess.run(line, check=False)  # noqa: S603 - our own command line
    if done.returncode:
        sys.exit(f"{name}: the run ended with code {done.returncode}")


def table(results: Mapping[str, Any]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| strategy | ranks | seconds | memory per rank, MiB | sent per rank and step, KiB | "
        "held-out loss | against one process | BLEU-4 | ROUGE-1 | ROUGE-2 | ROUGE-L |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        ranks = result["ranks"]
        sent = max(rank["sent"] for rank in ranks) / result["steps"]
        memory = max(rank["memory"] for rank in ranks)
        scores = result["scores"]["after"]
        cells = [
            f"`{name}`" if name != ALONE else name,
            str(len(ranks)),
            f"{result['seconds']:.0f}",
            f"{memory / 2**20:.0f}",
            f"{sent / 2**10:,.0f}",
            f"{result['loss']:.4f}",
            f"{difference(results, name):+.0e}" if ALONE in results else "",
            *(f"{score['value']:.2f}" for score in scores.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def difference(results: Mapping[str, Any], name: str) -> float:
    return float(results[name]["loss"] - results[ALONE]["loss"])


def curves(output: Path, names: Sequence[str]) -> None:
    """Draw the training and the held-out loss of all runs."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in names:
        lines = (output / folder_of(name) / "titles.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for axis, key in zip(axes, ("loss", "held-out loss"), strict=True):
            points = {row["step"]: row[key] for row in rows if key in row}
            style = "--" if name in INEXACT else "-"
            axis.plot(sorted(points), [points[step] for step in sorted(points)], style, label=name)
            axis.set(xlabel="step", ylabel=f"{key}, nats per token")
    axes[1].legend(fontsize="small")
    figure.savefig(output / "losses.svg")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="a run of train.py: its base model and its pairs")
    parser.add_argument("--output", type=Path, default=Path("runs/strategies"))
    parser.add_argument(
        "--only", default="", help=f"rows with semicolons between: {'; '.join(RUNS)}"
    )
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)  # arguments of train.py follow
    args = parser.parse_args(given[:end], argparse.Namespace(words=given[end + 1 :]))
    if not (args.run / "pairs.json").exists():
        sys.exit(f"expected a run of train.py, found no pairs.json in {args.run}")
    wanted = args.only.split(";") if args.only else list(RUNS)
    if unknown := [name for name in wanted if name not in RUNS]:
        sys.exit(f"expected rows of {', '.join(RUNS)}; found {', '.join(unknown)}")
    for name in wanted:
        train(name, args)
    files = {name: args.output / folder_of(name) / "result.json" for name in RUNS}
    results = {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}
    made = table(results)
    (args.output / "table.md").write_text(made)
    curves(args.output, list(results))
    print(made)
    compared = [name for name in results if name not in INEXACT and ALONE in results]
    wrong = [name for name in compared if abs(difference(results, name)) > EXACT_WITHIN]
    sys.exit(f"expected the loss of one process, found another: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
