"""Formats of other programs: the contract of an importer, and files of theirs recognised.

An importer is found by entry point (``drivetrain.formats``), as strategies are: it may name them,
the core may not. Nothing here, and nothing in an importer, imports torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.config.document import STRATEGY, Layer, dump_yaml, read_file
from drivetrain.config.option import options_of
from drivetrain.config.schema import RunConfig
from drivetrain.errors import ConfigError
from drivetrain.registry import formats


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A configuration of another program in the words of ours.

    Attributes:
        values: nested, as a configuration file has them.
        origins: the foreign setting behind each dotted key, such as ``zero_stage: 3``.
        remarks: a sentence for each foreign setting that no key stands for: its effect there, and
            the way to have it here.
        script: the training script and its arguments, of a command line.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    script: Sequence[str] = ()

    def to_yaml(self, source: str) -> str:
        """Return a commented configuration file.

        Args:
            source: what was translated, for the first line.
        """
        lines = [f"# Imported from {source}."]
        if self.values:
            lines.append(dump_yaml(self.values, self.origins).rstrip())
        if self.remarks:
            lines += ["", "# Settings that no key stands for:"]
            lines += [f"#   {remark}" for remark in self.remarks]
        return "\n".join(lines) + "\n"


class Importer(ABC):
    """Translates the files and the command lines of one other program.

    Attributes:
        title: of a file, with its article, such as ``a DeepSpeed configuration``; "" where the
            program has no files of its own.
        programs: the words with which a command line of the program may start.
        flags: our counterpart of each option of the program's command line that we lack.
    """

    title: ClassVar[str] = ""
    programs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    flags: ClassVar[Mapping[str, str]] = {}

    def recognizes(self, values: Mapping[str, Any]) -> bool:
        """Return whether the values of a file are those of this program; False by default."""
        return False

    @abstractmethod
    def translate(self, layer: Layer, folder: Path) -> Translation:
        """Translate a file.

        Args:
            layer: its values, with the lines of its keys.
            folder: of the file, in which files that it names may lie.

        Raises:
            ConfigError: one line for each key that the program does not know, or for settings that
                contradict each other.
        """

    @abstractmethod
    def translate_command(self, words: Sequence[str], folder: Path) -> Translation:
        """Translate a command line.

        Args:
            words: those after the program's.
            folder: in which it is run.

        Raises:
            ConfigError: an option that the program does not know, or settings that contradict each
                other.
        """


def importers() -> Iterator[Importer]:
    """Make every installed importer."""
    registry = formats()
    for name in registry.names:
        importer: Importer = registry.load(name)()
        yield importer


def importer_of(values: Mapping[str, Any]) -> Importer | None:
    """Return the importer of a file's values; None where they may be ours."""
    ours = {STRATEGY, *(knob.name for knob in options_of(RunConfig))}
    if set(values) <= ours:
        return None
    return next((each for each in importers() if each.recognizes(values)), None)


def read_own_file(path: str | Path) -> Layer:
    """Read a configuration file of ours.

    Raises:
        ConfigError: the file cannot be read, or is another program's; the message says how to
            import it.
    """
    layer = read_file(path)
    importer = importer_of(layer.values)
    if importer is not None:
        raise ConfigError(
            f"{path}: expected a configuration of drivetrain, found {importer.title}; translate it "
            f"once with: drivetrain config import {path} --output drivetrain.yaml"
        )
    return layer
