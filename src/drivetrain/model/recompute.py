"""Activation recompute: blocks forget their intermediate values and compute them again in backward.

``full`` keeps a block's inputs (Chen et al. 2016, arXiv:1604.06174). ``selective`` also keeps the
results of the block's projections, and recomputes large and cheap results, above all attention's
core (Korthikanti et al. 2022, arXiv:2205.05198). The kept inputs may be moved to host memory, or
split over an axis whose ranks hold replicas of them, which is ZeRO-R's Pa (Rajbhandari et al. 2020,
arXiv:1910.02054, section 6.1).

- ``attach``: chooses modules, puts a recomputing forward into them, and takes it out again
- ``replay``: one call of a block that is computed again in backward, and its kept results
- ``inputs``: where the inputs wait, and their ways to host memory and back

Chooses the modules that are recomputed, and puts a recomputing forward into them.

The forward stands in a module's own ``__dict__``, and is taken out again by ``restore``. Hooks on
the block, as strategies set them, run once per forward and are not recomputed.

One call of a block whose intermediate values are dropped and computed again in backward.

Selective recompute keeps the results of matrix products with a weight, of convolutions and of fused
attention. Recomputed is the rest: scores, softmax and dropout of attention that is written out,
norms, activations, residual sums. These are most of the memory and little of the work.

Where the inputs of recomputed blocks wait for backward: in place, on the host, or in parts.

In parts is ZeRO-R's Pa: on an axis whose ranks hold replicas of an input, each rank keeps its chunk
of the bytes, and recomputation gathers the whole. Backward reaches the blocks in the same order on
every rank, and so the collectives.

Copies to host memory and back run on streams of their own, one for each direction. Inputs of at
most two calls of blocks are on their way at once, each way, which bounds the device memory that
copies take::

    forward of block   i       i+1     i+2            backward of block   i+1     i
    leaving            i-1, i  i, i+1  i+1, i+2       coming              i       i-1

When a third call begins, the compute stream waits for the oldest copies to leave: so it never waits
where copies are faster than blocks. The inputs that left last are still on the device when backward
begins.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.model.guard import Arguments, Function, Keywords
from drivetrain.model.modules import (
    NamedModule,
    clean_name,
    is_wrapped,
    repeated_blocks,
    unwrap_forward,
    wrap_forward,
)
from drivetrain.shards import is_dense

# --- where the inputs of recomputed blocks wait for backward ---

Place: TypeAlias = Literal["device", "cpu"]

SMALL_NBYTES = 4096
"""Smaller tensors stay where they are: moving them costs more than they take."""

AT_ONCE = 2
"""Calls whose inputs may be on their way in one direction."""


class KeptTensor:
    """A tensor's values, kept for backward: here on their device; subclasses keep them elsewhere.

    Args:
        tensor: without history.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def leave_device(self) -> None:
        """Let go of the device's memory, in the order of the current stream."""

    def start(self) -> None:
        """Start to bring the values back; ``whole`` or ``cancel`` follows."""

    def cancel(self) -> None:
        """Let go of values that ``start`` brought back for nothing."""

    def whole(self) -> Tensor:
        """Return the tensor on its device."""
        return self._tensor


class Flight:
    """A copy that goes on while the device computes.

    Args:
        source: of the copy.
        target: of the copy; one of the two is on an accelerator, the other in pinned memory.
        beside: the stream of the copy.
    """

    def __init__(self, source: Tensor, target: Tensor, beside: torch.Stream) -> None:
        self._tensor: Tensor | None = source if target.device.type == "cpu" else target
        self._device, self._beside = self._tensor.device, beside
        beside.wait_stream(torch.accelerator.current_stream(self._device))
        with beside:
            target.copy_(source, non_blocking=True)
        self._over = beside.record_event()

    def land(self) -> None:
        """Let the current stream wait for the copy; its tensors may then be used, or freed."""
        torch.accelerator.current_stream(self._device).wait_event(self._over)
        self._tensor = None

    def __del__(self) -> None:
        """Keep the device's memory from being used again while the copy goes on."""
        if self._tensor is not None:
            self._tensor.record_stream(self._beside)


class Lanes:
    """The two streams on which inputs of one device travel.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def leave(self, tensor: Tensor) -> tuple[Tensor, Flight]:
        """Start to copy a dense tensor to pinned host memory; return the copy."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host, Flight(tensor, host, self._out)

    def come(self, host: Tensor) -> tuple[Tensor, Flight]:
        """Start to copy a tensor from pinned host memory; return the copy."""
        tensor = torch.empty_like(host, device=self._device, pin_memory=False)
        return tensor, Flight(host, tensor, self._back)


