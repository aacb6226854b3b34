"""A synchronised backward: its begin and end from hooks, and the norm of its gradients.

A round begins with the first gradient of a backward. The end is whichever comes first: a callback
of the autograd engine at the end of the backward, the strategy's own call after it, or the next
round, after an exception. Backward inside a custom function's backward (reentrant checkpointing)
belongs to the round around it.

The norm of many tensors as one number, on one rank or over the axes that hold the pieces.
"""

import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.memory import is_out_of_memory

# --- notices where a synchronised backward begins and ends ---

_OF_STRATEGY = "of_strategy"
"""The attribute of a strategy's hooks."""

_current_task: Callable[[], int] = torch._C._current_graph_task_id


class Rounds:
    """The rounds of one model.

    Args:
        begin: called when a round begins.
        end: called when a round ends; must send the rest.

    Attributes:
        count: rounds begun so far.
        reentrant: whether a gradient may come more than once in a round.
        synchronizing: whether a backward is a round; if not, gradients stay where they are.
        kept: whether gradients of backwards that were no rounds wait for the next round.
        cut_short: ends a round that an exception has cut short, where the next backward has begun.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.count = 0
        self.synchronizing = True
        self.kept = False
        self.reentrant = False
        self.cut_short = self.finish
        self._begin = begin
        self._end = end
        self._task: int | None = None
        self._stepped: dict[Optimizer, int] = {}

    def enter(self) -> None:
        """Join the round of the running backward, or begin a round: called by every hook."""
        task = _current_task()
        if task == self._task:
            return
        nested = _inside_backward()
        if self._task is not None and task > self._task:
            if nested:
                self.reentrant = True
                return
            self.cut_short()
        if self._task is None:
            self.count += 1
            self._begin()
        self.reentrant |= nested
        self._task = task
        if not nested:
            Variable._execution_engine.queue_callback(self.finish)

    def run(self, backward: Callable[[], None]) -> None:
        """Run a backward as a round, also where it reaches no parameter of this rank."""
        self.finish()  # what an exception cut short: gradients are about to be added to it
        before = self.count
        backward()
        if self.count == before and self._task is None:  # other ranks may have gradients
            self.count += 1
            self._begin()
            self._task = -1
        self.finish()

    def finish(self) -> None:
        """End the round, if one is under way."""
        if self._task is None:
            return
        try:
            with torch.no_grad():
                self._end()
        except Exception as error:
            if is_out_of_memory(error):  # what is left is sent before the next round
                raise
            self._task = None
            raise
        self._task, self.kept = None, False

    def came_since(self, optimizer: Optimizer) -> bool:
        """Return whether a backward has brought gradients since an optimizer has stepped."""
        return self.kept or self.count != self._stepped.get(optimizer, 0)

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self._stepped[optimizer] = self.count

    def give_up(self) -> None:
        """Forget a round under way: nothing more is sent for it."""
        self._task = None


def in_backward() -> bool:
    """Return whether this thread runs inside a backward, for example in a recomputed forward."""
    return _current_task() != -1


def after_backward(action: Callable[[], None]) -> None:
    """Call an action when the backward that runs now is over."""
    Variable._execution_engine.queue_callback(action)


def mark_of_strategy(hook: Callable[..., Any]) -> None:
    """Let a hook on a parameter be a strategy's: it runs within backward, as autograd calls it."""
    vars(getattr(hook, "__func__", hook))[_OF_STRATEGY] = True


def on_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a strategy's hook when a parameter's gradient has been accumulated.

    The handle keeps the hook. Python's garbage collector does not see what autograd keeps of it: a
    strategy in there would outlive its model.
    """
    kept = weakref.ref(hook)

    def call(parameter: Tensor) -> None:
        found = kept()
        if found is None:
            raise UsageError(
                "expected a prepared model that lives as long as its parameters are trained, found "
                "that it is gone; keep the model, its prepared optimizer or the Accelerator"
            )
        found(parameter)

    mark_of_strategy(call)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    vars(handle)["hook"] = hook
    return handle


def is_of_strategy(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is a strategy's, and none of the script."""
    return hasattr(hook, _OF_STRATEGY)


def _inside_backward() -> bool:
    """Whether this backward runs inside a custom function's backward: reentrant checkpointing."""
    code = BackwardCFunction.apply.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# --- a script's hooks on parameters, run with the gradients that one process would give them ---

# Autograd would run them on each rank with the gradient of that rank's rows of one micro-batch. So
# a backward goes on without them, and when the gradients of a window are averaged they run with
# these: as in one process with one batch as large as the window's.


Hooks = dict[int, Callable[..., Any]]


