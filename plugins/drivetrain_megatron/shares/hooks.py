"""Hooks of a script on a parameter of which each rank has a share: they see the whole gradient."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.parts.rounds import in_backward
from drivetrain_megatron.tensor.operators import gather, scatter
from drivetrain_megatron.tensor.partition import Partition

GradientHook: TypeAlias = Callable[[Tensor], Tensor | None]


def seen_whole(
    seeing: GradientHook, ranks: Communicator, partition: Partition
) -> Callable[[Tensor | None], Tensor | None]:
    """Return a hook of the share that lets a script's hook see the whole gradient."""

    def shared(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # a pipeline computes it later
            return None
        if not in_backward():  # it is averaged, and whole
            return seeing(gradient)
        whole = gather(gradient, ranks, partition)
        found = seeing(whole)
        return scatter(whole if found is None else found, ranks, partition)

    return shared


def seen_behind(
    seeing: Callable[[nn.Parameter], None], name: str
) -> Callable[[nn.Parameter], None]:
    """Return a hook behind the accumulated gradient that never sees a share of it."""

    def behind(parameter: nn.Parameter) -> None:
        if in_backward():
            raise UsageError(
                "expected accelerator.backward(loss), found loss.backward(), in which a hook "
                f"behind the accumulated gradient of {name!r} would see this rank's share; call "
                "accelerator.backward(loss), or take register_hook"
            )
        seeing(parameter)

    return behind
