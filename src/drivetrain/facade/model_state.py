"""What a checkpoint holds of a prepared model besides its shards, and what a load converted."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint import ModelReader
from drivetrain.checkpoint.agreement import gather
from drivetrain.errors import CheckpointError
from drivetrain.facade.core import ModelEntry
from drivetrain.parts.naming import clean_name
from drivetrain.runtime.world import World


def same_number(what: str, expected: int, found: int) -> None:
    """Refuse a checkpoint of another number of something.

    Raises:
        CheckpointError: the numbers differ.
    """
    if expected != found:
        raise CheckpointError(
            f"expected a checkpoint with {expected} {what}, found {found}; prepare and register "
            "the same objects in the same order as the run that saved it"
        )


def scalars_of(entry: ModelEntry) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the optimizers' state that is no tensor, by optimizer and parameter name."""
    result: dict[int, dict[str, dict[str, Any]]] = {}
    names = entry.held_names()
    for i, optimizer in enumerate(entry.optimizers):
        result[i] = {
            names[id(parameter)]: plain
            for parameter, state in optimizer.state.items()
            if id(parameter) in names
            and (plain := {k: v for k, v in state.items() if not isinstance(v, Tensor)})
        }
    return result


def groups_of(entry: ModelEntry) -> list[list[dict[str, Any]]]:
    """Return the hyperparameters of every group of every optimizer of a model."""
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in entry.optimizers
    ]


_KERNELS = frozenset({"foreach", "fused"})
"""Which kernel steps is no state: the strategy that loads has its own choice."""


def load_groups(entry: ModelEntry, saved: list[list[dict[str, Any]]]) -> None:
    """Put hyperparameters back into the groups of a model's optimizers.

    Raises:
        CheckpointError: there are other numbers of optimizers or groups.
    """
    same_number("optimizers of a model", len(entry.optimizers), len(saved))
    for optimizer, groups in zip(entry.optimizers, saved, strict=True):
        same_number("parameter groups", len(optimizer.param_groups), len(groups))
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                if key in _KERNELS:
                    continue
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def aliases_of(entry: ModelEntry) -> dict[str, str]:
    """Return the further names of tied parameters and buffers -> the first name of each."""
    model = entry.strategy.unwrap(entry.model)
    first: dict[int, str] = {}
    aliases = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            kept = first.setdefault(id(tensor), clean_name(name))
            if kept != clean_name(name):
                aliases[clean_name(name)] = kept
    return aliases


def converted(entry: ModelEntry, reader: ModelReader, world: World) -> str:
    """Return which weights a load had to convert, "" when none. Collective.

    Compared is what the strategy keeps (masters, where it has them) with what was saved.
    """
    mine: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for shard in entry.strategy.shards():
        if not shard.state and shard.tensor.dtype != reader.dtype(shard.name):
            mine[shard.name] = (reader.dtype(shard.name), shard.tensor.dtype)
    everyone = {name: pair for each in gather(world, mine) for name, pair in each.items()}
    kinds = Counter(f"from {saved} to {kept}" for saved, kept in everyone.values())
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
