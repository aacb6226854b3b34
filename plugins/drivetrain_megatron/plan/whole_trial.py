"""Tries the plan of a whole model: ranks that are threads must have the numbers of one process.

Blocks have been tried one by one (``trial``). The code around them may still read a weight of which
a rank has a share, or something that a block keeps. So all outputs, and the gradients of all
parameters as optimizers would see them, are compared once more.

Large matrices are thin (``random_copy``); from long lists of alike blocks the first ones are taken.
"""

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError
from drivetrain.log import get_logger
from drivetrain.model.look import Look
from drivetrain.model.untouched import keep_padding
from drivetrain.parts.naming import uncompiled
from drivetrain.runtime import rng
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.plan.derive import Derivation
from drivetrain_megatron.plan.model import ModelPlan, TensorParallel
from drivetrain_megatron.plan.thread_ranks import run_emulated
from drivetrain_megatron.plan.trial import (
    NOISE,
    SEED,
    Results,
    backward,
    floating_in,
    is_close,
    randomized,
    thin_shapes,
)
from drivetrain_megatron.recording.calls import Call, ExampleInputs
from drivetrain_megatron.tensor.partition import ShardingSpec
from drivetrain_megatron.tensor.vocabulary import ShardedLogits

MOST_BYTES = 1 << 30
"""Of the weights, gradients and activations in a trial; a model that needs more is not tried."""

_OF_A_KIND = 2
"""Blocks of a kind that a shortened list keeps: one feeds another."""

logger = get_logger(__name__)


def confirmed(
    model: nn.Module, inputs: ExampleInputs | None, plan: ModelPlan, config: MegatronConfig
) -> ModelPlan:
    """Return the part of a plan with which ranks have the numbers of one process.

    That is all, or all but the words, or nothing. A model that is too large for a trial keeps its
    plan.

    Args:
        model: the user's, whole.
        inputs: with which it can be called; without any, nothing is divided.
        plan: of the model.
        config: with the user's plan, if there is one, and the number of ranks.

    Raises:
        ConfigError: the numbers differ, and the plan is the user's, or activations are shards.
    """
    if inputs is None or plan.is_whole:
        return plan
    try:
        trial = make_whole_trial(uncompiled(model), inputs, plan.blocks, config.tp)
    except Exception as error:  # whatever the user's code raises
        return _as_blocks_say(plan, _text(error), config)
    if trial is None:
        logger.debug("the model is too large to be tried as a whole: its blocks have been tried")
        return plan
    if trial.failure:
        plan = _as_blocks_say(plan, trial.failure, config)
    reason = difference(trial, plan, config.tp)
    if reason and config.plan:
        raise ConfigError(
            "plan: expected ranks to have the numbers of one process, found that with this plan "
            f"{reason}; leave the layers out of it that code outside of them reads"
        )
    return _rest_of(plan, trial, reason, config.tp) if reason else plan


def _as_blocks_say(plan: ModelPlan, failure: str, config: MegatronConfig) -> ModelPlan:
    """Return the plan that trials of blocks allow: without words, unless the user named them."""
    note = f"only blocks were tried with gradients, not the whole model ({failure})"
    return replace(plan, vocabulary=plan.vocabulary if config.plan else [], note=note)


def _rest_of(plan: ModelPlan, trial: "WholeTrial", reason: str, ranks: int) -> ModelPlan:
    """Return the part of a wrong plan that is right: without words, or nothing.

    Raises:
        ConfigError: activations are shards.
    """
    if plan.vocabulary:
        note = f"{', '.join(plan.vocabulary)} stay whole: divided by words, {reason}"
        plan = replace(plan, vocabulary=[], note=note)
        reason = "" if plan.is_whole else difference(trial, plan, ranks)
        if not reason:
            return plan
    if plan.sharded:
        raise ConfigError(
            "sequence_parallel: expected a model that has the numbers of one process on shards of "
            f"the sequence, found that {reason}; set sequence_parallel: false"
        )
    return ModelPlan({"": Derivation(untried=f"divided over ranks, {reason}")})


