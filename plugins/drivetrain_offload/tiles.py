"""CPU updates of flat shards in tiles that fit the cache, and the states of torch's optimizers.

The kernels of torch want gradient and parameter in one dtype. Casting a whole bf16 gradient, and
then the whole new parameter back, goes through memory twice more: 44 bytes per parameter of AdamW
where 28 suffice (read 2 gradient, 4 master, 8 moments; write 4, 8, and 2 for the bf16 output).
Here a tile's gradient is cast into scratch memory, and its new parameter is cast out, while both
are in the cache; see ``drivetrain_offload.tiles`` for the order of operations.

Threads. torch would cut each of the three operations on a tile over its threads, and wait for all
of them three times per tile: one late thread makes all late. Here each thread takes whole tiles,
one operation on one core, and threads meet once per call, however many pieces it has. Operations
release the interpreter's lock, which a tile needs for a few microseconds of a few hundred.
``torch.set_num_threads`` is the default for the number of threads. A caller whose own number is 1
takes tiles itself, in the place of one thread, instead of waiting; so a thread that is made for
calling ``update`` is best given 1.

Bits. The kernels work on whole vectors, and on the elements after the last whole vector with other
instructions, which round otherwise. So tiles begin at multiples of ``ALIGNMENT``, and the result is
the same for every tile size and number of threads: as if the kernel ran over the whole shard with
one torch thread.

The states that torch's optimizers keep for a parameter, and the kernel that updates them.

A rule belongs to a class of optimizers, not to an object, and holds nothing. ``Rule.step`` reads a
param group, so that a scheduler may change the group while the step is still under way elsewhere.

An update does for every element, in this order:

1. cast the gradient to the master's dtype;
2. multiply the gradient by the factor, in the master's dtype;
3. run torch's own optimizer: its fused kernel where the group says ``fused=True``, its plain loop
   elsewhere;
4. cast the new parameter into the output.

The factor both unscales and clips. Without offload these are multiplications, too, and the first
is by a power of two, which is exact: so the bits are equal. The kernels' own ``grad_scale`` is not
used: a division may differ in the last bit, stores the gradient again, and costs 0.10 ns per
element, where a multiplication of the scratch in the cache costs 0.04 (AVX-512, one thread).

Host memory is aligned, and handed out again. Threads take tasks until the end of the process, which
waits for the tasks: the pools of ``concurrent.futures`` take no tasks once the script is over. A
step still under way, which submits its parts in turn, would break off while other ranks wait for
its results. So these pools end later: as the finalizers of the process run, the youngest first.
"""

import ctypes
import math
import mmap
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from typing_extensions import override

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain_offload.options import ALIGNMENT as BLOCK_BYTES

# --- aligned host memory, page-locked for accelerators ---


_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device of the process."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_LARGE = 1 << 20
"""Bytes from which a block is mapped by itself, and given back to the system when it is freed."""

_logger = get_logger(__name__)


