"""Whether an optimizer may step what a rank owns of the parameters."""

from collections.abc import Callable, Mapping

from torch.optim import Optimizer

from drivetrain.errors import UsageError
from drivetrain.parts.suitability import steps_each_alone, steps_pieces, steps_rows
from drivetrain.sharding.layout import Cut

_STEPS: Mapping[Cut, tuple[str, Callable[[Optimizer], bool], str]] = {
    "flat": ("ranges of flattened parameters", steps_pieces, "set partition: parameter"),
    "rows": ("some rows of a parameter", steps_rows, "take a strategy with partition: parameter"),
}
"""What ranks own of a parameter that is divided, who may step it, and the way out for others."""


def check_suits(optimizer: Optimizer, cut: Cut) -> None:
    """Refuse an optimizer that cannot step what a rank owns.

    Args:
        optimizer: left as it is.
        cut: what ranks own of parameters.

    Raises:
        UsageError: says what the optimizer needs.
    """
    name = type(optimizer).__name__
    if not steps_each_alone(optimizer):
        raise UsageError(
            f"expected an optimizer that steps each parameter by itself, found {name}, whose step "
            "needs all parameters at once or a closure; use a strategy that replicates parameters"
        )
    if cut == "whole":
        return
    pieces, steps, way_out = _STEPS[cut]
    if not steps(optimizer):
        raise UsageError(
            f"expected an element-wise optimizer, since ranks own {pieces}, found {name}, whose "
            f"step needs whole matrices; {way_out}"
        )
