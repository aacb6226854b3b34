"""The options that commands share, and the configuration that they make: refused if no run can be.

Help text and default come from the ``option()`` declarations. The command line becomes one layer of
configuration, whose origins quote the user's words.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from drivetrain.config import (
    LaunchConfig,
    Layer,
    Option,
    RunConfig,
    ValueOrigin,
    options_of,
    read_sets,
)
from drivetrain.config.document import importers, put, read_own_file
from drivetrain.config.outline import FarLinks, check_axes, check_forward, find_outline
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.config.schema import FarConfig, Policy
from drivetrain.errors import ConfigError, refusing
from drivetrain.registry import strategies
from drivetrain_launch.ranks.placement import (
    FEWEST_KEY,
    Surroundings,
    check_agreement,
    check_hosts,
    check_size,
)
from drivetrain_launch.ranks.remote import RemoteHost, RemoteJob, read_hostfile, read_hosts, select


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
    Flag("Output", "memory_snapshot", ("--memory-snapshot",), metavar=FOLDER),
    Flag("Output", "launch.log_dir", ("--log-dir",), metavar=FOLDER),
)

TORCHRUN_RANKS = {
    "gpu": "auto, which is one rank per accelerator where there is one",
    "cpu": "auto with --cpu, which is one rank per core",
}
"""torchrun's words for a number of ranks."""


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of the contexts of commands."""


complete_file = click.Path().shell_complete
complete_folder = click.Path(file_okay=False).shell_complete
"""Let the shell offer files, or folders."""


class GroupedOption(click.Option):
    """An option that is shown under a heading.

    Args:
        names: its spellings, the usual one first.
        group: the heading.
        former: spellings of earlier versions, which are taken and not shown.
        may_lack_value: whether the value may be left out, and stands behind ``=`` alone.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        group: str = "Other",
        former: Sequence[str] = (),
        may_lack_value: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__([*names, *former], **kwargs)
        self.group = group
        self.former = former
        self.may_lack_value = may_lack_value

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the spellings of today with the help."""
        shown = copy(self)
        shown.opts = [name for name in self.opts if name not in self.former]
        return super(GroupedOption, shown).get_help_record(ctx)


class GroupedCommand(click.Command):
    """A command that shows its options under headings, and takes ``_`` for ``-`` in their names.

    Options behind an argument that takes all words that are left are words of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = {"token_normalize_func": methodcaller("replace", "_", "-")}
        self.context_settings = {**SETTINGS, **names, **self.context_settings}
        self.allow_interspersed_args = all(each.nargs != -1 for each in self.params)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; an option of another launcher is answered with its counterpart.

        Raises:
            click.UsageError: there is no such option.
        """
        given = list(args)
        ctx.meta[GIVEN_WORDS] = given
        words = self._with_values(args)
        try:
            self._check_repeated(ctx, words)
            return super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            hint = counterpart(error.option_name)
            if not hint:
                raise
            plain = error.option_name.replace("-", "_")
            word = next((w for w in given if w.partition("=")[0].replace("-", "_") == plain), plain)
            option = word.partition("=")[0]
            raise click.UsageError(f"no option {option}; {hint}", ctx) from error

    def _check_repeated(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Refuse an option that is given twice: click would take the last one in silence."""
        _, _, order = self.make_parser(ctx).parse_args(list(words))
        for each in order:
            single = isinstance(each, click.Option) and not (each.multiple or each.is_flag)
            if single and order.count(each) > 1:
                raise click.UsageError(f"{each.opts[0]} is given more than once; keep one", ctx)

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
            if (record := parameter.get_help_record(ctx)) is not None:
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
            whole = (
                "" if "--" in ours else f"; 'drivetrain config import {program} ...' translates all"
            )
            return f"it is one of {program}; here: {ours}{whole}"
    return ""


def grouped_option(group: str, *names: str, **settings: Any) -> Callable[..., Any]:
    """Return the decorator of an option under a heading of the help."""
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def knob_flags(*groups: str) -> Callable[..., Any]:
    """Return a decorator that adds the flags of knobs, under some headings or under all."""
    knobs = dict(knobs_of(RunConfig))
    shown = []
    for flag in FLAGS:
        metavar, key, default = "NAME", "strategy", "the installed default"
        text = "How the step is spread over the ranks; the strategies are listed below."
        if flag.key != STRATEGY_KEY:
            knob, key = knobs[flag.key], flag.key
            metavar, text = flag.metavar or _metavar(knob), flag.help or knob.help
            default = "none" if knob.default == "" else str(knob.default)
        if flag.value is not None:
            key += f": {flag.value}"
        text += f" [default: {default}] [YAML: {key}]"
        if flag.group in groups or not groups:
            shown.append(_flag_option(replace(flag, metavar=metavar, help=text)))
    return all_of(shown)


