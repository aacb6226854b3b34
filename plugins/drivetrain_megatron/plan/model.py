"""Divides a whole model over the tensor-parallel axis: its blocks, its vocabulary, its gradients.

Blocks of one kind are divided alike; the first of them is tried. Outside of the blocks, the layer
that makes logits and the embeddings with as many rows are divided by words, also where both share a
weight.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import prod
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.model.modules import NamedModule, named_parameters, uncompiled
from drivetrain.model.trace import ModelTrace
from drivetrain.model.untouched import keep_padding
from drivetrain.parallel.backward import mark_of_strategy
from drivetrain.runtime import rng
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.dropout import DropoutLayout, Layouts, Site, open_attentions
from drivetrain_megatron.plan.derive import (
    Derivation,
    divide_block,
    names_of,
    parent_of,
    shared_with_others,
    structure_of,
)
from drivetrain_megatron.plan.divide import (
    BlockPlan,
    SequenceRegion,
    compute_in_parts,
    cut,
    facts_of,
)
from drivetrain_megatron.plan.named import (
    VOCABULARY,
    WHOLE,
    NamedPlan,
    check_fulfilled,
    models_plan,
    users_plan,
)
from drivetrain_megatron.plan.trial import (
    DTYPES,
    SEED,
    Results,
    Trial,
    TrialForm,
    backward,
    copy_of,
    first_trial,
    floating_in,
    is_close,
    on_meta,
    run_emulated,
    thin_shapes,
)
from drivetrain_megatron.recording.calls import (
    Call,
    Calls,
    ExampleInputs,
    calls_in,
    kind_of,
    other_calls,
    uncalled_blocks,
)
from drivetrain_megatron.tensor.behavior import Uncompiled
from drivetrain_megatron.tensor.linear import (
    attach_column,
    computes_as_linear,
    features_of,
    is_linear,
    is_transposed,
)
from drivetrain_megatron.tensor.operators import Edges, TokenShards
from drivetrain_megatron.tensor.partition import ShardingSpec, even
from drivetrain_megatron.tensor.vocabulary import ShardedLogits, attach_vocabulary, reason_against

# --- the layers outside of blocks that are divided by words: embeddings and heads ---


def words_of(module: nn.Module) -> int:
    """Return how many words an embedding, or a layer that makes logits, is about."""
    return module.num_embeddings if isinstance(module, nn.Embedding) else features_of(module)[1]


def by_words(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters of such a module and their dims that count words."""
    for name, parameter in module.named_parameters(recurse=False):
        yield parameter, 1 if name == "weight" and is_transposed(module) else 0


def find_vocabulary(
    model: nn.Module,
    trace: ModelTrace,
    calls: Calls,
    allowed: Callable[[str], bool],
    *,
    strict: bool,
) -> list[str]:
    """Return the layers outside of blocks that make logits, and the embeddings of the same words.

    A weight that something else uses, too, stays whole. So does an embedding that needs the whole
    weight, unless a strict plan names it: then dividing it is an error.
    """
    inside = tuple(f"{name}." for name, _ in calls.blocks)
    outer = [
        (name, module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside) and any(True for _ in module.parameters(False))
    ]
    embeddings = [(name, m) for name, m in outer if isinstance(m, nn.Embedding)]
    heads = [
        (name, m)
        for name, m in outer
        if is_linear(m) and any(features_of(m)[1] == e.num_embeddings for _, e in embeddings)
        if _ends_in_loss(trace, name)
    ]
    rows = {features_of(module)[1] for _, module in heads}
    found = [*[(n, e) for n, e in embeddings if e.num_embeddings in rows], *heads]
    chosen = [(n, m) for n, m in found if allowed(n) and (strict or _can_be_cut(m))]
    return [name for name, module in chosen if _is_only_used_by(module, model, chosen, calls)]


