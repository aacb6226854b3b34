"""Saving and resuming as the script sees it: the whole state of a run, complete or not at all.

State of registered objects is stored as tensors and plain values, or in bytes that a codec of the
script writes and reads.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from drivetrain import checkpoint
from drivetrain.checkpoint.agreement import Group, check_same, share, together
from drivetrain.checkpoint.local import MemoryCheckpoints
from drivetrain.errors import UsageError
from drivetrain.facade.contents import RunContents
from drivetrain.facade.gradients import WindowGradients
from drivetrain.facade.loading import Decode, Encode, Registered, RunFolder, StateLoading
from drivetrain.facade.options import ProjectConfiguration
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.settings import Runs
from drivetrain.log import get_logger
from drivetrain.parts.naming import persistent_buffers

logger = get_logger(__name__)


class RunCheckpoints:
    """The checkpoints of one Accelerator.

    Args:
        prepared: everything whose state is saved.
        gradients: for the loss scale, and the place in the accumulation window.
        project: where automatically named checkpoints go.
        runs: the run, and its continuation after an end.

    Attributes:
        background: the save that is being finished while training goes on.
    """

    def __init__(
        self,
        prepared: PreparedObjects,
        gradients: WindowGradients,
        project: ProjectConfiguration,
        runs: Runs,
    ) -> None:
        world = runs.default.world
        self.project = project
        self._resumption = runs.resumption
        self._prepared = prepared
        self._gradients = gradients
        self._world = world
        self.background = checkpoint.Background(world)
        self._memory: MemoryCheckpoints | None = None
        if runs.memory is not None:
            every = runs.config.run.checkpoint.local_every
            self._memory = MemoryCheckpoints(runs.memory, every, world, self.background)
            gradients.preemption.call_between_steps(self.save_in_memory)
        self._registered: list[Registered] = []
        self._folder = RunFolder(world)
        gradients.finite.go_back = self.go_back
        self._contents = RunContents(prepared, gradients, self._registered, runs.resumption, world)
        self._loading = StateLoading(prepared, gradients, self._registered, world)
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
        self._gradients.finite.before_save()
        self._resumption.before_save()
        automatic = self.project.automatic_checkpoint_naming
        directory = self._folder.next(self.project) if automatic else _given(output_dir)
        doing = f"save {directory}"
        save = checkpoint.Save(directory, self._world, overwrite=overwrite)
        with save.abandoned_on_failure():
            chosen = together(self._world, doing, partial(self._entries_to_save, save.draft))
            # Hooks often take weights out on rank 0 alone.
            entries = share(self._world, chosen, dict[int, bool])
            contents = together(
                self._world, doing, partial(self._contents.of, entries, self.project.iteration)
            )
        old = (directory.parent, self.project.total_limit) if automatic else (directory, None)
        if wait:
            self._finish(save, contents, *old)
        else:
            with self.background.buffers.copying() as copy:
                staged = save.stage(contents, copy)
            logger.info(f"{doing} in the background from {staged.shard_bytes} bytes of host memory")
            self.background.start(partial(self._finish, save, staged, *old))
        if automatic:
            self.project.iteration += 1
        else:
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
        steps = max((optimizer.steps for optimizer in self._prepared.optimizers), default=0)
        if self._memory is None or not self._memory.is_due(steps):
            return
        if self._save_hooks:
            raise UsageError(
                "expected no hooks of save_state with checkpoint.local: memory, found "
                f"{len(self._save_hooks)}; their files go to storage alone: register objects with "
                "register_for_checkpointing(), or leave checkpoint.local out"
            )
        if share(self._world, self.background.is_busy, bool):
            return  # a save in storage goes first; a later step is as good
        self.background.wait()
        self._check_same_step()
        self._gradients.finite.before_save()
        self._resumption.before_save()
        entries = dict.fromkeys(range(len(self._prepared.models)), True)
        collect = partial(self._contents.of, entries, self.project.iteration - 1)
        self._memory.save(steps, collect, partial(self._resumption.saved, memory=True))

    def resume(self, input_dir: str | Path | None, *, verify: str) -> str:
        """Load the newest whole checkpoint, out of memory or storage; "" without any. Collective.

        Of two that are as new, the one in memory is taken.
        """
        stored = self.is_there(input_dir)
        reader = None
        if self._memory is not None:
            steps = self._folder.steps(self.project, input_dir) if stored else None
            reader = self._memory.open_newest(steps, hashed=verify != "size")
        if reader is None:
            loaded = self.load(input_dir, verify=verify) if stored else ""
            if self._memory is not None:
                self._memory.clear()
            return loaded
        with reader:
            self._loading.load(reader, self._prepared.models)
            self.project.iteration = reader.state["iteration"] + 1
        self._resumption.loaded = True
        return str(reader.directory)

    def load(self, input_dir: str | Path | None, *, verify: str) -> str:
        """Load the whole state of a run; see ``load_state``. Collective."""
        if input_dir is None:
            reader = self._folder.open_newest(self.project, verify)
        else:
            reader = checkpoint.open_checkpoint(Path(input_dir), self._world, verify=verify)
        given = str(reader.directory if input_dir is None else Path(input_dir))
        with reader:
            self._loading.load(reader, self._call_load_hooks(given))
            self.project.iteration = reader.state["iteration"] + 1
        self._resumption.loaded = True
        if input_dir is not None:
            self._folder.add(Path(input_dir))
        return given

    def _call_load_hooks(self, directory: str) -> list[PreparedModel]:
        """Let hooks load weights themselves; return the models that are left."""
        models = [entry.model for entry in self._prepared.models]
        for hook in self._load_hooks.values():
            hook(models, directory)
        return [e for e in self._prepared.models if any(e.model is model for model in models)]

    def is_there(self, input_dir: str | Path | None) -> bool:
        """Whether there is a checkpoint to go on from, damaged or not.

        Args:
            input_dir: its directory; None means one of any automatic name.
        """
        anew = share(self._world, self._resumption.begins_anew, bool)
        if self._memory is not None and input_dir is None and self.project.checkpoints is None:
            return False
        return not anew and self._folder.holds(self.project, input_dir)

    def go_back(self) -> str:
        """Load the newest finite checkpoint of this run; loaders and random numbers go on.

        Collective; returns the directory.

        Raises:
            CheckpointError: there is none.
        """
        self.background.wait()
        reader = self._folder.open_finite(self.project)
        with reader:
            left = self._call_load_hooks(str(reader.directory))
            self._loading.load(reader, left, rewinds=False)
        return str(reader.directory)

    def _check_same_step(self) -> None:
        """Raise on every rank when they do not stand between the same two micro-batches."""
        window = self._gradients.state
        within = window.micro_batch if window.is_unfinished else 0
        if within:
            self._tell_of_window(within)
        steps = [optimizer.steps for optimizer in self._prepared.optimizers]
        facts = {
            "the steps that the optimizers have taken": steps,
            "the micro-batches of the accumulation window": within,
        }
        check_same(self._world, "save a checkpoint", facts)

    def _tell_of_window(self, within: int) -> None:
        """Say what a run will do that goes on from inside an accumulation window."""
        tensors = (persistent_buffers(entry.module).items() for entry in self._prepared.models)
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
        if self._world.is_main:
            self._resumption.saved(contents.state)
        if self._world.is_main and not checkpoint.is_finite(save.target):
            logger.warning(
                f"{save.target} holds weights that are infinite or NaN; the newest checkpoint "
                "without any is kept, whatever total_limit says"
            )
        if limit is not None:
            remove = partial(checkpoint.prune, root, limit) if self._world.is_main else list
            together(self._world, f"remove old checkpoints in {root}", remove, group)


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
