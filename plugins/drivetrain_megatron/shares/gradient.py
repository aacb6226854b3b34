"""The place of a gradient of which each rank has a share, for what stands at ``p.grad``."""

from collections.abc import Callable

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.parts.divided_gradient import DividedGradient
from drivetrain_megatron.tensor.operators import gathered
from drivetrain_megatron.tensor.partition import Partition


class SharePlace:
    """Where this rank's share of a gradient lies: at ``grad`` of the parameter with the share.

    Args:
        name: of the parameter.
        ranks: the axis ``tp``.
        partition: what each rank has.
        held: returns the gradient of the share, as the strategy inside of the cell shows it.
        measured: returns the norm of the whole gradient.
        changed: learns that gradients were changed.
    """

    def __init__(
        self,
        name: str,
        ranks: Communicator,
        partition: Partition,
        held: Callable[[], Tensor | None],
        measured: Callable[[float], Tensor],
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self._ranks, self._partition = ranks, partition
        self._held, self._measured, self._changed = held, measured, changed

    def piece(self) -> Tensor:
        """Return this rank's share."""
        held = self._held()
        if held is None:
            raise UsageError(
                f"expected the gradient of {self.name!r}, found that it has been cleared since "
                "p.grad was read; keep a clone()"
            )
        return held

    def counted(self) -> Tensor | None:
        """Return this rank's share, with zeros for what an earlier rank has, too."""
        held = self._held()
        if held is None or self._partition.is_plain:
            return held
        return self._partition.disown(_ordinary(held).clone(), self._ranks.rank)

    def clear(self) -> None:
        """Write zeros."""
        self.piece().zero_()

    def changed(self) -> None:
        """Forget what was measured."""
        self._changed()

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's share of a tensor of the parameter's shape."""
        return self._partition.take(whole, self._ranks.rank)

    def whole(self, piece: Tensor) -> Tensor:
        """Bring the shares of all ranks together. Collective."""
        share, label = _ordinary(piece), f"gradient of {self.name!r}"
        narrow = share.dtype is torch.bool
        share = share.to(torch.uint8) if narrow else share
        whole = gathered(share, self._ranks, self._partition, label=label)
        return whole.bool() if narrow else whole

    def norm(self, norm_type: float) -> Tensor:
        """Return the norm of the whole gradient. Collective, once for all gradients."""
        return self._measured(norm_type)


def _ordinary(piece: Tensor) -> Tensor:
    """Return a share whole over the ranks of the strategy inside of the cell."""
    return piece.whole() if isinstance(piece, DividedGradient) else piece
