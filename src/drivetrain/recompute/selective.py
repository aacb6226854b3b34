"""Which results selective recompute keeps, and how recomputation gets them back.

Kept are the results of matrix products with a weight, of convolutions and of fused attention.
Recomputed is the rest: scores, softmax and dropout of attention that is written out, norms,
activations, residual sums. These are most of the memory and little of the work.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

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

_Results: TypeAlias = dict[Any, list[Any]]


def selective_contexts() -> tuple[Sequence[TorchDispatchMode], Sequence[TorchDispatchMode]]:
    """Return the contexts of one forward and of its recomputation, which share the kept results."""
    results: _Results = defaultdict(list)
    return (_Keep(results),), (_GiveBack(results),)


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
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
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

    def __enter__(self) -> "_GiveBack":
        self._next.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
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
    values = value if isinstance(value, tuple) else (value,)
    return [each._version for each in values if isinstance(each, Tensor)]


def _draws_random_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether leaving a call out would shift the random numbers of the calls after it."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0) > 0.0)
