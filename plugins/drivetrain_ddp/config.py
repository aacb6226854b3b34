"""The knobs of data parallelism, and the compression that they choose."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from drivetrain.config.option import option
from drivetrain.errors import ConfigError
from drivetrain.parts.buckets import MIB, BucketLayout, plan_buckets
from drivetrain.runtime.precision import Precision
from drivetrain_ddp.compression import CastHook, CommunicationHook, narrowing
from drivetrain_ddp.powersgd import PowerSgdHook


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

    def buckets(
        self,
        shapes: Sequence[tuple[int, ...]],
        kinds: Sequence[tuple[torch.dtype, Hashable]],
        order: Sequence[int],
    ) -> list[BucketLayout]:
        """Return the buckets of these sizes; see ``plan_buckets``."""
        return plan_buckets(
            shapes,
            kinds,
            order,
            bucket_bytes=int(self.bucket_mib * MIB),
            first_bytes=int(self.first_bucket_mib * MIB),
        )

    def compression(self, precision: Precision) -> CommunicationHook:
        """Return the hook that the options name, or a cast to the policy's dtype.

        Raises:
            ConfigError: two of a hook, ``dtypes.reduce`` and ``exchange: momentum`` are set.
        """
        if self.exchange == "momentum" and (self.hook != "none" or precision.reduce is not None):
            raise ConfigError(
                "ddp: expected hook: none and no dtypes.reduce with exchange: momentum, found "
                f"hook: {self.hook} and {precision}; leave out one side"
            )
        if precision.reduce is not None and self.hook != "none":
            raise ConfigError(
                "ddp: expected strategy.hook or dtypes.reduce, found both: "
                f"hook: {self.hook} and {precision}; leave one of them out"
            )
        if precision.reduce is not None:
            return CastHook(precision.reduce_dtype)
        if self.hook == "powersgd":
            on_wire = _on_wire(self.powersgd_dtype)
            return PowerSgdHook(self.powersgd_rank, self.powersgd_start_step, on_wire)
        if self.hook == "none":
            return CommunicationHook()
        return CastHook(_on_wire(self.hook))


def _on_wire(word: str) -> Callable[[torch.dtype], torch.dtype]:
    """Return the dtype on the wire for each dtype of gradients."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return narrowing(dtypes[word]) if word in dtypes else lambda dtype: dtype
