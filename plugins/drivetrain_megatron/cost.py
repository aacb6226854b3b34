"""The cost of one rank of a cell: bytes held between steps, and bytes sent in a step.

The data-parallel strategy is asked about the part of the model that a rank holds; the messages
inside of the cell are added.

Exact, where ``ModelSpec.module`` is given:

- bytes held: they follow from the same plan and cut as training; an estimated cut replaces a
  measured cut (``cut: profile``);
- bytes over ``dp``, but for gathers of divided parameters inside of ``pp``: which ones a stage
  still has depends on the order of its micro-batches;
- with ``ModelSpec.inputs``, how often a stage sends gradients over ``dp``, and the decisions of
  replicas that need each other in each micro-batch;
- with these, bytes over ``tp`` and ``pp`` of a model of repeated blocks that trains
  all its parameters, without autocast and recomputation, with one input per group of layers, whose
  only loss is a cross entropy of as many targets as there are tokens. The formulas are in
  ``volumes``. Of a pipeline over hosts, messages between stages count as ``pp.near`` inside of a
  host and as ``pp.far`` between hosts. Clipping adds one number per axis.

Estimates otherwise:

- without ``module``, tensors of two dims or more count as divided over tp along the first, others
  as whole, and stages as consecutive parameters of equal bytes;
- without ``inputs``, bytes over tp and pp are left out, since they grow with the batch:
  ``Cost.uncounted`` says so.

Bytes for activations: Shoeybi et al. 2019, Narayanan et al. 2021, Korthikanti et al. 2022.

Let A be the bytes of an activation (rows x tokens x width x bytes per number) and t the number of
tensor-parallel ranks. In a ring, one rank sends for an all-reduce of S bytes 2 S (t-1)/t, an
all-gather or a reduce-scatter S (t-1)/t:

==================  ==============================  ============================  =============
part                forward                         backward                      bytes per rank
==================  ==============================  ============================  =============
a group             1 all-reduce                    1 all-reduce                  4 A (t-1)/t
the same, sharded   1 all-gather, 1 reduce-scatter  1 all-gather, 1 r.-scatter    4 A (t-1)/t
a layer by itself   1 all-gather, or 1 all-reduce   the other one                 3 A (t-1)/t
a layer             its two groups: attention, MLP                                8 A (t-1)/t
words come in       1 all-reduce                    nothing                       2 A (t-1)/t
words go out        nothing                         1 all-reduce                  2 A (t-1)/t
cross entropy       3 all-reduces of a number       nothing                       6 B (t-1)/t
                    per token, B bytes
shards, once        1 all-gather after the blocks   1 all-gather before them      2 A (t-1)/t
a pipeline's cut    A to the next stage             A to the stage before         A each way
==================  ==============================  ============================  =============

Groups, words and cross entropy are section 3 of Shoeybi et al. 2019 (arXiv 1909.08053); the sum per
layer is section 3.2 of Narayanan et al. 2021 (arXiv 2104.04473); shards of the sequence, which
send the same bytes, are section 4.2.2 of Korthikanti et al. 2022 (arXiv 2205.05198). The functions
give the integers that (t-1)/t stands for when a size is no multiple of t. Computing a block again
in backward adds its forward once more.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import nn

from drivetrain.collectives import Route, sent_elements
from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.collectives.volume import Operation, chunk_bounds, chunk_of
from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.model.guard import Arguments, Keywords
from drivetrain.model.modules import named_parameters, uncompiled
from drivetrain.model.trace import BlockCall, ModelTrace, trace_model
from drivetrain.model.untouched import PLANNING, untouched
from drivetrain.parallel.estimate import add
from drivetrain.strategy import Run
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.cut import StageCut, chosen_cut
from drivetrain_megatron.pipeline.schedules import ActionKind, make_schedule
from drivetrain_megatron.pipeline.stage import Tie, is_local, ties
from drivetrain_megatron.pipeline.transfer import MicroBatch, StageLinks, cut_batch
from drivetrain_megatron.plan.derive import Derivation
from drivetrain_megatron.plan.model import ModelPlan, TensorParallel, confirmed
from drivetrain_megatron.recording.calls import inputs_for
from drivetrain_megatron.recording.phases import Recording, TensorMeta, named_blocks, recording_of
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.state import data_parallel
from drivetrain_megatron.tensor.linear import features_of, is_linear
from drivetrain_megatron.tensor.partition import ShardingSpec

# --- bytes for activations ---

Sent = Counter[tuple[str, str]]
"""Bytes by axis and operation."""

_STATISTICS = 3
"""Of a cross entropy: maximum, sum of exponentials, and the logit of the target."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation between two layers, of one micro-batch; the width is that of a token."""

    rows: int
    tokens: int
    width: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.tokens * self.width

    def shard(self, line: Route) -> "Activation":
        """Return the part that a rank holds when tokens are divided."""
        start, stop = chunk_of(self.tokens, line.axis.size, line.axis.rank)
        return replace(self, tokens=stop - start)

    def summed(self, line: Route) -> Sent:
        """Return the bytes of a sum over ranks: words that come in, or go out."""
        return line.all_reduced(self.numel, self.itemsize)

    def passed(self, operation: Operation, line: Route) -> Sent:
        """Return the bytes of shards of the tokens that are gathered or scattered."""
        each = self.rows * self.width * self.itemsize
        bounds = chunk_bounds(self.tokens, line.axis.size)
        return line.passed(operation, [(stop - start) * each for start, stop in bounds])


