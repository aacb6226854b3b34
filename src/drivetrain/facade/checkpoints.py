"""Saving and resuming as the script sees it: the whole state of a run, complete or not at all.

Checkpoints are found, and loaded as a whole: refusals come before any change. State of registered
objects is stored as tensors and plain values, or in bytes that a codec of the script writes and
reads.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.commit import Group, check_same, share, together
from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.loading import CheckpointReader, open_checkpoint
from drivetrain.checkpoint.saving import Background, Save
from drivetrain.compression.automatic import Sender, resume_links, saved_choice
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.exchange import FiniteCheck
from drivetrain.facade.prepared import PreparedModel, RunState, check_count
from drivetrain.log import get_logger
from drivetrain.model.modules import persistent_buffers
from drivetrain.runtime import rng
from drivetrain.shards import Shard

if TYPE_CHECKING:
    from drivetrain.checkpoint.local import MemoryCheckpoints

logger = get_logger(__name__)

T = TypeVar("T")

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]

NewerElsewhere = Callable[[int], CheckpointReader | None]
"""Opens a checkpoint of so many optimizer steps or more that is not in the run's folder, if any."""


@dataclass(frozen=True, slots=True)
class Registered:
    """An object with ``state_dict()`` and ``load_state_dict()``, and perhaps a codec.

    Attributes:
        item: the object.
        encode: makes bytes of its state; None stores tensors and plain values.
        decode: makes the state of these bytes.
    """

    item: Any
    encode: Encode | None = None
    decode: Decode | None = None

    def encoded(self) -> bytes:
        """Return the state as the codec writes it, which must be bytes."""
        data = self.encode(self.item.state_dict()) if self.encode is not None else None
        if not isinstance(data, bytes):
            raise CheckpointError(
                f"expected encode() to return bytes for the state of {type(self.item).__name__}, "
                f"found {type(data).__name__}"
            )
        return data


