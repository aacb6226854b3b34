"""Whether an optimizer may step what a rank owns of the parameters."""

from torch.optim import Optimizer

from drivetrain.errors import UsageError
from drivetrain.parts.suitability import steps_each_alone, steps_pieces


def check_suits(optimizer: Optimizer, *, whole_parameters: bool) -> None:
    """Refuse an optimizer that cannot step what a rank owns.

    Args:
        optimizer: left as it is.
        whole_parameters: whether ranks own whole parameters; otherwise flat ranges.

    Raises:
        UsageError: says which partition the optimizer needs.
    """
    name = type(optimizer).__name__
    if not steps_each_alone(optimizer):
        raise UsageError(
            f"expected an optimizer that steps each parameter by itself, found {name}, whose step "
            "needs all parameters at once or a closure; use a strategy that replicates parameters"
        )
    if not whole_parameters and not steps_pieces(optimizer):
        raise UsageError(
            f"expected an element-wise optimizer with partition: flat, found {name}, whose step "
            "needs whole matrices; set partition: parameter"
        )
