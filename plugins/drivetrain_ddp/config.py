"""The knobs of data parallelism."""

from dataclasses import dataclass
from typing import Literal

from drivetrain.config.option import option


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    """Options of the strategy ``ddp``."""

    bucket_mib: float = option(
        25.0, help="MiB of gradients that are sent together", minimum=0.001, maximum=4096
    )
    first_bucket_mib: float = option(
        1.0, help="MiB of the first bucket: small, so that sending starts early", minimum=0.001
    )
    buffers: Literal["broadcast", "none"] = option(
        "broadcast",
        help="whether rank 0's buffers (BatchNorm statistics) replace the others' before a "
        "training forward",
    )
    hook: Literal["none", "bf16", "fp16", "powersgd"] = option(
        "none",
        help="compression of gradients on the wire: none, half precision, or low rank",
        question="Compress gradients on the wire?",
    )
    powersgd_rank: int = option(4, help="rank of the low-rank gradients of powersgd", minimum=1)
    powersgd_start_step: int = option(
        10, help="optimizer steps with uncompressed gradients before powersgd starts", minimum=0
    )
