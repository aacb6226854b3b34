"""The definition of data parallelism, without an optimisation: the reference of ``verify``.

1. Every rank holds the whole model, and starts from rank 0's parameters and buffers.
2. After the last backward of an accumulation window, each parameter's gradients are gathered.
3. Every rank adds the gradients in the order of the ranks, and divides by their number.
4. A gradient that some ranks lack counts as zeros; one that all ranks lack stays None.
5. The buffers of rank 0 replace those of the other ranks.

One parameter follows the other: no buckets, no overlap, no part of a tensor. With P parameters of
p elements and b bytes, on N ranks: sent per rank and step (N-1) b times the sum of p + 1 over all
parameters; the additional element says whether a rank had a gradient. On one rank nothing is left:
it is an ordinary training loop.
"""

from dataclasses import dataclass
from typing import ClassVar

from drivetrain.config.outline import ReplicasOutline
from drivetrain.config.schema import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainConfig:
    """``plain`` has no options: there is one definition."""


class PlainOutline(ReplicasOutline[PlainConfig]):
    """The outline of ``plain``."""

    summary: ClassVar[str] = "whole models, gradients averaged one by one, the reference of verify"
    Config: ClassVar[type] = PlainConfig

    @classmethod
    def check_options(cls, config: PlainConfig, precision: Policy) -> None:
        """Refuse every dtype beside that of the parameters."""
        precision.refuse(
            "plain", "param", "reduce", "master", instead="leave it out, or take another strategy"
        )
