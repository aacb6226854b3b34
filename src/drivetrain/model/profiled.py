"""The part of a strategy's contract for profiles and for the comparison of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from drivetrain.parts.blocks import model_units


class Profiled:
    """The parts of a model that ranks compute, by name."""

    @classmethod
    def stages(cls, config: Any) -> Sequence[str]:
        """Return the axes whose ranks compute other parts of the model: by default none."""
        return ()

    def units(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules of this rank's computation in their order, by name.

        Args:
            module: as ``unwrap`` returns it.
        """
        return model_units(module)
