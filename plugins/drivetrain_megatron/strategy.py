"""The strategy ``megatron``: a cell of tensor- and pipeline-parallel ranks holds one replica.

The cell's parameters, the rest of the user's model on this rank, are handed to a data-parallel
strategy, which does not know them as parts.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from drivetrain.collectives import connect
from drivetrain.collectives.facts import differing, gather_facts
from drivetrain.compression.methods import LinkMethods
from drivetrain.cost import Cost, ModelSpec
from drivetrain.data.examples import ExampleBatch
from drivetrain.errors import RankMismatchError
from drivetrain.log import get_logger
from drivetrain.model.deferred import meta_tensors
from drivetrain.model.guard import Elsewhere
from drivetrain.model.modules import (
    held_parameters,
    named_parameters,
    persistent_buffers,
    repeated_blocks,
    uncompiled,
)
from drivetrain.model.untouched import PLANNING, untouched
from drivetrain.parallel.backward import clip_, combine_norms
from drivetrain.parallel.replicated import replicate
from drivetrain.saved_state import StateAround, left_inside
from drivetrain.shards import (
    HeldPart,
    Reader,
    Shard,
    TensorFacts,
    WeightSource,
    parameters_among,
    state_tensors,
)
from drivetrain.strategy import (
    Gradients,
    Joinable,
    Only,
    Pace,
    Planning,
    Prepared,
    Run,
    StrategyAround,
)
from drivetrain_megatron.config import MegatronConfig, MegatronOutline
from drivetrain_megatron.cost import estimate
from drivetrain_megatron.dropout import AlikeDraws, Dropout
from drivetrain_megatron.pipeline.build import PipelineBuilder, PipelinedModel
from drivetrain_megatron.plan.model import ModelPlan, TensorParallel, confirmed, describe, tell
from drivetrain_megatron.recording.calls import batches_for, inputs_for
from drivetrain_megatron.shares import Shares, on_share, on_shares
from drivetrain_megatron.state import (
    LocalReader,
    Original,
    SameBatch,
    SharedSource,
    WholeState,
    advice,
    computing_in_copies,
    data_parallel,
    global_shards,
    joined,
    refusing_forwards,
    shows_whole,
)
from drivetrain_megatron.step import CellPlanning
from drivetrain_megatron.tensor.behavior import KEPT, Own, attach, behavior_of, detach
from drivetrain_megatron.tensor.partition import ShardingSpec, alike

# --- the plan of each rank, by itself; they go on only if all ranks have made the same plan ---


LayerPlan: TypeAlias = tuple[TensorParallel | None, ModelPlan | None]
"""How layers are divided; nothing on one rank of the axis ``tp``."""

_SHOWN = 500
"""Characters of a rank's reasons in a message."""


class ComparedPlan(NamedTuple):
    """The description of a plan for other ranks.

    Attributes:
        facts: lines that must be equal on all ranks.
        reasons: lines that say why the plan is as it is.
    """

    facts: Sequence[str]
    reasons: Sequence[str]


def _message(plans: Sequence[ComparedPlan]) -> str:
    """Return the first difference between two ranks, and the reasons that differ."""
    first = plans[0]
    rank, other = next((r, plan) for r, plan in enumerate(plans) if plan.facts != first.facts)
    mine, theirs = (
        "; ".join(line for line in one.reasons if line not in two.reasons)[:_SHOWN]
        for one, two in ((first, other), (other, first))
    )
    return (
        "expected every rank to divide the model in the same way, found that rank 0 has "
        f"{_unlike(first, other)} ({mine}), and rank {rank} {_unlike(other, first)} ({theirs}): "
        "each rank finds its plan by running the model's code. Let this code do the same on all "
        "ranks (no choice by rank or environment), or give the rank what it lacks, such as memory"
    )


def _unlike(one: ComparedPlan, other: ComparedPlan) -> str:
    return next((line for line in one.facts if line not in other.facts), "nothing more")


# --- the contract ---


logger = get_logger(__name__)


