"""Names that scripts written for Accelerate use for what is called otherwise here."""

from torch import nn

from drivetrain.errors import RankMismatchError as DistributedOperationException
from drivetrain.facade.optimizer import PreparedOptimizer as AcceleratedOptimizer
from drivetrain.facade.scheduler import PreparedScheduler as AcceleratedScheduler
from drivetrain.runtime.data import PreparedLoader as DataLoaderShard
from drivetrain.tracking import Tracker as GeneralTracker

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "DataLoaderShard",
    "DistributedOperationException",
    "GeneralTracker",
    "extract_model_from_parallel",
]


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the user's own module, for code without an Accelerator at hand.

    Args:
        model: prepared by a strategy that works in hooks, compiled, or wrapped by torch's
            DataParallel or DistributedDataParallel.
        keep_fp32_wrapper: accepted for scripts that pass it; ``Accelerator.unwrap_model`` undoes
            the precision of forward.
        keep_torch_compile: False returns the module inside a compiled one.
    """
    del keep_fp32_wrapper
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) and not keep_torch_compile else model
