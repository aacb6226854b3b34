"""The questions, with the way back, on a terminal: what the wizard cannot see, then the strategy.

The wizard looks at the machine first. It asks where the run starts, for the model, and for the
strategy, whose own questions come from ``option(question=...)`` in its configuration; it may be a
stranger's. Nothing here imports torch before the wizard looks, or the strategy is asked for.
"""

import itertools
import os
import re
import shlex
import shutil
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import questionary
from questionary import Choice

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
from drivetrain.errors import ConfigError, DrivetrainError, refusing
from drivetrain.hardware.sizes import DEVICES, GIB, device_bytes, parameter_count, size_text
from drivetrain.registry import Registry
from drivetrain_launch.commands.options import EXAMPLE_SCRIPT, check_run, run_line
from drivetrain_launch.console import listed
from drivetrain_launch.ranks.placement import Endpoint, Variables, accelerators, cores
from drivetrain_launch.ranks.remote import RemoteHost, read_hostfile, read_hosts

if TYPE_CHECKING:
    from drivetrain.cost import ModelSpec
    from drivetrain_launch.forecast import Promise

STRATEGY, FACTS = "strategy.", "facts."
"""Prefixes of the keys of the strategy, and of answers that no file holds as they are."""

BACK, NOT_YET = "<", "not yet"
"""Typed for the question before, and for a model that is not known; ``?`` says that, too."""

STRATEGY_KEY, DEVICE_KEY = "strategy.name", "launch.device"
PLACE, HOSTS, LINK, MODEL = "facts.place", "facts.hosts", "facts.link", "facts.model"

HERE, SLURM, SSH, KUBERNETES, HAND = "here", "slurm", "ssh", "kubernetes", "hand"
PLACES: Mapping[str, str] = {
    HERE: "this machine, all of it",
    SLURM: "SLURM: a batch script starts the hosts",
    SSH: "ssh: this machine starts a list of hosts",
    KUBERNETES: "Kubernetes: a job file starts the hosts",
    HAND: "by hand: a command on each host, or a part of this machine (1 x DEVICES)",
}
"""Where a run starts, and the line on the screen."""

FAST, EXACT, EMPIRICAL = "fast", "exact", "empirical"
LINKS: Mapping[str, str] = {
    FAST: "quickly: what is sent between hosts hardly counts",
    EXACT: "slowly; exact: the same sums as on one host",
    "rounding": "slowly; rounding: what is sent may be rounded, to bf16 for example",
    "theory": "slowly; theory: training may take another way that is proved to converge",
    EMPIRICAL: "slowly; empirical: another way that was good in experiments, without a proof",
}
"""How hosts are connected, and how far training may be from exact training to send less."""

HOSTS_FORM = "HOSTS x DEVICES x MEMORY"
MEETING_PORT = 29400
"""The port of host 0 where hosts meet that are started by hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The hosts of a run.

    Attributes:
        count: number of hosts.
        ranks: of each host.
        names: of the hosts; empty where a scheduler chooses them, and for this machine.
        cpu: whether ranks compute on the CPU.
        room: bytes for a rank: of its device, or of its share of a host's memory; None: unknown.
        beside: bytes of host memory for a rank beside its device; None: unknown, or no device.
    """

    count: int
    ranks: int
    names: Sequence[str] = ()
    cpu: bool = False
    room: int | None = None
    beside: int | None = None


