"""The options of the strategy ``ddp``, and what may be set together. No torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from drivetrain.config.outline import FarLinks, ReplicasOutline
from drivetrain.config.schema import Policy, option
from drivetrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    """Options of the strategy ``ddp``."""

    bucket_mib: float = option(
        25.0, help="MiB of gradients that are sent together", minimum=0.001, maximum=4096
    )
    first_bucket_mib: float = option(
        1.0,
        help="MiB of the first bucket: small, so that sending starts early",
        minimum=0.001,
        maximum=4096,
    )
    buffers: Literal["broadcast", "none"] = option(
        "broadcast",
        help="whether rank 0's buffers (BatchNorm statistics) replace the others' after a backward",
    )
    hook: Literal["none", "bf16", "fp16", "powersgd"] = option(
        "none",
        help="compression of gradients on the wire: none, half precision, or low rank",
        question="Compress gradients on the wire?",
    )
    exchange: Literal["gradients", "momentum"] = option(
        "gradients",
        help="tensors that methods of links.far send: gradients, or momenta of Adam",
    )
    powersgd_rank: int = option(4, help="rank of the low-rank gradients of powersgd", minimum=1)
    powersgd_dtype: Literal["same", "bf16", "fp16"] = option(
        "same", help="dtype in which powersgd sends: that of the gradients, or half precision"
    )
    powersgd_start_step: int = option(
        10, help="optimizer steps with uncompressed gradients before powersgd starts", minimum=0
    )


class DdpOutline(ReplicasOutline[DdpConfig]):
    """The outline of ``ddp``."""

    summary: ClassVar[str] = "every rank holds the whole model, and gradients are averaged"
    Config: ClassVar[type] = DdpConfig

    @classmethod
    def check_options(cls, config: DdpConfig, precision: Policy) -> None:
        """Refuse masters, which every rank would hold whole, and two compressions."""
        precision.refuse(
            "ddp",
            "param",
            "master",
            instead="convert the model itself, or take a strategy that keeps master copies",
        )
        if config.exchange == "momentum" and (
            config.hook != "none" or precision.reduce is not None
        ):
            raise ConfigError(
                "ddp: expected hook: none and no dtypes.reduce with exchange: momentum, found "
                f"hook: {config.hook} and {precision}; leave out one side"
            )
        if precision.reduce is not None and config.hook != "none":
            raise ConfigError(
                "ddp: expected strategy.hook or dtypes.reduce, found both: "
                f"hook: {config.hook} and {precision}; leave one of them out"
            )

    @classmethod
    def channels(cls, config: DdpConfig) -> frozenset[str]:
        """Return gradients: parameters are never sent after the start."""
        return frozenset({"gradients"})

    @classmethod
    def check_links(cls, config: DdpConfig, links: FarLinks, precision: Policy) -> None:
        """Refuse parameters, and gradients that the option ``hook`` compresses, too."""
        super().check_links(config, links, precision)
        if links.gradients is not None and config.hook != "none":
            raise ConfigError(
                f"ddp: expected links.far.gradients or strategy.hook, found both: "
                f"{links.name_for('gradients')} and {config.hook}; leave one of them out"
            )
        if config.exchange == "momentum":
            from drivetrain.compression.one_bit_adam import check_momentum  # torch: methods need it

            check_momentum("ddp", links, precision)
