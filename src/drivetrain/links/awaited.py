"""A channel of gradients that is exact until a method is chosen, after the first steps."""

from collections.abc import Callable
from typing import Any

from drivetrain.collectives import Handle


class AwaitedChannel:
    """A channel whose method is chosen between two steps; strategies keep the object.

    Args:
        exact: the channel until then.
        renew: makes the channel afterwards, which may be exact, too.

    Attributes:
        now: the channel at this time.
    """

    def __init__(
        self, exact: Callable[..., Handle], renew: Callable[[], Callable[..., Handle]]
    ) -> None:
        self.now = exact
        self._renew = renew

    def __call__(self, tensors: Any) -> Handle:
        """Start the sum."""
        return self.now(tensors)

    def take_method(self) -> None:
        """Go on with the method that was chosen."""
        self.now = self._renew()
