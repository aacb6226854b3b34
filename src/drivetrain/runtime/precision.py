"""The precision policy: which dtype parameters, compute, reduction and master copies have."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from drivetrain.errors import ConfigError

PrecisionName: TypeAlias = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes of one run.

    Attributes:
        name: the policy as configured.
        param: dtype in which a strategy keeps the parameters that forward reads; None leaves each
            parameter in the dtype the user gave it.
        compute: dtype of matrix products inside forward; None computes in the parameters' dtype.
        reduce: dtype in which gradients cross ranks; None sends each in its own dtype.
        master: dtype of the copy the optimizer updates; None means the parameter is the master.
    """

    name: PrecisionName = "no"
    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None

    @classmethod
    def of(cls, name: str) -> "Precision":
        """Return the policy of a name: no, bf16 or fp16.

        Raises:
            ConfigError: an unknown name.
        """
        match name:
            case "no":
                return cls()
            case "bf16":
                return cls(name="bf16", compute=torch.bfloat16)
            case "fp16":
                return cls(name="fp16", compute=torch.float16)
        raise ConfigError(f"expected a precision of no, bf16 or fp16, found {name!r}")

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients underflow without a loss scale."""
        return self.compute is torch.float16

    def autocast(
        self, device: torch.device, *, enabled: bool = True, cache_enabled: bool = True
    ) -> AbstractContextManager[object]:
        """Return the context in which forward computes."""
        if self.compute is None or not enabled:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute, cache_enabled=cache_enabled)

    def __str__(self) -> str:
        def show(dtype: torch.dtype | None) -> str:
            return "as given" if dtype is None else str(dtype).removeprefix("torch.")

        return (
            f"{self.name}: param {show(self.param)}, compute {show(self.compute)}, "
            f"reduce {show(self.reduce)}, master {show(self.master)}"
        )