class ModelCommand(GroupedCommand):
    """A command about a model or a file, which may be a script: only a script has own arguments.

    Options stand before or after any other file. After a script, words that are spelled like
    options of the command are the script's, which is said.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line, with options that follow a model which is no script."""
        rest = self._rest(ctx, args)
        if rest:
            *before, model = args[: len(args) - len(rest)]
            options_first = [*before, *rest, model]
            if model.endswith(".py"):
                names = [name for each in self.params for name in each.opts]
                if text := misplaced(rest, names, ctx.info_name):
                    click.echo(text, err=True)
            elif not self._rest(ctx, options_first):
                return super().parse_args(ctx, options_first)
        return super().parse_args(ctx, args)

    def _rest(self, ctx: click.Context, args: Sequence[str]) -> tuple[str, ...]:
        """Return the words behind the model."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        rest = values.get(REST)
        return rest if isinstance(rest, tuple) else ()  # click has an object of its own for none


def misplaced(words: Iterable[str], options: Iterable[str], command: str | None) -> str:
    """Return the notice of a command's own options behind a script; "" without any."""
    spelled = {word.partition("=")[0].replace("_", "-") for word in words}
    found = [name for name in options if name.startswith("-") and name in spelled]
    if not found:
        return ""
    return (
        f"drivetrain: {', '.join(found)} stands after the script, which gets it as its own "
        f"argument; options of 'drivetrain {command}' stand before the script"
    )


def worded_flags(**words: tuple[str, str]) -> Callable[..., Any]:
    """Return a decorator that adds flags of knobs in the words of one command.

    Args:
        words: what stands for the argument, and the help, by the flag's parameter.
    """
    flags = {flag.parameter: flag for flag in FLAGS}
    return all_of(
        _flag_option(replace(flags[name], metavar=metavar, help=text))
        for name, (metavar, text) in words.items()
    )


REST = "arguments"
"""The parameter of the words that are left."""


def rest_argument(
    name: str = REST, metavar: str = "[ARGS]...", **settings: Any
) -> Callable[..., Any]:
    """Return the decorator of an argument that takes all words that are left, options too."""
    settings |= {"nargs": -1, "type": click.UNPROCESSED, "shell_complete": complete_file}
    return click.argument(name, metavar=metavar, **settings)


script_argument = rest_argument("script", "SCRIPT [ARGS]...")
"""Decorates a command with a script and the script's arguments."""


def all_of(decorators: Iterable[Callable[..., Any]]) -> Callable[..., Any]:
    """Return one decorator for several, whose options the help shows in this order."""
    last_first = tuple(decorators)[::-1]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in last_first:
            function = each(function)
        return function

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


def _flag_option(flag: Flag) -> Callable[..., Any]:
    settings: dict[str, Any] = {"is_flag": True} if flag.value else {"metavar": flag.metavar}
    if flag.key == STRATEGY_KEY:
        settings["shell_complete"] = lambda ctx, param, incomplete: _offered(
            dict(described_strategies()), incomplete
        )
    elif flag.metavar == FOLDER:
        settings["shell_complete"] = complete_folder
    names = (*flag.names, flag.parameter)
    return grouped_option(flag.group, *names, default=None, help=flag.help, **settings)


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


def knobs_of(
    cls: type, prefix: str = "", *, sections: bool = False
) -> Iterator[tuple[str, Option]]:
    """Yield the dotted key of every knob of a configuration, and the knob; sections are opened.

    Args:
        cls: the configuration.
        prefix: of the keys, with the dot.
        sections: whether sections are yielded themselves, too.
    """
    for knob in options_of(cls):
        if sections or not knob.is_section:
            yield prefix + knob.name, knob
        if knob.is_section:
            yield from knobs_of(knob.type, f"{prefix}{knob.name}.", sections=sections)


def _offered(texts: Mapping[str, str], incomplete: str, suffix: str = "") -> list[CompletionItem]:
    """Return the words that begin as typed, with their help."""
    return [
        CompletionItem(word + suffix, help=text)
        for word, text in texts.items()
        if word.startswith(incomplete)
    ]


