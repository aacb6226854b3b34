"""The strategy: every unit's rows divided, with replicas between groups of ranks if asked for."""

from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.log import get_logger
from drivetrain.parts.naming import clean_name, named_parameters
from drivetrain.sharding.divided import DividedStrategy
from drivetrain.sharding.estimate import Lines
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.ranks import Ranks
from drivetrain.strategy import Prepared, Run
from drivetrain_fsdp.agreement import agreed_keys
from drivetrain_fsdp.config import FsdpConfig
from drivetrain_fsdp.dtensors import as_dtensors
from drivetrain_fsdp.layout import plan
from drivetrain_fsdp.units import UnitChoice, describe, unit_keys

logger = get_logger(__name__)


class Fsdp(DividedStrategy[FsdpConfig]):
    """Parameters, gradients and optimizer state divided by rows, unit by unit."""

    summary: ClassVar[str] = "every rank keeps some rows of each parameter, and whole units in use"
    Config: ClassVar[type] = FsdpConfig

    def __init__(self, config: FsdpConfig, run: Run) -> None:
        config.check()
        self._keys: dict[str, str] = {}  # of the unit of each parameter, by name
        super().__init__(config, run)

    @classmethod
    def axes(cls, config: FsdpConfig, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks: groups of it divide a model, if asked for."""
        config.check()
        return super().axes(config, world_size)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Cut the model into units, and report them."""
        specs = [TensorSpec.of(name, p) for name, p in named_parameters(model).items()]
        keys = self._agreed_keys(model, specs)
        self._keys = {spec.name: key for spec, key in zip(specs, keys, strict=True)}
        prepared = super().prepare(model, optimizers)
        logger.announce(f"units of {type(model).__name__}: {describe(keys, specs)}")
        if self.config.sharding == "hybrid":
            logger.announce(self._groups())
        return prepared

    def _groups(self) -> str:
        """Return a line about who divides the model, and who owns the same rows."""
        sharing, size = self._ranks.sharing.axis, self._ranks.everyone.size
        groups = size // sharing.size
        ranks = ", ".join(map(str, sharing.ranks))
        text = f"hybrid: groups x ranks = {groups} x {sharing.size}, this one has ranks {ranks}"
        if groups == 1:
            return f"{text}; there are no replicas, as with sharding: full"
        if sharing.size == 1:
            return f"{text}; nothing is divided: set shard_size, or take a strategy that replicates"
        return text

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
        size = cls.lines(config, run).sharing.size
        return plan(model.parameters, keys, run.precision, size, devices)

    def _plan_units(
        self, specs: Sequence[TensorSpec], devices: Sequence[Hashable] | None = None
    ) -> list[UnitLayout]:
        """Cut the model as it was chosen once, by all ranks alike."""
        keys = [self._keys[spec.name] for spec in specs]
        size = self._ranks.sharing.size
        return plan(specs, keys, self.run.precision, size, devices)

    @classmethod
    def lines(cls, config: FsdpConfig, run: Run) -> Lines:
        """Return all ranks, those that divide the model, and those that own the same rows."""
        mesh, everyone = run.mesh, run.mesh["dp"]
        size = config.shard_ranks(mesh, run.world)
        if size == everyone.size:
            return Lines(everyone, everyone)
        return Lines(everyone, mesh.neighbors("dp", size), mesh.across("dp", size))

    def _connect(self) -> Ranks:
        run = self.run
        size = self.lines(self.config, run).sharing.size  # an error comes before anything starts
        mesh, world = run.mesh, run.world
        if size == mesh["dp"].size:
            return super()._connect()
        near = mesh.start_neighbors("dp", size, world)
        return self._ranks_over(mesh["dp"], near, mesh.start_across("dp", size, world))

    def dtensors(self) -> Mapping[str, Tensor]:
        """Return the shards of all parameters as torch's DTensors. Collective.

        In the order of the model's state dict, whose names of tied parameters share one.
        """
        self._gatherer.step_taken()  # what is written into them must not hide behind whole values
        self._settle()  # a step may still be on its way into them
        shards = as_dtensors(self._placement, self._ranks, self.run.world.device)
        slots = self._placement.slots
        return {
            clean_name(name): shards[slots[parameter].name]
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if parameter in slots
        }
