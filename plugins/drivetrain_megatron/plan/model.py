"""Divides a whole model over the tensor-parallel axis: its blocks, its vocabulary, its gradients.

Blocks of one kind are divided alike; the first of them is tried. Outside of the blocks, the layer
that makes logits and the embeddings with as many rows are divided by words, also where both share a
weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError, UsageError
from drivetrain.model.look import Look
from drivetrain.parts.blocks import NamedModule
from drivetrain.parts.naming import named_parameters, uncompiled
from drivetrain.parts.rounds import mark_of_strategy
from drivetrain_megatron.cell import ParameterFacts
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.dropout import DropoutLayout, Layouts, Site, open_attentions
from drivetrain_megatron.plan.derive import (
    Derivation,
    shared_with_others,
    structure_of,
)
from drivetrain_megatron.plan.divide import BlockPlan, SequenceRegion, cut, divide, facts_of
from drivetrain_megatron.plan.named import (
    VOCABULARY,
    WHOLE,
    NamedPlan,
    check_fulfilled,
    models_plan,
    users_plan,
)
from drivetrain_megatron.plan.tried_block import divide_block
from drivetrain_megatron.plan.vocabulary import by_words, find_vocabulary, words_of
from drivetrain_megatron.recording.calls import (
    Call,
    Calls,
    ExampleInputs,
    calls_in,
    kind_of,
    other_calls,
    uncalled_blocks,
)
from drivetrain_megatron.tensor.attention import keep_padded
from drivetrain_megatron.tensor.behavior import Uncompiled
from drivetrain_megatron.tensor.linear import attach_column
from drivetrain_megatron.tensor.operators import Edges, TokenShards
from drivetrain_megatron.tensor.partition import even
from drivetrain_megatron.tensor.vocabulary import attach_vocabulary

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


class TensorParallel:
    """The tensor-parallel side of one model.

    Args:
        ranks: the axis ``tp``.
        sequence_parallel: whether activations between the groups of layers are shards.
        named: the plan that says which layers may be divided; None for all that the structure
            allows.
        strict: whether a layer of that plan that cannot be divided is an error.
    """

    def __init__(
        self,
        ranks: Communicator,
        *,
        sequence_parallel: bool,
        named: NamedPlan | None,
        strict: bool,
    ) -> None:
        self._ranks = ranks
        self._tokens = TokenShards() if sequence_parallel else None
        self._named = named
        self._strict = strict
        self._blocks: list[NamedModule] = []
        self._handles: list[RemovableHandle] = []
        self._model: nn.Module | None = None
        self._uncompiled = Uncompiled()

    @classmethod
    def of(cls, config: MegatronConfig, model: nn.Module, ranks: Communicator) -> "TensorParallel":
        """Return the side of a model with the user's plan, or else with the model's own.

        Raises:
            ConfigError: the user's plan has an unknown style, or a pattern that matches nothing.
        """
        own = users_plan(model, config.plan) if config.plan else None
        named, strict = own or models_plan(model), own is not None
        return cls(ranks, sequence_parallel=config.sequence_parallel, named=named, strict=strict)

    def plan(self, model: nn.Module, inputs: ExampleInputs | None) -> ModelPlan:
        """Return how a model, also on the meta device, is divided: without inputs not at all.

        Raises:
            ConfigError: a layer cannot be divided as a plan says, or sequence parallelism is asked
                for and a repeated block cannot work on shards.
        """
        model = uncompiled(model)
        if inputs is None:
            return ModelPlan({"": Derivation(untried=NO_INPUTS)})
        calls = calls_in(inputs.look, model)
        if calls.blocks:
            plan = self._of_blocks(model, inputs.look, calls, other_calls(model, inputs))
        else:
            plan = self._of_whole(model, inputs)
        allowed = self._words(plan)
        plan.vocabulary = find_vocabulary(model, inputs.look, calls, allowed, strict=self._strict)
        if self._named is not None and self._strict:
            check_fulfilled(model, self._named, plan.vocabulary, plan.blocks)
        return plan

    def divide(self, model: nn.Module, plan: ModelPlan) -> dict[str, ParameterFacts]:
        """Cut a model's parameters to this rank's share and let its layers compute in parts.

        Returns:
            The facts of every parameter, by its name.
        """
        facts = self.facts(model, plan)
        edges = Edges(self._ranks, self._tokens if plan.sharded else None)
        blocks: list[NamedModule] = []
        for name, derivation in plan.blocks.items():
            block = model.get_submodule(name)
            blocks.append((name, block))
            divide(uncompiled(block), derivation.plan, edges)
        outside = Edges(self._ranks)
        done: set[int] = set()
        layers = [model.get_submodule(name) for name in plan.vocabulary]
        words = [words_of(layer) for layer in layers]  # while tied weights are whole
        for layer, count in zip(layers, words, strict=True):
            self._divide_vocabulary(layer, count, outside, done)
        keep_padded(model)
        open_attentions(model, self._ranks)
        self._uncompiled.set(model)
        self._blocks = blocks if plan.sharded else []
        self._model = model if any(known.partition for known in facts.values()) else None
        return facts

    def facts(self, model: nn.Module, plan: ModelPlan) -> dict[str, ParameterFacts]:
        """Return the facts that ``divide`` returns; the model is whole and stays so."""
        names = {parameter: name for name, parameter in named_parameters(model).items()}
        facts = {name: ParameterFacts(tuple(p.shape)) for p, name in names.items()}
        for name, derivation in plan.blocks.items():
            block = uncompiled(model.get_submodule(name))
            found = facts_of(block, derivation.plan, self._ranks.size)
            facts.update({names[p]: found[n] for n, p in block.named_parameters()})
        for name in plan.vocabulary:
            for parameter, dim in by_words(model.get_submodule(name)):
                known = facts[names[parameter]]
                partition = even(dim, known.shape[dim], self._ranks.size)
                facts[names[parameter]] = replace(known, partition=partition)
        return facts

    def surround(self) -> None:
        """Cut the activation that enters the first block, and join the last block's output.

        After the model was cut into stages: every stage must know how many tokens there are.
        """
        if self._tokens is None or not self._blocks:
            return
        region = SequenceRegion(self._ranks, self._tokens)
        first, last = self._blocks[0][1], self._blocks[-1][1]
        self._handles.append(first.register_forward_pre_hook(region.enter, with_kwargs=True))
        self._handles.append(last.register_forward_hook(region.leave))

    def sum_partial(self, model: nn.Module, facts: Mapping[str, ParameterFacts]) -> None:
        """Sum the gradients of which each rank has a part, before anybody else sees them."""
        for name, parameter in named_parameters(model).items():
            summed = self._summed(facts[name]) if name in facts else None
            if summed is not None:
                trained = parameter.requires_grad
                parameter.requires_grad_()  # a hook waits for the day when a frozen one is trained
                hooked: Any = parameter
                earlier = dict(hooked._backward_hooks or {})
                sum_up = _if_given(summed)
                mark_of_strategy(sum_up)
                self._handles.append(hooked.register_hook(sum_up))
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

    def _summed(self, facts: ParameterFacts) -> Callable[[Tensor], Tensor] | None:
        """Return the sum that makes a parameter's gradient whole; None for a whole gradient."""
        if facts.partial:
            return self._sum
        partition = facts.partition
        if partition is None or len(set(partition.ranges)) == len(partition.ranges):
            return None
        rank = self._ranks.rank

        def over_copies(gradient: Tensor) -> Tensor:
            # Several ranks hold the same heads: their parts meet in the whole gradient.
            whole = gradient.new_zeros(facts.shape)
            partition.put(whole, gradient, rank)
            return partition.take(self._sum(whole), rank)

        return over_copies

    def _sum(self, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        self._ranks.all_reduce(total, label="gradients of replicated parameters").wait()
        return total

    def _of_blocks(
        self, model: nn.Module, look: Look, calls: Calls, evaluated: Mapping[str, Sequence[Call]]
    ) -> ModelPlan:
        """Return how repeated blocks are divided: those of one kind alike.

        Blocks that are called in another way in evaluation have such a call, too.
        """
        known: dict[Any, tuple[Derivation, Mapping[Site, DropoutLayout]]] = {}
        plan = ModelPlan(sharded=self._tokens is not None)
        shown, ranks = look.first_calls(), self._ranks.size

        def add(name: str, key: Any) -> None:
            plan.blocks[name], found = known[key]
            if plan.sharded or not plan.blocks[name].is_whole:
                plan.layouts.add(name, found)

        for name, each in calls.blocks:
            layers, key = self._layers_of(name), self._key(model, name, each)
            if key not in known:
                block = uncompiled(each)
                found_in = structure_of(look, model, block, shown[name].operations)
                called = [calls.arguments[name], *evaluated.get(name, ())]
                known[key] = divide_block(
                    block, called, found_in, layers, self._tokens, ranks, alone=not self._strict
                )
            add(name, key)
        for name in () if plan.sharded else uncalled_blocks(look, model):
            if (key := self._key(model, name, model.get_submodule(name))) in known:
                add(name, key)
        _check(plan)
        return plan

    def _key(self, model: nn.Module, name: str, block: nn.Module) -> tuple[Any, ...]:
        """Return a key that is equal for blocks that are divided alike."""
        layers = self._layers_of(name)
        named = None if layers is None else frozenset(layers)
        return kind_of(block), named, shared_with_others(model, uncompiled(block))

    def _of_whole(self, model: nn.Module, inputs: ExampleInputs) -> ModelPlan:
        """Return how a model is divided in which nothing repeats: as one block, if that works.

        Sequence parallelism is about activations between groups of layers: without them, or where
        no activation comes in, there is nothing to cut into shards.
        """
        layers, called = self._layers_of(""), [Call(inputs.args, inputs.kwargs)]
        operations = range(len(inputs.look.operations))
        structure = structure_of(inputs.look, model, model, operations)
        for tokens in dict.fromkeys((self._tokens, None)):
            found, layouts = divide_block(
                model, called, structure, layers, tokens, self._ranks.size
            )
            if not found.is_whole:
                plan = ModelPlan({"": found}, sharded=tokens is not None)
                plan.layouts.add("", layouts)
                return plan
        return ModelPlan({"": replace(found, plan=BlockPlan(), broken="")})

    def _layers_of(self, block: str) -> set[str] | None:
        """Return the names, inside of a block, of the layers that the plan lets divide."""
        if self._named is None:
            return None
        return self._named.allowed_in(block, strict=self._strict)

    def _words(self, plan: ModelPlan) -> Callable[[str], bool]:
        """Return whether the named plan lets a layer be divided by words, and no group has it."""
        whole = plan.blocks[""].plan if "" in plan.blocks else BlockPlan()
        taken = {name for group in whole.groups for name in (*group.columns, group.row)}
        if self._named is None:
            return lambda name: name not in taken
        if self._strict:
            return (self._named.named(VOCABULARY) - taken).__contains__
        taken |= self._named.named(WHOLE)
        return lambda name: name not in taken

    def _divide_vocabulary(
        self, module: nn.Module, rows: int, edges: Edges, done: set[int]
    ) -> None:
        for parameter, dim in by_words(module):
            if id(parameter) not in done:  # not tied to one that is cut
                done.add(id(parameter))
                cut(parameter, even(dim, rows, self._ranks.size), self._ranks.rank)
        if isinstance(module, nn.Embedding):
            attach_vocabulary(module, edges, even(0, rows, self._ranks.size))
        else:
            attach_column(module, edges, even(-1, rows, self._ranks.size), logits=True)


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


def _if_given(
    function: Callable[[Tensor], Tensor],
) -> Callable[[Tensor | None], Tensor | None]:
    """Return a hook that leaves a parameter alone whose gradient comes at another time."""
    return lambda gradient: None if gradient is None else function(gradient)