class HostCopy(KeptTensor):
    """A copy in host memory.

    Args:
        tensor: dense, on an accelerator, without history.
        lanes: the streams of its device.
    """

    def __init__(self, tensor: Tensor, lanes: Lanes) -> None:
        self._lanes = lanes
        self._version = tensor._version
        self._torn = False
        self._host, flight = lanes.leave(tensor)
        self._leaving: tuple[Tensor, Flight] | None = (tensor, flight)
        self._coming: list[tuple[Tensor, Flight]] = []

    @override
    def leave_device(self) -> None:
        if self._leaving is not None:
            tensor, flight = self._leaving
            self._torn = tensor._version != self._version
            flight.land()
            self._leaving = None

    @override
    def start(self) -> None:
        if self._leaving is None:
            self._coming.append(self._lanes.come(self._host))

    @override
    def cancel(self) -> None:
        if self._coming:
            _, flight = self._coming.pop(0)
            flight.land()

    @override
    def whole(self) -> Tensor:
        """Return the values on the device.

        Raises:
            UsageError: the tensor was written to while it was copied.
        """
        if self._leaving is not None and self._leaving[0]._version == self._version:
            return self._leaving[0]
        self.leave_device()
        if self._torn:
            raise UsageError(
                f"expected the input of a recomputed block, of shape {tuple(self._host.shape)}, to "
                "stay as it was until backward, found it changed in place; do not change it in "
                "place, or take recompute keep='device' to see where autograd notices it"
            )
        if not self._coming:
            self.start()
        tensor, flight = self._coming.pop(0)
        flight.land()
        return tensor


class OffloadedInputs:
    """The inputs of one call of a block, which wait for backward.

    Args:
        previous: the call before it, whose inputs backward needs next.
        window: of calls whose inputs are coming back.

    Attributes:
        items: the inputs, some of which other calls may keep, too.
    """

    def __init__(self, previous: "OffloadedInputs | None", window: "CopyWindow") -> None:
        self._previous = None if previous is None else weakref.ref(previous)
        self._window = window
        self.items: list[KeptTensor] = []
        self._awaited = 0

    def leave_device(self) -> None:
        """Let go of the device's memory."""
        for item in self.items:
            item.leave_device()

    def start(self) -> None:
        """Start to bring everything back, unless that is under way."""
        if not self._awaited:
            self._window.admit(self)
            self._awaited = len(self.items)
            for item in self.items:
                item.start()

    def cancel(self) -> None:
        """Let go of the values that ``start`` began to bring back."""
        if self._awaited == len(self.items):
            self._awaited = 0
            for item in self.items:
                item.cancel()

    def whole(self, item: KeptTensor) -> Tensor:
        """Return one input, and start to bring those of the previous call back."""
        self.start()
        self._awaited -= 1
        tensor = item.whole()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.start()
        return tensor


class CopyWindow:
    """The last calls that were admitted; of earlier ones the copies are ended.

    Args:
        end: ends the copies of a call.
    """

    def __init__(self, end: Callable[[OffloadedInputs], None]) -> None:
        self._end = end
        self._calls: list[weakref.ReferenceType[OffloadedInputs]] = []

    def admit(self, call: OffloadedInputs) -> None:
        """Let one more call have copies on their way."""
        while len(self._calls) >= AT_ONCE:
            earlier = self._calls.pop(0)()
            if earlier is not None and earlier is not call:
                self._end(earlier)
        self._calls.append(weakref.ref(call))


_Shared: TypeAlias = tuple[int, weakref.ReferenceType[KeptTensor]]  # the version that was kept


