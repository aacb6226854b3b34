"""Verification: a run is recorded, recorded again under the reference, and the two are compared.

``drivetrain verify`` does so for a user's script. In a test, on ranks, the same takes no process of
its own::

    from drivetrain import Accelerator
    from drivetrain.registry import strategies
    from drivetrain.verify import Recorder, RecordRequest, compare, judge

    def recorded(strategy):
        accelerator = Accelerator(strategy=strategy, cpu=True)
        recorder = Recorder(RecordRequest())
        accelerator.observe(recorder)            # before the first prepare()
        train(accelerator)                       # an ordinary script
        accelerator.free_memory()
        return recorder.record                   # alike on every rank, in memory

    expected = recorded(strategies().reference())
    comparison = compare(recorded("ddp"), expected)
    verdict, errors = judge(comparison, doubles=True)   # for models in fp64
    assert verdict != "error", errors[0]

The reference is data-parallel over all ranks. To compare with ranks that share a replica (tensor or
pipeline parallelism), give the reference run the same batches: run it on as many ranks as the other
run has on its axis ``dp``. A test that runs both on one pool of ranks gives every rank of the
reference the same batch instead: the mean of equal gradients is the gradient.

- ``recorder.note(name, value)`` adds a number of the test's own, such as an evaluation loss, to the
  next step.
- ``comparison.largest("weight")`` is the largest relative difference of a kind: ``loss``,
  ``gradient norm``, ``weight``, ``note``, or ``start`` for the weights before the first step.
- ``comparison.problem`` says why two runs cannot be compared, for example other batches.

A request to record a run goes from ``drivetrain verify`` to its ranks. The record is in memory or
in a folder, which holds ``record.json`` and one safetensors file per step: ``step-0000`` is the
state before the first step. It is complete after every step, so a run may end at any time.

A run may be computed in fp64, and without dropout: rounding shrinks to 1e-16, an error stays. Then
models, buffers and floating inputs are cast. Where code asks for fp32, bf16 or fp16 by name, as
norms of language models do, it gets fp64 as well: a cast to fp32 in the middle of a forward would
bring the rounding back.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path

from drivetrain.checkpoint.encoding import write_tensors
from drivetrain.collectives.facts import gather_facts
from drivetrain.config import DtypesConfig, RecomputeConfig, Resolved
from drivetrain.errors import replace_text
from drivetrain.facade.prepared import Observer, PreparedModel, RunState
from drivetrain.facade.settings import StrategyChoice, resolve_strategy
from drivetrain.facade.weights import WholeWeights
from drivetrain.model.modules import UninheritedHook, clean_name, named_parameters, uncompiled
from drivetrain.nested import is_tensor, recursively_apply
from drivetrain.parallel.backward import in_backward

# --- the request to record a run, and its record ---

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
            run = replace(run, dtypes=DtypesConfig(), recompute=RecomputeConfig(), compile="none")
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
        replace_text(folder / RECORD, json.dumps(values))

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read a folder.

        Raises:
            FileNotFoundError: no run was recorded there.
        """
        values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        steps = TypeAdapter(list[StepRecord]).validate_python(values.pop("steps"))
        count = values.pop("states")
        states = [read_state(state_file(folder, number)) for number in range(count)]
        return cls(**values, steps=steps, states=states)


def read_state(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a safetensors file, whose values are read when they are needed."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def state_file(folder: Path, number: int) -> Path:
    """Return the file of the state after a step, 0 for before the first."""
    return folder / f"step-{number:04d}.safetensors"


# --- a run computed in fp64, and without dropout ---

_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward})


