"""The options of ``drivetrain launch``: each is a knob of the schema, with a flag for its name.

Help text and default come from the ``option()`` declarations. The command line becomes one layer of
configuration, whose origins quote the user's words.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from drivetrain.config import (
    Layer,
    Option,
    RunConfig,
    ValueOrigin,
    options_of,
    read_sets,
)
from drivetrain.config.document import put
from drivetrain.config.foreign import importers, read_own_file
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.hosts.surroundings import FEWEST_KEY, Surroundings, check_agreement


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line spelling of one knob.

    Attributes:
        group: heading under which ``--help`` shows it.
        key: dotted key of the knob.
        names: spellings, the usual one first.
        value: of the knob, for a flag without an argument; None for a flag with an argument.
        metavar: stands for the argument in the help; "" is derived from the knob's type.
        help: the help text; "" is the knob's own.
    """

    group: str
    key: str
    names: tuple[str, ...]
    value: str | None = None
    metavar: str = ""
    help: str = ""

    @property
    def parameter(self) -> str:
        """Name of the flag's function argument."""
        return self.names[0].lstrip("-").replace("-", "_")


GIVEN_WORDS = "drivetrain.words"
"""Where a command finds its words as they were typed, in ``click.Context.meta``."""

HOSTS_GROUP = "Several hosts"
"""Heading of the options about hosts."""

STRATEGY_KEY = "strategy.name"
FOLDER = "DIR"
STRATEGY_FLAG = Flag("Training", STRATEGY_KEY, ("--strategy",))
HOSTS_KEY = "launch.nnodes"
FLAGS = (
    STRATEGY_FLAG,
    Flag("Training", "precision", ("--precision", "--mixed-precision")),
    Flag("Processes", "launch.nproc_per_node", ("--nproc-per-node",)),
    Flag("Processes", "launch.device", ("--cpu",), "cpu", help="Leave accelerators alone."),
    Flag("Processes", "launch.max_restarts", ("--max-restarts",)),
    Flag("Processes", "launch.on_hang", ("--on-hang",)),
    Flag("Training", "launch.resume", ("--resume",)),
    Flag(HOSTS_GROUP, HOSTS_KEY, ("--nnodes", "--num-machines"), metavar="N|MIN:MAX"),
    Flag(HOSTS_GROUP, "launch.node_rank", ("--node-rank", "--machine-rank")),
    Flag(HOSTS_GROUP, "launch.rdzv_endpoint", ("--rdzv-endpoint",), metavar="HOST:PORT"),
    Flag(HOSTS_GROUP, "launch.preflight", ("--preflight",)),
    Flag("Output", "profile.steps", ("--profile",), metavar="STEPS"),
    Flag("Output", "launch.log_dir", ("--log-dir",), metavar=FOLDER),
)

TORCHRUN_RANKS = {
    "gpu": "auto, which is one rank per accelerator where there is one",
    "cpu": "auto with --cpu, which is one rank per core",
}
"""torchrun's words for a number of ranks."""


