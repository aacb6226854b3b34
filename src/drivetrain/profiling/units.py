"""Ranges in a trace around the forward and the backward of each unit of a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from drivetrain.parts.rounds import after_backward, in_backward
from drivetrain.parts.wrapping import UninheritedHook, is_compiled_call
from drivetrain.ranges import BACKWARD, FORWARD, RECOMPUTE, is_profiled


class UnitRanges:
    """Hooks on the units of a model, from now until ``close``.

    The backward of a unit begins with the first gradient of its outputs and lasts until that of
    another unit begins. Units whose call is compiled are left alone: hooks would compile it anew.

    Args:
        units: by name.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._forwards: list[record_function] = []
        self._backward: record_function | None = None
        self._handles: list[RemovableHandle] = []
        for name, unit in units.items():
            if not is_compiled_call(unit):
                self._watch(name, unit)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_backward()

    def _watch(self, name: str, unit: nn.Module) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self._enter(name)

        def leave(module: nn.Module, args: Any, outputs: Any) -> None:
            self._leave(name, outputs)

        self._handles += [
            unit.register_forward_pre_hook(UninheritedHook(enter), prepend=True),
            unit.register_forward_hook(UninheritedHook(leave), always_call=True),
        ]

    def _enter(self, name: str) -> None:
        if is_profiled():
            begun = record_function(f"{RECOMPUTE if in_backward() else FORWARD}{name}")
            begun.__enter__()  # type: ignore[no-untyped-call]
            self._forwards.append(begun)

    def _leave(self, name: str, outputs: Any) -> None:
        if not self._forwards:
            return
        self._forwards.pop().__exit__(None, None, None)
        if not torch.is_grad_enabled():
            return

        def begin(gradient: Tensor) -> None:
            self._begin_backward(name)

        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(begin)  # type: ignore[no-untyped-call]  # dies with the graph
                break  # one is enough: its gradient comes before the unit computes

    def _begin_backward(self, name: str) -> None:
        if not is_profiled():
            return
        if self._backward is None:
            after_backward(self._end_backward)
        self._end_backward()
        self._backward = record_function(f"{BACKWARD}{name}")
        self._backward.__enter__()  # type: ignore[no-untyped-call]

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None
