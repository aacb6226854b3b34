"""Divides one block as trials allow: first with thin matrices, then, if need be, as it is."""

from collections.abc import Mapping, Sequence

from torch import nn

from drivetrain_megatron.dropout import DropoutLayout, Site
from drivetrain_megatron.plan.alike import same_in_list
from drivetrain_megatron.plan.derive import BlockStructure, Derivation, derive
from drivetrain_megatron.plan.groups import rows_of
from drivetrain_megatron.plan.misfit import find_misfit
from drivetrain_megatron.plan.trial import find_layouts, make_trial
from drivetrain_megatron.recording.calls import Call
from drivetrain_megatron.tensor.operators import TokenShards


def divide_block(
    block: nn.Module,
    called: Sequence[Call],
    structure: BlockStructure,
    layers: set[str] | None,
    tokens: TokenShards | None,
    ranks: int,
    *,
    alone: bool = False,
) -> tuple[Derivation, Mapping[Site, DropoutLayout]]:
    """Return how a block is divided, and the layouts of its dropouts' inputs.

    The block is called in one way in training, and perhaps in another in evaluation. Large matrices
    are thin in the trial. If the plan does not fit the block itself, or a thin block cannot run, it
    is tried as it is.
    """
    call, sharded = called[0], tokens is not None
    rows = {name for row in rows_of(structure.uses) for name in same_in_list(block, row)}
    for few in (rows, None):
        try:
            trial, *others = [make_trial(block, c, few, trains=c is call) for c in called]
        except Exception as error:  # whatever the user's code raises in fp64: it stays whole
            reason = f"it cannot be tried in fp64: {type(error).__name__}: {error}"
            continue
        found = derive(
            trial,
            structure,
            ranks,
            sequence_parallel=sharded,
            layers=layers,
            alone=alone,
            evaluations=others,
        )
        if _is_thin(trial.block, block) and find_misfit(
            block, call, found.plan, ranks, sequence_parallel=sharded
        ):
            continue
        fits = (sharded or not found.is_whole) and not found.broken
        return found, find_layouts(trial, found.plan, ranks, tokens) if fits else {}
    return Derivation(untried=reason, broken=reason if sharded else ""), {}


def _is_thin(copied: nn.Module, block: nn.Module) -> bool:
    """Whether a copy has other shapes than its block."""
    pairs = zip(copied.parameters(), block.parameters(), strict=True)
    return any(mine.shape != own.shape for mine, own in pairs)