def complete_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer the keys of the configuration, and the options of a strategy that is named before.

    The options cost an import of the strategy, so they are offered behind ``strategy.`` alone.
    """
    keys = known_keys()
    registry, name = strategies(), ctx.params.get(STRATEGY_FLAG.parameter)
    if incomplete.startswith("strategy.") and name in registry.names:
        options = knobs_of(registry.outline(name).Config, "strategy.")
        keys |= {key: knob.help for key, knob in options}
    return _offered(keys, incomplete, "=")


def known_keys() -> dict[str, str]:
    """Return the help of each key that every run has."""
    run = {key: knob.help for key, knob in knobs_of(RunConfig)}
    return {"strategy": "How the step is spread over the ranks.", **run}


def complete_known_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer the keys that every run has, and the strategies."""
    return _offered({**known_keys(), **dict(described_strategies())}, incomplete)


source_options = all_of(
    [
        grouped_option(
            "Configuration",
            "--config",
            metavar="FILE",
            shell_complete=complete_file,
            help="YAML file, such as 'drivetrain config' writes. [default: none]",
        ),
        grouped_option(
            "Configuration",
            *("--set", "assignments"),
            metavar="KEY=VALUE",
            multiple=True,
            shell_complete=complete_key,
            help="Set any knob by its YAML key, for example accumulation=4; repeatable.",
        ),
    ]
)
"""Decorates a command with ``--config`` and ``--set``."""

module_option = grouped_option(
    "Script",
    *("-m", "--module", "module"),
    is_flag=True,
    help="SCRIPT is the name of a module, as in 'python -m'.",
)
json_option = grouped_option("Output", "--json", "as_json", is_flag=True, help="Print JSON.")
"""Decorate a command with ``--module`` and ``--json``."""


SELECTION = "HOST:0,1@HOST"
OPTIONS = (
    ("--hosts", "HOST:N,...", "Start N ranks on each of these hosts over ssh. [default: none]"),
    (
        "--hostfile",
        "FILE",
        "Start on the hosts of a file with lines such as 'n1 slots=8'. [default: none]",
    ),
    ("--include", SELECTION, "Of the hosts, take these alone, with these devices. [default: all]"),
    ("--exclude", SELECTION, "Of the hosts, leave out these, or these devices. [default: none]"),
    ("--export", "NAME[=TEXT]", "Give hosts this variable, too; repeatable. [default: none]"),
    ("--env-file", "FILE", "Give hosts the variables of lines NAME=TEXT. [default: none]"),
)
"""Names, arguments and help of the options."""

REPEATABLE = "--export"

TOPOLOGY = "--topology"
OF_HOST_0 = (*(name for name, _, _ in OPTIONS), TOPOLOGY, "--rdzv-endpoint")
"""Options that the started hosts do not get: the machine that starts them decides."""

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:=(.*))?", re.DOTALL)


host_options = all_of(
    [
        grouped_option(
            HOSTS_GROUP,
            name,
            metavar=metavar,
            help=text,
            multiple=name == REPEATABLE,
            shell_complete=complete_file if metavar == "FILE" else None,
        )
        for name, metavar, text in OPTIONS
    ]
)
"""Decorates a command with the options; their values are keyword arguments."""


def chosen_hosts(
    flags: Mapping[str, Any], chosen: Container[str], *, standalone: bool
) -> list[RemoteHost]:
    """Return the hosts to start over ssh; none without ``--hosts`` and ``--hostfile``.

    Args:
        flags: values of the options.
        chosen: keys of the configuration that the command line sets.
        standalone: whether one host was asked for.

    Raises:
        ConfigError: the options contradict each other, or a host is malformed.
    """
    hosts, hostfile = flags["hosts"], flags["hostfile"]
    include, exclude = flags["include"], flags["exclude"]
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile: expected one of them, found both")
    if hosts is None and hostfile is None:
        if (include, exclude, flags["env_file"]) != (None, None, None) or flags["export"]:
            raise ConfigError(
                "--include, --exclude, --export and --env-file are for hosts that are started over "
                "ssh; give --hostfile or --hosts, too"
            )
        return []
    if standalone or "launch.nnodes" in chosen or "launch.node_rank" in chosen:
        raise ConfigError(
            "--hosts and --hostfile start the run on every host: leave out --nnodes, --node-rank "
            "and --standalone"
        )
    found = read_hostfile(Path(hostfile)) if hostfile is not None else read_hosts(hosts)
    return select(found, include, exclude)


def without_hosts(words: Sequence[str]) -> list[str]:
    """Leave the options about hosts out of a command line."""
    kept, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") not in OF_HOST_0:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept


