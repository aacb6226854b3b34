"""Notices changes to tensors that have no values yet, made where nobody records them."""

import gc
import weakref
from collections.abc import Callable, Mapping

from torch import Tensor

from drivetrain.errors import UsageError


class Versions:
    """The versions of all tensors of a construction at its end.

    torch counts changes in place per tensor. Changes through ``.data`` are not counted.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def note(self, belongs: Callable[[Tensor], bool]) -> None:
        """Note the versions of the tensors that are alive now.

        Args:
            belongs: whether a tensor is of the construction.
        """
        for item in gc.get_objects():
            # By type: isinstance would ask objects for __class__, and some of them warn.
            if issubclass(type(item), Tensor) and not item.is_inference() and belongs(item):
                self._noted[id(item)] = weakref.ref(item), item._version

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare tensors with their noted versions.

        Raises:
            UsageError: one was changed in place since.
        """
        for name, tensor in tensors.items():
            reference, version = self._noted.get(id(tensor), (None, 0))
            if reference is not None and reference() is tensor and tensor._version != version:
                raise UsageError(
                    f"expected {name!r} to be initialised inside of building(), found that it was "
                    "changed after the context ended and before prepare(), where it has no values; "
                    "do that inside, or after prepare() in gathered()"
                )
