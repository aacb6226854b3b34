"""FSDP: the step as a table. Every parameter is cut by rows, and gathered unit by unit.

Paper: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
section 3: units and their life (3.2.1), prefetching (3.3.2, 3.3.3), hybrid sharding (3.2.2); after
ZeRO stage 3 (Rajbhandari et al., SC 2020, section 5.3).

One step of N ranks, each of which owns some rows of every parameter::

    forward    all-gather a unit before its module, and the next ones ahead; free it after its
               module (sharding: grad keeps it until the optimizer steps)
    backward   all-gather it again where autograd reads it; free it when its module's backward is
               over
               reduce-scatter each unit's gradients as soon as the last of them has come
               (sharding: hybrid adds the rows up over groups of ranks, once per window; with
               exchange: momentum the momenta of Adam cross between groups instead)
    step       the user's optimizer steps this rank's rows; then every unit is freed
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.collectives import Route
from drivetrain.compression.communicator import route_linked, route_of_replicas
from drivetrain.compression.methods import LinkMethods
from drivetrain.compression.one_bit_adam import check_momentum, frozen_adam
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.errors import ConfigError
from drivetrain.log import get_logger
from drivetrain.model.modules import clean_name, named_parameters
from drivetrain.parallel.estimate import Lines, sharing_of
from drivetrain.parallel.layout import UnitLayout
from drivetrain.parallel.placement import Ranks
from drivetrain.parallel.strategy import ShardedPlanning, ShardedStrategy
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.simulator.contract import Planning
from drivetrain.simulator.data_parallel import Sharing
from drivetrain.simulator.step import PaperRun
from drivetrain.strategy import Form, Prepared, Run
from drivetrain_fsdp.dtensors import as_dtensors
from drivetrain_fsdp.units import (
    FsdpConfig,
    UnitChoice,
    agreed_keys,
    cut_model,
    describe,
    unit_keys,
)

logger = get_logger(__name__)


class FsdpPlanning(ShardedPlanning):
    """Plans of FSDP, where ``shard_group`` ranks divide a copy."""

    layout_keys: ClassVar[Mapping[str, str]] = {
        **ShardedPlanning.layout_keys,
        "shard_group": "shard_size",
    }

    def options_of_layout(self, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options of division inside of groups, where a size of groups is given."""
        options = super().options_of_layout(keys)
        return {"sharding": "hybrid", **options} if "shard_size" in options else options


class Fsdp(ShardedStrategy[FsdpConfig]):
    """Parameters, gradients and optimizer state divided by rows, unit by unit."""

    summary: ClassVar[str] = "every rank keeps some rows of each parameter, and whole units in use"
    Config: ClassVar[type] = FsdpConfig

    def __init__(self, config: FsdpConfig, run: Run) -> None:
        config.check()
        self._keys: dict[str, str] = {}  # of the unit of each parameter, by name
        super().__init__(config, run)
        replicas = self.lines(config, run).replicas
        far = replicas is not None and replicas.levels is not None
        self.adam = frozen_adam("fsdp", config.exchange, run.links, far=far)
        if self.adam:
            self._made.enter_context(closing(self.adam))

    @classmethod
    def sharing(cls, config: FsdpConfig, run: PaperRun) -> Sharing:
        """Return what the ranks divide, all of them or groups."""
        hybrid = config.sharding == "hybrid"
        return sharing_of(config, group=(config.shard_size or run.together("dp")) if hybrid else 0)

    @classmethod
    def planning(cls) -> Planning:
        """Return plans that may divide the model inside of groups."""
        return FsdpPlanning(cls, cls.sharing)

    # --- units of rows ---

    @classmethod
    def plan(
        cls,
        config: FsdpConfig,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut the model into units of whole modules, and each parameter into rows."""
        choice = config.choice
        if model.module is None and choice.how in ("class", "function"):
            choice = UnitChoice(size=config.unit_from)  # an estimate: these need the model itself
        keys = unit_keys(model.parameters, choice, model.module)
        size = cls.lines(config, run).sharing.axis.size
        return cut_model(model.parameters, keys, run.precision, size, devices)

    def _cut(
        self, specs: Sequence[TensorSpec], devices: Sequence[Hashable] | None = None
    ) -> list[UnitLayout]:
        """Cut the model as it was chosen once, by all ranks alike."""
        keys = [self._keys[spec.name] for spec in specs]
        size = self.ranks.sharing.size
        return cut_model(specs, keys, self.run.precision, size, devices)

    def _agreed_keys(self, model: nn.Module, specs: Sequence[TensorSpec]) -> list[str]:
        choice = self.config.choice
        if choice.how != "function":  # ranks that agree on the model agree on these
            return unit_keys(specs, choice, model)
        return agreed_keys(
            lambda: unit_keys(specs, choice, model),
            [spec.name for spec in specs],
            choice.function,
            self.run.mesh["dp"],
        )

    # --- groups of ranks ---

    @classmethod
    def axes(cls, config: FsdpConfig, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks: groups of it divide a model, if asked for."""
        config.check()
        return super().axes(config, world_size)

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

    # --- before the first step ---

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Choose the units, the same on all ranks, and prepare the model's step."""
        specs = [TensorSpec.of(name, p) for name, p in named_parameters(model).items()]
        keys = self._agreed_keys(model, specs)
        self._keys = {spec.name: key for spec, key in zip(specs, keys, strict=True)}
        prepared = super().prepare(model, optimizers)
        logger.announce(f"units of {type(model).__name__}: {describe(keys, specs)}")
        if self.config.sharding == "hybrid":
            logger.announce(self.describe_groups())
        return prepared

    # --- at the border ---

    def dtensors(self) -> Mapping[str, Tensor]:
        """Return the shards of all parameters as torch's DTensors. Collective.

        In the order of the model's state dict, whose names of tied parameters share one.

        Raises:
            UsageError: values written into them would not reach secondary shards.
        """
        self.gather.values_changed()  # what is written into them must not hide behind whole values
        self.placement.wait_for_steps()  # a step may still be on its way into them
        shards = as_dtensors(self.placement, self.ranks, self.run.world.device)
        slots = self.placement.slots
        return {
            clean_name(name): shards[slots[parameter].name]
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if parameter in slots
        }
