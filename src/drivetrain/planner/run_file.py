"""The configuration of a layout, as ``drivetrain launch --config`` reads it."""

from typing import Any

import yaml

from drivetrain.config import DtypesConfig, RunConfig
from drivetrain.errors import ConfigError
from drivetrain.links.chosen import EXACT
from drivetrain.planner.layout import PlannedLayout, plain
from drivetrain.runtime.precision import Precision


def run_file(planned: PlannedLayout, micro_batches: int, hosts: int, per_host: int) -> str:
    """Return the YAML of a layout: strategy, precision, recompute, accumulation, ranks.

    Args:
        planned: the layout.
        micro_batches: of a step, on each data-parallel rank.
        hosts: of the run.
        per_host: ranks of a host.
    """
    values: dict[str, Any] = {
        "strategy": {"name": planned.strategy, **plain(planned.values)},
        **run_settings(planned, micro_batches),
        "launch": {"nproc_per_node": per_host, "nnodes": hosts},
    }
    first = f"# A batch of the loader has {planned.micro_batch} samples: the plan's micro_batch.\n"
    return first + yaml.safe_dump(values, sort_keys=False)


def run_settings(planned: PlannedLayout, micro_batches: int) -> dict[str, Any]:
    """Return the keys of a configuration that a layout decides beside its strategy."""
    found: dict[str, Any] = {"precision": planned.precision}
    if _converts(planned):
        found["dtypes"] = {"param": planned.precision}
    found["accumulation"] = micro_batches
    if planned.recompute != "none":
        found["recompute"] = {"mode": planned.recompute}
    methods = {"gradients": planned.links, "activations": planned.activations}
    if far := {use: name for use, name in methods.items() if name != EXACT}:
        found["links"] = {"far": far}
    return found


def _converts(planned: PlannedLayout) -> bool:
    """Whether forward reads parameters of two bytes: not where a strategy keeps no masters."""
    if planned.precision == "no":
        return False
    dtypes = DtypesConfig(param=planned.precision)  # type: ignore[arg-type]
    run = RunConfig(precision=planned.precision, dtypes=dtypes)  # type: ignore[arg-type]
    try:
        planned.kind.check_options(planned.config, Precision.configured(run))
    except ConfigError:
        return False
    return True
