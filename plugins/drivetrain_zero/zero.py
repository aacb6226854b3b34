"""ZeRO: the step as a table. Each stage divides one more kind of state among the ranks.

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
from typing import ClassVar, Generic, TypeVar

from drivetrain.cost import ModelSpec
from drivetrain.paper.data_parallel import Sharing
from drivetrain.paper.run import PaperRun
from drivetrain.sharding.estimate import sharing_of
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.strategy import ShardedStrategy
from drivetrain.strategy import Run
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
    def sharing(cls, config: ConfigT, run: PaperRun) -> Sharing:
        """Return what this stage divides: see the top of this file."""
        sizes = config.sizes
        if config.divides_parameters:
            return sharing_of(config, whole_below=sizes.shard_from or 0)
        return sharing_of(config, bucket=sizes.bucket_bytes)


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
