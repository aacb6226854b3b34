"""Training state: the contract for what ranks hold, save and load; that of replicated models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError, UsageError
from drivetrain.model.modules import named_parameters, persistent_buffers
from drivetrain.runtime.parts import label
from drivetrain.shards import (
    HeldPart,
    ParameterPiece,
    Reader,
    Shard,
    TensorFacts,
    outer_dim,
    parameters_among,
    state_tensors,
)

T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

OWN_MARK = "@"
"""In the key of a state that only the strategy which saved it can read; others leave it alone."""

Shapes = Mapping[tuple[str, str], tuple[int, ...]]
"""Global shapes by (name, state)."""


AROUND = ("outer", "outer_momentum", "outer_gradient")
"""Keys of the state that a strategy around another one puts beside an optimizer's own."""

LINKS = "links."
"""How keys of state begin that sums over slow links keep; it belongs to no optimizer."""


def check_fits(
    reader: Reader,
    expected: Shapes,
    held: set[tuple[int, str]],
) -> None:
    """Refuse a checkpoint of another model, or with state that no optimizer here holds.

    Args:
        reader: the checkpoint.
        expected: global shape of every parameter and buffer by (name, "").
        held: (index of an optimizer, name of its parameter).

    Raises:
        CheckpointError: lists the first differing names and shapes.
    """
    found = {
        (name, state): reader.shape(name, state)
        for name, state in sorted(reader.keys())
        if not state or (_is_of_optimizer(state) and (_index(state), name) not in held)
    }
    if reader.partial:
        expected = {key: shape for key, shape in expected.items() if key in found}
    difference = describe_difference(expected, found)
    if difference:
        raise CheckpointError(f"the checkpoint does not fit this model: {difference}")


def describe_difference(expected: Shapes, found: Shapes, *, first: int = 8) -> str:
    """Return a message with the first differing names and shapes, "" when nothing differs.

    Args:
        expected: (name, state) -> global shape in the model and its optimizers.
        found: the same in the checkpoint.
        first: how many differences of each kind are listed.
    """
    missing = [label(*key) for key in expected if key not in found]
    surplus = [label(*key) for key in found if key not in expected]
    shapes = [
        f"{label(*key)}: expected {tuple(expected[key])}, found {tuple(found[key])}"
        for key in expected
        if key in found and tuple(expected[key]) != tuple(found[key])
    ]
    kinds = (
        ("missing from the checkpoint", missing),
        ("in the checkpoint only", surplus),
        ("of another shape", shapes),
    )
    texts = [f"{len(items)} {what}: {_some(items, first)}" for what, items in kinds if items]
    if not texts:
        return ""
    return (
        f"expected {len(expected)} tensors, found {len(found)} in the checkpoint; "
        f"{'; '.join(texts)}. Load it into the model and optimizers it was saved from"
    )


def _some(items: list[str], first: int) -> str:
    more = len(items) - first
    return ", ".join(items[:first]) + (f", and {more} more" if more > 0 else "")


def weights_in(reader: Reader, wanted: Mapping[str, T]) -> Mapping[str, T]:
    """Return the weights and buffers, by name, that a checkpoint gives values to."""
    if not reader.partial:
        return wanted
    held = {name for name, state in reader.keys() if not state}  # noqa: SIM118 - no dict
    return {name: value for name, value in wanted.items() if name in held}


def state_keys(reader: Reader) -> dict[tuple[str, int], list[str]]:
    """Return the saved keys of tensors by (name of the parameter, index of the optimizer)."""
    keys: dict[tuple[str, int], list[str]] = {}
    for name, state in sorted(reader.keys()):
        if _is_of_optimizer(state):
            index, _, key = state.partition(".")
            keys.setdefault((name, int(index)), []).append(key)
    return keys


def _is_of_optimizer(state: str) -> bool:
    return bool(state) and OWN_MARK not in state and not state.startswith(LINKS)


def _index(state: str) -> int:
    return int(state.partition(".")[0])


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the parameter group that holds a parameter."""
    return next(
        group
        for group in optimizer.param_groups
        if any(member is parameter for member in group["params"])
    )


def allocate_state(
    values: Tensor, key: str, parameter: nn.Parameter, group: Mapping[str, Any]
) -> Tensor:
    """Return an empty state tensor, of the dtype and on the device that torch's optimizers use."""
    if key == "step":
        on_device = bool(group.get("capturable") or group.get("fused"))
        return torch.empty_like(values, device=parameter.device if on_device else "cpu")
    if values.shape == parameter.shape:
        dtype = parameter.dtype if values.is_floating_point() else values.dtype
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty_like(values, device=parameter.device)


