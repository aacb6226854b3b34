"""Draws the wizard's questions on a terminal with questionary."""

from pathlib import Path
from typing import Any

import questionary

from drivetrain.config import dump_yaml
from drivetrain.errors import ConfigError
from drivetrain_launch.commands.wizard import Question, Wizard

BACK = "<"
_BACK_CHOICE = "back to the question before"


def ask_all(wizard: Wizard) -> dict[str, Any]:
    """Ask until every question is answered, and return the values of the configuration.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    questionary.print(
        f"Enter takes the default; {BACK!r} or the last choice goes back; Ctrl-C ends, nothing is "
        "written."
    )
    while (question := wizard.current) is not None:
        value = _pick(question, wizard) if question.choices else _type(question, wizard)
        if value is BACK:
            wizard.back()
        else:
            wizard.answer(value)
    return wizard.values()


def ask_where(values: dict[str, Any], default: Path) -> Path:
    """Show the configuration and ask for the file to write; an existing one only when confirmed.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    questionary.print(f"\n{dump_yaml(values)}")
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
        question.text, choices=choices, default=chosen, instruction=f"({question.help})"
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
        instruction=f"({question.help}) ",
        validate=judge,
    ).unsafe_ask()
    return BACK if text.strip() == BACK else wizard.read(question, text)
