"""The life of a checkpoint directory on disk, and the verdict of all ranks on each step.

A draft is ``.NAME.tmp-TOKEN`` and becomes ``NAME`` by one rename. A draft that replaces an old
checkpoint exchanges names with it, in a single call of Linux, so that ``NAME`` always exists. Where
the file system has no such call, the old checkpoint is first renamed to ``.NAME.old-TOKEN``, and
deleted last. The remains of a killed process are recognised by these names: an old checkpoint
without its successor goes back, everything else is swept.

Automatic names are ``checkpoint_0``, ``checkpoint_1``, ... in one folder, which belongs to one run:
a save there sweeps the remains of all names. These functions are for one rank at a time: rank 0
calls them, and shares the answer.

A run goes on from one of them, and ranks may be more or fewer than before. Then the micro-batches
of a step are shared out anew: where 4 ranks took 2 micro-batches each, 2 ranks take 4 each, and
each step reads the same samples.

How ranks fail together: every step of a save or a load ends with one verdict for all of them.

A rank that raised alone would leave the others waiting in their next collective. So a step runs
inside ``together``: all ranks hear how it went everywhere, and all of them raise the same error.

Every function is collective over a process group: the default one of all ranks, one of the ranks
that share a state, or for a thread in the background a group of its own. Two threads must never
speak over one group.
"""

import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from drivetrain.checkpoint.manifest import (
    FILE_NAME,
    STATE_FILE,
    UNREADABLE,
    Manifest,
    read_state,
    sync_directory,
)
from drivetrain.collectives.facts import Ranks, gather_facts, share_facts
from drivetrain.errors import CheckpointError
from drivetrain.log import get_logger
from drivetrain.runtime.world import World, launched_config, restarts, saved_mark

# --- how ranks fail together ---

T = TypeVar("T")

Group: TypeAlias = dist.ProcessGroup | None
"""A process group of all ranks; None means the default one."""

_OPERATION = "the exchange of ranks about a checkpoint"
"""The name of every step here, where ranks meet: their words for it may hold different paths."""

SHOWN = 4
"""How many different failures one message quotes."""


def together(world: World, doing: str, work: Callable[[], T], group: Ranks = None) -> T:
    """Run one step on every rank and return this rank's result when all of them succeeded.

    A world of one process needs no process group. ``doing`` names the step in the message, as in
    ``cannot save X: ...``. ``work`` must not communicate after a failure on some ranks only.

    Raises:
        CheckpointError: the step failed on some rank, and every rank raises the same message.
        CollectiveError: not all ranks came here.
    """
    result: T | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:
        cause = error
    verdicts = gather(world, "" if cause is None else explain(cause), str, group, doing=doing)
    if any(verdicts):
        raise CheckpointError(f"cannot {doing}: {_summary(verdicts)}") from cause
    return result  # type: ignore[return-value]  # work() returned it: nothing failed


def check_same(world: World, doing: str, facts: Mapping[str, Any], group: Ranks = None) -> None:
    """Raise on every rank when the ranks want different things.

    Args:
        world: all ranks.
        doing: the wish, for the message.
        facts: values that must be equal on all ranks, by their names in the message.
        group: the ranks; None means all.

    Raises:
        CheckpointError: names the first fact that differs, with the values of two ranks.
    """
    told = {what: printable(str(value)) for what, value in facts.items()}
    everyone = gather(world, told, dict[str, str], group, doing=doing)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs.get(what) != value:
                raise CheckpointError(
                    f"cannot {doing}: ranks disagree on {what}: rank 0 has {value}, rank {rank} "
                    f"has {theirs.get(what)}; all ranks must call it together, with the same "
                    "arguments"
                )


def gather(
    world: World, value: T, kind: type[T], group: Ranks = None, *, doing: str = "agree"
) -> list[T]:
    """Return the values of all ranks, on all ranks; ``kind`` is their type, as of facts."""
    if world.size == 1:
        return [value]
    return gather_facts(value, kind, doing=doing, operation=_OPERATION, group=group)


def collect(world: World, value: T, kind: type[T], group: Group = None) -> list[T]:
    """Return the values of all ranks on rank 0, and an empty list on the others."""
    if world.size == 1:
        return [value]
    doing = "tell rank 0 what was written"
    return gather_facts(value, kind, doing=doing, operation=_OPERATION, group=group, main_only=True)


