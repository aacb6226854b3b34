"""The part of a strategy's contract that configurations need: no model, no ranks, and no torch.

A strategy may have this part as a class of its own, which its distribution declares as an entry
point of ``drivetrain.outlines``: then its configurations are read, shown and checked without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from drivetrain.config.schema import NestedStrategy, Policy, RunConfig
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies

ConfigT = TypeVar("ConfigT")

EXACT: Final = "exact"
"""The word for no method: all is sent as it is."""

BF16: Final = "bf16"
"""The method for activations: each number is rounded to bfloat16."""


@dataclass(frozen=True, slots=True)
class FarLinks:
    """The methods for slow links that a strategy is asked about; by default there are none.

    Attributes:
        gradients: sums gradients; None: exactly.
        parameters: gathers parameters; None: exactly.
        warmup: sums of gradients, of each channel, that are exact before the method begins.
        names: of these two methods.
        activations: ``BF16`` rounds what stages of a pipeline send each other; or ``exact``.
    """

    gradients: Any = None
    parameters: Any = None
    warmup: int = 0
    names: tuple[str, str] = (EXACT, EXACT)
    activations: str = EXACT

    @property
    def rounds_activations(self) -> bool:
        """Whether stages of a pipeline on different hosts send each other rounded numbers."""
        return self.activations == BF16

    @property
    def _methods(self) -> dict[str, Any]:
        return {"gradients": self.gradients, "parameters": self.parameters}

    @property
    def used_for(self) -> list[str]:
        """The uses with a method, of ``gradients``, ``parameters`` and ``activations``."""
        used = [use for use, method in self._methods.items() if method is not None]
        return [*used, "activations"] if self.rounds_activations else used

    def name_for(self, use: str) -> str:
        """Return the name of the method for gradients, parameters or activations."""
        gradients, parameters = self.names
        names = {"gradients": gradients, "parameters": parameters, "activations": self.activations}
        return names[use]

    def with_exact_activations(self) -> Self:
        """Return the same methods for gradients and parameters alone."""
        return replace(self, activations=EXACT)


class Outline(ABC, Generic[ConfigT]):
    """What a strategy says about its options.

    Attributes:
        summary: one sentence for the wizard and ``launch --help``.
        Config: a frozen dataclass whose fields are declared with ``option()``.
    """

    summary: ClassVar[str]
    Config: ClassVar[type]

    @classmethod
    def stands_for(cls, config: ConfigT) -> tuple[str, Any] | None:
        """Return the name of the strategy that does the work, and its options; None: this one.

        A strategy may only be another strategy with some options set: then it returns the other, is
        asked nothing else, and no object of it is made.

        Raises:
            ConfigError: the options do not fit together.
        """
        return None

    @classmethod
    def check_options(cls, config: ConfigT, precision: Policy) -> None:
        """Refuse options and dtypes that no model can be prepared with; by default none.

        ``config check`` and the launcher call it before ranks start, and ``prepare`` does.

        Args:
            config: of ``stands_for``.
            precision: the dtypes of the run.

        Raises:
            ConfigError: says which ones, and the way out.
        """
        return

    @classmethod
    @abstractmethod
    def axes(cls, config: ConfigT, world_size: int) -> Mapping[str, int]:
        """Return the size of each mesh axis, the closest (fastest varying) first.

        Loaders are divided over the axis named ``dp``.

        Raises:
            ConfigError: the world size does not fit the configuration.
        """

    @classmethod
    def channels(cls, config: Any) -> frozenset[str]:
        """Return the kinds of tensors that the strategy sends by channels.

        Returns:
            Some of ``gradients``, ``parameters`` (their values, each time that they are used),
            ``updates`` (of parameters that all ranks hold) and ``activations`` (between stages),
            which a link may then approximate.
        """
        return frozenset()

    @classmethod
    def check_links(cls, config: Any, links: FarLinks, precision: Policy) -> None:
        """Refuse methods that the strategy, or the precision, has no use for.

        ``config check`` and the launcher call it before ranks start, and ``prepare`` does.

        Raises:
            ConfigError: says which methods, and the way out.
        """
        channels, kind = cls.channels(config), cls.__name__.removesuffix("Outline")
        for use in links.used_for:
            if use not in channels and not (use == "parameters" and "updates" in channels):
                raise ConfigError(
                    f"expected links.far.{use}: exact under {kind}, which sends no {use} "
                    f"that a link may approximate, found {links.name_for(use)!r}; leave it out, or "
                    "take a strategy that does (docs/slow-links.md)"
                )
        values = links.parameters
        if values is not None and "parameters" in channels and not values.parameters:
            raise ConfigError(
                f"links.far.parameters: expected a method that can send values of parameters, "
                f"which {kind} gathers for each use, found "
                f"{links.name_for('parameters')!r}, which can send updates; take int8 or bf16, "
                "secondary: host, which sends updates, or zero2, which keeps parameters whole"
            )
        method = links.gradients
        if method is not None and method.keeps_feedback and precision.needs_scaling:
            raise ConfigError(
                f"expected precision: bf16 or no with links.far.gradients: "
                f"{links.name_for('gradients')}, found fp16: what the method keeps for the next "
                "step would have another loss scale; change one of them"
            )


class ReplicasOutline(Outline[ConfigT]):
    """The outline of a strategy whose ranks are all replicas, or share one."""

    @classmethod
    def axes(cls, config: ConfigT, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks."""
        return {"dp": world_size}