def read_machines(text: str, place: str) -> Machines:
    """Read ``HOSTS x DEVICES x MEMORY``; memory may be left out.

    Raises:
        ConfigError: the text is something else, or hosts are named where they cannot be.
    """
    hosts, *rest = re.split(r"\s+x\s+", text.strip())
    if len(rest) not in (1, 2) or not rest[0].isdecimal() or not int(rest[0]):
        raise ConfigError(
            f"expected {HOSTS_FORM}, such as 4 x 8 x h100 or n1,n2 x 2 x cpu, found {text!r}"
        )
    ranks, memory = int(rest[0]), "".join(rest[1:])
    cpu = memory == "cpu"
    room = device_bytes(memory) if memory and not cpu else None
    if hosts.isdecimal():
        if int(hosts) < 1 or place == SSH or (place == HAND and int(hosts) > 1):
            least = "a number from 1" if place in (SLURM, KUBERNETES) else "names, such as n1,n2"
            raise ConfigError(f"expected {least} for the hosts, found {hosts}")
        return Machines(count=int(hosts), ranks=ranks, cpu=cpu, room=room)
    if place in (SLURM, KUBERNETES):
        raise ConfigError(
            f"expected the number of hosts, which the scheduler chooses, found {hosts!r}"
        )
    listed = read_hosts(hosts)
    if any(host.slots for host in listed):
        raise ConfigError(f"expected names alone, and their devices after x, found {hosts!r}")
    names = tuple(host.target for host in listed)
    return Machines(count=len(names), ranks=ranks, names=names, cpu=cpu, room=room)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the wizard sees before it asks.

    Attributes:
        cores: of this machine, for this process.
        memory: bytes of host memory that are free.
        devices: number of accelerators.
        device: their name.
        device_memory: bytes of each.
        nodes: of the job of SLURM around this process; 0 outside of one.
        notes: lines about SLURM, Kubernetes, a hostfile and the configuration of ssh.
        hosts: of the hostfile.
    """

    cores: int
    memory: int
    devices: int = 0
    device: str = ""
    device_memory: int = 0
    nodes: int = 0
    notes: Sequence[str] = ()
    hosts: Sequence[RemoteHost] = ()

    @property
    def text(self) -> str:
        """What is seen, in lines."""
        devices = "no accelerator"
        if self.devices:
            memory = size_text(self.device_memory)
            devices = f"{self.devices} accelerators ({self.device}, {memory} each)"
        machine = f"{devices}, {self.cores} CPU cores, {size_text(self.memory)} of memory free"
        return "\n".join([f"This machine: {machine}.", *self.notes])

    @property
    def machines(self) -> Machines:
        """This machine: a rank for each of its devices, or else of its cores."""
        ranks = self.devices or self.cores
        share = self.memory // ranks
        if not self.devices:
            return Machines(count=1, ranks=ranks, cpu=True, room=share)
        return Machines(count=1, ranks=ranks, room=self.device_memory, beside=share)

    def hosts_of(self, place: str) -> str:
        """Return the hosts at a place as far as they are seen, each like this machine; or ""."""
        names = [host.target for host in self.hosts]
        hosts = str(self.nodes or "") if place == SLURM else ",".join(names)
        slots = {host.slots for host in self.hosts} if place != SLURM else {None}
        if not hosts or place == KUBERNETES or len(slots) > 1:
            return ""
        ranks = slots.pop() or self.machines.ranks
        memory = f"{self.device_memory / GIB:.0f}" if self.devices else "cpu"
        return f"{hosts} x {ranks} x {memory}"


def look() -> Seen:
    """Look at this machine, the variables of schedulers, a hostfile, and ssh's configuration."""
    import torch

    from drivetrain.memory import host_room

    count, device = accelerators(), torch.accelerator.current_accelerator()
    facts: Any = None
    if count and device is not None:
        facts = torch.get_device_module(device).get_device_properties(0)
    notes: list[str] = []
    variables = Variables(os.environ)
    nodes = variables.text(variables.first("SLURM_NNODES", "SLURM_JOB_NUM_NODES"))
    if nodes.isdecimal():
        notes.append(f"SLURM: this is a job of {nodes} host{'s' if nodes != '1' else ''}.")
    elif shutil.which("sbatch"):
        notes.append("SLURM: it starts jobs from here.")
    if variables.text("KUBERNETES_SERVICE_HOST"):
        notes.append("Kubernetes: this is a pod.")
    hosts: Sequence[RemoteHost] = ()
    if Path("hostfile").is_file():
        try:
            hosts = read_hostfile(Path("hostfile"))
            notes.append(f"hostfile: {listed([host.target for host in hosts])}.")
        except ConfigError as error:
            notes.append(f"hostfile: {error}")
    with suppress(OSError, ValueError):
        config = (Path.home() / ".ssh" / "config").read_text(encoding="utf-8")
        lines = re.findall(r"(?im)^\s*Host\s+(.+)$", config)
        if names := [n for line in lines for n in line.split() if not set(n) & set("*?!")]:
            notes.append(f"~/.ssh/config: {listed(names)}.")
    return Seen(
        cores=cores(),
        memory=host_room(),
        devices=count if facts else 0,
        device=facts.name if facts else "",
        device_memory=facts.total_memory if facts else 0,
        nodes=int(nodes) if nodes.isdecimal() else 0,
        notes=notes,
        hosts=hosts,
    )


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
    choices: Sequence[Choice] = ()


