"""The questions on a terminal, drawn by questionary."""

import shutil
import textwrap
from pathlib import Path
from typing import Any

import questionary

from drivetrain.errors import ConfigError
from drivetrain_launch.wizard.questions import Question, Wizard

BACK = "<"
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
    wizard.announce = questionary.print
    questionary.print(
        f"Enter takes the default; {BACK!r} or the last choice goes back; Ctrl-C ends, nothing is "
        "written."
    )
    while (question := wizard.current) is not None:
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


def _pick(question: Question, *, can_go_back: bool) -> Any:
    choices = [questionary.Choice(choice.title, choice.value) for choice in question.choices]
    chosen = next((choice for choice in choices if choice.value == question.default), None)
    if can_go_back:
        choices.append(questionary.Choice(_BACK_CHOICE, BACK))
    return questionary.select(
        question.text, choices=choices, default=chosen, instruction=" "
    ).unsafe_ask()


def _type(question: Question, *, can_go_back: bool) -> str:
    """Return the text; errors are printed, since the line below a prompt would cut them off."""
    while True:
        text: str = questionary.text(question.text, default=str(question.default)).unsafe_ask()
        if text.strip() != BACK or can_go_back:
            return text.strip()
        questionary.print("this is the first question")
