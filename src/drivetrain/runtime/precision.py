"""The precision policy: which dtype parameters, compute, reduction and master copies have."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from drivetrain.config.schema import RunConfig
from drivetrain.errors import ConfigError

PrecisionName: TypeAlias = Literal["no", "bf16", "fp16"]
Master: TypeAlias = torch.dtype | Literal["auto"] | None

LOW = (torch.bfloat16, torch.float16)
"""Dtypes too coarse to add up gradients or updates in."""

_COMPUTE = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes of one run, made with ``of`` or ``configured``, which check them.

    Attributes:
        name: the policy as configured.
        param: dtype in which forward reads fp32 parameters of two dims or more; None leaves each
            parameter in the dtype the user gave it.
        compute: dtype of matrix products inside forward; None computes in the parameters' dtype.
        reduce: dtype in which gradients cross ranks; None sends each in its parameter's dtype.
        master: dtype of the copy the optimizer updates; None means the parameter is the master.
        master_of_given: whether parameters that the user gave in a low dtype get a master too.
    """

    name: PrecisionName = "no"
    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    master_of_given: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        *,
        param: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        master: Master = "auto",
    ) -> "Precision":
        """Return the policy of a name, with other dtypes than the name alone gives.

        Args:
            name: no, bf16 or fp16.
            param: dtype in which forward reads matrices: None, or the name's own.
            reduce: dtype of gradients on the wire: None, bf16, fp16 (with the name fp16) or fp32.
            master: ``auto`` keeps an fp32 master of parameters that ``param`` converts;
                ``torch.float32`` also of parameters given in a low dtype; None keeps no master.

        Raises:
            ConfigError: an unknown name, or dtypes that do not fit together.
        """
        compute = _compute(name)
        if param is not None:
            _check_param(name, param, compute)
        if reduce is not None:
            _check_reduce(name, reduce)
        _check_master(param, master)
        kept = (torch.float32 if param is not None else None) if master == "auto" else master
        return cls(
            name=name,  # type: ignore[arg-type]  # _compute has checked it
            param=param,
            compute=compute,
            reduce=reduce,
            master=kept,
            master_of_given=master == torch.float32,
        )

    @classmethod
    def configured(cls, run: RunConfig) -> "Precision":
        """Return the policy of a configuration: its ``precision`` and its section ``dtypes``.

        Raises:
            ConfigError: dtypes that do not fit together.
        """
        dtypes = run.dtypes
        masters: dict[str, Master] = {"auto": "auto", "none": None, "fp32": torch.float32}
        return cls.of(
            run.precision,
            param=_DTYPES.get(dtypes.param),
            reduce=_DTYPES.get(dtypes.reduce),
            master=masters[dtypes.master],
        )

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients underflow without a loss scale."""
        return self.compute is torch.float16

    def forward_dtype(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.dtype:
        """Return the dtype in which forward reads a parameter of this shape, given in this dtype.

        Norm weights, biases and other vectors keep their dtype, and so do parameters in anything
        but fp32.
        """
        if self.param is None or dtype is not torch.float32 or len(shape) < 2:
            return dtype
        return self.param

    def master_dtype(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.dtype:
        """Return the dtype in which the optimizer updates a parameter given in this dtype.

        Without a master copy the optimizer updates the parameter as forward reads it.
        """
        read = self.forward_dtype(dtype, shape)
        given_low = read is dtype
        if self.master is None or read not in LOW or (given_low and not self.master_of_given):
            return read
        return self.master

    def reduce_dtype(self, forward_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients cross ranks, by the dtype in which forward reads.

        Those of fp64, complex numbers and integers are sent as they are.
        """
        if self.reduce is None or forward_dtype not in (torch.float32, *LOW):
            return forward_dtype
        return self.reduce

    def accumulate_dtype(self, forward_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that sums gradients of parameters that forward reads in a dtype."""
        return torch.float32 if forward_dtype in LOW else forward_dtype

    def refuse(self, strategy: str, *names: str, instead: str) -> None:
        """Raise when a dtype is set that a strategy does not honour.

        Args:
            strategy: its name.
            names: the dtypes without effect under the strategy: ``param``, ``reduce``, ``master``.
            instead: the way out.

        Raises:
            ConfigError: one of the names is set.
        """
        for name in names:
            dtype = getattr(self, name)
            if dtype is not None:
                raise ConfigError(
                    f"{strategy}: expected dtypes.{name} as the model is given, found "
                    f"{dtype_word(dtype)} (precision {self}); {instead}"
                )

    def autocast(
        self, device: torch.device, *, enabled: bool = True, cache_enabled: bool = True
    ) -> AbstractContextManager[object]:
        """Return the context in which forward computes."""
        if self.compute is None or not enabled:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute, cache_enabled=cache_enabled)

    def __str__(self) -> str:
        def show(dtype: torch.dtype | None, otherwise: str = "as given") -> str:
            return otherwise if dtype is None else dtype_word(dtype)

        return (
            f"{self.name}: param {show(self.param)}, compute {show(self.compute)}, "
            f"reduce {show(self.reduce)}, master {show(self.master, 'none')}"
        )


def dtype_word(dtype: torch.dtype) -> str:
    """Return bf16, fp16 or fp32, and torch's name for other dtypes."""
    return _WORDS.get(dtype, str(dtype).removeprefix("torch."))


def _compute(name: str) -> torch.dtype | None:
    if name not in _COMPUTE:
        raise ConfigError(f"expected a precision of no, bf16 or fp16, found {name!r}")
    return _COMPUTE[name]


def _check_param(name: str, param: torch.dtype, compute: torch.dtype | None) -> None:
    word = dtype_word(param)
    if param not in LOW:
        raise ConfigError(
            f"dtypes.param: expected as_given, bf16 or fp16, found {word}; parameters that are "
            "given in fp32 stay so with as_given"
        )
    if param is not compute:
        raise ConfigError(
            f"dtypes.param: {word} needs precision: {word}, found precision: {name}; set "
            f"precision: {word}, or dtypes.param: as_given"
        )


def _check_reduce(name: str, reduce: torch.dtype) -> None:
    word = dtype_word(reduce)
    if reduce not in _WORDS:
        raise ConfigError(f"dtypes.reduce: expected as_given, bf16, fp16 or fp32, found {word}")
    if reduce is torch.float16 and name != "fp16":
        raise ConfigError(
            f"dtypes.reduce: fp16 needs precision: fp16, found precision: {name}; without a loss "
            "scale gradients underflow in fp16: set dtypes.reduce: bf16, or precision: fp16"
        )


def _check_master(param: torch.dtype | None, master: Master) -> None:
    if isinstance(master, torch.dtype) and master is not torch.float32:
        raise ConfigError(
            f"dtypes.master: expected auto, fp32 or none, found {dtype_word(master)}; a master "
            "copy is there for fp32"
        )
    if master is None and param is torch.float16:
        raise ConfigError(
            "dtypes.master: none cannot go with dtypes.param: fp16, whose updates underflow; set "
            "dtypes.master: fp32, or precision: bf16 with dtypes.param: bf16"
        )
