"""The questions, with the way back, on a terminal: the facts that users know, then the strategy.

Most questions come from ``option(question=...)`` in the configuration of the core and of the chosen
strategy, which may be a stranger's. The facts are asked for the proposal alone. Nothing here
imports torch before the strategy is asked for.
"""

import itertools
import shutil
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from drivetrain.config.document import COMMENT_COLUMNS, put
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.config.schema import LinksConfig
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.hardware.sizes import DEVICES, device_bytes, parameter_count
from drivetrain.registry import Registry
from drivetrain_launch.ranks.placement import Endpoint

if TYPE_CHECKING:
    from drivetrain.cost import ModelSpec
    from drivetrain_launch.wizard.advice import Proposal

STRATEGY, FACTS = "strategy.", "facts."
"""Prefixes of the keys of the strategy, and of answers that no file holds."""

BACK, UNKNOWN = "<", "?"
"""Typed for the question before, and for a fact that the user does not know."""

STRATEGY_KEY = "strategy.name"
RANKS_KEY, HOSTS_KEY = "launch.nproc_per_node", "launch.nnodes"
ENDPOINT_KEY, DEVICE_KEY = "launch.rdzv_endpoint", "launch.device"
FAR_KEY, ALLOW_KEY = "links.far", "links.allow"
MEMORY, MODEL, NEED = "facts.memory", "facts.model", "facts.need"

EXACT, AUTO = "exact", "auto"
"""The values of ``links.far`` without approximations, and with those that ``prepare()`` chooses."""

ALLOW_KNOB = next(knob for knob in options_of(LinksConfig) if knob.question)
"""The one question about links: how far training may be from exact training."""

