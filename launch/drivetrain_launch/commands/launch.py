"""``drivetrain launch`` and ``test``: a script, or a check of our own, on its ranks."""

import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click

from drivetrain.config.resolve import Resolved
from drivetrain.errors import ConfigError, refusing
from drivetrain_launch.commands.options import (
    FLAGS,
    HOSTS_GROUP,
    TOPOLOGY,
    GroupedCommand,
    check_run,
    chosen_hosts,
    command_line_layer,
    complete_file,
    grouped_option,
    host_options,
    knob_flags,
    misplaced,
    module_option,
    remote_job,
    resolve_command_line,
    script_argument,
    source_options,
    worded_flags,
)
from drivetrain_launch.ranks.answers import VARIABLES
from drivetrain_launch.ranks.failure import RunOver, Signals, Stopped
from drivetrain_launch.ranks.placement import (
    KEYS,
    Endpoint,
    HostJob,
    Surroundings,
    accelerators,
    backend_of,
    cores,
    heap_variables,
    listening_address,
    local_ranks,
    recognise,
)
from drivetrain_launch.ranks.remote import RemoteHost, run_hosts
from drivetrain_launch.ranks.worker import AS_ACCELERATE, as_accelerate_words

LAUNCHERS_OWN = tuple(
    name
    for flag in FLAGS
    if flag.group in {"Processes", HOSTS_GROUP} and flag.value is None
    for name in flag.names
)
"""Options that scripts hardly have: numbers of ranks and hosts."""

CHECK_MODULE = "drivetrain_launch.commands.selfcheck"
RANKS_KEY = "launch.nproc_per_node"
USUAL_RANKS = "2"
"""Processes of a check on one host, where nobody says how many."""

as_accelerate_option = grouped_option(
    "Script",
    "--as-accelerate",
    may_lack_value=True,
    metavar="[=PACKAGE,...]",
    help="The script's 'import accelerate' finds drivetrain, and so does that of the packages; "
    "other libraries keep the real one.",
)
"""Decorates a command with ``--as-accelerate``."""


@click.command(cls=GroupedCommand)
@source_options
@knob_flags()
@module_option
@as_accelerate_option
@grouped_option(
    HOSTS_GROUP,
    "--standalone",
    is_flag=True,
    help="One host, as without it; refused with --nnodes above 1.",
)
@host_options
@grouped_option(
    "Output",
    "--dry-run",
    is_flag=True,
    help="Show the configuration, the mesh and the cost per rank; start nothing.",
)
@grouped_option(
    HOSTS_GROUP,
    TOPOLOGY,
    metavar="FILE",
    help="Order the hosts so that messages take the quickest links of a description that "
    "`drivetrain hardware measure` wrote. [default: as listed]",
    shell_complete=complete_file,
)
@script_argument
def command(
    config: str | None,
    assignments: tuple[str, ...],
    module: bool,
    as_accelerate: str | None,
    standalone: bool,
    dry_run: bool,
    script: tuple[str, ...],
    **flags: Any,
) -> int:
    """Run SCRIPT on several processes.

    Everything after SCRIPT belongs to the script. Values on the command line win over the file.

    Example: drivetrain launch --nproc-per-node 2 --strategy zero2 train.py
    """
    chosen = command_line_layer(flags, assignments).origins
    listed, surroundings = _hosts(flags, chosen, standalone=standalone)
    resolved = resolve_command_line(config, assignments, flags, surroundings)
    check_slot(resolved, surroundings)
    if standalone and resolved.run.launch.nnodes > 1:
        raise ConfigError(
            f"--standalone is for one host, found launch.nnodes: {resolved.run.launch.nnodes}; "
            "leave one of them out"
        )
    if flags["topology"] is not None:
        from drivetrain_launch.commands.preview import hosts_in_order

        listed = hosts_in_order(listed, resolved, flags["topology"])
    if dry_run:
        from drivetrain_launch.commands.preview import preview

        check_run(resolved)
        preview(resolved, listed)
        return 0
    arguments = check_script(script, module=module)
    check_run(resolved)
    if text := misplaced(arguments, LAUNCHERS_OWN, "launch"):
        click.echo(text, err=True)
    if listed:
        settings = resolved.run.launch
        return run_hosts(remote_job("launch", listed, flags, launch=settings, script=script))
    return launch(resolved, (*as_accelerate_words(as_accelerate), *arguments), surroundings)


