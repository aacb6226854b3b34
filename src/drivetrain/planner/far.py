"""The methods for slow links that a layout names, in the numbers of a step on paper."""

from functools import lru_cache
from typing import Literal

import torch

from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.links.chosen import BF16, EXACT, LinkMethods
from drivetrain.paper.run import FarMethod
from drivetrain.runtime.mesh import Axis

SIDE = 4096
"""Rows and columns of the matrix for which a method tells its bytes: those of large models."""


@lru_cache(maxsize=64)
def far_method(name: str, hosts: int) -> FarMethod | None:
    """Return a method between so many hosts; None for exact sums, and on one host.

    Raises:
        ConfigError: no such method is installed, or it sums no gradients.
    """
    methods = methods_of(name)
    if methods.gradients is None or hosts == 1:
        return None
    far = Axis(name="dp.far", size=hosts, rank=0, ranks=tuple(range(hosts)),
               hosts=tuple(f"host {host}" for host in range(hosts)))  # fmt: skip
    numel = SIDE * SIDE
    whole = Stretch.of(numel, torch.float32, [ParameterRow("weight", (SIDE, SIDE), 0, 0)])
    edges = [numel * index // hosts for index in range(hosts + 1)]
    pieces = [[whole.cut(*edges[index : index + 2])] for index in range(hosts)]
    sent, divided = (
        sum(methods.gradients.sent(far, pieces, everywhere=everywhere).values()) / whole.nbytes
        for everywhere in (True, False)
    )
    held = methods.gradients.held(far, pieces, everywhere=True) / whole.nbytes
    return FarMethod(name, sent, divided, held)


@lru_cache(maxsize=64)
def methods_of(gradients: str, *, rounds_activations: bool = False) -> LinkMethods:
    """Return the methods of a run whose gradients and activations cross hosts so.

    Raises:
        ConfigError: see ``far_method``.
    """
    far = far_settings(gradients, BF16 if rounds_activations else EXACT)
    return LinkMethods.configured(LinksConfig(far=far))


def far_settings(gradients: str, activations: Literal["exact", "bf16"] = EXACT) -> FarConfig:
    """Return the section ``links.far`` of a layout."""
    return FarConfig(gradients=gradients, activations=activations)
