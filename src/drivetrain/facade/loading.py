"""Loads the whole state of a run from a checkpoint: all that can be refused is, before a change."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from drivetrain import checkpoint
from drivetrain.checkpoint.agreement import together
from drivetrain.errors import CheckpointError
from drivetrain.facade.gradients import WindowGradients
from drivetrain.facade.prepared import PreparedModel, PreparedObjects, check_count
from drivetrain.log import get_logger
from drivetrain.runtime import rng
from drivetrain.runtime.world import World

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
        self._gradients.step = state["step"]
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