@click.command(cls=GroupedCommand)
@source_options
@worded_flags(
    nproc_per_node=(
        "N|auto",
        "Ranks to compare with one. [default: the configuration's; 2 where that is auto, on "
        "several hosts auto]",
    ),
    cpu=("", "Leave accelerators alone."),
    strategy=("NAME", "Strategy to check. [default: the installed default]"),
)
@knob_flags(HOSTS_GROUP)
@host_options
def test(config: str | None, assignments: tuple[str, ...], **flags: Any) -> int:
    """Train a small model on several ranks and compare it with one process.

    On several hosts, measure the bandwidth and latency between all pairs of them first. Exits with
    0 when losses and weights agree, with 1 when they do not.

    Example: drivetrain test --nproc-per-node 2 --strategy fsdp
    """
    chosen = command_line_layer(flags, assignments).origins
    listed, surroundings = _hosts(flags, chosen)
    if "launch.preflight" not in chosen:
        flags["preflight"] = "full"
    resolved = resolve_command_line(config, assignments, flags, surroundings)
    settings = resolved.run.launch
    alone = not (surroundings or listed) and settings.nnodes == 1 and chosen.keys().isdisjoint(KEYS)
    if alone and settings.nproc_per_node == "auto" and RANKS_KEY not in chosen:
        flags["nproc_per_node"] = USUAL_RANKS
        resolved = resolve_command_line(config, assignments, flags)
    check_slot(resolved, surroundings)
    check_run(resolved)
    if listed:
        return run_hosts(remote_job("test", listed, flags, launch=resolved.run.launch))
    return launch(resolved, ("-m", CHECK_MODULE), surroundings)


def _hosts(
    flags: Mapping[str, Any], chosen: Mapping[str, Any], *, standalone: bool = False
) -> tuple[list[RemoteHost], Surroundings | None]:
    """Return the hosts to start over ssh; where nothing is said of hosts, what a scheduler says."""
    listed = chosen_hosts(flags, chosen, standalone=standalone)
    explicit = standalone or listed or not chosen.keys().isdisjoint(KEYS)
    return listed, None if explicit else recognise(os.environ)


def check_slot(resolved: Resolved, surroundings: Surroundings | None) -> None:
    """Check that one rank runs here where the scheduler starts each rank by itself.

    Raises:
        ConfigError: another number of ranks was chosen.
    """
    ranks = resolved.run.launch.nproc_per_node
    if surroundings is not None and surroundings.slot is not None and ranks != 1:
        raise ConfigError(
            f"launch.nproc_per_node: expected 1 under {surroundings.name}, where each process is "
            f"one rank, found {ranks}; leave the number out, or start one process per host; "
            "--standalone where these variables are left over"
        )


def launch(
    resolved: Resolved, arguments: tuple[str, ...], surroundings: Surroundings | None = None
) -> int:
    """Run a checked script on the ranks of this host and return the exit code.

    Raises:
        ConfigError: a folder for logs or in memory cannot be made, a port is busy, there are too
            few accelerators, or hosts differ in their software.
        PreflightError: the hosts cannot meet, or do not reach each other.
    """
    settings = resolved.run.launch
    if settings.log_dir:
        make_log_dir(Path(settings.log_dir))
    if settings.rdzv_endpoint and settings.node_rank == 0:
        listening_address(Endpoint.parse(settings.rdzv_endpoint))
    with temporary_folder() as private:
        try:
            in_memory = resolved.run.checkpoint.local == "memory"
            with Signals() as signals, memory_folder() if in_memory else nullcontext() as memory:
                return _run(resolved, arguments, private, signals, surroundings, memory)
        except Stopped as stopped:
            return stopped.code
        except RunOver as over:
            click.echo(over, err=True)
            return over.code


def check_script(script: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """Return the arguments of a rank.

    Raises:
        ConfigError: there is no script, or it cannot be found.
    """
    if not script:
        raise ConfigError(
            "expected a SCRIPT or -m MODULE to run, found none; "
            "for example: drivetrain launch --nproc-per-node 2 train.py"
        )
    name = script[0]
    if module:
        if name.endswith(".py"):
            raise ConfigError(
                f"-m: expected the name of a module, such as package.train, found the file "
                f"{name!r}; leave out -m"
            )
        top = name.partition(".")[0]
        if PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise ConfigError(
                f"no module named {top!r} in {Path.cwd()} or among the installed packages; "
                "check the name, or run from the folder that holds it"
            )
        return ("-m", *script)
    if not Path(name).is_file():
        what = "it is a folder" if Path(name).is_dir() else f"no such file in {Path.cwd()}"
        raise ConfigError(
            f"cannot run the script {name!r}: {what}; check the path, or use -m "
            "for a module; options of 'drivetrain launch' stand before the script"
        )
    if Path(name).suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"expected a script, found {name!r}; give a configuration as --config {name}, and the "
            "script after it"
        )
    return script


def make_log_dir(path: Path) -> None:
    """Make the folder of the logs.

    Raises:
        ConfigError: it cannot be made, or is no folder.
    """
    expected = "launch.log_dir: expected a folder that exists or can be made"
    with refusing(f"{expected}, found {str(path)!r}", "choose another --log-dir"):
        path.mkdir(parents=True, exist_ok=True)


