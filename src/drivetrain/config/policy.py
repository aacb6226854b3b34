"""The precision policy in words: the dtypes of a run, and which fit together. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from drivetrain.config.schema import RunConfig
from drivetrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

PrecisionName: TypeAlias = Literal["no", "bf16", "fp16", "fp8"]
Recipe: TypeAlias = Literal["tensorwise", "tensorwise_gathered", "rowwise", "rowwise_with_gw_hp"]
Dtype: TypeAlias = "torch.dtype | str | None"
"""A dtype, its word, or None for none of them."""

WORDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""The words of dtypes, by torch's names."""

LOW_WORDS = ("bf16", "fp16")
"""Dtypes too coarse to add up gradients or updates in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The dtypes of one run in words, made with ``of`` or ``configured``, which check them.

    Attributes:
        name: the policy as configured.
        param: dtype in which forward reads fp32 parameters of two dims or more; None leaves each
            parameter in the dtype the user gave it.
        compute: dtype of matrix products inside forward; None computes in the parameters' dtype.
            With fp8 that of the products that are not in fp8.
        reduce: dtype in which gradients cross ranks; None sends each in its parameter's dtype.
        master: dtype of the copy the optimizer updates; None means the parameter is the master.
        master_of_given: whether parameters that the user gave in a low dtype get a master too.
        recipe: how numbers are scaled for products in fp8; None without any.
    """

    name: PrecisionName = "no"
    param: str | None = None
    compute: str | None = None
    reduce: str | None = None
    master: str | None = None
    master_of_given: bool = False
    recipe: Recipe | None = None

    @classmethod
    def of(
        cls,
        name: str,
        *,
        param: Dtype = None,
        reduce: Dtype = None,
        master: Dtype = "auto",
        recipe: Recipe = "tensorwise",
    ) -> Self:
        """Return the policy of a name, with other dtypes than the name alone gives.

        Args:
            name: no, bf16, fp16 or fp8, which is bf16 with products of blocks in fp8.
            param: dtype in which forward reads matrices: None, or the name's own.
            reduce: dtype of gradients on the wire: None, bf16, fp16 (with the name fp16) or fp32.
            master: ``auto`` keeps an fp32 master of parameters that ``param`` converts; ``fp32``
                also of parameters given in a low dtype; None keeps no master.
            recipe: of fp8; means nothing without it.

        Raises:
            ConfigError: an unknown name, or dtypes that do not fit together.
        """
        computes = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
        if name not in computes:
            raise ConfigError(f"expected a precision of no, bf16, fp16 or fp8, found {name!r}")
        compute = computes[name]
        read = None if param is None else dtype_word(param)
        sent = None if reduce is None else dtype_word(reduce)
        kept = None if master is None else dtype_word(master)
        _check(name, compute, read, sent, kept)
        return cls(
            name=name,  # type: ignore[arg-type]  # checked above
            param=read,
            compute=compute,
            reduce=sent,
            master=("fp32" if read is not None else None) if kept == "auto" else kept,
            master_of_given=kept == "fp32",
            recipe=recipe if name == "fp8" else None,
        )

    @classmethod
    def configured(cls, run: RunConfig) -> Self:
        """Return the policy of a configuration: its ``precision`` and its section ``dtypes``.

        Raises:
            ConfigError: dtypes that do not fit together.
        """
        dtypes = run.dtypes
        return cls.of(
            run.precision,
            param=None if dtypes.param == "as_given" else dtypes.param,
            reduce=None if dtypes.reduce == "as_given" else dtypes.reduce,
            master=None if dtypes.master == "none" else dtypes.master,
            recipe=dtypes.fp8,
        )

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients underflow without a loss scale."""
        return self.compute == "fp16"

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
            word = getattr(self, name)
            if word is not None:
                raise ConfigError(
                    f"{strategy}: expected dtypes.{name} as the model is given, found "
                    f"{word} (precision {self}); {instead}"
                )

    def __str__(self) -> str:
        given = "as given"
        return (
            f"{self.name}: param {self.param or given}, compute {self.compute or given}, "
            f"reduce {self.reduce or given}, master {self.master or 'none'}"
            f"{f', fp8 {self.recipe}' if self.recipe else ''}"
        )


def dtype_word(dtype: "torch.dtype | str") -> str:
    """Return bf16, fp16 or fp32, and torch's name for other dtypes."""
    name = str(dtype).removeprefix("torch.")
    return WORDS.get(name, name)


def _check(
    name: str, compute: str | None, param: str | None, reduce: str | None, master: str | None
) -> None:
    """Refuse dtypes that do not fit together."""
    if param not in (None, *LOW_WORDS):
        raise ConfigError(
            f"dtypes.param: expected as_given, bf16 or fp16, found {param}; parameters that are "
            "given in fp32 stay so with as_given"
        )
    if param not in (None, compute):
        raise ConfigError(
            f"dtypes.param: {param} needs precision: {param}, found precision: {name}; set "
            f"precision: {param}, or dtypes.param: as_given"
        )
    if reduce not in (None, *WORDS.values()):
        raise ConfigError(f"dtypes.reduce: expected as_given, bf16, fp16 or fp32, found {reduce}")
    if reduce == "fp16" and name != "fp16":
        raise ConfigError(
            f"dtypes.reduce: fp16 needs precision: fp16, found precision: {name}; without a loss "
            "scale gradients underflow in fp16: set dtypes.reduce: bf16, or precision: fp16"
        )
    if master not in ("auto", "fp32", None):
        raise ConfigError(
            f"dtypes.master: expected auto, fp32 or none, found {master}; a master "
            "copy is there for fp32"
        )
    if master is None and param == "fp16":
        raise ConfigError(
            "dtypes.master: none cannot go with dtypes.param: fp16, whose updates underflow; set "
            "dtypes.master: fp32, or precision: bf16 with dtypes.param: bf16"
        )