NEEDS: Mapping[str, str] = {
    "nothing": "nothing yet",
    "memory": "memory: the model does not fit, or hardly",
    "speed": "speed: steps should take less time",
    "link": "the link: devices or hosts are slowly connected",
}
"""What can hurt, and the line on the screen."""


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """An answer to pick: its value, and the line of text on the screen."""

    value: Any
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question as data.

    Attributes:
        key: dotted key of the knob that the answer sets, or of a fact.
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
        announce: takes a line before work that takes seconds.
    """

    registry: Registry
    answers: dict[str, Any] = field(default_factory=dict)
    announce: Callable[[str], None] = lambda line: None
    _position: int = 0
    _proposals: "dict[str, Proposal]" = field(default_factory=dict)
    _models: "dict[str, ModelSpec]" = field(default_factory=dict)

    @property
    def current(self) -> Question | None:
        """The next question; None when all are answered."""
        return next(itertools.islice(self._questions(), self._position, None), None)

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
                key: old for key, old in self.answers.items() if not key.startswith(STRATEGY)
            }
        self._judge(question, value)
        self.answers[question.key] = value
        if question.key == HOSTS_KEY and value == 1:
            self.answers.pop(ENDPOINT_KEY, None)
        if question.key == ALLOW_KEY:
            self.answers[FAR_KEY] = AUTO if value != ALLOW_KNOB.default else EXACT
        elif not self._asks_for_approximations:
            self.answers.pop(ALLOW_KEY, None)
            self.answers.pop(FAR_KEY, None)
        self._position += 1

    def back(self) -> None:
        """Return to the question before."""
        self._position = max(0, self._position - 1)

    def read(self, question: Question, text: str) -> Any:
        """Turn typed text into a value of the question's knob.

        Raises:
            ConfigError: the text is not a value, or not an allowed one.
        """
        value: Any = text.strip()
        if not question.key.startswith(FACTS):
            value = read_sets([f"{question.key}={text}"]).values
            for part in question.key.split("."):
                value = value[part]
        if value is None and isinstance(question.default, str):
            value = ""  # Enter, for no text
        self._judge(question, value)
        return value

    def text(self) -> str:
        """Return the file: the reason for the strategy, and every key with its meaning."""
        name = self.answers.get(STRATEGY_KEY)
        lines: list[str] = []
        if name is not None and self._proposal().strategy == name:
            why = f"Proposed: {self._proposal().form}, because {self._proposal().reason}."
            lines = textwrap.wrap(why, COMMENT_COLUMNS - len("# "))
        head = "".join(f"# {line}\n" for line in lines)
        return head + dump_yaml(self.values(), self.comments())

    def comments(self) -> dict[str, str]:
        """Return the meaning of each answered key, for the file."""
        name = self.answers.get(STRATEGY_KEY)
        meanings = {question.key: question.help for question in self._questions()}
        if name is not None:
            meanings[STRATEGY_KEY] = self.registry.load(name).summary
        return {key: text for key, text in meanings.items() if key in self.answers}

    def values(self) -> dict[str, Any]:
        """Return the answers as the nested values of a configuration file, the strategy's first."""
        nested: dict[str, Any] = {}
        for key in sorted(self.answers, key=lambda key: not key.startswith(STRATEGY)):
            if not key.startswith(FACTS):
                put(nested, key, self.answers[key])
        return nested

    # --- the questions, in their order ---

    def _questions(self) -> Iterator[Question]:
        yield from self._of(LaunchConfig, "launch.")
        yield from self._facts()
        yield from self._of(RunConfig, "")
        yield self._strategy_question()
        name = self.answers.get(STRATEGY_KEY)
        if name is not None:
            yield from self._of(self.registry.load(name).Config, STRATEGY)

    def _of(self, cls: type, prefix: str) -> Iterator[Question]:
        for knob in options_of(cls):
            key = prefix + knob.name
            if knob.question and (key != ENDPOINT_KEY or self.answers.get(HOSTS_KEY, 1) != 1):
                yield _question(knob, key, self.answers.get(key, self._usual(knob, key)))

    def _usual(self, knob: Option, key: str) -> Any:
        """Return the default of a knob: that of the proposed form, for options of the strategy."""
        if not key.startswith(STRATEGY) or self._proposal().strategy != self.answers[STRATEGY_KEY]:
            return knob.default
        return self._proposal().options.get(knob.name, knob.default)

    def _facts(self) -> Iterator[Question]:
        where = "host" if self.answers.get(DEVICE_KEY) == "cpu" else "device"
        yield Question(
            key=MEMORY,
            text=f"How much memory has each {where}?",
            help=f"GiB, or a name: {', '.join(DEVICES)}. Enter, or {UNKNOWN}, if you do not know.",
            default=self.answers.get(MEMORY, ""),
        )
        yield Question(
            key=MODEL,
            text="How large is the model?",
            help="A number of parameters such as 7B, or the config.json of transformers. Enter, "
            f"or {UNKNOWN}, if you do not know.",
            default=self.answers.get(MODEL, ""),
        )
        yield Question(
            key=NEED,
            text="What hurts?",
            help="Decides between the strategies that fit.",
            default=self.answers.get(NEED, next(iter(NEEDS))),
            choices=tuple(AnswerChoice(need, title) for need, title in NEEDS.items()),
        )

        if self._asks_for_approximations:
            yield _question(ALLOW_KNOB, ALLOW_KEY, self.answers.get(ALLOW_KEY, ALLOW_KNOB.default))

    @property
    def _asks_for_approximations(self) -> bool:
        """Whether a link between hosts hurts, so that approximations could help."""
        return self.answers.get(NEED) == "link" and self.answers.get(HOSTS_KEY, 1) != 1

    def _strategy_question(self) -> Question:
        proposal = self._proposal()
        default = self.answers.get(STRATEGY_KEY, proposal.strategy)
        ordered = sorted(self.registry.choices, key=lambda name: name != default)
        choices = tuple(
            AnswerChoice(name, f"{name}: {self.registry.load(name).summary}") for name in ordered
        )
        return Question(
            key=STRATEGY_KEY,
            text="How is the training step spread over the ranks?",
            help=f"Proposed: {proposal.form}, because {proposal.reason}.",
            default=default,
            choices=choices,
        )

    def _proposal(self) -> "Proposal":
        """Return the proposal for the answers before the strategy."""
        from drivetrain_launch.wizard.advice import Situation, propose

        known = {key: value for key, value in self.answers.items() if not key.startswith(STRATEGY)}
        if str(known) not in self._proposals:
            self.announce("Comparing the installed strategies, which takes a few seconds ...")
            run = {key: value for key, value in known.items() if not key.startswith(FACTS)}
            situation = Situation(
                resolved=self._resolved(run),
                memory=known[MEMORY],
                model=known[MODEL],
                need=known[NEED],
                spec=self._models.get(known[MODEL]),
            )
            self._proposals[str(known)] = propose(situation, self.registry)
        return self._proposals[str(known)]

    # --- judging an answer ---

    def _judge(self, question: Question, value: Any) -> None:
        """Refuse a wrong value; after the last question about the strategy, all that cannot run."""
        if question.key.startswith(FACTS):
            self._judge_fact(question.key, value)
            return
        name = self.answers.get(STRATEGY_KEY)
        own = {STRATEGY_KEY: name} if name and question.key.startswith(STRATEGY) else {}
        self._resolved({**own, question.key: value}, complete=False)
        if question.key == ENDPOINT_KEY:
            Endpoint.parse(str(value))
        if question.key.startswith(STRATEGY):
            answers = {**self.answers, question.key: value}
            following = Wizard(self.registry, answers, _proposals=self._proposals)
            if len(list(following._questions())) == self._position + 1:
                self._judge_whole({k: v for k, v in answers.items() if not k.startswith(FACTS)})

    def _judge_fact(self, key: str, value: str) -> None:
        """Refuse a fact that the proposal could not read; "" is for users who do not know."""
        if key == NEED and value not in NEEDS:
            raise ConfigError(f"expected one of {', '.join(NEEDS)}, found {value!r}")
        if key == MEMORY and value:
            device_bytes(value)
        if key == MODEL and value and value not in self._models and not parameter_count(value):
            path = Path(value) / "config.json" if Path(value).is_dir() else Path(value)
            if path.suffix != ".json" or not path.is_file():
                raise ConfigError(
                    "expected a number of parameters such as 7B, or a config.json or its folder, "
                    f"found {value!r}"
                )
            from drivetrain_launch.forecast.models import model_of

            self._models[value] = model_of(value)

    def _judge_whole(self, answers: Mapping[str, Any]) -> None:
        """Refuse a file that ``launch`` would refuse, on this machine or any other."""
        from drivetrain_launch.forecast.planning import check_run

        resolved = self._resolved(answers)
        check_run(resolved)
        if resolved.run.launch.nproc_per_node == "auto":
            try:
                check_run(self._resolved({**answers, RANKS_KEY: 1}))
            except ConfigError as error:
                raise ConfigError(
                    f"{error}. The number of processes is left open (auto), so any number must "
                    "do: choose other sizes, or go back and give the number"
                ) from error

    def _resolved(self, answers: Mapping[str, Any], *, complete: bool = True) -> Resolved:
        """Let the schema judge values; its errors name no place in a file, since there is none."""
        nested: dict[str, Any] = {}
        for key, value in answers.items():
            put(nested, key, value)
        find_config: Callable[[str], tuple[str, type]] = self.registry.find_config
        if STRATEGY_KEY not in answers:
            find_config = _no_strategy
        try:
            return resolve(Layer(nested), find_config=find_config, complete=complete)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("configuration: ")) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """The options of the strategy before one is chosen."""