@dataclass(slots=True)
class Wizard:
    """Walks through the questions.

    Args:
        registry: the installed strategies.
        seen: what need not be asked.
        answers: answers so far, by dotted key; a later visit offers them as defaults.
        announce: takes a line before work that takes seconds.
    """

    registry: Registry
    seen: Seen
    answers: dict[str, Any] = field(default_factory=dict)
    announce: Callable[[str], None] = lambda line: None
    _position: int = 0
    _proposals: "dict[str, tuple[Promise, str]]" = field(default_factory=dict)
    _models: "dict[str, ModelSpec]" = field(default_factory=dict)

    @property
    def current(self) -> Question | None:
        """The next question; None when all are answered."""
        return next(itertools.islice(self._questions(), self._position, None), None)

    @property
    def machines(self) -> Machines:
        """The hosts of the run."""
        place = self.answers[PLACE]
        return self.seen.machines if place == HERE else read_machines(self.answers[HOSTS], place)

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
        if question.key == PLACE and self.answers.get(PLACE) != value:
            self.answers.pop(HOSTS, None)  # which are written in another way there
        self.answers[question.key] = value
        self._position += 1

    def back(self) -> bool:
        """Return to the question before; whether there was one."""
        before, self._position = self._position, max(0, self._position - 1)
        return before > 0

    def read(self, question: Question, text: str) -> Any:
        """Turn typed text into a value of the question's knob.

        Raises:
            ConfigError: the text is not a value, or not an allowed one.
        """
        value: Any = text.strip()
        if question.key == MODEL and value in ("", "?"):
            value = NOT_YET
        if not question.key.startswith(FACTS):
            value = read_sets([f"{question.key}={text}"]).values
            for part in question.key.split("."):
                value = value[part]
        if value is None and isinstance(question.default, str):
            value = ""  # Enter, for no text
        self._judge(question, value)
        return value

    def text(self) -> str:
        """Return the file: the reason for the strategy, and each key with its meaning."""
        lines: list[str] = []
        promise, reason = self._proposal()
        if promise.name == self.answers[STRATEGY_KEY]:
            why = f"Proposed: {promise.form}, because {reason}."
            lines = textwrap.wrap(why, COMMENT_COLUMNS - len("# "))
        head = "".join(f"# {line}\n" for line in lines)
        meanings = {f"launch.{knob.name}": knob.help for knob in options_of(LaunchConfig)}
        meanings |= {f"links.{knob.name}": knob.help for knob in options_of(LinksConfig)}
        meanings |= {question.key: question.help for question in self._questions()}
        meanings[STRATEGY_KEY] = self.registry.load(self.answers[STRATEGY_KEY]).summary
        return head + dump_yaml(self.values(), meanings)

    def values(self) -> dict[str, Any]:
        """Return the nested values of the file: the strategy, and all that is no default.

        Hosts that ssh or a scheduler starts stand in the command: the file is the same for others.
        """
        chosen = {STRATEGY_KEY: self.answers[STRATEGY_KEY]}
        knobs = [(STRATEGY, self.registry.load(chosen[STRATEGY_KEY]).Config), ("", RunConfig)]
        for prefix, cls in knobs:
            for knob in options_of(cls):
                value = self.answers.get(prefix + knob.name, knob.default)
                if knob.question and value != knob.default:
                    chosen[prefix + knob.name] = value
        launch = self._launch()
        if self.answers[PLACE] not in (HERE, HAND):
            launch = {key: value for key, value in launch.items() if key == DEVICE_KEY}
        return _nested({**chosen, **launch, **self._links()})

    # --- the questions, in their order ---

    def _questions(self) -> Iterator[Question]:
        yield from self._facts()
        yield from self._of(RunConfig, "")
        yield self._strategy_question()
        name = self.answers.get(STRATEGY_KEY)
        if name is not None:
            yield from self._of(self.registry.outline(name).Config, STRATEGY)

    def _of(self, cls: type, prefix: str) -> Iterator[Question]:
        for knob in options_of(cls):
            key = prefix + knob.name
            if knob.question:
                yield _question(knob, key, self.answers.get(key, self._usual(knob, key)))

    def _usual(self, knob: Option, key: str) -> Any:
        """Return the default of a knob: that of the proposed form, for options of the strategy."""
        if not key.startswith(STRATEGY):
            return knob.default
        promise, _ = self._proposal()
        chosen = promise.name == self.answers[STRATEGY_KEY]
        return promise.options.get(knob.name, knob.default) if chosen else knob.default

    def _facts(self) -> Iterator[Question]:
        seen = SLURM if self.seen.nodes > 1 else SSH if self.seen.hosts else HERE
        yield Question(
            key=PLACE,
            text="Where does it run?",
            help="The wizard ends with the command that starts the run there.",
            default=self.answers.get(PLACE, seen),
            choices=_choices(PLACES),
        )
        place = self.answers.get(PLACE, seen)
        if place != HERE:
            hosts = "a number" if place in (SLURM, KUBERNETES) else "names, host 0 first"
            example = "4 x 8 x h100" if place in (SLURM, KUBERNETES) else "n1,n2 x 8 x h100"
            yield Question(
                key=HOSTS,
                text="Which hosts?",
                help=f"{HOSTS_FORM}, such as {example}. HOSTS is {hosts}; DEVICES those of a host; "
                f"MEMORY the GiB of a device, its name ({', '.join(DEVICES)}), or cpu to compute "
                "there. Leave MEMORY out if you do not know it.",
                default=self.answers.get(HOSTS, self.seen.hosts_of(place)),
            )
            if HOSTS in self.answers and self.machines.count > 1:
                yield Question(
                    key=LINK,
                    text="How are the hosts connected?",
                    help="A slow link decides what is sent. The words say how far training may be "
                    "from exact training, to send less.",
                    default=self.answers.get(LINK, FAST),
                    choices=_choices(LINKS),
                )
        yield Question(
            key=MODEL,
            text="Which model?",
            help="A script with its arguments (it runs until prepare()), a config.json of "
            f"transformers or its folder, a number of parameters such as 7B, or {NOT_YET!r}.",
            default=self.answers.get(MODEL, NOT_YET),
        )

    def _strategy_question(self) -> Question:
        promise, reason = self._proposal()
        default = self.answers.get(STRATEGY_KEY, promise.name)
        ordered = sorted(self.registry.choices, key=lambda name: name != default)
        titles = {name: f"{name}: {self.registry.load(name).summary}" for name in ordered}
        return Question(
            key=STRATEGY_KEY,
            text="How is the training step spread over the ranks?",
            help=f"Proposed: {promise.form}, because {reason}.",
            default=default,
            choices=_choices(titles),
        )

    def _proposal(self) -> "tuple[Promise, str]":
        """Return the proposal for the answers before the strategy, and the reason."""
        from drivetrain_launch.forecast import Situation, propose

        known = {key: value for key, value in self.answers.items() if not key.startswith(STRATEGY)}
        if str(known) not in self._proposals:
            self.announce("Comparing the installed strategies, which takes a few seconds ...")
            run = {key: value for key, value in known.items() if not key.startswith(FACTS)}
            machines, model = self.machines, known[MODEL]
            situation = Situation(
                resolved=self._resolved({**run, **self._launch(), **self._links()}),
                on_accelerators=not machines.cpu,
                room=machines.room,
                beside=machines.beside,
                model="" if model == NOT_YET else model,
                spec=self._models.get(model),
                slow=self._link != FAST,
                approximate=self._link == EMPIRICAL,
            )
            self._proposals[str(known)] = propose(situation, self.registry)
        return self._proposals[str(known)]

    @property
    def _link(self) -> str:
        """How the hosts are connected; one host is, quickly, with itself."""
        return str(self.answers.get(LINK, FAST)) if self.machines.count > 1 else FAST

    # --- answers as keys of the configuration ---

    def _launch(self) -> dict[str, Any]:
        """Return the keys about ranks and hosts, with a name in place of a scheduler's host 0."""
        machines = self.machines
        found: dict[str, Any] = {"launch.nproc_per_node": machines.ranks}
        if machines.cpu and self.answers[PLACE] != HERE:
            found[DEVICE_KEY] = "cpu"
        if machines.count > 1:
            first = RemoteHost((*machines.names, "host0")[0]).name
            found["launch.nnodes"] = machines.count
            found["launch.rdzv_endpoint"] = str(Endpoint(first, MEETING_PORT))
        return found

    def _links(self) -> dict[str, Any]:
        chosen = {"links.allow": self._link, "links.far": "auto"}
        return chosen if self._link not in (FAST, EXACT) else {}

    # --- judging an answer ---

    def _judge(self, question: Question, value: Any) -> None:
        """Refuse a wrong value; of the strategy, all that cannot run on these ranks."""
        if question.key.startswith(FACTS):
            self._judge_fact(question.key, value)
        elif question.key.startswith(STRATEGY):
            self._judge_strategy(question.key, value)
        else:
            self._resolved({question.key: value}, complete=False)

    def _judge_fact(self, key: str, value: str) -> None:
        """Refuse hosts or a model that the proposal could not read."""
        if key == HOSTS:
            from drivetrain_launch.forecast import planned_world

            machines = read_machines(value, self.answers[PLACE])
            planned_world(machines.ranks, machines.count)
        if key == MODEL and value != NOT_YET and not parameter_count(value):
            from drivetrain_launch.forecast import model_of

            if value not in self._models:
                self.announce(f"Reading the model of {value} ...")
                source, *arguments = words_of(value)
                self._models[value] = model_of(source, arguments)

    def _judge_strategy(self, key: str, value: Any) -> None:
        """Refuse ranks that cannot be divided so, and after the last question a wrong file."""
        from drivetrain_launch.forecast import plan

        following = replace(self, answers={**self.answers, key: value})
        asked = [question.key for question in following._questions()]
        kept = [each for each in asked[: self._position + 1] if not each.startswith(FACTS)]
        answers = {each: following.answers[each] for each in kept}
        whole = len(asked) == self._position + 1
        run = {**answers, **self._launch(), **self._links()}
        resolved = self._resolved(run, complete=whole)
        if whole:
            check_run(resolved)
        elif key != STRATEGY_KEY:
            plan(resolved, self.machines.ranks)

    def _resolved(self, answers: Mapping[str, Any], *, complete: bool = True) -> Resolved:
        """Let the schema judge values; its errors name no place in a file, since there is none."""
        find_config: Callable[[str], tuple[str, type]] = self.registry.find_config
        if STRATEGY_KEY not in answers:
            find_config = _no_strategy
        try:
            return resolve(Layer(_nested(answers)), find_config=find_config, complete=complete)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("configuration: ")) from error


