"""A worker: the ranks that train together, by a strategy of their own.

``Worker`` hands everything to that strategy that ``Local`` does not do itself.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.building import WeightSource
from drivetrain.collectives.digests import Ranks
from drivetrain.errors import ConfigError
from drivetrain.links.chosen import LinkMethods
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.shards import HeldTensors, Reader, Shard, TensorFacts
from drivetrain.strategy import Form, Run, Strategy
from drivetrain_local.options import AXIS, LocalOptions


def run_inside(run: Run, near: Axis) -> Run:
    """Return the run of a worker as the strategy inside of it sees it: nothing beside it."""
    return replace(run, mesh=run.mesh.inside(AXIS, near), links=LinkMethods())


def links_of_workers(run: Run) -> LinkMethods:
    """Return the methods between workers, who exchange after a step: none of it is skipped."""
    return replace(run.links, undoable=False)


def alone(axis: Axis) -> Axis:
    """Return this rank by itself, as the near level of an axis of workers."""
    here = axis.rank
    return Axis(
        name=f"{axis.name}.alone",
        size=1,
        rank=0,
        ranks=axis.ranks[here : here + 1],
        hosts=axis.hosts[here : here + 1],
    )


class Worker(Strategy[LocalOptions]):
    """The methods of a worker that the strategy inside carries out."""

    def __init__(self, config: LocalOptions, run: Run) -> None:
        super().__init__(config, run)
        self._near, self._far = config.started(run.mesh, run.world)
        self._everyone = run.mesh.start_around(AXIS, self._near, run.world)
        self._alone = self._far.size == 1
        kind, options = config.strategy_inside()
        self._inner: Strategy[Any] = kind(options, run_inside(run, self._near))

    @classmethod
    def crosses_links(cls, config: LocalOptions, world: World) -> bool:
        """Return whether there are several workers: on one host, too, if each rank is one."""
        return world.spans_hosts or (config.workers == "ranks" and world.size > 1)

    @classmethod
    def axes(cls, config: LocalOptions, world_size: int) -> Mapping[str, int]:
        """Return the axes of the strategy inside, ``dp`` last and over all workers."""
        return config.axes(world_size)

    @classmethod
    def check_options(cls, config: LocalOptions, precision: Precision) -> None:
        """Refuse late workers with a loss scale; let the strategy inside refuse the rest.

        Raises:
            ConfigError: a loss scale needs all ranks at each step, and workers may be late.
        """
        if config.late_s and precision.compute == torch.float16:
            raise ConfigError(
                "strategy.late_s: expected precision: bf16 or no, found fp16, whose loss scale all "
                "ranks agree on at each step; change one of them"
            )
        kind, options = config.strategy_inside()
        kind.check_options(options, precision)

    @classmethod
    def channels(cls, config: LocalOptions) -> frozenset[str]:
        """Return gradients: the outer ones."""
        return frozenset({"gradients"})

    @classmethod
    def variants(cls, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return none: a trajectory of its own equals no other."""
        return ()

    @classmethod
    def forms(cls, world: World) -> Sequence[Form]:
        """Return the form for hosts that a network connects."""
        return [Form({}, exact=False)] if world.spans_hosts else []

    @classmethod
    def stages(cls, config: LocalOptions) -> Sequence[str]:
        """Return the axes of a pipeline inside of workers."""
        kind, options = config.strategy_inside()
        return kind.stages(options)

    @property
    def forward_is_collective(self) -> bool:
        """Whether the ranks of a worker need each other in a forward."""
        return self._inner.forward_is_collective

    @property
    def draws_masks(self) -> bool:
        """Whether dropout has masks of the inner strategy's own."""
        return self._inner.draws_masks

    @property
    def divides_states(self) -> bool:
        """Whether the ranks of a worker divide the state of its optimizers."""
        return self._inner.divides_states

    @property
    def states_among(self) -> Ranks:
        """The ranks of the worker: each worker's optimizers have a state of their own."""
        return self._near

    def states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        """Yield this rank's share of the state of the worker's optimizer."""
        return self._inner.states(index, names)

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Replace the state of the worker's optimizer; outer weights stay."""
        self._inner.load_states(index, reader, names)

    def materialize(self, model: nn.Module, source: WeightSource) -> None:
        """Let the strategy inside give the model its values, the same for every worker."""
        self._inner.materialize(model, source)

    def loss(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
    ) -> Tensor:
        """Return the loss of a batch."""
        return self._inner.loss(model, args, kwargs, targets, loss_fn)

    def publish(self, loss: Tensor) -> None:
        """Give ranks of the worker the value of a loss that they did not compute."""
        self._inner.publish(loss)

    def share_outputs(self) -> None:
        """Let training calls return outputs with values on every rank."""
        self._inner.share_outputs()

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the pieces of gradient that this rank's optimizers read."""
        return self._inner.gradients(only)

    def will_scale(self, factor: float) -> None:
        """Tell the strategy inside."""
        self._inner.will_scale(factor)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients at hand."""
        self._inner.scale_gradients(factor)

    def step_decided(self, *, taken: bool) -> None:
        """Tell the strategy inside; outer sums come after the decision."""
        self._inner.step_decided(taken=taken)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the worker's gradients to a norm of at most max_norm; each worker has its own."""
        return self._inner.clip_grad_norm(max_norm, norm_type, only=only)

    @contextmanager
    def uncounted(self, module: nn.Module) -> Iterator[None]:
        """Context around a backward of the worker that counts nothing."""
        with self._inner.uncounted(module):
            yield

    def running(self) -> AbstractContextManager[None]:
        """Context in which a strategy around this one runs the model's forward."""
        return self._inner.running()

    def inference(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context for many forwards, with the worker's own weights."""
        return self._inner.inference(module)

    @property
    def held_tensors(self) -> HeldTensors:
        """The tensors that optimizers hold, and the values of this worker."""
        return self._inner.held_tensors

    def names(self) -> Mapping[int, str]:
        """Return the names of the tensors that optimizers hold, by ``id``."""
        return self._inner.names()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self._inner.unwrap(model)

    def units(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules of this rank's computation in their order."""
        return self._inner.units(module)

    def whereabouts(self, module: nn.Module) -> Mapping[str, str]:
        """Return where tensors lie inside of a worker."""
        return self._inner.whereabouts(module)

    def state_facts(self, module: nn.Module) -> Sequence[TensorFacts]:
        """Describe the tensors of the whole model's state dict."""
        return self._inner.state_facts(module)

    def dtensors(self) -> Mapping[str, Tensor]:
        """Return the shards of the worker's own parameters."""
        return self._inner.dtensors()

    def stand_in(self, *, synchronize: bool) -> None:
        """Take part in a step of this worker; several workers count steps, and cannot."""
        if not self._alone:
            super().stand_in(synchronize=synchronize)
        self._inner.stand_in(synchronize=synchronize)

    def catch_up(self, source: int) -> None:
        """Take over the training state of one rank of the only worker."""
        if not self._alone:
            super().catch_up(source)
        self._inner.catch_up(source)
