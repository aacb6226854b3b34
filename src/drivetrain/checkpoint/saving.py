"""Writes one checkpoint, at once or in the background while training goes on.

::

    rank 0     make the draft          |        | merge, state.json, manifest.json | rename
    all ranks                    token | shards |                                  |        verdict
    each bar is a verdict that all ranks hear: if one fails, all raise and the draft is removed

Everything right of the first bar can happen in another thread, from a copy of the shards. The
threads of the ranks agree over a gloo group of their own, and never meet the collectives of
training. A thread is no daemon: a process that ends well finishes its save.

Files of one rank and kind are cut at ``FILE_BYTES``, and at ``FRESH_BYTES`` of shards that were
copied for the save: shards that a store reads back from disk are never all in memory.
"""

import ctypes
import secrets
import shutil
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.commit import (
    Group,
    check_same,
    collect,
    explain,
    share,
    together,
)
from drivetrain.checkpoint.encoding import (
    DTYPES,
    Contents,
    Report,
    check_shard,
    encode,
    is_finite,
    write_common,
    write_tensors,
)
from drivetrain.checkpoint.manifest import SavedPart, SavedTensor, sync_directory
from drivetrain.errors import CheckpointError
from drivetrain.log import get_logger
from drivetrain.runtime.world import World
from drivetrain.shards import Shard

FILE_BYTES = 4 * 2**30
"""A rank starts another file of a kind when the current one would hold more than this."""

FRESH_BYTES = 2**28
"""As many bytes of fresh shards wait for a file of each kind."""

WEIGHTS, OPTIMIZER = KINDS = "weights", "optimizer"
"""The kinds of shards, each of which has files of its own."""


@dataclass(slots=True)
class PendingFile:
    """The shards of one kind that wait for the next file.

    Attributes:
        shards: in the order of writing.
        bytes: of the shards.
        fresh_bytes: of the fresh shards among them.
        files: how many files of this kind are written.
    """

    shards: list[Shard] = field(default_factory=list)
    bytes: int = 0
    fresh_bytes: int = 0
    files: int = 0


class CheckpointDraft(ABC):
    """A checkpoint until its name, begun on construction, which is collective.

    Args:
        target: the final place.
        what: in messages.
        world: all ranks.
        is_keeper: whether this rank makes, renames and removes the directory.

    Attributes:
        target: the checkpoint's final place.
        draft: the directory that is to become the checkpoint, with all its files.

    Raises:
        CheckpointError: on every rank, when a directory cannot be made.
    """

    _overwrite = False

    def __init__(self, target: Path, what: str, world: World, *, is_keeper: bool) -> None:
        self.target, self._world, self._is_keeper = target, world, is_keeper
        self._doing = f"save {what}"
        self._token = share(world, secrets.token_hex(8), str)
        self.draft = commit.draft_of(target, self._token)
        together(world, self._doing, partial(self._on_keeper, self._begin))
        self._writer = RankWriter(self.draft, world)

    @abstractmethod
    def _begin(self) -> None:
        """Make the draft's directory."""

    def stage(self, contents: Contents, copy: Callable[[Tensor], Tensor]) -> Contents:
        """Return a copy of the contents in host memory, which training no longer changes.

        ``copy`` makes the copies of shards.
        Shards that a store reads back from a disk are written now: there may be no room for them.
        On a failure of any rank every rank raises a CheckpointError, and the draft is gone.
        """
        with self.abandoned_on_failure():
            stage = partial(self._writer.stage, contents, copy)
            return together(self._world, self._doing, stage)

    @contextmanager
    def abandoned_on_failure(self) -> Iterator[None]:
        """Context in which an exception deletes the draft."""
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _commit(self) -> None:
        commit.commit(self.draft, self.target, self._token, overwrite=self._overwrite)

    def _abandon(self) -> None:
        self._on_keeper(partial(commit.delete, self.draft))

    def _on_keeper(self, work: Callable[[], object]) -> None:
        if self._is_keeper:
            work()


class Save(CheckpointDraft):
    """One save: the files of a draft are written, then the draft is renamed. Collective.

    Args:
        directory: the checkpoint; on a file system that all hosts share.
        world: all ranks.
        overwrite: replace an existing checkpoint, in one step and only when the new one is whole.

    Raises:
        CheckpointError: on every rank: they want different things, the directory exists, or it
            cannot be made.
    """

    def __init__(self, directory: Path, world: World, *, overwrite: bool = False) -> None:
        self._overwrite = overwrite
        wanted = {"the directory": Path(directory).absolute(), "overwrite": overwrite}
        check_same(world, "save a checkpoint", wanted)
        target = Path(directory).resolve()
        super().__init__(target, str(target), world, is_keeper=world.is_main)

    def finish(self, contents: Contents, group: Group = None) -> None:
        """Write the contents, and give the draft its name. Collective over the group.

        Raises:
            CheckpointError: on every rank, when it failed on any; the draft is gone.
        """
        world, doing = self._world, self._doing
        with self.abandoned_on_failure():
            report = together(world, doing, partial(self._writer.write, contents), group)
            reports = collect(world, report, Report, group)
            complete = partial(self._complete, reports, contents)
            together(world, doing, partial(self._on_keeper, complete), group)
            together(world, doing, partial(self._on_keeper, self._commit), group)

    def _begin(self) -> None:
        commit.begin(self.target, self._token, overwrite=self._overwrite)

    def _complete(self, reports: list[Report], contents: Contents) -> None:
        _check_visible(self.draft, reports)
        write_common(self.draft, reports, contents)


