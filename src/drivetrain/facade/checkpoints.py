"""Saving and resuming as the script sees it: the whole state of a run, complete or not at all.

State of registered objects is stored as tensors and plain values, or in bytes that a codec of the
script writes and reads.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from drivetrain import checkpoint
from drivetrain.checkpoint.agreement import Group, check_same, share, together
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.gradients import WindowGradients
from drivetrain.facade.options import ProjectConfiguration
from drivetrain.facade.prepared import PreparedModel, PreparedObjects, check_count
from drivetrain.log import get_logger
from drivetrain.runtime import rng
from drivetrain.runtime.world import World
from drivetrain.shards import Shard

logger = get_logger(__name__)

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


class RunCheckpoints:
    """The checkpoints of one Accelerator.

    Args:
        prepared: everything whose state is saved.
        gradients: for the loss scale, and the place in the accumulation window.
        project: where automatically named checkpoints go.
        world: this process among all processes.

    Attributes:
        background: the save that is being finished while training goes on.
    """

    def __init__(
        self,
        prepared: PreparedObjects,
        gradients: WindowGradients,
        project: ProjectConfiguration,
        world: World,
    ) -> None:
        self.project = project
        self._prepared = prepared
        self._gradients = gradients
        self._world = world
        self.background = checkpoint.Background(world)
        self._registered: list[Registered] = []
        self._save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def register(
        self, objects: Sequence[Any], encode: Encode | None, decode: Decode | None
    ) -> None:
        """Keep the state of these objects in every checkpoint."""
        _check_registration(objects, encode, decode)
        self._registered.extend(Registered(item, encode, decode) for item in objects)

    def add_save_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` in each save, before anything is written."""
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def add_load_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before each load."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save(self, output_dir: str | Path | None, *, overwrite: bool, wait: bool) -> str:
        """Save the whole state, at once or in the background; see ``save_state``. Collective."""
        self._check_same_step()
        automatic = self.project.automatic_checkpoint_naming
        directory = self._automatic_directory() if automatic else _given(output_dir)
        doing = f"save {directory}"
        save = checkpoint.Save(directory, self._world, overwrite=overwrite)
        with save.abandoned_on_failure():
            chosen = together(self._world, doing, partial(self._entries_to_save, save.draft))
            entries = share(self._world, chosen)  # hooks often take weights out on rank 0 alone
            contents = together(self._world, doing, partial(self._contents, entries))
        old = (directory.parent, self.project.total_limit) if automatic else (directory, None)
        if wait:
            self._finish(save, contents, *old)
        else:
            staged = save.stage(contents)
            logger.info(f"{doing} in the background from {staged.shard_bytes} bytes of host memory")
            self.background.start(partial(self._finish, save, staged, *old))
        if automatic:
            self.project.iteration += 1
        return str(directory)

    def load(self, input_dir: str | Path | None, *, verify: str) -> str:
        """Load the whole state of a run; see ``load_state``. Collective."""
        directory = self._last_directory() if input_dir is None else Path(input_dir)
        models = [entry.model for entry in self._prepared.models]
        for hook in self._load_hooks.values():
            hook(models, str(directory))
        entries = [e for e in self._prepared.models if any(e.model is model for model in models)]
        doing = f"load {directory}"
        with checkpoint.open_checkpoint(directory, self._world, verify=verify) as reader:
            loaded = _owners(reader, self._prepared.models, entries)
            for i, entry in enumerate(loaded):
                saved = reader.model(i)
                saved.partial = entry not in entries
                together(self._world, doing, partial(entry.strategy.load, saved))
                entry.load_param_groups(reader.state["groups"][i])
                changed = entry.converted(saved, self._world)
                if changed:
                    logger.warning(f"{directory}: weights of model {i} were converted: {changed}")
            together(self._world, doing, partial(self._load_state, reader, loaded))
            self._load_rng(reader)
        return str(directory)

    def _check_same_step(self) -> None:
        """Raise on every rank when they do not stand between the same two micro-batches."""
        window = self._gradients.state
        within = 0 if window.sync_gradients else window.micro_batch
        if within:
            logger.warning(
                "save_state() inside an accumulation window: the gradients of its "
                f"{window.window_length} micro-batches are not in the checkpoint"
            )
        steps = [optimizer.steps for optimizer in self._prepared.optimizers]
        facts = {
            "the steps that the optimizers have taken": steps,
            "the micro-batches of the accumulation window": within,
        }
        check_same(self._world, "save a checkpoint", facts)

    def _entries_to_save(self, draft: Path) -> dict[int, bool]:
        """Let hooks write into the draft, and take out weights: from one list or from both.

        Rank 0's lists decide for all ranks.

        Returns:
            By index of each model to save, whether its weights are saved; the state of its
            optimizers is saved even so.
        """
        entries = list(self._prepared.models)
        if not self._save_hooks:
            return dict.fromkeys(range(len(entries)), True)
        models = [entry.model for entry in entries]
        weights = [model.state_dict() for model in models]
        given = list(zip(entries, weights, strict=True))
        for hook in self._save_hooks.values():
            hook(models, weights, str(draft))
        left = [
            any(entry.model is model for model in models) and any(values is one for one in weights)
            for entry, values in given
        ]
        return {i: left[i] for i, entry in enumerate(entries) if left[i] or entry.optimizers}

    def _contents(self, saved: Mapping[int, bool]) -> checkpoint.Contents:
        entries = [self._prepared.models[i] for i in saved]
        encoded = {
            _file_name(i): registered.encoded()
            for i, registered in enumerate(self._registered)
            if registered.encode is not None and self._world.is_main
        }
        return checkpoint.Contents(
            models=[
                shards_of(self._prepared.models[i], weights=whole) for i, whole in saved.items()
            ],
            scalars=[entry.scalars() for entry in entries],
            aliases=[entry.aliases() for entry in entries],
            state=self._state(entries)
            | {
                "without_weights": {
                    place: i for place, (i, whole) in enumerate(saved.items()) if not whole
                }
            },
            rank_state=rng.capture(),
            encoded=encoded,
        )

    def _finish(
        self,
        save: checkpoint.Save,
        contents: checkpoint.Contents,
        root: Path,
        limit: int | None,
        group: Group = None,
    ) -> None:
        """Complete a save, and then remove the oldest checkpoints beyond the limit."""
        save.finish(contents, group)
        if limit is not None:
            remove = partial(checkpoint.prune, root, limit) if self._world.is_main else list
            together(self._world, f"remove old checkpoints in {root}", remove, group)

    def _automatic_directory(self) -> Path:
        root = self._checkpoint_root()
        name = checkpoint.next_name(root) if self._world.is_main else ""
        directory: Path = root / share(self._world, name)
        self.project.iteration = int(directory.name.rpartition("_")[2])
        return directory

    def _last_directory(self) -> Path:
        root = self._checkpoint_root()
        find = partial(checkpoint.latest, root)
        found = together(self._world, f"load from {root}", find if self._world.is_main else Path)
        return share(self._world, found)

    def _checkpoint_root(self) -> Path:
        folder = self.project.project_dir
        if folder is None:
            raise UsageError(
                "expected a directory, found none; pass one, or give the Accelerator a "
                "project_dir and automatic_checkpoint_naming=True"
            )
        return Path(folder) / "checkpoints"

    def _state(self, entries: Sequence[PreparedModel]) -> dict[str, Any]:
        return {
            "step": self._gradients.step,
            "iteration": self.project.iteration,
            "groups": [entry.param_groups() for entry in entries],
            "progress": [dict(entry.strategy.progress()) for entry in entries],
            "schedulers": [scheduler.state_dict() for scheduler in self._prepared.schedulers],
            "loaders": [loader.state_dict() for loader in self._prepared.loaders],
            "scaler": self._gradients.scaler.state_dict(),
            "steps": [optimizer.steps for optimizer in self._prepared.optimizers],
            "objects": [
                None if registered.encode is not None else registered.item.state_dict()
                for registered in self._registered
            ],
            "encoded": {
                i: _file_name(i)
                for i, registered in enumerate(self._registered)
                if registered.encode is not None
            },
        }

    def _load_state(
        self, reader: checkpoint.CheckpointReader, loaded: Sequence[PreparedModel]
    ) -> None:
        state = reader.state
        kinds: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
            ("prepared schedulers", self._prepared.schedulers, state["schedulers"]),
            ("prepared loaders", self._prepared.loaders, state["loaders"]),
        )
        for kind, mine, theirs in kinds:
            check_count(kind, len(mine), len(theirs))
            for item, saved in zip(mine, theirs, strict=True):
                item.load_state_dict(saved)
        check_count("registered objects", len(self._registered), len(state["objects"]))
        _load_registered(self._registered, reader, state["objects"])
        counts = zip(self._prepared.optimizers, state.get("steps", ()), strict=False)
        for optimizer, steps in counts:
            optimizer.steps = steps
        self._gradients.scaler.load_state_dict(state["scaler"])
        self._gradients.step = state["step"]
        self.project.iteration = state["iteration"] + 1
        self._gradients.state.sync_gradients = True
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


def shards_of(entry: PreparedModel, *, weights: bool) -> Iterator[Shard]:
    """Yield a model's shards of this rank: all, or those of its optimizers' state alone."""
    for shard in entry.strategy.shards():
        if weights or shard.state:
            yield shard


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


def _file_name(index: int) -> str:
    """Return the file of one object's encoded state."""
    return f"object-{index:05d}.encoded"


def _load_registered(
    objects: Sequence[Registered], reader: checkpoint.CheckpointReader, states: Sequence[Any]
) -> None:
    """Give registered objects their state back; an encoded state needs an object with a codec."""
    encoded = reader.state.get("encoded", {})
    for index, (registered, state) in enumerate(zip(objects, states, strict=True)):
        found = state
        if index in encoded:
            if registered.decode is None:
                raise CheckpointError(
                    f"expected registered object {index} ({type(registered.item).__name__}) to "
                    f"have a codec, found none; its state in {encoded[index]} is read only with "
                    "the one it was written with: register_for_checkpointing(object, encode=..., "
                    "decode=...)"
                )
            found = registered.decode(reader.encoded(encoded[index]))
        registered.item.load_state_dict(found)
