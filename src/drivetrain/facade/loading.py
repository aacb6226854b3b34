"""Finds the checkpoints of a run, and loads its whole state: refusals come before any change."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from drivetrain import checkpoint
from drivetrain.checkpoint import CheckpointReader
from drivetrain.checkpoint.agreement import share, together
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.gradients import WindowGradients
from drivetrain.facade.options import ProjectConfiguration
from drivetrain.facade.prepared import PreparedModel, PreparedObjects, check_count
from drivetrain.links.automatic import Sender, resume_links
from drivetrain.log import get_logger
from drivetrain.runtime import rng
from drivetrain.runtime.world import World

logger = get_logger(__name__)

T = TypeVar("T")

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


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


class RunFolder:
    """The checkpoints of a run, with automatic names or with names of the script.

    Every method but ``add`` is collective.

    Args:
        world: rank 0 looks, and shares the answer.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._named: list[Path] = []

    def add(self, directory: Path) -> None:
        """Remember a checkpoint that the script has named."""
        self._named = [directory, *(each for each in self._named if each != directory)]

    def next(self, project: ProjectConfiguration) -> Path:
        """Return the next automatic name, in a folder without remains of killed saves."""
        root = _root(project)

        def name() -> str:
            checkpoint.sweep(root)
            return checkpoint.next_name(root)

        directory: Path = root / self._asked(f"save in {root}", name, str)
        project.iteration = int(directory.name.rpartition("_")[2])
        return directory

    def holds(self, project: ProjectConfiguration, directory: str | Path | None) -> bool:
        """Whether there is a checkpoint, damaged or not; None: one of any automatic name."""
        if directory is None:
            root = _root(project)
            return self._asked(f"look into {root}", lambda: bool(checkpoint.complete(root)), bool)
        target = Path(directory).resolve()
        return self._asked(f"look for {target}", lambda: checkpoint.find(target) is not None, bool)

    def steps(self, project: ProjectConfiguration, directory: str | Path | None) -> int:
        """Return the optimizer steps in a checkpoint; None: in the newest of an automatic name.

        -1 where none can be read: then any other checkpoint is newer.
        """

        def read() -> int:
            paths = (
                checkpoint.complete(_root(project))
                if directory is None
                else [Path(directory).resolve()]
            )
            for path in paths:
                with suppress(CheckpointError):
                    return checkpoint.saved_steps(path)
            return -1

        return self._asked("look for the newest checkpoint", read, int)

    def open_newest(self, project: ProjectConfiguration, verify: str) -> CheckpointReader:
        """Open the newest checkpoint of an automatic name that is not damaged."""
        root = _root(project)

        def names() -> list[str]:
            found = [checkpoint.latest(root), *checkpoint.complete(root)[1:]]
            return [path.name for path in found]

        known = self._asked(f"load from {root}", names, list[str])
        return self._open_first([root / name for name in known], verify)

    def open_finite(self, project: ProjectConfiguration) -> CheckpointReader:
        """Open the newest checkpoint whose weights are finite.

        Raises:
            CheckpointError: there is none.
        """

        def paths() -> list[str]:
            automatic = checkpoint.complete(_root(project)) if project.project_dir else []
            found = [path for path in (*self._named, *automatic) if checkpoint.is_finite(path)]
            return [str(path) for path in sorted(found, key=lambda path: -path.stat().st_mtime)]

        found = list(map(Path, self._asked("go back", paths, list[str])))
        if not found:
            raise CheckpointError(
                "cannot go back, as on_nonfinite: rollback says: expected a checkpoint of this "
                "run with finite weights, found none; save one before, or take on_nonfinite: stop"
            )
        return self._open_first(found, "full")

    def _open_first(self, paths: Sequence[Path], verify: str) -> CheckpointReader:
        """Open the first checkpoint that is not damaged."""
        failures: list[CheckpointError] = []
        for path in paths:
            try:
                reader = checkpoint.open_checkpoint(path, self._world, verify=verify)
            except CheckpointError as error:  # the same on every rank
                failures.append(error)
                continue
            for failure in failures:
                logger.warning(f"{failure}; going on from the one before, {path}")
            return reader
        raise failures[0]

    def _asked(self, doing: str, work: Callable[[], T], kind: type[T]) -> T:
        """Return the result of rank 0."""
        world = self._world
        found = together(world, doing, lambda: work() if world.is_main else None)
        return share(world, found, kind)  # type: ignore[return-value]  # of rank 0


