"""Constructs a model without memory: operations are recorded, and repeated for needed values.

Inside ``ConstructionRecording.active()`` every new tensor lives on the meta device. ``materialize``
then gives any of these tensors its values: the operations that the values depend on are repeated,
no others, and the results in between are freed. The values are bit for bit those of ordinary
construction.

A random operation is written down with the state of its generator, and really run once for nothing,
so that the generator moves on as in ordinary construction. So at most a few tensors are real at a
time, and initialisation takes twice as long.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.building import schema
from drivetrain.building.modes import OperationMode, ValueMode, Versions
from drivetrain.building.operation import (
    Captured,
    Draw,
    Memory,
    Operation,
    StorageView,
    default_generator,
    storage_key,
)
from drivetrain.building.schema import Operator
from drivetrain.errors import UsageError
from drivetrain.memory import Heap
from drivetrain.parts.guard import Arguments, Keywords
from drivetrain.shards import Ranges, is_dense

_CPU = torch.device("cpu")


class ConstructionRecording:
    """The operations of one construction, by the storages that they write.

    Attributes:
        versions: tells whether tensors were changed after ``active()`` ended.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._writers: dict[int, list[int]] = {}  # by storage: indices of operations, ascending
        self._homes: dict[int, torch.device] = {}  # by storage: where it would ordinarily live
        self._storages: list[torch.UntypedStorage] = []  # alive, so that identities stay unique
        self._captured: dict[int, list[Captured]] = {}  # by the storage outside
        self._heap = Heap()
        self.versions = Versions()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of the construction."""
        try:
            with ValueMode(self), OperationMode(self):
                yield
        finally:
            self._heap.relieve(0)
            self.versions.note(self.knows)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values can be made from this recording."""
        return tensor.is_meta and storage_key(tensor) in self._writers

    def home(self, tensor: Tensor) -> torch.device:
        """Return where a known tensor would live in ordinary construction."""
        return self._homes[storage_key(tensor)]

    def facts(self, tensors: Sequence[Tensor]) -> Iterator[str]:
        """Yield facts that must be equal on ranks for the tensors to get equal values."""
        for index in self._needed({storage_key(tensor) for tensor in tensors}):
            operation = self._operations[index]
            line = f"operation {index} {operation.function}"
            if operation.draw is not None:
                line += f" from random state {_digest(operation.draw.state)}"
            values = tree_leaves((operation.args, operation.kwargs))
            outside = [_digest(v.tensor) for v in values if isinstance(v, Captured)]
            yield f"{line} of values {' '.join(outside)}" if outside else line

    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return real tensors with the values of recorded ones, in fresh memory.

        Views of one storage are views of one storage again. The tensors live where ordinary
        construction would have put them, and carry no autograd graph.

        Raises:
            UsageError: a tensor is not of this recording.
        """
        strangers = [t for t in tensors if not self.knows(t)]
        if strangers:
            raise UsageError(
                "expected tensors that were built inside of this recording, found one of shape "
                f"{tuple(strangers[0].shape)} on {strangers[0].device}"
            )
        self._heap.relieve()
        places = [StorageView.of(tensor) for tensor in tensors]
        with _disable_current_modes(), torch.no_grad():
            memory = self._repeat({place.storage for place in places})
            return [place.tensor(memory) for place in places]

    def perform(self, function: Operator, args: Arguments, kwargs: Keywords) -> Any:
        """Do one operation of the construction: record it, or run it where values are needed.

        Raises:
            UsageError: the operation communicates, or mixes tensors in an unrecordable way.
        """
        tensors = [v for v in tree_leaves((args, kwargs)) if _is_tensor(v)]
        written = schema.written(function, args, kwargs)
        if any(t.is_meta and not self.knows(t) for t in tensors):
            return self._leave(function, args, kwargs, written)
        if function.namespace not in schema.LOCAL and not any(t.is_meta for t in tensors):
            return function(*args, **kwargs)
        if function.namespace in schema.COMMUNICATING:
            raise UsageError(
                f"expected no communication inside of building(), found {function} on a tensor "
                "that has no values yet; communicate before or after"
            )
        if schema.is_view(function):
            return function(*args, **kwargs)
        outside = [t for t in written if not t.is_meta]
        if outside or schema.needs_values(function):
            return self._run(function, args, kwargs, outside)
        return self._record(function, args, kwargs, tensors)

    def _record(
        self, function: Operator, args: Arguments, kwargs: Keywords, tensors: Sequence[Tensor]
    ) -> Any:
        home = self._home(kwargs, tensors)
        # Before the call: some operators change the geometry of their arguments.
        noted, named = tree_map(self._note, (tuple(args), dict(kwargs)))
        if named.get("device") is not None:
            named["device"] = home  # it was meta if it is that of another tensor
        draw = _draw(function, args, kwargs, home)
        reads = {storage_key(t) for t in tensors if t.is_meta}
        overwrites = _overwritten(function, tensors)
        try:
            result = schema.on_meta(function, args, kwargs)
        except NotImplementedError:
            if schema.makes_tensors(function):
                return self._run(function, args, kwargs, [])
            result = args[0] if function._schema.returns else None
        if draw is not None:
            self._run(function, args, kwargs, [])
            self._heap.throw(sum(v.nbytes for v in tree_leaves(result) if _is_tensor(v)))
        outputs = tuple(self._new(value, home) for value in tree_leaves(result))
        operation = Operation(
            function,
            noted,
            named,
            outputs,
            frozenset(reads),
            draw,
            torch.get_default_dtype(),
            overwrites,
        )
        changed = {storage_key(t) for t in schema.written(function, args, kwargs)}
        for key in changed | {place.storage for place in outputs if place is not None}:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)
        return result

    def _run(
        self, function: Operator, args: Arguments, kwargs: Keywords, changing: Sequence[Tensor]
    ) -> Any:
        """Really run an operation, on the values that recorded tensors would have."""
        for tensor in changing:
            for captured in self._captured.pop(storage_key(tensor), []):
                captured.keep()
        values = tree_leaves((args, kwargs))
        known = {id(v): v for v in values if _is_tensor(v) and v.is_meta}
        real: dict[int, Tensor] = {}
        if known and schema.overwriting(function) and _is_tensor(args[0]) and args[0].is_meta:
            target = known.pop(id(args[0]))
            real[id(target)] = torch.empty_strided(
                target.shape, target.stride(), dtype=target.dtype, device=self.home(target)
            )
        real.update(zip(known, self.materialize(list(known.values())), strict=True))
        with _disable_current_modes():
            values, named = tree_map(lambda v: real.get(id(v), v), (tuple(args), dict(kwargs)))
            return function(*values, **named)

    def _leave(
        self, function: Operator, args: Arguments, kwargs: Keywords, written: Sequence[Tensor]
    ) -> Any:
        """Run an operation on tensors that have no values in ordinary construction either."""
        if any(self.knows(tensor) for tensor in written):
            raise UsageError(
                f"expected {function} inside of building() to read tensors with values, found one "
                "on the meta device that was made outside; make it inside"
            )
        return function(*args, **kwargs)

    def _note(self, value: Any) -> Any:
        """Return the recording's own form of an argument."""
        if isinstance(value, torch.Generator):
            return Draw(value.device, value.get_state(), explicit=True)
        if not _is_tensor(value):
            return value
        if value.is_meta:
            return StorageView.of(value)
        captured = Captured(value)
        self._captured.setdefault(storage_key(value), []).append(captured)
        return captured

    def _home(self, kwargs: Keywords, tensors: Sequence[Tensor]) -> torch.device:
        """Return where the results of an operation would ordinarily live."""
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type != "meta":
            return torch.device(asked)
        homes = [self._homes[storage_key(t)] if t.is_meta else t.device for t in tensors]
        return next((home for home in homes if home.type != "cpu"), _CPU)

    def _new(self, value: Any, home: torch.device) -> StorageView | None:
        """Return the place of a result if it is a new tensor, and remember its storage."""
        if not _is_tensor(value) or storage_key(value) in self._writers:
            return None
        self._storages.append(value.untyped_storage())
        self._homes[storage_key(value)] = home
        self._writers[storage_key(value)] = []
        return StorageView.of(value)

    def _repeat(self, targets: set[int]) -> Memory:
        """Repeat the operations that write these storages, in order; return their real memory."""
        needed = self._needed(targets)
        last: dict[int, int] = {}
        for index in needed:
            last.update(dict.fromkeys(self._operations[index].touched(), index))
        memory: Memory = {}
        for index in needed:
            operation = self._operations[index]
            operation.run(memory)
            made = [place.storage for place in operation.outputs if place is not None]
            self._heap.throw(sum(memory[key].nbytes() for key in made))
            for key in operation.touched() - targets:
                if last[key] == index:
                    del memory[key]
        return memory

    def _needed(self, targets: set[int]) -> list[int]:
        """Return the operations that these storages' values depend on, ascending."""
        found: set[int] = set()
        pending = [self._writers[key][-1] for key in targets]
        while pending:
            index = pending.pop()
            if index in found:
                continue
            found.add(index)
            operation = self._operations[index]
            for key in operation.reads:
                writers = self._writers[key]
                before = bisect_left(writers, index)
                pending.append(writers[0] if operation.overwrites == key else writers[before - 1])
        return sorted(found)


