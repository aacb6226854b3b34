"""The strategy ``ddp``: replicas that average gradients during backward (Li et al., VLDB 2020)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.collectives import Communicator
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.kept import take_kept
from drivetrain.links.linked import connect_linked, hosts_apart, route_linked
from drivetrain.links.one_bit_adam import check_momentum, frozen_adam, refuse_clipping
from drivetrain.paper.data_parallel import Sharing, data_parallel_step
from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import PaperStep
from drivetrain.paper.work import PaperUnit
from drivetrain.parts.buckets import MIB
from drivetrain.parts.naming import held_parameters, named_parameters
from drivetrain.parts.norms import clip_, global_norm
from drivetrain.parts.replicate import ForwardHook, replicate
from drivetrain.parts.rounds import Rounds
from drivetrain.parts.saved_state import ReplicatedState
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.shards import Reader, Shard
from drivetrain.strategy import Form, Prepared, Run, Strategy
from drivetrain_ddp.config import DdpConfig
from drivetrain_ddp.cost import estimate
from drivetrain_ddp.momentum import MomentumHook
from drivetrain_ddp.reducer import BucketReducer


class Ddp(Strategy[DdpConfig]):
    """Data parallelism over the mesh axis ``dp``; one object per prepared model.

    ``prepare`` returns the very objects it was given: everything happens in hooks.
    """

    summary: ClassVar[str] = "every rank holds the whole model, and gradients are averaged"
    Config: ClassVar[type] = DdpConfig

    def __init__(self, config: DdpConfig, run: Run) -> None:
        super().__init__(config, run)
        far = hosts_apart(run.mesh, "dp", run.world, run.links) is not None
        self._adam = frozen_adam("ddp", config.exchange, run.links, far=far)
        self._hook = MomentumHook(self._adam) if self._adam else config.compression(run.precision)
        self._communicator: Communicator = connect_linked(
            run.mesh, "dp", run.traffic, run.world, run.links
        )
        self.summing = [self._communicator]
        self._alone = self._communicator.size == 1
        self._closing = ExitStack()  # in the opposite order: hooks go before what they call
        self._closing.callback(self._communicator.close)
        if self._adam:
            self._closing.callback(self._adam.close)

    @classmethod
    def axes(cls, config: DdpConfig, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks."""
        return {"dp": world_size}

    @classmethod
    def check_options(cls, config: DdpConfig, precision: Precision) -> None:
        """Refuse masters, which every rank would hold whole, and two compressions."""
        precision.refuse(
            "ddp",
            "param",
            "master",
            instead="convert the model itself, or take a strategy that keeps master copies",
        )
        config.compression(precision)

    @classmethod
    def channels(cls, config: DdpConfig) -> frozenset[str]:
        """Return gradients: parameters are never sent after the start."""
        return frozenset({"gradients"})

    @classmethod
    def changes_links(cls, config: DdpConfig) -> bool:
        """Return True: every channel goes on with methods that are chosen later."""
        return True

    @classmethod
    def check_links(cls, config: DdpConfig, links: LinkMethods, precision: Precision) -> None:
        """Refuse parameters, and gradients that the option ``hook`` compresses, too."""
        super().check_links(config, links, precision)
        if links.gradients is not None and config.hook != "none":
            raise ConfigError(
                f"ddp: expected links.far.gradients or strategy.hook, found both: "
                f"{links.name_for('gradients')} and {config.hook}; leave one of them out"
            )
        if config.exchange == "momentum":
            check_momentum("ddp", links, precision)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make the ranks' parameters and buffers equal to rank 0's and hook into backward."""
        self._model = model
        self._held = tuple(held_parameters(model))
        self._state = ReplicatedState(model, ())
        replicate([*self._held, *model.buffers()], self._communicator, "replicate model")
        parameters = [] if self._alone else list(named_parameters(model).items())
        self._rounds = Rounds(self._before_gradients, self._after_backward)
        self._reducer = BucketReducer(
            parameters, self._communicator, self._hook, self.config, self._rounds
        )
        self._closing.callback(self._reducer.close)
        handle = model.register_forward_pre_hook(ForwardHook(self._before_forward))
        self._closing.callback(handle.remove)
        return Prepared(model, tuple(map(self.bind, optimizers)))

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Save, load and step one more optimizer.

        Raises:
            ConfigError: momenta are exchanged, and the optimizer is no plain Adam or AdamW.
        """
        if self._adam:
            self._adam.check(optimizer)
        self._state.add(optimizer)
        handle = optimizer.register_step_pre_hook(self._before_step)
        self._closing.callback(handle.remove)
        if self._adam:
            self._adam.add(optimizer)
        return optimizer

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, return with averaged gradients."""
        if self._alone or not self._reducer.synchronizing:
            loss.backward(**options)  # type: ignore[no-untyped-call]
            return
        self._reducer.refresh()
        rounds = self._rounds.count
        loss.backward(**options)  # type: ignore[no-untyped-call]
        if self._rounds.count == rounds:
            self._rounds.take_part()  # no parameter got a gradient; other ranks may wait
        else:
            self._rounds.finish()

    def will_scale(self, factor: float) -> None:
        """Let momenta have the factor before they cross."""
        if self._adam:
            self._adam.factor = factor

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the gradients of all parameters, without None."""
        self._rounds.finish()
        for parameter in self._held if only is None else only:
            if parameter.grad is not None:
                yield parameter.grad

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the gradients to a norm of at most max_norm; all ranks have the same ones.

        Raises:
            UsageError: momenta are exchanged.
        """
        refuse_clipping(self._adam)
        gradients = list(self.gradients(only))
        norm = global_norm(gradients, norm_type, device=self.run.world.device)
        clip_(gradients, norm, max_norm)
        return norm

    def shards(self) -> Iterator[Shard]:
        """Yield the tensors that this rank saves; ranks share them out evenly by bytes."""
        yield from self._state.shards(self._communicator.rank, self._communicator.size)
        yield from self._communicator.kept()

    def check_load(self, reader: Reader) -> None:
        """Compare names and shapes."""
        self._state.check(reader)

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Replace the state of an optimizer on every rank."""
        self._state.load_states(index, reader, names)

    def load(self, reader: Reader) -> None:
        """Load everything on every rank, in place."""
        self._state.load(reader)
        self._reducer.open_channels()
        take_kept(self.summing, reader, self.run.links.name_for("gradients"))

    @classmethod
    def cost(cls, config: DdpConfig, model: ModelSpec, run: Run) -> Cost:
        """Return the estimate of ``drivetrain_ddp.cost``."""
        route = route_linked(run.mesh, "dp", run.world, run.links)
        return estimate(config, model, run.precision, route)

    @classmethod
    def step(cls, config: DdpConfig, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Draw whole state on every rank, and one all-reduce per step beside the last backward.

        Raises:
            ConfigError: gradients are compressed, whose time is not drawn.
        """
        if config.hook != "none":
            raise ConfigError(
                f"expected hook: none in a step on paper, found {config.hook}: the time of "
                "compression is not drawn; leave hook out"
            )
        return data_parallel_step(units, run, Sharing(bucket=round(config.bucket_mib * MIB)))

    @classmethod
    def forms(cls, world: World) -> Sequence[Form]:
        """Return gradients as they are, and of low rank where hosts are connected by a network."""
        compressed = [Form({"hook": "powersgd"}, exact=False)] if world.spans_hosts else []
        return [Form(), *compressed]

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Keep gradients local: inside, backward only adds to the buckets."""
        before = self._reducer.synchronizing
        self._reducer.synchronizing = not enabled
        try:
            yield
        finally:
            self._reducer.synchronizing = before

    def stand_in(self, *, synchronize: bool) -> None:
        """Reduce gradients and broadcast buffers as the others do, with zeros."""
        self._before_forward()
        if synchronize:
            zero = torch.zeros((), device=self.run.world.device, requires_grad=True)
            self.backward(zero)

    def catch_up(self, source: int) -> None:
        """Take over parameters, buffers and optimizer state of one rank.

        Raises:
            UsageError: some ranks have optimizer state that others lack.
        """
        tensors = self._state.tensors()
        index = self.run.mesh["dp"].ranks.index(source)
        count = torch.tensor([len(tensors), -len(tensors)], device=self.run.world.device)
        self._communicator.all_reduce(count, reduction="max", label="state of ranks").wait()
        most, least = int(count[0]), -int(count[1])
        if most != least:
            raise UsageError(
                f"expected optimizer state on every rank, found {least} to {most} tensors; give "
                "every rank at least one batch"
            )
        replicate(tensors, self._communicator, "take over state", source=index)

    def close(self) -> None:
        """Take the hooks off and end the communication thread; gradients stay readable."""
        self._closing.close()

    def _before_forward(self) -> None:
        if self._alone or not self._reducer.synchronizing:
            return
        self._rounds.finish()  # a round that an exception in backward cut short
        self._reducer.refresh()

    def _before_gradients(self) -> None:
        self._reducer.begin()

    def _after_backward(self) -> None:
        self._reducer.end()
        if self.config.buffers == "broadcast":  # so that every rank evaluates with the same ones
            replicate(self._model.buffers(), self._communicator, "buffers after backward")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._rounds.finish()