def _root(project: ProjectConfiguration) -> Path:
    """Return the folder of automatic names."""
    root = project.checkpoints
    if root is None:
        raise UsageError(
            "expected a directory, found none; pass one, or give the Accelerator a "
            "project_dir and automatic_checkpoint_naming=True"
        )
    return root


class StateLoading:
    """Gives everything that was prepared and registered the state of a checkpoint.

    Args:
        prepared: models, optimizers, schedulers and loaders.
        gradients: for the loss scale, and the place in the accumulation window.
        registered: further objects.
        world: this process among all processes.
    """

    def __init__(
        self,
        prepared: PreparedObjects,
        gradients: WindowGradients,
        registered: Sequence[Registered],
        world: World,
    ) -> None:
        self._prepared = prepared
        self._gradients = gradients
        self._registered = registered
        self._world = world

    def load(
        self,
        reader: checkpoint.CheckpointReader,
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
        doing = f"load {reader.directory}"
        loaded = together(self._world, doing, partial(_owners, reader, self._prepared.models, left))
        for i, entry in enumerate(loaded):
            reader.model(i).partial = entry not in left
        states = together(self._world, doing, partial(self._check, reader, loaded))
        for i, entry in enumerate(loaded):
            saved = reader.model(i)
            together(self._world, doing, partial(_take_links, entry, reader.state, i))
            together(self._world, doing, partial(entry.strategy.load, saved))
            entry.load_param_groups(reader.state["groups"][i])
            changed = entry.converted(saved, self._world)
            if changed:
                logger.warning(
                    f"{reader.directory}: weights of model {i} were converted: {changed}"
                )
        rest = partial(self._load_rest, reader.state, loaded, states, rewinds=rewinds)
        together(self._world, doing, rest)
        if rewinds:
            self._load_rng(reader)

    def _check(
        self, reader: checkpoint.CheckpointReader, loaded: Sequence[PreparedModel]
    ) -> list[Any]:
        """Compare everything with the checkpoint; return the states of the registered objects."""
        state = reader.state
        for i, entry in enumerate(loaded):
            entry.strategy.check_load(reader.model(i))
            entry.check_param_groups(state["groups"][i])
        check_count("prepared schedulers", len(self._prepared.schedulers), len(state["schedulers"]))
        check_count("prepared loaders", len(self._prepared.loaders), len(state["loaders"]))
        for loader, saved in zip(self._prepared.loaders, state["loaders"], strict=True):
            loader.check_state(saved)
        check_count("registered objects", len(self._registered), len(state["objects"]))
        return [
            _state_of(registered, index, reader, plain)
            for index, (registered, plain) in enumerate(
                zip(self._registered, state["objects"], strict=True)
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
        for scheduler, saved in zip(self._prepared.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if rewinds:
            for loader, saved in zip(self._prepared.loaders, state["loaders"], strict=True):
                loader.load_state_dict(saved)
        for each, saved in zip(self._registered, registered, strict=True):
            each.item.load_state_dict(saved)
        counts = zip(self._prepared.optimizers, state.get("steps", ()), strict=False)
        for optimizer, steps in counts:
            optimizer.steps = steps
        self._gradients.scaler.load_state_dict(state["scaler"])
        self._gradients.finite.forget()
        self._gradients.step = state["step"]
        self._gradients.state.forget()
        for entry in self._prepared.models:
            entry.forget_gradients()
        for entry, progress in zip(loaded, state.get("progress", ()), strict=False):
            entry.strategy.resume(progress)

    def _load_rng(self, reader: checkpoint.CheckpointReader) -> None:
        """Restore this rank's generators; a rank that was not there gets a seed of its own."""
        mine = reader.rank_state(self._world.rank)
        if mine is not None:
            rng.restore(mine)
            return
        first = reader.rank_state(0) or {}
        digest = hashlib.sha256()
        for name in sorted(first):
            digest.update(bytes(first[name].flatten().view(torch.uint8).tolist()))
        rng.set_seed((int.from_bytes(digest.digest()[:4], "little") + self._world.rank) % 2**32)


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
    reader: checkpoint.CheckpointReader,
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
            f"{type(unpopped[0].module).__name__} and to take it out of models, as a hook of "
            "save_state took its weights out, found none; register_load_state_pre_hook()"
        )
    check_count("prepared models", len(left) + len(owners), reader.models)
    rest = iter(left)
    return [prepared[without[i]] if i in without else next(rest) for i in range(reader.models)]


def _state_of(
    registered: Registered, index: int, reader: checkpoint.CheckpointReader, plain: Any
) -> Any:
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
