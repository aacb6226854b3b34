"""The optimizer backend: where a rank's shards lie between steps, and who steps them.

Units, gradients, optimizers and checkpoints ask an ``OptimizerBackend`` and do not know which kind
of memory it uses. One that lets stores step (ZeRO-Offload, ZeRO-Infinity) is a plugin, found by
entry point.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.cost import ModelSpec
from drivetrain.parallel.estimate import Estimate
from drivetrain.parallel.layout import ParameterSlot
from drivetrain.parallel.options import OffloadOptions, UnitsOptions
from drivetrain.parallel.unit import FlatParameter, InMemoryShard, InPlaceShard, ShardStorage, Unit
from drivetrain.registry import optimizer_backends
from drivetrain.saved_state import allocate_state, group_of
from drivetrain.strategy import Run

_IN_STORES = "stores"
"""The entry point of the backend whose stores step the shards kept there."""


class Held(NamedTuple):
    """This rank's share of a parameter, or of the optimizer's state for the parameter.

    Attributes:
        values: 1-D, or of the fragment's shape, or one number.
        fresh: whether it is a copy that nobody else holds.
    """

    values: Tensor
    fresh: bool = False


@dataclass(slots=True, eq=False)
class BoundOptimizer:
    """An optimizer and its parameters.

    Attributes:
        optimizer: the user's object.
        slots: by name; the same on every rank, also where this rank owns nothing of them.
        fragments: its parameters by what the optimizer holds in their places.
        held: what the optimizer holds in the places of parameters; not where nothing is owned.
        units: the units that its step changes.
        handles: of the hooks on it.
    """

    optimizer: Optimizer
    slots: dict[str, ParameterSlot] = field(default_factory=dict)
    fragments: dict[Tensor, ParameterSlot] = field(default_factory=dict)
    held: dict[ParameterSlot, nn.Parameter] = field(default_factory=dict)
    units: set[Unit] = field(default_factory=set)
    handles: list[RemovableHandle] = field(default_factory=list)

    def members(self) -> Iterator[tuple[ParameterSlot, nn.Parameter, Mapping[str, Any]]]:
        """Yield the model's parameters, the tensors held in their places, and their groups."""
        for group in self.optimizer.param_groups:
            for fragment in group["params"]:
                if fragment in self.fragments:
                    yield self.fragments[fragment], fragment, group


