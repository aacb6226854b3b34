"""What crosses the wire for a bucket: ``plain`` all of it, ``cast`` half, ``powersgd`` low rank."""

from drivetrain_ddp.compression.cast import CastHook, wire_dtype
from drivetrain_ddp.compression.hook import CommunicationHook, Exchange
from drivetrain_ddp.compression.plain import PlainHook
from drivetrain_ddp.compression.powersgd import PowerSgdHook
from drivetrain_ddp.config import DdpConfig

__all__ = [
    "CastHook",
    "CommunicationHook",
    "Exchange",
    "PlainHook",
    "PowerSgdHook",
    "choose_hook",
    "wire_dtype",
]


def choose_hook(config: DdpConfig) -> CommunicationHook:
    """Return the hook that the configuration names."""
    if config.hook == "none":
        return PlainHook()
    if config.hook == "powersgd":
        return PowerSgdHook(config.powersgd_rank, config.powersgd_start_step)
    return CastHook(wire_dtype(config.hook))
