"""What ranks tell each other in a script: gather, reduce, metrics without repetitions, triggers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain import communication
from drivetrain.errors import UsageError
from drivetrain.facade.core import Core
from drivetrain.nested import find_batch_size, is_tensor, recursively_apply, slice_tensors


class Gathering(Core):
    """The communication of the Accelerator."""

    _trigger: bool = False

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all data-parallel ranks along dim 0; every rank gets the result.

        Ranks that share a batch, as tensor- and pipeline-parallel ones do, count once.

        Args:
            tensor: a tensor or nested containers of tensors, of equal shapes on all ranks; 0-d
                tensors become one element each.

        Raises:
            RankMismatchError: shapes, dtypes or structure differ; on every rank.
        """
        self._refuse_after_end("gather")
        return communication.gather(tensor, group=self.mesh["dp"])

    def _refuse_after_end(self, operation: str) -> None:
        """Raise when the ranks have parted: the local value would pass for that of all."""
        if self.world.size > 1 and not dist.is_initialized():
            raise UsageError(
                f"expected {operation}() before end_training(), found it after: this rank has left "
                "the process group"
            )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop the samples that only repeat others to fill the last batch.

        Args:
            input_data: tensors with the batch on dim 0, nested or not, or any objects.
            use_gather_object: gather as objects even when these are tensors, for example because
                their shapes differ.
        """
        self._refuse_after_end("gather_for_metrics")
        if use_gather_object or not _all_tensors(input_data):
            gathered: Any = communication.gather_object(input_data, group=self.mesh["dp"])
        else:
            gathered = communication.gather(input_data, group=self.mesh["dp"])
        keep = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else -1
        if keep < 0:
            return gathered
        if isinstance(gathered, list) and not _all_tensors(gathered):
            return gathered[:keep]
        batch = find_batch_size(gathered)
        return slice_tensors(gathered, slice(0, keep)) if batch and batch > keep else gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors of all data-parallel ranks element by element.

        Args:
            tensor: a tensor or nested containers of tensors, of equal shapes on all ranks.
            reduction: ``sum``, ``mean``, ``max`` or ``none``.
            scale: factor of the result.
        """
        self._refuse_after_end("reduce")
        return communication.reduce(tensor, reduction, scale, group=self.mesh["dp"])

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors along a dim to the longest of any rank, so that they can be gathered."""
        return communication.pad_across_processes(
            tensor, dim=dim, pad_index=pad_index, pad_first=pad_first, group=self.mesh["dp"]
        )

    def metric_mean(self, value: float | Tensor, count: int) -> float:
        """Return the mean over all data-parallel ranks of a rank's mean over ``count`` samples."""
        total = torch.tensor(
            [float(value) * count, float(count)], dtype=torch.float64, device=self.device
        )
        summed = communication.reduce(total, "sum", group=self.mesh["dp"])
        return float(summed[0] / summed[1])

    def set_trigger(self) -> None:
        """Raise a flag on this rank that ``check_trigger`` shows on every rank."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank raised its flag, and lower all flags. Collective."""
        flag = torch.tensor(int(self._trigger), device=self.device)
        raised = bool(communication.reduce(flag, "max").item())
        if raised:
            self._trigger = False
        return raised


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return is_tensor(data) or bool(data)