class Doubles(TorchFunctionMode):
    """While active, every dtype of fewer bits that torch is asked for is fp64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        if func in _CASTS:
            return Tensor.double(args[0])
        if func in _BACKWARDS:
            with self:  # functions of torch run without it, and backward may run a forward again
                return _backward(*args, **(kwargs or {}))
        given = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **given)


def _backward(
    outputs: Tensor | Sequence[Tensor],
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **named: Any,
) -> None:
    """Run backward as the functions of torch do, which would leave the mode again."""
    given = named.get("gradient", named.get("grad_tensors", gradients))
    tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    upstream = (given,) * len(tensors) if given is None or isinstance(given, Tensor) else given
    several = inputs.values() if isinstance(inputs, dict) else inputs or ()
    leaves = (inputs,) if isinstance(inputs, Tensor) else tuple(several)
    torch.autograd.graph._engine_run_backward(
        tensors,
        tuple(
            torch.ones_like(tensor) if gradient is None and tensor.requires_grad else gradient
            for tensor, gradient in zip(tensors, upstream, strict=True)
        ),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        leaves,
        allow_unreachable=True,
        accumulate_grad=True,
    )


@cache
def compute_in_doubles() -> None:
    """Let this process make and compute all floating point values in fp64 from now on."""
    torch.set_default_dtype(torch.float64)
    Doubles().__enter__()  # type: ignore[no-untyped-call]


def in_doubles(data: Any) -> Any:
    """Return nested data with every floating point tensor in fp64."""
    return recursively_apply(
        lambda tensor: tensor.to(torch.float64),
        data,
        test_type=lambda item: is_tensor(item) and item.dtype in _NARROW,
    )


def without_dropout(model: nn.Module) -> int:
    """Set the probabilities of all dropouts of a model to 0, and return how many there were.

    They are the numbers between 0 and 1 that modules keep under a name with "drop" in it, and the
    ``p`` of torch's own modules.
    """
    changed = 0
    for module in model.modules():
        own = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(module).items()):
            named = "drop" in name or (own and name == "p")
            if named and isinstance(value, float) and 0 < value <= 1:
                setattr(module, name, 0.0)
                changed += 1
    return changed


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


# --- records a run inside of its ranks ---

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
        self._begin()

    def _begin(self) -> None:
        """Forget the numbers of the step before."""
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

    def attach(self, state: RunState) -> None:
        """Take the state of the run, and write the record as it is."""
        self._state, self._weights = state, WholeWeights(state)
        self.record.strategy = state.config.strategy
        self.record.mesh = {name: axis.size for name, axis in state.run.mesh.items()}
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
        self.record.draws_masks |= entry.strategy.planning().draws_masks(entry.strategy.config)
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
        counts = self._request.reference and self._state.config.run.accumulation > 1
        return {
            index
            for index, entry in enumerate(self._state.models if counts else ())
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
            for each in self._state.models:
                for fact in each.strategy.state.facts(uncompiled(each.model)):
                    if fact.where:
                        self.record.whereabouts[self._qualified(each, fact.name)] = fact.where
        scale = 1.0 if entry.scale is None or entry.unscaled else entry.scale
        mine = named_parameters(entry.model)
        for name in _trained(entry):
            held = mine.get(clean_name(name))
            norm = entry.strategy.gradients.clip(math.inf, only=() if held is None else (held,))
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
            self._begin()
            self._keep_state()
            self._write()
            self._by_replica(())  # no rank leaves before the record is there
        if self._is_over and self._request.folder:
            self._state.forget()
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
        mine = self._state.run.mesh["dp"].rank, list(values)
        everyone = gather_facts(mine, tuple[int, list[float | str]], doing="the record of a step")
        first = dict(reversed(everyone))
        return tuple(tuple(first[index]) for index in sorted(first))

    def _moments(self) -> dict[str, float]:
        """Return the norms of the optimizers' state, of whatever parts ranks hold it in."""
        squares: dict[str, float] = {}
        for entry in self._state.models:
            for shard in entry.strategy.state.shards():
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
            for entry in self._state.models
            for name, tensor in self._weights.state_dict(entry.model).items()
        }
        if self._request.folder and self._state.world.is_main:
            path = state_file(Path(self._request.folder), len(self.record.states))
            write_tensors(path, state)
            self.record.states.append(read_state(path))
        else:
            self.record.states.append({} if self._request.folder else state)

    def _qualified(self, entry: PreparedModel, name: str) -> str:
        """Return a tensor's name, which tells the models of a run apart."""
        index = self._state.models.index(entry)
        return f"{name} of model {index}" if index else name

    def _write(self) -> None:
        if self._request.folder and self._state.world.is_main:
            self.record.write(Path(self._request.folder))