@dataclass(eq=False)
class RunFolder:
    """The checkpoints of a run, with automatic names or with names of the script.

    Every method but ``add`` is collective: rank 0 looks, and shares the answer.

    Attributes:
        state: of the run, with the folder of automatic names.
        goes_on: whether the run is the one that saved under automatic names before.
    """

    state: RunState
    goes_on: bool = False
    _own: list[Path] = field(default_factory=list)

    def add(self, directory: Path) -> None:
        """Remember a checkpoint that the run has saved, or that the script has named to load."""
        self._own = [directory, *(each for each in self._own if each != directory)]

    def next(self) -> Path:
        """Return the next automatic name, in a folder without remains of killed saves."""
        root = self._root

        def name() -> str:
            commit.sweep(root)
            return commit.next_name(root)

        directory: Path = root / self._asked(f"save in {root}", name, str)
        self.state.project.iteration = int(directory.name.rpartition("_")[2])
        return directory

    def holds(self, directory: str | Path | None) -> bool:
        """Whether there is a checkpoint, whole or not; None: one of any automatic name."""
        if directory is None:
            root = self._root
            return self._asked(f"look into {root}", lambda: bool(commit.newest_first(root)), bool)
        target = Path(directory).resolve()
        return self._asked(f"look for {target}", lambda: commit.find(target) is not None, bool)

    def open(
        self, directory: str | Path | None, verify: str, newer: NewerElsewhere | None = None
    ) -> CheckpointReader:
        """Open a checkpoint; None: the newest of an automatic name that is whole and not damaged.

        Args:
            directory: of the checkpoint.
            verify: as for ``open_checkpoint``.
            newer: is asked before each one, and after the last, with the steps to be reached: those
                of the newest that is left and tells, else -1.
        """
        if directory is not None:
            return self._open_first([Path(directory)], verify, newer)
        root = self._root

        def names() -> list[str]:
            found = [path.name for path in commit.newest_first(root)]
            if found:
                return found
            raise CheckpointError(
                f"expected a checkpoint named checkpoint_NUMBER in {root}, found no folder of such "
                "a name; save one first or name the directory to load"
            )

        known = self._asked(f"load from {root}", names, list[str])
        reader = self._open_first([root / name for name in known], verify, newer)
        self.goes_on = True
        return reader

    def open_finite(self) -> CheckpointReader:
        """Open the newest checkpoint of this run whose weights are finite.

        Raises:
            CheckpointError: there is none.
        """

        def paths() -> list[str]:
            root = self.state.project.checkpoints if self.goes_on else None
            automatic = commit.complete(root) if root else []
            found = [path for path in (*self._own, *automatic) if commit.is_finite(path)]
            return [str(path) for path in sorted(found, key=lambda path: -path.stat().st_mtime)]

        found = list(map(Path, self._asked("go back", paths, list[str])))
        if not found:
            raise CheckpointError(
                "cannot go back, as on_nonfinite: rollback says: expected a checkpoint of this "
                "run with finite weights, found none; save one before, or take on_nonfinite: stop"
            )
        return self._open_first(found, "full")

    def _open_first(
        self, paths: Sequence[Path], verify: str, newer: NewerElsewhere | None = None
    ) -> CheckpointReader:
        """Open the first checkpoint that is not damaged, or a newer one of elsewhere."""
        failures: list[CheckpointError] = []
        for place in range(len(paths) + 1):
            left = paths[place:]
            reader = newer(self._steps(left)) if newer is not None else None
            if reader is None and left:
                try:
                    reader = open_checkpoint(left[0], self.state.world, verify=verify)
                except CheckpointError as error:  # the same on every rank
                    failures.append(error)
            if reader is not None:
                for failure in failures:
                    logger.warning(f"{failure}; going on from the one before, {reader.directory}")
                return reader
        raise failures[0]

    def _steps(self, paths: Sequence[Path]) -> int:
        """Return the optimizer steps in the first checkpoint that tells; -1 if none does."""

        def read() -> int:
            for path in paths:
                with suppress(CheckpointError):
                    return commit.saved_steps(path.resolve())
            return -1

        return self._asked("look for the newest checkpoint", read, int)

    @property
    def _root(self) -> Path:
        """The folder of automatic names."""
        root = self.state.project.checkpoints
        if root is None:
            raise UsageError(
                "expected a directory, found none; pass one, or give the Accelerator a "
                "project_dir and automatic_checkpoint_naming=True"
            )
        return root

    def _asked(self, doing: str, work: Callable[[], T], kind: type[T]) -> T:
        """Return the result of rank 0."""
        world = self.state.world
        found = together(world, doing, lambda: work() if world.is_main else None)
        return share(world, found, kind)  # type: ignore[return-value]  # of rank 0


class WindowStart:
    """The state that a window began with; a run that goes on from inside it begins it again.

    Args:
        state: of the run, with its models and loaders.
        window: number of the window; 0 for the state of now.
    """

    def __init__(self, state: RunState, window: int) -> None:
        self._loaders = state.loaders
        self._window = window
        marks = (loader.mark_of(window) for loader in state.loaders)
        first = min(filter(None, marks), key=lambda mark: mark.at, default=None)
        self.random = rng.Snapshot() if first is None else first.random
        self.progress = [dict(entry.strategy.state.progress()) for entry in state.models]

    def loaders(self) -> list[dict[str, Any]]:
        """Return the states of loaders before the window's first batches."""
        marks = [(loader, loader.mark_of(self._window)) for loader in self._loaders]
        return [mark.state if mark else loader.state_dict() for loader, mark in marks]


