"""Names from Accelerate's scripts for classes and functions that have another name here."""

from datetime import timedelta

from torch import nn

from drivetrain.config import read_file
from drivetrain.data import PreparedLoader as DataLoaderShard
from drivetrain.errors import RankMismatchError as DistributedOperationException
from drivetrain.facade.stepping import PreparedOptimizer as AcceleratedOptimizer
from drivetrain.facade.stepping import PreparedScheduler as AcceleratedScheduler
from drivetrain.parts.naming import uncompiled
from drivetrain.processes import PartialState
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import launched_config
from drivetrain.tracking import Tracker as GeneralTracker

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "AcceleratorState",
    "DataLoaderShard",
    "DistributedOperationException",
    "GeneralTracker",
    "extract_model_from_parallel",
]


class AcceleratorState(PartialState):
    """The processes of a run and its precision, for scripts without an Accelerator at hand.

    Args:
        mixed_precision: ``no``, ``bf16`` or ``fp16``; None takes the launch configuration's.
        cpu: compute on the CPU even when there is an accelerator.
        backend: communication library; None takes the device's own.
        timeout: how long a collective may wait.

    Raises:
        ConfigError: an unknown precision.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(cpu=cpu, backend=backend, timeout=timeout)
        path = launched_config()
        configured = read_file(path).values.get("precision", "no") if path else "no"
        self.precision = Precision.of(mixed_precision or str(configured))

    @property
    def mixed_precision(self) -> str:
        """The precision of the run: no, bf16 or fp16."""
        return self.precision.name


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the user's own module, for code without an Accelerator at hand.

    Args:
        model: prepared by a strategy that works in hooks, compiled, or wrapped by torch's
            DataParallel or DistributedDataParallel, inside or outside of the compiled module.
        keep_fp32_wrapper: without effect; ``Accelerator.unwrap_model`` undoes the precision of
            forward.
        keep_torch_compile: False returns the module inside a compiled one.
    """
    del keep_fp32_wrapper
    inner = uncompiled(model)
    while isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = _compiled_alike(inner.module, model)
        inner = uncompiled(model)
    return model if keep_torch_compile else inner


def _compiled_alike(module: nn.Module, outer: nn.Module) -> nn.Module:
    """Return a module compiled as the wrapper around the module is, if the wrapper is compiled."""
    if uncompiled(outer) is outer or uncompiled(module) is not module:
        return module
    compiled: nn.Module = type(outer)(module, outer.dynamo_ctx)
    return compiled
