"""The contents of a run's checkpoint: shards of the models, and the state of all the rest."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain import checkpoint
from drivetrain.facade.gradients import WindowGradients
from drivetrain.facade.loading import Registered
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.window import WindowStart
from drivetrain.links.automatic import saved_choice
from drivetrain.runtime.world import World
from drivetrain.shards import Shard


class RunContents:
    """Collects the tensors and the state that this rank saves.

    Args:
        prepared: everything whose state is saved.
        gradients: for the loss scale, and the place in the accumulation window.
        registered: further objects.
        resumption: for the global batch.
        world: this process among all processes.
    """

    def __init__(
        self,
        prepared: PreparedObjects,
        gradients: WindowGradients,
        registered: Sequence[Registered],
        resumption: checkpoint.Resumption,
        world: World,
    ) -> None:
        self._prepared = prepared
        self._gradients = gradients
        self._registered = registered
        self._resumption = resumption
        self._world = world

    def of(self, saved: Mapping[int, bool], iteration: int) -> checkpoint.Contents:
        """Return everything to save.

        Args:
            saved: by index of each model to save, whether its weights are saved.
            iteration: number of the newest checkpoint in storage, this one included.
        """
        entries = [self._prepared.models[i] for i in saved]
        # A window under way begins again in a run that goes on from here.
        begun = self._gradients.unfinished or WindowStart(self._prepared, 0)
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
                "progress": [begun.progress[i] for i in saved],
                "loaders": begun.loaders(),
                "iteration": iteration,
                "without_weights": {
                    place: i for place, (i, whole) in enumerate(saved.items()) if not whole
                },
            },
            rank_state=begun.random(),
            encoded=encoded,
            parameters=[frozenset(entry.names.values()) for entry in entries],
        )

    def _state(self, entries: Sequence[PreparedModel]) -> dict[str, Any]:
        return {
            "step": self._gradients.step,
            **self._resumption.facts(self._gradients.state.num_steps),
            "groups": [entry.param_groups() for entry in entries],
            "links": [saved_choice(entry.strategy.run.links) for entry in entries],
            "schedulers": [scheduler.state_dict() for scheduler in self._prepared.schedulers],
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


def shards_of(entry: PreparedModel, *, weights: bool) -> Iterator[Shard]:
    """Yield a model's shards of this rank: all, or those of its optimizers' state alone."""
    for shard in entry.strategy.shards():
        if weights or shard.state:
            yield shard


def _file_name(index: int) -> str:
    """Return the file of one object's encoded state."""
    return f"object-{index:05d}.encoded"