def group(entering: Activation, leaving: Activation, line: Route, *, sharded: bool) -> Sent:
    """Return the bytes of a column-parallel and the row-parallel layer after it.

    Column-parallel layers with the same input count once. ``sharded`` activations are shards of the
    sequence outside of the group.
    """
    if not sharded:
        return entering.summed(line) + leaving.summed(line)
    found = Sent()
    for activation in (entering, leaving):  # gathered one way, scattered the other
        found += activation.passed("all_gather", line) + activation.passed("reduce_scatter", line)
    return found


def cross_entropy(targets: int, itemsize: int, line: Route) -> Sent:
    """Return the bytes of the loss of divided logits; label smoothing adds a third of it.

    The statistics of a target have the itemsize of the logits, at least that of fp32.
    """
    each = line.all_reduced(targets, itemsize)
    return Sent({key: _STATISTICS * nbytes for key, nbytes in each.items()})


# --- how the ranks of a cell will hold a model: planned as ``prepare`` does, and left whole ---


@dataclass(frozen=True, slots=True)
class Pipelined:
    """How blocks lie on stages, seen from one rank."""

    recording: Recording
    cut: StageCut
    ranks: int
    rank: int

    @property
    def phases(self) -> frozenset[int]:
        """The phases of this rank's stages."""
        own = range(self.rank, self.cut.stages, self.ranks)
        return frozenset(phase for stage in own for phase in self.cut.phases(stage))

    def holder(self, stage: int) -> int:
        """Return the rank that has a stage."""
        return stage % self.ranks

    def lent(self) -> Iterator[tuple[Tie, int, list[int]]]:
        """Yield the parameters that several ranks use, their owner, and the ranks with copies."""
        for tie in ties(self.recording, self.cut):
            owner = self.holder(tie.owner)
            if others := sorted({self.holder(stage) for stage in tie.copies} - {owner}):
                yield tie, owner, others


