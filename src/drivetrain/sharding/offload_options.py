"""The options of strategies over units that say what lies in stores, and in which ones."""

from dataclasses import dataclass, fields
from typing import Any

from drivetrain.config.option import mapping, option
from drivetrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadOptions:
    """What lies in stores between its uses."""

    optimizer: str = option(
        "",
        help="store that keeps optimizer state and master weights, and steps them: cpu, nvme, or "
        "another installed one; empty leaves them on the device",
    )
    params: str = option(
        "",
        help="store that keeps this rank's share of the parameters between their uses, where they "
        "are divided; needs a store for optimizer, too",
    )
    path: str = option("", help="directory on a local disk, for stores that keep files")
    ratio: float = option(
        1.0,
        help="share of the parameters whose optimizer state is offloaded; those that forward "
        "needs first stay",
        minimum=0.0,
        maximum=1.0,
    )
    delayed: bool = option(
        False,
        help="whether parameters change one step late, so that an update may take as long as a "
        "whole step; another trajectory than without",
    )
    store_options: dict[str, int | float | bool | str] = mapping(
        help="options of the stores, such as request_mib of nvme; the same for all of them"
    )

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: says which ones.
        """
        if self.params and not self.optimizer:
            raise ConfigError(
                f"expected offload.optimizer with offload.params: {self.params}, found none: an "
                "optimizer on the device needs the parameters there; name a store for both"
            )
        if self.params and self.ratio < 1:
            raise ConfigError(
                f"expected offload.ratio: 1 with offload.params: {self.params}, found "
                f"{self.ratio:g}: what lies in a store is stepped there; leave one of them out"
            )
        idle = [
            f"{knob}: {getattr(self, knob)}"
            for knob in ("path", "ratio", "delayed", "store_options")
            if getattr(self, knob) != _DEFAULTS[knob]
        ]
        if idle and not self.optimizer:
            raise ConfigError(
                f"expected a store in offload.optimizer with {', '.join(idle)}, found none; name "
                "one, such as cpu, or leave these out"
            )


_DEFAULTS: dict[str, Any] = {
    field.name: getattr(OffloadOptions(), field.name) for field in fields(OffloadOptions)
}