def give_back_memory() -> None:
    """Make the C library give freed blocks of 1 MiB and more back to the system; glibc alone.

    When large blocks are freed, glibc learns to keep such blocks, and does so once per thread: of a
    model whose units come and go it keeps several times the memory in use. A run that offloads to a
    disk has no memory to spare. The setting holds for the whole process, and goes over settings in
    its environment.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGE)
        library.malloc_trim(0)


def padded(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of the alignment."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def can_page_lock() -> bool:
    """Return whether there is an accelerator whose runtime locks pages that are already mapped."""
    return torch.cuda.is_available()


def aligned_empty(
    numel: int, dtype: torch.dtype = torch.float32, *, page_locked: bool = False
) -> Tensor:
    """Return an uninitialized tensor at an aligned address, in a mapping of its own.

    Args:
        numel: elements.
        dtype: of the elements.
        page_locked: whether accelerators shall copy asynchronously; where pages cannot be locked
            the memory is plain, and a warning says so.

    Returns:
        A tensor of shape (numel,). A forked child does not have its pages.
    """
    nbytes = numel * dtype.itemsize
    return _tensor(_AlignedMapping(nbytes, page_locked))[:nbytes].view(dtype)


class AlignedPool:
    """Aligned memory, handed out again as soon as the last tensor in it is gone.

    A fresh mapping costs a page fault per page, a used one nothing.

    Args:
        page_locked: as in ``aligned_empty``.
        spare: how many free mappings are kept.
    """

    def __init__(self, *, page_locked: bool, spare: int = 4) -> None:
        self._page_locked = page_locked
        self._most = spare
        self._spare: list[_AlignedMapping] = []

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialized uint8 tensor of ``padded(nbytes)`` bytes at an aligned address.

        Its memory is the caller's until the last tensor in it is gone.
        """
        return _tensor(self._region(padded(nbytes)), self._give_back)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of shape (numel,) in such memory."""
        nbytes = numel * dtype.itemsize
        return self.take(nbytes)[:nbytes].view(dtype)

    def clear(self) -> None:
        """Give up the free mappings, and keep none from now on."""
        self._most = 0
        self._spare.clear()

    def _region(self, nbytes: int) -> "_AlignedMapping":
        # No lock: a tensor may end, and give its memory back, while this very thread is in here.
        for region in tuple(self._spare):
            if len(region) == max(nbytes, BLOCK_BYTES):
                with suppress(ValueError):  # another thread was faster
                    self._spare.remove(region)
                    return region
        return _AlignedMapping(nbytes, self._page_locked)

    def _give_back(self, region: "_AlignedMapping") -> None:
        self._spare.append(region)
        while len(self._spare) > self._most:
            with suppress(IndexError):
                self._spare.pop(0)


class _AlignedMapping(mmap.mmap):
    """A private anonymous mapping; its pages are unlocked before it is unmapped."""

    _locked = False

    def __new__(cls, nbytes: int, page_locked: bool) -> "_AlignedMapping":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return super().__new__(cls, -1, max(padded(nbytes), BLOCK_BYTES), flags=flags)

    def __init__(self, nbytes: int, page_locked: bool) -> None:
        # A fork while the disk writes into a page would leave the data in the child's copy of it.
        self.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without huge pages
            self.madvise(mmap.MADV_HUGEPAGE)
        if page_locked:
            self._locked = _page_lock(self._address(), len(self))

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def __del__(self) -> None:
        if self._locked and not sys.is_finalizing():
            _runtime().cudaHostUnregister(self._address())


def _tensor(region: _AlignedMapping, give_back: Any = None) -> Tensor:
    """Return a uint8 tensor over a mapping; ``give_back`` is called when its storage is gone."""
    # Torch holds a reference to this array exactly as long as the storage lives.
    holder = (ctypes.c_char * len(region)).from_buffer(region)
    if give_back is not None:
        weakref.finalize(holder, give_back, region).atexit = False
    with torch.inference_mode(False):  # else the tensor could be written in inference mode alone
        return torch.frombuffer(holder, dtype=torch.uint8)


def _page_lock(address: int, nbytes: int) -> bool:
    try:
        torch.cuda.check_error(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
    except RuntimeError as error:
        _forget_failure()
        _logger.warning_once(
            f"host memory could not be page-locked ({error}); copies from and to the accelerator "
            "are slower and wait for each other; see 'ulimit -l'"
        )
        return False
    return True


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_failure() -> None:
    """Launch an operation: the runtime reports a failed call once more to the next launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


# --- threads that take tasks until the end of the process, which waits for the tasks ---

T = TypeVar("T")

_Tasks = SimpleQueue[Callable[[], None] | None]


class ThreadPool:
    """Threads that take tasks in the order of their submission.

    A thread starts with each of the first tasks. The process lets submitted tasks end before it
    ends: Python stops a thread that still runs then, and a thread that lets go of a tensor in that
    moment is in C++ code, which aborts the process.

    Args:
        threads: how many at most.
        name: the beginning of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._tasks: _Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changes = threading.Lock()
        parts = (self._tasks, self._threads, self._changes)
        self._end = weakref.finalize(self, _end, weakref.ref(self), *parts)

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Let a thread call a function.

        Raises:
            RuntimeError: the pool was shut down.
        """
        future: Future[T] = Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        with self._changes:
            if not self._end.alive:
                raise RuntimeError(f"expected threads {self._name} in use, found a closed pool")
            self._tasks.put(task)
            if len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(
                    target=_serve, args=(self._tasks,), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self) -> None:
        """Let submitted tasks end, and join the threads; may be called more than once."""
        self._end()
        for thread in self._threads:
            thread.join()


def _end(
    pool: "weakref.ref[ThreadPool]",
    tasks: _Tasks,
    threads: list[threading.Thread],
    changes: threading.Lock,
) -> None:
    """Let threads end after the tasks before; wait for them, unless the pool was forgotten."""
    with changes:
        for _ in threads:
            tasks.put(None)
    if pool() is not None:
        for thread in threads:
            thread.join()


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # else a finished task would keep its tensors alive until the next one comes


