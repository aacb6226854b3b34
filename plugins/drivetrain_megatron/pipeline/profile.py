"""Measures what blocks cost: one forward and backward of each kind of block, on random inputs."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from drivetrain.errors import UsageError
from drivetrain_megatron.recording.block_hooks import Gates
from drivetrain_megatron.recording.proxy import StageProxy, proxy_like
from drivetrain_megatron.recording.recorder import Recording, block_order, to_device
from drivetrain_megatron.recording.substitution import without_values

_RUNS = 3
"""How often a kind of block is timed; the first run warms up and the fastest counts."""


def profile(
    model: nn.Module, recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[float]:
    """Return the seconds that each block takes for forward and backward.

    The model's forward runs on proxies; of each kind of block (class, shapes of parameters and
    arguments) the first is computed really. Gradients and random generators stay as they were.

    Args:
        model: with its values, before it is split.
        recording: of this model.
        args: example inputs, of the size that counts.
        kwargs: the same by name.

    Raises:
        UsageError: the model has no values.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "expected a model with values to measure, found one on the meta device: estimate its "
            "costs instead, or give the cut as a list"
        )
    blocks = block_order(recording, model)
    forward, modules = model.forward, [block for _, block in blocks]
    timer = _Timer(recording, modules)
    with without_values(model) as substitutes:
        timer.device = substitutes.device
        inputs = to_device((tuple(args), dict(kwargs)), substitutes.device)
        with Gates(blocks).conducted(timer), torch.enable_grad():
            forward(*inputs[0], **inputs[1])
    return timer.seconds


def scaled_edges(recording: Recording, seconds: Sequence[float]) -> tuple[float, float]:
    """Return what comes before and after the blocks, in seconds at the speed of the blocks."""
    work = sum(block.work for block in recording.blocks)
    pace = sum(seconds) / work if work else 0.0
    return recording.between[0] * pace, recording.between[-1] * pace


class _Timer:
    """Computes the first block of each kind, and gives proxies for all."""

    def __init__(self, recording: Recording, blocks: Sequence[nn.Module]) -> None:
        self._recording = recording
        self._blocks = blocks
        self._values = [
            [(module, dict(module._parameters)) for module in block.modules()] for block in blocks
        ]
        self._known: dict[Any, float] = {}
        self.seconds: list[float] = []
        self.device = torch.device("cpu")

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Note the time of a block."""
        block, record = self._blocks[index], self._recording.blocks[index]
        leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
        parameters = (tuple(parameter.shape) for parameter in block.parameters())
        kind = (type(block), *parameters, *(_shape(leaf) for leaf in leaves))
        if kind not in self._known:
            self._known[kind] = self._time(index, compute, args, kwargs)
        self.seconds.append(self._known[kind])
        made = [
            proxy_like(m.shape, m.dtype, self.device, m.requires_grad) for m in record.output.metas
        ]
        return record.output.build(record.name, made, leaves)

    def _time(self, index: int, compute: Any, args: Any, kwargs: Any) -> float:
        proxies = [(module, dict(module._parameters)) for module, _ in self._values[index]]
        _put(self._values[index])
        try:
            return min([self._once(index, compute, args, kwargs) for _ in range(_RUNS)][1:])
        finally:
            _put(proxies)

    def _once(self, index: int, compute: Any, args: Any, kwargs: Any) -> float:
        real_args, real_kwargs = tree_map(_real, (tuple(args), dict(kwargs)))
        sources = [*tree_leaves((real_args, real_kwargs)), *self._blocks[index].parameters()]
        wanted = [leaf for leaf in sources if isinstance(leaf, Tensor) and leaf.requires_grad]
        _wait()
        started = time.perf_counter()
        result = tree_leaves(compute(*real_args, **real_kwargs))
        roots = [leaf for leaf in result if isinstance(leaf, Tensor) and leaf.requires_grad]
        if roots and wanted:
            seeds = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        _wait()
        return time.perf_counter() - started


def _put(contents: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
    for module, parameters in contents:
        module._parameters.update(parameters)


def _real(leaf: Any) -> Any:
    """Return a random tensor in place of a proxy, and a copy of an object."""
    if isinstance(leaf, StageProxy):
        _, _, dtype, device = leaf.facts
        made = torch.zeros(leaf.shape, dtype=dtype, device=device)
        return made.normal_().requires_grad_() if dtype.is_floating_point else made
    return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