class OptimizerBackend:
    """Where the shards of one model lie between steps, with gradients and optimizer states.

    This one is beside the model, where the user's optimizer steps fragments in memory: what it has
    to do is nothing, in all methods about stores. One that lets stores step overrides them.

    Args:
        options: those of the section ``offload``.
        device: that of the model.

    Attributes:
        active: whether stores step anything; a factor for gradients may then go with their step.
        in_backward: whether steps begin in backward.
    """

    active: ClassVar[bool] = False

    def __init__(self, options: OffloadOptions, device: torch.device) -> None:
        self.options = options
        self.in_backward = options.in_backward
        self.device = device

    @classmethod
    def held(
        cls, estimate: Estimate, model: ModelSpec, config: UnitsOptions, run: Run
    ) -> dict[str, int]:
        """Return the bytes that one rank keeps between steps, by kind."""
        return estimate.held(model, lent_buffers=config.lent_buffers)

    def announce(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        estimate: Estimate,
        run: Run,
        *,
        lent: int,
    ) -> None:
        """Show the place of each kind of state, before memory is taken. Collective over ``dp``.

        Args:
            model: as the user has it.
            optimizers: they hold its own parameters.
            estimate: the plan, this rank and dtypes.
            run: see there.
            lent: bytes of the buffers that gradients pass through; 0: whole ones are kept.

        Raises:
            PreflightError: some rank has too little of something.
        """

    def shard(self, flat: FlatParameter, label: str) -> ShardStorage:
        """Return the storage of this rank's shard of a flat tensor.

        It is a memory of its own if values are freed, approximate, converted or scattered.

        Args:
            flat: the flat tensor; its own shard is not there yet.
            label: of its unit.
        """
        if flat.sharded or flat.apart or flat.has_master or len(flat.own) > 1:
            return InMemoryShard(flat.owned, flat.layout.master, flat.own, flat.values.device)
        return InPlaceShard(flat.values, flat.own)

    def choose(self, units: Sequence[Unit]) -> None:
        """Choose among more units those whose state stores keep.

        Args:
            units: in the order in which backward usually reaches them.
        """

    def adopt(self, bound: BoundOptimizer) -> None:
        """Let a store keep the states and masters of an optimizer's new parameters."""

    def steps(self, bound: BoundOptimizer) -> bool:
        """Return whether a store takes an optimizer's steps, so that no closure can be called."""
        return False

    def submit(self, bound: BoundOptimizer) -> None:
        """Submit a step of the shards in stores, and hide their gradients from the optimizer."""

    def begin(self, unit: Unit, fresh: Collection[ParameterSlot]) -> None:
        """Let steps begin in backward: the gradients of a unit are what they will be taken with.

        Args:
            unit: the unit.
            fresh: its parameters with gradients of this backward.
        """

    def freeze(self, fresh: Collection[ParameterSlot]) -> None:
        """Hold back what was begun, when a backward is over, until the optimizers step.

        Args:
            fresh: the parameters with gradients of this backward; the same on every rank.
        """

    def holds(self, slots: Iterable[ParameterSlot]) -> bool:
        """Return whether steps of some of these parameters are held back since a backward."""
        return False

    def check_free(self, found: str, slots: Iterable[ParameterSlot] | None = None) -> None:
        """Refuse a change between a backward and the steps that began in it.

        Args:
            found: the change.
            slots: the parameters that it is about; None: all.

        Raises:
            UsageError: steps of theirs began.
        """

    def give_back(self, bound: BoundOptimizer) -> Collection[ParameterSlot]:
        """Show hidden gradients again; return the parameters whose gradients the store reads on."""
        return ()

    def take_over_late(self) -> bool:
        """Let forward see steps that are held back; return whether there were any."""
        return False

    def drop_late(self) -> None:
        """Let forward never see steps that are held back: other values come."""

    def scale(self, slots: Iterable[ParameterSlot], factor: float) -> Collection[ParameterSlot]:
        """Let gradients be multiplied when they are stepped with; return those to multiply now."""
        return list(slots)

    def due(self, slots: Iterable[ParameterSlot]) -> Mapping[ParameterSlot, float]:
        """Return the factors that gradients still wait for, and forget them."""
        return {}

    def forget(self, slots: Iterable[ParameterSlot] | None) -> None:
        """Forget the factors of gradients that are cleared; None: of all."""

    def master(self, flat: FlatParameter, slot: ParameterSlot) -> Held:
        """Return this rank's share of a parameter in the dtype of the optimizer, 1-D."""
        return Held(flat.shard.read(slot).detach(), flat.shard.in_store)

    def set_master(self, flat: FlatParameter, slot: ParameterSlot, values: Tensor) -> None:
        """Replace this rank's share of a parameter by a 1-D tensor of the master's dtype."""
        flat.shard.write(slot, values)

    def values_changed(self, unit: Unit) -> None:
        """Let masters that stores keep follow whole values that a script has changed."""

    def states(self, bound: BoundOptimizer, slot: ParameterSlot) -> Iterator[tuple[str, Held]]:
        """Yield an optimizer's state tensors for a parameter that this rank owns something of."""
        for key, value in bound.optimizer.state.get(bound.held[slot], {}).items():
            if isinstance(value, Tensor):
                yield key, Held(value.detach())

    def set_states(
        self, bound: BoundOptimizer, slot: ParameterSlot, states: Mapping[str, Any]
    ) -> None:
        """Replace an optimizer's state for a parameter; none: as before the first step."""
        optimizer, fragment = bound.optimizer, bound.held[slot]
        present = optimizer.state.get(fragment, {})
        loaded: dict[str, Any] = {}
        for key, value in states.items():
            kept = present.get(key)
            if not isinstance(value, Tensor):
                loaded[key] = value
                continue
            if not isinstance(kept, Tensor) or kept.shape != value.shape:
                kept = allocate_state(value, key, fragment, group_of(optimizer, fragment))
            loaded[key] = kept.copy_(value)
        if loaded:
            optimizer.state[fragment] = loaded
        else:
            optimizer.state.pop(fragment, None)

    def close(self) -> None:
        """End submitted updates, and release memory and files."""


def backend_kind(options: OffloadOptions) -> type[OptimizerBackend]:
    """Return the kind of backend that options ask for."""
    return (
        cast(type[OptimizerBackend], optimizer_backends().load(_IN_STORES))
        if options.optimizer
        else OptimizerBackend
    )


def open_backend(options: OffloadOptions, run: Run) -> OptimizerBackend:
    """Return the backend of one model.

    Raises:
        ConfigError: options contradict each other, or a store cannot do what they ask for.
    """
    options.check()
    return backend_kind(options)(options, run.world.device)
