"""Data parallelism with whole state on every rank: all of a strategy's contract but the average.

One synchronised backward is a round (``drivetrain.parts.rounds``)::

    first gradient      begin()
    each gradient       gradient_came(parameter): may send what is complete, while backward goes on
    end of backward     average(): sends the rest, and waits; then rank 0's buffers replace the
                        others', so that every rank evaluates with the same ones

A subclass says how gradients are averaged, and what that costs.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import UsageError
from drivetrain.links.linked import connect_linked
from drivetrain.parts.naming import held_parameters
from drivetrain.parts.norms import clip_, global_norm
from drivetrain.parts.replicate import ForwardHook, replicate
from drivetrain.parts.rounds import Rounds, on_gradient
from drivetrain.parts.saved_state import ReplicatedState
from drivetrain.shards import Reader, Shard
from drivetrain.strategy import Prepared, Run, Strategy

ConfigT = TypeVar("ConfigT")

_ADAM_STATES = 2
"""An optimizer with this many states is Adam, which also counts steps per parameter."""


class ReplicatedStrategy(Strategy[ConfigT], Generic[ConfigT]):
    """Whole models over the mesh axis ``dp``; one object per prepared model.

    ``prepare`` returns the very objects it was given: everything happens in hooks.

    Attributes:
        model: the user's model.
        parameters: its parameters, each once.
        ranks: the axis, whose collectives are counted.
        rounds: the synchronised backwards.
        state: what ranks save.
        closing: takes off what was made, the latest first.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    state: ReplicatedState

    def __init__(self, config: ConfigT, run: Run) -> None:
        super().__init__(config, run)
        self.ranks = connect_linked(run.mesh, "dp", run.traffic, run.world, run.links)
        self.rounds = Rounds(self.begin, self.after_backward)
        self.closing = ExitStack()
        self.closing.callback(self.ranks.close)
        self._hooked: dict[nn.Parameter, RemovableHandle] = {}

    @classmethod
    def axes(cls, config: ConfigT, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks."""
        return {"dp": world_size}

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make the ranks' parameters and buffers equal to rank 0's and hook into backward."""
        self.model = model
        self.parameters = tuple(held_parameters(model))
        self.state = ReplicatedState(model, ())
        replicate([*self.parameters, *model.buffers()], self.ranks, "replicate model")
        if self.ranks.size > 1:
            self.closing.callback(self._let_go)
            self.follow()
            handle = model.register_forward_pre_hook(ForwardHook(self.before_forward))
            self.closing.callback(handle.remove)
        return Prepared(model, tuple(map(self.bind, optimizers)))

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Save, load and step one more optimizer."""
        self.state.add(optimizer)
        handle = optimizer.register_step_pre_hook(lambda *_: self.rounds.finish())
        self.closing.callback(handle.remove)
        return optimizer

    # --- one step, in its order ---

    def before_forward(self) -> None:
        """End a round that an exception in backward cut short, and see who trains now."""
        if self.rounds.synchronizing:
            self.rounds.finish()
            self.follow()

    def follow(self) -> None:
        """Follow changes of ``requires_grad``, which must be the same on every rank."""
        for parameter in self.parameters:
            if parameter.requires_grad is (parameter in self._hooked):
                continue
            if parameter in self._hooked:
                self._hooked.pop(parameter).remove()
            else:
                self._hooked[parameter] = on_gradient(parameter, self._hook_of(parameter))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, return with averaged gradients."""
        if self.ranks.size == 1 or not self.rounds.synchronizing:
            loss.backward(**options)  # type: ignore[no-untyped-call]
            return
        self.follow()
        rounds = self.rounds.count
        loss.backward(**options)  # type: ignore[no-untyped-call]
        if self.rounds.count == rounds:
            self.rounds.take_part()  # no parameter got a gradient; other ranks may wait
        else:
            self.rounds.finish()

    def _hook_of(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def came(_: Tensor) -> None:
            if self.rounds.synchronizing:
                self.rounds.enter()
                self.gradient_came(parameter)

        return came

    def _let_go(self) -> None:
        self.rounds.give_up()
        for handle in self._hooked.values():
            handle.remove()

    def begin(self) -> None:
        """Begin a round; by default there is nothing to make ready."""

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """Take a gradient that autograd has accumulated; by default wait for the others."""

    @abstractmethod
    def average(self) -> None:
        """End a round: every parameter's gradient is the mean over the ranks.

        A gradient that some ranks lack counts as zeros; one that all ranks lack stays None, so that
        no momentum moves the parameter. All ranks must send in the same order.
        """

    def after_backward(self) -> None:
        """Average, and let buffers follow rank 0's."""
        self.average()
        replicate(self.model.buffers(), self.ranks, "buffers after backward")

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Keep gradients local inside."""
        before, self.rounds.synchronizing = self.rounds.synchronizing, not enabled
        try:
            yield
        finally:
            self.rounds.synchronizing = before

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the gradients of all parameters, without None."""
        self.rounds.finish()
        chosen = self.parameters if only is None else only
        return (parameter.grad for parameter in chosen if parameter.grad is not None)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the gradients to a norm of at most max_norm; all ranks have the same ones."""
        gradients = list(self.gradients(only))
        norm = global_norm(gradients, norm_type, device=self.run.world.device)
        clip_(gradients, norm, max_norm)
        return norm

    # --- state ---

    def shards(self) -> Iterator[Shard]:
        """Yield the tensors that this rank saves; ranks share them out evenly by bytes."""
        return self.state.shards(self.ranks.rank, self.ranks.size)

    def check_load(self, reader: Reader) -> None:
        """Compare names and shapes."""
        self.state.check(reader)

    def load(self, reader: Reader) -> None:
        """Load everything on every rank, in place."""
        self.state.load(reader)

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Replace the state of an optimizer on every rank."""
        self.state.load_states(index, reader, names)

    def stand_in(self, *, synchronize: bool) -> None:
        """Reduce gradients and broadcast buffers as the others do, with zeros."""
        self.before_forward()
        if synchronize:
            zero = torch.zeros((), device=self.run.world.device, requires_grad=True)
            self.backward(zero)

    def catch_up(self, source: int) -> None:
        """Take over parameters, buffers and optimizer state of one rank.

        Raises:
            UsageError: some ranks have optimizer state that others lack.
        """
        tensors = self.state.tensors()
        index = self.run.mesh["dp"].ranks.index(source)
        count = torch.tensor([len(tensors), -len(tensors)], device=self.run.world.device)
        self.ranks.all_reduce(count, reduction="max", label="state of ranks").wait()
        most, least = int(count[0]), -int(count[1])
        if most != least:
            raise UsageError(
                f"expected optimizer state on every rank, found {least} to {most} tensors; give "
                "every rank at least one batch"
            )
        replicate(tensors, self.ranks, "take over state", source=index)

    def close(self) -> None:
        """Take the hooks off and end the communication thread; gradients stay readable."""
        self.closing.close()

    @staticmethod
    def whole(
        model: ModelSpec, sent: Mapping[tuple[str, str], int], gradients: int | None = None
    ) -> Cost:
        """Return the cost of whole state.

        Args:
            model: parameters, buffers and states.
            sent: bytes that rank 0 sends per step by (axis, operation).
            gradients: bytes of gradients, and of what is held to average them; None: the former.
        """
        trainable = [spec for spec in model.parameters if spec.trainable]
        trained = sum(spec.nbytes for spec in trainable)
        steps = 4 * len(trainable) if model.states >= _ADAM_STATES else 0
        return Cost(
            held={
                "parameters": sum(spec.nbytes for spec in model.parameters),
                "gradients": trained if gradients is None else gradients,
                "optimizer": model.states * trained + steps,
                "buffers": sum(spec.nbytes for spec in model.buffers),
            },
            sent={key: nbytes for key, nbytes in sent.items() if nbytes},
        )