@dataclass(frozen=True, slots=True)
class CellLayout:
    """The part of a model on one rank of a cell.

    Attributes:
        facts: how each parameter lies on the tensor-parallel axis, by name.
        rank: of that axis.
        plan: how layers are divided; None on a single rank.
        pipeline: None without stages.
    """

    facts: Mapping[str, ShardingSpec]
    rank: int
    plan: ModelPlan | None = None
    pipeline: Pipelined | None = None
    _owners: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: MegatronConfig, model: nn.Module, run: Run) -> "CellLayout":
        """Plan as ``prepare`` would, with an estimated cut in place of a measured cut.

        Raises:
            ConfigError: the model cannot be divided as configured.
        """
        plan = pipeline = None
        with untouched(model, PLANNING):
            found = inputs_for(config, model)
            facts = {n: ShardingSpec(tuple(p.shape)) for n, p in named_parameters(model).items()}
            if config.pp > 1 and found is not None:
                recording = recording_of(model, found.trace)
                chosen = replace(config, cut="cost") if config.cut == "profile" else config
                cut = chosen_cut(chosen, model, recording, found.trace)
                pipeline = Pipelined(recording, cut, config.pp, run.mesh["pp"].rank)
            if config.tp > 1:
                # Planning only asks how many ranks there are: nothing is sent.
                ranks = SoloCommunicator(run.mesh["tp"], run.traffic, run.world.timeout)
                tensor = TensorParallel.of(config, model, ranks)
                plan = confirmed(model, found, tensor.plan(model, found), config)
                facts = tensor.facts(model, plan)
        owners = {} if pipeline is None else {t.name: owner for t, owner, _ in pipeline.lent()}
        return cls(facts, run.mesh["tp"].rank, plan, pipeline, owners)

    def holds(self, name: str) -> bool:
        """Whether this rank has a parameter, and optimizes its part of it."""
        if self.pipeline is None:
            return True
        if name in self._owners:
            return self._owners[name] == self.pipeline.rank
        return is_local(self.pipeline.recording.parameters[name], self.pipeline.phases)

    def keeps(self, buffer: str) -> bool:
        """Whether this rank has a buffer."""
        if self.pipeline is None:
            return True
        use = self.pipeline.recording.buffers.get(buffer)
        return use is None or use.ambient or is_local(use, self.pipeline.phases) or not use.phases

    def copies(self) -> set[str]:
        """Return the names of the parameters that this rank uses and another one optimizes."""
        if self.pipeline is None:
            return set()
        rank = self.pipeline.rank
        return {tie.name for tie, _, others in self.pipeline.lent() if rank in others}

    def local(self, spec: TensorSpec) -> TensorSpec:
        """Return a parameter as this rank of the tensor-parallel axis has it."""
        return replace(spec, shape=self.facts[spec.name].local_shape(self.rank))

    def has_phase(self, phase: int) -> bool:
        """Whether this rank computes a phase, counted as in a recording."""
        return self.pipeline is None or phase in self.pipeline.phases

    def summed(self, specs: Collection[TensorSpec]) -> list[TensorSpec]:
        """Return the parameters here whose gradients are summed over the tensor-parallel axis."""
        return [
            spec
            for spec in specs
            if spec.trainable and self.holds(spec.name) and self.facts[spec.name].is_summed
        ]


# --- the bytes ---


def estimate(config: MegatronConfig, model: ModelSpec, run: Run) -> Cost:
    """Return the bytes that this rank holds between steps, and the bytes sent in a step.

    Raises:
        ConfigError: the model cannot be divided as configured.
    """
    kind, options = data_parallel(config)
    if config.tp * config.pp == 1:
        return kind.cost(options, model, run)
    layout = None if model.module is None else CellLayout.of(config, model.module, run)
    part = _by_sizes(config, model, run) if layout is None else _part(model, layout)
    volumes = None
    if model.module is not None and layout is not None and model.inputs is not None:
        volumes = StepVolumes(config, model, model.module, layout, run)
    backwards = run.accumulation if volumes is None else volumes.backwards
    cost = kind.cost(options, part, replace(run, accumulation=backwards))
    held = dict(cost.held)
    if layout is not None and (copies := layout.copies()):
        held["copies"] = sum(layout.local(s).nbytes for s in model.parameters if s.name in copies)
    if volumes is None:
        inside = [axis for axis in ("tp", "pp") if run.mesh[axis].size > 1]
        return replace(
            cost, held=held, uncounted={**cost.uncounted, **dict.fromkeys(inside, "activations")}
        )
    sent = Counter(cost.sent) + volumes.sent()
    once_more = kind.cost(options, part, replace(run, accumulation=backwards + 1))
    if once_more.sent != cost.sent:  # replicas need each other in each micro-batch
        sent += volumes.of_decisions()
    return replace(cost, held=held, sent=dict(sent))


def part_of(config: MegatronConfig, model: ModelSpec, run: Run) -> ModelSpec:
    """Return the tensors of a model that a rank of a cell has; without module by an estimate.

    Raises:
        ConfigError: the model cannot be divided as configured.
    """
    if config.tp * config.pp == 1:
        return model
    if model.module is None:
        return _by_sizes(config, model, run)
    return _part(model, CellLayout.of(config, model.module, run))


def _part(model: ModelSpec, layout: CellLayout) -> ModelSpec:
    """Return the part of a model that a rank holds."""
    return ModelSpec(
        tuple(layout.local(spec) for spec in model.parameters if layout.holds(spec.name)),
        tuple(spec for spec in model.buffers if layout.keeps(spec.name)),
        model.states,
    )