def _run(
    resolved: Resolved,
    arguments: tuple[str, ...],
    private: Path,
    signals: Signals,
    surroundings: Surroundings | None,
    memory: Path | None,
) -> int:
    from drivetrain.runtime.world import CONFIG_VARIABLE, MEMORY_VARIABLE, reader_mark
    from drivetrain_launch.ranks.engine import run_ranks
    from drivetrain_launch.ranks.preflight import software_facts

    settings = resolved.run.launch
    available = 0 if settings.device == "cpu" else accelerators()
    ranks = local_ranks(settings, accelerators=available, cores=cores())
    if settings.nproc_per_node == "auto" and not available:
        click.echo(
            f"drivetrain: {ranks} rank{'s' * (ranks > 1)}, one per CPU core of this host; "
            "--nproc-per-node chooses another number",
            err=True,
        )
    path = private / "config.yaml"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(resolved.to_yaml(with_origins=True))
    variables = {
        CONFIG_VARIABLE: str(path),
        **({MEMORY_VARIABLE: str(memory)} if memory else {}),
        **heap_variables(settings, accelerators=available),
    }
    if available:  # gloo's operations need no recorder: they are on the boards
        variables |= {name: os.environ.get(name, text) for name, text in VARIABLES.items()}
    if resolved.run.profile.steps != "":
        # Two lines of torch's profiler for each rank, which say nothing to a user.
        variables["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")
    code = run_ranks(
        HostJob(
            arguments=arguments,
            ranks=ranks,
            launch=settings,
            variables=variables,
            private=private,
            config=path,
            run=surroundings.run if surroundings else "",
            slot=surroundings.slot if surroundings else None,
            software=software_facts(arguments) if settings.rdzv_endpoint else {},
            backend=backend_of(available),
        ),
        signals,
    )
    if (
        not code
        and not reader_mark(path).exists()
        and (text := without_effect(resolved, ranks, arguments))
    ):
        click.echo(text, err=True)
    return code


def without_effect(resolved: Resolved, ranks: int, arguments: tuple[str, ...] = ()) -> str:
    """Return the notice of a run without an Accelerator; "" without settings or other ranks."""
    chosen = [
        f"{key} = {value}"
        for key, value, origin in resolved.rows()
        if origin.kind != "default" and not key.startswith("launch.")
    ]
    lost = [f"{', '.join(chosen)} had no effect"] if chosen else []
    lost += [f"drivetrain joined nothing between its {ranks} ranks"] if ranks > 1 else []
    if not lost:
        return ""
    taken = any(word.startswith(AS_ACCELERATE) for word in arguments[:1])
    package = f"; for an installed package that makes one, {AS_ACCELERATE}=PACKAGE" if taken else ""
    return (
        f"drivetrain: the script made no Accelerator, so {' and '.join(lost)}; make an "
        f"Accelerator() and prepare() the model with it{package}"
    )


# --- private folders, on a disk and in memory, of which none outlives the launcher long ---

# A launcher holds a lock on its folders, which the system lets go of however the launcher ends. So
# the next launcher of the same user removes what a killed one has left. It also removes a folder
# that stayed since ranks could not read a whole checkpoint in it: users may rescue its files until
# then.


MEMORY = Path("/dev/shm")  # noqa: S108 - the file system in memory; the folder there is private
IN_MEMORY = "drivetrain-memory-"
"""First part of the names of folders there."""


@contextmanager
def memory_folder(root: Path = MEMORY) -> Iterator[Path]:
    """Context of a new private folder in memory, removed at the end unless ranks ask to keep it.

    Raises:
        ConfigError: there is no such file system, or nothing can be made in it.
    """
    from drivetrain.runtime.world import memory_kept_mark

    kept = str(memory_kept_mark(Path("*")))  # of any Accelerator
    made = _folder(root, IN_MEMORY, keep=lambda folder: any(folder.glob(kept)))
    with ExitStack() as stack:
        with refusing(
            f"checkpoint.local: memory needs a file system in memory at {root}, found none that "
            "can be written",
            "mount a tmpfs there, or set checkpoint.local to none",
        ):
            folder = stack.enter_context(made)
        yield folder


def temporary_folder() -> AbstractContextManager[Path]:
    """Context of a new private folder for temporary files, which is removed at the end.

    Its name has the host's: hosts may share the folder of temporary files, but not their locks.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f"drivetrain-launch-{socket.gethostname()}-"
    return _folder(Path(tempfile.gettempdir()), prefix)


@contextmanager
def _folder(
    root: Path, prefix: str, keep: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Context of a new folder for this user alone, once those of ended launchers are removed."""
    _sweep(root, prefix)
    with ExitStack() as stack:
        folder = _made(root, prefix, stack)
        try:
            yield folder
        finally:
            if not keep(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _made(root: Path, prefix: str, stack: ExitStack) -> Path:
    """Make a folder and lock it, unless another launcher has swept it in between."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            lock = _locked(folder)
        except OSError:  # a file system without locks, where nobody sweeps either
            return folder
        if lock is not None:
            stack.callback(os.close, lock)
            return folder


def _sweep(root: Path, prefix: str) -> None:
    """Remove the folders of launchers that have ended."""
    for folder in root.glob(f"{prefix}*"):
        with suppress(OSError):  # another launcher sweeps, too, or there are no locks
            facts = folder.lstat()
            if facts.st_uid != os.getuid() or folder.is_symlink() or not folder.is_dir():
                continue
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder; None if a launcher has it, or it is gone.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not folder.exists():
            return None
        stack.pop_all()
    return lock