@dataclass(frozen=True, slots=True)
class WholeTrial:
    """A copy of a model with random values, the arguments of a call, and the call's results.

    Attributes:
        model: in evaluation mode, so that nothing is dropped.
        call: the arguments.
        results: of one process.
        missing: names of the blocks that the copy lacks.
        failure: why there are no gradients to compare; "" if there are.
    """

    model: nn.Module
    call: Call
    results: Results
    missing: Collection[str]
    failure: str = ""


def make_whole_trial(
    model: nn.Module, inputs: ExampleInputs, blocks: Mapping[str, Derivation], ranks: int
) -> WholeTrial | None:
    """Run a copy of a model with random values, once: forward and backward, or forward alone.

    Returns:
        The trial; None for a model that is too large for a trial.

    Raises:
        Exception: whatever the model's code raises when it computes on the CPU with random values,
            in fp64 and in fp32.
        ArithmeticError: the results are not finite, so that nothing can be compared.
    """
    call = Call(inputs.args, inputs.kwargs)
    failure: Exception | None = None
    for trains, dtype in product((True, False), (torch.float64, torch.float32)):
        for outline, rows, missing in _outlines(model, inputs.look, blocks, ranks):
            try:
                copied, wide = randomized(outline, call, rows, dtype)
                with rng.fork(SEED), torch.set_grad_enabled(trains):
                    results = _finite(_run(copy.deepcopy(copied), wide))
                return WholeTrial(copied, wide, results, missing, "" if trains else _text(failure))
            except Exception as error:  # whatever the user's code raises
                failure = failure or error
    if failure is not None:
        raise failure
    return None


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"


def difference(trial: WholeTrial, plan: ModelPlan, ranks: int) -> str:
    """Return how the numbers of ranks under a plan differ from one process; "" if they do not."""
    blocks = {name: each for name, each in plan.blocks.items() if name not in trial.missing}
    expected = trial.results

    def one_rank(communicator: Communicator) -> tuple[Results, Mapping[str, ShardingSpec]]:
        mine = copy.deepcopy(trial.model)
        side = TensorParallel(
            communicator, sequence_parallel=plan.sharded, named=None, strict=False
        )
        facts = side.divide(mine, replace(plan, blocks=blocks))
        side.surround()
        side.sum_partial(mine, facts)
        return _run(mine, trial.call, expected.outputs), facts

    try:
        with rng.fork(SEED), torch.set_grad_enabled(not trial.failure):
            found = run_emulated(ranks, one_rank)
            seen = found[0][0].outputs
            if any(_ranks_own(seen, expected.outputs)):
                expected = _run(copy.deepcopy(trial.model), trial.call, seen)
    except Exception as error:  # whatever the user's code says to sizes that it does not expect
        return _text(error)
    outputs = (_other_output(results, expected) for results, _ in found)
    gradients = (
        _other_gradient(results, expected, facts, rank)
        for rank, (results, facts) in enumerate(found)
    )
    reasons = [next(filter(None, each), "") for each in (outputs, gradients)]
    return " and ".join(filter(None, reasons))


def _run(model: nn.Module, call: Call, like: Sequence[Tensor] | None = None) -> Results:
    """Run forward, and backward from all outputs that are not a rank's own beside these."""
    args, kwargs = call.copied()
    outputs = [_gathered(x) for x in floating_in(model(*args, **kwargs))]
    own = _ranks_own(outputs, outputs if like is None else like)
    backward([x for x, is_own in zip(outputs, own, strict=True) if not is_own])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Results([x.detach() for x in outputs], [], gradients)


def _ranks_own(outputs: Sequence[Tensor], like: Sequence[Tensor]) -> list[bool]:
    """Return which outputs are of a rank's own heads, as maps of attention and caches are.

    The first one, a loss or logits, is whole.
    """
    if len(outputs) != len(like):
        return [False] * len(outputs)
    pairs = enumerate(zip(outputs, like, strict=True))
    return [index > 0 and x.shape != other.shape for index, (x, other) in pairs]