def launched_recorder(path: str) -> Observer:
    """Return the recorder of the request with which this process was started."""
    return Recorder(RecordRequest.read(Path(path)), _launched_record(path))


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
    for fact in entry.strategy.state.facts(uncompiled(entry.model)):
        if fact.trainable:
            first.setdefault(fact.identity, fact.name)
    return list(first.values())


Kind = Literal[
    "start", "loss", "gradient norm", "stepped gradient", "optimizer state", "weight", "note"
]
Verdict = Literal["equal", "rounding", "error"]

SHRINKS = 1e-5
"""Rounding is 2**29 times smaller in fp64 than in fp32; an error stays. This lies well between."""

DOUBLE_ROUNDING = 1e-12
"""Largest relative difference that sums in another order make in fp64, with room for some steps."""

SINGLE_ROUNDING = 1e-6
"""The same in fp32, where fp64 cannot be had."""

LOOSE: Mapping[Kind, float] = {
    "start": 1e-6,
    "loss": 1e-2,
    "gradient norm": 5e-2,
    "stepped gradient": 5e-2,
    "optimizer state": 5e-2,
    "weight": 1e-2,
    "note": 1e-2,
}
"""Largest relative difference by kind that counts as rounding where fp64 cannot be had."""

LOW_ROUNDING = 0.05
"""More than low dtypes put a weight apart in some steps, unless the steps are as long as that."""

SHORTER = 20
"""How much shorter than the steps before a step may be, and count as long as these."""


