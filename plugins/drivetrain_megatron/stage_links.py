"""The links between the stages of a pipeline: their names, and the dtype in which tensors cross.

Two ranks of the axis are neighbors of one host, or a link between hosts lies between them. With
``links.far.activations: bf16`` activations and their gradients cross such a link in bfloat16, each
number rounded once. The receiving stage goes on in the dtype of the sender. Within a host, all is
sent as it is.
"""

from dataclasses import dataclass

import torch

from drivetrain.log import get_logger
from drivetrain.runtime.lines import lines_along
from drivetrain.runtime.mesh import Axis
from drivetrain.strategy import Run

logger = get_logger(__name__)

_ROUNDED = torch.bfloat16


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The links of one line of the axis ``pp``.

    Attributes:
        axis: the line, and the host of each of its ranks.
        rounds: whether activations are rounded between hosts.
    """

    axis: Axis
    rounds: bool = False

    @classmethod
    def of(cls, run: Run) -> "StageLinks":
        """Return the links of this rank's line; the mesh gets to know their names."""
        run.mesh.name_links("pp")
        return cls(run.mesh["pp"], run.links.rounds_activations)

    def is_far(self, one: int, other: int) -> bool:
        """Whether two ranks of the axis are on different hosts."""
        return self.axis.hosts[one] != self.axis.hosts[other]

    def name(self, one: int, other: int) -> str:
        """Return the name in the ledger of the link between two ranks of the axis."""
        if not self.axis.spans_hosts:
            return self.axis.name
        return f"{self.axis.name}.{'far' if self.is_far(one, other) else 'near'}"

    def wire_dtype(self, one: int, other: int, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which an activation, or its gradient, goes from rank to rank."""
        is_wide = dtype.is_floating_point and dtype.itemsize > _ROUNDED.itemsize
        return _ROUNDED if self.rounds and is_wide and self.is_far(one, other) else dtype


def announce_idle_rounding(run: Run) -> None:
    """Say that no activation is rounded, where hosts hold whole pipelines.

    Where the whole run is on one host, ``prepare()`` says so itself.
    """
    if not (run.links.rounds_activations and run.world.spans_hosts):
        return
    sizes = {name: axis.size for name, axis in run.mesh.items()}
    hosts = run.world.hosts
    if all(len({hosts[rank] for rank in line}) == 1 for line in lines_along("pp", sizes)):
        logger.announce(
            f"links.far.activations: {run.links.activations} rounds nothing: all stages of each "
            "pipeline are on one host"
        )
