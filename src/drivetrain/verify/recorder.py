"""Records a run inside of its ranks: losses, gradient norms, weights, and digests of batches."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from drivetrain.collectives.facts import gather_facts
from drivetrain.config import Resolved
from drivetrain.facade.observer import Observer
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.settings import Runs, StrategyChoice
from drivetrain.facade.weights import WholeWeights
from drivetrain.parts.naming import clean_name, named_parameters, uncompiled
from drivetrain.parts.rounds import in_backward
from drivetrain.parts.wrapping import UninheritedHook
from drivetrain.runtime.world import record_request
from drivetrain.verify.doubles import compute_in_doubles, in_doubles, without_dropout
from drivetrain.verify.record import RecordRequest, RunRecord, SavedTensors, StepRecord, state_file

_STATE = re.compile(r"\d+\.")
"""Of an optimizer, and not of a link: ``INDEX.KEY``."""


class RecordingEnded(SystemExit):
    """Ends the script, without an error, after the last step that was asked for."""

    def __init__(self) -> None:
        super().__init__(0)


class Recorder(Observer):
    """Records one run; ``accelerator.observe`` takes it before the first ``prepare``.

    Args:
        request: what is asked for.
        record: of the Accelerators before this one in the same process; None: there is none.

    Attributes:
        record: what was recorded so far, alike on every rank; with a folder, rank 0 alone can read
            the states.
    """

    def __init__(self, request: RecordRequest, record: RunRecord | None = None) -> None:
        self.record = RunRecord() if record is None else record
        self._request = request
        self._losses: list[Tensor] = []
        self._batches: list[str] = []
        self._norms: dict[str, float] = {}
        self._stepped: dict[str, float] = {}
        self._notes: dict[str, float] = {}
        self._waiting: Counter[int] = Counter()
        self._cleared = 0

    # --- before the first step ---

    def configured(self, config: Resolved) -> Resolved:
        """Return the script's configuration, changed as the request says."""
        if self._request.doubles:
            compute_in_doubles()
        return self._request.applied(config)

    def attach(self, prepared: PreparedObjects, weights: WholeWeights, runs: Runs) -> None:
        """Take the objects of the run, and write the record as it is."""
        self._prepared, self._weights, self._run = prepared, weights, runs.default
        self._has_windows = runs.config.run.accumulation > 1
        self.record.strategy = runs.config.strategy
        self.record.mesh = {name: axis.size for name, axis in self._run.mesh.items()}
        self._write()

    def choice(self, choice: StrategyChoice | None) -> StrategyChoice | None:
        """Return the model's own strategy; None where one strategy is asked for."""
        return choice if self._request.strategy is None else None

    def before_prepare(self, model: nn.Module) -> None:
        """Cast a model to fp64, and take its dropout away, if that is asked for."""
        if self._request.doubles:
            model.double()
        if not self._request.dropout:
            self.record.silenced += without_dropout(model)

    def after_prepare(self, entry: PreparedModel) -> None:
        """Watch the inputs of the model, and cast them to fp64 if the request says so."""
        hook = UninheritedHook(self._called)
        entry.model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        self.record.models += 1
        self.record.draws_masks |= entry.strategy.draws_masks
        self._write()

    def delivered(self, batch: Any) -> Any:
        """Return the batch, in fp64 if that is asked for."""
        return in_doubles(batch) if self._request.doubles else batch

    # --- the step ---

    def handed_over(self, args: Any, kwargs: Mapping[str, Any], targets: Any) -> None:
        """Note the batch of a pipeline's step."""
        self._batches.append(digest((args, dict(kwargs), targets)))

    def before_backward(self) -> None:
        """Count the backwards before this one in its window whose gradients are gone."""
        here = self._with_gradients()
        gone = [index for index in self._waiting if index not in here]
        self._cleared += max((self._waiting.pop(index) for index in gone), default=0)

    def after_backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Note a loss, and the models whose gradients wait for a step."""
        self._losses.append(loss)  # a pipeline publishes its value with the last of the window
        self._waiting.update(self._with_gradients())

    def _with_gradients(self) -> set[int]:
        """Return the models of a reference that have gradients, where windows have several passes.

        Of the reference alone: a strategy that is asked for its gradients follows what the script
        has done to them, which is to be seen as it is without a recorder.
        """
        counts = self._request.reference and self._has_windows
        return {
            index
            for index, entry in enumerate(self._prepared.models if counts else ())
            if any(bool(piece.any()) for piece in entry.strategy.gradients())
        }

    def gradients(self, entry: PreparedModel) -> None:
        """Measure the gradient of each trained parameter: before it is clipped, and for the step.

        The script may have changed it before either.
        """
        if self._is_over:
            return
        if not self.record.states:
            self._keep_state()
            self._note_whereabouts()
        scale = 1.0 if entry.scale is None or entry.unscaled else entry.scale
        mine = named_parameters(entry.module)
        for name in _trained(entry):
            held = mine.get(clean_name(name))
            norm = entry.strategy.clip_grad_norm(math.inf, only=() if held is None else (held,))
            qualified = self._qualified(entry, name)
            self._stepped[qualified] = float(norm) / scale
            self._norms.setdefault(qualified, self._stepped[qualified])

    def note(self, name: str, value: float | Tensor) -> None:
        """Add a number of the script's own to the step that comes next, alike on every rank."""
        self._notes[name] = float(value)

    def after_step(self) -> None:
        """Complete the record of a step.

        Raises:
            RecordingEnded: it was the last one.
        """
        if not self._is_over:
            self.record.steps.append(
                StepRecord(
                    losses=self._by_replica([float(loss.detach()) for loss in self._losses]),
                    batches=self._by_replica(self._batches),
                    norms=self._norms,
                    stepped=self._stepped,
                    moments=self._moments(),
                    notes=self._notes,
                    cleared=int(
                        sum(count for (count,) in self._by_replica([float(self._cleared)]))
                    ),
                )
            )
            self._waiting.clear()
            self._cleared = 0
            self._losses, self._batches = [], []
            self._norms, self._stepped, self._notes = {}, {}, {}
            self._keep_state()
            self._write()
            self._by_replica(())  # no rank leaves before the record is there
        if self._is_over and self._request.folder:
            self._prepared.forget()
            raise RecordingEnded

    @property
    def _is_over(self) -> bool:
        return 0 < self._request.steps <= len(self.record.steps)

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module.training and torch.is_grad_enabled() and not in_backward():
            self._batches.append(digest((args, kwargs)))
        return in_doubles((args, kwargs)) if self._request.doubles else None

    def _by_replica(self, values: Sequence[float | str]) -> tuple[tuple[Any, ...], ...]:
        """Return the values of each replica of the model, as the first of its ranks has them."""
        mine = self._run.mesh["dp"].rank, list(values)
        everyone = gather_facts(mine, tuple[int, list[float | str]], doing="the record of a step")
        first = dict(reversed(everyone))
        return tuple(tuple(first[index]) for index in sorted(first))

    def _moments(self) -> dict[str, float]:
        """Return the norms of the optimizers' state, of whatever parts ranks hold it in."""
        squares: dict[str, float] = {}
        for entry in self._prepared.models:
            for shard in entry.strategy.shards():
                if _STATE.match(shard.state):
                    name = f"{shard.state} of {self._qualified(entry, shard.name)}"
                    square = float(shard.tensor.double().square().sum())
                    squares[name] = squares.get(name, 0.0) + square
        everyone = gather_facts(squares, dict[str, float], doing="the record of a step")
        total: Counter[str] = Counter()
        for each in everyone:
            total.update(each)
        return {name: math.sqrt(square) for name, square in sorted(total.items())}

    def _keep_state(self) -> None:
        state = {
            self._qualified(entry, name): tensor
            for entry in self._prepared.models
            for name, tensor in self._weights.state_dict(entry.model).items()
        }
        kept: Mapping[str, Tensor] = state
        if self._request.folder:
            path = state_file(Path(self._request.folder), len(self.record.states))
            first = self._run.world.is_main
            kept = SavedTensors.save(path, state) if first else SavedTensors(path)
        self.record.states.append(kept)

    def _note_whereabouts(self) -> None:
        for entry in self._prepared.models:
            for name, words in entry.strategy.whereabouts(uncompiled(entry.module)).items():
                self.record.whereabouts[self._qualified(entry, name)] = words

    def _qualified(self, entry: PreparedModel, name: str) -> str:
        """Return a tensor's name, which tells the models of a run apart."""
        index = self._prepared.models.index(entry)
        return f"{name} of model {index}" if index else name

    def _write(self) -> None:
        if self._request.folder and self._run.world.is_main:
            self.record.write(Path(self._request.folder))


