"""How a model and its blocks are called: example inputs, the trace with them, first arguments."""

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from drivetrain.collectives.facts import differing
from drivetrain.data.examples import (
    Candidate,
    ExampleBatch,
    batches_as_arguments,
    guessed_inputs,
)
from drivetrain.errors import RankMismatchError, UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Keywords
from drivetrain.model.modules import NamedModule, repeated_blocks, uncompiled
from drivetrain.model.trace import BlockCall, ModelTrace, TensorRef, TracedTensor, trace_model
from drivetrain.model.valueless import ValuesNeededError
from drivetrain.nested import describe
from drivetrain.strategy import Run
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.recording.phases import PLAIN, blocks_for, named_blocks
from drivetrain_megatron.recording.proxy import StageProxy

logger = get_logger(__name__)

_SHOWN_LINES, _SHOWN_CHARACTERS = 5, 100
"""Reasons of an error that are shown, and how much of each."""


@dataclass(frozen=True, slots=True)
class ExampleInputs:
    """Inputs of a model's forward, and a trace of a forward in training with them."""

    args: tuple[Any, ...]
    kwargs: Keywords
    trace: ModelTrace


def inputs_for(
    config: MegatronConfig, model: nn.Module, examples: Sequence[ExampleBatch] = ()
) -> ExampleInputs | None:
    """Return the example inputs that dividing a model takes.

    Returns:
        None where the model is not divided, or need not be: no inputs are found, nothing in it
        repeats, and no plan or pipeline asks for it.

    Raises:
        UsageError: as ``example_inputs``, for a model that has to be divided.
    """
    if config.tp * config.pp == 1:
        return None
    try:
        return example_inputs(model, examples, stages=config.pp * config.chunks)
    except UsageError:
        if (
            inputs_of_user(model) is not None
            or config.pp > 1
            or config.plan
            or repeated_blocks(model)
        ):
            raise
        return None


def example_inputs(
    model: nn.Module, examples: Sequence[ExampleBatch] = (), *, stages: int = 1
) -> ExampleInputs:
    """Return inputs that a model's forward accepts, and the trace of the model with them.

    Inputs that the script set on the model come first, and an error in them is raised. Else batches
    of the script's loaders, then inputs of the model's class and guesses are tried: the first ones
    that the forward of a trace accepts.

    Args:
        model: with or without values, not changed.
        examples: batches of the prepared loaders.
        stages: of the pipeline; blocks of several may run on different ranks.

    Returns:
        Inputs on the CPU: a few rows, guessed sequences of length 8.

    Raises:
        UsageError: the script's inputs are no dict, tuple or tensor, nothing is accepted, or the
            model chooses by values of hidden states.
    """
    given = inputs_of_user(model)
    if given is not None:
        if not isinstance(given, Mapping | list | tuple | Tensor):
            raise UsageError(
                f"expected model.example_inputs to be a dict, a tuple or a tensor, found a "
                f"{type(given).__name__}: set it to the arguments of the model's forward"
            )
        # A model that was made without memory may have made its inputs so.
        given = tree_map_only(
            Tensor,
            lambda each: torch.zeros_like(each, device="cpu") if each.is_meta else each,
            given,
        )
        _, args, kwargs, _ = Candidate.of("", given)
        return _looked(model, args, kwargs, stages)
    failures: dict[str, list[str]] = {}
    needed: ValuesNeededError | None = None
    plain = uncompiled(model)
    for candidate in chain(batches_as_arguments(plain, examples), guessed_inputs(plain)):
        problem = candidate.problem
        if not problem:
            try:
                return _looked(model, candidate.args, candidate.kwargs, stages)
            except Exception as error:  # whatever the user's forward raises means no
                needed = needed or (error if isinstance(error, ValuesNeededError) else None)
                problem = f"{type(error).__name__}: {error}"
        failures.setdefault(_in_one_line(problem), []).append(candidate.what)
    if needed is not None:
        raise needed  # it accepts the input, and then looks at values
    raise UsageError(_message(model, failures, had_loader=bool(examples)))


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


def _message(model: nn.Module, failures: Mapping[str, Sequence[str]], had_loader: bool) -> str:
    """Return the error of a model that accepts nothing: a line for each reason."""
    lines = [
        f"  {_in_one_line(first)}{f' and {len(others)} more' if others else ''}: {problem}"
        for problem, (first, *others) in failures.items()
    ]
    if not lines:
        lines = ["  no embedding, linear, convolution or transformer was found to guess them from"]
    if len(lines) > _SHOWN_LINES:
        hidden = len(lines) - _SHOWN_LINES + 1
        lines[_SHOWN_LINES - 1 :] = [f"  and {hidden} other errors"]
    loader = "" if had_loader else "prepare the model together with its loader, or "
    return "\n".join(
        (
            f"expected inputs with which {type(model).__name__} can be called once, found none "
            "that it accepts:",
            *lines,
            f"{loader}set model.example_inputs = {{'name': tensor}} (or a tuple of tensors) to a "
            "small batch as in training, before accelerator.prepare()",
        )
    )