class GroupedOption(click.Option):
    """An option that is shown under a heading.

    Args:
        group: the heading.
        may_lack_value: whether the value may be left out, and stands behind ``=`` alone.
    """

    def __init__(
        self, *args: Any, group: str = "Other", may_lack_value: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.may_lack_value = may_lack_value


class GroupedCommand(click.Command):
    """A command that shows its options under headings, and takes ``_`` for ``-`` in their names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; an option of another launcher is answered with its counterpart.

        Raises:
            click.UsageError: there is no such option.
        """
        given = list(args)
        ctx.meta[GIVEN_WORDS] = given
        try:
            return super().parse_args(ctx, self._with_values(args))
        except click.NoSuchOption as error:
            hint = counterpart(error.option_name)
            if not hint:
                raise
            plain = error.option_name.replace("-", "_")
            word = next((w for w in given if w.partition("=")[0].replace("-", "_") == plain), plain)
            option = word.partition("=")[0]
            raise click.UsageError(f"no option {option}; {hint}", ctx) from error

    def _with_values(self, args: Sequence[str]) -> list[str]:
        """Give an option without its optional value an empty one, which click would need."""
        options = {name: each for each in self.params for name in each.opts}
        words = list(args)
        place = 0
        while place < len(words) and words[place].startswith("-"):
            name, equals, _ = words[place].replace("_", "-").partition("=")
            option = options.get(name)
            if isinstance(option, click.Option) and not (equals or option.is_flag):
                if getattr(option, "may_lack_value", False):
                    words[place] += "="
                else:
                    place += 1  # its value
            place += 1
        return words

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section of help for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        chooses = False
        for parameter in self.get_params(ctx):
            chooses = chooses or parameter.name == STRATEGY_FLAG.parameter
            record = None
            if isinstance(parameter, click.Option):
                record = parameter.get_help_record(ctx)
            if record is not None:
                heading = parameter.group if isinstance(parameter, GroupedOption) else "Other"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        if chooses:
            with formatter.section("Strategies"):
                formatter.write_dl(described_strategies())


def described_strategies() -> list[tuple[str, str]]:
    """Return the installed strategies with a line about each; none of them is imported."""
    registry = strategies()
    return [(name, registry.summary(name)) for name in registry.names]


def counterpart(option: str) -> str:
    """Return a hint for an option of another launcher; "" if no launcher has the option."""
    name = option.lstrip("-").replace("-", "_")
    for importer in importers():
        if name in importer.flags:
            program, ours = " ".join(importer.programs[0]), importer.flags[name].replace("`", "")
            return f"it is one of {program}; here: {ours}"
    return ""


def knob_flags(*groups: str) -> Callable[..., Any]:
    """Return a decorator that adds the flags of knobs, under some headings or under all."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        knobs = dict(knobs_of(RunConfig))
        for flag in reversed(FLAGS):
            if flag.group in groups or not groups:
                function = _flag_option(flag, knobs)(function)
        return function

    return decorate


def source_options(group: str = "Configuration") -> Callable[..., Any]:
    """Return a decorator that adds ``--config`` and ``--set`` under a heading."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function = click.option(
            "--set",
            "assignments",
            cls=GroupedOption,
            group=group,
            metavar="KEY=VALUE",
            multiple=True,
            shell_complete=complete_key,
            help="Set any knob by its YAML key, for example accumulation=4; repeatable.",
        )(function)
        return click.option(
            "--config",
            "config",
            cls=GroupedOption,
            group=group,
            metavar="FILE",
            shell_complete=complete_file,
            help="YAML file, such as 'drivetrain config' writes. [default: none]",
        )(function)

    return decorate


def resolve_command_line(
    config: str | None,
    assignments: Iterable[str],
    flags: Mapping[str, Any] | None = None,
    surroundings: Surroundings | None = None,
) -> Resolved:
    """Merge a YAML file, ``--set`` assignments, and click's values by the flags' parameters.

    The recognised variables of a scheduler lie below all of them.

    Raises:
        ConfigError: the file, a value or a key is wrong, or two options contradict each other.
    """
    file = read_own_file(config) if config else Layer()
    if surroundings is not None:
        check_agreement(surroundings, file)
    return resolve(
        surroundings.layer if surroundings is not None else Layer(),
        file,
        command_line_layer(flags or {}, assignments),
        find_config=strategies().find_config,
    )


def command_line_layer(flags: Mapping[str, Any], assignments: Iterable[str]) -> Layer:
    """Turn flags and ``--set`` assignments into one layer.

    Raises:
        ConfigError: an assignment is malformed, or contradicts a flag.
    """
    layer = read_sets(assignments)
    values, origins = dict(layer.values), dict(layer.origins)
    for flag in FLAGS:
        text = flags.get(flag.parameter)
        if text is None or text is False:
            continue
        given = f"{flag.names[0]} {text}" if flag.value is None else flag.names[0]
        if flag.key == HOSTS_KEY and ":" in str(text):
            fewest, _, text = str(text).partition(":")
            put(values, FEWEST_KEY, int(fewest) if fewest.isdecimal() else fewest)
            origins[FEWEST_KEY] = ValueOrigin("command line", given)
        value = _typed(flag, text)
        other = origins.get(flag.key, origins.get(flag.key.rpartition(".")[0]))
        if other is not None and _get(values, flag.key) not in (None, value):
            raise ConfigError(
                f"{flag.key}: '{given}' and '{other.text}' contradict each other; keep one"
            )
        put(values, flag.key, value)
        origins[flag.key] = ValueOrigin("command line", given)
    return Layer(values, origins)