def _can_be_cut(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return not reason_against(module)
    return not isinstance(module, nn.Linear) or computes_as_linear(module)


def _ends_in_loss(trace: ModelTrace, name: str) -> bool:
    """Return whether neither a block nor a product uses the results of a layer's output.

    A layer in front of them is a projection, even if it has as many features as there are words.
    """
    ends = [call for call in trace.modules if call.name == name]
    follows = {number for call in ends for number in call.outputs}
    first = min((call.operations.stop for call in ends), default=0)
    for operation in trace.operations[first:]:
        if not follows.isdisjoint(operation.inputs):
            if operation.block is not None or operation.work:
                return False
            follows.update(operation.outputs)
    return True


def _is_only_used_by(
    module: nn.Module, model: nn.Module, chosen: Iterable[NamedModule], calls: Calls
) -> bool:
    """Whether a weight is used once by each of its chosen modules, and by nothing else."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    weight = module.weight
    owners = sum(1 for _, m in chosen if m.weight is weight)
    places = sum(1 for m in model.modules() for p in m.parameters(False) if p is weight)
    name = first[id(weight)]
    return owners == places and calls.uses[name] <= owners


# --- the model ---


NO_INPUTS = (
    "nothing in it repeats, and no inputs were found with which it can be called: prepare it "
    "together with its loader, or set model.example_inputs to a small batch, to let its layers be "
    "divided"
)


@dataclass(slots=True)
class ModelPlan:
    """How a model is divided.

    Attributes:
        blocks: the outcome for each block, by its name; "" is the model itself, if nothing repeats.
        vocabulary: names of the embeddings and linear layers that are divided by words.
        layouts: how the inputs of dropouts in blocks are divided.
        sharded: whether activations between the groups of layers are shards of the sequence.
        note: what a trial of the whole model refused, and why; "" if it refused nothing.
    """

    blocks: dict[str, Derivation] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=list)
    layouts: Layouts = field(default_factory=Layouts)
    sharded: bool = False
    note: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is divided, neither layers nor activations."""
        blocks = self.blocks.values()
        return not (self.vocabulary or self.sharded) and all(block.is_whole for block in blocks)


@dataclass(eq=False)
class TensorParallel:
    """The tensor-parallel side of one model.

    Attributes:
        ranks: the axis ``tp``.
        tokens: how activations between the groups of layers are shards; None: they are whole.
        named: the plan that says which layers may be divided; None for all that the structure
            allows.
        strict: whether a layer of that plan that cannot be divided is an error.
    """

    ranks: Communicator
    tokens: TokenShards | None
    named: NamedPlan | None = None
    strict: bool = False
    _blocks: list[NamedModule] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)
    _model: nn.Module | None = None
    _uncompiled: Uncompiled = field(default_factory=Uncompiled)

    @classmethod
    def of(cls, config: MegatronConfig, model: nn.Module, ranks: Communicator) -> "TensorParallel":
        """Return the side of a model with the user's plan, or else with the model's own.

        Raises:
            ConfigError: the user's plan has an unknown style, or a pattern that matches nothing.
        """
        own = users_plan(model, config.plan) if config.plan else None
        tokens = TokenShards() if config.sequence_parallel else None
        return cls(ranks, tokens, own or models_plan(model), strict=own is not None)

    def plan(self, model: nn.Module, inputs: ExampleInputs | None) -> ModelPlan:
        """Return how a model, also on the meta device, is divided: without inputs not at all.

        Raises:
            ConfigError: a layer cannot be divided as a plan says, or sequence parallelism is asked
                for and a repeated block cannot work on shards.
        """
        model = uncompiled(model)
        if inputs is None:
            return ModelPlan({"": Derivation(untried=NO_INPUTS)})
        calls = calls_in(inputs.trace, model)
        if calls.blocks:
            plan = self._of_blocks(model, inputs, calls)
        else:
            plan = self._of_whole(model, inputs)
        allowed = self._words(plan)
        plan.vocabulary = find_vocabulary(model, inputs.trace, calls, allowed, strict=self.strict)
        if self.named is not None and self.strict:
            check_fulfilled(model, self.named, plan.vocabulary, plan.blocks)
        return plan

    def divide(self, model: nn.Module, plan: ModelPlan) -> dict[str, ShardingSpec]:
        """Cut a model's parameters to this rank's share and let its layers compute in parts.

        Returns:
            The facts of every parameter, by its name.
        """
        facts = self.facts(model, plan)
        edges = Edges(self.ranks, self.tokens if plan.sharded else None)
        outside, size = Edges(self.ranks), self.ranks.size
        layers = [model.get_submodule(name) for name in plan.vocabulary]
        words = [words_of(layer) for layer in layers]  # while tied weights are whole
        for name, parameter in named_parameters(model).items():
            if (partition := facts[name].partition) is not None:
                cut(parameter, partition, self.ranks.rank)
        blocks = [(name, model.get_submodule(name)) for name in plan.blocks]
        for (_, block), derivation in zip(blocks, plan.blocks.values(), strict=True):
            compute_in_parts(uncompiled(block), derivation.plan, edges)
        for layer, rows in zip(layers, words, strict=True):
            if isinstance(layer, nn.Embedding):
                attach_vocabulary(layer, outside, even(0, rows, size))
            else:
                attach_column(layer, outside, even(-1, rows, size), logits=True)
        keep_padding(model)
        open_attentions(model, self.ranks)
        self._uncompiled.set(model)
        self._blocks = blocks if plan.sharded else []
        self._model = model if any(known.partition for known in facts.values()) else None
        return facts

    def facts(self, model: nn.Module, plan: ModelPlan) -> dict[str, ShardingSpec]:
        """Return the facts that ``divide`` returns; the model is whole and stays so."""
        names = {parameter: name for name, parameter in named_parameters(model).items()}
        facts = {name: ShardingSpec(tuple(p.shape)) for p, name in names.items()}
        for name, derivation in plan.blocks.items():
            block = uncompiled(model.get_submodule(name))
            found = facts_of(block, derivation.plan, self.ranks.size)
            facts.update({names[p]: found[n] for n, p in block.named_parameters()})
        for name in plan.vocabulary:
            for parameter, dim in by_words(model.get_submodule(name)):
                known = facts[names[parameter]]
                partition = even(dim, known.shape[dim], self.ranks.size)
                facts[names[parameter]] = replace(known, partition=partition)
        return facts

    def surround(self) -> None:
        """Cut the activation that enters the first block, and join the last block's output.

        After the model was cut into stages: every stage must know how many tokens there are.
        """
        if self.tokens is None or not self._blocks:
            return
        region = SequenceRegion(self.ranks, self.tokens)
        first, last = self._blocks[0][1], self._blocks[-1][1]
        self._handles.append(first.register_forward_pre_hook(region.enter, with_kwargs=True))
        self._handles.append(last.register_forward_hook(region.leave))

    def sum_partial(self, model: nn.Module, facts: Mapping[str, ShardingSpec]) -> None:
        """Sum the gradients of which each rank has a part, before anybody else sees them."""
        for name, parameter in named_parameters(model).items():
            if name in facts and facts[name].is_summed:
                trained = parameter.requires_grad
                parameter.requires_grad_()  # a hook waits for the day when a frozen one is trained
                hooked: Any = parameter
                earlier = dict(hooked._backward_hooks or {})
                self._handles.append(hooked.register_hook(self._hook(facts[name])))
                for number, hook in earlier.items():  # a script's: behind the sum
                    del hooked._backward_hooks[number]
                    hooked._backward_hooks[number] = hook
                parameter.requires_grad_(trained)

    def close(self) -> None:
        """Take the hooks off; a model that is divided cannot be called any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._uncompiled.undo()
        if self._model is not None:
            self._model.register_forward_pre_hook(_refuse, prepend=True)

    def _hook(self, facts: ShardingSpec) -> Callable[[Tensor | None], Tensor | None]:
        """Return the hook that makes a gradient whole, unless it comes at another time."""
        partition, rank = facts.partition, self.ranks.rank

        def sum_up(gradient: Tensor | None) -> Tensor | None:
            if gradient is None or facts.partial or partition is None:
                return None if gradient is None else self._sum(gradient)
            # Several ranks hold the same heads: their parts meet in the whole gradient.
            whole = gradient.new_zeros(facts.shape)
            partition.put(whole, gradient, rank)
            return partition.take(self._sum(whole), rank)

        mark_of_strategy(sum_up)
        return sum_up

    def _sum(self, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        self.ranks.all_reduce(total, label="gradients of replicated parameters").wait()
        return total

    def _of_blocks(self, model: nn.Module, inputs: ExampleInputs, calls: Calls) -> ModelPlan:
        """Return how repeated blocks are divided: those of one kind alike, as the first of them.

        Blocks that are called in another way in evaluation have such a call, too.
        """
        trace = inputs.trace
        names = names_of(model)
        keys = {name: self._key(names, name, each) for name, each in calls.blocks}
        first = {key: name for name, key in reversed(keys.items())}
        evaluated = other_calls(model, inputs, [*first.values()])
        known: dict[Any, tuple[Derivation, Mapping[Site, DropoutLayout]]] = {}
        plan = ModelPlan(sharded=self.tokens is not None)
        shown, ranks = trace.first_calls(), self.ranks.size

        def add(name: str, key: Any) -> None:
            plan.blocks[name], found = known[key]
            if plan.sharded or not plan.blocks[name].is_whole:
                plan.layouts.add(name, found)

        for name, each in calls.blocks:
            layers, key = self._layers_of(name), keys[name]
            if key not in known:
                block = uncompiled(each)
                found_in = structure_of(trace, model, block, shown[name].operations)
                called = [calls.arguments[name], *evaluated.get(name, ())]
                known[key] = divide_block(
                    block, called, found_in, layers, self.tokens, ranks, alone=not self.strict
                )
            add(name, key)
        for name in () if plan.sharded else uncalled_blocks(trace, model):
            if (key := self._key(names, name, model.get_submodule(name))) in known:
                add(name, key)
        _check(plan)
        return plan

    def _key(self, names: Counter[int], name: str, block: nn.Module) -> tuple[Any, ...]:
        """Return a key that is equal for blocks that are divided alike."""
        layers = self._layers_of(name)
        named = None if layers is None else frozenset(layers)
        return kind_of(block), named, shared_with_others(names, uncompiled(block))

    def _of_whole(self, model: nn.Module, inputs: ExampleInputs) -> ModelPlan:
        """Return how a model is divided in which nothing repeats: as one block, if that works.

        Sequence parallelism is about activations between groups of layers: without them, or where
        no activation comes in, there is nothing to cut into shards.
        """
        layers, called = self._layers_of(""), [Call(inputs.args, inputs.kwargs)]
        operations = range(len(inputs.trace.operations))
        structure = structure_of(inputs.trace, model, model, operations)
        for tokens in dict.fromkeys((self.tokens, None)):
            found, layouts = divide_block(model, called, structure, layers, tokens, self.ranks.size)
            if not found.is_whole:
                plan = ModelPlan({"": found}, sharded=tokens is not None)
                plan.layouts.add("", layouts)
                return plan
        return ModelPlan({"": replace(found, plan=BlockPlan(), broken="")})

    def _layers_of(self, block: str) -> set[str] | None:
        """Return the names, inside of a block, of the layers that the plan lets divide."""
        if self.named is None:
            return None
        return self.named.allowed_in(block, strict=self.strict)

    def _words(self, plan: ModelPlan) -> Callable[[str], bool]:
        """Return whether the named plan lets a layer be divided by words, and no group has it."""
        whole = plan.blocks[""].plan if "" in plan.blocks else BlockPlan()
        taken = {name for group in whole.groups for name in (*group.columns, group.row)}
        if self.named is None:
            return lambda name: name not in taken
        if self.strict:
            return (self.named.named(VOCABULARY) - taken).__contains__
        taken |= self.named.named(WHOLE)
        return lambda name: name not in taken


def _check(plan: ModelPlan) -> None:
    """Refuse shards where a block needs all tokens.

    Raises:
        ConfigError: names the block.
    """
    for name, derivation in plan.blocks.items():
        if derivation.broken:
            refused = "; ".join(f"{k}: {v}" for k, v in derivation.refused.items())
            raise ConfigError(
                f"sequence_parallel: expected blocks of which every layer that mixes tokens "
                f"can be divided, found {name or 'the model'!r}, which gives other numbers on "
                f"shards of the sequence ({derivation.broken}; {refused}); set "
                "sequence_parallel: false"
            )


def _refuse(module: nn.Module, args: Any) -> None:
    """Be the forward pre-hook of a model whose ranks do not work together any more.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"expected {type(module).__name__} not to be called after free_memory(), found a forward: "
        "this rank holds a share of its parameters; before that, save_model() or get_state_dict() "
        "give whole ones for a new model"
    )


