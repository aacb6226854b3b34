"""Deferred initialisation: large models whose tensors get their values later.

A ``ConstructionRecording`` constructs a model on the meta device and records how each value is
computed. A ``WeightSource`` returns the values of one tensor at a time, from recordings or files.
``fill`` gives values to tensors by name, ``become`` to a single tensor.

Constructs a model without memory: operations are recorded, and repeated for needed values.

Inside ``ConstructionRecording.active()`` every new tensor lives on the meta device. ``materialize``
then gives any of these tensors its values: the operations that the values depend on are repeated,
no others, and the results in between are freed. The values are bit for bit those of ordinary
construction.

A random operation is written down with the state of its generator, and really run once for nothing,
so that the generator moves on as in ordinary construction. So at most a few tensors are real at a
time, and initialisation takes twice as long.

Gives tensors of the meta device their values while they stay the same Python objects.

Optimizers, lists and other modules that hold such a tensor see the values too.
"""

import gc
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError
from drivetrain.memory import Heap
from drivetrain.model.guard import Arguments, Function, Keywords
from drivetrain.model.modules import clean_name
from drivetrain.nested import is_tensor, tensors_in
from drivetrain.shards import Ranges, WeightSource, is_dense

# --- the schema of an operator: what it writes and makes, and whether values are needed ---

Operator: TypeAlias = OpOverload[..., Any]

LOCAL = frozenset({"aten", "prims"})
"""Namespaces whose operators compute and do nothing else."""