def _no_strategy(name: str) -> tuple[str, type]:
    """Stand for the default strategy, which takes long to import, where no option is judged."""
    return name, NoOptions


def _question(knob: Option, key: str, default: Any) -> Question:
    choices: tuple[AnswerChoice, ...] = ()
    if knob.type is bool:
        choices = (AnswerChoice(True, "yes"), AnswerChoice(False, "no"))
    elif knob.choices and (knob.minimum, knob.maximum) == (None, None):  # no number, too
        choices = tuple(AnswerChoice(value, str(value)) for value in knob.choices)
    return Question(key=key, text=knob.question, help=knob.help, default=default, choices=choices)


# --- the dialog, drawn by questionary ---


HINT_COLUMNS = 80
"""Columns that a hint takes at most: more are hard to read."""

_BACK_CHOICE = "back to the question before"


def hint(text: str) -> str:
    """Return a text in lines that break between words, on any terminal."""
    columns = min(shutil.get_terminal_size().columns, HINT_COLUMNS)
    return textwrap.fill(text, columns)


def ask_all(wizard: Wizard) -> str:
    """Ask until every question is answered, and return the file: keys, values, and comments.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    busy: list[str] = []

    def announce(line: str) -> None:
        questionary.print(line)
        busy.append(line)

    wizard.announce = announce
    questionary.print(
        f"Enter takes what stands in brackets; {BACK!r} or the last choice goes back; Ctrl-C ends, "
        "nothing is written."
    )
    while (question := wizard.current) is not None:
        if busy and sys.stdin.isatty():  # keys that were pressed meanwhile answer nothing
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        busy.clear()
        questionary.print("\n" + hint(question.help))
        value = (_pick if question.choices else _type)(question, can_go_back=wizard.can_go_back)
        if value == BACK:
            wizard.back()
            continue
        try:
            wizard.answer(value if question.choices else wizard.read(question, value))
        except ConfigError as error:
            questionary.print(hint(str(error)))
    return wizard.text()


def write_where(text: str, default: Path, write: Callable[[Path], None]) -> Path:
    """Show the configuration, ask for a file, and write it; an existing one only when confirmed.

    A file that cannot be written is asked for again: no answer is lost.

    Args:
        text: of the file.
        default: the proposed path.
        write: writes the text, or raises a DrivetrainError.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    questionary.print(f"\n{text}")
    while True:
        answer = questionary.text(f"Write it to which file? [{default}]").unsafe_ask().strip()
        path = Path(answer or default)
        if path.exists():
            replace = f"{path} exists. Replace it?"
            if not questionary.confirm(replace, default=False).unsafe_ask():
                continue
        try:
            write(path)
        except DrivetrainError as error:
            questionary.print(hint(str(error)))
            continue
        return path


def _pick(question: Question, *, can_go_back: bool) -> Any:
    choices = [questionary.Choice(choice.title, choice.value) for choice in question.choices]
    chosen = next((choice for choice in choices if choice.value == question.default), None)
    if can_go_back:
        choices.append(questionary.Choice(_BACK_CHOICE, BACK))
    return questionary.select(
        question.text, choices=choices, default=chosen, instruction=" "
    ).unsafe_ask()


def _type(question: Question, *, can_go_back: bool) -> str:
    """Return the text, or the default for Enter alone: it is shown, and no key has to remove it.

    Errors are printed, since the line below a prompt would cut them off.
    """
    default = str(question.default)
    while True:
        shown = f"{question.text} [{default}]" if default else question.text
        text: str = questionary.text(shown).unsafe_ask().strip()
        if text == UNKNOWN and question.key.startswith(FACTS):
            return ""
        if text != BACK or can_go_back:
            return text or default
        questionary.print("this is the first question")