# --- a few lines that say how a model was divided, which layers stayed whole, and why ---


SHOWN = 3
"""How many of the parameters that stay whole are named, the largest."""


ALL_WHOLE = (
    ": all of them do the same work on the same samples; set tp to 1, and the ranks share the "
    "samples instead"
)
"""Words where nothing is divided: they make the line a warning."""


def describe(
    plan: ModelPlan, facts: Mapping[str, ShardingSpec], nbytes: Mapping[str, int], ranks: int
) -> Iterator[str]:
    """Yield lines for the user, who sees bytes of whole parameters and their facts, by name."""
    whole = [name for name, known in facts.items() if known.partition is None]
    total, kept = sum(nbytes.values()), sum(nbytes[name] for name in whole)
    idle = len(whole) == len(facts) and not plan.sharded
    yield (
        f"tensor parallel over {ranks} ranks: {len(facts) - len(whole)} of {len(facts)} parameters "
        f"divided, {kept / max(total, 1):.1%} of the bytes stay whole on each rank"
        f"{ALL_WHOLE if idle else ''}"
    )
    kinds: dict[int, tuple[Derivation, list[str]]] = {}
    for name, derivation in plan.blocks.items():
        kinds.setdefault(id(derivation), (derivation, []))[1].append(name)
    for derivation, names in kinds.values():
        rest = "whole, but for its words" if names == [""] and plan.vocabulary else "whole"
        yield f"{_span(names)}: {_groups(derivation) or rest}"
        if derivation.untried:
            yield f"{_span(names)} stays whole: {_shortened(derivation.untried)}"
        for row, reason in derivation.refused.items():
            if f"{names[0]}.{row}".strip(".") not in plan.vocabulary:
                yield f"{_span(names)}: {row} stays whole: {_shortened(reason)}"
    yield from _uneven(facts, ranks)
    if kept:
        largest = sorted(whole, key=lambda name: -nbytes[name])[:SHOWN]
        rest = f" and {len(whole) - SHOWN} more" if len(whole) > SHOWN else ""
        named = ", ".join(f"{name} ({nbytes[name]:,} bytes)" for name in largest)
        yield f"whole on each rank: {named}{rest}"
    if plan.note:
        yield _shortened(plan.note)
    if plan.vocabulary:
        yield f"by words: {', '.join(plan.vocabulary)}"


