"""One call of a block whose intermediate values are dropped and computed again in backward.

Selective recompute keeps the results of matrix products with a weight, of convolutions and of fused
attention. Recomputed is the rest: scores, softmax and dropout of attention that is written out,
norms, activations, residual sums. These are most of the memory and little of the work.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain.recompute.inputs import KeptInputs

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
    """Remembers which buffers a forward changed, and undoes their change by a recomputation.

    Buffers that stay as they are are neither copied nor written to: they may be large, as masks, or
    wait in a graph that checks whether they were written to.

    Args:
        block: the recomputed module.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changed: list[nn.Module] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context of the forward."""
        modules = [module for module in self._block.modules() if module._buffers]
        before = [_versions(_buffers(module)) for module in modules]
        try:
            yield
        finally:
            # The norms' kernels write their statistics without counting it as a write.
            self._changed = [
                module
                for module, versions in zip(modules, before, strict=True)
                if isinstance(module, _NormBase) or _versions(_buffers(module)) != versions
            ]

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Context of the recomputation."""
        buffers = [buffer for module in self._changed for buffer in _buffers(module)]
        before = [buffer.detach().clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in zip(buffers, before, strict=True):
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
