"""Values that ranks exchange in a script: metrics without repetitions, and a flag."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain import communication
from drivetrain.errors import UsageError
from drivetrain.facade.settings import Runs
from drivetrain.nested import find_batch_size, is_tensor, recursively_apply, slice_tensors
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.mesh import Axis


class Gathering:
    """The exchange of values among the ranks of one Accelerator, over the axis ``dp``.

    Args:
        runs: of the Accelerator; the default run has the axis.
        state: knows the samples of the last batch that repeat others.
    """

    def __init__(self, runs: Runs, state: GradientState) -> None:
        self._runs = runs
        self._state = state
        self._trigger = False

    @property
    def _axis(self) -> Axis:
        # Ranks along other axes share a batch: they would count it several times.
        return self._runs.default.mesh["dp"]

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all data-parallel ranks along dim 0."""
        self._refuse_after_end("gather")
        return communication.gather(tensor, group=self._axis)

    def gather_for_metrics(self, data: Any, as_objects: bool) -> Any:
        """Gather tensors or objects, and drop the samples that only repeat others."""
        self._refuse_after_end("gather_for_metrics")
        if as_objects or not _all_tensors(data):
            gathered: Any = communication.gather_object(data, group=self._axis)
        else:
            gathered = communication.gather(data, group=self._axis)
        keep = self._state.remainder if self._state.end_of_dataloader else -1
        if keep < 0:
            return gathered
        if isinstance(gathered, list) and not _all_tensors(gathered):
            return gathered[:keep]
        batch = find_batch_size(gathered)
        return slice_tensors(gathered, slice(0, keep)) if batch and batch > keep else gathered

    def reduce(self, tensor: Any, reduction: str, scale: float) -> Any:
        """Combine tensors of all data-parallel ranks element by element."""
        self._refuse_after_end("reduce")
        return communication.reduce(tensor, reduction, scale, group=self._axis)

    def pad(self, tensor: Any, dim: int, pad_index: int, pad_first: bool) -> Any:
        """Pad tensors along a dim to the longest of any data-parallel rank."""
        return communication.pad_across_processes(
            tensor, dim=dim, pad_index=pad_index, pad_first=pad_first, group=self._axis
        )

    def mean(self, value: float | Tensor, count: int) -> float:
        """Return the mean over all data-parallel ranks of a rank's mean over ``count`` samples."""
        counted = float(value) * count if count else 0.0  # the mean of nothing may be no number
        total = torch.tensor(
            [counted, float(count)],
            dtype=torch.float64,
            device=self._runs.default.world.device,
        )
        summed = communication.reduce(total, "sum", group=self._axis)
        return float(summed[0] / summed[1])

    def set_trigger(self) -> None:
        """Raise this rank's flag."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank raised its flag, and lower all flags. Collective."""
        flag = torch.tensor(int(self._trigger), device=self._runs.default.world.device)
        raised = bool(communication.reduce(flag, "max").item())
        if raised:
            self._trigger = False
        return raised

    def _refuse_after_end(self, operation: str) -> None:
        """Raise when the ranks have parted: the local value would pass for that of all."""
        if self._runs.default.world.size > 1 and not dist.is_initialized():
            raise UsageError(
                f"expected {operation}() before end_training(), found it after: this rank has left "
                "the process group"
            )


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return is_tensor(data) or bool(data)