class KeptInputs:
    """Keeps the input tensors of blocks until their recomputation.

    An input that several blocks share, such as a mask, is kept once. Parameters, tensors of less
    than ``SMALL_NBYTES``, and views with gaps stay as they are.

    Args:
        place: ``cpu`` copies inputs of an accelerator to pinned host memory and back, while the
            accelerator computes; inputs of a CPU stay where they are.
        communicator: of the axis over which each input is split; None keeps it whole. Its ranks
            must hold equal inputs.
    """

    def __init__(self, place: Place = "device", communicator: Communicator | None = None) -> None:
        self.place = place
        alone = communicator is None or communicator.size == 1
        self._communicator = None if alone else communicator
        self._shared: MutableMapping[Tensor, _Shared] = WeakTensorKeyDictionary()
        self._lanes: dict[torch.device, Lanes] = {}
        self._leaving = CopyWindow(OffloadedInputs.leave_device)
        self._coming = CopyWindow(OffloadedInputs.cancel)
        self._last: weakref.ReferenceType[OffloadedInputs] | None = None

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context in which a block saves its inputs."""
        if self.place == "device" and self._communicator is None:
            return nullcontext()
        previous = None if self._last is None else self._last()
        call = OffloadedInputs(previous, self._coming)
        return saved_tensors_hooks(functools.partial(self._save, call), _bring_back)

    def _save(self, call: OffloadedInputs, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if not self._moves(tensor):
            return tensor
        if not call.items:
            self._leaving.admit(call)  # first: what left before makes room
            self._last = weakref.ref(call)
        kept = self._put_away(tensor)
        call.items.append(kept)
        return functools.partial(call.whole, kept)

    def _put_away(self, tensor: Tensor) -> KeptTensor:
        entry = self._shared.get(tensor)
        kept = None if entry is None or entry[0] != tensor._version else entry[1]()
        if kept is None:
            kept = self._keep(tensor.detach())
            self._shared[tensor] = (tensor._version, weakref.ref(kept))
        return kept

    def _moves(self, tensor: Tensor) -> bool:
        return (
            (self._leaves(tensor) or self._communicator is not None)
            and type(tensor) is Tensor
            and tensor.layout is torch.strided
            and not (tensor.is_leaf and tensor.requires_grad)
            and tensor.nbytes >= SMALL_NBYTES
            and is_dense(tensor)
        )

    def _leaves(self, tensor: Tensor) -> bool:
        """Whether a tensor waits in another memory than its own."""
        return self.place == "cpu" and tensor.device.type != "cpu"

    def _keep(self, tensor: Tensor) -> KeptTensor:
        lanes = self._lanes_of(tensor.device) if self._leaves(tensor) else None
        if self._communicator is not None:
            return _Part(tensor, self._communicator, lanes)
        return HostCopy(tensor, lanes or self._lanes_of(tensor.device))

    def _lanes_of(self, device: torch.device) -> Lanes:
        if device not in self._lanes:
            self._lanes[device] = Lanes(device)
        return self._lanes[device]


def _bring_back(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


class _Part(KeptTensor):
    """This rank's chunk of a tensor's bytes.

    Args:
        tensor: dense, equal on all ranks of the axis.
        communicator: of the axis.
        lanes: the way of the chunk to host memory; None keeps the chunk on its device.
    """

    def __init__(self, tensor: Tensor, communicator: Communicator, lanes: Lanes | None) -> None:
        self._size, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._communicator = communicator
        flat = _bytes_of(tensor)
        self._start, self._stop = communicator.chunk(flat.numel())[communicator.rank]
        mine = flat[self._start : self._stop]
        self._mine = KeptTensor(mine.clone()) if lanes is None else HostCopy(mine, lanes)

    @override
    def leave_device(self) -> None:
        self._mine.leave_device()

    @override
    def start(self) -> None:
        self._mine.start()

    @override
    def cancel(self) -> None:
        self._mine.cancel()

    @override
    def whole(self) -> Tensor:
        """Return the values, gathered from the ranks of the axis."""
        tensor = torch.empty_strided(
            self._size, self._stride, dtype=self._dtype, device=self._device
        )
        flat = _bytes_of(tensor)
        flat[self._start : self._stop].copy_(self._mine.whole())
        self._communicator.all_gather(flat, label="input of a recomputed block").wait()
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as a 1-D uint8 view."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


# --- one call of a block whose intermediate values are dropped and computed again in ---

_aten = torch.ops.aten

KEPT_OPERATIONS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.convolution.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operations whose results are kept; all others, ``bmm`` among them, are computed again."""

MakeContext: TypeAlias = Callable[[], AbstractContextManager[Any]]
_Results: TypeAlias = dict[Any, list[Any]]


class Contexts(NamedTuple):
    """Makers of the contexts around a block's forward, and of those around its recomputation."""

    first: Sequence[MakeContext]
    again: Sequence[MakeContext]