def computing_pool(threads: int, name: str) -> ThreadPool:
    """Return a pool whose threads run torch's operations without helper threads.

    Args:
        threads: how many; all have started when this returns.
        name: the beginning of their names.
    """
    pool = ThreadPool(threads, name)
    everyone = threading.Barrier(threads)

    def compute_alone() -> None:
        # A thread takes torch's number of threads over from the process at its first question,
        # even after set_num_threads: so it asks first, and sets then.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()  # else a quick thread would take the task of one that is not there yet

    # set_num_threads holds for the thread that calls it, and for threads that start later: the
    # latter get back the number that they would have had.
    before = torch.get_num_threads()
    for task in [pool.submit(compute_alone) for _ in range(threads)]:
        task.result()
    torch.set_num_threads(before)
    return pool


# --- the states that torch's optimizers keep for a parameter ---

ParamGroup = Mapping[str, Any]
"""A param group of a torch optimizer."""
Kernel = Callable[[Tensor, Tensor, Mapping[str, Tensor]], None]
"""Updates (master, gradient, states) in place; all 1-D, of equal length and dtype."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One optimizer step of one param group, for any number of pieces of its shards.

    Attributes:
        kernel: updates a piece.
        states: the names of the state tensors that the kernel updates.
        factor: multiplies the gradient, after its cast.
    """

    kernel: Kernel
    states: frozenset[str]
    factor: float = 1.0


class Rule(ABC):
    """How one class of optimizers updates a flat shard.

    Attributes:
        counted: whether torch keeps the number of steps with a parameter, as ``step``.
    """

    counted: ClassVar[bool] = True

    @abstractmethod
    def states(self, group: ParamGroup) -> dict[str, float]:
        """Return the initial value of each state of a parameter in this group, by torch's key."""

    def taken(self, state: Mapping[str, Any]) -> float:
        """Return how many steps a parameter has taken, by its state as ``torch.optim`` keeps it."""
        return float(state.get("step", 0.0))

    def step(self, group: ParamGroup, taken: float, factor: float = 1.0) -> GroupStep:
        """Begin a step: read the group's hyperparameters; shards of equal counters may share it.

        Args:
            group: a param group; learning rate and betas may be tensors.
            taken: the steps before.
            factor: multiplies gradients: 1 / loss scale, times the clip factor.
        """
        kernel = self._kernel(group, torch.tensor(taken + 1, dtype=torch.float32))
        return GroupStep(kernel, frozenset(self.states(group)), factor)

    @abstractmethod
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        """Return the update of step ``number``, which is 1 in the first."""