def _flag_option(flag: Flag, knobs: Mapping[str, Option]) -> Callable[..., Any]:
    settings: dict[str, Any] = {"cls": GroupedOption, "group": flag.group, "default": None}
    if flag.key == STRATEGY_KEY:
        help_text = "How the step is spread over the ranks; the strategies are listed below."
        settings |= {"metavar": "NAME", "shell_complete": _complete_strategy}
        default = "the installed default"
    else:
        knob = knobs[flag.key]
        help_text = flag.help or knob.help
        default = "none" if knob.default == "" else str(knob.default)
        if flag.value is not None:
            settings["is_flag"] = True
        else:
            settings["metavar"] = flag.metavar or _metavar(knob)
            if flag.metavar == FOLDER:
                settings["shell_complete"] = complete_folder
    yaml_key = "strategy" if flag.key == STRATEGY_KEY else flag.key
    yaml_key += f": {flag.value}" if flag.value is not None else ""
    settings["help"] = f"{help_text} [default: {default}] [YAML: {yaml_key}]"
    return click.option(*flag.names, flag.parameter, **settings)


def _metavar(knob: Option) -> str:
    kinds = {int: "N", float: "SECONDS", str: "TEXT"}
    words = [str(choice) for choice in knob.choices]
    if "int" in str(knob.type) and words:
        return "N|" + "|".join(words)
    return "|".join(words) if words else kinds.get(knob.type, "VALUE")


def _typed(flag: Flag, text: Any) -> Any:
    """Return an integer where one was typed; the schema judges everything else.

    Raises:
        ConfigError: torchrun's word for a number of ranks.
    """
    if flag.key == "launch.nproc_per_node" and text in TORCHRUN_RANKS:
        raise ConfigError(f"{flag.names[0]} {text}: take here {TORCHRUN_RANKS[text]}")
    if flag.value is not None:
        return flag.value
    return int(text) if str(text).lstrip("-").isdecimal() else text


def _get(values: Mapping[str, Any], dotted: str) -> Any:
    value: Any = values
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def knobs_of(cls: type, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Yield the dotted key of every knob of a configuration, and the knob; sections are opened."""
    for knob in options_of(cls):
        if knob.is_section:
            yield from knobs_of(knob.type, f"{prefix}{knob.name}.")
        else:
            yield prefix + knob.name, knob


def _complete_strategy(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [
        CompletionItem(name, help=summary)
        for name, summary in described_strategies()
        if name.startswith(incomplete)
    ]


def complete_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer the keys of the configuration, and the options of a strategy that is named before.

    The options cost an import of the strategy, so they are offered behind ``strategy.`` alone.
    """
    offered = known_keys()
    registry, name = strategies(), ctx.params.get(STRATEGY_FLAG.parameter)
    if incomplete.startswith("strategy.") and name in registry.names:
        options = knobs_of(registry.load(name).Config, "strategy.")
        offered |= {key: knob.help for key, knob in options}
    return [
        CompletionItem(f"{key}=", help=text)
        for key, text in offered.items()
        if key.startswith(incomplete)
    ]


def known_keys() -> dict[str, str]:
    """Return the help of each key that every run has."""
    run = {key: knob.help for key, knob in knobs_of(RunConfig)}
    return {"strategy": "How the step is spread over the ranks.", **run}


def complete_known_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer the keys that every run has, and the strategies."""
    offered = {**known_keys(), **dict(described_strategies())}
    return [
        CompletionItem(key, help=text)
        for key, text in offered.items()
        if key.startswith(incomplete)
    ]


def complete_file(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell offer files."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell offer folders."""
    return [CompletionItem(incomplete, type="dir")]
