"""The methods of a run for its slow links, from the configuration."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from drivetrain.collectives.stretch import StretchParts
from drivetrain.config.resolve import checked_options
from drivetrain.config.schema import LinksConfig
from drivetrain.errors import ConfigError
from drivetrain.links.compressor import Compressor, Honesty
from drivetrain.links.rule import LinkFigures, MethodOnLink
from drivetrain.registry import compressors, strategies
from drivetrain.runtime.mesh import Axis

EXACT: Final = "exact"
"""The word for no method: all is sent as it is."""

BF16: Final = "bf16"
"""The method for activations: each number is rounded to bfloat16."""

AUTO = "auto"
"""The word for a method that ``drivetrain.links.automatic`` chooses."""

USES = ("gradients", "parameters")
"""The keys that name a method, in the order of ``LinkMethods.names``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutomaticLinks:
    """The choice that a configuration leaves open, and its limits.

    Attributes:
        uses: the keys that say auto.
        allow: how far training may be from exact training, at most.
        mbit_per_s: the declared rate of the link; 0: it is measured.
        backward_s: declared seconds of a backward; 0: the first steps tell them.
        methods: all that are installed, with their options.
        figures: of the link and of the methods; None before they are measured.
    """

    uses: tuple[str, ...]
    allow: Honesty
    mbit_per_s: float
    backward_s: float
    methods: Mapping[str, Compressor[Any]]
    figures: LinkFigures | None = None