class CellGradients(Gradients):
    """The gradients of this rank's shares, and of the parameters that every rank has.

    Args:
        cell: its strategy, once the strategy inside is prepared.
    """

    def __init__(self, cell: "Megatron") -> None:
        self._cell, self.inner, self._shares = cell, cell._inner.gradients, cell._shares

    scale = on_shares(left_inside(Gradients.scale))
    will_scale = left_inside(Gradients.will_scale)
    step_decided = left_inside(Gradients.step_decided)

    def __call__(self, only: Only = None) -> Iterator[Tensor]:
        """Yield the pieces of gradient that this rank's optimizers read."""
        here = None if only is None else [p for p in only if not isinstance(p, Elsewhere)]
        with self._shares.open():
            return iter(list(self.inner(here)))

    @on_shares
    def clip(self, max_norm: float, norm_type: float = 2.0, *, only: Only = None) -> Tensor:
        """Scale gradients to a global norm of at most max_norm; replicated gradients count once."""
        cell, names = self._cell, self._cell._original.names
        chosen = named_parameters(cell._model).values() if only is None else only
        here = [p for p in chosen if not isinstance(p, Elsewhere)]
        counted = [p for p in here if cell._facts[names[p]].saves(cell._tp.rank)]
        mine = self.inner.clip(float("inf"), norm_type, only=counted)
        norm = combine_norms(mine, norm_type, (cell._tp, cell._pp))
        clip_(list(self(only)), norm, max_norm)
        return norm


