"""What all stages of ZeRO do: lay out units, reduce, step what is owned, send it around."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import CollectiveError
from drivetrain.parts.collectives import Communicator, connect
from drivetrain.parts.deferred import WeightSource
from drivetrain.parts.norms import clip_, global_norm
from drivetrain.parts.replicate import ForwardHook, replicate
from drivetrain.shards import Reader, Shard
from drivetrain.strategy import Prepared, Run, Strategy
from drivetrain_zero.binding import Binding, Bound
from drivetrain_zero.config import Zero1Config
from drivetrain_zero.cost import Estimate
from drivetrain_zero.hooks import UnitHook, ZeroGrad, is_compiled
from drivetrain_zero.layout import UnitLayout, plan
from drivetrain_zero.placement import Placement
from drivetrain_zero.reducer import Reducer
from drivetrain_zero.state import ShardedState
from drivetrain_zero.surgery import changes_accepted
from drivetrain_zero.unit import FlatUnit, Slot

ConfigT = TypeVar("ConfigT", bound=Zero1Config)


class Zero(Strategy[ConfigT], Generic[ConfigT]):
    """What all stages do, over the mesh axis ``dp``; one object per prepared model.

    ``prepare`` returns the very objects it was given: parameters become views of flat units, and
    the optimizers' groups hold this rank's fragments of them.
    """

    checks_order: ClassVar[bool] = False
    """Whether ranks could ask for different collectives, because these depend on the forward."""

    def __init__(self, config: ConfigT, run: Run) -> None:
        super().__init__(config, run)
        self._model = nn.Module()  # until there is one
        world = run.world
        self._communicator: Communicator = connect(
            run.mesh["dp"], run.traffic, world.device, world.timeout, checked=self.checks_order
        )
        self._placement = Placement(
            self._communicator, run.precision, config.cut, config.places, world.device
        )
        self._handles: list[RemovableHandle] = []
        self._reducer = self._make_reducer([])
        self._binding = Binding(
            self._placement.slots,
            whole_parameters=config.partition == "parameter",
            fused=config.fused,
            before_step=self._before_step,
            after_step=self._after_step,
            clear=self._forget,
        )

    @classmethod
    def axes(cls, config: ConfigT, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks."""
        return {"dp": world_size}

    # --- taking over ---

    def materialize(self, model: nn.Module, source: WeightSource) -> None:
        """Remember where the values come from: units ask for them one by one."""
        self._placement.remember(model, source)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Lay the model out in units and give the optimizers this rank's fragments."""
        self._model = model
        for optimizer in optimizers:
            self._binding.check(optimizer)
        self._reducer = self._make_reducer(self._plan(self.config, ModelSpec.of(model), self.run))
        self._reducer.add(self._placement.lay_out(model))
        for optimizer in optimizers:
            self._binding.add(optimizer)
        self._handles.append(model.register_forward_pre_hook(ForwardHook(self._before_forward)))
        if is_compiled(model):  # a compiled forward does not ask the parameters' guards
            self._handles.append(model.register_forward_pre_hook(UnitHook(self._before_compiled)))
        model.__dict__["zero_grad"] = ZeroGrad(model, self._clear)
        return Prepared(model, tuple(optimizers))

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Give one more optimizer its fragments."""
        self._binding.check(optimizer)
        self._binding.add(optimizer)
        return optimizer

    def _make_reducer(self, layouts: Sequence[UnitLayout]) -> Reducer:
        lent = self.config.lent_buffers
        return Reducer(
            self._communicator,
            self.run.precision,
            self.run.world.device,
            in_flight=lent,
            pool_bytes=Estimate.of(layouts, self.run).lent_bytes() if lent else 0,
            at_end=self._after_round,
        )

    # --- the step ---

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless gradients stay local, return with this rank's range of them."""
        rounds = self._reducer.rounds
        if not self._reducer.synchronizing:
            loss.backward(**options)  # type: ignore[no-untyped-call]
            return
        self._refresh()
        before = rounds.count
        loss.backward(**options)  # type: ignore[no-untyped-call]
        if rounds.count == before:
            rounds.take_part()  # the loss reached no parameter here; others may wait
        else:
            rounds.finish()

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the gradients of this rank's fragments."""
        self._reducer.rounds.finish()
        yield from self._placement.gradients(only)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the fragments' gradients, and those that wait in the buffers."""
        super().scale_gradients(factor)
        self._reducer.scale(factor)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the gradients to a norm of at most max_norm: one number crosses the wire."""
        gradients = list(self.gradients(only))
        over = [self._communicator] if self._communicator.size > 1 else []
        norm = global_norm(gradients, norm_type, over=over, device=self.run.world.device)
        clip_(gradients, norm, max_norm)
        return norm

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Keep gradients local inside, unless every micro-batch's gradients are reduced."""
        return nullcontext() if self.config.reduces_each else self._local(enabled)

    @contextmanager
    def _local(self, enabled: bool) -> Iterator[None]:
        before = self._reducer.synchronizing
        self._reducer.synchronizing = not enabled
        try:
            yield
        finally:
            self._reducer.synchronizing = before

    def _before_forward(self) -> None:
        if not self._reducer.synchronizing:
            return
        self._reducer.rounds.finish()  # what an exception in backward cut short
        self._refresh()
        if self.config.buffers == "broadcast":
            replicate(self._model.buffers(), self._communicator, "buffers before forward")

    def _refresh(self) -> None:
        """Follow changes of ``requires_grad``; every rank must make the same ones."""
        thawed = self._placement.follow()
        if thawed:
            self._reducer.add(thawed)
        self._reducer.refresh()

    def _before_step(self) -> None:
        self._reducer.rounds.finish()

    def _forget(self, slots: Iterable[Slot]) -> None:
        self._reducer.rounds.finish()  # what an exception cut short must not come after this
        self._reducer.forget(slots)

    def _after_round(self) -> None:
        """Do what the stage does when a backward is over."""

    def _after_step(self, bound: Bound) -> None:
        """Send the updated ranges around, in the order in which forward will need them."""
        touched = bound.units
        for unit in reversed(self._placement.units):
            if unit.resident and unit in touched and unit.moves:
                unit.arrive()
                unit.start()

    def _before_compiled(self, module: nn.Module, inputs: Any) -> None:
        self._arrive()

    def _arrive(self) -> None:
        for unit in self._placement.units:
            unit.arrive()

    def _clear(self, set_to_none: bool) -> None:
        self._reducer.rounds.finish()
        self._reducer.forget()
        self._placement.clear_gradients(set_to_none=set_to_none)

    # --- state ---

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's range of every parameter and of its optimizer state."""
        return self._state().shards()

    def load(self, reader: Reader) -> None:
        """Load this rank's ranges; those of the others arrive by an all-gather."""
        self._arrive()
        self._state().load(reader)
        for unit in self._placement.units:
            if unit.resident:
                unit.start()
        self._arrive()

    def names(self) -> Mapping[int, str]:
        """Return the parameter's name of every fragment, by identity."""
        return {
            id(slot.fragment): slot.name for slot in self._placement if slot.fragment is not None
        }

    def _state(self) -> ShardedState:
        slots = {slot.name: slot for slot in self._placement}
        held = [(bound.optimizer, list(bound.slots)) for bound in self._binding]
        return ShardedState(self._model, slots, held, self._communicator.rank)

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> Iterator[None]:
        """Keep parameters whole; with ``modify``, rank 0's changes become everybody's."""
        units = self._placement.units_of(parameters)
        changes = changes_accepted(units, self._communicator) if modify else nullcontext()
        with self._holding(units), changes:
            yield

    @contextmanager
    def _holding(self, units: Sequence[FlatUnit]) -> Iterator[None]:
        for unit in units:
            unit.arrive()
        yield

    # --- accounts ---

    @classmethod
    def _plan(cls, config: ConfigT, model: ModelSpec, run: Run) -> list[UnitLayout]:
        specs = [spec for spec in model.parameters if config.places(spec)]
        return plan(specs, run.precision, config.cut, run.mesh["dp"].size)

    @classmethod
    def cost(cls, config: ConfigT, model: ModelSpec, run: Run) -> Cost:
        """Return what ``drivetrain_zero.cost`` works out."""
        estimate = Estimate.of(cls._plan(config, model, run), run)
        lent = config.lent_buffers
        sent = estimate.sent(
            model,
            forwards=run.accumulation,
            reductions=run.accumulation if config.reduces_each else 1,
            regathered_over=config.regathered_over(run.mesh),
            spared=config.spared,
            buffers=config.buffers == "broadcast",
        )
        return Cost(held=estimate.held(model, lent_buffers=lent), sent=sent)

    def close(self) -> None:
        """Take everything off; parameters that are whole become ordinary ones."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._model.__dict__.pop("zero_grad", None)
        self._binding.close()
        self._reducer.close()
        try:
            self._arrive()
        except CollectiveError:
            return  # a rank failed: what did not arrive stays guarded
        finally:
            self._communicator.close()
