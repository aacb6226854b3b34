"""The methods of a run for its slow links, from the configuration."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from drivetrain.collectives.stretch import StretchParts
from drivetrain.config.schema import LinksConfig
from drivetrain.errors import ConfigError
from drivetrain.links.compressor import Compressor, Honesty
from drivetrain.registry import compressors
from drivetrain.runtime.mesh import Axis

EXACT = "exact"
"""The word for no method: all is sent as it is."""


@dataclass(frozen=True, slots=True)
class LinkMethods:
    """The methods between hosts, and the bytes that they send.

    Attributes:
        gradients: sums gradients; None: exactly.
        parameters: gathers parameters; None: exactly.
        warmup: sums of gradients, of each channel, that are exact before the method begins.
        names: of the two methods.
        undoable: whether steps may be skipped; then sums keep their state of before a step, too.
    """

    gradients: Compressor[Any] | None = None
    parameters: Compressor[Any] | None = None
    warmup: int = 0
    names: tuple[str, str] = (EXACT, EXACT)
    undoable: bool = False

    @classmethod
    def configured(cls, config: LinksConfig, *, undoable: bool = False) -> "LinkMethods":
        """Return the methods that a configuration names.

        Args:
            config: names them.
            undoable: whether steps may be skipped.

        Raises:
            ConfigError: a method is not installed, cannot do what it is named for, or does not
                know an option.
        """
        far = config.far
        kinds = {
            use: compressors().load(name)
            for use, name in (("gradients", far.gradients), ("parameters", far.parameters))
            if name != EXACT
        }
        for use, kind in kinds.items():
            _check_use(use, getattr(far, use), kind)
        _check_options(far.options, kinds, far.gradients, far.parameters)
        made = {use: kind(_options_for(kind, far.options)) for use, kind in kinds.items()}
        return cls(
            made.get("gradients"),
            made.get("parameters"),
            far.warmup_steps,
            (far.gradients, far.parameters),
            undoable=undoable,
        )

    @property
    def active(self) -> bool:
        """Whether anything is approximate."""
        return self.gradients is not None or self.parameters is not None

    @property
    def honesty(self) -> Honesty:
        """How far training may be from exact training, at most."""
        used = [each.honesty_of(use) for use, each in self._methods.items() if each is not None]
        return max(used, key=list(Honesty).index, default=Honesty.EXACT)

    @property
    def _methods(self) -> dict[str, Compressor[Any] | None]:
        return {"gradients": self.gradients, "parameters": self.parameters}

    @property
    def approximates_parameters(self) -> bool:
        """Whether gathered values of parameters may differ from the values of their owners."""
        return self.parameters is not None

    @property
    def used_for(self) -> list[str]:
        """The uses with a method: ``gradients`` and ``parameters``, or one of them."""
        return [use for use, method in self._methods.items() if method is not None]

    def name_for(self, use: str) -> str:
        """Return the name of the method for gradients or for parameters."""
        gradients, parameters = self.names
        return gradients if use == "gradients" else parameters

    def describe(self, channels: frozenset[str] = frozenset()) -> str:
        """Return a line for the log: each use, its method and how honest the method is.

        Args:
            channels: of the strategy: a method may be more honest about updates than about values.
        """
        said = []
        for use, method in self._methods.items():
            sent = "updates" if use == "parameters" and "updates" in channels else use
            note = "" if method is None else f" ({method.honesty_of(sent)})"
            said.append(f"{use} {self.name_for(use)}{note}")
        warm = f", after {self.warmup} exact steps" if self.warmup and self.gradients else ""
        return f"between hosts: {', '.join(said)}{warm}"

    def note(self, channels: frozenset[str]) -> str:
        """Return the same line for the end of a title; "" if all is exact."""
        return f"; {self.describe(channels)}" if self.active else ""

    def facts(self) -> list[str]:
        """Return a line for each choice, to be compared between ranks."""
        methods = self._methods
        options = [
            f"links.far.options of {use}: {method.config}"
            for use, method in methods.items()
            if method is not None
        ]
        names = [f"links.far.{use}: {self.name_for(use)}" for use in methods]
        return [*names, f"links.far.warmup_steps: {self.warmup}", *options]

    # --- bytes between hosts; None where nothing is approximate ---

    def reduced(
        self, far: Axis, stretches: StretchParts, *, everywhere: bool
    ) -> Counter[tuple[str, str]] | None:
        """Return the bytes that a rank sends in one sum of gradients."""
        if self.gradients is None or not self.gradients.approximates(stretches):
            return None
        return self.gradients.sent(far, stretches, everywhere=everywhere)

    def held(self, far: Axis, stretches: StretchParts, *, everywhere: bool) -> int:
        """Return the bytes that a rank keeps from one sum to the next."""
        if self.gradients is None or not self.gradients.approximates(stretches):
            return 0
        held = self.gradients.held(far, stretches, everywhere=everywhere)
        return 2 * held if self.undoable else held

    def gathered(self, far: Axis, stretches: StretchParts) -> Counter[tuple[str, str]] | None:
        """Return the bytes that a rank sends in one gather of parameters."""
        if self.parameters is None or not self.parameters.approximates(stretches):
            return None
        return self.parameters.sent_gathering(far, stretches)


def _check_use(use: str, name: str, kind: type[Compressor[Any]]) -> None:
    if not _can_send(kind, use):
        able = [each for each in compressors().names if _can_send(compressors().load(each), use)]
        raise ConfigError(
            f"links.far.{use}: expected a method that can send {use}, found {name!r}; name one of "
            f"{', '.join([EXACT, *able])}"
        )


def _can_send(kind: type[Compressor[Any]], use: str) -> bool:
    return kind.gradients if use == "gradients" else kind.parameters or kind.updates


def _check_options(
    given: Mapping[str, Any], kinds: Mapping[str, type[Compressor[Any]]], *names: str
) -> None:
    known = {field.name for kind in kinds.values() for field in fields(kind.Config)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(
            f"links.far.options: expected options of {' and '.join(dict.fromkeys(names))}, found "
            f"{unknown}; they have {', '.join(sorted(known)) or 'none'}"
        )


def _options_for(kind: type[Compressor[Any]], given: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind.Config)}
    return kind.Config(**{key: value for key, value in given.items() if key in names})