COMMUNICATING = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces whose operators talk to other ranks."""

_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "copy", "exponential", "fill", "normal", "random", "uniform", "zero")
)
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_META = torch.device("meta")


def overwriting(function: Operator) -> bool:
    """Return whether an operator writes all of its first argument without reading it."""
    return function._schema.name in _OVERWRITING


def written(function: Operator, args: Arguments, kwargs: Keywords) -> list[Tensor]:
    """Return the tensors among the arguments that a call writes."""
    found: list[Tensor] = []
    for position, argument in enumerate(function._schema.arguments):
        if _writes(argument):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [v for v in tree_leaves(value) if isinstance(v, Tensor)]
    return found


def is_view(function: Operator) -> bool:
    """Return whether a call makes or changes geometry alone, and touches no memory."""
    if torch.Tag.inplace_view in function.tags:
        return function._schema.name != "aten::resize_"
    writes = any(map(_writes, function._schema.arguments))
    results = function._schema.returns
    return bool(results) and not writes and all(r.alias_info is not None for r in results)


def makes_tensors(function: Operator) -> bool:
    """Return whether a call returns tensors that are not among its arguments."""
    results = function._schema.returns
    return any(r.alias_info is None and "Tensor" in str(r.type) for r in results)


def needs_values(function: Operator) -> bool:
    """Return whether the result of a call, or its shape, depends on values."""
    writes = any(map(_writes, function._schema.arguments))
    return bool(_VALUES & set(function.tags)) or not (writes or makes_tensors(function))


def on_meta(function: Operator, args: Arguments, kwargs: Keywords) -> Any:
    """Call an operator for the shapes of its results, on the meta device."""
    named = tree_map(_without_values, dict(kwargs))
    if any(argument.name == "device" for argument in function._schema.arguments):
        named["device"] = _META
    if named.get("pin_memory"):
        named["pin_memory"] = False
    return function(*tree_map(_without_values, tuple(args)), **named)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return value


# --- one recorded operation ---

# Tensors are written down as places: a storage and the geometry in it. So views need no recording,
# and an operation can be repeated on any memory that stands for the storages.


Memory = dict[int, torch.UntypedStorage]
"""Real storages by the identity of the meta storage that they stand for."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """Where a tensor without values lies.

    Attributes:
        storage: identity of its storage on the meta device.
        offset: elements before its first one.
        conjugate: whether it is a lazy conjugate.
        negative: whether it is a lazy negative.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "StorageView":
        """Describe a tensor of the meta device."""
        return cls(
            storage_key(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def tensor(self, memory: Memory) -> Tensor:
        """Return the tensor that lies here in real memory."""
        storage = memory[self.storage]
        plain = torch.empty(0, dtype=self.dtype, device=storage.device)
        plain.set_(storage, self.offset, self.shape, self.strides)
        plain = plain.conj() if self.conjugate else plain
        return torch._neg_view(plain) if self.negative else plain


class Captured:
    """A tensor made outside, with its values at the time of reading.

    Memory that others may write unseen, such as an array's, is copied at once; other memory is
    copied before an operation inside the recording changes the values.
    """

    __slots__ = ("_copied", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._copied = tensor.is_inference() or not tensor.untyped_storage().resizable()
        # Not detach(): below autograd that would not share the version.
        self._tensor = tensor.clone() if self._copied else tensor
        self._version = 0 if self._copied else tensor._version

    def keep(self) -> None:
        """Copy the values, since they are about to change."""
        if not self._copied:
            self._tensor, self._copied = self._tensor.clone(), True

    @property
    def tensor(self) -> Tensor:
        """The tensor with the values that were read.

        Raises:
            UsageError: they were changed since.
        """
        if not self._copied and self._tensor._version != self._version:
            raise UsageError(
                f"expected a tensor of shape {tuple(self._tensor.shape)} that was read inside of "
                "building() to keep its values until prepare(), found that it was changed in "
                "place; pass a clone() of it to the model"
            )
        return self._tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """The state of a generator before an operation drew from it.

    Attributes:
        device: of the generator.
        state: as of ``torch.Generator.get_state``.
        explicit: whether the operation was given the generator, or took the device's own.
    """

    device: torch.device
    state: Tensor
    explicit: bool


@dataclass(slots=True, eq=False)
class Operation:
    """One call of an operator whose results or changes matter.

    Attributes:
        function: the operator.
        args: its arguments; a ``StorageView``, ``Captured`` or ``Draw`` stands for a tensor or a
            generator.
        kwargs: the same.
        outputs: where its new results lie, in order; None for results that are no new tensors.
        reads: storages that the arguments lie in.
        draw: the generator's state if the operator is random.
        dtype: the default dtype at the call.
        overwrites: the storage of which it sets every byte without reading it, or None.
    """

    function: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[StorageView | None, ...]
    reads: frozenset[int]
    draw: Draw | None
    dtype: torch.dtype
    overwrites: int | None

    def run(self, memory: Memory) -> None:
        """Repeat it on real memory, which also gets the storages of its new results."""

        def real(value: Any) -> Any:
            if isinstance(value, StorageView):
                return value.tensor(memory)
            if isinstance(value, Captured):
                return value.tensor
            if isinstance(value, Draw):
                return torch.Generator(value.device).set_state(value.state)
            return value

        with _as_recorded(self.draw, self.dtype):
            results = self.function(*tree_map(real, self.args), **tree_map(real, self.kwargs))
        for place, result in zip(self.outputs, tree_leaves(results), strict=False):
            if place is not None:
                memory[place.storage] = _laid_out(result, place).untyped_storage()

    def touched(self) -> frozenset[int]:
        """Return the storages of its arguments and its new results."""
        return self.reads | {place.storage for place in self.outputs if place is not None}


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; it lasts as long as the storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations on a device take by themselves."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


@contextmanager
def _as_recorded(draw: Draw | None, dtype: torch.dtype) -> Iterator[None]:
    """Context with the generator's state and default dtype of the recording."""
    before = torch.get_default_dtype()
    generator = None if draw is None or draw.explicit else default_generator(draw.device)
    state = None if generator is None else generator.get_state()
    torch.set_default_dtype(dtype)
    try:
        if generator is not None and draw is not None:
            generator.set_state(draw.state)
        yield
    finally:
        torch.set_default_dtype(before)
        if generator is not None and state is not None:
            generator.set_state(state)


def _laid_out(result: Tensor, place: StorageView) -> Tensor:
    """Return a result as its place says; some operators lay real ones out in another way."""
    found = tuple(result.shape), result.stride(), result.storage_offset()
    if found == (place.shape, place.strides, place.offset):
        return result
    if not result.numel():
        return result
    extents = zip(place.shape, place.strides, strict=True)
    size = place.offset + 1 + sum((extent - 1) * stride for extent, stride in extents)
    whole = torch.empty(size, dtype=place.dtype, device=result.device)
    return whole.as_strided(place.shape, place.strides, place.offset).copy_(result)


# --- ways in which uses of tensors without values are noticed ---


_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_APPEARANCE: dict[Callable[..., Any], Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda home: home,
    Tensor.is_meta.__get__: lambda home: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda home: home.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda home: home.type == "cuda",  # type: ignore[attr-defined]
}
"""A tensor's answers about its device: torch's initialisations do nothing on meta."""


class ValueMode(TorchFunctionMode):
    """Answers questions without an operation: the device of a tensor, and the values in memory."""

    def __init__(self, recorder: "ConstructionRecording") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _MAKERS:
            return func(*tree_map(self._read_leaf, tuple(args)), **kwargs)
        subject = args[0] if args else None
        if func is Tensor.__deepcopy__ and not self._recorder.knows(args[0]):
            with _disable_current_modes():  # it works on the storage
                return func(*args, **kwargs)
        if not isinstance(subject, Tensor) or not self._recorder.knows(subject):
            return func(*args, **kwargs)
        if func in _APPEARANCE:
            return _APPEARANCE[func](self._recorder.home(subject))
        if func in _READERS:
            return self._read(func, subject, args[1:], kwargs)
        if func is Tensor.data_ptr:
            raise UsageError(
                "expected tensors to be used through torch inside of building(), found "
                "data_ptr() of one that has no memory yet; ask for it after prepare()"
            )
        return func(*args, **kwargs)

    def _read(self, func: Function, tensor: Tensor, args: Arguments, kwargs: Keywords) -> Any:
        values = self._recorder.materialize([tensor])[0].requires_grad_(tensor.requires_grad)
        result = func(values, *args, **kwargs)
        if func is not Tensor.tolist:
            result.setflags(write=False)  # ordinarily writes would reach the tensor
        return result

    def _read_leaf(self, value: Any) -> Any:
        """Return an element of data: torch reads those of lists behind the modes' back."""
        if isinstance(value, Tensor) and self._recorder.knows(value):
            return self._recorder.materialize([value])[0]
        return value


class Versions:
    """The versions of all tensors of a construction at its end.

    torch counts changes in place per tensor. Changes through ``.data`` are not counted.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def note(self, belongs: Callable[[Tensor], bool]) -> None:
        """Note the versions of the tensors that are alive now.

        Args:
            belongs: whether a tensor is of the construction.
        """
        for item in gc.get_objects():
            # By type: isinstance would ask objects for __class__, and some of them warn.
            if issubclass(type(item), Tensor) and not item.is_inference() and belongs(item):
                self._noted[id(item)] = weakref.ref(item), item._version

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare tensors with their noted versions.

        Raises:
            UsageError: one was changed in place since.
        """
        for name, tensor in tensors.items():
            reference, version = self._noted.get(id(tensor), (None, 0))
            if reference is not None and reference() is tensor and tensor._version != version:
                raise UsageError(
                    f"expected {name!r} to be initialised inside of building(), found that it was "
                    "changed after the context ended and before prepare(), where it has no values; "
                    "do that inside, or after prepare() in gathered()"
                )


# --- constructs a model without memory ---

# Inside ``ConstructionRecording.active()`` every new tensor lives on the meta device.
# ``materialize`` then gives any of these tensors its values: the operations that the values depend
# on are repeated, no others, and the results in between are freed. The values are bit for bit those
# of ordinary construction.
#
# A random operation is written down with the state of its generator, and really run once for
# nothing, so that the generator moves on as in ordinary construction. So at most a few tensors are
# real at a time, and initialisation takes twice as long.


_CPU = torch.device("cpu")


class ConstructionRecording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of one construction, by the storages that they write.

    While it is active it gets every operation, below autograd.

    Attributes:
        versions: tells whether tensors were changed after ``active()`` ended.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
            with ValueMode(self), self:
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

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Do one operation of the construction."""
        # What the recording asks a tensor must not be answered by the other mode.
        with torch._C.DisableTorchFunction():
            return self._perform(func, args, kwargs or {})

    def _perform(self, function: Operator, args: Arguments, kwargs: Keywords) -> Any:
        """Record an operation, or run it where values are needed.

        Raises:
            UsageError: the operation communicates, or mixes tensors in an unrecordable way.
        """
        tensors = [v for v in tree_leaves((args, kwargs)) if is_tensor(v)]
        changing = written(function, args, kwargs)
        if any(t.is_meta and not self.knows(t) for t in tensors):
            return self._leave(function, args, kwargs, changing)
        if function.namespace not in LOCAL and not any(t.is_meta for t in tensors):
            return function(*args, **kwargs)
        if function.namespace in COMMUNICATING:
            raise UsageError(
                f"expected no communication inside of building(), found {function} on a tensor "
                "that has no values yet; communicate before or after"
            )
        if is_view(function):
            return function(*args, **kwargs)
        outside = [t for t in changing if not t.is_meta]
        if outside or needs_values(function):
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
            result = on_meta(function, args, kwargs)
        except NotImplementedError:
            if makes_tensors(function):
                return self._run(function, args, kwargs, [])
            result = args[0] if function._schema.returns else None
        if draw is not None:
            self._run(function, args, kwargs, [])
            self._heap.throw(sum(v.nbytes for v in tree_leaves(result) if is_tensor(v)))
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
        changed = {storage_key(t) for t in written(function, args, kwargs)}
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
        known = {id(v): v for v in values if is_tensor(v) and v.is_meta}
        real: dict[int, Tensor] = {}
        if known and overwriting(function) and is_tensor(args[0]) and args[0].is_meta:
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
        if not is_tensor(value):
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
        if not is_tensor(value) or storage_key(value) in self._writers:
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
    if not overwriting(function):
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


# --- gives tensors of the meta device their values while they stay the same Python objects ---


def meta_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the distinct parameters and buffers without values, by name."""
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {clean_name(name): tensor for name, tensor in held.items() if tensor.is_meta}


def stray_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors without values that modules hold as plain attributes, by name.

    Elements of lists, tuples and dicts in attributes count.

    Raises:
        UsageError: one shares memory with a parameter or buffer.
    """
    without_values = [
        (f"{prefix}.{key}" if prefix else key, tensor)
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        for tensor in tensors_in(value)
        if tensor.is_meta
    ]
    if not without_values:
        return {}
    held = {id(t) for t in [*model.parameters(), *model.buffers()]}
    owned = {t.untyped_storage()._cdata for t in meta_tensors(model).values()}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in without_values:
        if id(tensor) in held:
            continue
        if tensor.untyped_storage()._cdata in owned:
            raise UsageError(
                f"expected the attribute {name!r} to have memory of its own, found a view "
                "of a parameter or buffer; make the view in forward(), or clone() it"
            )
        found.setdefault(id(tensor), (name, tensor))
    return {f"{name}#{i}": tensor for i, (name, tensor) in enumerate(found.values())}


@torch.no_grad()
def fill(
    module: nn.Module, names: Iterable[str], source: WeightSource, device: torch.device
) -> None:
    """Give parameters and buffers on the meta device their values, the largest first.

    Tensors of one call with common memory, but of several objects, have common memory afterwards.

    Args:
        module: the whole model; names count from here.
        names: of parameters and buffers; tensors with values are left alone.
        source: knows the values.
        device: of the values.

    Raises:
        UsageError: memory is shared in a way that cannot be kept.
    """
    wanted = {clean_name(name) for name in names}
    chosen = [(name, tensor) for name, tensor in meta_tensors(module).items() if name in wanted]
    filled: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: without and with values
    for name, tensor in sorted(chosen, key=lambda item: -item[1].numel()):
        empty, storage = tensor.detach(), tensor.untyped_storage()._cdata
        if storage in filled:
            values = _shared(name, empty, *filled[storage])
        else:
            values = _moved_like(name, source.value(name, tensor), empty, device)
            filled[storage] = empty, values
        become(tensor, values, name)


def become(tensor: Tensor, values: Tensor, name: str) -> None:
    """Make a tensor of the meta device one with values; the Python object stays the same.

    Its class, attributes, hooks and ``requires_grad`` stay too; earlier graphs and views of the
    tensor do not follow.

    Args:
        tensor: a parameter or buffer.
        values: of the same shape; the tensor uses this memory from now on.
        name: of the tensor, for errors.

    Raises:
        UsageError: the values have another shape.
    """
    _check_shape(name, values, tensor)
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    twin = values.detach().requires_grad_(tensor.requires_grad)
    # Not torch.utils.swap_tensors, which makes the same call: it refuses tensors that weak
    # references (those of nn.LSTM) or views know, since these would follow the object. They shall.
    torch._C._swap_tensor_impl(tensor, twin)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if after is not None:
        tensor._post_accumulate_grad_hooks = after


def _moved_like(name: str, values: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """Return values on a device, with the dtype and strides of a tensor."""
    _check_shape(name, values, like)
    if values.stride() == like.stride():
        return values.to(device=device, dtype=like.dtype)
    laid = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return laid.copy_(values)


def _shared(name: str, like: Tensor, empty: Tensor, values: Tensor) -> Tensor:
    """Return a view of ``values`` that lies there as ``like`` lies in the memory of ``empty``."""
    size = empty.untyped_storage().nbytes()
    if values.untyped_storage().nbytes() != size or like.dtype is not values.dtype:
        raise UsageError(
            f"expected {name!r} to be the same object as what it shares memory with, or a view of "
            f"a whole tensor, found one of {like.numel() * like.element_size()} bytes in a memory "
            f"of {size}; make one of them a clone()"
        )
    view = values.as_strided(like.shape, like.stride(), like.storage_offset())
    return view if like.is_conj() == empty.is_conj() else view.conj()


def _check_shape(name: str, values: Tensor, like: Tensor) -> None:
    if values.shape != like.shape:
        raise UsageError(
            f"expected values of shape {tuple(like.shape)} for {name!r}, found "
            f"{tuple(values.shape)}; the source of weights is of another model"
        )
