"""The layouts of a search: divisions that strategies declare, and their approximate forms."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product

from drivetrain.config.schema import LinksConfig
from drivetrain.errors import ConfigError
from drivetrain.links.chosen import AUTO, BF16, EXACT, LinkMethods, permitted
from drivetrain.links.compressor import Honesty
from drivetrain.paper.run import BF16_BYTES, BYTES
from drivetrain.planner.layout import (
    RECOMPUTE,
    InstalledPlans,
    PlannedLayout,
    far_method,
    far_settings,
    layout_of,
)
from drivetrain.planner.predict import FRAGMENTS, Predictor, Task

MICRO_BATCHES = (1, 2, 4, 8, 16)


def candidates(task: Task, precision: str, installed: InstalledPlans) -> Iterator[dict[str, str]]:
    """Yield the keys of every layout that installed strategies declare."""
    return _divisions(task, precision, installed, MICRO_BATCHES, RECOMPUTE)


def least_candidates(
    task: Task, precision: str, installed: InstalledPlans
) -> Iterator[dict[str, str]]:
    """Yield the layouts with the fewest activations alone."""
    return _divisions(task, precision, installed, MICRO_BATCHES[:1], RECOMPUTE[-1:])


def _divisions(
    task: Task,
    precision: str,
    installed: InstalledPlans,
    micro_batches: Sequence[int],
    modes: Sequence[str],
) -> Iterator[dict[str, str]]:
    size = task.model.layers, task.model.heads, task.ranks, task.per_host
    around: list[Mapping[str, object]] = [{}]
    for plan in installed.around.values():
        around += plan.layouts(*size)
    inner = [
        (name, keys) for name, plan in installed.planned.items() for keys in plan.layouts(*size)
    ]
    for outside, (name, inside), micro_batch, recompute in product(
        around, inner, micro_batches, modes
    ):
        own = {"micro_batch": micro_batch, "recompute": recompute, "precision": precision}
        keys = {**outside, **inside, **own, "data_parallel": name}
        yield {key: str(value).lower() for key, value in keys.items()}


# --- the approximate forms of a layout ---


SKETCHED = 5000
"""Layouts whose bounds with a method are computed, the best exact bounds first."""

APPROXIMATED = 4
"""Exact layouts of which all forms are predicted: as many by prediction, and by bound."""


class Approximations:
    """The approximate forms of layouts.

    Args:
        predictor: of the task.
        allow: how far training may be from exact training, at most.

    Attributes:
        methods: the permitted ones for gradients.
    """

    def __init__(self, predictor: Predictor, allow: Honesty) -> None:
        self._predictor = predictor
        self._rounds = Honesty.ROUNDING.within(allow)
        self.methods = permitted_methods(
            LinkMethods.configured(LinksConfig(far=far_settings(AUTO), allow=allow.value))
        )

    def lightest(
        self, sketches: Sequence[tuple[float, PlannedLayout]], room: float
    ) -> list[PlannedLayout]:
        """Return the exact layouts that are the quickest by bounds with the fewest bytes.

        Args:
            sketches: exact layouts with their bounds, the best first.
            room: bytes of memory of a device.
        """
        hosts = self._predictor.task.hosts
        if hosts == 1 or not self.methods:
            return []
        light = min(self.methods, key=lambda name: _sent(name, hosts))
        found: list[tuple[float, int]] = []
        for index, (_, planned) in enumerate(sketches[:SKETCHED]):
            with suppress(ConfigError):
                bound = self._predictor.bound(self._form(planned, {"links": light}))
                if bound.nbytes * FRAGMENTS <= room:
                    found.append((bound.seconds, index))
        return [sketches[index][1] for _, index in sorted(found)[:APPROXIMATED]]

    def of(self, planned: PlannedLayout) -> Iterator[PlannedLayout]:
        """Yield the approximate forms that a layout can have."""
        sums = self._spans_hosts(planned, "dp")
        stages = self._rounds and "activations" in planned.kind.channels(planned.config)
        longer = BYTES[planned.precision].parameter > BF16_BYTES  # others cross as they are
        for links in (EXACT, *self.methods) if sums else (EXACT,):
            for activations in (EXACT, BF16) if stages and longer else (EXACT,):
                if (links, activations) == (EXACT, EXACT):
                    continue
                with suppress(ConfigError):  # the strategy or the precision cannot take it
                    yield self._form(planned, {"links": links, "activations": activations})

    def _spans_hosts(self, planned: PlannedLayout, axis: str) -> bool:
        axes, _ = self._predictor.divisions(planned)
        return self._predictor.prices(planned, axes).axes[axis].spans_hosts

    def _form(self, planned: PlannedLayout, methods: dict[str, str]) -> PlannedLayout:
        named = {key: name for key, name in methods.items() if name != EXACT}
        return layout_of({**planned.keys, **named}, self._predictor.installed)


def permitted_methods(links: LinkMethods) -> list[str]:
    """Return the methods for gradients that ``auto`` may choose; none under other words."""
    auto = links.auto
    if auto is None or "gradients" not in auto.uses:
        return []
    return list(permitted(auto.methods, "gradients", auto.allow))


def _sent(name: str, hosts: int) -> float:
    method = far_method(name, hosts)
    return method.sent if method is not None else 1.0
