"""The training state of a replicated model: which rank saves which tensors, and loading."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.saved_state import allocate_state, check_fits, group_of, state_keys
from drivetrain.shards import Part, Reader, Shard


class ReplicatedState:
    """Parameters, persistent buffers and optimizer state that every rank holds whole.

    Args:
        model: the user's model.
        optimizers: those that hold its parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)

    def add(self, optimizer: Optimizer) -> None:
        """Count the state of one more optimizer, behind the others."""
        self._optimizers = (*self._optimizers, optimizer)

    def shards(self, rank: int, size: int) -> Iterator[Shard]:
        """Yield this rank's share: whole tensors, the largest first to the rank with least.

        Buffers are rank 0's: between two steps a rank's own may differ, and rank 0's are those
        that the next step starts with.
        """
        entries = list(self._tensors())
        buffers = persistent_buffers(self._model)
        load = [0] * size
        owners = {i: 0 for i, (name, _, _) in enumerate(entries) if name in buffers}
        shared = [index for index in range(len(entries)) if index not in owners]
        for index in sorted(shared, key=lambda index: (-entries[index][2].nbytes, index)):
            owners[index] = load.index(min(load))
            load[owners[index]] += entries[index][2].nbytes
        for index, (name, state, tensor) in enumerate(entries):
            if owners[index] == rank:
                shape = tuple(tensor.shape)
                yield Shard(name, state, tensor.detach(), shape, Part.whole(shape))

    def load(self, reader: Reader) -> None:
        """Copy a checkpoint into the tensors that are there; create missing optimizer state.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        self._check(reader)
        keys = state_keys(reader)
        with torch.no_grad():
            for name, tensor in self._model_tensors().items():
                tensor.copy_(reader.read(name))
            for index, name, parameter in self._optimized():
                self._load_state(reader, keys.get((name, index), []), index, name, parameter)

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

    def _check(self, reader: Reader) -> None:
        expected = {
            (name, ""): tuple(tensor.shape) for name, tensor in self._model_tensors().items()
        }
        check_fits(reader, expected, {(index, name) for index, name, _ in self._optimized()})

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
