"""The sizes of the house only fall: what is counted is at most what ``counters.toml`` holds."""

import json
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest
import source_tree
from house import BARE, LOW, STEADY, launched, training, walks
from source_tree import CHECKOUT, SourceTree, code_lines

from drivetrain.strategy import Strategy

COUNTERS = Path(__file__).with_name("counters.toml")
FALLEN, FALLEN_WALK = 0.98, 0.85
"""A figure below this share of the one that is held has fallen: the lower one is to be held. A walk
is shorter in a process that remembers answers of walks before."""


def test_nothing_in_the_files_rises():
    modules = SourceTree(CHECKOUT).modules.values()
    known = {*dir(Strategy), *Strategy.__annotations__}
    only_falls(
        {
            "product: modules": len(modules),
            "product: code lines": code_lines(modules),
            "tests: code lines": code_lines((CHECKOUT / "tests").rglob("*.py")),
            "docs: words": sum(
                len(page.read_text(encoding="utf-8").split())
                for page in [CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md")]
            ),
            "benchmarks: programs": len(list((CHECKOUT / "benchmarks").glob("*.py"))),
            "Strategy: public names": sum(not name.startswith("_") for name in known),
        }
    )


@pytest.mark.ranks(2)
def test_walks_meet_no_more():
    only_falls(flat(walks(Namespace(blocks=4, width=32))), FALLEN_WALK)


def test_a_step_of_one_rank_copies_nothing_and_launches_little_more_than_a_bare_one():
    def counted(side):
        step = training(side, Namespace(blocks=2, width=16, fused=True))
        for _ in range(STEADY):
            step()
        return launched(step)

    bare = counted(BARE)["operators"]
    for side in ("ddp", "zero2", "zero3", "fsdp"):
        found = counted(side)
        assert "copies" not in found, side
        assert found["operators"] <= bare + 6, side
    # Casts: 6 gradients of matrices; 5 biases for autocast, and their gradients; the output, and
    # its gradient; and the masters of 4 units for forward, of 2 for backward again.
    assert counted(f"zero3{LOW}")["copies"] == 6 + 2 * 5 + 2 + 4 + 2


def test_launch_runs_no_more_until_the_first_rank():
    command = [sys.executable, source_tree.__file__]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    only_falls(flat({"launch to the first rank": json.loads(out)}))


def flat(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {f"{walk}: {what}": n for walk, met in counts.items() for what, n in met.items()}


def only_falls(found: Mapping[str, int], fallen: float = FALLEN) -> None:
    held = tomllib.loads(COUNTERS.read_text(encoding="utf-8"))
    wrong = [
        f'"{name}" = {number}  # {held[name]} is held'
        for name, number in found.items()
        if not fallen * held[name] <= number <= held[name]
    ]
    assert not wrong, "write what fell into counters.toml, and why, where one must rise:\n" + (
        "\n".join(wrong)
    )