def tell(described: Iterable[str]) -> None:
    """Log how a model was divided: the first line is for everybody, the reasons are on INFO."""
    first, *reasons = described
    (logger.warning if first.endswith(ALL_WHOLE) else logger.announce)(first)
    for line in reasons:
        logger.info(line)


def _shortened(reason: str) -> str:
    return shorten(reason, 300, placeholder=" ...")


def _uneven(facts: Mapping[str, ShardingSpec], ranks: int) -> Iterator[str]:
    """Yield a line about parameters of which some ranks hold more than others, if there are."""
    found = {
        name: known.partition
        for name, known in facts.items()
        if known.partition is not None and len(set(known.partition.local_sizes)) > 1
    }
    if found:
        name, partition = next(iter(found.items()))
        sizes = ", ".join(map(str, partition.local_sizes))
        yield (
            f"not even over {ranks} ranks: {len(found)} parameters, such as {name}, of whose "
            f"{partition.size} indices of dim {partition.dim} ranks hold {sizes}"
        )


def _groups(derivation: Derivation) -> str:
    groups = [f"{', '.join(group.columns)} -> {group.row}" for group in derivation.plan.groups]
    for region in derivation.plan.regions:
        columns = [name for name in region.weights if name != region.row]
        groups.append(f"{', '.join(columns)} -> {region.row}")
    if derivation.plan.alone:
        groups.append(f"by itself {', '.join(each.layer for each in derivation.plan.alone)}")
    return "; ".join([*groups, *(f"heads of {name}" for name in derivation.plan.attentions)])


