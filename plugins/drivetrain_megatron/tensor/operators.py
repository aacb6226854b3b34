"""Conjugate operators: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.

Each sends in forward or in backward, or one thing in each:

==================== ===================== ===================== =================================
operator             forward               backward              where
==================== ===================== ===================== =================================
``copy`` (f)         nothing               all-reduce            before layers cut by columns
``reduce`` (g)       all-reduce            nothing               after layers cut by rows
``scatter``          nothing, a slice      all-gather            a whole activation is cut
``gather``           all-gather            nothing, a slice      all ranks do the same with it
``gather`` (partial) all-gather            reduce-scatter        ranks do different things with it
``reduce_scatter``   reduce-scatter        all-gather            after layers cut by rows, to shards
==================== ===================== ===================== =================================

f and g are from the first paper (arXiv 1909.08053), the pair with shards of the sequence from the
second (arXiv 2205.05198). The layers after a gather decide whether it is partial: the gradients of
the ranks are either equal, or parts of a sum. Tensors may be of any dtype and memory layout, shares
uneven or empty. An input is never changed: a gradient may be somebody else's too. One rank alone
sends nothing.

Where ``torch.compile`` traces them, each is one node of the graph (``one_node``).

``Edges`` chooses among them: outside of a part whose layers are cut over ranks an activation is
whole on every rank, or a shard of the sequence (sequence parallelism).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from drivetrain.collectives import Communicator, Finished, Handle, communicator_of
from drivetrain.errors import UsageError
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.tensor.partition import Partition, even

# --- gradients that cannot be differentiated again say so, and name the way out ---


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward of an autograd function be computed without a graph.

    Its gradients refuse to be differentiated.
    """

    @functools.wraps(backward)
    def alone(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        if isinstance(found, tuple):
            return tuple(_refusing(each) for each in found)
        return _refusing(found)

    return alone


def _refusing(gradient: Any) -> Any:
    if not isinstance(gradient, Tensor) or not gradient.is_floating_point():
        return gradient
    return _Refusal.apply(gradient.detach().requires_grad_())  # type: ignore[no-untyped-call]


class _Refusal(torch.autograd.Function):
    """Nothing in forward; an error in backward."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise UsageError(
            "expected gradients of layers that ranks share to be differentiated once, found a "
            "backward through them (create_graph, a gradient penalty): leave the layers around out "
            "of a plan of your own, or take another strategy, such as fsdp or zero3"
        )


# --- inside of graphs ---

# ``torch.compile`` sees a function of activations and ranks as one node, with a number for the
# ranks; autograd, below, sees what it sees without a compiler. Only the collectives themselves are
# operators of torch then: they take a number too, and return new tensors. Each takes the token of
# the one before it, so that no compiler changes their order, which ranks must share, leaves one
# out, or takes two for one.

Cut: TypeAlias = tuple[int, int, Any]
"""A ``Partition`` as constants of a graph: dim, size, ranges, or how many ranks have even ones."""


class InGraph:
    """Ranks as the operators see them while a graph is traced.

    Args:
        number: of the communicator.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        communicator = communicator_of(number)
        self.size, self.rank = communicator.size, communicator.rank

    def start(self, tensor: Tensor, partition: Partition | None = None) -> "PendingSum":
        """Start to sum a tensor, which stays as it is; a partition gives each rank its share."""
        token = _OPS.start_sum(tensor, self.number, _numbers_of(partition), self._before())
        self._note(token)
        shape = (
            tensor.shape if partition is None else partition.local_shape(self.rank, tensor.shape)
        )
        return PendingSum(Finished(), lambda: _OPS.sum(token, shape, tensor.dtype, tensor.device))

    def gathered(self, share: Tensor, partition: Partition, *, add: bool) -> Tensor:
        """Return the whole tensor."""
        whole: Tensor
        whole, token = _OPS.gather(share, self.number, _numbers_of(partition), add, self._before())
        self._note(token)
        return whole

    def _before(self) -> Tensor | None:
        """Return the token of the last collective in the same graph."""
        trace = get_proxy_mode()
        return None if trace is None else _last.get(trace, {}).get(_in_backward())

    def _note(self, token: Tensor) -> None:
        if (trace := get_proxy_mode()) is not None:
            _last.setdefault(trace, {})[_in_backward()] = token


_last: "WeakKeyDictionary[Any, dict[bool, Tensor]]" = WeakKeyDictionary()


def _in_backward() -> bool:
    """Whether autograd runs: what it computes becomes a graph of its own."""
    return torch._C._current_graph_task_id() != -1


def _numbers_of(partition: Partition | None) -> list[int]:
    """Return a cut as an argument of operators: dim, size, and each rank's count and ranges."""
    if partition is None:
        return []
    ranges = [[len(mine), *itertools.chain(*mine)] for mine in partition.ranges]
    return [partition.dim, partition.size, *itertools.chain(*ranges)]


@functools.lru_cache(maxsize=1024)
def _cut_of(numbers: tuple[int, ...]) -> Partition:
    dim, size, *rest = numbers
    left, ranges = iter(rest), []
    for count in left:
        ranges.append(tuple((next(left), next(left)) for _ in range(count)))
    return Partition(dim, size, tuple(ranges))


_under_way: "dict[int, PendingSum]" = {}
_sums = itertools.count()


def _start(tensor: Tensor, ranks: int, cut: Sequence[int], after: Tensor | None) -> Tensor:
    number, communicator = next(_sums), communicator_of(ranks)
    _under_way[number] = start_sum(tensor, communicator, _cut_of(tuple(cut)) if cut else None)
    return torch.tensor(number, device="cpu")


def _sum(token: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _under_way.pop(int(token)).result()


def _gather(
    share: Tensor, ranks: int, cut: Sequence[int], add: bool, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    whole = gathered(share, communicator_of(ranks), _cut_of(tuple(cut)), add=add)
    return whole, torch.zeros((), dtype=torch.int64, device="cpu")


def _token(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _sum_shape(
    token: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _gather_shape(share: Tensor, ranks: int, cut: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:
    shape = list(share.shape)
    shape[cut[0]] = cut[1]
    return share.new_empty(shape), _token()


_library = torch.library.Library("drivetrain", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _real, _fake in (
    ("start_sum(Tensor tensor, int ranks, int[] cut, Tensor? after) -> Tensor", _start, _token),
    (
        "sum(Tensor token, SymInt[] shape, ScalarType dtype, Device device) -> Tensor",
        _sum,
        _sum_shape,
    ),
    (
        "gather(Tensor share, int ranks, int[] cut, bool add, Tensor? after) -> (Tensor, Tensor)",
        _gather,
        _gather_shape,
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema)  # type: ignore[no-untyped-call]
    # Not ``custom_op``, which costs as much again as a small collective in each call.
    _library.impl(_name, _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"drivetrain::{_name}", _fake, lib=_library)
_OPS = torch.ops.drivetrain


Given = ParamSpec("Given")


def one_node(function: Callable[Given, Tensor]) -> Callable[Given, Tensor]:
    """Let a function of a tensor and ranks be one node where ``torch.compile`` traces a graph.

    Its further arguments are tensors, partitions and constants.
    """
    called: Any = function

    def traced(tensor: Tensor, number: int, *rest: Any, **options: Any) -> Any:
        known = [_partition_of(each) if isinstance(each, tuple) else each for each in rest]
        return called(tensor, InGraph(number), *known, **options)

    node: Any = torch.compiler.allow_in_graph(traced)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def either(tensor: Tensor, ranks: Any, *rest: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() or isinstance(ranks, InGraph):
            return called(tensor, ranks, *rest, **options)
        cut = [(e.dim, e.size, e.ranges) if isinstance(e, Partition) else e for e in rest]
        return node(tensor, ranks.number, *cut, **options)

    return either  # type: ignore[return-value]


def _partition_of(cut: Cut) -> Partition:
    dim, size, ranges = cut
    even_over = isinstance(ranges, int)
    return even(dim, int(size), ranges) if even_over else Partition(dim, size, ranges)


# --- the operators ---


@one_node
def copy(tensor: Tensor, ranks: Communicator) -> Tensor:
    """Return the tensor; backward sums its gradients over ranks."""
    if is_outline(tensor) or ranks.size == 1:
        return tensor
    return conjugate(tensor, lambda x: x.view_as(x), lambda grad: start_sum(grad, ranks).result())


@one_node
def reduce(tensor: Tensor, ranks: Communicator) -> Tensor:
    """Return the sum over ranks; backward passes the gradient on, equal on all ranks."""
    if is_outline(tensor) or ranks.size == 1:
        return tensor
    return conjugate(
        tensor, lambda x: start_sum(x, ranks).result(), lambda grad: grad.view_as(grad)
    )


@one_node
def gather(
    tensor: Tensor, ranks: Communicator, partition: Partition, *, partial: bool = False
) -> Tensor:
    """Return the whole tensor that the ranks hold shares of.

    With ``partial`` the computations that follow differ between ranks, and the gradient is the sum
    of theirs; else computations are the same on all ranks, and so are gradients.
    """
    if is_outline(tensor):
        return outlined(tensor, partition.dim, partition.size)

    def share_of(grad: Tensor) -> Tensor:
        if partial:
            share = start_sum(grad, ranks, partition).result()
        else:
            share = partition.take(grad, ranks.rank)
        # Forward took what several ranks hold from the first of them.
        return partition.disown(share, ranks.rank)

    return conjugate(tensor, lambda x: gathered(x, ranks, partition), share_of)


@one_node
def scatter(tensor: Tensor, ranks: Communicator, partition: Partition) -> Tensor:
    """Return this rank's share of a tensor that is the same on all ranks."""
    return _to_share(tensor, ranks, partition, lambda x: partition.take(x, ranks.rank))


@one_node
def reduce_scatter(tensor: Tensor, ranks: Communicator, partition: Partition) -> Tensor:
    """Return this rank's share of the sum over ranks."""
    return _to_share(tensor, ranks, partition, lambda x: start_sum(x, ranks, partition).result())


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A tensor on its way; ``finish`` makes it when the collective is over."""

    handle: Handle
    finish: Callable[[], Tensor]

    def result(self) -> Tensor:
        """Wait for the tensor and return it."""
        self.handle.wait()
        return self.finish()


def start_sum(
    tensor: Tensor, ranks: Communicator, partition: Partition | None = None, *, own: bool = False
) -> PendingSum:
    """Start to sum whole tensors over ranks; with a partition, each rank gets its share.

    An ``own`` tensor, which is contiguous and which nobody else holds, may be overwritten.
    """
    if isinstance(ranks, InGraph):
        return ranks.start(tensor, partition)
    if partition is None:
        total = tensor if own else tensor.clone(memory_format=torch.contiguous_format)
        return PendingSum(ranks.all_reduce(total), lambda: total)
    buffer = _in_order_of_ranks(tensor, partition)
    if not own and buffer.data_ptr() == tensor.data_ptr():
        buffer = buffer.clone()
    start, stop = partition.bounds[ranks.rank]
    handle = ranks.reduce_scatter(buffer.view(-1), chunks=_chunks(buffer, partition))
    share = buffer[start:stop].movedim(0, partition.dim)
    # A copy, so that the share does not keep the whole buffer alive.
    return PendingSum(handle, lambda: share.clone(memory_format=torch.contiguous_format))


def gathered(
    share: Tensor,
    ranks: Communicator,
    partition: Partition,
    *,
    add: bool = False,
    label: str = "",
) -> Tensor:
    """Return the whole tensor, contiguous.

    Ranges on several ranks are equal, or are added up (``add``).
    """
    if isinstance(ranks, InGraph):
        return ranks.gathered(share, partition, add=add)
    first = share.movedim(partition.dim, 0)
    buffer = share.new_empty((sum(partition.local_sizes), *first.shape[1:]))
    start, stop = partition.bounds[ranks.rank]
    buffer[start:stop].copy_(first)
    ranks.all_gather(buffer.view(-1), chunks=_chunks(buffer, partition), label=label).wait()
    if partition.is_plain:
        return unviewed(buffer.movedim(0, partition.dim).contiguous())
    whole = share.new_zeros(
        [partition.size if dim == partition.dim % share.dim() else extent
         for dim, extent in enumerate(share.shape)]
    )  # fmt: skip
    for rank, (start, stop) in enumerate(partition.bounds):
        partition.put(whole, buffer[start:stop].movedim(0, partition.dim), rank, add=add)
    return whole


def unviewed(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, perhaps a view, as a tensor that autograd takes for no view.

    The view that a function returns could not be changed in place, by ``ReLU(inplace=True)`` say.
    """
    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape)  # type: ignore[no-any-return]


def _in_order_of_ranks(whole: Tensor, partition: Partition) -> Tensor:
    """Return the shares of all ranks, one after the other in dim 0, contiguous."""
    if partition.is_plain:
        return whole.movedim(partition.dim, 0).contiguous()
    shares = [partition.take(whole, rank) for rank in range(partition.ranks)]
    return torch.cat([share.movedim(partition.dim, 0) for share in shares])


def _chunks(buffer: Tensor, partition: Partition) -> list[tuple[int, int]]:
    each = buffer.shape[1:].numel()
    return [(start * each, stop * each) for start, stop in partition.bounds]


Way: TypeAlias = Callable[[Tensor], Tensor]


def conjugate(tensor: Tensor, forward: Way, backward: Way) -> Tensor:
    """Return one function of a tensor; backward applies another one to its gradient."""
    return _Conjugate.apply(tensor, forward, backward)  # type: ignore[no-any-return,no-untyped-call]


def _to_share(tensor: Tensor, ranks: Communicator, partition: Partition, forward: Way) -> Tensor:
    """Return this rank's share; backward gathers the gradients of shares."""
    if is_outline(tensor):
        return outlined(tensor, partition.dim, partition.local_sizes[ranks.rank])
    return conjugate(tensor, forward, lambda grad: gathered(grad, ranks, partition, add=True))


class _Conjugate(torch.autograd.Function):
    """One function of the tensor in forward, another one of its gradient in backward.

    Each of the two is the gradient of the other: so a gradient can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Way, backward: Way) -> Tensor:
        ctx.ways = forward, backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        forth, back = ctx.ways
        again = torch.is_grad_enabled() and grad.requires_grad
        return conjugate(grad, back, forth) if again else back(grad), None, None


def is_outline(*tensors: Tensor | None) -> bool:
    """Whether one of these has no values."""
    return any(type(tensor) is StageProxy for tensor in tensors)


def outlined(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor without values, with another size in one dim."""
    shape = list(tensor.shape)
    shape[dim] = size
    found = StageProxy.like(shape, tensor.dtype, tensor.device, tensor.requires_grad)
    found.derived_from([tensor])
    return found


class Uncopied:
    """Shared by the copies of a module: communicators have threads and groups."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class TokenShards:
    """Along which dim activations are cut into shards, and how long the dim is right now.

    Whoever cuts the first activation of a forward says the length; shards may be uneven, so a shard
    does not tell. One object serves a whole region of the model. The dim is counted from the end;
    any dim of tokens will do.
    """

    def __init__(self, dim: int = -2) -> None:
        self.dim = dim
        self._size: int | None = None

    def begin(self, size: int) -> None:
        """Say how long the dim is from now on."""
        self._size = size

    def partition(self, ranks: int) -> Partition:
        """Return how the dim is cut.

        Raises:
            UsageError: nobody said how long it is.
        """
        if self._size is None:
            raise UsageError(
                f"expected to know how long dim {self.dim} of activations is, found a layer that "
                "runs outside of the part of the model that is sequence parallel; call the model "
                "itself, not one of its layers"
            )
        if torch.compiler.is_compiling():  # as constants, each length in a graph of its own
            return self.dim, self._size, ranks  # type: ignore[return-value]
        return even(self.dim, self._size, ranks)


@dataclass(frozen=True)
class Edges(Uncopied):
    """The way into, and out of, a part of the model whose layers are cut over ranks.

    Attributes:
        ranks: the axis.
        tokens: None: activations outside are whole; else they are shards of the sequence.
        prepared: whether inputs have entered already, for several layers together.
    """

    ranks: Communicator
    tokens: TokenShards | None = None
    prepared: bool = False

    @property
    def sequence(self) -> Partition | None:
        """How activations outside are cut; None when they are whole."""
        if self.tokens is None or self.ranks.size == 1:
            return None
        return self.tokens.partition(self.ranks.size)

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole input of every rank's part; its gradients are summed over ranks."""
        if self.prepared:
            return x
        sequence = self.sequence
        if sequence is None:
            return copy(x, self.ranks)
        return gather(x, self.ranks, sequence, partial=True)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of their parts, as it is outside."""
        sequence = self.sequence
        if sequence is None:
            return reduce(x, self.ranks)
        return reduce_scatter(x, self.ranks, sequence)
