"""One declaration per knob: meaning, limits and question stand beside the dataclass field.

The wizard's questions, the validation, ``--set`` and the tables of the documentation are all made
from these declarations, so a knob is written down once.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

_KEY = "drivetrain.option"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The facts about one knob.

    Attributes:
        name: the field's name, which is the YAML key.
        type: the annotation: int, float, str, bool, ``Literal[...]``, a union of these, a mapping
            of them, a dataclass (a section), or ``NestedStrategy``.
        default: the value without any configuration.
        help: a sentence on the effect of the knob, with its unit.
        question: of the wizard; empty when the wizard leaves the knob at its default.
        minimum: smallest allowed number, or None.
        maximum: largest allowed number, or None.
    """

    name: str
    type: Any
    default: Any
    help: str
    question: str = ""
    minimum: float | None = None
    maximum: float | None = None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a ``Literal``, in order; empty when the knob is free."""
        members = typing.get_args(self.type) if is_union(self.type) else (self.type,)
        return tuple(
            value
            for member in members
            if typing.get_origin(member) is Literal
            for value in typing.get_args(member)
        )

    @property
    def is_section(self) -> bool:
        """Whether the knob is a nested group of knobs."""
        return dataclasses.is_dataclass(self.type) and not self.is_strategy

    @property
    def is_strategy(self) -> bool:
        """Whether the knob chooses another strategy, whose own knobs stand beside its name."""
        return self.type is NestedStrategy


@dataclass(frozen=True, slots=True)
class NestedStrategy:
    """A strategy inside another strategy.

    Attributes:
        name: of the installed strategy; "" for the default one.
        options: its Config object; None for its defaults.
    """

    name: str = ""
    options: Any = None


def option(
    default: Any,
    *,
    help: str,  # noqa: A002 - the word users of argparse and click know
    question: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare a knob as a dataclass field.

    Args:
        default: the value without any configuration; must be immutable.
        help: one sentence with the unit, shown by the wizard, ``config show`` and the docs.
        question: of the wizard; empty to leave the knob at its default.
        minimum: smallest allowed number.
        maximum: largest allowed number.

    Returns:
        A ``dataclasses.field``, typed Any so that ``x: int = option(1, ...)`` checks.
    """
    facts = {"help": help, "question": question, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata={_KEY: facts})


def section(cls: type, *, help: str) -> Any:  # noqa: A002 - as in option()
    """Declare a nested group of knobs: a field whose type is a dataclass of options."""
    return dataclasses.field(default_factory=cls, metadata={_KEY: {"help": help}})


def mapping(*, help: str) -> Any:  # noqa: A002 - as in option()
    """Declare a knob whose keys are the user's own: empty without any configuration."""
    return dataclasses.field(default_factory=dict, metadata={_KEY: {"help": help}})


def nested_strategy(name: str = "", *, help: str) -> Any:  # noqa: A002 - as in option()
    """Declare a knob of type ``NestedStrategy``: a name, or a name with that strategy's options.

    Args:
        name: the strategy without any configuration; "" for the default one.
        help: one sentence.
    """
    return dataclasses.field(default=NestedStrategy(name), metadata={_KEY: {"help": help}})


@lru_cache(maxsize=256)
def options_of(cls: type) -> Sequence[Option]:
    """Return the knobs that a configuration dataclass declares, in order.

    Raises:
        TypeError: when a field was not declared with ``option()`` or ``section()``.
    """
    hints = typing.get_type_hints(cls)
    knobs = []
    for field in dataclasses.fields(cls):
        if _KEY not in field.metadata:
            raise TypeError(
                f"{cls.__name__}.{field.name} is not declared with option(); "
                "expected every field of a configuration to say its help text"
            )
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        knobs.append(
            Option(name=field.name, type=hints[field.name], default=default, **field.metadata[_KEY])
        )
    return tuple(knobs)


def is_union(annotation: Any) -> bool:
    """Whether an annotation is ``A | B`` or ``Union[A, B]``."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