def _span(names: list[str]) -> str:
    named = [name or "the model" for name in names]
    return named[0] if len(named) == 1 else f"{len(named)} blocks {named[0]} to {named[-1]}"


# --- the trial of the whole model: ranks that are threads must have the numbers of one process ---

# Blocks have been tried one by one (``trial``). The code around them may still read a weight of
# which a rank has a share, or something that a block keeps. So all outputs, and the gradients of
# all parameters as optimizers would see them, are compared once more.
#
# Large matrices are thin (``random_copy``); from long lists of alike blocks the first ones are
# taken.


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
        attempts = _attempts(uncompiled(model), inputs.trace, plan.blocks, config.tp)
        first = next(attempts, None)
        if first is None:
            logger.debug("the model is too large to be tried whole: its blocks have been tried")
            return plan
        trial = first_trial(chain([first], attempts), Call(inputs.args, inputs.kwargs), _finite_run)
    except Exception as error:  # whatever the user's code raises
        return _as_blocks_say(plan, f"{type(error).__name__}: {error}", config)
    if not trial.trains:
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


def _rest_of(plan: ModelPlan, trial: Trial, reason: str, ranks: int) -> ModelPlan:
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


def difference(trial: Trial, plan: ModelPlan, ranks: int) -> str:
    """Return how the numbers of ranks under a plan differ from one process; "" if they do not."""
    blocks = {name: each for name, each in plan.blocks.items() if name not in trial.missing}
    expected = trial.results

    def one_rank(communicator: Communicator) -> tuple[Results, Mapping[str, ShardingSpec]]:
        mine = copy_of(trial.module)
        side = TensorParallel(communicator, TokenShards() if plan.sharded else None)
        facts = side.divide(mine, replace(plan, blocks=blocks))
        side.surround()
        side.sum_partial(mine, facts)
        return _run(mine, trial.call, expected.outputs), facts

    try:
        with rng.fork(SEED), torch.set_grad_enabled(trial.trains):
            found = run_emulated(ranks, one_rank)
            seen = found[0][0].outputs
            if any(_ranks_own(seen, expected.outputs)):
                expected = _run(copy_of(trial.module), trial.call, seen)
    except Exception as error:  # whatever the user's code says to sizes that it does not expect
        return f"{type(error).__name__}: {error}"
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
    found = floating_in(model(*args, **kwargs))
    outputs = [x.gathered() if isinstance(x, ShardedLogits) else x for x in found]
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


