"""A cell of the zoo: one family under one strategy, held against one process."""

import traceback
from collections.abc import Mapping
from typing import Any

from cells import CRASHED, DIFFERENT, EQUAL, REFUSED, Outcome
from drivetrain.errors import CollectiveError, ConfigError, UsageError
from drivetrain.verify import Difference, RunRecord, compare
from families import FAMILIES
from zoo_training import on_ranks

MEGATRON = {"name": "megatron"}

STRATEGIES: dict[str, Mapping[str, Any]] = {
    "ddp": {"name": "ddp"},
    "zero1": {"name": "zero1"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3", "keep_below": 0},
    "fsdp": {"name": "fsdp"},
    "offload": {"name": "offload", "optimizer": "cpu"},
    "tp2": {**MEGATRON, "tp": 2},
    "pp2": {**MEGATRON, "pp": 2},
    "tp2-pp2": {**MEGATRON, "tp": 2, "pp": 2},
}
"""By the name in the table."""

ON_FOUR_RANKS = (
    "llama", "qwen3", "gpt2", "gemma2", "falcon-new", "bert", "t5", "mixtral", "vit", "whisper",
    "own-decoder", "frozen-parts",
)  # fmt: skip
"""The families that are trained on four ranks, which takes longer."""

OTHER_PATHS = ("the ranks took different paths", "every rank must come to each collective")
"""What the check of the order of operations says of control flow that depends on a rank's data."""

RELATIVE, ABSOLUTE = 1e-8, 1e-9
"""Two orders above the rounding of fp64 in the trainings of the zoo."""


def ranks_of(strategy: str) -> int:
    """Return on how many ranks a strategy of the table runs."""
    return 4 if strategy == "tp2-pp2" else 2


def is_run(family: str, strategy: str) -> bool:
    """Return whether the zoo trains a family under a strategy."""
    return ranks_of(strategy) == 2 or family in ON_FOUR_RANKS


def kinds() -> Mapping[str, list[str]]:
    """Return the families by their kind."""
    found: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        found.setdefault(family.kind.capitalize(), []).append(name)
    return found


def parts_of(strategy: str) -> int:
    """Return how many data-parallel ranks a strategy of the table has."""
    return 1 if STRATEGIES[strategy]["name"] == "megatron" else 2


def run_on_rank(family: str, strategy: str, expected: RunRecord) -> Outcome:
    """Train one family under one strategy on this rank, and compare."""
    divided: list[float] = []
    try:
        found = on_ranks(FAMILIES[family], STRATEGIES[strategy], divided)
    except (ConfigError, UsageError) as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        if isinstance(error, CollectiveError) and any(each in str(error) for each in OTHER_PATHS):
            return Outcome(REFUSED, str(error))
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename.rpartition('site-packages/')[2]}:{last.lineno}"
        return Outcome(CRASHED, f"{type(error).__name__}: {error} ({place})")
    if text := differences(found, expected):
        return Outcome(DIFFERENT, text)
    return Outcome(EQUAL, divided=divided[0])


def differences(found: RunRecord, expected: RunRecord) -> str:
    """Return the first difference of each kind of number, in words; nothing if all are equal."""
    comparison = compare(found, expected)
    if comparison.problem:
        return comparison.problem
    first: dict[str, Difference] = {}
    for each in comparison.differences:
        if not (each.relative <= RELATIVE or each.absolute <= ABSOLUTE):
            first.setdefault(each.kind, each)
    return "; ".join(map(_in_words, first.values()))


def _in_words(each: Difference) -> str:
    named = f"{each.kind} {each.name}".strip()
    return f"{named} of step {each.step} is {each.found:.9g}, in one process {each.expected:.9g}"
