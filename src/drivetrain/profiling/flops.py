"""Counts the floating point operations of a step, by module and by phase.

Counted are products of matrices, convolutions and attention, by torch's own formulas: a product of
(m, k) and (k, n) has 2 m k n. Attention counts as if no mask left anything out. Additions, norms
and activations are no work that a device's peak is about; they count nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from drivetrain.parts.guard import Keywords
from drivetrain.profiling.trail import ModulePlace

_aten = torch.ops.aten
_FLASH = _aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward

_FORMULAS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        # Attention of processors, which torch has no formulas for.
        _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_FLASH],
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[_FLASH_BACKWARD],
        **flop_registry,
    }
)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered, and changes nothing.

    Args:
        place: tells which module computes.

    Attributes:
        counts: operations by place.
        dtypes: operations by the dtype of their factors.
        unknown: names of operations whose formula failed; they count nothing.
    """

    supports_higher_order_operators = True

    def __init__(self, place: Callable[[], ModulePlace]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[ModulePlace] = Counter()
        self.dtypes: Counter[torch.dtype] = Counter()
        self.unknown: set[str] = set()
        self._place = place
        self._counting = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code as it is; its calls of torch are counted."""
        return True

    def stop(self) -> None:
        """Count no more. A mode that a script has entered since, and not left, keeps its place."""
        self._counting = False
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Keywords | None = None
    ) -> Any:
        """Run an operation, and count it."""
        named = dict(kwargs or {})
        result = func(*args, **named)
        kind = getattr(func, "_overloadpacket", func)
        formula = _FORMULAS.get(kind)
        if formula is not None and self._counting:
            try:
                count = formula(*args, **named, out_val=result)
            except Exception:  # an overload that torch's formula does not know: training goes on
                self.unknown.add(str(kind))
                return result
            self.counts[self._place()] += count
            factors = (each.dtype for each in args if isinstance(each, Tensor))
            self.dtypes[next(factors, torch.get_default_dtype())] += count
        return result