class RankWriter:
    """Writes the files of one rank into the draft.

    After a failure the shards are still walked without writing them: yielding a shard may
    communicate, and the other ranks would wait.

    Attributes:
        needed: bytes of the files so far.
    """

    def __init__(self, draft: Path, world: World) -> None:
        self._draft = draft
        self._world = world
        self._report = Report()
        self._failure: Exception | None = None
        self.needed = 0
        self._parameters: Sequence[Collection[str]] = ()
        self._batches: dict[tuple[int, str], PendingFile] = defaultdict(PendingFile)
        self._written: dict[int, list[SavedTensor]] = defaultdict(list)

    def stage(self, contents: Contents, copy: Callable[[Tensor], Tensor]) -> Contents:
        """Write the shards that are copies already, and return a copy of all the rest.

        Raises:
            CheckpointError: the first failure of a file.
            RuntimeError: there is no memory for the copy.
        """
        self._parameters = contents.parameters
        staged = contents.staged(self._add, copy)
        self._check()
        return staged

    def write(self, contents: Contents) -> Report:
        """Write all tensors of this rank, except for the tensors that ``stage`` has written.

        Raises:
            CheckpointError: the first failure, with the path, the bytes needed and the bytes free.
        """
        self._parameters = contents.parameters
        self._attempt(lambda: encode(dict(contents.state), "state", {}))
        self._attempt(partial(self._report.keep_scalars, contents.scalars))
        for index, shards in enumerate(contents.models):
            for shard in shards:
                self._add(index, shard)
            for kind in KINDS:
                self._flush(index, kind)
            self._report.models.append(self._written[index])
        if contents.rank_state:
            self._report.rank_file = f"rank-{self._world.rank:05d}.safetensors"
            self._write_file(self._report.rank_file, contents.rank_state)
        self._attempt(lambda: sync_directory(self._draft))
        self._check()
        self._report.aliases = [dict(names) for names in contents.aliases]
        return self._report

    def _add(self, index: int, shard: Shard) -> None:
        """Let a shard of a model wait for the next file of its kind, or begin that file."""
        self._attempt(partial(check_shard, shard))
        names = self._parameters[index] if self._parameters and not shard.state else ()
        if shard.name in names and not is_finite(shard.tensor):
            self._report.finite = False
        kind, more = OPTIMIZER if shard.state else WEIGHTS, shard.tensor.nbytes
        batch = self._batches[index, kind]
        too_fresh = shard.fresh and batch.fresh_bytes + more > FRESH_BYTES
        if too_fresh or batch.bytes + more > FILE_BYTES:
            self._flush(index, kind)
        batch.shards.append(shard)
        batch.bytes += more
        batch.fresh_bytes += more if shard.fresh else 0

    def _flush(self, index: int, kind: str) -> None:
        """Write the shards of a kind that wait as its next file, and forget them."""
        batch = self._batches[index, kind]
        if not batch.shards:
            return
        rank = f"{self._world.rank:05d}-of-{self._world.size:05d}"
        more = f"-{batch.files}" if batch.files else ""
        name = f"model-{index}-{kind}-{rank}{more}.safetensors"
        tensors: dict[str, Tensor] = {}
        for shard in batch.shards:
            key = _key(shard, tensors)
            tensors[key] = shard.tensor
            part = shard.part
            saved = SavedPart(name, key, part.offsets, part.sizes, part.flat)
            dtype = DTYPES.get(shard.tensor.dtype, "")  # "" never gets far: writing it fails
            self._written[index].append(
                SavedTensor(shard.name, shard.state, dtype, tuple(shard.shape), (saved,))
            )
        self._write_file(name, tensors)
        batch.shards, batch.bytes, batch.fresh_bytes = [], 0, 0
        batch.files += 1

    def _write_file(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.needed += sum(tensor.nbytes for tensor in tensors.values())

        def work() -> None:
            self._report.files[name] = write_tensors(self._draft / name, tensors)

        self._attempt(work)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do a piece of work unless an earlier one failed."""
        if self._failure is None:
            try:
                work()
            except Exception as error:
                self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise CheckpointError(self._explain(self._failure)) from self._failure

    def _explain(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return explain(error)
        text = f"{explain(error)}; this rank's files need {self.needed} bytes"
        if self._draft.is_dir():
            return f"{text}, {shutil.disk_usage(self._draft).free} bytes are free"
        here = self._world.hosts[self._world.rank]
        if here == self._world.hosts[0]:
            return f"{text}; its folder is gone: if another run saves here, take one folder each"
        return (
            f"{text}; {here} does not see the directory that rank 0 made: "
            "a checkpoint needs a file system that all hosts share"
        )


def _check_visible(draft: Path, reports: Sequence[Report]) -> None:
    files = [entry for report in reports for entry in report.files.items()]
    for name, record in files:
        path = draft / name
        found = path.stat().st_size if path.exists() else None
        if found != record.size:
            raise CheckpointError(
                f"expected {record.size} bytes at {path}, rank 0 finds {found}; a checkpoint needs "
                "a file system that all hosts share"
            )


def _key(shard: Shard, taken: Mapping[str, Tensor]) -> str:
    """Return the tensor's key in its file: the name alone where that is possible."""
    plain = f"{shard.state}/{shard.name}" if shard.state else shard.name
    key, number = plain, 1
    while key in taken or key == "__metadata__":  # the format reserves this one
        key, number = f"{plain}#{number}", number + 1
    return key


# --- in the background ---


logger = get_logger(__name__)


@dataclass(eq=False)
class StagingBuffers:
    """Host memory for the copies of one save, which the next save uses again.

    The system fills fresh memory with zeros before it is written to, which takes twice as long as
    the copy itself.
    """

    _used: list[Tensor] = field(default_factory=list)
    _free: defaultdict[tuple[torch.dtype, torch.Size], list[Tensor]] = field(
        default_factory=partial(defaultdict, list)
    )
    _filling: threading.Thread | None = None

    def reserve(self, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        """Make the buffers of the first save before it; a thread has them filled meanwhile.

        Does nothing where a save has left buffers already.

        Args:
            kinds: dtype and shape of each tensor of that save.

        Raises:
            RuntimeError: there is no memory.
        """
        if self._used:
            return
        self._used = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
        self._filling = threading.Thread(
            target=_fill, args=(list(self._used),), name="drivetrain-staging", daemon=False
        )
        self._filling.start()

    @contextmanager
    def copying(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Context for the copies of a save, in buffers of the last one, which is complete.

        Yields a function from a tensor to a copy on the CPU. Buffers that do not fit are let go of;
        all of them after an error, which may be that there is no memory.
        """
        self.wait_until_filled()
        for buffer in self._used:
            self._free[buffer.dtype, buffer.shape].append(buffer)
        self._used.clear()
        try:
            yield self._copy
        except BaseException:
            self._used.clear()
            raise
        finally:
            self._free.clear()

    def _copy(self, tensor: Tensor) -> Tensor:
        fitting = self._free[tensor.dtype, tensor.shape]
        buffer = fitting.pop() if fitting else torch.empty_like(tensor, device="cpu")
        self._used.append(buffer)
        return buffer.copy_(tensor.detach())

    def wait_until_filled(self) -> None:
        """Return when no thread writes into the buffers any more."""
        if self._filling is not None:
            self._filling.join()
            self._filling = None


def _fill(buffers: Sequence[Tensor]) -> None:
    """Write zeros into memory; Python's lock is free meanwhile, and no other thread helps."""
    for buffer in buffers:
        ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)


@dataclass(eq=False)
class Background:
    """The save that is being finished in the background, of all ranks together.

    Attributes:
        world: the ranks.
        buffers: of the copies that are written.
    """

    world: World
    buffers: StagingBuffers = field(default_factory=StagingBuffers)
    _group: Group = None
    _thread: threading.Thread | None = None
    _failure: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank; others may be a little ahead or behind."""
        return self._thread is not None and self._thread.is_alive()

    def group(self) -> Group:
        """Return the gloo group of the threads, while none runs. Collective: made when needed."""
        if self._group is None and self.world.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self.world.timeout)
        return self._group

    def start(self, finish: Callable[[Group], None]) -> None:
        """Run the rest of a save in a thread. Collective: the first call makes the group."""
        self.wait()
        self.group()
        self._thread = threading.Thread(
            target=self._run, args=(finish,), name="drivetrain-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the save is complete; at once when there is none.

        Raises:
            CheckpointError: the save failed; on every rank, and only once.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait, and let go of the group; a later save makes another one."""
        try:
            self.wait()
        finally:
            self.buffers.wait_until_filled()
            self.buffers = StagingBuffers()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _run(self, finish: Callable[[Group], None]) -> None:
        try:
            finish(self._group)
        except Exception as error:  # raised by the next wait(); a script may never come to one
            logger.error("a save in the background failed: %s", error)
            self._failure = error