class UserHooks:
    """The hooks on the parameters of one model.

    Args:
        parameters: the model's.

    Attributes:
        earlier: the gradients of before the window at hand, of parameters whose hooks wait.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.earlier: dict[nn.Parameter, Tensor | None] = {}

    def found(self) -> list[nn.Parameter]:
        """Return the parameters that have hooks of the script now."""
        # Every backward asks every parameter, and a guarded one answers slowly.
        with torch._C.DisableTorchFunctionSubclass():
            found = []
            for parameter in self._parameters:
                before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
                hooks = [*(before or {}).values(), *(after or {}).values()]
                if not all(map(is_of_strategy, hooks)):
                    found.append(parameter)
            return found

    @contextmanager
    def aside(self, hooked: Sequence[nn.Parameter], averaged: Callable[[], bool]) -> Iterator[None]:
        """Run a backward without hooks, and then the hooks if gradients are averaged now.

        Args:
            hooked: the parameters with hooks.
            averaged: tells after the backward whether it has averaged gradients.
        """
        for parameter in hooked:
            if parameter not in self.earlier:  # hooks are for what this window's backwards bring
                if (earlier := parameter.grad) is not None:  # of another stage it is not to be set
                    earlier, parameter.grad = earlier.clone(), None
                self.earlier[parameter] = earlier
        taken = [_take(parameter) for parameter in hooked]
        try:
            yield
        except BaseException:
            for parameter in hooked:
                earlier = self.earlier[parameter]
                if earlier is not None and parameter.grad is None:
                    parameter.grad = earlier
            self.earlier.clear()
            raise
        finally:
            for parameter, (before, after) in zip(hooked, taken, strict=True):
                _put_back(parameter, before, after)
        if averaged():
            self.run(hooked)

    def run(self, hooked: Iterable[nn.Parameter] | None = None) -> None:
        """Run hooks with averaged gradients.

        Args:
            hooked: the parameters; None: those whose hooks wait.
        """
        waiting = [parameter for parameter in self.earlier if parameter.grad is not None]
        for parameter in waiting if hooked is None else hooked:
            self._run(parameter, *_hooks_of(parameter))

    def _run(self, parameter: nn.Parameter, before: Hooks, after: Hooks) -> None:
        earlier, gradient = self.earlier.pop(parameter), parameter.grad
        if gradient is None:
            parameter.grad = earlier
            return
        with torch.no_grad():
            for hook in before.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            gradient = gradient if earlier is None else gradient + earlier
            if gradient is not parameter.grad:
                parameter.grad = gradient
            for hook in after.values():
                hook(parameter)


def _of_script(hooks: Hooks | None) -> Hooks:
    """Return the script's hooks among those of a parameter."""
    return {key: hook for key, hook in (hooks or {}).items() if not is_of_strategy(hook)}


def _hooks_of(parameter: nn.Parameter) -> tuple[Hooks, Hooks]:
    """Return the script's hooks of before and of after a gradient is accumulated."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return _of_script(before), _of_script(after)


def _take(parameter: nn.Parameter) -> tuple[Hooks, Hooks]:
    """Take the script's hooks off, and return them."""
    # The very dicts, which the handles of the hooks know.
    lists: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    before, after = _hooks_of(parameter)
    for hooks, taken in zip(lists, (before, after), strict=True):
        for key in taken:
            del hooks[key]
    return before, after


def _put_back(parameter: nn.Parameter, before: Hooks, after: Hooks) -> None:
    for there, hooks in (
        (parameter._backward_hooks, before),
        (parameter._post_accumulate_grad_hooks, after),
    ):
        if there is not None:
            there.update(hooks)