class ChoosingOutline(ReplicasOutline[ConfigT]):
    """The outline of a strategy that chooses another one for the whole run."""


def find_inside(key: str, nested: NestedStrategy) -> tuple[type[Outline[Any]], Any]:
    """Return the outline of a strategy inside of another one, and its options.

    Args:
        key: of the configuration, for errors.
        nested: the strategy inside.

    Raises:
        ConfigError: it is not installed, or only chooses another one.
    """
    kind, options = find_outline(nested.name, nested.options)
    if issubclass(kind, ChoosingOutline):
        raise ConfigError(
            f"{key}: expected a strategy that does the work, found {nested.name!r}, which chooses "
            "one for the whole run; name one, such as zero2, or set strategy: "
            f"{nested.name} alone"
        )
    return kind, options


def working(name: str, options: Any = None) -> tuple[str, Any]:
    """Return the name of the strategy that does the work of an installed one, and its options.

    Args:
        name: of the strategy; "" for the default one.
        options: its Config object; None for its defaults.

    Raises:
        ConfigError: it is not installed, or its options do not fit together.
    """
    name = name or strategies().default()
    kind: type[Outline[Any]] = strategies().outline(name)
    options = kind.Config() if options is None else options
    other = kind.stands_for(options)
    return (name, options) if other is None else working(*other)


def find_outline(name: str, options: Any = None) -> tuple[type[Outline[Any]], Any]:
    """Return the outline of the strategy that does the work, and its options; see ``working``."""
    name, options = working(name, options)
    return strategies().outline(name), options


def check_forward(run: RunConfig, sizes: Mapping[str, int]) -> None:
    """Refuse changes to a model's forward that other settings leave no room for.

    Raises:
        ConfigError: ``precision: fp8`` with an axis ``tp``, or with selective recompute.
    """
    divided = {axis: size for axis, size in sizes.items() if axis != "dp" and size > 1}
    if run.precision == "fp8" and "tp" in divided:
        raise ConfigError(
            f"precision: fp8: expected layers that each rank holds whole, found tp: "
            f"{divided['tp']}; take precision: bf16, or a strategy without tp"
        )
    if run.precision == "fp8" and run.recompute.mode == "selective":
        raise ConfigError(
            "precision: fp8: expected recompute full or none, found selective, which cannot tell "
            "products in fp8 apart; change one of them"
        )


def check_axes(sizes: Mapping[str, int], world_size: int) -> None:
    """Refuse axes that do not hold all ranks.

    Raises:
        ConfigError: the sizes do not multiply to the world's size.
    """
    if prod(sizes.values()) != world_size:
        shape = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"expected mesh axes that multiply to {world_size} ranks, found {shape} = "
            f"{prod(sizes.values())}; change the sizes or the number of ranks"
        )
