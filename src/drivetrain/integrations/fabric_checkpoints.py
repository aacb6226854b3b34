"""The state of a Fabric loop with optimizers, as a checkpoint directory of the whole run.

Models, optimizers and random numbers are saved by the Accelerator; the values beside them, such as
counters and schedules, by the keys of the script's state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from drivetrain.accelerator import Accelerator
from drivetrain.checkpoint.manifest import FILE_NAME
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.stepping import PreparedOptimizer


class FabricCheckpoints:
    """Saves and loads the states of one run, which Fabric hands over unwrapped.

    Args:
        engine: has prepared the models and optimizers.
    """

    def __init__(self, engine: Accelerator) -> None:
        self._engine = engine
        self._values: dict[str, Any] = {}
        self._order: dict[str, list[str]] = {}
        engine.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the state at hand, and its keys of models and optimizers."""
        return {"order": self._order, "values": self._values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take both from a checkpoint."""
        self._order, self._values = dict(state["order"]), dict(state["values"])

    def save(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Save a state in a directory. Collective.

        Raises:
            UsageError: a model or optimizer of the run is missing.
            CheckpointError: a value is no plain one, or the disk is full; on every rank.
        """
        self._order = self._order_of(state)
        self._values = {
            key: value.state_dict() if _is_stateful(value) else value
            for key, value in self._others(state)
        }
        self._engine.save_state(path, overwrite=True)

    def load(self, path: str | Path, state: Any, strict: bool) -> dict[str, Any]:
        """Load a directory into the objects of a state; return the values it did not ask for.

        Raises:
            UsageError: a model or optimizer of the run is missing.
            CheckpointError: the checkpoint has other keys.
        """
        wanted = self._order_of(state if isinstance(state, dict) else {})
        self._engine.load_state(path)
        if self._order != wanted:
            raise CheckpointError(
                f"expected the keys {self._order} in the state to load, as {path} has them, found "
                f"{wanted}; use the same keys for the same objects"
            )
        left = dict(self._values)
        for key, value in self._others(state):
            if key in left and _is_stateful(value):
                value.load_state_dict(left.pop(key))
            elif key in left:
                state[key] = left.pop(key)
            elif strict:
                raise CheckpointError(
                    f"expected {key!r} in {path}, found {sorted(left)}; leave it out of the state, "
                    "or pass strict=False"
                )
        return left

    def _others(self, state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        known = {key for keys in self._order.values() for key in keys}
        return [(key, value) for key, value in state.items() if key not in known]

    def _order_of(self, state: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the keys of models and optimizers in the order of ``setup``."""
        prepared = self._engine._prepared
        return {
            "models": _keys("models", [entry.model for entry in prepared.models], state),
            "optimizers": _keys("optimizers", prepared.optimizers, state),
        }


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint directory."""
    return (Path(path) / FILE_NAME).is_file()


def optimizers_in(state: Any) -> list[Optimizer]:
    """Return the optimizers of a state that the engine has prepared."""
    values = state.values() if isinstance(state, Mapping) else ()
    return [value for value in values if isinstance(value, PreparedOptimizer)]


def _keys(kind: str, objects: Sequence[Any], state: Mapping[str, Any]) -> list[str]:
    """Return the key of each object in a state."""
    found = [next((k for k, value in state.items() if value is each), None) for each in objects]
    keys = [key for key in found if key is not None]
    if len(keys) < len(objects):
        raise UsageError(
            f"expected all {len(objects)} {kind} of setup() in the state, found {len(keys)}: a "
            "checkpoint holds the whole run; add the others, or save models alone for their weights"
        )
    return keys


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