@dataclass(frozen=True, slots=True)
class LinkMethods:
    """The methods between hosts, and the bytes that they send.

    Attributes:
        gradients: sums gradients; None: exactly.
        parameters: gathers parameters; None: exactly.
        warmup: sums of gradients, of each channel, that are exact before the method begins.
        names: of these two methods.
        activations: ``BF16`` rounds what stages of a pipeline send each other; or ``exact``.
        auto: what is still to be chosen; until then, it is exact.
        paying: chosen methods by use: these leave tensors exact for which they do not pay.
        undoable: whether steps may be skipped; then sums keep their state of before a step, too.
        awaited: the uses whose methods are chosen after the first steps: ranks are connected as
            any method needs it, before the choice and after it.
    """

    gradients: Compressor[Any] | None = None
    parameters: Compressor[Any] | None = None
    warmup: int = 0
    names: tuple[str, str] = (EXACT, EXACT)
    activations: str = EXACT
    auto: AutomaticLinks | None = None
    paying: Mapping[str, MethodOnLink] = field(default_factory=dict)
    undoable: bool = False
    awaited: tuple[str, ...] = ()

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
        names = {use: getattr(far, use) for use in USES}
        kinds = {
            use: compressors().load(name)
            for use, name in names.items()
            if name not in (EXACT, AUTO)
        }
        for use, kind in kinds.items():
            _check_use(use, names[use], kind)
        open_uses = tuple(use for use in USES if names[use] == AUTO)
        able = {name: compressors().load(name) for name in compressors().names if open_uses}
        _check_options(far.options, {**able, **kinds}, far.gradients, far.parameters)
        made = {use: kind(_options_for(kind, far.options)) for use, kind in kinds.items()}
        auto = AutomaticLinks(
            uses=open_uses,
            allow=Honesty(config.allow),
            mbit_per_s=config.mbit_per_s,
            backward_s=config.backward_s,
            methods={name: kind(_options_for(kind, far.options)) for name, kind in able.items()},
        )
        return cls(
            made.get("gradients"),
            made.get("parameters"),
            far.warmup_steps,
            (far.gradients, far.parameters),
            far.activations,
            auto if open_uses else None,
            undoable=undoable,
        )

    def awaiting(self, uses: Sequence[str], figures: LinkFigures) -> "LinkMethods":
        """Return the same methods; those for some uses are chosen after the first steps."""
        assert self.auto is not None
        auto = replace(self.auto, figures=figures)
        return replace(self, auto=auto, awaited=tuple(uses))

    def decided(
        self, chosen: Mapping[str, MethodOnLink], uses: Sequence[str] = USES
    ) -> "LinkMethods":
        """Return the chosen methods in place of ``auto``.

        Args:
            chosen: by use; a use without a method is exact.
            uses: that are decided; the others stay as they are.
        """
        assert self.auto is not None
        taken = [use for use in uses if self.name_for(use) == AUTO]
        left = tuple(use for use in self.auto.uses if use not in taken)
        names = {use: EXACT if use in taken else self.name_for(use) for use in USES}
        names |= {use: each.name for use, each in chosen.items()}
        methods = {**self._methods, **{use: each.method for use, each in chosen.items()}}
        return replace(
            self,
            gradients=methods["gradients"],
            parameters=methods["parameters"],
            names=(names["gradients"], names["parameters"]),
            auto=replace(self.auto, uses=left) if left else None,
            paying={**self.paying, **chosen},
        )

    def is_open(self, use: str) -> bool:
        """Whether a method is still to be chosen."""
        return self.auto is not None and use in self.auto.uses

    def approximated(self, use: str, stretches: StretchParts) -> StretchParts:
        """Return tensors without the parameters that stay exact, for which a choice does not pay.

        Args:
            use: ``gradients`` or ``parameters``.
            stretches: of each rank of the axis between hosts.
        """
        return self.paying[use].approximated(stretches) if use in self.paying else stretches

    @property
    def active(self) -> bool:
        """Whether anything is approximate."""
        return self.in_channels or self.rounds_activations

    @property
    def in_channels(self) -> bool:
        """Whether sums of gradients or gathers of parameters are approximate."""
        return self.gradients is not None or self.parameters is not None

    @property
    def in_levels(self) -> bool:
        """Whether ranks are connected in levels of hosts: a method is in use, or may come."""
        return self.in_channels or bool(self.awaited)

    @property
    def rounds_activations(self) -> bool:
        """Whether stages of a pipeline on different hosts send each other rounded numbers."""
        return self.activations == BF16

    @property
    def honesty(self) -> Honesty:
        """How far training may be from exact training, at most."""
        used = [each.honesty_of(use) for use, each in self._methods.items() if each is not None]
        used += [Honesty.ROUNDING] if self.rounds_activations else []
        return max(used, key=list(Honesty).index, default=Honesty.EXACT)

    @property
    def _methods(self) -> dict[str, Compressor[Any] | None]:
        return {"gradients": self.gradients, "parameters": self.parameters}

    @property
    def approximates_parameters(self) -> bool:
        """Whether gathered values of parameters may differ from the values of their owners."""
        return self.parameters is not None

    @property
    def owns_apart(self) -> bool:
        """Whether owners keep values apart from gathered ones, which are approximate or may be."""
        return self.parameters is not None or "parameters" in self.awaited

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

    def with_exact_activations(self) -> "LinkMethods":
        """Return the same methods for gradients and parameters alone."""
        return replace(self, activations=EXACT)

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
        if self.rounds_activations:
            said.append(f"activations {self.activations} ({Honesty.ROUNDING})")
        elif "activations" in channels:
            said.append(f"activations {EXACT}")
        limit = f", {self.auto.allow} at most, still to be chosen" if self.auto else ""
        warm = f", after {self.warmup} exact steps" if self.warmup and self.gradients else ""
        return f"between hosts: {', '.join(said)}{limit}{warm}"

    def note(self, channels: frozenset[str]) -> str:
        """Return the same line for the end of a title; "" if all is exact."""
        return f"; {self.describe(channels)}" if self.active or self.auto else ""

    def facts(self) -> list[str]:
        """Return a line for each choice, to be compared between ranks."""
        methods = self._methods
        options = [
            f"links.far.options of {use}: {method.config}"
            for use, method in methods.items()
            if method is not None
        ]
        names = [f"links.far.{use}: {self.name_for(use)}" for use in (*methods, "activations")]
        return [*names, f"links.far.warmup_steps: {self.warmup}", *options]

    # --- bytes between hosts; None where nothing is approximate ---

    def reduced(
        self, far: Axis, stretches: StretchParts, *, everywhere: bool
    ) -> Counter[tuple[str, str]] | None:
        """Return the bytes that a rank sends in one sum of gradients."""
        stretches = self.approximated("gradients", stretches)
        if self.gradients is None or not self.gradients.approximates(stretches):
            return None
        return self.gradients.sent(far, stretches, everywhere=everywhere)

    def held(self, far: Axis, stretches: StretchParts, *, everywhere: bool) -> int:
        """Return the bytes that a rank keeps from one sum to the next."""
        stretches = self.approximated("gradients", stretches)
        if self.gradients is None or not self.gradients.approximates(stretches):
            return 0
        held = self.gradients.held(far, stretches, everywhere=everywhere)
        return 2 * held if self.undoable else held

    def gathered(self, far: Axis, stretches: StretchParts) -> Counter[tuple[str, str]] | None:
        """Return the bytes that a rank sends in one gather of parameters."""
        stretches = self.approximated("parameters", stretches)
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
    own = {key: value for key, value in given.items() if key in names}
    return checked_options(kind.Config, own, "links.far.options", strategies().find_config)
