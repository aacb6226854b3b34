"""The knobs of ``local``, and the strategy inside of a worker that they name. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from drivetrain.config.outline import Outline, find_inside, find_outline
from drivetrain.config.schema import NestedStrategy, Policy, nested_strategy, option
from drivetrain.errors import ConfigError
from drivetrain.parallel.options import OffloadOptions

if TYPE_CHECKING:
    from drivetrain.runtime.mesh import Axis, Mesh
    from drivetrain.runtime.world import World

AXIS = "dp"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """Options of the strategy ``local``.

    The outer optimizer's defaults are those of the DiLoCo paper, section 3.1; the paper takes 500
    steps in a round, later work 30 to 100 (Streaming DiLoCo, table 1; SparseLoCo, section 4).
    """

    every: int = option(
        30,
        help="optimizer steps that a worker takes by itself in a round",
        question="How many steps does a host take by itself?",
        minimum=1,
    )
    workers: Literal["hosts", "ranks"] = option(
        "hosts",
        help="what takes steps by itself: all ranks of a host together, or each rank",
    )
    inner: NestedStrategy = nested_strategy(
        help="the strategy inside of a worker, by name, with its options"
    )
    outer_lr: float = option(
        0.7, help="learning rate of the outer step; 1 with no momentum takes the mean", minimum=0.0
    )
    outer_momentum: float = option(
        0.9, help="Nesterov's momentum of the outer step", minimum=0.0, maximum=0.999
    )
    fragments: int = option(
        1,
        help="parts of the model that are exchanged in turn: 1 exchanges all of it at once",
        minimum=1,
    )
    delay: int = option(
        0,
        help="steps that training goes on while an exchange is under way; 0 waits for it",
        minimum=0,
    )
    keep: float = option(
        0.0,
        help="share of a worker's own weights that is left when outer weights come; 0.5 with delay",
        minimum=0.0,
        maximum=1.0,
    )
    warmup_steps: int = option(
        0,
        help="first optimizer steps, in which workers average gradients exactly, before any round",
        minimum=0,
    )
    late_s: float = option(
        0.0,
        help="seconds that workers wait for a late one at an exchange; 0 waits as any collective",
        minimum=0.0,
    )

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: a round is too short for the parts, or for the delay; late workers are
                left out beside training.
        """
        if self.fragments > self.every:
            raise ConfigError(
                f"strategy.fragments: expected at most the {self.every} steps of a round (every), "
                f"one part per step, found {self.fragments}; take fewer parts, or longer rounds"
            )
        if self.delay >= self.every:
            raise ConfigError(
                f"strategy.delay: expected fewer steps than the {self.every} of a round (every), "
                f"found {self.delay}; an exchange must end before the next one begins"
            )
        if self.late_s and self.delay:
            raise ConfigError(
                f"strategy.late_s: expected no strategy.delay beside it, found {self.delay} steps: "
                "a late worker takes the result of an exchange at once; leave one of them out"
            )

    @property
    def under_way(self) -> float:
        """The share of the model whose exchanges are under way at a time, at most."""
        return -(-self.delay * self.fragments // self.every) / self.fragments

    def outline_inside(self) -> tuple[type[Outline[Any]], Any]:
        """Return the outline of the strategy inside of a worker, and its options.

        Raises:
            ConfigError: it is not installed, only chooses another one, needs more ranks than a
                worker has, or takes over a step of stores one step late.
        """
        kind, options = find_inside("strategy.inner", self.inner)
        if self.workers == "ranks":
            self._check_one_rank(kind, options)
        if any(stores.delayed for stores in _stores(options)):
            raise ConfigError(
                "strategy.inner: expected steps that stores take before the next forward, found "
                "delayed: true, with which weights come a step late: outer steps would miss the "
                "last step; leave delayed out"
            )
        return kind, options

    def stored_inside(self) -> float:
        """Return the share of parameters whose optimizer state stores inside of a worker keep."""
        stores = getattr(self.outline_inside()[1], "offload", None)
        return stores.ratio if isinstance(stores, OffloadOptions) and stores.optimizer else 0.0

    def _check_one_rank(self, kind: type[Outline[Any]], options: Any) -> None:
        """Refuse a strategy inside that needs several ranks, where each rank is a worker.

        Raises:
            ConfigError: says what to name.
        """
        try:
            kind.axes(options, 1)
        except ConfigError as error:
            raise ConfigError(
                f"strategy.workers: expected hosts with strategy.inner: {self.inner.name}, whose "
                f"replica is divided over several ranks ({error}), found ranks: each rank would be "
                "a worker by itself; set workers: hosts, or name a strategy over the axis dp alone"
            ) from error

    def ranks_of_worker(self, mesh: "Mesh", world: "World") -> int:
        """Return how many neighbors on the axis ``dp`` are of one worker.

        Raises:
            ConfigError: hosts hold different numbers of ranks, or not in a row, or replicas are
                divided over several hosts.
        """
        if self.workers == "ranks":
            return 1
        count = mesh.per_host(AXIS, world)
        divided = {name: axis.size for name, axis in mesh.items() if name != AXIS}
        size = count * prod(divided.values())
        for first in range(0, world.size, size):
            hosts = dict.fromkeys(world.islands[first : first + size])
            if len(hosts) > 1:
                shown = " x ".join(f"{name}={each}" for name, each in divided.items())
                raise ConfigError(
                    f"strategy.inner: expected hosts that hold whole replicas of {shown} ranks, "
                    f"found ranks {first} to {first + size - 1} on {', '.join(hosts)}: a worker is "
                    "a host; divide a replica over fewer ranks, or start more ranks on each host"
                )
        return count

    def planned(self, mesh: "Mesh", world: "World") -> "tuple[Axis, Axis]":
        """Return the ranks of this worker, and those at this rank's place of each, not started."""
        count = self.ranks_of_worker(mesh, world)
        return mesh.neighbors(AXIS, count), mesh.across(AXIS, count)

    def started(self, mesh: "Mesh", world: "World") -> "tuple[Axis, Axis]":
        """Return the same axes with process groups. Collective the first time."""
        count = self.ranks_of_worker(mesh, world)
        near = mesh.start_neighbors(AXIS, count, world)
        return near, mesh.start_across(AXIS, count, world)


def _stores(options: Any) -> Iterator[OffloadOptions]:
    """Yield the sections about stores of a strategy's options, and of strategies inside of it."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, OffloadOptions):
            yield value
        elif isinstance(value, NestedStrategy):
            _, inside = find_outline(value.name, value.options)
            yield from _stores(inside)


class LocalOutline(Outline[LocalOptions]):
    """The outline of ``local``."""

    summary: ClassVar[str] = "hosts take steps by themselves, and exchange weights now and then"
    Config: ClassVar[type] = LocalOptions

    @classmethod
    def axes(cls, config: LocalOptions, world_size: int) -> Mapping[str, int]:
        """Return the axes of the strategy inside, ``dp`` last: a worker's ranks are neighbors.

        Raises:
            ConfigError: the strategy inside has no axis ``dp``, does not fit the number of ranks,
                or divides replicas although workers may be late.
        """
        kind, options = config.outline_inside()
        axes = dict(kind.axes(options, world_size))
        if AXIS not in axes:
            raise ConfigError(
                f"strategy.inner: expected a strategy with the axis {AXIS}, over which batches are "
                f"divided, found {config.inner.name!r} over {', '.join(axes)}; name another one"
            )
        replicas = axes.pop(AXIS)
        if config.late_s and replicas < world_size:
            shown = " x ".join(f"{name}={size}" for name, size in axes.items())
            raise ConfigError(
                f"strategy.late_s: expected a strategy inside over the axis {AXIS} alone, such as "
                f"ddp or zero1, found {config.inner.name!r} with {shown}: exchanges without late "
                "workers are not tested with divided replicas; leave late_s at 0, or name another "
                "strategy"
            )
        return {**axes, AXIS: replicas}

    @classmethod
    def check_options(cls, config: LocalOptions, precision: Policy) -> None:
        """Refuse late workers with a loss scale; let the strategy inside refuse the rest.

        Raises:
            ConfigError: a loss scale needs all ranks at each step, and workers may be late.
        """
        if config.late_s and precision.needs_scaling:
            raise ConfigError(
                "strategy.late_s: expected precision: bf16 or no, found fp16, whose loss scale all "
                "ranks agree on at each step; change one of them"
            )
        kind, options = config.outline_inside()
        kind.check_options(options, precision)

    @classmethod
    def channels(cls, config: LocalOptions) -> frozenset[str]:
        """Return gradients: the outer ones."""
        return frozenset({"gradients"})