def share(world: World, value: T, kind: type[T], group: Group = None) -> T:
    """Return rank 0's value on all ranks."""
    if world.size == 1:
        return value
    doing = "hear what rank 0 has chosen"
    return share_facts(value, kind, doing=doing, operation=_OPERATION, group=group)


def explain(error: Exception) -> str:
    """Return the message of an error, without Python's decoration where possible."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = f"{type(error).__name__}: {error}"
    known = isinstance(error, CheckpointError) and str(error)
    return printable(known or text)


def printable(text: str) -> str:
    """Return a text with escapes in the place of bytes that are no UTF-8, as paths may have."""
    return text.encode(errors="backslashreplace").decode()


def _summary(verdicts: list[str]) -> str:
    """Quote each different failure once, with the ranks that failed so."""
    ranks: dict[str, list[int]] = {}
    for rank, verdict in enumerate(verdicts):
        if verdict:
            ranks.setdefault(verdict, []).append(rank)
    if len(ranks) == 1 and len(verdicts) == sum(map(len, ranks.values())):
        return next(iter(ranks))
    quoted = [
        f"rank {', '.join(map(str, who))}: {verdict}"
        for verdict, who in list(ranks.items())[:SHOWN]
    ]
    return "; ".join(quoted) + (f"; and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")


# --- the life of a checkpoint directory on disk ---

_NAME = re.compile(r"checkpoint_([0-9]+)")
_HIDDEN = re.compile(r"\.(.+)\.(tmp|old)-[0-9a-f]+")

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Arguments of renameat2(2): paths from the working directory, and two names are exchanged."""


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a complete checkpoint: the manifest is written last."""
    return (directory / FILE_NAME).is_file()


def is_finite(directory: Path) -> bool:
    """Return whether the manifest is intact, and says that all parameters are finite."""
    try:
        return Manifest.read(directory).finite
    except CheckpointError:
        return False


def begin(target: Path, token: str, *, overwrite: bool) -> Path:
    """Make the directory that a checkpoint is written into.

    Args:
        target: the checkpoint's final place.
        token: tells this save from others.
        overwrite: whether an existing checkpoint will be replaced.

    Raises:
        CheckpointError: the target exists, is not empty and may not be replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    _check_free(target, overwrite)
    for leftover, name, _ in _leftovers(target.parent):
        if name == target.name:
            delete(leftover)
    draft = draft_of(target, token)
    draft.mkdir()
    return draft


def draft_of(target: Path, token: str) -> Path:
    """Return where a checkpoint is written before it gets its name."""
    return _hidden(target, "tmp", token)


def commit(draft: Path, target: Path, token: str, *, overwrite: bool) -> None:
    """Give a complete draft its name; an old checkpoint is deleted only after that.

    Without overwrite a target that was filled meanwhile makes the rename fail, and stays. When the
    disk refuses, also to keep the new names, the old checkpoint is at its place again.
    """
    sync_directory(draft)
    old = _hidden(target, "old", token)
    replaces = overwrite and target.exists()
    with ExitStack() as undo:
        if replaces and exchange(draft, target):
            undo.callback(exchange, draft, target)
            old = draft
        else:
            if replaces:
                target.rename(old)
                undo.callback(old.rename, target)
            draft.rename(target)
            undo.callback(target.rename, draft)
        sync_directory(target.parent)
        undo.pop_all()
    if replaces:
        delete(old)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories in one step; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2  # of Linux, and of glibc 2.28 on
    except (AttributeError, OSError, TypeError):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def recover(target: Path) -> None:
    """Put an old checkpoint back whose replacement was killed between the two renames."""
    if target.exists():
        return
    for old, name, kind in _leftovers(target.parent):
        if (name, kind) == (target.name, "old") and is_checkpoint(old):
            old.rename(target)
            return


def find(target: Path) -> Path | None:
    """Return the directory of a checkpoint, back at its place after a kill; None without any."""
    recover(target)
    return target if target.exists() else None


def retire(target: Path, token: str) -> None:
    """Remove a checkpoint so that half a checkpoint can never be taken for a whole checkpoint."""
    old = _hidden(target, "old", token)
    target.rename(old)
    delete(old)