def _no_strategy(name: str) -> tuple[str, type]:
    """Stand for the default strategy, which takes long to import, where no option is judged."""
    return name, make_dataclass("NoOptions", ())


def words_of(model: str) -> list[str]:
    """Return a model's source and its arguments, written as for a shell.

    Raises:
        ConfigError: a quotation does not end.
    """
    words = [model]
    if not Path(model).exists():
        with refusing(f"cannot read {model!r}", "quote it as for a shell"):
            words = shlex.split(model)
    return words


def _question(knob: Option, key: str, default: Any) -> Question:
    choices: Sequence[Choice] = ()
    if knob.type is bool:
        choices = (Choice("yes", True), Choice("no", False))
    elif knob.choices and (knob.minimum, knob.maximum) == (None, None):  # no number, too
        choices = [Choice(str(value), value) for value in knob.choices]
    return Question(key=key, text=knob.question, help=knob.help, default=default, choices=choices)


def _nested(answers: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in answers.items():
        put(nested, key, value)
    return nested


def _choices(titles: Mapping[str, str]) -> Sequence[Choice]:
    return [Choice(title, value) for value, title in titles.items()]


def start_line(path: Path, wizard: Wizard) -> str:
    """Return the commands that start the run of the wizard's answers, for the user to copy."""
    machines, model, place = wizard.machines, wizard.answers[MODEL], wizard.answers[PLACE]
    words = words_of(model)
    script = shlex.join(words if words[0].endswith(".py") else [EXAMPLE_SCRIPT])
    file = f"--config {shlex.quote(str(path))}"
    if place == SSH:
        hosts = ",".join(f"{name}:{machines.ranks}" for name in machines.names)
        return f"run: drivetrain launch --hosts {hosts} {file} {script}"
    if place not in (SLURM, KUBERNETES):
        return run_line(path, machines.count, script)
    image, suffix, start = (
        ("", ".sh", "sbatch")
        if place == SLURM
        else (" --image IMAGE", ".job.yaml", "kubectl apply -f")
    )
    ranks = f"--nnodes {machines.count} --nproc-per-node {machines.ranks}"
    job = shlex.quote(str(path.with_suffix(suffix)))
    return (
        f"run: drivetrain manifest {place}{image} {file} {ranks} --output {job} {script}\n"
        f"then: {start} {job}\n"
        f"look first: drivetrain launch --dry-run {file} {ranks} --rdzv-endpoint "
        f"host0:{MEETING_PORT}"
    )


# --- the dialog, drawn by questionary ---


HINT_COLUMNS = 80
"""Columns that a hint takes at most: more are hard to read."""

_BACK_CHOICE = "back to the question before"
NO_YES = (Choice("no"), Choice("yes"))


def hint(text: str) -> str:
    """Return a text in lines that break between words, on any terminal."""
    columns = min(shutil.get_terminal_size().columns, HINT_COLUMNS)
    return textwrap.fill(text, columns)


def ask_all(wizard: Wizard, default: Path, write: Callable[[Path, str], None]) -> Path:
    """Ask until every question is answered and the file is written, and return its path.

    Args:
        wizard: asks.
        default: the proposed path.
        write: writes a text, or raises a DrivetrainError.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    busy: list[str] = []

    def announce(line: str) -> None:
        questionary.print(line)
        busy.append(line)

    wizard.announce = announce
    questionary.print(
        f"{wizard.seen.text}\n\nEnter takes what stands in brackets, or is marked; {BACK!r} goes "
        "back; Ctrl-C ends."
    )
    while True:
        question = wizard.current
        if busy and sys.stdin.isatty():  # keys that were pressed meanwhile answer nothing
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        busy.clear()
        if question is None:
            if path := _written(wizard.text(), default, write):
                return path
            wizard.back()
            continue
        questionary.print("\n" + hint(question.help))
        if question.choices:
            value = _pick(question.text, question.choices, question.default)
        else:
            value = _type(question.text, question.default)
        if value == BACK:
            if not wizard.back():
                questionary.print("this is the first question")
            continue
        try:
            wizard.answer(value if question.choices else wizard.read(question, value))
        except ConfigError as error:
            questionary.print(hint(str(error)))


def _written(text: str, default: Path, write: Callable[[Path, str], None]) -> Path | None:
    """Show the configuration, ask for a file, and write it; an existing one only when confirmed.

    A file that cannot be written is asked for again: no answer is lost. None is the way back.
    """
    questionary.print(f"\n{text}")
    while True:
        answer = _type("Write it to which file?", str(default))
        if answer == BACK:
            return None
        path = Path(answer)
        if path.exists() and _pick(f"{path} exists. Replace it?", NO_YES, "no") != "yes":
            continue
        try:
            write(path, text)
        except DrivetrainError as error:
            questionary.print(hint(str(error)))
            continue
        return path


def _pick(question: str, answers: Sequence[Choice], default: Any) -> Any:
    chosen = next((choice for choice in answers if choice.value == default), None)
    choices = [*answers, Choice(_BACK_CHOICE, BACK)]
    asked = questionary.select(question, choices=choices, default=chosen, instruction=" ")
    keys: Any = asked.application.key_bindings
    keys.add(BACK, eager=True)(lambda event: event.app.exit(result=BACK))
    return asked.unsafe_ask()


def _type(question: str, default: Any) -> str:
    """Return the text, or the default for Enter alone: it is shown, and no key has to remove it.

    Errors are printed, since the line below a prompt would cut them off. Text before ``<`` is
    forgotten.
    """
    shown = f"{question} [{default}]" if default != "" else question
    text: str = questionary.text(shown).unsafe_ask().strip()
    return BACK if text.endswith(BACK) else text or str(default)
