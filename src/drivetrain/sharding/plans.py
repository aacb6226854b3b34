"""Strategies over units in plans: how ranks share state, and which stores keep state."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, get_args

from drivetrain.errors import ConfigError
from drivetrain.paper.contract import OnPaper
from drivetrain.paper.data_parallel import Sharing
from drivetrain.paper.step import Stored, Tier
from drivetrain.sharding.options import UnitsOptions

OFFLOAD, NOWHERE = "offload", "none"
DISK = "nvme"
PLACE = "offloaded"
"""The directory of a planned store on a disk: below the run's own; users name a better one."""


class OffloadInPlans(OnPaper):
    """Layouts with the key ``offload``: the store that keeps the optimizer's state."""

    layout_keys: ClassVar[Mapping[str, str]] = {OFFLOAD: OFFLOAD}

    @classmethod
    def options_of_layout(cls, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options of the keys; a store on a disk gets a directory."""
        options = dict(super().options_of_layout(keys))
        store = options.pop(OFFLOAD, NOWHERE)
        if store != NOWHERE:
            place = {"path": PLACE} if store == DISK else {}
            options[OFFLOAD] = {"optimizer": store, **place}
        return options

    @classmethod
    def layouts(
        cls, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return state on the device, in host memory, and on a disk."""
        return ({}, {OFFLOAD: "cpu"}, {OFFLOAD: DISK})


def sharing_of(
    options: UnitsOptions, *, group: int = 0, bucket: int = 0, whole_below: int = 0
) -> Sharing:
    """Return how ranks share the state of a model under these options.

    Args:
        options: of a strategy over units.
        group: see ``Sharing``.
        bucket: see ``Sharing``.
        whole_below: see ``Sharing``.

    Raises:
        ConfigError: as ``stored_in`` does.
    """
    return Sharing(
        optimizer=True,
        gradients=options.reduces_each,
        parameters=options.divides_parameters,
        keeps=options.until != "forward",
        ahead=options.ahead,
        whole_below=whole_below,
        group=group,
        secondary=options.keeps_secondary,
        fused=options.fused,
        lent=options.lent_buffers,
        bucket=bucket,
        stored=stored_in(options),
    )


def stored_in(options: UnitsOptions) -> Stored:
    """Return the state in stores.

    Raises:
        ConfigError: a store is not one whose time can be drawn.
    """
    offload = options.offload
    tiers: dict[str, Tier] = {tier: tier for tier in get_args(Tier)}
    for name in (offload.optimizer, offload.params):
        if name not in tiers:
            raise ConfigError(
                f"expected an offload store of {', '.join(filter(None, tiers))} in a step on "
                f"paper, found {name!r}, whose time is not drawn; take another store"
            )
    return Stored(
        optimizer=tiers[offload.optimizer],
        parameters=tiers[offload.params],
        share=offload.ratio,
        delayed=offload.delayed,
    )