def _by_sizes(config: MegatronConfig, model: ModelSpec, run: Run) -> ModelSpec:
    """Return an estimate of the part that a rank holds, from the sizes of parameters alone."""
    total = sum(spec.nbytes for spec in model.parameters)
    stages = config.pp * config.chunks
    parameters, before = [], 0
    for spec in model.parameters:
        stage = min(stages * before // max(total, 1), stages - 1)
        before += spec.nbytes
        if stage % config.pp == run.mesh["pp"].rank:
            parameters.append(_share(spec, config.tp, run.mesh["tp"].rank))
    return ModelSpec(tuple(parameters), model.buffers, model.states)


def _share(spec: TensorSpec, ranks: int, rank: int) -> TensorSpec:
    if len(spec.shape) < 2:
        return spec
    start, stop = chunk_of(spec.shape[0], ranks, rank)
    return replace(spec, shape=(stop - start, *spec.shape[1:]))


@dataclass(frozen=True, slots=True)
class Forward:
    """One micro-batch on its way through the blocks.

    Attributes:
        entering: the activation that enters each block, by name.
        leaving: the tensors that cross the bound after each block; empty without a pipeline.
        trace: at the whole forward; experts get the tokens that random weights give them.
    """

    entering: Mapping[str, Activation]
    leaving: Sequence[Sequence[TensorMeta]]
    trace: ModelTrace

    @property
    def makes_loss(self) -> bool:
        """Whether the model's output has a loss, or is one."""
        tensors = {n: self.trace.tensors[i].facts for n, i in self.trace.output if i is not None}
        found = tensors.get("loss", next(iter(tensors.values())) if len(tensors) == 1 else None)
        return found is not None and not found.shape and found.dtype.is_floating_point

    def through(self, first: str, last: str) -> tuple[int, int]:
        """Return how many numbers come into a module, and go out of another, in all calls.

        Those that come in want a gradient.
        """
        calls = self.trace.modules
        into = [number for call in calls if call.name == first for number in call.inputs]
        out = [call.outputs[0] for call in calls if call.name == last]
        seen = self.trace.tensors
        wanting = [seen[number].facts for number in into if seen[number].requires_grad]
        made = [seen[number].facts for number in out]
        return sum(prod(x.shape) for x in wanting), sum(prod(x.shape) for x in made)


class StepVolumes:
    """The bytes that one rank sends in an optimizer step, for a model with module and inputs."""

    def __init__(
        self,
        config: MegatronConfig,
        model: ModelSpec,
        module: nn.Module,
        layout: CellLayout,
        run: Run,
    ) -> None:
        self._module = module
        self._config, self._model, self._layout, self._run = config, model, layout, run
        self._line = Route(run.mesh["tp"])
        self._links = StageLinks.of(run)
        self._windowed = run.accumulation > 1 and not config.micro_batches
        self._parts = 0  # of a call
        self._counts = self._micro_batches()

    @property
    def backwards(self) -> int:
        """How many backwards this rank runs in a step, with the gradients that each of them has."""
        pipeline, calls = self._layout.pipeline, self._run.accumulation
        if pipeline is None or self._windowed:
            return calls
        stages = pipeline.cut.stages // pipeline.ranks
        if self._parts > 1 and self._counts[0][0].makes_loss:
            plan = make_schedule(self._config.schedule, pipeline.ranks, self._parts, stages)
            kinds = Counter(action.kind for action in plan.ranks[pipeline.rank])
            return calls * (kinds.total() - kinds[ActionKind.FORWARD])
        # The loss of a whole batch has a backward of its own down to the blocks.
        has_loss = pipeline.rank == pipeline.holder(pipeline.cut.stages - 1)
        return calls * (self._parts * stages + has_loss)

    def of_decisions(self) -> Sent:
        """Return the bytes in which replicas decide how a call is cut: numbers of 8 bytes each.

        They are whether its kind is known, into how many parts, and, of several, whether it is
        known how these are joined.
        """
        total = Sent()
        if self._layout.pipeline is None or self._windowed or self._run.mesh["dp"].size == 1:
            return total
        for axis in ("tp", "pp", "dp"):
            each = Route(self._run.mesh[axis]).all_reduced(1, torch.int64.itemsize)
            add(total, each, self._run.accumulation * (2 + (self._parts > 1)))
        return total

    def sent(self) -> Sent:
        """Return the bytes by (axis, operation)."""
        counts = self._counts
        total: Sent = Counter()
        for forward, times in counts:
            if self._layout.plan is not None:
                add(total, self._of_layers(self._layout.plan, forward), times)
                for spec in self._layout.summed(self._model.parameters):
                    add(total, self._line.all_reduced(spec.numel, spec.dtype.itemsize), times)
            if self._layout.pipeline is not None:
                add(total, self._over_cuts(self._layout.pipeline, forward), times)
        if self._layout.pipeline is not None:
            total += self._of_ties(self._layout.pipeline)
            total["pp", "broadcast"] += self._of_losses(self._layout.pipeline, counts[0][0])
        return total

    def _micro_batches(self) -> list[tuple[Forward, int]]:
        """Return the distinct micro-batches of a step, and how often each comes."""
        args, kwargs = self._model.inputs or ((), {})
        parts = 1 if self._windowed else self._config.micro_batches or self._config.pp
        if self._layout.pipeline is None:
            parts = 1
        batches = cut_batch(MicroBatch(tuple(args), kwargs), parts)
        self._parts = len(batches)
        rows = Counter(batch.rows for batch in batches)
        first = {batch.rows: batch for batch in reversed(batches)}
        return [
            (self._forward(first[count].args, first[count].kwargs), times * self._run.accumulation)
            for count, times in rows.items()
        ]

    def _forward(self, args: Arguments, kwargs: Keywords) -> Forward:
        module, pipeline = uncompiled(self._module), self._layout.pipeline
        if pipeline is None:
            trace = trace_model(module, args, kwargs, kind=StageProxy)
            leaving: list[Sequence[TensorMeta]] = []
        else:
            blocks = named_blocks(pipeline.recording.names, module)
            trace = trace_model(module, args, kwargs, blocks=blocks, kind=StageProxy, isolated=True)
            leaving = [crossing.metas for crossing in recording_of(module, trace).crossings]
        calls = trace.first_calls().items()
        entering = {name: x for name, call in calls if (x := _activation(trace, call))}
        return Forward(entering, leaving, trace)

    # --- tensor parallelism, in one micro-batch ---

    def _of_layers(self, plan: ModelPlan, forward: Forward) -> Sent:
        found = Sent()
        phases = {name: phase for phase, name in enumerate(forward.trace.first_calls())}
        for name, x in forward.entering.items():
            if self._layout.has_phase(phases[name]):
                found += self._of_block(name, plan.blocks[name], x, forward)
        activations = list(forward.entering.values())
        if activations and self._layout.has_phase(0):
            found += self._before_blocks(plan, activations[0])
        if activations and self._layout.has_phase(len(activations)):
            found += self._after_blocks(plan, activations[-1])
        return found

    def _before_blocks(self, plan: ModelPlan, x: Activation) -> Sent:
        found = Sent()
        for layer in map(self._module.get_submodule, plan.vocabulary):
            if isinstance(layer, nn.Embedding):
                found += replace(x, width=layer.embedding_dim).summed(self._line)
        return found + self._end(x)

    def _after_blocks(self, plan: ModelPlan, x: Activation) -> Sent:
        found = Sent()
        exact = max(x.itemsize, torch.float32.itemsize)
        for layer in map(self._module.get_submodule, plan.vocabulary):
            if is_linear(layer):
                found += replace(x, width=features_of(layer)[0]).summed(self._line)
                found += cross_entropy(x.rows * x.tokens, exact, self._line)
        return found + self._end(x)

    def _end(self, x: Activation) -> Sent:
        return x.passed("all_gather", self._line) if self._config.sequence_parallel else Sent()

    def _of_block(self, name: str, derivation: Derivation, x: Activation, forward: Forward) -> Sent:
        found = Sent()
        block, sharded = self._module.get_submodule(name), self._config.sequence_parallel
        for entering, leaving in (
            _widths(block, derivation) if sharded else _heads(block, derivation)
        ):
            ends = replace(x, width=entering), replace(x, width=leaving)
            found += group(*ends, self._line, sharded=sharded)
        for first, last in () if sharded else _ends(derivation):
            for numel in forward.through(f"{name}.{first}", f"{name}.{last}"):
                found += self._line.all_reduced(numel, x.itemsize)
        for each in derivation.plan.alone:
            layer = f"{name}.{each.layer}"
            entering, leaving = forward.through(layer, layer)
            summed, cut = (leaving, entering) if each.by_rows else (entering, leaving)
            found += self._line.all_reduced(summed, x.itemsize)
            of_feature = cut // each.features.size * x.itemsize
            lengths = [(stop - start) * of_feature for start, stop in each.features.bounds]
            found += self._line.passed("all_gather", lengths)
        return found

    # --- pipeline parallelism ---

    def _over_cuts(self, pipeline: Pipelined, forward: Forward) -> Sent:
        """Return the bytes that this rank sends over each link for one micro-batch.

        They are of outputs, to the next stage, and of gradients, to the stage before.
        """
        total = Sent()
        for stage, bound in enumerate(pipeline.cut.bounds[1:-1]):
            before, after = pipeline.holder(stage), pipeline.holder(stage + 1)
            link = self._links.name(before, after)
            for meta, numel in self._carried(forward.leaving[bound - 1]):
                nbytes = numel * self._links.wire_dtype(before, after, meta.dtype).itemsize
                total[link, "send"] += nbytes * (before == pipeline.rank)
                total[link, "send"] += nbytes * (after == pipeline.rank and meta.requires_grad)
        return total

    def _carried(self, metas: Sequence[TensorMeta]) -> Iterator[tuple[TensorMeta, int]]:
        """Yield the tensors that cross a cut, with the number of elements of this rank's share."""
        is_sharded = self._config.sequence_parallel and self._config.tp > 1
        for meta in metas:
            numel = torch.Size(meta.shape).numel()
            if is_sharded and meta.dtype.is_floating_point and len(meta.shape) > 1:
                is_sharded = False  # the first one
                numel = _of_shape(meta.shape, meta.dtype).shard(self._line).numel
            yield meta, numel

    def _of_ties(self, pipeline: Pipelined) -> Sent:
        """Return the bytes of values to copies, and of a copy's gradient to its owner, by link."""
        total = Sent()
        specs = {spec.name: spec for spec in self._model.parameters}
        for tie, owner, others in pipeline.lent():
            spec = self._layout.local(specs[tie.name])
            for other in others:
                link = self._links.name(owner, other)
                total[link, "send"] += spec.nbytes * (owner == pipeline.rank)
                total[link, "send"] += spec.nbytes * (other == pipeline.rank and spec.trainable)
        return total

    def _of_losses(self, pipeline: Pipelined, forward: Forward) -> int:
        """Return the bytes of the values that losses have on the last stage."""
        last = list(forward.entering.values())[-1]
        elements = sent_elements(
            "broadcast",
            self._run.accumulation,
            size=pipeline.ranks,
            rank=pipeline.rank,
            source=pipeline.holder(pipeline.cut.stages - 1),
        )
        return elements * max(last.itemsize, torch.float32.itemsize)


def _widths(block: nn.Module, derivation: Derivation) -> Iterator[tuple[int, int]]:
    """Yield how many features enter and leave each group of a block."""
    for group in derivation.plan.groups:
        column = block.get_submodule(next(iter(group.columns)))
        yield features_of(column)[0], features_of(block.get_submodule(group.row))[1]
    yield from _heads(block, derivation)


def _heads(block: nn.Module, derivation: Derivation) -> Iterator[tuple[int, int]]:
    """Yield the same for each attention that is divided by heads."""
    for name in derivation.plan.attentions:
        width = int(block.get_submodule(name).embed_dim)  # type: ignore[arg-type]
        yield width, width


def _ends(derivation: Derivation) -> Iterator[tuple[str, str]]:
    """Yield the first and last module of each group and region of a block."""
    for group in derivation.plan.groups:
        yield next(iter(group.columns)), group.row
    for region in derivation.plan.regions:
        yield region.entrance, region.leaving


def _activation(trace: ModelTrace, call: BlockCall) -> Activation | None:
    """Return a block's first floating point argument of two dims or more; None without any."""
    given = [trace.tensors[number].facts for number in call.given if number is not None]
    rows = (x for x in given if x.dtype.is_floating_point and len(x.shape) > 1)
    first = next(rows, None)
    return None if first is None else _of_shape(first.shape, first.dtype)


def _of_shape(shape: Sequence[int], dtype: torch.dtype) -> Activation:
    *rows, tokens, width = shape
    return Activation(torch.Size(rows).numel(), tokens, width, dtype.itemsize)
