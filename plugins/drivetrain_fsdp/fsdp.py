"""FSDP: the step in its order. Every parameter is cut by rows, and gathered unit by unit.

Paper: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
section 3: units and their life (3.2.1), prefetching (3.3.2, 3.3.3), hybrid sharding (3.2.2); after
ZeRO stage 3 (Rajbhandari et al., SC 2020, section 5.3).

One step of N ranks, each of which owns some rows of every parameter::

    forward    all-gather a unit before its module, and the next ones ahead; free it after its
               module (sharding: grad keeps it until the optimizer steps)
    backward   all-gather it again where autograd reads it; free it when its module's backward is
               over
               reduce-scatter each unit's gradients as soon as the last of them has come
               (sharding: hybrid adds the rows up over groups of ranks, once per window)
    step       the user's optimizer steps this rank's rows; then every unit is freed
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.log import get_logger
from drivetrain.paper.data_parallel import data_parallel_step
from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import PaperStep
from drivetrain.paper.work import PaperUnit
from drivetrain.parts.naming import clean_name, named_parameters
from drivetrain.parts.replicate import replicate
from drivetrain.parts.rounds import Rounds
from drivetrain.sharding.estimate import sharing_of
from drivetrain.sharding.gather import Gather
from drivetrain.sharding.gradients import UnitGradients
from drivetrain.sharding.home import BoundOptimizer
from drivetrain.sharding.hooks import StepHooks
from drivetrain.sharding.layout import ParameterSlot, UnitLayout
from drivetrain.sharding.optimizers import Fragments
from drivetrain.sharding.reduce import Reduce
from drivetrain.sharding.unit import Unit
from drivetrain.strategy import Prepared, Run
from drivetrain_fsdp.dtensors import as_dtensors
from drivetrain_fsdp.groups import GroupsOfRanks
from drivetrain_fsdp.options import FsdpConfig
from drivetrain_fsdp.units import UnitChoice, agreed_keys, cut_model, describe, unit_keys

logger = get_logger(__name__)


class Fsdp(GroupsOfRanks):
    """Parameters, gradients and optimizer state divided by rows, unit by unit."""

    summary: ClassVar[str] = "every rank keeps some rows of each parameter, and whole units in use"
    Config: ClassVar[type] = FsdpConfig

    def __init__(self, config: FsdpConfig, run: Run) -> None:
        config.check()
        self._keys: dict[str, str] = {}  # of the unit of each parameter, by name
        super().__init__(config, run)

    @classmethod
    def step(cls, config: FsdpConfig, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Draw the step: units gathered before use, gradients reduced as they come.

        Raises:
            ConfigError: state lies in a store.
        """
        hybrid = config.sharding == "hybrid"
        group = (config.shard_size or run.together("dp")) if hybrid else 0
        return data_parallel_step(units, run, sharing_of(config, group=group))

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

    # --- before the first step ---

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make everything that a step needs, once; parameters become views of units."""
        run, config = self.run, self.config
        specs = [TensorSpec.of(name, p) for name, p in named_parameters(model).items()]
        keys = self._agreed_keys(model, specs)
        self._keys = {spec.name: key for spec, key in zip(specs, keys, strict=True)}
        self.model = model
        self.check(optimizers)
        buffers = self.lent_buffers(model, optimizers)
        self.rounds = Rounds(self.before_gradients, self.after_backward)
        self.reduce = self.made(
            Reduce(self.ranks, self.placement, self.home, self.rounds, run, buffers, self.adam)
        )
        self.take(self.placement.lay_out(model))
        fused = config.fused and self.adam is None  # whose steps take the state of torch's loops
        self.optimizers = self.made(Fragments(self.placement, self.home, self, fused=fused))
        for optimizer in optimizers:
            self.give_fragments(optimizer)
        self.gather = self.made(
            Gather(
                self.placement.units,
                ahead=config.ahead,
                until=config.until,
                neighbors=self.neighbors,
                most_live=config.most_live,
                keep_changes=self.keep_changes,
            )
        )
        self.hooks = self.made(StepHooks(model, self.gather, self))
        self.hooks.watch_gradients(self.reduce.units)
        logger.announce(f"units of {type(model).__name__}: {describe(keys, specs)}")
        if config.sharding == "hybrid":
            logger.announce(self.describe_groups())
        return Prepared(model, tuple(optimizers))

    # --- one step, in its order ---

    def before_forward(self) -> None:
        """Make ready for a training forward; parameters that began to train join the units."""
        if self.reduce.synchronizing:
            self.rounds.finish()  # what an exception in backward cut short
            self.follow()

    def before_module(self, units: Sequence[Unit]) -> None:
        """All-gather the parameters of a module, and start the next gathers."""
        for unit in units:
            self.gather.bring(unit)

    def after_module(self, units: Sequence[Unit], outputs: Any) -> None:
        """Free them, but for the last ones, with which backward begins."""
        for unit in units:
            self.gather.put_away(unit, outputs)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless gradients stay local, return with the mean of this rank's rows."""
        self.gather.leave()  # no forward is under way here, only ones that an interrupt cut short
        if not self.reduce.synchronizing:
            loss.backward(**options)  # type: ignore[no-untyped-call]
            return
        self.follow()
        before = self.rounds.count
        loss.backward(**options)  # type: ignore[no-untyped-call]
        if self.rounds.count == before:
            self.rounds.take_part()  # the loss reached no parameter here; others may wait
        else:
            self.rounds.finish()

    def before_gradients(self) -> None:
        """Begin a synchronised backward: its first gradient has come."""
        self.reduce.begin()

    def gradient_came(self, unit: UnitGradients, slot: ParameterSlot) -> None:
        """Move a gradient into its unit's buffer; reduce-scatter the units that are complete."""
        if not self.reduce.synchronizing:
            self.reduce.receive(unit, slot)
            return
        self.rounds.enter()
        if self.reduce.add(unit, slot):
            self.reduce.send_complete()

    def after_module_backward(self, units: Sequence[Unit]) -> None:
        """Free the parameters of a module that backward has passed."""
        for unit in units:
            self.gather.release(unit)

    def after_backward(self) -> None:
        """Wait for the reduce-scatters: each fragment's gradient is its rows of the mean.

        Buffers follow rank 0's here, so that every rank evaluates with the same ones.
        """
        self.reduce.finish()
        self.gather.release_all()
        if self.config.buffers == "broadcast":
            replicate(self.model.buffers(), self.ranks.everyone, "buffers after backward")

    def before_step(self, bound: BoundOptimizer) -> None:
        """Submit the step of state that a store keeps; the optimizer itself steps the rest."""
        self.rounds.finish()
        self.reduce.shown.follow(bound.slots.values())
        self.placement.take_changes()
        self.home.submit(bound)

    def after_step(self, bound: BoundOptimizer) -> None:
        """Free every unit: its values are no longer the right ones. Secondary shards follow."""
        self.gather.values_changed()
        self.reduce.give_away(self.home.give_back(bound))
        self.placement.send_around(bound.units)

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
