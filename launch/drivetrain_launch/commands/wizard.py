"""The wizard without a terminal: its questions, the meaning of answers, and the way back.

Questions come from ``option(question=...)`` in the configuration of the core and of the chosen
strategy, which may be a stranger's. ``prompts`` draws them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config import LaunchConfig, Layer, Option, RunConfig, options_of, read_sets
from drivetrain.config.document import put
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import Registry

STRATEGY_KEY = "strategy.name"


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """An answer to pick: its value, and the line of text that shows it."""

    value: Any
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question as data.

    Attributes:
        key: dotted key of the knob that the answer sets.
        text: the question.
        help: one sentence about the knob.
        choices: the answers to pick from; empty when the answer is typed.
        default: the answer when the user presses Enter.
    """

    key: str
    text: str
    help: str
    default: Any
    choices: tuple[AnswerChoice, ...] = ()


@dataclass(slots=True)
class Wizard:
    """Walks through the questions.

    Args:
        registry: the installed strategies.
        answers: answers so far, by dotted key; a later visit offers them as defaults.
    """

    registry: Registry
    answers: dict[str, Any] = field(default_factory=dict)
    _position: int = 0

    @property
    def current(self) -> Question | None:
        """The next question; None when all are answered."""
        questions = list(self._questions())
        return questions[self._position] if self._position < len(questions) else None

    @property
    def can_go_back(self) -> bool:
        """Whether a question was answered before this one."""
        return self._position > 0

    def answer(self, value: Any) -> None:
        """Take the answer to the current question and move on.

        Raises:
            ConfigError: the value is not allowed; the message says what is.
        """
        question = self.current
        if question is None:
            raise ConfigError("every question has been answered")
        if question.key == STRATEGY_KEY and self.answers.get(STRATEGY_KEY) != value:
            # The options of another strategy mean nothing to this one.
            self.answers = {
                key: old for key, old in self.answers.items() if not key.startswith("strategy.")
            }
        self._check({**self._of_strategy(), question.key: value})
        self.answers[question.key] = value
        self._position += 1

    def back(self) -> None:
        """Return to the question before."""
        self._position = max(0, self._position - 1)

    def read(self, question: Question, text: str) -> Any:
        """Turn typed text into a value of the question's knob.

        Raises:
            ConfigError: the text is not a value, or not an allowed one.
        """
        layer = read_sets([f"{question.key}={text}"])
        value: Any = layer.values
        for part in question.key.split("."):
            value = value[part]
        self._check({**self._of_strategy(), question.key: value})
        return value

    def values(self) -> dict[str, Any]:
        """Return the answers as the nested values of a configuration file."""
        nested: dict[str, Any] = {}
        for key, value in self.answers.items():
            put(nested, key, value)
        return nested

    def _questions(self) -> Iterator[Question]:
        yield self._strategy_question()
        name = self.answers.get(STRATEGY_KEY)
        if name is not None:
            yield from self._of(self.registry.load(name).Config, "strategy.")
        yield from self._of(RunConfig, "")
        yield from self._of(LaunchConfig, "launch.")

    def _of(self, cls: type, prefix: str) -> Iterator[Question]:
        for knob in options_of(cls):
            key = prefix + knob.name
            if knob.question:
                yield _question(knob, key, self.answers.get(key, knob.default))

    def _strategy_question(self) -> Question:
        names = self.registry.names
        default = self.answers.get(STRATEGY_KEY) or self.registry.default()
        ordered = sorted(names, key=lambda name: name != default)
        choices = tuple(
            AnswerChoice(name, f"{name}: {self.registry.load(name).summary}") for name in ordered
        )
        return Question(
            key=STRATEGY_KEY,
            text="How is the training step spread over the ranks?",
            help="Each strategy is a plugin; this list is what is installed.",
            default=default,
            choices=choices,
        )

    def _of_strategy(self) -> dict[str, Any]:
        name = self.answers.get(STRATEGY_KEY)
        return {STRATEGY_KEY: name} if name else {}

    def _check(self, answers: Mapping[str, Any]) -> None:
        """Let the schema judge a value; its errors name no place in a file, since there is none."""
        nested: dict[str, Any] = {}
        for key, value in answers.items():
            put(nested, key, value)
        find_config: Callable[[str], tuple[str, type]] = self.registry.find_config
        try:
            resolve(Layer(nested), find_config=find_config)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("configuration: ")) from error


def _question(knob: Option, key: str, default: Any) -> Question:
    choices: tuple[AnswerChoice, ...] = ()
    if knob.type is bool:
        choices = (AnswerChoice(True, "yes"), AnswerChoice(False, "no"))
    elif knob.choices and not _takes_numbers(knob):
        choices = tuple(AnswerChoice(value, str(value)) for value in knob.choices)
    return Question(key=key, text=knob.question, help=knob.help, default=default, choices=choices)


def _takes_numbers(knob: Option) -> bool:
    """Whether a knob with choices also takes a number, as ``int | Literal["auto"]`` does."""
    return knob.minimum is not None or knob.maximum is not None