class Together:
    """Several contexts as a single reusable context: retained graphs recompute twice."""

    def __init__(self, makers: Sequence[MakeContext]) -> None:
        self._makers = makers
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def replay(
    compute: Function,
    args: Arguments,
    kwargs: Keywords,
    inputs: KeptInputs,
    contexts: Callable[[], Contexts] | None = None,
) -> Any:
    """Return the outputs of ``compute``; only its inputs stay in memory until backward.

    Recomputation sees the random numbers, the autocast state and the inputs of the first time.
    Tensors count as inputs in any nesting of tuples, lists and dicts; other objects are held as
    they are.
    """
    leaves, structure = tree_flatten((args, dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None  # held by autograd alone, as its hooks say

    def run(*values: Tensor) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        again_args, again_kwargs = tree_unflatten(filled, structure)
        return compute(*again_args, **again_kwargs)

    options: dict[str, Any] = {}
    if contexts is not None:
        options["context_fn"] = lambda: tuple(Together(each) for each in contexts())
    with inputs.hooks():
        return checkpoint(run, *tensors, use_reentrant=False, **options)


class UnchangedBuffers:
    """Lets a recomputation read the buffers of its forward, and undoes what it changes.

    Buffers that stay as they are are not written to: they may wait in a graph that checks whether
    they were. Their copies are let go of after the forward: they may be large, as masks.

    Args:
        block: the recomputed module.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._read: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context of the forward."""
        modules = [module for module in self._block.modules() if module._buffers]
        before = [_versions(_buffers(module)) for module in modules]
        values = [[buffer.detach().clone() for buffer in _buffers(module)] for module in modules]
        try:
            yield
        finally:
            # The norms' kernels write their statistics without counting it as a write.
            self._read = [
                pair
                for module, versions, kept in zip(modules, before, values, strict=True)
                if isinstance(module, _NormBase) or _versions(_buffers(module)) != versions
                for pair in zip(_buffers(module), kept, strict=True)
            ]

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Context of the recomputation."""
        before = [(buffer, buffer.detach().clone()) for buffer, _ in self._read]
        _write(self._read)
        try:
            yield
        finally:
            _write(before)


def _write(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, values in pairs:
            buffer.copy_(values)


def _buffers(module: nn.Module) -> list[Tensor]:
    return list(module.buffers(recurse=False))


def selective_contexts() -> Contexts:
    """Return the contexts of one forward and of its recomputation, which share the kept results."""
    results: _Results = defaultdict(list)
    return Contexts((functools.partial(_Keep, results),), (functools.partial(_GiveBack, results),))


class _KeptResult:
    """One result, and how often it had been written to."""

    def __init__(self, value: Any) -> None:
        self.value = tree_map(_alias, value)
        self.versions = _versions(self.value)

    @property
    def intact(self) -> bool:
        """Whether nothing was written into it since, as an in-place activation does."""
        return _versions(self.value) == self.versions


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps results in the order in which each operation is called."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Keywords | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT_OPERATIONS:
            drawn = _draws_random_numbers(func, args, kwargs or {})
            self._results[func].append(None if drawn else _KeptResult(result))
        return result


class _GiveBack(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives kept results back instead of computing them."""

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._next: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Keywords | None = None
    ) -> Any:
        if func in KEPT_OPERATIONS:
            kept = self._results[func][self._next[func]]
            self._next[func] += 1
            if kept is not None and kept.intact:
                return tree_map(_alias, kept.value)
        return func(*args, **(kwargs or {}))


def _alias(value: Any) -> Any:
    """Return a tensor's values without its graph, with the count of writes in common."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(value: Any) -> list[int]:
    """Return how often each tensor was written to."""
    return [each._version for each in tree_leaves(value) if isinstance(each, Tensor)]


def _draws_random_numbers(func: Any, args: Arguments, kwargs: Keywords) -> bool:
    """Whether leaving a call out would shift the random numbers of the calls after it."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0) > 0.0)


# --- chooses the modules that are recomputed, and puts a recomputing forward into them ---

Mode: TypeAlias = Literal["full", "selective"]

_ORIGINAL = "_forward_before_recompute"
_SHOWN = 12


def choose_blocks(
    model: nn.Module, patterns: Sequence[str] = (), *, every: int = 1
) -> list[NamedModule]:
    """Return the modules to recompute.

    Args:
        model: the user's module.
        patterns: names of modules, in which ``*`` stands for any text; none for the blocks that the
            model repeats.
        every: take the first of each ``every`` modules found, so 2 takes half of them.

    Returns:
        (name, module) in the order of registration. A module inside another chosen one is left
        out: it is recomputed with it.

    Raises:
        UsageError: nothing repeats, a pattern matches nothing, ``every`` is below 1, or a module
            around a block is compiled.
    """
    if every < 1:
        raise UsageError(f"expected recompute's every to be 1 or more, found {every}")
    found = _matching(model, patterns) if patterns else repeated_blocks(model)
    if not found:
        raise UsageError(
            f"expected {type(model).__name__} to hold repeated blocks (modules of one class in a "
            f"ModuleList or Sequential), found none among {_names(model)}; name the modules to "
            "recompute, for example blocks=['encoder.*'], or leave this model out with mode='none'"
        )
    _refuse_compiled_around(model, found)
    return found[::every]


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[NamedModule]:
    modules = [(clean_name(name), module) for name, module in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            raise UsageError(
                f"expected {pattern!r} to match a module of {type(model).__name__}, found none; "
                f"its modules: {_names(model)}"
            )
    chosen: list[NamedModule] = []
    for name, module in modules:
        if any(fnmatchcase(name, pattern) for pattern in patterns) and not any(
            module is inner for _, outer in chosen for inner in outer.modules()
        ):
            chosen.append((name, module))
    return chosen


def _refuse_compiled_around(model: nn.Module, blocks: Sequence[NamedModule]) -> None:
    for module in model.modules():
        if not hasattr(module, "_orig_mod"):
            continue
        inside = {id(each) for each in module.modules() if each is not module}
        for name, block in blocks:
            if id(block) in inside:
                raise UsageError(
                    f"expected nothing compiled around the block {name!r}, found a compiled "
                    f"{type(module._orig_mod).__name__}; compile the blocks instead, "
                    "model.blocks[i] = torch.compile(model.blocks[i]), or turn recompute off"
                )


def _names(model: nn.Module) -> str:
    names = [clean_name(name) for name, _ in model.named_modules() if name]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "no modules at all"


def attach(blocks: Iterable[NamedModule], mode: Mode, inputs: KeptInputs | None = None) -> None:
    """Let blocks be recomputed in backward; a block that was attached before is attached anew.

    While a block is in eval mode, or gradients are off, its forward is called as it is. A deep copy
    of a block recomputes too, with its own parameters; a pickled one computes as its class says.

    Args:
        blocks: (name, module), changed in place; ``restore`` undoes it.
        mode: ``full`` keeps inputs only; ``selective`` also the results of projections.
        inputs: where the inputs wait; None leaves them where they are.

    Raises:
        UsageError: a block is compiled in a way in which it cannot be recomputed; no block is
            changed then.
    """
    chosen = list(blocks)
    for name, block in chosen:
        _refuse_compiled(name, block, mode)
    for _, block in chosen:
        _wrap(block, mode, inputs or KeptInputs())


def restore(model: nn.Module) -> None:
    """Give every block of a model back the forward it had before ``attach``."""
    for module in model.modules():
        unwrap_forward(module, _ORIGINAL)


def is_attached(model: nn.Module) -> bool:
    """Whether a block of a model is recomputed."""
    return any(is_wrapped(module, _ORIGINAL) for module in model.modules())


def _wrap(block: nn.Module, mode: Mode, inputs: KeptInputs) -> None:
    contexts = _contexts(block, mode)

    def recomputing(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        make = None if contexts is None else functools.partial(contexts, module)
        return replay(compute, args, kwargs, inputs, make)

    wrap_forward(block, _ORIGINAL, recomputing)


def _contexts(block: nn.Module, mode: Mode) -> Callable[[nn.Module], Contexts] | None:
    """Return a function that makes the contexts of a call; None when a call needs none."""
    buffered = next(block.buffers(), None) is not None
    if mode == "full" and not buffered:
        return None

    def make(module: nn.Module) -> Contexts:
        kept = selective_contexts() if mode == "selective" else Contexts((), ())
        if not buffered:
            return kept
        unchanged = UnchangedBuffers(module)
        return Contexts((unchanged.noting, *kept.first), (unchanged.undoing, *kept.again))

    return make


def _refuse_compiled(name: str, block: nn.Module, mode: Mode) -> None:
    wrapped = hasattr(block, "_orig_mod")
    if block._compiled_call_impl is not None and not wrapped:
        raise UsageError(
            f"expected a block {name!r} that is not compiled in place, found block.compile(); put "
            "torch.compile(block) in its place in the model, which is recomputed as one whole"
        )
    if wrapped and mode == "selective":
        raise UsageError(
            f"expected an uncompiled block {name!r} for selective recompute, found a compiled one, "
            "whose operations cannot be told apart; use mode='full', or do not compile the block"
        )
