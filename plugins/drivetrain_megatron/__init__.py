"""Megatron: tensor, sequence and pipeline parallelism for an unmodified model.

``tensor/`` divides the layers of a block over the axis ``tp``, ``pipeline/`` divides the blocks
over the axis ``pp``. The ranks that share one replica are a cell. Its parameters are trained by any
data-parallel strategy on the axis ``dp``, found by name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_megatron.strategy import Megatron

__all__ = ["Megatron"]


def __getattr__(name: str) -> Any:
    """Import the strategy when it is asked for: the command ``schedule`` needs no torch."""
    if name == "Megatron":
        from drivetrain_megatron.strategy import Megatron

        return Megatron
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