class CellState(StateAround):
    """The state of a cell in coordinates of the whole model; tensors of optimizers are shares.

    Args:
        cell: its strategy, once the strategy inside is prepared.
    """

    def __init__(self, cell: "Megatron") -> None:
        super().__init__(cell._inner.state)
        self.divided = self.divided or not cell.is_one_rank
        self._cell, self._model, self._original = cell, cell._model, cell._original
        self._shares, self._facts, self._whole = cell._shares, cell._facts, cell._whole
        self._builder, self._tp, self._pp = cell._builder, cell._tp, cell._pp

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this rank saves, in coordinates of the whole model."""
        copies = self._builder.copied_buffers if self._builder is not None else ()
        with self._shares.open():
            for shard in self._in_model(self.inner.shards()):
                if shard.name not in copies:
                    yield shard

    def progress(self) -> Mapping[str, int]:
        """Return how many forwards have drawn dropout masks."""
        return {**super().progress(), "dropout_forwards": self._cell._dropout.forwards}

    def resume(self, progress: Mapping[str, int]) -> None:
        """Let the next forward draw the masks of the saved run's next forward."""
        self._cell._dropout.forwards = progress.get(
            "dropout_forwards", self._cell._dropout.forwards
        )
        super().resume(progress)

    def facts(self, module: nn.Module) -> Sequence[TensorFacts]:
        """Return the facts of the whole model's state dict, the same on every rank."""
        if self._builder is None:  # every rank has all, whatever the script calls it by now
            found = super().facts(module)
        else:
            places = self._whole.places(module).values()
            found = [replace(place.facts, where=f"stage {place.rank}") for place in places]
        return [self._with_division(fact) for fact in found]

    def _with_division(self, fact: TensorFacts) -> TensorFacts:
        """Return the facts of a tensor, and whether the ranks of tp divide it."""
        known = self._facts.get(fact.name)
        if known is None or known.partition is None:
            return fact
        return replace(fact, where=", ".join(filter(None, (fact.where, "divided over tp"))))

    @contextmanager
    def whole(self, module: nn.Module, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Context with whole tensors on every rank, from the stages that have them."""
        if self._builder is None:
            with super().whole(module, names) as found:
                yield found
            return
        places = self._whole.places(module)
        state = state_tensors(module)
        mine = {name: state[name] for name in names if places[name].rank == self._pp.rank}
        parameters = parameters_among(mine.values())
        with self._shares.open(), self._whole_here(parameters, modify=False):
            yield {name: self._whole.broadcast(places[name], mine.get(name)) for name in names}

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> Iterator[None]:
        """Context in which these parameters are whole, as in the user's model, on every rank."""
        chosen = list(parameters)
        here = [p for p in chosen if not isinstance(p, Elsewhere) and not p.is_meta]
        others = None if self._builder is None else self._builder.stand_ins
        stages = nullcontext() if others is None else others.whole(chosen, modify=modify)
        with self._whole_here(here, modify=modify), stages:
            yield

    @contextmanager
    def _whole_here(self, chosen: Sequence[nn.Parameter], *, modify: bool) -> Iterator[None]:
        """Context in which parameters of this rank's stages are whole."""
        names = self._original.names  # not of parameters that the script has added since
        partitions = {p: self._facts[names[p]].partition if p in names else None for p in chosen}
        divided = self._builder is not None or any(partitions.values())
        with (
            self._shares.open(),
            self.inner.gathered(chosen, modify=modify),
            joined(self._tp, partitions, modify=modify),
            refusing_forwards(self._model) if divided else nullcontext(),
            self._shares.without(chosen),
        ):
            yield
        self._shares.steps += modify
        if modify and self._cell.pipeline is not None:
            self._cell.pipeline.stages.outdate()

    def _in_model(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        """Yield shards of the strategy inside in coordinates of the whole model."""
        return global_shards(shards, self._facts, self._tp.rank)

    @on_shares
    def check(self, reader: Reader) -> None:
        """Compare names and shapes of the whole model, and those of this cell's parts."""
        self._original.check_loads(reader, self._facts)
        self.inner.check(self._of_cell(reader))

    @on_shares
    def load(self, reader: Reader) -> None:
        """Load this cell's parts of a checkpoint of the whole model."""
        self._original.check_loads(reader, self._facts)
        if self._cell.pipeline is not None:
            self._cell.pipeline.stages.outdate()
        self.inner.load(self._of_cell(reader))
        self._shares.steps += 1

    def _of_cell(self, reader: Reader) -> LocalReader:
        """Return a reader of this cell's parts of a checkpoint."""
        names = {**named_parameters(self._model), **persistent_buffers(self._model)}
        return LocalReader(reader, self._facts, names, self._tp.rank)

    # --- the tensors of optimizers, as a strategy around finds them at all times: shares ---

    def parts(self) -> Mapping[str, HeldPart]:
        """Return this tensor-parallel rank's part of each divided parameter."""
        rank, found = self._tp.rank, {}
        for name, facts in self._facts.items():
            if (cut := facts.partition) is not None:
                holders = (str(r) for r in range(cut.ranks) if cut.ranges[r] == cut.ranges[rank])
                word = f"{'+'.join(holders)}of{cut.ranks}"
                found[name] = HeldPart(facts.local_shape(rank), word)
        return found

    @override
    def states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        return self._in_model(self.inner.states(index, names))

    @override
    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        self.check(reader)
        self.inner.load_states(index, self._of_cell(reader), names)

    piece = on_share(StateAround.piece)
    values = on_share(StateAround.values)
    set_values = on_share(StateAround.set_values)


class Megatron(MegatronOutline, StrategyAround[MegatronConfig]):
    """Tensor and pipeline parallelism, over data parallelism.

    ``prepare`` returns the very model it was given: its layers compute in parts.
    """

    pipeline: PipelinedModel | None = None

    def __init__(self, config: MegatronConfig, run: Run) -> None:
        kind, options = data_parallel(config)
        super().__init__(config, run, kind(options, run))
        world = run.world
        self._tp, self._pp = (
            connect(run.mesh[name], run.traffic, world.device, world.timeout)
            for name in ("tp", "pp")
        )
        self._tensor: TensorParallel | None = None
        self._shares = Shares(self._tp)
        self._facts: dict[str, ShardingSpec] = {}
        self._dropout = Dropout(config.dropout_seed, run.mesh["dp"].position, self._tp)
        self._draws = AlikeDraws(self._tp, world.device)
        self._source: tuple[WeightSource, Mapping[str, Tensor]] | None = None
        self._handles: list[RemovableHandle] = []
        self._kept: Sequence[nn.Module] = ()
        self._builder = PipelineBuilder(config, run, self._pp, self._tp) if config.pp > 1 else None
        self._synchronizing = True
        self._waits = False
        if unwise := advice(run.mesh):
            logger.announce(unwise)

    @classmethod
    def planning(cls) -> Planning:
        """Return plans of cells."""
        return CellPlanning(cls)

    def materialize(self, model: nn.Module, source: WeightSource) -> None:
        """Keep the source: parameters get this rank's share of their values once they are cut."""
        whole = {name: tensor.detach() for name, tensor in meta_tensors(model).items()}
        self._source = source, whole

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Divide the model over the cell, and prepare this rank's part for data parallelism."""
        self._model, self._original = model, Original(model, optimizers)
        self._whole = WholeState(uncompiled(model), self._pp, self.run.world.device)
        self._facts = {
            name: ShardingSpec(tuple(parameter.shape))
            for name, parameter in named_parameters(model).items()
        }
        self._replicate(model)
        blocks = repeated_blocks(model)
        # The model is whole for the last time: a pipeline is planned before layers are divided.
        with untouched(model, PLANNING), computing_in_copies(model):
            self._tensor, plan = self._plan(model)
        if self._tensor is not None and plan is not None:
            before = {name: p.nbytes for name, p in named_parameters(model).items()}
            self._dropout.layouts = plan.layouts
            self._facts = self._tensor.divide(model, plan)
            tell(describe(plan, self._facts, before, self._tp.size))
            self._original.cut_states(optimizers, self._facts, self._tp.rank)
        self._original.check_steps_parts(optimizers, self._facts, self.config.pp)
        self._dropout.attach(model, counting=self._builder is None)
        if self._builder is None:  # a pipeline seeds each of its forwards
            self._draws.attach(model)
        else:
            self._builder.split(model, optimizers, self._original.shapes)
            self._whole.copies = self._builder.copied_buffers
        if self._tensor is not None:
            self._tensor.surround()
        self._dropout.follow(blocks if self._builder is None else self._builder.blocks)
        self._give_values(model)
        prepared = self._inner.prepare(model, optimizers)
        self._know_shares(model)
        self.gradients, self.state = CellGradients(self), CellState(self)
        if self._tensor is not None:
            self._tensor.sum_partial(model, self._facts)
        if self._builder is not None:
            self.pipeline = self._builder.start(model, self._inner, self._dropout, self._shares)
            self._builder.stand_ins.in_window = lambda: not self._synchronizing
            shows_whole(uncompiled(model), self.state)
        if not self.is_one_rank:
            same = SameBatch((self._tp, self._pp), self.run.world)
            first = model.register_forward_pre_hook(same, prepend=True, with_kwargs=True)
            self._handles.append(first)
        self._shares.cover(model, prepared.optimizers)
        self._keep_parameters(model)
        return prepared

    def _keep_parameters(self, model: nn.Module) -> None:
        """Let the layers of a pipeline refuse others in the places of their parameters."""
        if self._builder is None:
            return
        self._kept = [module for module in model.modules() if module._parameters]
        for module in self._kept:
            if is_bare := behavior_of(module) is None:
                attach(module, Own())
            module.__dict__[KEPT] = is_bare

    def _plan(self, model: nn.Module) -> LayerPlan:
        """Plan dropout masks, stages and layers, alike on all ranks. Collective.

        Raises:
            RankMismatchError: ranks have made different plans, or only some of them one; on each
                rank.
            Exception: whatever was raised here, where no rank has made a plan.
        """
        examples = batches_for(self.run, model)
        failure: Exception | None = None
        try:
            found = self._own_plan(model, examples)
            mine = self._described(model, *found)
        except Exception as error:  # the other ranks must hear of it before this one ends
            failure, mine = error, ComparedPlan(["no plan"], [f"{type(error).__name__}: {error}"])
        if self.run.world.size > 1 and differing(mine.facts, doing="the comparison of plans"):
            plans = gather_facts(mine, ComparedPlan, doing="the comparison of plans")
            raise RankMismatchError(_message(plans)) from failure
        if failure is not None:
            raise failure
        if self._builder is not None:
            self._builder.agree()
        return found

    def _own_plan(self, model: nn.Module, examples: Sequence[ExampleBatch]) -> LayerPlan:
        """Return the plan of this rank."""
        inputs = inputs_for(self.config, model, examples)
        self._dropout.find(model, inputs, examples)
        if self._builder is not None and inputs is not None:  # without any, inputs_for has raised
            self._builder.plan(model, inputs)
        if self._tp.size == 1:
            return None, None
        tensor = TensorParallel.of(self.config, model, self._tp)
        return tensor, confirmed(model, inputs, tensor.plan(model, inputs), self.config)

    def _described(
        self, model: nn.Module, tensor: TensorParallel | None, plan: ModelPlan | None
    ) -> ComparedPlan:
        """Describe a plan for other ranks: the blocks of stages, the share of each parameter."""
        blocks = [name for name, _ in self._builder.blocks] if self._builder is not None else []
        if tensor is None or plan is None:
            return ComparedPlan(blocks, ())
        facts = tensor.facts(model, plan)
        sizes = {name: parameter.nbytes for name, parameter in named_parameters(model).items()}
        shares = [
            f"{name} {'whole' if known.partition is None else f'divided: {known.partition}'}"
            for name, known in facts.items()
        ]
        return ComparedPlan([*blocks, *shares], [*describe(plan, facts, sizes, self._tp.size)])

    @on_shares
    def _replicate(self, model: nn.Module) -> None:
        """Give the ranks of a cell the values of the first: each may have drawn its own."""
        tensors = [*held_parameters(model), *model.buffers()]
        for ranks in (self._tp, self._pp):
            replicate([t for t in tensors if not t.is_meta], ranks, "replicate model")

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Let the data-parallel strategy take one more optimizer."""
        self._original.check_steps_parts([optimizer], self._facts, self.config.pp)
        self._original.optimizers += 1
        if self._builder is not None:
            self._builder.follow(optimizer)
        bound = self._inner.bind(optimizer)
        self._shares.follow(bound)
        return bound

    @on_shares
    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, return with gradients averaged over dp."""
        if self.pipeline is None:
            self._inner.backward(loss, **options)
        else:
            self.pipeline.backward(loss, synchronize=self._synchronizing, **options)
            self._waits = not self._synchronizing
            if self._synchronizing and self._builder is not None:
                self._builder.stand_ins.learn()

    @property
    def pace(self) -> Pace:
        """That of the strategy inside; a pipeline may not even have begun what waits."""
        pace = self._inner.pace
        return pace if self.pipeline is None else pace._replace(waits=self._waits)

    @classmethod
    def cost(cls, config: MegatronConfig, model: ModelSpec, run: Run) -> Cost:
        """Return bytes held and sent by this rank; ``cost`` says which of these are exact."""
        return estimate(config, model, run)

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Context in which backward keeps gradients local to the data-parallel rank."""
        before, self._synchronizing = self._synchronizing, not enabled
        # A pipeline says itself which of its backwards synchronises.
        inner = nullcontext() if self.pipeline else self._inner.accumulating(enabled)
        try:
            with inner:
                yield
        finally:
            self._synchronizing = before

    def take_links(self, links: LinkMethods) -> None:
        """Let the data-parallel strategy go on with methods that were chosen between two steps."""
        super().take_links(links)
        self._inner.take_links(links)

    @property
    def is_one_rank(self) -> bool:
        """Whether a cell has one rank, so that the strategy inside does everything."""
        return self.config.tp * self.config.pp == 1

    @property
    def joinable(self) -> Joinable | None:
        """A cell of one rank may stand in for other ones; a cell of several cannot."""
        return self._inner.joinable if self.is_one_rank else None

    def _know_shares(self, model: nn.Module) -> None:
        for name, parameter in named_parameters(model).items():
            facts, partition = self._facts[name], self._facts[name].partition
            if facts.partial and parameter.numel():  # all of it, and a part of the gradient
                partition = alike(facts.shape[0], self._tp.size) if facts.shape else None
            if partition is not None:
                self._shares.add(name, parameter, partition, facts.shape)

    def close(self) -> None:
        """Take hooks off and end threads; layers stay divided."""
        self._shares.close()
        for handle in self._handles:
            handle.remove()
        for module in self._kept:
            if module.__dict__.pop(KEPT):
                detach(module)
        for each in (self._tensor, self._draws, self._dropout):
            if each is not None:
                each.close()
        if self._builder is not None and self.pipeline is not None:
            self._builder.close(self._model)
        for part in (self._inner, self._tp, self._pp):
            part.close()

    def _give_values(self, model: nn.Module) -> None:
        """Let a model that was built without values get this rank's share of them."""
        if self._source is None:
            return
        source = SharedSource(*self._source, self._facts, self._tp.rank)
        self._inner.materialize(model, source)
        if self._builder is not None:
            self._builder.materialize(source)
        self._source = None