class AdamRule(Rule):
    """Adam and AdamW, whose groups say how their weight decay is meant."""

    @override
    def states(self, group: ParamGroup) -> dict[str, float]:
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
        return dict.fromkeys(names, 0.0)

    @override
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        amsgrad, betas = bool(group["amsgrad"]), group["betas"]
        settings: dict[str, Any] = dict(
            **_numbers(group, "lr", "weight_decay", "eps"),
            beta1=float(betas[0]),
            beta2=float(betas[1]),
            amsgrad=amsgrad,
            maximize=group["maximize"],
        )
        decoupled, fused = group["decoupled_weight_decay"], is_fused(group)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        # The loop computes in the dtype of a hyperparameter that is a tensor: it stays a tensor.
        names = ("lr", "beta1", "beta2")
        given = zip(names, map(_as_it_is, (group["lr"], *betas)), strict=True)
        loop = {**_LOOP, **settings, **dict(given), "decoupled_weight_decay": decoupled}

        def update(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            largest = [states["max_exp_avg_sq"]] if amsgrad else []
            tensors = [master], [gradient], [states["exp_avg"]], [states["exp_avg_sq"]], largest
            if fused:
                kernel(*tensors, [number], **settings)
            else:
                adam(*tensors, [number - 1], **loop)  # the loop itself adds the 1

        return update


class SgdRule(Rule):
    """SGD, which keeps no counter: a momentum buffer tells that a step was taken."""

    counted = False

    @override
    def states(self, group: ParamGroup) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] else {}

    @override
    def taken(self, state: Mapping[str, Any]) -> float:
        # Only the first step differs from the others: it fills the buffer.
        return float(state.get("momentum_buffer") is not None)

    @override
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        momentum = float(group["momentum"])
        first = momentum != 0 and int(number) == 1
        settings: dict[str, Any] = dict(
            **_numbers(group, "lr", "weight_decay", "dampening"),
            momentum=momentum,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )

        def fused(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            buffers = [states["momentum_buffer"]] if momentum else []
            torch._fused_sgd_([master], [gradient], buffers, is_first_step=first, **settings)

        def loop(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            kept = states["momentum_buffer"] if momentum else None
            buffers = [None if first else kept]  # torch's first step makes a buffer, copied below
            sgd([master], [gradient], buffers, **_LOOP, **settings)
            if first and kept is not None and buffers[0] is not None:
                kept.copy_(buffers[0])

        return fused if is_fused(group) else loop


class AdagradRule(Rule):
    """Adagrad."""

    @override
    def states(self, group: ParamGroup) -> dict[str, float]:
        return {"sum": float(group["initial_accumulator_value"])}

    @override
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        settings: dict[str, Any] = dict(
            **_numbers(group, "lr", "lr_decay", "weight_decay", "eps"),
            maximize=group["maximize"],
        )

        def fused(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            torch._fused_adagrad_([master], [gradient], [states["sum"]], [number], **settings)

        def loop(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            before = [number - 1]  # the loop itself adds the 1
            adagrad([master], [gradient], [states["sum"]], before, **_LOOP, **settings)

        return fused if is_fused(group) else loop


def update_rule(optimizer: Optimizer) -> Rule | None:
    """Return the rule of an optimizer, or None when only the optimizer itself can take its steps.

    Rules are for exactly ``torch.optim.AdamW``, ``Adam``, ``SGD`` and ``Adagrad``: a subclass may
    do something else. There is no rule for groups that are ``capturable`` or ``differentiable``,
    nor for groups with ``foreach=True``, whose results differ in the last bits.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None or any(_wants_another(group) for group in optimizer.param_groups):
        return None
    return rule


_LOOP: Mapping[str, Any] = {"foreach": False, "fused": False}
"""Options for torch's plain implementation, operation by operation: its default on the CPU."""

_RULES: Mapping[type[Optimizer], Rule] = {
    AdamW: AdamRule(),
    Adam: AdamRule(),
    SGD: SgdRule(),
    Adagrad: AdagradRule(),
}


def _wants_another(group: ParamGroup) -> bool:
    special = group.get("capturable", False) or group["differentiable"]
    return bool(special or group["foreach"])


def is_fused(group: ParamGroup) -> bool:
    """Return whether torch's optimizers would take the fused kernel for a group, on the CPU."""
    return bool(group["fused"])


def _as_it_is(value: float | Tensor) -> float | Tensor:
    return value.clone() if isinstance(value, Tensor) else value


def _numbers(group: ParamGroup, *names: str) -> dict[str, float]:
    return {name: float(group[name]) for name in names}


# --- CPU updates of flat shards in tiles that stay in the cache ---

TILE_BYTES = 2 << 20
"""A tile's scratch memory. With the parameter it makes 4 MiB per thread that must outlive one
kernel in the cache: the share of one core in the last level (32 MiB for 8 cores). Measured with
fp32 masters: half as much is 3 % slower, a quarter 28 %: hardware prefetch starts anew and the
interpreter's share grows; more gains nothing."""
SMALLEST_TILE = 64 << 10
"""Elements below which a tile is not cut to occupy another thread: about 40 microseconds."""
ALIGNMENT = 64
"""Elements; a multiple of every vector length. Pieces but a shard's last have such a length."""


class Piece(NamedTuple):
    """A range of a shard: the tensors that one update reads and writes, each (elements,).

    Attributes:
        master: the parameters, updated in place.
        gradient: of any floating dtype; not changed.
        states: by the names of ``Rule.states``, in the master's dtype, updated in place.
        out: receives the updated parameters in its own dtype, if there is one.
    """

    master: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]
    out: Tensor | None = None

    def at(self, where: slice) -> "Piece":
        """Return a part of the piece; no memory is copied."""
        return Piece(
            self.master[where],
            self.gradient[where],
            {name: state[where] for name, state in self.states.items()},
            None if self.out is None else self.out[where],
        )


class Tiler:
    """Updates pieces in tiles, on its own threads; usable from any thread, one call at a time.

    Args:
        threads: how many; None means as many as torch uses in the calling thread. Each keeps
            scratch memory of ``tile_bytes``.
        tile_bytes: see ``TILE_BYTES``; at least ``ALIGNMENT`` elements.
    """

    def __init__(self, threads: int | None = None, tile_bytes: int = TILE_BYTES) -> None:
        self.threads = threads = threads or torch.get_num_threads()
        self._tile_bytes = tile_bytes
        self._scratch = [torch.empty(tile_bytes, dtype=torch.uint8) for _ in range(threads)]
        self._one_call = threading.Lock()
        self._pool = computing_pool(threads, "drivetrain-tiles")

    def update_all(self, updates: Sequence[tuple[GroupStep, Piece]]) -> None:
        """Take steps for several pieces that share no memory; returns when all are done.

        Args:
            updates: steps, each with a shard, or a range that begins at a multiple of
                ``ALIGNMENT``.

        Raises:
            UsageError: tensors that do not fit together, or the tiler is closed; then no piece was
                changed.
        """
        for step, piece in updates:
            _check(piece, step.states)
        # Threads share one iterator, so that a faster thread takes more; a list's is safe to share.
        cut = [part for step, piece in updates for part in self._cut(step, piece)]
        parts = iter(cut)
        with self._one_call:
            if not self._scratch:
                raise UsageError("expected a tiler in use, found one that was closed")
            alone = torch.get_num_threads() == 1
            running = [
                self._pool.submit(_drain, parts, scratch)
                for scratch in self._scratch[alone : len(cut)]
            ]
            try:
                if alone:
                    _drain(parts, self._scratch[0])
            finally:
                # The tiles are all taken: a thread that has not begun yet is not needed.
                errors = [task.exception() for task in running if not (alone and task.cancel())]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads and release the scratch memory; may be called again."""
        with self._one_call:
            self._pool.shutdown()
            self._scratch.clear()

    def _cut(self, step: GroupStep, piece: Piece) -> Iterator[tuple[GroupStep, Piece]]:
        numel = piece.master.numel()
        length = self._length(numel, piece.master.itemsize)
        if numel <= length:
            return iter([(step, piece)] if numel else [])
        return ((step, piece.at(slice(i, i + length))) for i in range(0, numel, length))

    def _length(self, numel: int, itemsize: int) -> int:
        """Return the elements of a tile: as many for each thread, none longer than the scratch."""
        longest = self._tile_bytes // itemsize // ALIGNMENT * ALIGNMENT
        count = math.ceil(math.ceil(numel / longest) / self.threads) * self.threads
        fair = math.ceil(numel / max(count, 1) / ALIGNMENT) * ALIGNMENT
        return min(longest, max(fair, SMALLEST_TILE))


def _drain(parts: Iterator[tuple[GroupStep, Piece]], scratch: Tensor) -> None:
    scratch = scratch[: len(scratch) // 8 * 8]
    with torch.no_grad():  # the mode of the caller's thread does not reach this one
        for step, tile in parts:
            _update_tile(step, tile, scratch.view(tile.master.dtype))


def _update_tile(step: GroupStep, tile: Piece, scratch: Tensor) -> None:
    gradient = _prepared(tile.gradient, step.factor, scratch[: len(tile.master)])
    step.kernel(tile.master, gradient, tile.states)
    if tile.out is not None:
        tile.out.copy_(tile.master)


def _prepared(gradient: Tensor, factor: float, scratch: Tensor) -> Tensor:
    """Return the gradient times the factor, in the scratch's dtype; itself if it is equal."""
    if gradient.dtype == scratch.dtype:
        return gradient if factor == 1.0 else torch.mul(gradient, factor, out=scratch)
    scratch.copy_(gradient)
    return scratch if factor == 1.0 else scratch.mul_(factor)


def _check(piece: Piece, states: frozenset[str]) -> None:
    master = piece.master
    if piece.states.keys() != states:
        raise UsageError(
            f"expected the state tensors {sorted(states)}, found {sorted(piece.states)}: "
            "give those that the rule names for this param group"
        )
    named = {"master": master, "gradient": piece.gradient, **piece.states}
    if piece.out is not None:
        named["out"] = piece.out
    for name, tensor in named.items():
        if tensor.dim() != 1 or tensor.numel() != master.numel() or not tensor.is_contiguous():
            raise UsageError(
                f"expected {name} to be contiguous, 1-D, of {master.numel()} elements as the "
                f"master; found shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        if tensor.device.type != "cpu":
            raise UsageError(f"expected {name} on the CPU, found it on {tensor.device}")
    for name, state in piece.states.items():
        if state.dtype != master.dtype:
            raise UsageError(
                f"expected {name} in the master's dtype, {master.dtype}, found {state.dtype}"
            )