def _finite_run(model: nn.Module, call: Call) -> Results:
    """Run, and refuse results with which nothing can be compared."""
    results = _run(model, call)
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
    noise = expected.noise()
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


def _attempts(
    model: nn.Module, trace: ModelTrace, blocks: Mapping[str, Derivation], ranks: int
) -> Iterator[TrialForm]:
    """Yield trials of copies of a model without values: all blocks, or those that are enough."""
    rows = {
        f"{name}.{group.row}".lstrip(".")
        for name, derivation in blocks.items()
        for group in derivation.plan.groups
    }
    outlines: dict[Collection[str], nn.Module] = {}
    choices = dict.fromkeys((frozenset[str](), _later(blocks)))
    for trains, dtype, missing in product((True, False), DTYPES, choices):
        if missing not in outlines:
            outlines[missing] = _outline(model, missing)
        outline = outlines[missing]
        for thin in (rows, None):
            weights = sum(prod(shape) for shape in thin_shapes(outline, thin).values())
            if _bytes(weights, trace, missing, ranks) <= MOST_BYTES:
                yield TrialForm(outline, thin, dtype, trains, missing)


def _bytes(weights: int, trace: ModelTrace, missing: Collection[str], ranks: int) -> int:
    """Return about how many bytes a trial with so many weights takes, in fp64."""
    calls = trace.blocks
    written = sum(
        each.written
        for each in trace.operations
        if each.block is None or calls[each.block].name not in missing
    )
    size = torch.float64.itemsize
    return 2 * size * weights * (1 + ranks) + 2 * written


def _later(blocks: Mapping[str, Derivation]) -> frozenset[str]:
    """Return the blocks at the ends of lists, behind enough blocks of each kind."""
    kinds = Counter((parent_of(name), id(derivation)) for name, derivation in blocks.items())
    wanted = {kind: min(count, _OF_A_KIND) for kind, count in kinds.items()}
    later = set()
    for name, derivation in blocks.items():
        around = parent_of(name)
        if any(count > 0 for (place, _), count in wanted.items() if place == around):
            wanted[around, id(derivation)] -= 1
        else:
            later.add(name)
    return frozenset(later)


def _outline(model: nn.Module, missing: Collection[str]) -> nn.Module:
    """Return a copy without values, uncompiled, that lacks these blocks."""
    outline = copy_of(model, on_meta(model))
    for module in outline.modules():
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        module._modules.update((name, uncompiled(child)) for name, child in children)
    for name in missing:
        del outline.get_submodule(parent_of(name))._modules[name.rpartition(".")[2]]
    keep_padding(outline)
    return outline
