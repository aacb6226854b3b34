"""building(): models are constructed without memory and get their values when they are prepared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.building import (
    RecordedWeights,
    Recording,
    WeightSource,
    become,
    fill,
    meta_tensors,
    stray_tensors,
    unknown_values,
)
from drivetrain.checkpoint import ExportedWeights, StreamedWeights
from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.facade.core import Core
from drivetrain.strategy import Strategy


class Construction(NamedTuple):
    """One ``with building():``.

    Attributes:
        recording: what happened inside.
        weights: the export that parameters get their values from, or None.
    """

    recording: Recording
    weights: ExportedWeights | None


@dataclass(frozen=True, slots=True)
class Values:
    """Where a model's missing values come from.

    Attributes:
        source: knows them; None for a model that has all its values.
        facts: what ranks must agree on so that they get the same ones.
        failure: why there is no source though one is needed.
    """

    source: WeightSource | None = None
    facts: Sequence[str] = ()
    failure: DrivetrainError | None = None

    def check(self) -> None:
        """Raise why there is no source, if there is none."""
        if self.failure is not None:
            raise self.failure


class Building(Core):
    """The construction of models that are too large for one rank."""

    _constructions: tuple[Construction, ...] = ()
    _is_building: bool = False

    @contextmanager
    def building(self, weights: str | Path | None = None) -> Iterator[None]:
        """Context in which a model is constructed without ever existing whole on a rank.

        Every tensor made inside has a shape, and no memory; what is done to it is recorded.
        ``prepare`` then makes the values, tensor by tensor, as the strategy needs them. They are
        bit for bit those of ordinary construction with the same seed, whatever the number of
        ranks; every rank must have seeded alike. A tensor's values can be read inside, at the price
        of making them; random initialisation runs twice.

        Args:
            weights: an exported model to take the values from, in Hugging Face's layout: a
                directory, its index, or one safetensors file. Each rank reads it tensor by tensor.

        Raises:
            UsageError: a ``building()`` is active already.
            CheckpointError: ``weights`` is not an exported model.
        """
        if self._is_building:
            raise UsageError("expected one building() at a time, found one inside of another")
        exported = None if weights is None else ExportedWeights(Path(weights))
        construction = Construction(Recording(), exported)
        self._constructions = (*self._constructions, construction)
        self._is_building = True
        try:
            with construction.recording.active():
                yield
        finally:
            self._is_building = False

    def _values_of(self, model: nn.Module) -> Values:
        """Find out where the missing values of a model come from; never raises on its own rank."""
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

    def _give_values(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        strategy: Strategy[Any],
        values: Values,
    ) -> None:
        """Let a strategy give a model its missing values; the rest does not concern it."""
        if values.source is not None:
            self._fill_strays(model)
            self._fill_states(optimizers)
            strategy.materialize(model, values.source)

    def _give_whole_values(self, model: nn.Module) -> None:
        """Give a model that no strategy takes over its missing values."""
        values = self._values_of(model)
        values.check()
        if values.source is not None:
            self._fill_strays(model)
            fill(model, meta_tensors(model), values.source, self.device)

    def _place(self, model: nn.Module, device_placement: bool | None) -> None:
        """Move a model to the rank's device, but for what has no values to move yet."""
        if not (self.device_placement if device_placement is None else device_placement):
            return
        if not meta_tensors(model):
            model.to(self.device)
            return
        move: Callable[[Callable[[Tensor], Tensor]], nn.Module] = model._apply
        move(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))

    def _fill_strays(self, model: nn.Module) -> None:
        """Give values to the tensors that are plain attributes: no strategy looks after these."""
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
