"""The table of loops: ways in which scripts touch what a strategy divides, by strategies."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from way_kit import Way

MEGATRON = {"name": "megatron"}

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"name": "ddp"},
    "zero1": {"name": "zero1"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3", "keep_below": 0},
    "fsdp": {"name": "fsdp"},
    "offload": {"name": "offload", "optimizer": "cpu"},
    "local": {
        **{"name": "local", "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},  # a mean, no more
        "inner": {"name": "zero2"},
    },
    "tp2": {**MEGATRON, "tp": 2},
    "pp2": {**MEGATRON, "pp": 2},
}
"""By the name in the table."""

RANKS = 2


def topics() -> Mapping[str, ModuleType]:
    """Return the modules of ways, by name."""
    names = sorted(path.stem for path in (Path(__file__).parent / "ways").glob("*.py"))
    return {name: importlib.import_module(f"ways.{name}") for name in names}


def ways_of(topic: ModuleType) -> Mapping[str, Way]:
    """Return the ways of a module, its public functions, by name in words."""
    return {
        name.replace("_", " "): value
        for name, value in vars(topic).items()
        if callable(value) and getattr(value, "__module__", "") == topic.__name__
        if not name.startswith("_") and not isinstance(value, type)
    }


def titles() -> Mapping[str, Sequence[str]]:
    """Return the names of ways by the title of their topic."""
    return {
        (topic.__doc__ or "").partition(":")[0].strip(): list(ways_of(topic))
        for topic in topics().values()
    }


def all_ways() -> Mapping[str, Way]:
    """Return all ways by name."""
    return {name: way for topic in topics().values() for name, way in ways_of(topic).items()}
