"""``drivetrain config``: writes, shows and checks the configuration file."""

import difflib
import json
import os
import re
import shlex
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from drivetrain.config import Layer, Option, RunConfig, dump_yaml, options_of, read_file
from drivetrain.config.document import (
    ORIGINS_KEY,
    STRATEGY,
    Importer,
    Translation,
    importer_of,
    importers,
)
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.config.schema import is_union
from drivetrain.errors import ConfigError, refusing, replace_text
from drivetrain.registry import strategies
from drivetrain_launch.commands.options import (
    EXAMPLE_SCRIPT,
    FLAGS,
    SETTINGS,
    ModelCommand,
    check_run,
    complete_file,
    complete_known_key,
    described_strategies,
    grouped_option,
    knobs_of,
    resolve_command_line,
    rest_argument,
    run_line,
    source_options,
)
from drivetrain_launch.console import show_table, yaml_text

DEFAULT_PATH = Path("drivetrain.yaml")


@click.group(invoke_without_command=True, context_settings=SETTINGS)
@click.option(
    "--default",
    "use_default",
    is_flag=True,
    help="Write the defaults without asking, to standard output unless --output is given.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"File to write. [default: {DEFAULT_PATH}]",
)
@click.pass_context
def command(ctx: click.Context, use_default: bool, output: Path | None) -> int:
    """Answer a few questions and write the configuration file.

    Example: drivetrain config --output drivetrain.yaml
    """
    if ctx.invoked_subcommand is not None:
        return 0
    if use_default:
        print_or_write(resolve(Layer()).to_yaml(), output)
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "expected a terminal to ask questions on, found none; "
            "'drivetrain config --default --output FILE' writes the defaults without asking"
        )
    return ask(output or DEFAULT_PATH)


@command.command("show")
@source_options
def show(config: str | None, assignments: tuple[str, ...]) -> None:
    """Show every key with its value and where that came from.

    Example: drivetrain config show --config drivetrain.yaml --set accumulation=4
    """
    show_configuration(resolve_command_line(config, assignments))


@command.command("check")
@click.argument("file", metavar="FILE", shell_complete=complete_file)
def check(file: str) -> None:
    """Check a file: print 'ok', or every error in it and exit with 2.

    Example: drivetrain config check drivetrain.yaml
    """
    check_run(resolve_command_line(file, ()))
    click.echo("ok")


@command.command("explain")
@click.argument("key", metavar="KEY", shell_complete=complete_known_key)
def explain(key: str) -> None:
    """Explain a key, a section, or a strategy.

    KEY is a key, such as launch.timeout_s, a section, strategy.OPTION, or the name of a strategy.

    Example: drivetrain config explain launch.timeout_s
    """
    click.echo(explained(key))


@command.command("import", cls=ModelCommand, context_settings={"ignore_unknown_options": True})
@grouped_option(
    "Output",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write. [default: standard output]",
)
@click.argument("source", metavar="SOURCE", shell_complete=complete_file)
@rest_argument()
def import_(source: str, arguments: tuple[str, ...], output: Path | None) -> None:
    """Translate a configuration of another program.

    SOURCE is a file of Accelerate (YAML) or DeepSpeed (JSON), a script of the shell that calls
    torchrun, accelerate or deepspeed, or such a call itself, with its ARGS. Settings that no key
    stands for become comments.

    Example: drivetrain config import ds_config.json --output drivetrain.yaml
    """
    if arguments and Path(source).is_file():
        raise ConfigError(
            "expected one file, or a command line, found more after the file: "
            f"{' '.join(arguments)}"
        )
    text, script, hosts = imported((source, *arguments))
    print_or_write(text, output)
    line = run_line(output or DEFAULT_PATH, hosts, script)
    if output is None:
        line = f"no file was written; with --output {DEFAULT_PATH}, {line}"
    click.echo(line, err=output is None)


