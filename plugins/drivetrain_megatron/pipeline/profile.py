"""Measures what blocks cost: one forward and backward of each kind of block, on random inputs."""

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError
from drivetrain.model.look import BlockCall, Look, SeenTensor
from drivetrain.model.substitution import without_values
from drivetrain.parts.blocks import repeated_blocks
from drivetrain_megatron.recording.phases import Recording
from drivetrain_megatron.recording.proxy import StageProxy

_RUNS = 3
"""How often a kind of block is timed; the first run warms up and the fastest counts."""


def profile(model: nn.Module, look: Look) -> list[float]:
    """Return the seconds that each block takes for forward and backward.

    Of each kind of block (class, shapes of parameters and arguments) the first is computed, with
    random inputs. Gradients and random generators stay as they were.

    Args:
        model: with its values, before it is split.
        look: at the model, with example inputs of the size that counts.

    Raises:
        UsageError: the model has no values.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "expected a model with values to measure, found one on the meta device: estimate its "
            "costs instead, or give the cut as a list"
        )
    blocks = dict(repeated_blocks(model))
    known: dict[Any, float] = {}
    seconds = []
    values = {name: _parameters(block) for name, block in blocks.items()}
    with without_values(model, StageProxy), torch.enable_grad():
        for call in look.blocks:
            block = blocks[call.name]
            kind = _kind(block, look, call)
            if kind not in known:
                _put(values[call.name])  # of this block alone; whatever it changes is undone
                known[kind] = min([_once(block, look, call) for _ in range(_RUNS)][1:])
            seconds.append(known[kind])
    return seconds


def scaled_edges(recording: Recording, seconds: Sequence[float]) -> tuple[float, float]:
    """Return what comes before and after the blocks, in seconds at the speed of the blocks."""
    work = sum(block.work for block in recording.blocks)
    pace = sum(seconds) / work if work else 0.0
    return recording.between[0] * pace, recording.between[-1] * pace


def _parameters(block: nn.Module) -> list[tuple[nn.Module, Mapping[str, Any]]]:
    return [(module, dict(module._parameters)) for module in block.modules()]


def _put(contents: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
    for module, parameters in contents:
        module._parameters.update(parameters)


def _kind(block: nn.Module, look: Look, call: BlockCall) -> tuple[Any, ...]:
    """Return what blocks have in common that take the same time."""
    given = [None if number is None else look.tensors[number].facts for number in call.given]
    parameters = (tuple(parameter.shape) for parameter in block.parameters())
    shapes = (None if facts is None else (facts.shape, facts.dtype) for facts in given)
    return (type(block), *parameters, *shapes)


def _once(block: nn.Module, look: Look, call: BlockCall) -> float:
    """Return the seconds of one forward and backward."""
    args, kwargs = tree_map(_copied, look.example(call, _random))
    sources = [*tree_leaves((args, kwargs)), *block.parameters()]
    wanted = [leaf for leaf in sources if isinstance(leaf, Tensor) and leaf.requires_grad]
    _wait()
    started = time.perf_counter()
    result = tree_leaves(block.forward(*args, **kwargs))
    roots = [leaf for leaf in result if isinstance(leaf, Tensor) and leaf.requires_grad]
    if roots and wanted:
        seeds = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    _wait()
    return time.perf_counter() - started


def _random(seen: SeenTensor) -> Tensor:
    """Return a random tensor in place of one without values."""
    made = torch.zeros(seen.facts.shape, dtype=seen.facts.dtype, device=seen.facts.device)
    return made.normal_().requires_grad_() if seen.facts.dtype.is_floating_point else made


def _copied(leaf: Any) -> Any:
    """Return an object that a block may change; tensors are never seen again."""
    return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