def remote_job(
    command: str,
    hosts: Sequence[RemoteHost],
    flags: Mapping[str, Any],
    *,
    launch: LaunchConfig,
    script: Sequence[str] = (),
) -> RemoteJob:
    """Return the job that runs this command, with its words, on hosts.

    Raises:
        ConfigError: a variable for the hosts is malformed, or not set.
    """
    given: Sequence[str] = click.get_current_context().meta[GIVEN_WORDS]
    head = without_hosts(given[: len(given) - len(script)])
    variables = dict(_exported(flags["export"], flags["env_file"]))
    return RemoteJob(
        hosts=hosts,
        words=(*head, *script),
        grace_s=launch.grace_s,
        endpoint=launch.rdzv_endpoint,
        command=command,
        variables=variables,
    )


def _exported(words: Sequence[str], file: str | None) -> Iterator[tuple[str, str]]:
    """Yield the variables of a file, and then those of the command line."""
    if file is not None:
        with refusing(f"--env-file: cannot read {file!r}", "check the path"):
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if (text := line.strip()) and not text.startswith("#"):
                yield _variable(text, f"{file}:{number}")
    for word in words:
        yield _variable(word, f"--export {word}")


def _variable(text: str, where: str) -> tuple[str, str]:
    match = _ASSIGNMENT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{where}: expected NAME or NAME=TEXT, found {text!r}")
    if match[2] is None and match[1] not in os.environ:
        raise ConfigError(
            f"{where}: the variable {match[1]} is not set here; set it, or give {match[1]}=TEXT"
        )
    return match[1], os.environ[match[1]] if match[2] is None else match[2]


EXAMPLE_SCRIPT = "train.py"
"""The script of a command that is shown, where none is named."""


def run_line(path: Path, hosts: int, script: str) -> str:
    """Return the command that runs a script with a file, for the user to copy.

    Args:
        path: of the file.
        hosts: how many; each runs the command with an index of its own.
        script: with its arguments, as a shell reads them.
    """
    where = "run" if hosts == 1 else f"run on each of the {hosts} hosts, with its own --node-rank"
    rank = "" if hosts == 1 else " --node-rank 0"
    return f"{where}: drivetrain launch --config {shlex.quote(str(path))}{rank} {script}"


def check_run(resolved: Resolved) -> None:
    """Check a resolved configuration against the strategy, its dtypes, the ranks and the hosts.

    The machine is not looked at: the file may be for another one. So ``nproc_per_node: auto``
    leaves the number of ranks open.

    Raises:
        ConfigError: settings that ``prepare()``, or the launcher, would refuse.
    """
    check_hosts(resolved.run.launch)
    if resolved.run.profile.steps != "":
        from drivetrain.observe.profile import StepWindow

        StepWindow.parse(resolved.run.profile.steps)
    kind, options = find_outline(resolved.strategy, resolved.strategy_config)
    precision = _policy(resolved.run)
    kind.check_options(options, precision)
    kind.check_links(options, _links(resolved.run), precision)
    settings = resolved.run.launch
    if settings.nproc_per_node == "auto":
        return
    for hosts in range(settings.nnodes, settings.least_nnodes - 1, -1):
        size = check_size(settings.nproc_per_node, hosts)
        try:
            _check_islands(resolved.run.links.hardware, settings.nproc_per_node, hosts)
            sizes = kind.axes(options, size)
            check_axes(sizes, size)
            check_forward(resolved.run, sizes)
        except ConfigError as error:
            if hosts == settings.nnodes:
                raise
            raise ConfigError(
                f"launch.min_nnodes: the run could not go on with {hosts} hosts of "
                f"{settings.nproc_per_node} ranks: {error}"
            ) from error


def _policy(run: RunConfig) -> Policy:
    """Return the dtypes; as ``prepare()`` has them where a plugin without outline brought torch."""
    if "torch" not in sys.modules:
        return Policy.configured(run)
    from drivetrain.runtime.precision import Precision

    return Precision.configured(run)


def _links(run: RunConfig) -> FarLinks:
    """Return the methods for slow links: they compute with torch, so it is imported for them."""
    if run.links.far == FarConfig() and "torch" not in sys.modules:
        return FarLinks()
    from drivetrain.compression.methods import LinkMethods

    return LinkMethods.configured(run.links, undoable=run.skips_steps)


def _check_islands(hardware: str, ranks: int, nodes: int) -> None:
    """Refuse islands that do not fit the hosts; a file of them may lie on the hosts alone.

    Islands are declared in a world, which has devices of torch.
    """
    if not hardware:
        return
    from drivetrain.compression.communicator import declared_islands
    from drivetrain.hardware.description import names_a_device
    from drivetrain_launch.forecast import planned_world

    if names_a_device(hardware) or Path(hardware).exists():
        declared_islands(planned_world(ranks, nodes), hardware)
