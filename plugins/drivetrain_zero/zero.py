"""ZeRO: the step in its order. Each stage divides one more kind of state among the ranks.

Paper: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5: P_os (stage 1), P_os+g (stage 2), P_os+g+p (stage 3); section 7 on bytes sent.

One step of N ranks, each of which owns 1/N of every unit::

               stages 1 and 2                          stage 3
    forward    wait for each unit's all-gather,        all-gather a unit before its module, and the
               sent by the last step                   next one ahead; free it after its module
    backward   -                                       all-gather it again where autograd reads it;
                                                       free it when its module's backward is over
               reduce-scatter of each unit's gradients as soon as the last of them has come
               (stage 1 keeps the buffers, from stage 2 on they are given back)
    step       the user's optimizer steps this rank's fragments
               all-gather of every stepped unit        free every unit
"""

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.cost import ModelSpec
from drivetrain.paper.data_parallel import data_parallel_step
from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import PaperStep
from drivetrain.paper.work import PaperUnit
from drivetrain.parts.replicate import replicate
from drivetrain.parts.rounds import Rounds
from drivetrain.sharding.estimate import sharing_of
from drivetrain.sharding.gather import Gather
from drivetrain.sharding.gradients import UnitGradients
from drivetrain.sharding.home import BoundOptimizer
from drivetrain.sharding.hooks import StepHooks
from drivetrain.sharding.layout import ParameterSlot, UnitLayout
from drivetrain.sharding.optimizers import Fragments
from drivetrain.sharding.placement import Ranks
from drivetrain.sharding.reduce import Reduce
from drivetrain.sharding.strategy import ShardedStrategy
from drivetrain.sharding.unit import Unit
from drivetrain.strategy import Prepared, Run
from drivetrain_zero.options import Zero1Config, Zero2Config, Zero3Config
from drivetrain_zero.units import cut_model

ConfigT = TypeVar("ConfigT", bound=Zero1Config)


class Zero(ShardedStrategy[ConfigT], Generic[ConfigT]):
    """The step of all three stages; a stage with nothing to free has no unit to gather."""

    @classmethod
    def plan(
        cls,
        config: ConfigT,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut into buckets (stages 1 and 2), or into blocks and large layers (stage 3)."""
        specs = [spec for spec in model.parameters if config.places(spec)]
        return cut_model(specs, run.precision, config.sizes, run.mesh["dp"].size, devices)

    @classmethod
    def step(cls, config: ConfigT, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Draw the step of this stage: see the top of this file."""
        sizes = config.sizes
        if config.divides_parameters:
            sharing = sharing_of(config, whole_below=sizes.shard_from or 0)
        else:
            sharing = sharing_of(config, bucket=sizes.bucket_bytes)
        return data_parallel_step(units, run, sharing)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make everything that a step needs, once; parameters become views of units."""
        run, config = self.run, self.config
        self.model = model
        self.check(optimizers)
        buffers = self.lent_buffers(model, optimizers)  # stage 1: every unit keeps its own
        self.rounds = Rounds(self.before_gradients, self.after_backward)
        self.reduce = self.made(
            Reduce(self.ranks, self.placement, self.home, self.rounds, run, buffers)
        )
        self.take(self.placement.lay_out(model))
        self.optimizers = self.made(Fragments(self.placement, self.home, self, fused=config.fused))
        for optimizer in optimizers:
            self.optimizers.add(optimizer)
        self.gather = self.made(
            Gather(
                [unit for unit in self.placement.units if not unit.resident],  # stage 3 has some
                ahead=config.ahead,
                until=config.until,
                neighbors=self.neighbors,
                most_live=config.most_live,
                keep_changes=self.keep_changes,
            )
        )
        self.hooks = self.made(StepHooks(model, self.gather, self))
        self.hooks.watch_gradients(self.reduce.units)
        return Prepared(model, tuple(optimizers))

    # --- one step, in its order ---

    def before_forward(self) -> None:
        """Make ready for a training forward; parameters that began to train join the units."""
        if self.reduce.synchronizing:
            self.rounds.finish()  # what an exception in backward cut short
            self.follow()

    def before_module(self, units: Sequence[Unit]) -> None:
        """Stage 3: all-gather the parameters of a module, and start the next gathers."""
        for unit in units:
            self.gather.bring(unit)

    def after_module(self, units: Sequence[Unit], outputs: Any) -> None:
        """Stage 3: free them, but for the last ones, with which backward begins."""
        for unit in units:
            self.gather.put_away(unit, outputs)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless gradients stay local, return with this rank's range of them."""
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
        """Stage 3: free the parameters of a module that backward has passed."""
        for unit in units:
            self.gather.release(unit)

    def after_backward(self) -> None:
        """Wait for the reduce-scatters: each fragment's gradient is its range of the mean.

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
        """Stages 1 and 2: all-gather stepped units, hidden under the next forward. 3: free all."""
        self.gather.values_changed()
        self.reduce.give_away(self.home.give_back(bound))
        self.placement.send_around(bound.units)


class Zero1(Zero[Zero1Config]):
    """Optimizer states are divided (5.1); parameters and gradients are whole on every rank."""

    summary: ClassVar[str] = "as ddp, but every rank keeps and steps 1/N of the optimizer state"
    Config: ClassVar[type] = Zero1Config


class Zero2(Zero[Zero2Config]):
    """Gradients are divided too (5.2): whole ones exist for the buckets on their way only."""

    summary: ClassVar[str] = "as zero1, and every rank keeps 1/N of the gradients"
    Config: ClassVar[type] = Zero2Config


class Zero3(Zero[Zero3Config]):
    """Parameters are divided too (5.3): whole ones exist for the units in use only."""

    summary: ClassVar[str] = "as zero2, and every rank keeps 1/N of the parameters"
    Config: ClassVar[type] = Zero3Config

    def connect(self) -> Ranks:
        """Connect ``dp`` with queues of their own for gathers and for gradients."""
        return Ranks.in_queues(self.run, keeping=self.config)
