"""Saving and resuming as the script sees it: the whole state of a run, complete or not at all."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from drivetrain import checkpoint
from drivetrain.checkpoint.agreement import share, together
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.core import Core, ModelEntry
from drivetrain.log import get_logger
from drivetrain.runtime import rng

logger = get_logger(__name__)


class Checkpointing(Core):
    """The checkpoints of the Accelerator."""

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep the state of more objects in every checkpoint.

        Args:
            objects: anything with ``state_dict()`` and ``load_state_dict()`` whose state is tensors
                and plain values.

        Raises:
            UsageError: names the arguments that lack these methods.
        """
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
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before each ``save_state``.

        A hook that pops from models and weights keeps those models out of the checkpoint.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before each ``load_state``.

        A hook that pops from models keeps those models as they are.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        overwrite: bool = False,
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

        Returns:
            The directory.

        Raises:
            CheckpointError: the directory exists, the disk is full, a state is not plain; on every
                rank, and what was there before is still there.
        """
        if not safe_serialization:
            raise UsageError(
                "expected safe_serialization=True, found False; checkpoints hold no pickles, use "
                "torch.save yourself where you need one"
            )
        project = self.project_configuration
        automatic = project.automatic_checkpoint_naming
        directory = self._automatic_directory() if automatic else _given(output_dir)
        if not self.gradient_state.sync_gradients:
            logger.warning(
                "save_state() inside an accumulation window: the gradients of its "
                f"{self.gradient_state.window_length} micro-batches are not in the checkpoint"
            )
        models = list(self._models)
        if self._save_hooks:
            weights = [model.state_dict() for model in models]
            for hook in self._save_hooks.values():
                hook(models, weights, str(directory))
        entries = [entry for entry in self._entries if any(entry.model is m for m in models)]
        checkpoint.save_checkpoint(
            directory,
            world=self.world,
            models=[entry.strategy.shards() for entry in entries],
            scalars=[_scalars(entry) for entry in entries],
            state=self._state(entries),
            rank_state=rng.capture(),
            overwrite=overwrite,
        )
        if automatic:
            project.iteration += 1
            if self.world.is_main and project.total_limit is not None:
                checkpoint.prune(directory.parent, project.total_limit)
        self.wait_for_everyone()
        return str(directory)

    def load_state(self, input_dir: str | Path | None = None, *, verify: str = "full") -> str:
        """Continue from a checkpoint of any strategy and any number of ranks. Collective.

        Args:
            input_dir: the directory; None means the last automatically named one.
            verify: ``full`` checks the checksum of every file first, ``size`` its size only.

        Returns:
            The directory.

        Raises:
            CheckpointError: not a checkpoint, damaged, or of other models; on every rank.
        """
        directory = self._last_directory() if input_dir is None else Path(input_dir)
        models = list(self._models)
        for hook in self._load_hooks.values():
            hook(models, str(directory))
        entries = [entry for entry in self._entries if any(entry.model is m for m in models)]
        with checkpoint.open_checkpoint(directory, self.world, verify=verify) as reader:
            _same_number("prepared models", len(entries), reader.models)
            for i, entry in enumerate(entries):
                entry.strategy.load(reader.model(i))
                _load_groups(entry, reader.state["groups"][i])
            self._load_state(reader.state)
            self._load_rng(reader)
        self.wait_for_everyone()
        return str(directory)

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
            "groups": [_groups(entry) for entry in entries],
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "loaders": [loader.state_dict() for loader in self._dataloaders],
            "scaler": self.scaler.state_dict(),
            "objects": [item.state_dict() for item in self._custom_objects],
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        for what, mine, theirs in (
            ("prepared schedulers", self._schedulers, state["schedulers"]),
            ("prepared loaders", self._dataloaders, state["loaders"]),
            ("registered objects", self._custom_objects, state["objects"]),
        ):
            _same_number(what, len(mine), len(theirs))
            for item, saved in zip(mine, theirs, strict=True):
                item.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.project_configuration.iteration = state["iteration"] + 1
        self.gradient_state.sync_gradients = True
        for entry in self._entries:
            entry.forget_gradients()

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


def _same_number(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise CheckpointError(
            f"expected a checkpoint with {expected} {what}, found {found}; prepare and register "
            "the same objects in the same order as the run that saved it"
        )


def _scalars(entry: ModelEntry) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the optimizers' state that is no tensor, by optimizer and parameter name."""
    result: dict[int, dict[str, dict[str, Any]]] = {}
    for i, optimizer in enumerate(entry.optimizers):
        result[i] = {
            entry.names[id(parameter)]: plain
            for parameter, state in optimizer.state.items()
            if id(parameter) in entry.names
            and (plain := {k: v for k, v in state.items() if not isinstance(v, Tensor)})
        }
    return result


def _groups(entry: ModelEntry) -> list[list[dict[str, Any]]]:
    """Return the hyperparameters of every group of every optimizer of a model."""
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in entry.optimizers
    ]


def _load_groups(entry: ModelEntry, saved: list[list[dict[str, Any]]]) -> None:
    _same_number("optimizers of a model", len(entry.optimizers), len(saved))
    for optimizer, groups in zip(entry.optimizers, saved, strict=True):
        _same_number("parameter groups", len(optimizer.param_groups), len(groups))
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