# --- gradients that no backward has brought: the script has made them ---

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def sum_of_words(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers of its element's size, 0-d."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_WORDS[values.element_size()]).sum(dtype=torch.int64)


def check_alike(sums: Mapping[str, Tensor], ranks: Communicator, device: torch.device) -> None:
    """Refuse gradients of a script that ranks step with, and that differ. Collective.

    Args:
        sums: by parameter, those of the words of its gradient.
        ranks: they must have the same.
        device: of the model.

    Raises:
        UsageError: on every rank: names the first parameter.
    """
    if not sums:
        return
    mine = torch.stack([each.to(device) for each in sums.values()])
    both = torch.cat([mine, -mine])
    ranks.all_reduce(both, reduction="max", label="gradients that no backward has brought").wait()
    most, least = both.chunk(2)
    for name, differs in zip(sums, (most != -least).tolist(), strict=True):
        if differs:
            raise UsageError(
                f"expected gradients that a backward has averaged, or the same ones on every rank, "
                f"found others of {name!r} on other ranks, and no backward since the last step: "
                "take accelerator.backward(loss), or average what torch.autograd.grad returns, as "
                'accelerator.reduce(gradients, "mean") does'
            )


# --- the norm of many tensors as one number ---


def global_norm(
    pieces: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    over: Sequence[Communicator] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Return the p-norm of all elements of all pieces, as if they were one vector.

    Norms of pieces are taken in fp32, of fp64 pieces in fp64; no value leaves the device.

    Args:
        pieces: tensors of any shape and dtype.
        norm_type: p, positive; ``inf`` for the largest absolute value.
        over: axes over which distinct pieces lie: one scalar all-reduce each. Without any, the
            pieces are all there is.
        device: where the result lies; needed when a rank may hold no piece at all, or pieces lie
            elsewhere. None: where the first piece does.

    Returns:
        0-d, fp32 or, with fp64 pieces on this rank or on others, fp64.

    Raises:
        UsageError: norm_type is not positive.
    """
    if not norm_type > 0:
        raise UsageError(f"expected a positive norm_type, or inf, found {norm_type}")
    norms = _norms(pieces, norm_type)
    if norms:
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    else:
        total = torch.zeros((), device=device)
    if device is not None:
        total = total.to(device)  # pieces that wait in host memory do not decide where it crosses
    if not over:
        return total
    return combine_norms(total, norm_type, over)


def norms_of_each(
    pieces: Sequence[Tensor | None],
    norm_type: float,
    *,
    over: Sequence[Communicator],
    device: torch.device,
) -> Tensor:
    """Return the p-norm of each of several tensors whose pieces lie on ranks.

    Args:
        pieces: this rank's piece of each tensor; None: it has none.
        norm_type: p, positive; ``inf`` for the largest absolute value.
        over: axes over which distinct pieces lie: one all-reduce each.
        device: where the result lies.

    Returns:
        1-D, fp64 (fp32 on a device without fp64), the same on every rank of the axes.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    norms = torch.zeros(len(pieces), dtype=wide, device=device)
    places = [i for i, piece in enumerate(pieces) if piece is not None and piece.numel()]
    if places:
        found = _norms([piece for piece in pieces if piece is not None], norm_type)
        norms[torch.tensor(places, device=device)] = torch.stack(found).to(norms)
    return combine_norms(norms, norm_type, over) if over else norms


def clip_(pieces: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale tensors in place so that their norm, which is given, becomes at most max_norm.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils``.
    """
    factor = clip_factor(norm, max_norm)
    for (device, dtype), group in grouped(pieces).items():
        # A factor of fp64 would scale 0-d gradients, and these alone, in fp64; and on a GPU one
        # kernel scales a whole group only if the factor is no wider than that.
        wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        torch._foreach_mul_(group, factor.to(device, wide))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips tensors with this norm, 0-d."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _norms(pieces: Iterable[Tensor], norm_type: float) -> list[Tensor]:
    filled = [piece.detach() for piece in pieces if piece.numel()]
    if not filled:
        return []
    found: dict[int, Tensor] = {}
    for group in grouped(filled).values():
        found.update(zip(map(id, group), _norms_of(group, norm_type), strict=True))
    norms = [found[id(piece)] for piece in filled]  # whatever their dtypes, summed in this order
    device = norms[0].device
    widest = max({norm.dtype for norm in norms}, key=lambda dtype: dtype.itemsize)
    return [norm.to(device, widest) for norm in norms]


def _norms_of(group: list[Tensor], norm_type: float) -> Sequence[Tensor]:
    """Return the norms of tensors of one device and dtype, in fp32 or fp64."""
    dtype = group[0].dtype
    wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    if dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        return torch._foreach_norm(group, norm_type)
    if group[0].device.type != "cpu":
        return torch._foreach_norm(group, norm_type, wide)
    # As if they were kept in that dtype, to the last bit, and one after the other.
    return [torch._foreach_norm([piece.to(wide)], norm_type)[0] for piece in group]


def combine_norms(total: Tensor, norm_type: float, over: Sequence[Communicator]) -> Tensor:
    """Return the norm over all ranks of some axes, given the norm of this rank's tensors.

    Args:
        total: 0-d, this rank's norm.
        norm_type: p, positive; ``inf`` for the largest absolute value.
        over: the axes, one after the other: one scalar all-reduce each.

    Returns:
        0-d, fp64 (fp32 on a device without fp64), the same on every rank of the axes.
    """
    # One dtype on every rank, whatever pieces each of them has.
    total = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    if math.isinf(norm_type):
        for communicator in over:
            communicator.all_reduce(total, reduction="max", label="gradient norm").wait()
        return total
    total.pow_(norm_type)
    for communicator in over:
        communicator.all_reduce(total, label="gradient norm").wait()
    total.pow_(1.0 / norm_type)
    return total


def grouped(pieces: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return tensors by device and dtype; those without elements are left out."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for piece in pieces:
        if piece.numel():
            groups[piece.device, piece.dtype].append(piece)
    return groups
