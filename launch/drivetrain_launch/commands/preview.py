"""``launch --dry-run``: the resolved configuration, the mesh, and the cost on a rank."""

from collections.abc import Iterator

import torch

from drivetrain.config.resolve import Resolved
from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.strategy import find_strategy
from drivetrain_launch.forecast.planning import plan
from drivetrain_launch.forecast.sizes import size_text
from drivetrain_launch.ranks.placement import accelerators, cores, local_ranks
from drivetrain_launch.tables import show_table, yaml_text

LAYERS = 1000
LAYER_SHAPE = (1000, 1000)
EXAMPLE = "1e9 parameters in fp32 (1000 tensors of 1000 x 1000) with Adam"
"""The model whose cost is shown: a dry run does not load the user's model."""


def preview(resolved: Resolved) -> None:
    """Print the three tables; nothing is started.

    Raises:
        ConfigError: the strategy does not fit this number of ranks.
        PreflightError: there are too few accelerators.
    """
    settings = resolved.run.launch
    available = 0 if settings.device == "cpu" else accelerators()
    ranks = local_ranks(settings, accelerators=available, cores=cores())
    run = plan(resolved, ranks)
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    cost = kind.cost(options, example_model(), run)
    show_configuration(resolved, every=False)
    show_table(
        f"Mesh: {run.mesh} ({settings.nnodes} x {ranks} ranks)",
        ("axis", "size", "ranks of the first line", "crosses hosts"),
        [
            (axis.name, str(axis.size), _ranks(axis.ranks), "yes" if axis.spans_hosts else "no")
            for axis in run.mesh.values()
        ],
    )
    show_table(
        f"Cost of a model of {EXAMPLE}, on rank 0", ("what", "amount"), list(_cost_rows(cost))
    )


def show_configuration(resolved: Resolved, *, every: bool = True) -> None:
    """Print all knobs, or the chosen ones, with values and origins."""
    found = list(resolved.rows())
    kept = [row for row in found if every or row[2].kind != "default" or row[0] == "strategy.name"]
    rows = [(key, yaml_text(value), origin.text) for key, value, origin in kept]
    left = len(found) - len(kept)
    more = f" ({left} more keys at their default: drivetrain config show)" if left else ""
    show_table(f"Configuration{more}", ("key", "value", "origin"), rows)


def example_model() -> ModelSpec:
    """Describe the model for which a strategy's cost is shown."""
    return ModelSpec(
        tuple(
            TensorSpec(f"layers.{index}.weight", LAYER_SHAPE, torch.float32, True)
            for index in range(LAYERS)
        ),
        states=2,
    )


def _cost_rows(cost: Cost) -> Iterator[tuple[str, str]]:
    for kind, count in cost.held.items():
        yield f"held: {kind}", size_text(count)
    yield "held: total", size_text(cost.total_held)
    for (axis, operation), count in cost.sent.items():
        yield f"sent per step: {operation} over {axis}", size_text(count)
    for axis, what in cost.uncounted.items():
        yield f"sent per step: {what} over {axis}", "not counted: depends on the batch"
    if not cost.uncounted:
        yield "sent per step: total", size_text(cost.total_sent)
    elif cost.sent:
        yield "sent per step: total of what is counted", size_text(cost.total_sent)


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (", ..." if len(ranks) > 8 else "")
