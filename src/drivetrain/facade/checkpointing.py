"""Saving and resuming as the script sees it: the whole state of a run, complete or not at all."""

import hashlib
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from drivetrain import checkpoint
from drivetrain.checkpoint.agreement import Group, check_same, share, together
from drivetrain.errors import UsageError
from drivetrain.facade.core import ModelEntry
from drivetrain.facade.model_state import (
    aliases_of,
    converted,
    groups_of,
    load_groups,
    same_number,
    scalars_of,
)
from drivetrain.facade.registered import file_name, load_registered
from drivetrain.facade.registering import Registering
from drivetrain.log import get_logger
from drivetrain.runtime import rng

logger = get_logger(__name__)


class Checkpointing(Registering):
    """The checkpoints of the Accelerator."""

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        overwrite: bool = False,
        wait: bool = True,
    ) -> str:
        """Save everything that an exact resume needs. Collective.

        Models, optimizers, schedulers, loss scale, loader positions, random number generators of
        every rank, and registered objects go into one directory, complete or not at all.

        Args:
            output_dir: the directory; None with automatic naming means the next
                ``project_dir/checkpoints/checkpoint_N``.
            safe_serialization: must be True: checkpoints hold no pickles.
            overwrite: replace a checkpoint of this name; the old one goes only when the new one
                is complete.
            wait: False returns when this rank's shards are copied to host memory, which takes as
                many bytes as its files until they are written; a thread writes them while
                training goes on. What a store keeps on a disk is written before it returns. One
                save at a time: the next save or load, ``free_memory`` and ``end_training`` wait
                for it, as ``wait_for_checkpoint`` does.

        Returns:
            The directory.

        Raises:
            CheckpointError: the directory exists, the disk is full, a state is not plain, ranks
                are at different steps, or the save before this one failed in the background; on
                every rank, and what was there before is still there.
        """
        if not safe_serialization:
            raise UsageError(
                "expected safe_serialization=True, found False; checkpoints hold no pickles, use "
                "torch.save yourself where you need one"
            )
        self.wait_for_checkpoint()
        self._check_same_step()
        project = self.project_configuration
        automatic = project.automatic_checkpoint_naming
        directory = self._automatic_directory() if automatic else _given(output_dir)
        entries = self._entries_to_save(directory)
        doing = f"save {directory}"
        contents = together(self.world, doing, partial(self._contents, entries))
        save = checkpoint.Save(directory, self.world, overwrite=overwrite)
        old = (directory.parent, project.total_limit) if automatic else (directory, None)
        if wait:
            self._finish(save, contents, *old)
        else:
            staged = save.stage(contents)
            logger.info(f"{doing} in the background from {staged.shard_bytes} bytes of host memory")
            self._background.start(partial(self._finish, save, staged, *old))
        if automatic:
            project.iteration += 1
        return str(directory)

    def wait_for_checkpoint(self) -> None:
        """Return when the save in the background is complete; at once when there is none.

        Raises:
            CheckpointError: that save failed; on every rank, and what was there before is still
                there.
        """
        self._background.wait()

    def load_state(self, input_dir: str | Path | None = None, *, verify: str = "full") -> str:
        """Continue from a checkpoint of any strategy and any number of ranks. Collective.

        Weights that were saved in another dtype are converted, and a warning says how many.

        Args:
            input_dir: the directory; None means the last automatically named one.
            verify: ``full`` checks the checksum of every file first, ``size`` its size only.

        Returns:
            The directory.

        Raises:
            CheckpointError: not a checkpoint, damaged, or of other models; on every rank. Or the
                save in the background failed.
        """
        self.wait_for_checkpoint()
        directory = self._last_directory() if input_dir is None else Path(input_dir)
        models = list(self._models)
        for hook in self._load_hooks.values():
            hook(models, str(directory))
        entries = [entry for entry in self._entries if any(entry.model is m for m in models)]
        doing = f"load {directory}"
        with checkpoint.open_checkpoint(directory, self.world, verify=verify) as reader:
            same_number("prepared models", len(entries), reader.models)
            for i, entry in enumerate(entries):
                saved = reader.model(i)
                together(self.world, doing, partial(entry.strategy.load, saved))
                load_groups(entry, reader.state["groups"][i])
                changed = converted(entry, saved, self.world)
                if changed:
                    logger.warning(f"{directory}: weights of model {i} were converted: {changed}")
            together(self.world, doing, partial(self._load_state, reader))
            self._load_rng(reader)
        self.wait_for_everyone()
        return str(directory)

    @cached_property
    def _background(self) -> checkpoint.Background:
        """The save that is being finished while training goes on."""
        return checkpoint.Background(self.world)

    def _check_same_step(self) -> None:
        """Raise on every rank when they do not stand between the same two micro-batches."""
        window = self.gradient_state
        within = 0 if window.sync_gradients else window.micro_batch
        if within:
            logger.warning(
                "save_state() inside an accumulation window: the gradients of its "
                f"{window.window_length} micro-batches are not in the checkpoint"
            )
        facts = {
            "the steps that the optimizers have taken": [each.steps for each in self._optimizers],
            "the micro-batches of the accumulation window": within,
        }
        check_same(self.world, "save a checkpoint", facts)

    def _entries_to_save(self, directory: Path) -> list[ModelEntry]:
        models = list(self._models)
        if self._save_hooks:
            weights = [model.state_dict() for model in models]
            for hook in self._save_hooks.values():
                hook(models, weights, str(directory))
        return [entry for entry in self._entries if any(entry.model is m for m in models)]

    def _contents(self, entries: Sequence[ModelEntry]) -> checkpoint.Contents:
        encoded = {
            file_name(i): registered.encoded()
            for i, registered in enumerate(self._custom_objects)
            if registered.encode is not None and self.world.is_main
        }
        return checkpoint.Contents(
            models=[entry.strategy.shards() for entry in entries],
            scalars=[scalars_of(entry) for entry in entries],
            aliases=[aliases_of(entry) for entry in entries],
            state=self._state(entries),
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
        """Complete a save and then remove what the limit no longer keeps."""
        save.finish(contents, group)
        if limit is not None:
            remove = partial(checkpoint.prune, root, limit) if self.world.is_main else list
            together(self.world, f"remove old checkpoints in {root}", remove, group)

    def _automatic_directory(self) -> Path:
        root = self._checkpoint_root()
        name = checkpoint.next_name(root) if self.world.is_main else ""
        directory: Path = root / share(self.world, name)
        self.project_configuration.iteration = int(directory.name.rpartition("_")[2])
        return directory

    def _last_directory(self) -> Path:
        root = self._checkpoint_root()
        find = partial(checkpoint.latest, root)
        found = together(self.world, f"load from {root}", find if self.world.is_main else Path)
        return share(self.world, found)

    def _checkpoint_root(self) -> Path:
        folder = self.project_configuration.project_dir
        if folder is None:
            raise UsageError(
                "expected a directory, found none; pass one, or give the Accelerator a "
                "project_dir and automatic_checkpoint_naming=True"
            )
        return Path(folder) / "checkpoints"

    def _state(self, entries: Sequence[ModelEntry]) -> dict[str, Any]:
        return {
            "step": self.step,
            "iteration": self.project_configuration.iteration,
            "groups": [groups_of(entry) for entry in entries],
            "progress": [dict(entry.strategy.progress()) for entry in entries],
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "loaders": [loader.state_dict() for loader in self._dataloaders],
            "scaler": self.scaler.state_dict(),
            "steps": [optimizer.steps for optimizer in self._optimizers],
            "objects": [
                None if registered.encode is not None else registered.item.state_dict()
                for registered in self._custom_objects
            ],
            "encoded": {
                i: file_name(i)
                for i, registered in enumerate(self._custom_objects)
                if registered.encode is not None
            },
        }

    def _load_state(self, reader: checkpoint.CheckpointReader) -> None:
        state = reader.state
        kinds: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
            ("prepared schedulers", self._schedulers, state["schedulers"]),
            ("prepared loaders", self._dataloaders, state["loaders"]),
        )
        for what, mine, theirs in kinds:
            same_number(what, len(mine), len(theirs))
            for item, saved in zip(mine, theirs, strict=True):
                item.load_state_dict(saved)
        same_number("registered objects", len(self._custom_objects), len(state["objects"]))
        load_registered(self._custom_objects, reader, state["objects"])
        for optimizer, steps in zip(self._optimizers, state.get("steps", ()), strict=False):
            optimizer.steps = steps
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.project_configuration.iteration = state["iteration"] + 1
        self.gradient_state.sync_gradients = True
        for entry in self._entries:
            entry.forget_gradients()
        for entry, progress in zip(self._entries, state.get("progress", ()), strict=False):
            entry.strategy.resume(progress)

    def _load_rng(self, reader: checkpoint.CheckpointReader) -> None:
        """Restore this rank's generators; a rank that was not there gets a seed of its own."""
        mine = reader.rank_state(self.world.rank)
        if mine is not None:
            rng.restore(mine)
            return
        first = reader.rank_state(0) or {}
        digest = hashlib.sha256()
        for name in sorted(first):
            digest.update(bytes(first[name].flatten().view(torch.uint8).tolist()))
        rng.set_seed((int.from_bytes(digest.digest()[:4], "little") + self.world.rank) % 2**32)


def _given(output_dir: str | Path | None) -> Path:
    if output_dir is None:
        raise UsageError(
            "expected a directory for save_state(), found none; pass one, or set "
            "automatic_checkpoint_naming in the ProjectConfiguration"
        )
    return Path(output_dir)
