"""Compares shapes under a plan, which was found with thin matrices, with shapes of the block."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from drivetrain.collectives import Communicator
from drivetrain.log import get_logger
from drivetrain_megatron.plan.divide import BlockPlan, divide
from drivetrain_megatron.plan.thread_ranks import run_emulated
from drivetrain_megatron.plan.trial import activation_in, entered, floating_in
from drivetrain_megatron.recording.calls import Call
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.tensor.operators import Edges, TokenShards, gather

logger = get_logger(__name__)


def find_misfit(
    block: nn.Module, call: Call, plan: BlockPlan, ranks: int, *, sequence_parallel: bool
) -> str:
    """Return why a plan does not fit the block as it is, without values; empty if it does.

    Blocks that read values cannot run without any: they fit, and a line says so.
    """
    whole = _outlined(copy.deepcopy(block, _on_meta(block)))
    try:
        expected = _shapes_of(whole, call)
    except Exception as error:  # whatever the user's code raises without values
        logger.announce(
            f"tensor parallelism: {type(block).__name__} was tried with thin matrices alone, since "
            f"it does not run without values ({type(error).__name__}: {error})"
        )
        return ""

    def one_rank(communicator: Communicator) -> list[torch.Size]:
        edges = Edges(communicator, TokenShards() if sequence_parallel else None)
        mine = copy.deepcopy(block, _on_meta(block))
        divide(mine, plan, edges)
        return _shapes_of(_outlined(mine), call, edges)

    try:
        found = run_emulated(ranks, one_rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(each == expected for each in found) else "outputs have other shapes"


def _on_meta(block: nn.Module) -> dict[int, Any]:
    """Return parameters on the meta device for a copy of a block, by identity of its own."""
    return {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.is_floating_point())
        for p in block.parameters()
    }


def _outlined(block: nn.Module) -> nn.Module:
    """Return a block in evaluation mode that computes without values, and sends nothing."""
    cpu = torch.device("cpu")
    for module in block.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    outline: Any = StageProxy.of(tensor, cpu)
                    tensors[name] = outline
    return block.eval()


def _shapes_of(block: nn.Module, call: Call, edges: Edges | None = None) -> list[torch.Size]:
    args, kwargs = call.copied()
    given = activation_in((args, kwargs))
    outline = None if given is None else StageProxy.of(given, torch.device("cpu"))
    with entered(given, outline, edges) as (inside, sequence):
        args, kwargs = tree_map(lambda x: inside if x is given else x, (args, kwargs))
        outputs = floating_in(block(*args, **kwargs))
        if edges is not None and sequence is not None:
            outputs[0] = gather(outputs[0], edges.ranks, sequence)
    return [output.shape for output in outputs]