class TrainingState(ABC):
    """The training state of a prepared model: what ranks hold, show, save and load of it.

    By default every rank has all values, and optimizers hold the user's parameters and all state
    here; a strategy that changes their groups does so at a step.

    Attributes:
        divided: whether optimizers hold less than all state here, or not by the user's parameters.
    """

    divided: bool = False

    # --- checkpoints ---

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield parameters, persistent buffers and optimizer state held by this rank.

        Together the ranks yield each element exactly once.
        """

    def check(self, reader: Reader) -> None:
        """Refuse a checkpoint that ``load`` would refuse; nothing changes. By default none.

        Raises:
            CheckpointError: as of ``load``; a run's other models have not been loaded yet.
        """
        return

    @abstractmethod
    def load(self, reader: Reader) -> None:
        """Load the state that ``shards`` yields, from a checkpoint of any strategy and world size.

        Raises:
            CheckpointError: names or shapes differ; the message lists the first differences.
        """

    def progress(self) -> Mapping[str, int]:
        """Return the strategy's counts, alike on all ranks, to be saved with a checkpoint."""
        return {}

    def resume(self, progress: Mapping[str, int]) -> None:
        """Go on counting from the ``progress`` of a saved run, perhaps of another strategy."""
        return

    # --- whole values of the model ---

    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> AbstractContextManager[None]:
        """Context in which these parameters are whole on every rank; all ranks must enter it.

        Args:
            parameters: of the prepared model.
            modify: whether they may be changed inside; where ranks differ rank 0's values count.
        """
        return nullcontext()

    def facts(self, module: nn.Module) -> Sequence[TensorFacts]:
        """Describe the tensors of the whole model's state dict, alike on every rank. Collective.

        Args:
            module: as ``prepare`` returned it.
        """
        return [TensorFacts.of(name, tensor) for name, tensor in state_tensors(module).items()]

    @contextmanager
    def whole(self, module: nn.Module, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Context with some whole tensors of the model's state on every rank, to be read.

        Args:
            module: as ``prepare`` returned it.
            names: of ``facts``.
        """
        state = state_tensors(module)
        with self.gathered(parameters_among(state[name] for name in names), modify=False):
            yield {name: state[name].detach() for name in names}

    def dtensors(self) -> Mapping[str, Tensor]:
        """Return the shards of all parameters, by name, as ``torch.distributed.tensor.DTensor``s.

        They share the shards' memory. Every rank must call it.

        Raises:
            UsageError: the strategy does not keep rows of parameters.
        """
        raise UsageError(
            "expected a strategy that keeps rows of each parameter, found another, with "
            f"{type(self).__name__}; take accelerator.get_state_dict(model) for whole tensors, or "
            "save_state(), whose shards every strategy reads"
        )

    # --- the tensors in the groups of optimizers, and the state that these keep of them ---

    def names(self) -> Mapping[int, str]:
        """Return the names of those that stand in place of parameters, by identity."""
        return {}

    def parts(self) -> Mapping[str, HeldPart]:
        """Return the parameters of which this rank's modules have parts, by name: by default none.

        Not meant are pieces into which a strategy cuts parameters between their uses.
        """
        return {}

    def states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        """Yield this rank's share of an optimizer's state tensors, as ``shards`` does.

        Args:
            index: of the optimizer, in the order of ``prepare``.
            names: of the parameters whose state is wanted.
        """
        for shard in self.shards():
            of_optimizer = shard.name in names and _is_of_optimizer(shard.state)
            if of_optimizer and _index(shard.state) == index:
                yield shard

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Replace an optimizer's state for some parameters, and nothing else. No communication.

        Args:
            index: of the optimizer, in the order of ``prepare``.
            reader: has the whole state; none for a parameter means as before the first step.
            names: of the parameters.

        Raises:
            CheckpointError: the state does not fit; nothing was changed.
        """
        raise UsageError(
            f"{type(self).__name__} cannot take the state of an optimizer alone; save_state() and "
            "load_state() take all of a run"
        )

    def take_changes(self, optimizer: Optimizer) -> bool:
        """Take over added param groups and replaced memory of parameters, before a step.

        Returns:
            Whether the groups now hold what the step changes. By default False: they may do so
            behind the hook before the step that ``prepare`` registers, and values are those of
            before the step there.
        """
        return False

    def dtype(self, tensor: nn.Parameter) -> torch.dtype:
        """Return the dtype of a tensor's values, on all ranks and at all times the same."""
        return tensor.dtype

    def piece(self, tensor: nn.Parameter) -> ParameterPiece:
        """Return which elements of a parameter a tensor has: by default, all."""
        return ParameterPiece(tuple(tensor.shape), outer_dim(tensor), 0, tensor.numel())

    def values(self, tensor: nn.Parameter) -> Tensor:
        """Return the values of a tensor, behind steps under way: in place, or a copy in memory."""
        return tensor.detach()

    def set_values(self, tensor: nn.Parameter, values: Tensor) -> None:
        """Replace the values of a tensor, between two steps of its optimizer.

        For hooks around a step that are registered before ``prepare``: other ranks get the values
        as those of the step.
        """
        tensor.detach().copy_(values)


def left_inside(method: MethodT) -> MethodT:
    """Return a method that is the same method of the object inside, ``inner``."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, method.__name__)(*args, **kwargs)

    return cast(MethodT, call)


class StateAround(TrainingState):
    """The state of a strategy around another one, whose optimizers hold what they hold inside.

    What is saved, loaded and gathered stands in the coordinates of the model that the strategy was
    given: that is each subclass's own.

    Args:
        inner: the state of the strategy inside.
    """

    def __init__(self, inner: TrainingState) -> None:
        self.inner = inner
        self.divided = inner.divided

    progress = left_inside(TrainingState.progress)
    resume = left_inside(TrainingState.resume)
    facts = left_inside(TrainingState.facts)
    names = left_inside(TrainingState.names)
    parts = left_inside(TrainingState.parts)
    states = left_inside(TrainingState.states)
    load_states = left_inside(TrainingState.load_states)
    take_changes = left_inside(TrainingState.take_changes)
    dtype = left_inside(TrainingState.dtype)
    piece = left_inside(TrainingState.piece)
    values = left_inside(TrainingState.values)
    set_values = left_inside(TrainingState.set_values)


class ReplicatedState(TrainingState):
    """Parameters, persistent buffers and optimizer state that every rank holds whole.

    Args:
        model: the user's model.
        optimizers: of its parameters.
        rank: this one among those that share out what is saved.
        size: how many these are.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Optimizer] = (), rank: int = 0, size: int = 1
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._rank, self._size = rank, size

    def add(self, optimizer: Optimizer) -> None:
        """Count the state of one more optimizer, behind the others."""
        self._optimizers = (*self._optimizers, optimizer)

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's share: whole tensors, the largest first to the rank with least.

        Buffers are rank 0's: between two steps ranks may differ, and the next step starts with the
        values of rank 0.
        """
        entries = list(self._tensors())
        buffers = persistent_buffers(self._model)
        load = [0] * self._size
        owners = {i: 0 for i, (name, _, _) in enumerate(entries) if name in buffers}
        shared = [index for index in range(len(entries)) if index not in owners]
        for index in sorted(shared, key=lambda index: (-entries[index][2].nbytes, index)):
            owners[index] = load.index(min(load))
            load[owners[index]] += entries[index][2].nbytes
        for index, (name, state, tensor) in enumerate(entries):
            if owners[index] == self._rank:
                yield Shard.whole(name, state, tensor)

    def load(self, reader: Reader) -> None:
        """Copy a checkpoint into the tensors that are there; create missing optimizer state.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        self.check(reader)
        keys = state_keys(reader)
        with torch.no_grad():
            for name, tensor in weights_in(reader, self._model_tensors()).items():
                tensor.copy_(reader.read(name))
            for index, name, parameter in self._optimized():
                self._load_state(reader, keys.get((name, index), []), index, name, parameter)

    @torch.no_grad()
    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Replace an optimizer's state for some parameters, on every rank."""
        keys = state_keys(reader)
        for number, name, parameter in self._optimized():
            if number == index and name in names:
                self._load_state(reader, keys.get((name, index), []), index, name, parameter)

    def whole_states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        """Yield all of an optimizer's state tensors for some parameters, on any rank."""
        for number, name, parameter in self._optimized():
            if number == index and name in names:
                for key, value in self._optimizers[index].state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield Shard.whole(name, f"{index}.{key}", value)

    def held(self) -> set[tuple[int, str]]:
        """Return the index of the optimizer and the name of each optimized parameter."""
        return {(index, name) for index, name, _ in self._optimized()}

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the state, in the same order on every rank."""
        return [tensor for _, _, tensor in self._tensors()]

    def _model_tensors(self) -> dict[str, Tensor]:
        return {**named_parameters(self._model), **persistent_buffers(self._model)}

    def _optimized(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Yield (optimizer index, name, parameter) for the parameters of this model."""
        names = {parameter: name for name, parameter in named_parameters(self._model).items()}
        for index, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in names:
                        yield index, names[parameter], parameter

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name, state, tensor) of all that is saved, in the same order on every rank."""
        for name, tensor in self._model_tensors().items():
            yield name, "", tensor
        for index, name, parameter in self._optimized():
            state = self._optimizers[index].state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield name, f"{index}.{key}", value

    def check(self, reader: Reader) -> None:
        """Raise a CheckpointError if names or shapes of a checkpoint differ."""
        expected = {
            (name, ""): tuple(tensor.shape) for name, tensor in self._model_tensors().items()
        }
        check_fits(reader, expected, self.held())

    def _load_state(
        self,
        reader: Reader,
        keys: Sequence[str],
        index: int,
        name: str,
        parameter: nn.Parameter,
    ) -> None:
        optimizer = self._optimizers[index]
        scalars = reader.scalars(name, index)
        present = optimizer.state.get(parameter, {})
        loaded: dict[str, Any] = dict(scalars)
        for key in keys:
            values = reader.read(name, f"{index}.{key}")
            kept = present.get(key)
            if not isinstance(kept, Tensor) or kept.shape != values.shape:
                kept = allocate_state(values, key, parameter, group_of(optimizer, parameter))
            loaded[key] = kept.copy_(values)
        if loaded:
            optimizer.state[parameter] = loaded
        else:
            optimizer.state.pop(parameter, None)
