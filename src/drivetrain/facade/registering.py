"""What the script adds to its checkpoints: objects of its own, hooks around save and load."""

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from drivetrain.facade.core import Core
from drivetrain.facade.registered import Decode, Encode, Registered, check_registration


class Registering(Core):
    """The registrations of the Accelerator that its checkpoints heed."""

    def register_for_checkpointing(
        self, *objects: Any, encode: Encode | None = None, decode: Decode | None = None
    ) -> None:
        """Keep the state of more objects in every checkpoint.

        Args:
            objects: anything with ``state_dict()`` and ``load_state_dict()`` whose state is tensors
                and plain values.
            encode: opt-in for state of any other kind: makes bytes of it, which are stored as they
                are in a file of their own. Choose what may be trusted: this library reads no
                pickle, but a ``decode`` of yours that does will run what it finds.
            decode: makes the state of these bytes again; without it they are never read.

        Raises:
            UsageError: names the arguments that lack these methods, or the missing half of the
                codec.
        """
        check_registration(objects, encode, decode)
        self._custom_objects.extend(Registered(item, encode, decode) for item in objects)

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
