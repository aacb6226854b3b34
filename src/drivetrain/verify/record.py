"""The request to record a run, and its record: numbers and weights of each optimizer step.

``drivetrain verify`` sends the request to its ranks. A record is in memory or in a folder, which
holds ``record.json`` and one safetensors file per step: ``step-0000`` is the state before the first
step. It is complete after every step, so a run may end at any time.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor

from drivetrain.checkpoint.tensorfile import write_tensors
from drivetrain.config import DtypesConfig, RecomputeConfig, Resolved
from drivetrain.facade.settings import resolve_strategy

RECORD = "record.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordRequest:
    """Which steps are recorded, and how the run differs from the script's own.

    Attributes:
        steps: the script ends after so many optimizer steps; 0 records all steps there are.
        folder: where rank 0 writes the record; "" keeps it in memory, on every rank.
        strategy: name and options that replace the script's; None leaves the script's own.
        reference: whether the run defines the right numbers: nothing but the strategy is kept of
            the configuration's ways to save memory and bytes.
        doubles: compute in fp64, without mixed precision.
        dropout: False sets every dropout's probability to 0.
    """

    steps: int = 0
    folder: str = ""
    strategy: Mapping[str, Any] | None = None
    reference: bool = False
    doubles: bool = False
    dropout: bool = True

    def applied(self, config: Resolved) -> Resolved:
        """Return a configuration of the script, changed as the request says."""
        if self.strategy is not None:
            config = resolve_strategy(self.strategy, config)
        run = config.run
        if self.doubles:
            run = replace(run, precision="no", dtypes=DtypesConfig())
        if self.reference:
            run = replace(run, dtypes=DtypesConfig(), recompute=RecomputeConfig())
        return replace(config, run=run)

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "RecordRequest":
        """Read it from a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


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
        values = dataclasses.asdict(replace(self, states=[])) | {"states": len(self.states)}
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
        steps = TypeAdapter(list[StepRecord]).validate_python(values.pop("steps"))
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