def delete(directory: Path) -> None:
    """Delete a directory, the manifest first: after a kill, the remaining files are no checkpoint.

    Files that cannot be deleted stay as leftovers, which the next save sweeps: of the same name,
    and for automatic names of the same folder.
    """
    try:
        (directory / FILE_NAME).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(directory, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove the remains of killed saves and removals of all automatic names in a folder.

    A whole checkpoint that was about to be removed goes back to its name if it is the only one.
    """
    for path, name, kind in _leftovers(root):
        if not _NAME.fullmatch(name):
            continue
        if kind == "old" and not any(map(is_checkpoint, _numbered(root).values())):
            recover(root / name)
        if path.is_dir():
            delete(path)


def next_name(root: Path) -> str:
    """Return the next automatic name in a folder, numbered after the highest that exists."""
    return f"checkpoint_{max(_numbered(root), default=-1) + 1}"


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints of automatic names in a folder, the highest number first."""
    return [path for path in newest_first(root) if is_checkpoint(path)]


def newest_first(root: Path) -> list[Path]:
    """Return the folders of automatic names in a folder, complete or not."""
    return [path for _, path in sorted(_numbered(root).items(), reverse=True)]


def prune(root: Path, limit: int) -> list[Path]:
    """Remove the oldest complete checkpoints until ``limit`` are left; return them, oldest first.

    If the weights of none of these are finite, the newest one with finite weights stays, too.
    Called after a save has returned, so the newest good checkpoint is never at risk.
    """
    if limit < 1:
        raise CheckpointError(f"expected a limit of at least 1 checkpoint, found {limit}")
    found = complete(root)
    removed = found[limit:]
    if not any(map(is_finite, found[:limit])):
        last_good = next(filter(is_finite, removed), None)
        removed = [path for path in removed if path != last_good]
    removed.reverse()
    for path in removed:
        try:
            retire(path, secrets.token_hex(8))
        except OSError as error:
            raise CheckpointError(
                f"cannot remove the old checkpoint {path}: {error.strerror}; the new one is saved"
            ) from error
    return removed


def _check_free(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if target.is_dir() and not any(target.iterdir()):
        return  # the rename takes its place
    if not overwrite:
        raise CheckpointError(
            f"{target} already exists; choose another name, or pass overwrite=True to replace it"
        )
    if not is_checkpoint(target):
        raise CheckpointError(
            f"{target} is not a checkpoint of this library, so overwrite=True does not delete it; "
            "choose another name or remove it yourself"
        )


def _hidden(target: Path, kind: str, token: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{token}")


def _leftovers(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the remains of killed saves in a folder, with the checkpoint's name and their kind."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            yield path, match[1], match[2]


def _numbered(root: Path) -> dict[int, Path]:
    """Return the folders named ``checkpoint_NUMBER`` by number."""
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return found


# --- where a run goes on ---


logger = get_logger(__name__)

BATCH_KEY, TOTAL_KEY, CONFIGURED_KEY = "batch", "micro_batches", "configured"
"""Keys in the state of a checkpoint: of all ranks' micro-batches in a step, and each rank's as the
configuration has them."""


_STEPS = "steps"
"""Key of these facts with the optimizer steps of their checkpoint."""


@dataclass(eq=False)
class Resumption:
    """The continuation of one run.

    Attributes:
        mode: ``launch.resume`` of the configuration.
        root: folder of the automatically named checkpoints; None without one.
        divides: whether the batches of loaders are divided over the ranks, as with
            ``split_batches``: then their number does not depend on the number of ranks.
        world: this process among all processes.
        memory: folder of the checkpoints in this host's memory; None without them.
        asked: whether the script has asked for a checkpoint to go on from.
    """

    mode: str
    root: Path | None
    divides: bool
    world: World
    memory: Path | None = None
    asked: bool = False
    _configured: int = 1
    _replicas: int = 1
    _chosen: int = 0
    _total: int = 0
    _warned: bool = False

    def accumulation(self, configured: int, replicas: int) -> int:
        """Return the micro-batches of each rank's step, so that the global batch stays. Collective.

        They follow from the newest checkpoint after a restart, and with ``launch.resume: auto``;
        not if the configured number is another one than at the time of the checkpoint.

        Args:
            configured: micro-batches per step in the configuration.
            replicas: number of ranks along the data-parallel axis.
        """
        self._configured, self._replicas = configured, 1 if self.divides else replicas
        self._chosen, self._total = configured, configured * self._replicas
        nowhere = self.root is None and self.memory is None
        if nowhere or not (self.mode == "auto" or restarts()):
            return configured
        told = gather(self.world, self._last_batch(), dict[str, int], doing="keep the global batch")
        before = max(filter(None, told), key=lambda facts: facts[_STEPS], default={})
        if not before or before[CONFIGURED_KEY] != configured:
            return configured
        self._total = before[TOTAL_KEY]
        self._chosen = max(1, round(self._total / self._replicas))
        found = self._chosen * self._replicas
        if found != self._total:
            logger.warning(
                f"the global batch changes: {self._total} micro-batches per step before, {found} "
                f"now, since {self._replicas} data-parallel ranks cannot share {self._total} "
                "evenly; losses go on differently"
            )
        elif self._chosen != configured:
            logger.announce(
                f"the global batch stays at {found} micro-batches per step: {self._chosen} on each "
                f"of {self._replicas} data-parallel ranks, instead of {configured}"
            )
        return self._chosen

    def facts(self, accumulation: int) -> dict[str, dict[str, int]]:
        """Return the entry about the global batch for the state of a checkpoint.

        Args:
            accumulation: micro-batches per step; a script may have changed them.
        """
        kept = accumulation == self._chosen
        total = self._total if kept else accumulation * self._replicas
        return {BATCH_KEY: {TOTAL_KEY: total, CONFIGURED_KEY: self._configured}}

    @property
    def begins_anew(self) -> bool:
        """Whether checkpoints are of earlier runs, and not to be loaded; rank 0 knows."""
        config = launched_config()  # a run of the launcher began with no checkpoint of its own
        is_saved = bool(config) and saved_mark(Path(config)).exists()
        return self.mode == "never" and not is_saved

    def before_save(self) -> None:
        """Warn of a restarted script that has asked for no checkpoint."""
        if restarts() and not (self.asked or self._warned):
            self._warned = True
            logger.warning(
                f"the run was started again (attempt {restarts()}), and the script has loaded no "
                "checkpoint: it began anew; call accelerator.resume() after prepare()"
            )

    def saved(self, state: Mapping[str, Any], *, memory: bool = False) -> None:
        """Tell the launcher how far a checkpoint is that rank 0 has given its name.

        Args:
            state: of the checkpoint.
            memory: whether it is in the memory of the hosts.
        """
        config = launched_config()
        if config:
            mark = saved_mark(Path(config), memory=memory)
            draft = mark.with_suffix(f"{mark.suffix}-draft")
            draft.write_text(str(_steps(state)), encoding="utf-8")
            draft.replace(mark)

    def _last_batch(self) -> dict[str, int]:
        """Return the global batch's facts of the newest checkpoint that can be read, if any.

        Each rank looks into its own host's memory, and rank 0 into storage.
        """
        stored = self.root if self.world.is_main and not self.begins_anew else None
        found = [_batch_of(root) for root in (stored, self.memory) if root is not None]
        return max(filter(None, found), key=lambda facts: facts[_STEPS], default={})


def _batch_of(root: Path) -> dict[str, int]:
    for directory in complete(root):
        try:
            state = read_state(directory)
            facts = {key: int(state[BATCH_KEY][key]) for key in (TOTAL_KEY, CONFIGURED_KEY)}
            steps = _steps(state)
        except UNREADABLE:
            continue  # damaged, or older than this key: load_state will tell
        if min(facts.values()) > 0:
            return facts | {_STEPS: steps}
    return {}


def saved_steps(directory: Path) -> int:
    """Return the optimizer steps in a checkpoint.

    Raises:
        CheckpointError: the file of its state cannot be read, or does not tell.
    """
    path = directory / STATE_FILE
    try:
        return _steps(read_state(directory))
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path} does not tell the steps of the optimizers: {error}"
        ) from error


def _steps(state: Mapping[str, Any]) -> int:
    """Return the most steps of an optimizer; -1 for a checkpoint of a version that did not tell."""
    return int(max(state.get("steps", ()), default=state.get("iteration", -1)))
