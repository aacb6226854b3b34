"""``drivetrain config import``: finds the program that a file or a command line belongs to."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.config import Layer, dump_yaml, read_file
from drivetrain.config.document import ORIGINS_KEY
from drivetrain.config.foreign import Importer, Translation, importer_of, importers
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies

EXAMPLE_SCRIPT = "train.py"
"""The script of the command that is shown, where a file names none."""

TEXT_SUFFIXES = (".yaml", ".yml", ".json")
"""Names of files with settings; other files are read as scripts of the shell."""


def imported(source: Sequence[str]) -> tuple[str, str, int]:
    """Return our configuration file, the script as a shell reads it, and the number of hosts.

    Args:
        source: the path of a file, or the words of a command line.

    Raises:
        ConfigError: the source is not another program's, or cannot be translated.
    """
    if len(source) == 1 and " " not in source[0]:
        path = Path(source[0])
        translation = _of_file(path)
        text = translation.to_yaml(path.name)
    else:
        words = shlex.split(source[0]) if len(source) == 1 else list(source)
        translation = _of_command(words, Path())
        text = translation.to_yaml(f"a command line of {Path(words[0]).name}")
    _check(translation)
    hosts = translation.values.get("launch", {}).get("nnodes", 1)
    return text, _quoted(translation.script or (EXAMPLE_SCRIPT,)), hosts


def _of_file(path: Path) -> Translation:
    if path.suffix not in TEXT_SUFFIXES and path.is_file():
        return _of_shell_script(path)
    layer = read_file(path)
    importer = importer_of(layer.values)
    if importer is not None:
        return importer.translate(layer, path.parent)
    known = ", ".join(each.title for each in importers() if each.title)
    if not layer.values:
        raise ConfigError(f"{path}: expected {known}, found an empty file; check the path")
    if ORIGINS_KEY in layer.values or _is_ours(layer):
        raise ConfigError(f"{path} is a configuration of drivetrain already; nothing to import")
    raise ConfigError(f"{path}: expected {known}, found neither")


def _of_shell_script(path: Path) -> Translation:
    for words in _commands(path.read_text(encoding="utf-8")):
        if _program(words) is not None:
            return _of_command(words, path.parent)
    raise ConfigError(
        f"{path}: expected a call of {_programs()}, found none; import the file of settings itself"
    )


def _of_command(words: Sequence[str], folder: Path) -> Translation:
    found = _program(words)
    if found is None:
        raise ConfigError(
            f"expected a file, or a call of {_programs()}, found {words[0]!r}; check the path"
        )
    importer, rest = found
    return importer.translate_command(rest, folder)


def _program(words: Sequence[str]) -> tuple[Importer, Sequence[str]] | None:
    """Return the importer of a command line, and the words after the program's."""
    for start in range(len(words)):
        first = re.sub(r"^python3[.\d]*$", "python", os.path.basename(words[start]))  # noqa: PTH119
        line = [re.sub(r"^python3$", "python", first), *words[start + 1 :]]
        for importer in importers():
            for program in importer.programs:
                if tuple(line[: len(program)]) == program:
                    return importer, line[len(program) :]
        if "=" not in words[start] and first.endswith((".py", ".sh")):
            return None  # words of a script of its own
    return None


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script."""
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a text over several lines
            continue
        if words:
            yield words


def _programs() -> str:
    return ", ".join(sorted({program[0] for each in importers() for program in each.programs}))


def _is_ours(layer: Layer) -> bool:
    try:
        resolve(layer, find_config=strategies().find_config)
    except ConfigError:
        return False
    return True


def _check(translation: Translation) -> None:
    """Read the translation as a run will: a mistake of ours must show here, and not in the run."""
    from drivetrain_launch.forecast.planning import check_run

    text = dump_yaml(translation.values)
    try:
        check_run(resolve(Layer(translation.values), find_config=strategies().find_config))
    except ConfigError as error:
        raise ConfigError(f"the settings have no equal here: {error}\n{text}") from error


def _quoted(words: Sequence[str]) -> str:
    """Join words as a shell reads them; variables of the shell stay variables."""
    return " ".join(word if "$" in word else shlex.quote(word) for word in words)
