"""The wizard: questions and the way back, without a terminal; then questionary draws them on one.

Questions come from ``option(question=...)`` in the configuration of the core and of the chosen
strategy, which may be a stranger's.
"""

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import questionary

from drivetrain.config import (
    LaunchConfig,
    Layer,
    Option,
    RunConfig,
    dump_yaml,
    options_of,
    read_sets,
)
from drivetrain.config.document import put
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import Registry
from drivetrain_launch.ranks.placement import Endpoint

STRATEGY_KEY = "strategy.name"
HOSTS_KEY, ENDPOINT_KEY = "launch.nnodes", "launch.rdzv_endpoint"
BACK = "<"
HINT_COLUMNS = 80
"""Columns that a hint takes at most: more are hard to read."""

_BACK_CHOICE = "back to the question before"


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """An answer to pick: its value, and the line of text on the screen."""

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
            ConfigError: the value is not allowed; the message names the allowed ones.
        """
        question = self.current
        if question is None:
            raise ConfigError("every question has been answered")
        if question.key == STRATEGY_KEY and self.answers.get(STRATEGY_KEY) != value:
            # The options of another strategy mean nothing to this one.
            self.answers = {
                key: old for key, old in self.answers.items() if not key.startswith("strategy.")
            }
        self._judge(question, value)
        self.answers[question.key] = value
        if question.key == HOSTS_KEY and value == 1:
            self.answers.pop(ENDPOINT_KEY, None)
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
        if value is None and isinstance(question.default, str):
            value = ""  # Enter, for no text
        self._judge(question, value)
        return value

    def comments(self) -> dict[str, str]:
        """Return the meaning of each answered key, for the file."""
        name = self.answers.get(STRATEGY_KEY)
        meanings = {question.key: question.help for question in self._questions()}
        if name is not None:
            meanings[STRATEGY_KEY] = self.registry.load(name).summary
        return {key: text for key, text in meanings.items() if key in self.answers}

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
            if knob.question and (key != ENDPOINT_KEY or self.answers.get(HOSTS_KEY, 1) != 1):
                yield _question(knob, key, self.answers.get(key, knob.default))

    def _strategy_question(self) -> Question:
        names = [n for n in self.registry.names if not self.registry.load(n).reference]
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

    def _judge(self, question: Question, value: Any) -> None:
        """Refuse a wrong value; after the last option of a strategy, also contradictions."""
        self._check({**self._of_strategy(), question.key: value}, complete=False)
        if question.key == ENDPOINT_KEY:
            Endpoint.parse(str(value))
        following = list(self._questions())[self._position + 1 :]
        more = any(each.key.startswith("strategy.") for each in following)
        if question.key.startswith("strategy.") and question.key != STRATEGY_KEY and not more:
            self._check({**self.answers, question.key: value}, complete=True)

    def _check(self, answers: Mapping[str, Any], *, complete: bool) -> None:
        """Let the schema judge values; its errors name no place in a file, since there is none."""
        nested: dict[str, Any] = {}
        for key, value in answers.items():
            put(nested, key, value)
        find_config: Callable[[str], tuple[str, type]] = self.registry.find_config
        try:
            resolve(Layer(nested), find_config=find_config, complete=complete)
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


# --- on a terminal ---


def hint(text: str) -> str:
    """Return a hint in lines that break between words, on any terminal."""
    columns = min(shutil.get_terminal_size().columns, HINT_COLUMNS)
    return textwrap.fill(text, columns)


def ask_all(wizard: Wizard) -> str:
    """Ask until every question is answered, and return the file: keys, values, and comments.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    questionary.print(
        f"Enter takes the default; {BACK!r} or the last choice goes back; Ctrl-C ends, nothing is "
        "written."
    )
    while (question := wizard.current) is not None:
        questionary.print("\n" + hint(question.help))
        value = _pick(question, wizard) if question.choices else _type(question, wizard)
        if value is BACK:
            wizard.back()
            continue
        try:
            wizard.answer(value)
        except ConfigError as error:
            questionary.print(str(error))
    return dump_yaml(wizard.values(), wizard.comments())


def ask_where(text: str, default: Path) -> Path:
    """Show the configuration and ask for the file to write; an existing one only when confirmed.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    questionary.print(f"\n{text}")
    while True:
        path = Path(
            questionary.text(
                "Write it to which file?",
                default=str(default),
                validate=lambda text: bool(text.strip()) or "expected the path of a file",
            ).unsafe_ask()
        )
        if not path.exists():
            return path
        if questionary.confirm(f"{path} exists. Replace it?", default=False).unsafe_ask():
            return path


def _pick(question: Question, wizard: Wizard) -> Any:
    choices = [questionary.Choice(choice.title, choice.value) for choice in question.choices]
    chosen = next((choice for choice in choices if choice.value == question.default), None)
    if wizard.can_go_back:
        choices.append(questionary.Choice(_BACK_CHOICE, BACK))
    return questionary.select(
        question.text, choices=choices, default=chosen, instruction=" "
    ).unsafe_ask()


def _type(question: Question, wizard: Wizard) -> Any:
    def judge(text: str) -> bool | str:
        if text.strip() == BACK:
            return wizard.can_go_back or "this is the first question"
        try:
            wizard.read(question, text)
        except ConfigError as error:
            return str(error)
        return True

    text = questionary.text(
        question.text,
        default=str(question.default),
        validate=judge,
    ).unsafe_ask()
    return BACK if text.strip() == BACK else wizard.read(question, text)
