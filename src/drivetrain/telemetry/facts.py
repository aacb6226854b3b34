"""Facts of a run besides its figures: configuration, environment, models, promised bytes."""

import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain._version import __version__
from drivetrain.config import Resolved
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import DrivetrainError
from drivetrain.facade.prepared import PreparedModel
from drivetrain.hardware.catalog import published_peak
from drivetrain.runtime.world import World, restarts
from drivetrain.strategy import Run, find_strategy


def facts_of(
    config: Resolved, run: Run, entries: Sequence[PreparedModel], models: Sequence[ModelSpec]
) -> dict[str, Any]:
    """Return the facts of a run as JSON holds them.

    Args:
        config: the resolved configuration.
        run: the run of its strategy.
        entries: the prepared models.
        models: the facts of each, as the script made it.
    """
    return {
        "version": 1,
        "script": Path(sys.argv[0]).name,
        "restarts": restarts(),
        "configuration": [
            {
                "key": key,
                "value": value,
                "origin": f"{origin.kind}: {origin.text}".removesuffix(": default"),
            }
            for key, value, origin in config.rows()
        ],
        "strategy": config.strategy,
        "precision": str(run.precision),
        "ranks": run.world.size,
        "mesh": {name: axis.size for name, axis in run.mesh.items()},
        "accumulation": run.accumulation,
        "hosts": list(dict.fromkeys(run.world.hosts)),
        "environment": _environment(run.world),
        "models": [_described(entry, spec) for entry, spec in zip(entries, models, strict=False)],
        "peak": _peak(run, models),
    }


def header_of(config: Resolved, run: Run) -> dict[str, Any]:
    """Return the facts of one rank: who it is, where on the mesh, and who does the same work."""
    world = run.world
    strategy, options = find_strategy(config.strategy, config.strategy_config)
    stages = [name for name in strategy.stages(options) if name in run.mesh]
    return {
        "peers": " ".join(f"{name}={run.mesh[name].rank}" for name in stages),
        "rank": world.rank,
        "host": world.hosts[world.rank],
        "device": device_name(world.device),
        "place": {name: axis.rank for name, axis in run.mesh.items()},
    }


def _environment(world: World) -> dict[str, str]:
    return {
        "drivetrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": device_name(world.device),
        "backend": world.backend or "none, one process",
        "threads of a rank": str(torch.get_num_threads()),
    }


def _described(entry: PreparedModel, spec: ModelSpec) -> dict[str, Any]:
    """Return a model's size, and the bytes that its strategy promises to hold and send."""
    strategy = entry.strategy
    facts: dict[str, Any] = {
        "name": type(entry.module).__name__,
        "parameters": sum(each.numel for each in spec.parameters),
        "trained": sum(each.numel for each in spec.parameters if each.trainable),
        "strategy": type(strategy).__name__,
    }
    try:
        promised: Cost = type(strategy).cost(
            strategy.config, replace(spec, states=_states(entry)), strategy.run
        )
    except DrivetrainError as error:  # sizes alone may not be enough for a strategy
        return facts | {"no_promise": str(error).splitlines()[0]}
    return facts | {
        "held": dict(promised.held),
        "sent": {"/".join(key): count for key, count in promised.sent.items()},
        "uncounted": dict(promised.uncounted),
    }


def _states(entry: PreparedModel) -> int:
    """Return how many tensors the optimizers keep for most of their parameters."""
    counts = Counter(
        sum(isinstance(value, Tensor) and value.dim() > 0 for value in state.values())
        for optimizer in entry.optimizers
        for state in optimizer.state.values()
        if isinstance(state, Mapping)
    )
    return counts.most_common(1)[0][0] if counts else 0


def _peak(run: Run, models: Sequence[ModelSpec]) -> dict[str, Any] | None:
    """Return the published peak of this rank's device for the models' products; None without one.

    The dtype of products is that of the precision, or else that of most parameters.
    """
    if run.world.device.type == "cpu":
        return None
    name = device_name(run.world.device)
    elements: Counter[torch.dtype] = Counter()
    for each in (each for model in models for each in model.parameters):
        elements[each.dtype] += each.numel
    given = run.precision.compute or run.precision.param
    dtype = given or max(elements, key=lambda each: elements[each], default=torch.float32)
    found = published_peak(name, dtype)
    if found is None:
        return None
    return {
        "device": name,
        "operations_per_second": found.operations_per_second,
        "of": found.precision,
        "source": found.source,
    }


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives a device; CPU for the processor."""
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))
