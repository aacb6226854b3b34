"""Models that are constructed without memory, and get their values when they are prepared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.building import (
    ConstructionRecording,
    RecordedWeights,
    WeightSource,
    become,
    fill,
    meta_tensors,
    stray_tensors,
    unknown_values,
)
from drivetrain.checkpoint import ExportedWeights, StreamedWeights
from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.strategy import Strategy


class Construction(NamedTuple):
    """One ``with building():``.

    Attributes:
        recording: every operation on the tensors made inside.
        weights: the export that parameters get their values from, or None.
    """

    recording: ConstructionRecording
    weights: ExportedWeights | None


@dataclass(frozen=True, slots=True)
class Values:
    """Where a model's missing values come from.

    Attributes:
        source: knows them; None for a model that has all its values.
        facts: must be alike on all ranks, so that they get the same values.
        failure: why there is no source though one is needed.
    """

    source: WeightSource | None = None
    facts: Sequence[str] = ()
    failure: DrivetrainError | None = None

    def check(self) -> None:
        """Raise why there is no source, if there is none."""
        if self.failure is not None:
            raise self.failure


class Constructions:
    """The constructions of one Accelerator's models without memory, and their values.

    Args:
        device: where values are made that no strategy looks after.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._constructions: list[Construction] = []
        self._is_building = False

    @contextmanager
    def building(self, weights: str | Path | None) -> Iterator[None]:
        """Context in which tensors are made without memory, and recorded; see ``building``."""
        if self._is_building:
            raise UsageError("expected one building() at a time, found one inside of another")
        exported = None if weights is None else ExportedWeights(Path(weights))
        construction = Construction(ConstructionRecording(), exported)
        self._constructions.append(construction)
        self._is_building = True
        try:
            with construction.recording.active():
                yield
        finally:
            self._is_building = False

    def values_of(self, model: nn.Module) -> Values:
        """Find out where the missing values of a model come from.

        The returned values hold a failure, too: ranks compare failures first, and none raises
        alone.

        Raises:
            UsageError: called inside ``building()``.
        """
        if self._is_building:
            raise UsageError(
                "expected prepare() after building(), found it inside; leave the context first"
            )
        missing = meta_tensors(model)
        try:
            strays = self._strays(model)
            if not missing and not strays:
                return Values()
            return self._known_values(model, missing, strays)
        except DrivetrainError as error:
            return Values(facts=[f"no values: {error}"], failure=error)

    def _known_values(
        self, model: nn.Module, missing: Mapping[str, Tensor], strays: Mapping[str, Tensor]
    ) -> Values:
        everything = {**strays, **missing}
        used = [c for c in self._constructions if any(map(c.recording.knows, everything.values()))]
        unknown = [
            name
            for name, tensor in everything.items()
            if not any(c.recording.knows(tensor) for c in used)
        ]
        if unknown:
            raise UsageError(unknown_values(unknown))
        for construction in used:
            construction.recording.versions.check(everything)
        source: WeightSource = RecordedWeights([c.recording for c in used])
        recorded = list(everything.values())
        for weights in {id(c.weights): c.weights for c in used if c.weights is not None}.values():
            streamed = StreamedWeights(weights, model, source)
            streamed.fill_real()
            source, recorded = streamed, streamed.remaining(everything)
        facts = [
            fact
            for c in used
            for fact in c.recording.facts([t for t in recorded if c.recording.knows(t)])
        ]
        return Values(source, [f"built without values: {len(missing)} tensors", *facts])

    def give_values(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        strategy: Strategy[Any],
        values: Values,
    ) -> None:
        """Give a model its missing values: by its strategy, but for stray tensors and states."""
        if values.source is not None:
            self._fill_strays(model)
            self._fill_states(optimizers)
            strategy.materialize(model, values.source)

    def give_whole_values(self, model: nn.Module) -> None:
        """Give its missing values to a model that no strategy takes over."""
        values = self.values_of(model)
        values.check()
        if values.source is not None:
            self._fill_strays(model)
            fill(model, meta_tensors(model), values.source, self._device)

    def forget(self) -> None:
        """Let go of all recordings."""
        self._constructions.clear()

    def _fill_strays(self, model: nn.Module) -> None:
        """Give values to tensors that are plain attributes, which no strategy looks after."""
        for name, tensor in self._strays(model).items():
            become(tensor, self._recorded(tensor, name), name)

    def _strays(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the plain attributes to be filled; others are on meta in any construction."""
        recordings = [construction.recording for construction in self._constructions]
        return {
            name: tensor
            for name, tensor in stray_tensors(model).items()
            if any(recording.knows(tensor) for recording in recordings)
        }

    def _fill_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Give values to the state that optimizers make in their constructors."""
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for key, tensor in state.items():
                    if isinstance(tensor, Tensor) and tensor.is_meta:
                        name = f"state {key} of {type(optimizer).__name__}"
                        state[key] = self._recorded(tensor, name)

    def _recorded(self, tensor: Tensor, name: str) -> Tensor:
        """Return the values of one tensor where ordinary construction would have put them."""
        for construction in self._constructions:
            if construction.recording.knows(tensor):
                return construction.recording.materialize([tensor])[0]
        raise UsageError(unknown_values([name]))


def place(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device; tensors without values stay until they have some."""
    if not meta_tensors(model):
        model.to(device)
        return
    move: Callable[[Callable[[Tensor], Tensor]], nn.Module] = model._apply
    move(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
