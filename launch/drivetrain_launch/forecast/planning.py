"""The run as rank 0 will see it, laid out without a process group: refused, or promised bytes.

A promise is one row of bytes for one model and one form of a strategy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from drivetrain.compression.communicator import declared_islands
from drivetrain.compression.methods import LinkMethods
from drivetrain.config import Layer, ValueOrigin
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.registry import strategies
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Form, Run, find_strategy
from drivetrain.traffic import Traffic
from drivetrain_launch.ranks.placement import check_size

# --- the run as rank 0 will see it, laid out without a process group ---

ACCELERATOR = "cuda"
"""A kind of device with memory of its own; costs depend on no more than this."""

LAYERS = 1000
LAYER_SHAPE = (1000, 1000)
EXAMPLE = "1e9 parameters in fp32 (1000 tensors of 1000 x 1000) with Adam"
"""The model in words: a dry run does not load the user's model."""


def plan(resolved: Resolved, ranks: int, *, on_accelerators: bool = False) -> Run:
    """Return the run as rank 0 would see it, with so many ranks on each host."""
    settings = resolved.run.launch
    world = planned_world(ranks, settings.nnodes)
    return plan_on(resolved, world.hosts, on_accelerators=on_accelerators)


def plan_on(resolved: Resolved, hosts: Sequence[str], *, on_accelerators: bool = False) -> Run:
    """Return the run as rank 0 would see it, with the host of each rank; hosts may be unequal."""
    world = World(size=len(hosts), local_size=hosts.count(hosts[0]), hosts=tuple(hosts))
    world = declared_islands(world, resolved.run.links.hardware)
    if on_accelerators:
        world = replace(world, device=torch.device(ACCELERATOR))
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    axes = kind.axes(options, world.size)
    return Run(
        world=world,
        mesh=Mesh.plan(axes, world),
        precision=Precision.configured(resolved.run),
        accumulation=resolved.run.accumulation,
        traffic=Traffic(),
        links=LinkMethods.configured(resolved.run.links, undoable=resolved.run.skips_steps),
    )


def planned_world(ranks: int, nodes: int) -> World:
    """Return the world of a run as rank 0 will see it, with as many ranks on each host.

    Raises:
        ConfigError: as ``check_size``.
    """
    check_size(ranks, nodes)
    hosts = tuple(f"host {host}" for host in range(nodes) for _ in range(ranks))
    return World(size=len(hosts), local_size=ranks, hosts=hosts)


def example_model() -> ModelSpec:
    """Describe the model for which a strategy's cost is shown."""
    return ModelSpec(
        tuple(
            TensorSpec(f"layers.{index}.weight", LAYER_SHAPE, torch.float32, True)
            for index in range(LAYERS)
        ),
        states=2,
    )


# --- the promises of all strategies for one model ---


@dataclass(frozen=True, slots=True)
class Promise:
    """The cost of one form of a strategy, or the reason why there is none.

    Attributes:
        form: the strategy with its options.
        cost: bytes that rank 0 holds and sends; nothing where it cannot train the model so.
        refusal: why it cannot; empty where it can.
        name: of the strategy.
        options: of the form.
        exact: whether the form averages gradients as they are, without an approximation.
        between_hosts: bytes that leave a host in a step, as far as they are known.
    """

    form: str
    cost: Cost = Cost()
    refusal: str = ""
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    between_hosts: int = 0


def promises_for(
    model: ModelSpec, resolved: Resolved, ranks: int, *, on_accelerators: bool = True
) -> Iterator[Promise]:
    """Yield the promise of every installed strategy in its forms.

    Args:
        model: its facts.
        resolved: precision, accumulation and hosts of the run; its strategy is one more form where
            somebody has chosen it.
        ranks: of all hosts, which share them equally.
        on_accelerators: whether the ranks compute there, and not on the CPU.
    """
    registry = strategies()
    chosen = "strategy.name" in resolved.origins
    hosts = resolved.run.launch.nnodes
    world = declared_islands(planned_world(ranks // hosts, hosts), resolved.run.links.hardware)
    forms: list[tuple[str, Form]] = [
        (name, form)
        for name in registry.choices
        for form in registry.load(name).planning().candidates(world)
    ]
    promise = partial(_promise, model, ranks=ranks, on_accelerators=on_accelerators)
    if chosen:
        yield promise(f"{resolved.strategy} (as configured)", resolved)
    for name, each in forms:
        options = dict(each.options)
        origin = ValueOrigin("file", "the form")
        layer = Layer({"strategy": {"name": name, **options}}, {"strategy": origin})
        core = {key: value for key, value in resolved.to_dict().items() if key != "strategy"}
        shown = ", ".join(f"{key} {value}" for key, value in options.items())
        try:
            form = resolve(Layer(core), layer, find_config=registry.find_config)
        except ConfigError as error:
            yield Promise(f"{name} {shown}".strip(), refusal=str(error))
            continue
        if chosen and (resolved.strategy, resolved.strategy_config) == (name, form.strategy_config):
            continue  # that is the form that somebody has chosen
        made = promise(f"{name} {shown}".strip(), form)
        yield replace(made, name=name, options=options, exact=each.exact)


def _promise(
    model: ModelSpec, form: str, resolved: Resolved, *, ranks: int, on_accelerators: bool
) -> Promise:
    hosts = resolved.run.launch.nnodes
    try:
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        run = plan(resolved, ranks // hosts, on_accelerators=on_accelerators)
        kind.check_options(options, run.precision)
        kind.check_links(options, run.links, run.precision)
        cost = kind.cost(options, model, run)
        return Promise(form, cost, between_hosts=run.bytes_between_hosts(cost.sent))
    except DrivetrainError as error:
        return Promise(form, refusal=str(error).splitlines()[0])