def batches_for(run: Run, model: nn.Module) -> Sequence[ExampleBatch]:
    """Return batches of the prepared loaders, unless the script set inputs itself. Collective.

    Raises:
        RankMismatchError: ranks have set other inputs.
    """
    given = inputs_of_user(model)
    shown = describe(given, lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}")
    texts = differing([shown]) if run.world.size > 1 else []
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise RankMismatchError(
            f"expected {type(model).__name__}.example_inputs alike on every rank, found "
            f"{texts[0][0]} on rank 0 and {texts[other][0]} on rank {other}; set the same on all"
        )
    return run.examples.read() if given is None else ()


def inputs_of_user(model: nn.Module) -> Any:
    """Return the inputs that the script set on a model; None if there are none.

    ``example_inputs``, or ``dummy_inputs`` where the class has no property of this name, as
    the models of Hugging Face have.
    """
    own = vars(uncompiled(model))
    return own.get("example_inputs", own.get("dummy_inputs"))


def _looked(
    model: nn.Module, args: tuple[Any, ...], kwargs: Keywords, stages: int
) -> ExampleInputs:
    model = uncompiled(model)
    if stages == 1:
        trace = trace_model(model, args, kwargs, training=True)
    else:
        blocks = blocks_for(model, args, kwargs, stages)
        trace = trace_model(
            model, args, kwargs, blocks=blocks, kind=StageProxy, isolated=True, training=True
        )
    return ExampleInputs(args, kwargs, trace)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a block; blocks pass on the first activation among them.

    A whole model may get none: tokens are no activation.
    """

    args: tuple[Any, ...]
    kwargs: Keywords

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for one more call: blocks may change caches that they are given."""
        args, kwargs = tree_map(_copied, (self.args, dict(self.kwargs)))
        return args, kwargs


@dataclass(frozen=True, slots=True)
class Calls:
    """The blocks of a model in one forward.

    Attributes:
        blocks: the model's repeated blocks, in the order of their first calls.
        arguments: of each block's first call, by name; tensors without values are placeholders,
            which require a gradient where one goes back.
        uses: how many functions of torch took each parameter outside of blocks, by its first name.
    """

    blocks: Sequence[NamedModule]
    arguments: Mapping[str, Call]
    uses: Mapping[str, int]


def calls_in(trace: ModelTrace, model: nn.Module) -> Calls:
    """Return the calls of a model's blocks in a trace of it, as it was before compilation."""
    modules, first = dict(named_blocks(trace.candidates, model)), trace.first_calls()
    names = {number: name for name, number in trace.parameters.items()}
    uses = Counter(
        names[number]
        for operation in trace.operations
        if operation.block is None and operation.outputs
        for number in operation.inputs
        if number in names
    )
    arguments = {name: Call(*trace.example(call, _placeholder)) for name, call in first.items()}
    return Calls([(name, modules[name]) for name in first], arguments, uses)


def other_calls(
    model: nn.Module, inputs: ExampleInputs, blocks: Collection[str]
) -> dict[str, list[Call]]:
    """Return the first calls in an evaluation, by name, of blocks that get other arguments there.

    Of these blocks alone: the evaluation ends behind them. A block may get a state to fill, for
    one. Without a result from a trace of the evaluation nothing is known of its calls, and a line
    says so.
    """
    try:
        trace = trace_model(model, inputs.args, inputs.kwargs, training=False, until=blocks)
    except Exception as error:  # whatever the user's forward raises
        logger.warning_once(
            f"tensor parallelism: the calls of blocks were not seen in evaluation, where "
            f"{type(model).__name__} raised {type(error).__name__}: {error}"
        )
        return {}
    training = inputs.trace.first_calls()
    return {
        name: [Call(*trace.example(call, _placeholder))]
        for name, call in trace.first_calls().items()
        if name in blocks and _form(call, trace) != _form(training[name], inputs.trace)
    }


def _form(call: BlockCall, trace: ModelTrace) -> Any:
    """Return how a block is called: names of arguments, shapes of tensors, plain values."""
    shapes = [
        None if number is None else trace.tensors[number].facts.shape for number in call.given
    ]
    leaves = tree_leaves(
        (call.args, dict(call.kwargs)), is_leaf=lambda leaf: isinstance(leaf, TensorRef)
    )
    plain = [leaf for leaf in leaves if isinstance(leaf, PLAIN)]
    return call.names, shapes, plain


def kind_of(block: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for blocks of one class with parameters of the same shapes."""
    block = uncompiled(block)
    return type(block), tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def uncalled_blocks(trace: ModelTrace, model: nn.Module) -> dict[str, str]:
    """Return the blocks that a trace did not call, each with a called block of the same kind.

    LayerDrop leaves blocks out, others in each forward.
    """
    modules = dict(named_blocks(trace.candidates, model))
    called = {kind_of(modules[name]): name for name in reversed(trace.first_calls())}
    return {
        name: called[kind_of(block)]
        for name, block in modules.items()
        if name not in trace.first_calls() and kind_of(block) in called
    }


def _placeholder(seen: TracedTensor) -> Tensor:
    made = torch.zeros(seen.facts.shape, dtype=seen.facts.dtype, device="cpu")
    return made.requires_grad_(seen.requires_grad)


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
