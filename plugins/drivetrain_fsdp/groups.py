"""The groups of ranks that divide the model, and the messages between groups.

Paper: Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2: hybrid sharding. Between groups cross
gradients, or momenta of Adam (``drivetrain.links.one_bit_adam``).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.collectives import Route
from drivetrain.errors import ConfigError
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.linked import route_linked, route_of_replicas
from drivetrain.links.one_bit_adam import check_momentum, frozen_adam, refuse_clipping
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.sharding.estimate import Lines, OffloadInPlans
from drivetrain.sharding.placement import Ranks
from drivetrain.sharding.strategy import ShardedStrategy
from drivetrain.strategy import Form, Run
from drivetrain_fsdp.options import FsdpConfig

KEYS: Mapping[str, str] = {**OffloadInPlans.layout_keys, "shard_group": "shard_size"}
"""Keys of ``--layout``, with the options that they set."""


class GroupsOfRanks(ShardedStrategy[FsdpConfig]):
    """The part of the strategy that is about groups of ranks.

    Attributes:
        adam: steps with frozen variances, where momenta cross between groups; None: gradients do.
    """

    layout_keys: ClassVar[Mapping[str, str]] = KEYS

    def __init__(self, config: FsdpConfig, run: Run) -> None:
        super().__init__(config, run)
        replicas = self.lines(config, run).replicas
        far = replicas is not None and replicas.levels is not None
        self.adam = frozen_adam("fsdp", config.exchange, run.links, far=far)
        if self.adam:
            self.made(self.adam)

    @classmethod
    def axes(cls, config: FsdpConfig, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks: groups of it divide a model, if asked for."""
        config.check()
        return super().axes(config, world_size)

    @classmethod
    def options_of_layout(cls, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options of division inside of groups, where a size of groups is given."""
        options = super().options_of_layout(keys)
        return {"sharding": "hybrid", **options} if "shard_size" in options else options

    @classmethod
    def forms(cls, world: World) -> Sequence[Form]:
        """Return division over all ranks, and inside of each of several hosts."""
        inside = world.spans_hosts and world.island_size > 1
        return [Form(), *([Form({"sharding": "hybrid"})] if inside else [])]

    @classmethod
    def check_links(cls, config: FsdpConfig, links: LinkMethods, precision: Precision) -> None:
        """Refuse methods that are of no use for momenta."""
        super().check_links(config, links, precision)
        if config.exchange == "momentum":
            check_momentum("fsdp", links, precision)

    @classmethod
    def lines(cls, config: FsdpConfig, run: Run) -> Lines:
        """Return all ranks, the ranks that divide the model, and the ranks with the same rows.

        Raises:
            ConfigError: momenta shall cross between groups, and there is one group on all hosts.
        """
        mesh, everyone = run.mesh, route_linked(run.mesh, "dp", run.world, run.links)
        size = config.shard_ranks(mesh, run.world)
        if size == everyone.axis.size:
            if config.exchange == "momentum" and everyone.levels is not None:
                raise ConfigError(
                    "fsdp: expected a group of ranks on each host with exchange: momentum, found "
                    f"one group of all {size} ranks; set shard_size to the ranks of a host, or "
                    "take exchange: gradients"
                )
            return super().lines(config, run)
        near, across = mesh.neighbors("dp", size), mesh.across("dp", size)
        return Lines(everyone, Route(near), route_of_replicas(across, run.links))

    def connect(self) -> Ranks:
        """Connect ``dp``; with replicas, the groups of neighbors, and the lines across them."""
        run = self.run
        mesh = run.mesh
        size = self.lines(self.config, run).sharing.axis.size  # an error comes first
        if size == mesh["dp"].size:
            return Ranks.in_queues(run, keeping=self.config)
        near = mesh.start_neighbors("dp", size, run.world)
        across = mesh.start_across("dp", size, run.world)
        return Ranks.in_queues(run, near, across)

    def describe_groups(self) -> str:
        """Return a line about who divides the model, and who owns the same rows."""
        sharing, size = self.ranks.sharing.axis, self.ranks.everyone.size
        groups = size // sharing.size
        ranks = ", ".join(map(str, sharing.ranks))
        text = f"hybrid: groups x ranks = {groups} x {sharing.size}, this one has ranks {ranks}"
        if groups == 1:
            return f"{text}; there are no replicas, as with sharding: full"
        if sharing.size == 1:
            return f"{text}; nothing is divided: set shard_size, or take a strategy that replicates"
        return text

    # --- momenta between groups ---

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse optimizers that cannot step rows, and with momenta all but plain Adam.

        Raises:
            ConfigError: momenta are exchanged, and an optimizer is no plain Adam or AdamW.
            UsageError: says which partition an optimizer needs.
        """
        super().check(optimizers)
        if self.adam:
            for optimizer in optimizers:
                self.adam.check(optimizer)

    def give_fragments(self, optimizer: Optimizer) -> None:
        """Let an optimizer step fragments, with its frozen variances after the warm-up."""
        super().give_fragments(optimizer)
        if self.adam:
            self.adam.add(optimizer)

    def will_scale(self, factor: float) -> None:
        """Let momenta have the factor before they cross."""
        if self.adam:
            self.adam.factor = factor

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the gradients to a norm of at most max_norm: one number crosses the wire.

        Raises:
            UsageError: momenta are exchanged.
        """
        refuse_clipping(self.adam)
        return super().clip_grad_norm(max_norm, norm_type, only=only)
