"""The options of the strategy ``offload``: the contents of stores, and the strategy beneath."""

from dataclasses import dataclass, fields

from drivetrain.config.option import NestedStrategy, nested_strategy, option
from drivetrain.sharding.options import OffloadOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig(OffloadOptions):
    """Options of the strategy ``offload``."""

    optimizer: str = option(
        "cpu",
        help="store that keeps optimizer state and master weights, and steps them: cpu, nvme, or "
        "another installed one",
        question="Which store keeps optimizer state: cpu, or nvme?",
    )
    path: str = option(
        "",
        help="directory on a local disk, for stores that keep files",
        question="Which directory, for a store that keeps files? (none for cpu)",
    )
    data_parallel: NestedStrategy = nested_strategy(
        "zero2",
        help="the strategy that divides the model over ranks, by name, with its options; one with "
        "a section offload",
    )

    @property
    def options(self) -> OffloadOptions:
        """The section ``offload`` of the strategy beneath."""
        return OffloadOptions(
            **{field.name: getattr(self, field.name) for field in fields(OffloadOptions)}
        )