@dataclass(eq=False)
class SavedState:
    """The state of everything that was prepared and registered, out of a checkpoint or into one.

    Attributes:
        state: of the run.
        finite: forgets what was found in other weights.
        registered: further objects.
        begun: the start of the window that was begun last.
    """

    state: RunState
    finite: FiniteCheck
    registered: list[Registered] = field(default_factory=list)
    begun: WindowStart | None = None

    def contents(self, saved: Mapping[int, bool], iteration: int) -> Contents:
        """Return the tensors and the state that this rank saves.

        Args:
            saved: by index of each model to save, whether its weights are saved.
            iteration: number of the newest checkpoint in storage, this one included.
        """
        entries = [self.state.models[i] for i in saved]
        # A window under way begins again in a run that goes on from here.
        begun = self.begun if self.state.window.is_unfinished else None
        begun = begun or WindowStart(self.state, 0)
        encoded = {
            _file_name(i): registered.encoded()
            for i, registered in enumerate(self.registered)
            if registered.encode is not None and self.state.world.is_main
        }
        return Contents(
            models=[shards_of(self.state.models[i], weights=whole) for i, whole in saved.items()],
            scalars=[entry.scalars() for entry in entries],
            aliases=[entry.aliases() for entry in entries],
            state=self._facts(entries)
            | {
                "progress": [begun.progress[i] for i in saved],
                "loaders": begun.loaders(),
                "iteration": iteration,
                "without_weights": {
                    place: i for place, (i, whole) in enumerate(saved.items()) if not whole
                },
            },
            rank_state=begun.random.packed(),
            encoded=encoded,
            parameters=[frozenset(entry.names.values()) for entry in entries],
        )

    def _facts(self, entries: Sequence[PreparedModel]) -> dict[str, Any]:
        return {
            "step": self.state.step,
            **self.state.resumption.facts(self.state.window.num_steps),
            "samples": self.state.samples_per_step(self.state.window.num_steps),
            "groups": [entry.param_groups() for entry in entries],
            "links": [saved_choice(entry.strategy.run.links) for entry in entries],
            "schedulers": [scheduler.state_dict() for scheduler in self.state.schedulers],
            "scaler": self.state.scaler.state_dict(),
            "steps": [optimizer.steps for optimizer in self.state.optimizers],
            "objects": [
                None if registered.encode is not None else registered.item.state_dict()
                for registered in self.registered
            ],
            "encoded": {
                i: _file_name(i)
                for i, registered in enumerate(self.registered)
                if registered.encode is not None
            },
        }

    def load(
        self,
        reader: CheckpointReader,
        left: Sequence[PreparedModel],
        *,
        rewinds: bool = True,
    ) -> None:
        """Load everything; nothing has changed when the checkpoint does not fit. Collective.

        Args:
            reader: the open checkpoint.
            left: the models that hooks of ``load_state`` have left in.
            rewinds: whether loaders and random numbers go back, too.

        Raises:
            CheckpointError: on every rank.
        """
        tried = partial(together, self.state.world, f"load {reader.directory}")
        loaded = tried(partial(_owners, reader, self.state.models, left))
        for i, entry in enumerate(loaded):
            reader.model(i).partial = entry not in left
        states = tried(partial(self._check, reader, loaded))
        for i, entry in enumerate(loaded):
            saved = reader.model(i)
            tried(partial(_take_links, entry, reader.state, i))
            tried(partial(entry.strategy.state.load, saved))
            entry.load_param_groups(reader.state["groups"][i])
            changed = entry.converted(saved, self.state.world)
            if changed:
                logger.warning(
                    f"{reader.directory}: weights of model {i} were converted: {changed}"
                )
        tried(partial(self._load_rest, reader.state, loaded, states, rewinds=rewinds))
        if rewinds:
            tried(partial(self._load_rng, reader))
        samples = self.state.samples_per_step(self.state.window.num_steps)
        before = reader.state.get("samples", 0)
        if samples and before and samples != before:
            logger.announce(f"{samples} samples per step; the saved run had {before}")

    def _check(self, reader: CheckpointReader, loaded: Sequence[PreparedModel]) -> list[Any]:
        """Compare everything with the checkpoint; return the states of the registered objects."""
        state = reader.state
        for i, entry in enumerate(loaded):
            entry.strategy.state.check(reader.model(i))
            entry.check_param_groups(state["groups"][i])
        check_count("prepared schedulers", len(self.state.schedulers), len(state["schedulers"]))
        check_count("prepared loaders", len(self.state.loaders), len(state["loaders"]))
        for loader, saved in zip(self.state.loaders, state["loaders"], strict=True):
            loader.check_state(saved)
        check_count("registered objects", len(self.registered), len(state["objects"]))
        return [
            _state_of(registered, index, reader, plain)
            for index, (registered, plain) in enumerate(
                zip(self.registered, state["objects"], strict=True)
            )
        ]

    def _load_rest(
        self,
        state: Mapping[str, Any],
        loaded: Sequence[PreparedModel],
        registered: Sequence[Any],
        *,
        rewinds: bool,
    ) -> None:
        """Load all state that is not of a model."""
        for scheduler, saved in zip(self.state.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if rewinds:
            for loader, saved in zip(self.state.loaders, state["loaders"], strict=True):
                loader.load_state_dict(saved)
        for each, saved in zip(self.registered, registered, strict=True):
            each.item.load_state_dict(saved)
        counts = zip(self.state.optimizers, state.get("steps", ()), strict=False)
        for optimizer, steps in counts:
            optimizer.steps = steps
        self.state.scaler.load_state_dict(state["scaler"])
        self.finite.forget()
        self.state.step = state["step"]
        self.state.window.forget()
        for entry in self.state.models:
            entry.forget_gradients()
        for entry, progress in zip(loaded, state.get("progress", ()), strict=False):
            entry.strategy.state.resume(progress)

    def _load_rng(self, reader: CheckpointReader) -> None:
        """Restore this rank's generators; a rank that was not there gets a seed of its own."""
        mine = reader.rank_state(self.state.world.rank)
        if mine is not None:
            rng.restore(mine)
            return
        first = reader.rank_state(0) or {}
        digest = hashlib.sha256()
        for name in sorted(first):
            digest.update(bytes(first[name].flatten().view(torch.uint8).tolist()))
        rng.set_seed(
            (int.from_bytes(digest.digest()[:4], "little") + self.state.world.rank) % 2**32
        )


def _take_links(entry: PreparedModel, state: Mapping[str, Any], index: int) -> None:
    """Let a model go on with the methods for slow links that the saved run has chosen."""
    strategy, choices = entry.strategy, state.get("links", ())
    if index < len(choices):
        sender = Sender(type(strategy), strategy.config, strategy.run.precision)
        links, lines = resume_links(strategy.run.links, sender, choices[index])
        if links is not strategy.run.links:
            strategy.take_links(links)
        for line in lines:
            logger.announce(line)


def _owners(
    reader: CheckpointReader,
    prepared: Sequence[PreparedModel],
    left: Sequence[PreparedModel],
) -> list[PreparedModel]:
    """Return the prepared model of each saved model.

    Weights that a hook took out of a checkpoint are loaded by a hook: such a model is recorded by
    its place in ``prepared``. The others are those that load hooks ``left``, in the same order.
    """
    without = reader.state.get("without_weights", {})
    most = 1 + max(without.values(), default=-1)
    if most > len(prepared):
        check_count("prepared models", len(prepared), most)
    owners = [prepared[i] for i in without.values()]
    unpopped = [entry for entry in left if entry in owners]
    if unpopped:
        raise CheckpointError(
            f"expected a hook of load_state to load the weights of "
            f"{type(unpopped[0].model).__name__} and to take it out of models, as a hook of "
            "save_state took its weights out, found none; register_load_state_pre_hook()"
        )
    check_count("prepared models", len(left) + len(owners), reader.models)
    rest = iter(left)
    return [prepared[without[i]] if i in without else next(rest) for i in range(reader.models)]


def _state_of(registered: Registered, index: int, reader: CheckpointReader, plain: Any) -> Any:
    """Return the saved state of a registered object; an encoded state needs a codec."""
    encoded = reader.state.get("encoded", {})
    if index not in encoded:
        return plain
    if registered.decode is None:
        raise CheckpointError(
            f"expected registered object {index} ({type(registered.item).__name__}) to "
            f"have a codec, found none; its state in {encoded[index]} is read only with "
            "the one it was written with: register_for_checkpointing(object, encode=..., "
            "decode=...)"
        )
    return registered.decode(reader.encoded(encoded[index]))


# --- what a checkpoint holds: shards of the models, and the state of all the rest ---


def shards_of(entry: PreparedModel, *, weights: bool) -> Iterator[Shard]:
    """Yield a model's shards of this rank: all, or those of its optimizers' state alone."""
    for shard in entry.strategy.state.shards():
        if weights or shard.state:
            yield shard


def _file_name(index: int) -> str:
    """Return the file of one object's encoded state."""
    return f"object-{index:05d}.encoded"


# --- saving and resuming ---


@dataclass(eq=False)
class RunCheckpoints:
    """The checkpoints of one Accelerator.

    Attributes:
        state: of the run.
        finite: looks at losses and gradients; a run that has found something saves nothing.
        saved: the state of everything in a checkpoint.
        background: the save that is being finished while training goes on.
        save_hooks: are called ``hook(models, weights, output_dir)`` before anything is written.
        load_hooks: are called ``hook(models, input_dir)`` before each load.
    """

    state: RunState
    finite: FiniteCheck
    saved: SavedState = field(init=False)
    background: Background = field(init=False)
    _folder: RunFolder = field(init=False)
    _memory: "MemoryCheckpoints | None" = None
    save_hooks: OrderedDict[int, Callable[..., Any]] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, Callable[..., Any]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        """Look for the memory of the hosts, where the run has checkpoints there."""
        state = self.state
        self.saved, self._folder = SavedState(state, self.finite), RunFolder(state)
        self.background = Background(state.world)
        if state.memory is not None:
            from drivetrain.checkpoint import local  # no other run needs it

            every = state.config.run.checkpoint.local_every
            self._memory = local.MemoryCheckpoints(
                state.memory, every, state.world, self.background
            )

    def register(
        self, objects: Sequence[Any], encode: Encode | None, decode: Decode | None
    ) -> None:
        """Keep the state of these objects in every checkpoint."""
        _check_registration(objects, encode, decode)
        self.saved.registered.extend(Registered(item, encode, decode) for item in objects)

    def save(self, output_dir: str | Path | None, *, overwrite: bool, wait: bool) -> str:
        """Save the whole state, at once or in the background; see ``save_state``. Collective."""
        self._check_same_step()
        self.finite.before_save()
        self.finite.returns = 0
        self.state.resumption.before_save()
        automatic = self.state.project.automatic_checkpoint_naming
        directory = self._folder.next() if automatic else _given(output_dir)
        doing = f"save {directory}"
        save = Save(directory, self.state.world, overwrite=overwrite)
        with save.abandoned_on_failure():
            chosen = together(self.state.world, doing, partial(self._entries_to_save, save.draft))
            # Hooks often take weights out on rank 0 alone.
            entries = share(self.state.world, chosen, dict[int, bool])
            contents = together(
                self.state.world,
                doing,
                partial(self.saved.contents, entries, self.state.project.iteration),
            )
        old = (directory.parent, self.state.project.total_limit) if automatic else (directory, None)
        if wait:
            self._finish(save, contents, old)
        else:
            with self.background.buffers.copying() as copy:
                staged = save.stage(contents, copy)
            logger.info(f"{doing} in the background from {staged.shard_bytes} bytes of host memory")
            self.background.start(partial(self._finish, save, staged, old))
        if automatic:
            self.state.project.iteration += 1
        self._folder.add(directory)
        return str(directory)

    def save_in_memory(self) -> None:
        """Save the whole state in the memory of the hosts, if that is due now. Collective.

        A failure is a warning: the run goes on, and has the checkpoints before and in storage. Only
        the first save of a run must begin, since the setup of a run is wrong if it cannot.

        Raises:
            CheckpointError: the first save of the run cannot be begun, or the last save in storage
                has failed.
            UsageError: hooks of ``save_state`` are registered.
        """
        steps = self.state.steps
        if self._memory is None or not self._memory.is_due(steps):
            return
        if self.save_hooks:
            raise UsageError(
                "expected no hooks of save_state with checkpoint.local: memory, found "
                f"{len(self.save_hooks)}; their files go to storage alone: register objects with "
                "register_for_checkpointing(), or leave checkpoint.local out"
            )
        if share(self.state.world, self.background.is_busy, bool):
            return  # a save in storage goes first; a later step is as good
        self.background.wait()
        self._check_same_step()
        self.finite.before_save()
        self.state.resumption.before_save()
        entries = dict.fromkeys(range(len(self.state.models)), True)
        collect = partial(self.saved.contents, entries, self.state.project.iteration - 1)
        self._memory.save(steps, collect, partial(self.state.resumption.saved, memory=True))

    def resume(self, input_dir: str | Path | None, *, verify: str) -> str:
        """Load the newest whole checkpoint, out of memory or storage; "" without any. Collective.

        Of two that are as new, the one in memory is taken.
        """
        self.state.resumption.asked = True
        memory, reader = self._memory, None
        newer = partial(memory.open_newest, hashed=verify != "size") if memory is not None else None
        anew = share(self.state.world, self.state.resumption.begins_anew, bool)
        has_folder = input_dir is not None or self.state.project.checkpoints is not None
        looks = memory is None or has_folder  # a run may save in memory alone
        if looks and not anew and self._folder.holds(input_dir):
            reader = self._folder.open(input_dir, verify, newer)
        elif newer is not None:
            reader = newer(None)
        loaded = self._take(reader, input_dir) if reader is not None else ""
        if memory is not None and (reader is None or not memory.holds(reader)):
            memory.clear()
            if reader is not None:
                logger.announce(
                    f"going on from step {self.state.steps}, out of storage: the memory of the "
                    "hosts has no whole checkpoint that is as new"
                )
        return loaded

    def load(self, input_dir: str | Path | None, *, verify: str) -> str:
        """Load the whole state of a run; see ``load_state``. Collective."""
        self.state.resumption.asked = True
        reader = self._folder.open(input_dir, verify)
        goes_back = self.state.steps > 0  # before them a script may load what it begins with
        given = self._take(reader, input_dir)
        if goes_back:
            self._forget_memory()
        return given

    def _take(self, reader: CheckpointReader, input_dir: str | Path | None) -> str:
        """Load the whole state of a run out of an open checkpoint; return its directory."""
        in_memory = self._memory is not None and self._memory.holds(reader)
        named = None if input_dir is None or in_memory else Path(input_dir)
        given = str(named or reader.directory)
        with reader:
            self.saved.load(reader, self._call_load_hooks(given))
            self.state.project.iteration = reader.state["iteration"] + 1
        if named is not None:
            self._folder.add(named)
        self._folder.goes_on |= in_memory
        return given

    def _forget_memory(self) -> None:
        """Remove the checkpoints in memory: the run goes on from another one, or begins."""
        if self._memory is not None:
            self._memory.clear()

    def _call_load_hooks(self, directory: str) -> list[PreparedModel]:
        """Let hooks load weights themselves; return the models that are left."""
        models = [entry.model for entry in self.state.models]

        def call() -> None:
            for hook in self.load_hooks.values():
                hook(models, directory)

        together(self.state.world, f"load {directory}", call)
        return [e for e in self.state.models if any(e.model is model for model in models)]

    def go_back(self) -> str:
        """Load the newest finite checkpoint of this run; loaders and random numbers go on.

        Collective; returns the directory.

        Raises:
            CheckpointError: there is none.
        """
        self.background.wait()
        reader = self._folder.open_finite()
        with reader:
            left = self._call_load_hooks(str(reader.directory))
            self.saved.load(reader, left, rewinds=False)
        self._forget_memory()
        return str(reader.directory)

    def _check_same_step(self) -> None:
        """Raise on every rank when they do not stand between the same two micro-batches."""
        window = self.state.window
        within = window.micro_batch if window.is_unfinished else 0
        if within:
            self._tell_of_window(within)
        steps = [optimizer.steps for optimizer in self.state.optimizers]
        facts = {
            "the steps that the optimizers have taken": steps,
            "the micro-batches of the accumulation window": within,
        }
        check_same(self.state.world, "save a checkpoint", facts)

    def _tell_of_window(self, within: int) -> None:
        """Say what a run will do that goes on from inside an accumulation window."""
        tensors = (persistent_buffers(entry.model).items() for entry in self.state.models)
        written = (name for each in tensors for name, one in each if one.is_floating_point())
        text = (
            "save_state() inside an accumulation window: a run that goes on from there begins the "
            f"window again, with the first of its {within} micro-batches so far"
        )
        if buffer := next(written, ""):
            logger.warning(
                f"{text}; buffers that a forward writes (perhaps {buffer!r}) are saved as they are "
                "now, and are written again then: save after a step"
            )
        else:
            logger.info(text)

    def _entries_to_save(self, draft: Path) -> dict[int, bool]:
        """Let hooks write into the draft, and take out weights: from one list or from both.

        Rank 0's lists decide for all ranks.

        Returns:
            By index of each model to save, whether its weights are saved; the state of its
            optimizers is saved even so.
        """
        entries = list(self.state.models)
        if not self.save_hooks:
            return dict.fromkeys(range(len(entries)), True)
        models = [entry.model for entry in entries]
        weights = [model.state_dict() for model in models]
        given = list(zip(entries, weights, strict=True))
        for hook in self.save_hooks.values():
            hook(models, weights, str(draft))
        left = [
            any(entry.model is model for model in models) and any(values is one for one in weights)
            for entry, values in given
        ]
        return {i: left[i] for i, entry in enumerate(entries) if left[i] or entry.optimizers}

    def _finish(
        self, save: Save, contents: Contents, old: tuple[Path, int | None], group: Group = None
    ) -> None:
        """Complete a save, and then remove the oldest checkpoints of a folder beyond a limit."""
        save.finish(contents, group)
        root, limit = old

        def conclude() -> None:
            self.state.resumption.saved(contents.state)
            if not commit.is_finite(save.target):
                logger.warning(
                    f"{save.target} holds weights that are infinite or NaN; the newest checkpoint "
                    "without any is kept, whatever total_limit says"
                )
            if limit is not None:
                commit.prune(root, limit)

        work = conclude if self.state.world.is_main else lambda: None
        together(self.state.world, f"conclude {save.target}, which is saved", work, group)


def add_hook(
    hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]
) -> RemovableHandle:
    """Add a hook to others; return torch's handle, which removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def check_safe(safe_serialization: bool) -> None:
    """Refuse to write pickles."""
    if not safe_serialization:
        raise UsageError(
            "expected safe_serialization=True, found False; checkpoints hold no pickles, use "
            "torch.save yourself where you need one"
        )


def _given(output_dir: str | Path | None) -> Path:
    if output_dir is None:
        raise UsageError(
            "expected a directory for save_state(), found none; pass one, or set "
            "automatic_checkpoint_naming in the ProjectConfiguration"
        )
    return Path(output_dir)


def _check_registration(
    objects: Sequence[Any], encode: Encode | None, decode: Decode | None
) -> None:
    """Refuse objects that cannot be kept in a checkpoint, and half a codec."""
    lacking = [
        f"argument {i} ({type(item).__name__})"
        for i, item in enumerate(objects)
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
    ]
    if lacking:
        raise UsageError(
            "expected objects with state_dict() and load_state_dict(), found without: "
            + ", ".join(lacking)
        )
    if (encode is None) != (decode is None):
        found = "encode" if decode is None else "decode"
        raise UsageError(f"expected encode and decode together, found {found} alone; give both")
