"""The record of a training run: numbers and weights of each optimizer step, in memory or a folder.

A folder holds ``record.json`` and one safetensors file per step: ``step-0000`` is the state before
the first step. It is complete after every step, so a run may end at any time.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from drivetrain.checkpoint.tensorfile import write_tensors

RECORD = "record.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The numbers of one optimizer step, alike on every rank.

    Attributes:
        losses: what backward got since the step before, for each data-parallel rank in order.
        batches: digests of what the models got since the step before, likewise.
        norms: of the gradient of each trained parameter, before clipping, by name.
        stepped: likewise, as the optimizer stepped with them: after what the script did to them.
        moments: norms of the optimizers' state after the step, by key and name.
        notes: numbers that the script added, by name.
        cleared: of a reference, how many backwards of an accumulation window, on all data-parallel
            ranks, had their gradients cleared before this step, and before the window's next
            backward.
    """

    losses: tuple[tuple[float, ...], ...] = ()
    batches: tuple[tuple[str, ...], ...] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    stepped: Mapping[str, float] = field(default_factory=dict)
    moments: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, float] = field(default_factory=dict)
    cleared: int = 0


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """One recorded run.

    Attributes:
        strategy: its name.
        mesh: sizes of the axes.
        models: how many were prepared.
        steps: the numbers of each optimizer step.
        states: the state dict of all models before the first step, and after each one.
        whereabouts: where a strategy keeps tensors, by name.
        draws_masks: whether the strategy has dropout masks of its own.
        silenced: how many dropouts were set to 0 for this run.
    """

    strategy: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    models: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    states: list[Mapping[str, Tensor]] = field(default_factory=list)
    whereabouts: dict[str, str] = field(default_factory=dict)
    draws_masks: bool = False
    silenced: int = 0

    def write(self, folder: Path) -> None:
        """Write all but the states, in place of an earlier version."""
        values: dict[str, Any] = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name not in ("steps", "states")
        }
        values["steps"] = [dataclasses.asdict(step) for step in self.steps]
        values["states"] = len(self.states)
        temporary = folder / f"{RECORD}.new"
        temporary.write_text(json.dumps(values), encoding="utf-8")
        temporary.replace(folder / RECORD)

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read a folder; the states stay there until they are asked for.

        Raises:
            FileNotFoundError: no run was recorded there.
        """
        values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        steps = [
            StepRecord(
                **each | {"losses": _rows(each["losses"]), "batches": _rows(each["batches"])}
            )
            for each in values.pop("steps")
        ]
        count = values.pop("states")
        states = [SavedTensors(state_file(folder, number)) for number in range(count)]
        return cls(**values, steps=steps, states=list(states))


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, read one by one when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def save(cls, path: Path, tensors: Mapping[str, Tensor]) -> "SavedTensors":
        """Write tensors, and return them as they can be read again."""
        write_tensors(path, tensors)
        return cls(path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            if name not in set(file.keys()):
                raise KeyError(name)
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        with safe_open(self._path, framework="pt") as file:
            yield from list(file.keys())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def state_file(folder: Path, number: int) -> Path:
    """Return the file of the state after a step, 0 for before the first."""
    return folder / f"step-{number:04d}.safetensors"


def _rows(rows: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows)