def print_or_write(text: str, output: Path | None) -> None:
    """Print a configuration, or write it; a file that exists is left alone.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    if output is None:
        click.echo(text, nl=False)
    else:
        write(output, text, replace=False)
        click.echo(f"wrote {output}")


def ask(output: Path) -> int:
    """Run the wizard on this terminal, and write the configuration.

    Raises:
        KeyboardInterrupt, EOFError: the user pressed Ctrl-C, or Ctrl-D at a text, and was asked
            whether to keep the answers.
    """
    import questionary

    from drivetrain_launch.commands.wizard import Wizard, ask_all, look, start_line

    draft = output.with_suffix(".draft.json")
    answers = _draft(draft)
    click.echo("Looking at this machine ...")
    wizard = Wizard(strategies(), look(), answers)
    try:
        path = ask_all(wizard, output, lambda path, text: write(path, text, replace=True))
    except (KeyboardInterrupt, EOFError):  # Ctrl-C, Ctrl-D
        keep = f"Keep the answers in {draft}, for the next 'drivetrain config'?"
        if wizard.answers and questionary.confirm(keep).unsafe_ask():
            write(draft, json.dumps(wizard.answers, indent=2) + "\n", replace=True)
        raise
    # Read the file as a run will: a mistake of ours must show here, and not in the run.
    check_run(resolve(read_file(path)))
    draft.unlink(missing_ok=True)
    click.echo(f"wrote {path}\n{start_line(path, wizard)}")
    return 0


def _draft(path: Path) -> dict[str, Any]:
    """Return the answers of a draft: none where there is no draft.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.exists():
        return {}
    with refusing(f"{path}: expected a draft of 'drivetrain config'", "remove the file"):
        answers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(answers, dict):
            raise ValueError(f"expected a mapping, found {answers!r}")
    click.echo(f"The answers of {path} stand in brackets.")
    return answers


def write(path: Path, text: str, *, replace: bool) -> None:
    """Write a whole file; after an error the file is as it was.

    Raises:
        ConfigError: the file exists and may not be replaced, or cannot be written.
    """
    if path.exists() and not replace:
        what = "is a folder" if path.is_dir() else "exists"
        raise ConfigError(f"{path} {what}; choose another --output, or remove it first")
    with refusing(f"cannot write {path}", "choose another file"):
        replace_text(path, text)


def show_configuration(resolved: Resolved, *, every: bool = True) -> None:
    """Print all knobs, or the chosen ones, with values and origins."""
    found = list(resolved.rows())
    kept = [row for row in found if every or row[2].kind != "default" or row[0] == "strategy.name"]
    rows = [(key, yaml_text(value), origin.text) for key, value, origin in kept]
    left = len(found) - len(kept)
    more = f" ({left} more keys at their default: drivetrain config show)" if left else ""
    show_table(f"Configuration{more}", ("key", "value", "origin"), rows)


# --- explain: the meaning of a key, or of all keys of a section ---


COLUMNS = 80
"""Columns of a line of text."""

WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
}
"""How the values of a type are described."""


