"""The strategy ``megatron``: a cell of tensor- and pipeline-parallel ranks holds one replica.

The cell's parameters, what is left of the user's model on this rank, are handed to a data-parallel
strategy, which does not know that they are parts.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.log import get_logger
from drivetrain.parts.collectives import connect
from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.norms import clip_, combine_norms
from drivetrain.strategy import Cost, ModelSpec, Prepared, Reader, Run, Shard, Strategy
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.coordinates import GlobalShards, LocalReader
from drivetrain_megatron.facts import ParameterFacts
from drivetrain_megatron.nesting import data_parallel
from drivetrain_megatron.pipeline.examples import example_inputs
from drivetrain_megatron.tensor.model import TensorParallel, cut_states
from drivetrain_megatron.tensor.operators import gathered
from drivetrain_megatron.tensor.plan import models_plan, users_plan
from drivetrain_megatron.tensor.report import describe

logger = get_logger(__name__)


class Megatron(Strategy[MegatronConfig]):
    """Tensor and pipeline parallelism, over data parallelism.

    ``prepare`` returns the very model it was given: its layers compute in parts.
    """

    summary: ClassVar[str] = "ranks share layers (tensor) and blocks (pipeline) of one replica"
    Config: ClassVar[type] = MegatronConfig

    def __init__(self, config: MegatronConfig, run: Run) -> None:
        super().__init__(config, run)
        kind, options = data_parallel(config)
        self._inner: Strategy[Any] = kind(options, run)
        world = run.world
        self._tp, self._pp = (
            connect(run.mesh[name], run.traffic, world.device, world.timeout)
            for name in ("tp", "pp")
        )
        self._tensor: TensorParallel | None = None
        self._facts: dict[str, ParameterFacts] = {}

    @classmethod
    def axes(cls, config: MegatronConfig, world_size: int) -> Mapping[str, int]:
        """Return the axes tp, dp and pp in the configured order."""
        return config.sizes(world_size)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Divide the model over the cell and hand what is left to the data-parallel strategy."""
        self._model = model
        self._facts = {
            name: ParameterFacts(tuple(parameter.shape))
            for name, parameter in named_parameters(model).items()
        }
        if self._tp.size > 1:
            self._facts = self._divide_layers(model)
            by_parameter = {p: self._facts[name] for name, p in named_parameters(model).items()}
            for optimizer in optimizers:
                cut_states(optimizer, by_parameter, self._tp.rank)
        prepared = self._inner.prepare(model, optimizers)
        if self._tensor is not None:
            self._tensor.sum_partial(model, self._facts)
        return prepared

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Let the data-parallel strategy take one more optimizer."""
        return self._inner.bind(optimizer)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, return with gradients averaged over dp."""
        self._inner.backward(loss, **options)

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the pieces of gradient that this rank's optimizers read."""
        return self._inner.gradients(only)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients at hand."""
        self._inner.scale_gradients(factor)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale gradients to a global norm of at most max_norm; what is replicated counts once."""
        counted = [parameter for parameter in self._chosen(only) if self._counts(parameter)]
        mine = self._inner.clip_grad_norm(float("inf"), norm_type, only=counted)
        norm = combine_norms(mine, norm_type, (self._tp, self._pp))
        clip_(list(self._inner.gradients(only)), norm, max_norm)
        return norm

    def shards(self) -> Iterator[Shard]:
        """Yield what this rank saves, in coordinates of the whole model."""
        return GlobalShards(self._facts, self._tp.rank).of(self._inner.shards())

    def load(self, reader: Reader) -> None:
        """Load this cell's parts of a checkpoint of the whole model."""
        names = {**named_parameters(self._model), **persistent_buffers(self._model)}
        self._inner.load(LocalReader(reader, self._facts, names, self._tp.rank))

    @classmethod
    def cost(cls, config: MegatronConfig, model: ModelSpec, run: Run) -> Cost:
        """Return what the data-parallel strategy costs."""
        kind, options = data_parallel(config)
        return kind.cost(options, model, run)

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Context in which backward keeps gradients local to the data-parallel rank."""
        return self._inner.accumulating(enabled)

    def stand_in(self, *, synchronize: bool) -> None:
        """Take part in one step of the other data-parallel ranks."""
        self._inner.stand_in(synchronize=synchronize)

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> Iterator[None]:
        """Context in which these parameters are whole, as in the user's model, on every rank."""
        chosen = list(parameters)
        names = {p: name for name, p in named_parameters(self._model).items()}
        cut = [p for p in chosen if p in names and self._facts[names[p]].partition is not None]
        with self._inner.gathered(chosen, modify=modify):
            local = [(p, p.data, self._facts[names[p]]) for p in cut]
            for parameter, share, facts in local:
                parameter.data = gathered(share, self._tp, _partition(facts))
            try:
                yield
            finally:
                for parameter, share, facts in local:
                    if modify:
                        whole = parameter.data.contiguous()
                        self._tp.broadcast(whole, label="changed parameters").wait()
                        share.copy_(_partition(facts).take(whole, self._tp.rank))
                    parameter.data = share

    def names(self) -> Mapping[int, str]:
        """Return names of what optimizers hold, by identity."""
        return self._inner.names()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self._inner.unwrap(model)

    def close(self) -> None:
        """Take hooks off and end threads; layers stay divided."""
        if self._tensor is not None:
            self._tensor.close()
        self._inner.close()
        self._tp.close()
        self._pp.close()

    def _divide_layers(self, model: nn.Module) -> dict[str, ParameterFacts]:
        own = users_plan(model, self.config.plan) if self.config.plan else None
        self._tensor = TensorParallel(
            self._tp,
            sequence_parallel=self.config.sequence_parallel,
            named=own or models_plan(model),
            strict=own is not None,
        )
        inputs = example_inputs(model)
        plan = self._tensor.plan(model, inputs.args, inputs.kwargs)
        before = {name: p.nbytes for name, p in named_parameters(model).items()}
        facts = self._tensor.divide(model, plan)
        for line in describe(plan, facts, before, self._tp.size):
            logger.announce(line)
        return facts

    def _chosen(self, only: Collection[nn.Parameter] | None) -> Iterable[nn.Parameter]:
        return named_parameters(self._model).values() if only is None else only

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter's gradient in the norm: one of those that have it."""
        names = {p: name for name, p in named_parameters(self._model).items()}
        return self._facts[names[parameter]].saves(self._tp.rank)


def _partition(facts: ParameterFacts) -> Any:
    return facts.partition