class RecordedWeights:
    """The values of a model that was built inside of recordings: a ``WeightSource``."""

    def __init__(self, recordings: Sequence[ConstructionRecording]) -> None:
        self._recordings = tuple(recordings)

    def value(self, name: str, tensor: Tensor, only: Ranges | None = None) -> Tensor:
        """Return values of one tensor on the CPU, in fresh memory; whole, with its strides.

        Raises:
            UsageError: no recording knows the tensor.
        """
        recording = next((r for r in self._recordings if r.knows(tensor)), None)
        if recording is None:
            raise UsageError(unknown_values([name]))
        values = recording.materialize([tensor])[0].to(_CPU)
        if only is not None:
            return only.of(values)
        size = values.untyped_storage().nbytes()
        if size > values.numel() * values.element_size() and is_dense(values):
            return values.clone()  # do not keep the rest of what it was cut from
        return values


def unknown_values(names: Sequence[str]) -> str:
    """Return the message about tensors of the meta device that nobody knows the values of."""
    return (
        f"expected every parameter and buffer to have values, found {len(names)} on the meta "
        f"device that no building() of this Accelerator made, such as {', '.join(names[:4])}; "
        "construct the model inside `with accelerator.building():`, or give it values before "
        "prepare() with to_empty() and an initialisation"
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _draw(function: Operator, args: Arguments, kwargs: Keywords, home: torch.device) -> Draw | None:
    """Return the state that a random operation starts from; None for other operations."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    values = tree_leaves((args, kwargs))
    given = next((v for v in values if isinstance(v, torch.Generator)), None)
    generator = default_generator(home) if given is None else given
    return Draw(generator.device, generator.get_state(), explicit=given is not None)


def _overwritten(function: Operator, tensors: Sequence[Tensor]) -> int | None:
    """Return the storage of which an operation sets every byte without reading it."""
    if not schema.overwriting(function):
        return None
    target, others = tensors[0], tensors[1:]
    key = storage_key(target)
    whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
    if not whole or not is_dense(target) or any(storage_key(t) == key for t in others):
        return None
    return key


def _digest(tensor: Tensor) -> str:
    """Return a few letters that change with a tensor's bytes."""
    return f"{int(torch.hash_tensor(tensor.to(_CPU))):x}"