def explained(key: str) -> str:
    """Return the text about a key, a section, a strategy or ``strategy.OPTION``.

    Strategies are imported where their options are asked for, and not before.

    Raises:
        ConfigError: there is no such key; the message names the nearest.
    """
    knobs = dict(knobs_of(RunConfig, sections=True))
    if key == STRATEGY:
        lines = [f"  {name}: {summary}" for name, summary in described_strategies()]
        flag = "--strategy NAME, or the key strategy: a name, or a mapping of name and options"
        return "\n".join([f"The strategy of a run: {flag}. Installed:", *lines])
    if key in knobs:
        knob = knobs[key]
        return _listed(knob.help, knob.type) if knob.is_section else _explained(key, knob)
    if key in strategies().names:
        kind = strategies().outline(key)
        return _listed(f"{key}: {kind.summary}.", kind.Config)
    if key.startswith(f"{STRATEGY}."):
        return _of_strategies(key.removeprefix(f"{STRATEGY}."))
    valid = [*knobs, *(f"{STRATEGY}.{name}" for name in _strategy_options())]
    near = [each for each in valid if each.endswith(f".{key}")]
    near = near or difflib.get_close_matches(key, [*valid, STRATEGY, *strategies().names], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "'drivetrain config show' lists all keys"
    raise ConfigError(f"unknown key {key!r}; {hint}")


def values_of(knob: Option) -> str:
    """Return in words which values a knob takes."""
    members = typing.get_args(knob.type) if is_union(knob.type) else (knob.type,)
    words = []
    for member in members:
        if typing.get_origin(member) is Literal:
            words += [yaml_text(value) for value in typing.get_args(member)]
        elif knob.is_strategy:
            words.append("the name of a strategy, or a mapping of name and options")
        else:
            words.append(WORDS.get(member, "a mapping"))
    limits = [f"at least {knob.minimum:g}"] if knob.minimum is not None else []
    limits += [f"at most {knob.maximum:g}"] if knob.maximum is not None else []
    return " or ".join(words) + (f", {' and '.join(limits)}" if limits else "")


def _explained(key: str, knob: Option) -> str:
    facts = {"values": values_of(knob), "default": _default(knob)}
    for flag in FLAGS:
        if flag.key == key:
            facts["flag"] = flag.names[0]
    lines = [f"  {name:8} {text}" for name, text in facts.items()]
    return "\n".join([textwrap.fill(f"{key}: {knob.help}", COLUMNS), *lines])


def _listed(title: str, cls: type) -> str:
    """Return a paragraph about each key of a section."""
    lines = [title]
    for knob in options_of(cls):
        text = f"{knob.name} ({_default(knob)}): {knob.help}"
        lines.append(textwrap.fill(text, COLUMNS, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def _strategy_options() -> dict[str, dict[str, Option]]:
    """Return the options of strategies by their names, and by those of the strategies."""
    found: dict[str, dict[str, Option]] = {}
    for strategy in strategies().names:
        for name, knob in knobs_of(strategies().outline(strategy).Config, sections=True):
            found.setdefault(name, {})[strategy] = knob
    return found


def _of_strategies(name: str) -> str:
    """Return the texts about an option of that name, with the strategies that share each text."""
    known, texts = _strategy_options(), dict[str, list[str]]()
    for strategy, knob in known.get(name, {}).items():
        texts.setdefault(_explained(f"{STRATEGY}.{name}", knob), []).append(strategy)
    if not texts:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {f'{STRATEGY}.{near[0]}'!r}?" if near else "see its documentation"
        raise ConfigError(f"no installed strategy has an option {name!r}; {hint}")
    return "\n\n".join(f"{text}\n  of       {', '.join(names)}" for text, names in texts.items())


def _default(knob: Option) -> str:
    if knob.is_section:
        return "a section"
    if knob.is_strategy:
        return str(knob.default.name or "the default strategy")
    return yaml_text(knob.default)


# --- import: finds the program that a file or a command line belongs to ---


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
    script = translation.script or (EXAMPLE_SCRIPT,)  # variables of the shell stay variables
    return text, " ".join(word if "$" in word else shlex.quote(word) for word in script), hosts


def _of_file(path: Path) -> Translation:
    if path.suffix not in TEXT_SUFFIXES and path.is_file():
        return _of_shell_script(path)
    if not path.exists():
        known = ", ".join(each.title for each in importers() if each.title)
        raise ConfigError(f"expected the file of {known}, found none at {path}; check the path")
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
    for line in re.sub(r"\\\s*\n", " ", path.read_text(encoding="utf-8")).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a text over several lines
            continue
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


def _programs() -> str:
    return ", ".join(sorted({program[0] for each in importers() for program in each.programs}))


def _is_ours(layer: Layer) -> bool:
    try:
        resolve(layer)
    except ConfigError:
        return False
    return True


def _check(translation: Translation) -> None:
    """Read the translation as a run will: a mistake of ours must show here, and not in the run."""
    text = dump_yaml(translation.values)
    try:
        check_run(resolve(Layer(translation.values)))
    except ConfigError as error:
        raise ConfigError(f"the settings have no equal here: {error}\n{text}") from error
