"""A bucket on the wire: ``plain`` whole, ``cast`` in another dtype, ``powersgd`` of low rank."""

from drivetrain.errors import ConfigError
from drivetrain.runtime.precision import Precision
from drivetrain_ddp.compression.cast import CastHook, narrowing, wire_dtype
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
    "narrowing",
    "wire_dtype",
]


def choose_hook(config: DdpConfig, precision: Precision) -> CommunicationHook:
    """Return the hook that the configuration names, or a cast to the policy's dtype.

    Raises:
        ConfigError: a hook and ``dtypes.reduce`` are both set.
    """
    if precision.reduce is not None and config.hook != "none":
        raise ConfigError(
            "ddp: expected strategy.hook or dtypes.reduce, found both: "
            f"hook: {config.hook} and {precision}; leave one of them out"
        )
    if precision.reduce is not None:
        return CastHook(precision.reduce_dtype)
    if config.hook == "none":
        return PlainHook()
    if config.hook == "powersgd":
        return PowerSgdHook(config.powersgd_rank, config.powersgd_start_step)
    return CastHook(narrowing(wire_dtype(config.hook)))