def _gathered(output: Tensor) -> Tensor:
    return output.gathered() if isinstance(output, ShardedLogits) else output


def _finite(results: Results) -> Results:
    tensors = [*results.outputs, *(g for g in results.parameters.values() if g is not None)]
    if not results.outputs:
        raise ArithmeticError("no floating point tensors were found in its output")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise ArithmeticError("its results are not finite with random weights")
    return results


def _other_output(found: Results, expected: Results) -> str:
    """Return the first output that one process has otherwise."""
    if len(found.outputs) != len(expected.outputs):
        return f"{len(found.outputs)} outputs are there, not {len(expected.outputs)}"
    own = _ranks_own(found.outputs, expected.outputs)
    for index, (x, whole) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        if not own[index] and not is_close(x, whole):
            return f"output {index} differs"
    return ""


def _other_gradient(
    found: Results, expected: Results, facts: Mapping[str, ShardingSpec], rank: int
) -> str:
    """Return the first parameter of which one process has another gradient."""
    gradients = [g for g in expected.parameters.values() if g is not None]
    noise = max((g.norm().item() * NOISE[g.dtype] for g in gradients), default=0.0)
    for name, whole in expected.parameters.items():
        mine, partition = found.parameters[name], facts[name].partition
        if whole is None or mine is None:
            if mine is not whole:
                return f"the gradient of {name!r} differs"
            continue
        share = whole if partition is None else partition.take(whole, rank)
        if not is_close(mine, share, noise):
            return f"the gradient of {name!r} differs"
    return ""


def _outlines(
    model: nn.Module, look: Look, blocks: Mapping[str, Derivation], ranks: int
) -> Iterator[tuple[nn.Module, Collection[str] | None, Collection[str]]]:
    """Yield copies of a model without values, rows for thin matrices, and blocks left out."""
    rows = {
        f"{name}.{group.row}".lstrip(".")
        for name, derivation in blocks.items()
        for group in derivation.plan.groups
    }
    for missing in dict.fromkeys((frozenset[str](), _later(blocks))):
        outline = _outline(model, missing)
        for thin in (rows, None):
            weights = sum(prod(shape) for shape in thin_shapes(outline, thin).values())
            if _bytes(weights, look, missing, ranks) <= MOST_BYTES:
                yield outline, thin, missing


def _bytes(weights: int, look: Look, missing: Collection[str], ranks: int) -> int:
    """Return about how many bytes a trial with so many weights takes, in fp64."""
    calls = look.blocks
    written = sum(
        each.written
        for each in look.operations
        if each.block is None or calls[each.block].name not in missing
    )
    size = torch.float64.itemsize
    return 2 * size * weights * (1 + ranks) + 2 * written


def _later(blocks: Mapping[str, Derivation]) -> frozenset[str]:
    """Return the blocks at the ends of lists, behind enough blocks of each kind."""
    kinds = Counter((_list_of(name), id(derivation)) for name, derivation in blocks.items())
    wanted = {kind: min(count, _OF_A_KIND) for kind, count in kinds.items()}
    later = set()
    for name, derivation in blocks.items():
        around = _list_of(name)
        if any(count > 0 for (place, _), count in wanted.items() if place == around):
            wanted[around, id(derivation)] -= 1
        else:
            later.add(name)
    return frozenset(later)


def _list_of(block: str) -> str:
    return block.rpartition(".")[0]


def _outline(model: nn.Module, missing: Collection[str]) -> nn.Module:
    """Return a copy without values, uncompiled, that lacks these blocks."""
    known: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.is_floating_point())
        for _, p in model.named_parameters()
    }
    outline = copy.deepcopy(model, known)
    for module in outline.modules():
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        module._modules.update((name, uncompiled(child)) for name, child in children)
    for name in missing:
        del outline.get_submodule(_list_of(name))._modules[name.rpartition(".")[2]]
    keep_padding(outline)
    return outline