_SEED = (
    "; the script draws data by rank, time or an unseeded generator: seed it, and take batches "
    "from a prepared loader"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One number, or tensor, that is not the same in both runs.

    Attributes:
        step: optimizer step, from 1; 0 for the state before the first.
        kind: of the number.
        name: of the parameter, buffer or note, of state with its key; "" for a loss.
        found: the number in the run; of a tensor the element that differs most.
        expected: the same in the reference.
        absolute: distance of the two.
        relative: distance divided by the number's scale: the largest element of the tensor, the
            norm of all gradients, or the loss.
        of_change: distance divided by the largest change of the tensor in this step; None for other
            numbers than weights, and for a tensor that did not change.
        gradient: of a weight, the largest norm that its gradient had so far in either run, divided
            by the norm of all gradients; None for other numbers, and without a gradient.
        where: rank and micro-batch, or unit or stage.
    """

    step: int
    kind: Kind
    name: str = ""
    found: float = 0.0
    expected: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0
    of_change: float | None = None
    gradient: float | None = None
    where: str = ""

    @property
    def key(self) -> tuple[int, str, str, str]:
        """Tells which number it is, in every repetition of the two runs."""
        return self.step, self.kind, self.name, self.where


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences between a run and its reference.

    Attributes:
        problem: why the two cannot be compared; "" if they can.
        steps: how many steps both have.
        compared: how many numbers were compared, by kind.
        differences: what is not equal to the last bit, in the order of the step.
    """

    problem: str = ""
    steps: int = 0
    compared: Mapping[Kind, int]
    differences: Sequence[Difference] = ()

    def largest(self, kind: Kind) -> float:
        """Return the largest relative difference of a kind, 0 when all numbers are equal."""
        return max((each.relative for each in self.differences if each.kind == kind), default=0.0)


def compare(run: RunRecord, reference: RunRecord) -> Comparison:
    """Compare a run with its reference, bit by bit."""
    steps = min(len(run.steps), len(reference.steps))
    problem = _problem(run, reference)
    if problem:
        return Comparison(problem=problem, steps=steps, compared={})
    counts: dict[Kind, int] = {}
    differences = []
    gradients: dict[str, float] = {}
    for number in range(steps + 1):
        if number:
            _follow(gradients, run.steps[number - 1].norms, reference.steps[number - 1].norms)
        for each in _step(run, reference, number):
            counts[each.kind] = counts.get(each.kind, 0) + 1
            if each.absolute != 0:
                size = gradients.get(each.name) if each.kind == "weight" else None
                differences.append(replace(each, gradient=size))
    return Comparison(steps=steps, compared=counts, differences=differences)


def judge(
    comparison: Comparison, repeated: Comparison | None = None, *, doubles: bool = False
) -> tuple[Verdict, Sequence[Difference]]:
    """Tell rounding from error.

    Args:
        comparison: of the runs as they are.
        repeated: of both runs in fp64; None where there is no such repetition.
        doubles: whether the runs as they are were computed in fp64 already.

    Returns:
        The verdict, and the differences that are errors, in the order of the step: those of the
        repetition, if there is one, and behind them those that only the runs as they are have.
    """
    if not comparison.differences:
        return "equal", ()
    doubles = doubles or repeated is not None
    limits = dict.fromkeys(LOOSE, DOUBLE_ROUNDING) if doubles else LOOSE
    noise = DOUBLE_ROUNDING if doubles else SINGLE_ROUNDING
    shrunk = {each.key: SHRINKS * each.absolute for each in comparison.differences}
    errors = [
        each
        for each in (comparison if repeated is None else repeated).differences
        if not each.relative <= limits[each.kind]  # NaN is beyond
        and not (repeated is not None and each.absolute <= shrunk.get(each.key, 0.0))
        and not _is_noise(each, noise)
    ]
    if repeated is not None:
        known = {each.key for each in errors}
        errors += [
            each
            for each in comparison.differences
            if each.key not in known and _is_left_behind(each)
        ]
    return ("error" if errors else "rounding"), errors


def _is_noise(difference: Difference, rounding: float) -> bool:
    """Whether a weight is apart because the optimizer steps by the sign of its gradient's rounding.

    The gradient of a bias in front of a normalisation, or of attention's keys, is zero but for
    rounding. Adam makes steps of full length of it, in any direction: two runs move apart by twice
    the change of a step at most, in each step.
    """
    size, change = difference.gradient, difference.of_change
    if size is None or change is None:
        return False
    return 0 < size <= rounding and change <= 2 * difference.step


def _is_left_behind(difference: Difference) -> bool:
    """Whether a weight is further apart than low dtypes and the steps so far can have put it.

    A repetition in fp64 has no masters beside low weights, and so does not show that a write of the
    script has missed them. Rounding can turn each step around: then two runs move apart by twice
    the length of a step, which may have been longer before; and where the gradient is nothing but
    rounding, as that of attention's key biases, by any number of steps.
    """
    change, size = difference.of_change, difference.gradient
    return (
        difference.kind == "weight"
        and change is not None
        and not (size is not None and 0 < size <= SINGLE_ROUNDING)
        and not difference.relative <= LOW_ROUNDING  # NaN is beyond
        and not change <= SHORTER * difference.step
    )


def _follow(
    gradients: dict[str, float], mine: Mapping[str, float], theirs: Mapping[str, float]
) -> None:
    """Note the largest gradient of each parameter so far, as a part of the norm of all."""
    scale = math.hypot(*theirs.values())
    for name, norm in theirs.items():
        size = max(mine.get(name, math.nan), norm) / scale if scale else 0.0
        gradients[name] = max(size, gradients.get(name, 0.0))


def _problem(run: RunRecord, reference: RunRecord) -> str:
    """Return why two runs cannot be compared, "" if they can."""
    if not run.steps or not reference.steps:
        return "no optimizer step was recorded"
    for number, (mine, theirs) in enumerate(zip(run.steps, reference.steps, strict=False), 1):
        problem = _other_batch(mine.batches, theirs.batches)
        if problem:
            return (
                f"expected the same batches in both runs, found {problem} of step {number}{_SEED}"
            )
    only = sorted(set(run.states[0]) ^ set(reference.states[0]))
    if only:
        return f"expected the same tensors in both runs, found in one of them only: {only[:4]}"
    if len(run.steps) != len(reference.steps):
        return f"expected {len(reference.steps)} steps as in the reference, found {len(run.steps)}"
    return ""


def _other_batch(mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> str:
    """Return which batch differs, "" if none does.

    Where all ranks of the reference had the same batches, a single replica has to have these.
    """
    if len(mine) == 1 and len(set(theirs)) == 1:
        theirs = theirs[:1]
    for replica, batches in enumerate(zip_longest(mine, theirs, fillvalue=())):
        for batch, (left, right) in enumerate(zip_longest(*batches), 1):
            if left != right:
                return f"another batch {batch} on data-parallel rank {replica}"
    return ""


def _step(run: RunRecord, reference: RunRecord, number: int) -> Iterator[Difference]:
    """Yield every number of a step with its distance; step 0 is the state before the first."""
    if number:
        mine, theirs = run.steps[number - 1], reference.steps[number - 1]
        yield from _losses(number, mine.losses, theirs.losses)
        places = run.whereabouts
        yield from _norms(number, "gradient norm", mine.norms, theirs.norms, places)
        yield from _norms(number, "stepped gradient", mine.stepped, theirs.stepped, places)
        for state in dict.fromkeys(name.partition(" of ")[0] for name in theirs.moments):
            own = {k: v for k, v in theirs.moments.items() if k.startswith(f"{state} of ")}
            yield from _norms(number, "optimizer state", mine.moments, own, places)
        for name, value in theirs.notes.items():
            note = mine.notes.get(name, math.nan)
            yield _number(number, "note", name, note, value, abs(value), "")
    before = reference.states[number - 1] if number else {}
    for name, expected in reference.states[number].items():
        where = run.whereabouts.get(name, "")
        yield _tensor(number, name, run.states[number][name], expected, before.get(name), where)


def _losses(
    number: int, mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> Iterator[Difference]:
    for replica, losses in enumerate(zip(mine, theirs, strict=False)):
        for batch, (found, expected) in enumerate(zip_longest(*losses, fillvalue=math.nan), 1):
            where = f"micro-batch {batch} of data-parallel rank {replica}"
            yield _number(number, "loss", "", found, expected, abs(expected), where)


def _norms(
    number: int,
    kind: Kind,
    mine: Mapping[str, float],
    theirs: Mapping[str, float],
    places: Mapping[str, str],
) -> Iterator[Difference]:
    """Yield the norms in the order of backward: the first difference is nearest the cause."""
    scale = math.hypot(*theirs.values())
    for name in reversed(list(theirs)):
        found, where = mine.get(name, math.nan), places.get(name, "")
        yield _number(number, kind, name, found, theirs[name], scale, where)


def _number(
    step: int, kind: Kind, name: str, found: float, expected: float, scale: float, where: str
) -> Difference:
    equal = found == expected or (math.isnan(found) and math.isnan(expected))
    absolute = 0.0 if equal else abs(found - expected)  # NaN where one of them is
    return Difference(
        step=step,
        kind=kind,
        name=name,
        found=found,
        expected=expected,
        absolute=absolute,
        relative=_ratio(absolute, scale),
        where=where,
    )


def _tensor(
    step: int, name: str, found: Tensor, expected: Tensor, before: Tensor | None, where: str
) -> Difference:
    same = Difference(step=step, kind="weight" if step else "start", name=name, where=where)
    if found.shape != expected.shape:
        return replace(same, absolute=math.inf, relative=math.inf)
    if not expected.numel() or torch.equal(found, expected):
        return same
    wide = torch.complex128 if expected.is_complex() else torch.float64
    mine, theirs = found.to(wide).flatten(), expected.to(wide).flatten()
    apart = torch.where(mine.isnan() & theirs.isnan(), 0.0, (mine - theirs).abs())
    apart = torch.where(mine == theirs, 0.0, apart)  # equal infinities
    worst = int(apart.nan_to_num(nan=math.inf).argmax())
    absolute = float(apart[worst])
    change = None
    if before is not None and before.shape == expected.shape:  # else that of another model
        change = float((theirs - before.to(wide).flatten()).abs().max())
    return replace(
        same,
        found=float(mine[worst].real),
        expected=float(theirs[worst].real),
        absolute=absolute,
        relative=_ratio(absolute, float(theirs.abs().max())),
        of_change=absolute / change if change else None,
    )


def _ratio(absolute: float, scale: float) -> float:
    if absolute == 0:
        return 0.0
    return absolute / scale if scale else math.inf
