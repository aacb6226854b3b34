"""How the ranks of a cell will hold a model: planned as ``prepare`` does, and left whole."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.cost import TensorSpec
from drivetrain.model import PLANNING, untouched
from drivetrain.parts.naming import named_parameters
from drivetrain.strategy import Run
from drivetrain_megatron.cell import ParameterFacts
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.cut import StageCut, chosen_cut
from drivetrain_megatron.pipeline.stage import Tie, is_local, ties
from drivetrain_megatron.plan.model import ModelPlan, TensorParallel
from drivetrain_megatron.plan.whole_trial import confirmed
from drivetrain_megatron.recording.calls import inputs_for
from drivetrain_megatron.recording.phases import Recording, recording_of


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

    facts: Mapping[str, ParameterFacts]
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
        with untouched(model, PLANNING):
            return cls._planned(config, model, run)

    @classmethod
    def _planned(cls, config: MegatronConfig, model: nn.Module, run: Run) -> "CellLayout":
        found = inputs_for(config, model)
        facts = {n: ParameterFacts(tuple(p.shape)) for n, p in named_parameters(model).items()}
        plan = pipeline = None
        if config.pp > 1 and found is not None:
            recording = recording_of(model, found.look)
            chosen = replace(config, cut="cost") if config.cut == "profile" else config
            cut = chosen_cut(chosen, model, recording, found.look)
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
            if spec.trainable and self.holds(spec.name) and _is_summed(self.facts[spec.name])
        ]


def _is_summed(facts: ParameterFacts) -> bool:
    partition = facts.partition
    shared = partition is not None and len(set(partition.ranges)) < len(partition.ranges)
    return facts.partial or shared
