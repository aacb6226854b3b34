"""The knobs of the strategy ``megatron``, and what may be set together. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from drivetrain.config.outline import FarLinks, Outline, find_inside
from drivetrain.config.schema import NestedStrategy, Policy, mapping, nested_strategy, option
from drivetrain.errors import ConfigError

AXES = ("tp", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig:
    """Options of the strategy ``megatron``."""

    tp: int = option(
        1,
        help="Ranks that share every layer (tensor parallelism).",
        question="How many ranks share every layer?",
        minimum=1,
    )
    pp: int = option(
        1,
        help="Ranks that share the blocks one after the other (pipeline parallelism).",
        question="How many pipeline stages?",
        minimum=1,
    )
    order: str = option(
        "tp,dp,pp",
        help="The axes, those whose ranks are neighbors first; neighbors share a host.",
    )
    sequence_parallel: bool = option(
        False,
        help="Whether norms, dropouts and residuals are divided over tp by tokens, too.",
    )
    dropout_seed: int = option(
        0,
        help="Seed of the dropout masks, which do not depend on tp or on sequence_parallel.",
    )
    plan: Mapping[str, str] = mapping(
        help="How layers are divided: patterns of module names (* for any text) and a style for "
        "each; empty takes the model's own plan, or one derived from its structure."
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1"] = option(
        "1f1b",
        help="In which order a pipeline computes, where the loss is inside of the model or handed "
        "over; losses made outside have gpipe, accumulation windows 1f1b.",
    )
    chunks: int = option(
        1, help="Stages per rank; more than one for the interleaved schedule.", minimum=1
    )
    micro_batches: int = option(
        0,
        help="Into how many parts a pipeline cuts each batch; 0 takes the batches of an "
        "accumulation window, or without one as many as there are pipeline ranks.",
        minimum=0,
    )
    cut: str = option(
        "cost",
        help="Where blocks are cut into stages: cost (operations), profile (measured), uniform, or "
        "how many blocks each stage has, such as 6,8,8,6.",
    )
    trace_dir: str = option("", help="Folder for a Chrome trace of each pipeline step.")
    data_parallel: NestedStrategy = nested_strategy(
        help="The data-parallel strategy of each cell of tp x pp ranks, by name, with its options."
    )

    def sizes(self, world_size: int) -> dict[str, int]:
        """Return the size of each axis, the closest first.

        Raises:
            ConfigError: the order does not name each axis once, the axes do not fit the world, or
                options contradict each other.
        """
        self.check()
        names = [name.strip() for name in self.order.split(",")]
        if sorted(names) != sorted(AXES):
            raise ConfigError(
                f"expected an order of the axes {', '.join(AXES)}, each once, found "
                f"{self.order!r}; write for example order: tp,dp,pp"
            )
        cell = self.tp * self.pp
        if world_size % cell:
            raise ConfigError(
                f"expected a number of ranks that is a multiple of tp x pp = {self.tp} x {self.pp} "
                f"= {cell}, found {world_size}; change tp, pp or the number of processes"
            )
        sizes = {"tp": self.tp, "pp": self.pp, "dp": world_size // cell}
        return {name: sizes[name] for name in names}

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: says which ones.
        """
        interleaved = self.schedule == "interleaved"
        if interleaved and (self.pp == 1 or self.chunks == 1):
            raise ConfigError(
                "expected pp and chunks above 1 with schedule: interleaved, found "
                f"pp: {self.pp} and chunks: {self.chunks}; set both, or schedule: 1f1b"
            )
        if self.chunks > 1 and not interleaved:
            raise ConfigError(
                f"expected schedule: interleaved with chunks: {self.chunks}, found "
                f"{self.schedule}, which has one stage per rank; set the schedule, or chunks: 1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "expected tp above 1 with sequence_parallel: true, found tp: 1; set tp, or leave "
                "sequence_parallel out"
            )
        if self.trace_dir and self.pp == 1:
            raise ConfigError(
                "expected pp above 1 with trace_dir, found pp: 1; set pp, or leave trace_dir out"
            )


def outline_inside(config: MegatronConfig) -> tuple[type[Outline[Any]], Any]:
    """Return the outline of the data-parallel strategy and its options.

    Raises:
        ConfigError: it is not installed, or is none: it lays ranks out on other axes than ``dp``.
    """
    name = config.data_parallel.name
    kind, options = find_inside("strategy.data_parallel", config.data_parallel)
    axes = set(kind.axes(options, 1))
    if axes != {"dp"}:
        raise ConfigError(
            f"strategy.data_parallel: expected a strategy over the axis dp alone, found {name!r} "
            f"over {', '.join(sorted(axes))}; name one that replicates or shards a whole model"
        )
    return kind, options


class MegatronOutline(Outline[MegatronConfig]):
    """The outline of ``megatron``."""

    summary: ClassVar[str] = "ranks share layers (tensor) and blocks (pipeline) of one replica"
    Config: ClassVar[type] = MegatronConfig

    @classmethod
    def axes(cls, config: MegatronConfig, world_size: int) -> Mapping[str, int]:
        """Return the axes tp, dp and pp in the configured order."""
        return config.sizes(world_size)

    @classmethod
    def check_options(cls, config: MegatronConfig, precision: Policy) -> None:
        """Let the data-parallel strategy refuse options and dtypes."""
        kind, options = outline_inside(config)
        kind.check_options(options, precision)

    @classmethod
    def channels(cls, config: MegatronConfig) -> frozenset[str]:
        """Return those of the data-parallel strategy, and activations with a pipeline."""
        kind, options = outline_inside(config)
        found = kind.channels(options)
        return found | {"activations"} if config.pp > 1 else found

    @classmethod
    def check_links(cls, config: MegatronConfig, links: FarLinks, precision: Policy) -> None:
        """Let the data-parallel strategy refuse methods for gradients and parameters.

        Raises:
            ConfigError: the same, or activations shall be rounded and there is no pipeline.
        """
        if links.rounds_activations and config.pp == 1:
            raise ConfigError(
                "expected links.far.activations: exact without a pipeline, which alone sends "
                f"activations between hosts, found {links.activations!r} and pp: 1; leave it out, "
                "or set pp above 1"
            )
        kind, options = outline_inside(config)
        kind.check_links(options, links.with_exact_activations(), precision)
