"""What strategies over units have in common: lay out, reduce, step what is owned, send around."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.building import WeightSource
from drivetrain.collectives import connect
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.errors import CollectiveError, StorageError
from drivetrain.parts.naming import named_parameters
from drivetrain.parts.replicate import ForwardHook, replicate
from drivetrain.sharding.accounts import Accounted, ConfigT
from drivetrain.sharding.binding import Binding, Bound
from drivetrain.sharding.hooks import UnitHook, ZeroGrad, is_compiled
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.offload import Offload
from drivetrain.sharding.owned import OwnedGradients
from drivetrain.sharding.placement import Placement
from drivetrain.sharding.ranks import Ranks
from drivetrain.sharding.reducer import Reducer
from drivetrain.sharding.slot import Slot
from drivetrain.sharding.state import ShardedState
from drivetrain.sharding.surgery import changes_accepted
from drivetrain.sharding.tiers import plan_of
from drivetrain.sharding.unit import Unit
from drivetrain.shards import Reader, Shard
from drivetrain.strategy import Prepared, Run


class UnitsStrategy(Accounted[ConfigT], Generic[ConfigT]):
    """What strategies over units do, over the mesh axis ``dp``; one object per prepared model.

    ``prepare`` returns the very objects it was given: parameters become views of units, and the
    optimizers' groups hold this rank's fragments of them.
    """

    def __init__(self, config: ConfigT, run: Run) -> None:
        super().__init__(config, run)
        self._model = nn.Module()  # until there is one
        self._offload = Offload(config.offload, run.world.device)  # may refuse its options
        self._ranks = self._connect()
        self._placement = Placement(
            self._ranks,
            self._plan_units,
            config.places,
            run.world.device,
            lambda: self._offload.parameters,
        )
        self._handles: list[RemovableHandle] = []
        # Replicas own the same once more.
        sharing, device = self._ranks.sharing, run.world.device
        self._gradients = OwnedGradients(
            self._placement, self._offload, lambda: self._reducer, sharing, device
        )
        self._reducer = self._make_reducer([])
        self._binding = Binding(
            self._placement.slots, cut=config.cut, fused=config.fused, watch=self
        )

    def _plan_units(
        self, specs: Sequence[TensorSpec], devices: Sequence[Hashable] | None = None
    ) -> list[UnitLayout]:
        spec = ModelSpec(tuple(specs), module=self._model)
        return self.plan(self.config, spec, self.run, devices)

    def _connect(self) -> Ranks:
        world, axis = self.run.world, self.run.mesh["dp"]
        return Ranks.all_sharing(connect(axis, self.run.traffic, world.device, world.timeout))

    # --- taking over ---

    def materialize(self, model: nn.Module, source: WeightSource) -> None:
        """Remember where the values come from: units ask for them one by one."""
        self._placement.remember(model, source)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Lay the model out in units and give the optimizers this rank's fragments."""
        self._model = model
        for optimizer in optimizers:
            self._binding.check(optimizer)
        specs = [TensorSpec.of(name, p) for name, p in named_parameters(model).items()]
        units = self._plan_units(specs)
        self._reducer = self._make_reducer(units)
        if self._offload.active:
            rank, lent = self._ranks.sharing.rank, self._lent_bytes(units)
            plan = plan_of(model, optimizers, units, self.run, rank=rank, lent=lent)
            self._offload.announce(plan, self.run)
        self._add(self._placement.lay_out(model))
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
            self._ranks,
            self.run.precision,
            self.run.world.device,
            in_flight=lent,
            pool_bytes=self._lent_bytes(layouts) // lent if lent else 0,
            make_way=self._gradients.make_way,
            at_end=self._after_round,
        )

    def _lent_bytes(self, layouts: Sequence[UnitLayout]) -> int:
        lent = self.config.lent_buffers
        return lent * self.estimate(self.config, layouts, self.run).lent_bytes() if lent else 0

    def _add(self, units: Sequence[Unit]) -> None:
        self._offload.choose(units)
        self._reducer.add(units)

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
        yield from self._gradients.read(only)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the fragments' gradients, and those that wait in the buffers."""
        self._gradients.scale(factor)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the gradients to a norm of at most max_norm: one number crosses the wire."""
        return self._gradients.clip(max_norm, norm_type, only)

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Keep gradients local inside, or where they are reduced each time, from replicas only."""
        if self.config.reduces_each and self._ranks.replicas is None:
            return nullcontext()
        return self._reducer.accumulating(enabled, reducing=self.config.reduces_each)

    def _before_forward(self) -> None:
        if not self._reducer.synchronizing:
            return
        self._reducer.rounds.finish()  # what an exception in backward cut short
        self._refresh()
        if self.config.buffers == "broadcast":
            replicate(self._model.buffers(), self._ranks.everyone, "buffers before forward")

    def _refresh(self) -> None:
        """Follow changes of ``requires_grad``; every rank must make the same ones."""
        if thawed := self._placement.follow():
            self._add(thawed)
        self._reducer.refresh()

    def bound(self, bound: Bound) -> None:
        """Let a store keep what an optimizer would."""
        self._offload.adopt(bound)

    def before_step(self, bound: Bound) -> None:
        """Submit the step of what stores keep."""
        self._reducer.rounds.finish()
        self._offload.submit(bound)

    def cleared(self, slots: Iterable[Slot], *, set_to_none: bool) -> None:
        """Drop gradients of micro-batches that were not sent, too."""
        self._gradients.forget(list(slots), set_to_none=set_to_none)

    def _after_round(self) -> None:
        """Do what the strategy does when a backward is over."""

    def after_step(self, bound: Bound) -> None:
        """Send the updated ranges around, in the order in which forward will need them."""
        self._offload.give_back(bound, self._reducer.give_away)
        self._placement.send_around(bound.units)

    def _before_compiled(self, module: nn.Module, inputs: Any) -> None:
        self._arrive()

    def _arrive(self) -> None:
        for unit in self._placement.units:
            unit.arrive()

    def _clear(self, set_to_none: bool) -> None:
        self._gradients.forget(None, set_to_none=set_to_none)
        self._placement.clear_gradients(set_to_none=set_to_none)

    # --- state ---

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's range of every parameter and of its optimizer state."""
        self._settle()
        return self._state().shards()

    def load(self, reader: Reader) -> None:
        """Load this rank's ranges; those of the others arrive by an all-gather."""
        self._arrive()
        self._settle()
        self._offload.drop_late()
        self._state().load(reader)
        for unit in self._placement.units:
            if unit.resident:
                unit.start()
        self._arrive()

    def _settle(self) -> None:
        for unit in self._placement.units:
            unit.settle()

    def names(self) -> Mapping[int, str]:
        """Return the parameter's name of every fragment, by identity."""
        return {
            id(slot.fragment): slot.name for slot in self._placement if slot.fragment is not None
        }

    def _state(self) -> ShardedState:
        slots = {slot.name: slot for slot in self._placement}
        held = [(bound.optimizer, list(bound.slots)) for bound in self._binding]
        return ShardedState(self._model, slots, held, self._ranks)

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> Iterator[None]:
        """Keep parameters whole; with ``modify``, rank 0's changes become everybody's."""
        self._settle()
        if modify and self._offload.late:
            self._take_over_late()  # changes come on top of what is newest
        units = self._placement.units_of(parameters)
        changes = changes_accepted(units, self._ranks.everyone) if modify else nullcontext()
        with self._holding(units), changes:
            yield

    def _take_over_late(self) -> None:
        self._offload.take_over_late()
        self._placement.send_around(self._placement.units)

    @contextmanager
    def _holding(self, units: Sequence[Unit]) -> Iterator[None]:
        for unit in units:
            unit.arrive()
        yield

    def close(self) -> None:
        """Take everything off; parameters that are whole become ordinary ones.

        Where a rank or a store failed, what did not arrive stays guarded.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._model.__dict__.pop("zero_grad", None)
        self._binding.close()
        self._reducer.close()
        try:
            self._arrive()
            self._settle()
        except (CollectiveError, StorageError):
            return
        finally:
            self._ranks.close()
            self._offload.close()