def launched_observer() -> Observer:
    """Return the recorder that this process was started with, or an observer that does nothing."""
    path = record_request()
    return Recorder(RecordRequest.read(Path(path)), _launched_record(path)) if path else Observer()


@cache
def _launched_record(path: str) -> RunRecord:
    """Return the one record of this process: a script may make several Accelerators."""
    return RunRecord()


def digest(batch: Any) -> str:
    """Return a digest of all values in nested data; objects of other kinds count by their class."""
    found = hashlib.sha256()
    for path, leaf in tree_flatten_with_path(batch)[0]:
        found.update(str(path).encode())
        for part in _parts(leaf):
            found.update(part)
    return found.hexdigest()[:16]


def _parts(leaf: Any) -> Iterator[bytes]:
    if isinstance(leaf, Tensor):
        dense = leaf.detach().cpu().contiguous()
        yield f"{dense.dtype}{tuple(dense.shape)}".encode()
        yield dense.view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, bool | int | float | str | bytes | None):
        yield repr(leaf).encode()
    else:
        yield type(leaf).__name__.encode()


def _trained(entry: PreparedModel) -> list[str]:
    """Return the names of the trained parameters in order, tied ones once, alike on every rank."""
    first: dict[Hashable, str] = {}
    for fact in entry.strategy.state_facts(uncompiled(entry.module)):
        if fact.trainable:
            first.setdefault(fact.identity, fact.name)
    return list(first.values())
