"""The cost of local steps: the strategy inside, and a round's exchange over its steps."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from drivetrain.collectives import Route
from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.runtime.mesh import Axis, HostLevels
from drivetrain.strategy import Run
from drivetrain_local.fragments import fragment_of_each
from drivetrain_local.late import told_numbers
from drivetrain_local.options import LocalOptions
from drivetrain_local.outer import wide
from drivetrain_local.worker import alone, links_of_workers, run_inside

Sent = Counter[tuple[str, str]]


def estimate(config: LocalOptions, model: ModelSpec, run: Run) -> Cost:
    """Return the bytes that a rank holds, and the bytes that rank 0 sends per step of a round.

    Bytes of an exchange are exact where the strategy inside keeps whole parameters; where it
    divides them, this rank's exchange is counted as that share of the whole one.
    """
    near, far = config.planned(run.mesh, run.world)
    kind, options = config.strategy_inside()
    inside = run_inside(run, near)
    cost = kind.cost(options, model, inside)
    if far.size == 1:
        return cost
    trained = [spec for spec in model.parameters if spec.trainable]
    whole = sum(spec.nbytes for spec in trained)
    # A state of the optimizer is as large as this rank's part of the parameters.
    held = [
        kind.cost(options, replace(model, states=states), inside).held.get("optimizer", 0)
        for states in (0, 1)
    ]
    part = held[1] - held[0]
    route = Route(far)
    if run.links.in_channels:
        route = Route(far, HostLevels(alone(near), far), links_of_workers(run))
    exchanged, kept = _exchanges(config, model, route)
    share = part / whole if whole else 0.0
    in_round = Sent({key: round(count * share) for key, count in exchanged.items()})
    in_round += route.broadcast(sum(spec.nbytes for spec in model.buffers))
    if config.late_s:
        in_round += _agreement(config, near, far)
    sent = {key: -(-count // config.every) for key, count in in_round.items()}
    under_way = round(part * config.under_way)
    return Cost(
        held={**cost.held, "outer": 2 * part + under_way + round(kept * share)},
        sent=_joined(cost.sent, sent),
        uncounted=cost.uncounted,
    )


def _agreement(config: LocalOptions, near: Axis, far: Axis) -> Sent:
    """Return the bytes by which the ranks of a worker learn who takes part, in a round."""
    told = Route(near).broadcast(told_numbers(far.size) * torch.int64.itemsize)
    return Sent({key: count * config.fragments for key, count in told.items()})


def _exchanges(config: LocalOptions, model: ModelSpec, route: Route) -> tuple[Sent, int]:
    """Return the bytes sent in a round by a rank with whole parameters, and those kept back."""
    trained = [spec for spec in model.parameters if spec.trainable]
    names = [spec.name for spec in model.parameters]
    fragments = fragment_of_each(model.module, names, config.fragments)
    groups: dict[tuple[int, object], list[TensorSpec]] = {}
    for spec in trained:
        groups.setdefault((fragments[spec.name], spec.dtype), []).append(spec)
    sent, kept = Sent(), 0
    for members in groups.values():
        stretch = _stretch(members)
        sent += route.gradients_summed(stretch)
        kept += route.kept_back(stretch)
    return sent, kept


def _stretch(members: list[TensorSpec]) -> Stretch:
    """Describe the message about some parameters."""
    rows, edge = [], 0
    for spec in members:
        rows.append(ParameterRow(spec.name, spec.shape, 0, edge))
        edge += spec.numel
    return Stretch.of(edge, wide(members[0].dtype), rows)


def _joined(
    first: Mapping[tuple[str, str], int], second: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    total = Sent(dict(first)) + Sent(dict(second))
    return {key: count for key, count in total.items() if count}
