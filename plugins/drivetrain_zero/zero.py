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

How ZeRO cuts a model into units. Arithmetic only.

Stages 1 and 2 cut the model into units of a bucket's size. Stage 3 makes a unit of each repeated
block and of each large layer outside of them; the rest of the model is another unit. Parameters
below a threshold are not worth a message: they stay whole, in buckets as in stage 2.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.log import get_logger
from drivetrain.model.modules import named_parameters
from drivetrain.parallel.layout import (
    ROOT,
    FlatLayout,
    UnitLayout,
    arrange,
    arrange_whole,
    block_of,
    in_order_of_backward,
    units_of_keys,
)
from drivetrain.parallel.replicated import plan_buckets
from drivetrain.parallel.strategy import ShardedStrategy
from drivetrain.runtime.precision import Precision
from drivetrain.simulator.contract import Sharing
from drivetrain.simulator.step import SimulatedRun
from drivetrain.strategy import Prepared, Run
from drivetrain_zero.options import (
    Zero1Config,
    Zero1Outline,
    Zero2Config,
    Zero2Outline,
    Zero3Config,
    Zero3Outline,
)

logger = get_logger(__name__)

# --- how ZeRO cuts a model into units ---


def cut_model(
    specs: Sequence[TensorSpec],
    precision: Precision,
    config: Zero1Config,
    size: int,
    devices: Sequence[Hashable] | None = None,
) -> list[UnitLayout]:
    """Cut parameters into units, in the order in which backward usually reaches them.

    Args:
        specs: the parameters in registration order.
        precision: which dtypes they get.
        config: says how large units are, and how ranks share parameters.
        size: number of ranks that share them.
        devices: device of each parameter; only equal ones share a unit.
    """
    rest, loads = [ROOT] * len(specs), [0] * size
    least, keys = math.inf, rest
    if isinstance(config, Zero3Config):
        least, keys = max(config.keep_below, 1), _unit_keys(specs, config.own_unit_from)
    backwards = range(len(specs))[::-1]
    large = [i for i in backwards if specs[i].numel >= least]
    small = [i for i in backwards if specs[i].numel < least]
    units = []
    for key, kinds in units_of_keys(specs, large, keys, precision, devices):
        flats = [_arrange([specs[i] for i in kind], precision, config, loads) for kind in kinds]
        units.append(UnitLayout(key, tuple(flats), sharded=True))
    kinds_of_all = units_of_keys(specs, small, rest, precision, devices)
    for kind in (each for _, kinds in kinds_of_all for each in kinds):
        whole = [specs[i] for i in kind]
        dtype = precision.forward_dtype(whole[0].dtype, whole[0].shape)
        for bucket in plan_buckets(
            [spec.shape for spec in whole],
            [(dtype, None)] * len(whole),
            range(len(whole)),
            bucket_bytes=config.bucket_bytes,
            first_bytes=config.bucket_bytes,
        ):
            flat = _arrange([whole[i] for i in bucket.members], precision, config, loads)
            units.append(UnitLayout(ROOT, (flat,), sharded=False))
    return in_order_of_backward(units, specs)


def _unit_keys(specs: Sequence[TensorSpec], own_unit_from: int) -> list[str]:
    """Return the module prefix that each parameter is gathered with."""
    elements: dict[str, int] = {}
    for spec in specs:
        owner = spec.name.rpartition(".")[0]
        elements[owner] = elements.get(owner, 0) + spec.numel
    keys = []
    for spec in specs:
        owner = spec.name.rpartition(".")[0]
        alone = owner if elements[owner] >= own_unit_from else ROOT
        keys.append(block_of(spec.name) or alone)
    return keys


def _arrange(
    specs: Sequence[TensorSpec], precision: Precision, config: Zero1Config, loads: list[int]
) -> FlatLayout:
    if config.cut == "whole":
        return arrange_whole(specs, precision, loads)
    return arrange(specs, precision, len(loads), config.cut)


# --- zeRO ---

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
        return cut_model(specs, run.precision, config, run.mesh["dp"].size, devices)

    @classmethod
    def sharing(cls, config: ConfigT, run: SimulatedRun) -> Sharing:
        """Return what this stage divides: see the top of this file."""
        if isinstance(config, Zero3Config):
            return replace(super().sharing(config, run), whole_below=config.keep_below)
        return replace(super().sharing(config, run), bucket=config.bucket_bytes)


class Zero1(Zero1Outline, Zero[Zero1Config]):
    """Optimizer states are divided (5.1); parameters and gradients are whole on every rank."""


class Zero2(Zero2Outline, Zero[Zero2Config]):
    """Gradients are divided too (5.2): whole ones exist for the buckets on their way only."""


class Zero3(Zero3Outline, Zero[Zero3Config]):
    """Parameters are divided too (5.3): whole ones exist for the units in use only."""

    @override
    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Prepare the model's step, and warn where all parameters stay whole."""
        largest = max((each.numel() for each in named_parameters(model).values()), default=0)
        least = self.config.keep_below
        if self.ranks.sharing.axis.size > 1 and 0 < largest < least:
            logger.warning(
                f"zero3 divides no parameter of {type(model).__name__}: expected some of at least "
                f"keep_below = {least:,} elements, found at most {largest:,}; all stay whole, as "
                f"under zero2: set its keep_below to {largest} or less"
            )
        return super().prepare(model, optimizers)
