"""The strategy ``plain``: gathers and averages gradients parameter by parameter, in rank order."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.collectives import connect, sent_elements
from drivetrain.cost import Cost, ModelSpec
from drivetrain.parts.naming import held_parameters
from drivetrain.parts.norms import clip_, global_norm
from drivetrain.parts.replicate import replicate
from drivetrain.parts.rounds import on_gradient
from drivetrain.parts.saved_state import ReplicatedState
from drivetrain.runtime.precision import Precision
from drivetrain.shards import Reader, Shard
from drivetrain.strategy import Prepared, Run, Strategy

_ADAM_STATES = 2
"""An optimizer with this many states is Adam, which also counts steps per parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainConfig:
    """``plain`` has no options: there is one definition."""


class Plain(Strategy[PlainConfig]):
    """Whole models over the mesh axis ``dp``; one object per prepared model."""

    summary: ClassVar[str] = "whole models, gradients averaged one by one, the reference of verify"
    Config: ClassVar[type] = PlainConfig

    def __init__(self, config: PlainConfig, run: Run) -> None:
        super().__init__(config, run)
        world = run.world
        self._ranks = connect(run.mesh["dp"], run.traffic, world.device, world.timeout)
        self._synchronizing = True
        self._pending = False
        self._handles: list[Any] = []

    @classmethod
    def axes(cls, config: PlainConfig, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks."""
        return {"dp": world_size}

    @classmethod
    def check_options(cls, config: PlainConfig, precision: Precision) -> None:
        """Refuse every dtype beside that of the parameters."""
        precision.refuse(
            "plain", "param", "reduce", "master", instead="leave it out, or take another strategy"
        )

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make parameters and buffers equal to rank 0's."""
        self._model = model
        self._state = ReplicatedState(model, ())
        replicate([*held_parameters(model), *model.buffers()], self._ranks, "replicate model")
        self._handles += [
            on_gradient(p, self._note) for p in held_parameters(model) if p.requires_grad
        ]
        return Prepared(model, tuple(map(self.bind, optimizers)))

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Average before this optimizer steps, if nothing has asked for the gradients earlier."""
        self._state.add(optimizer)
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._average()))
        return optimizer

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; unless accumulating, average the gradients."""
        loss.backward(**options)  # type: ignore[no-untyped-call]
        if self._synchronizing:
            self._pending = True  # also where the loss reached no parameter of this rank
            self._average()

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the gradients of all parameters, without None."""
        self._average()
        chosen = held_parameters(self._model) if only is None else only
        return (p.grad for p in chosen if p.grad is not None)

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

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's share of the replicated state."""
        return self._state.shards(self._ranks.rank, self._ranks.size)

    def check_load(self, reader: Reader) -> None:
        """Compare names and shapes."""
        self._state.check(reader)

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Replace the state of an optimizer on every rank."""
        self._state.load_states(index, reader, names)

    def load(self, reader: Reader) -> None:
        """Load everything on every rank."""
        self._state.load(reader)

    @classmethod
    def cost(cls, config: PlainConfig, model: ModelSpec, run: Run) -> Cost:
        """Return the bytes of the formula in the package's docstring."""
        size = run.mesh["dp"].size
        trainable = [spec for spec in model.parameters if spec.trainable]
        whole = sum(spec.nbytes for spec in trainable)
        steps = 4 * len(trainable) if model.states >= _ADAM_STATES else 0
        buffers = sum(spec.nbytes for spec in model.buffers)
        sent = {
            ("dp", "all_gather"): sum(
                sent_elements("all_gather", size * (spec.numel + 1), size=size)
                * spec.dtype.itemsize
                for spec in trainable
            ),
            ("dp", "broadcast"): sent_elements("broadcast", buffers, size=size),
        }
        return Cost(
            held={
                "parameters": sum(spec.nbytes for spec in model.parameters),
                "gradients": whole,
                "optimizer": model.states * whole + steps,
                "buffers": buffers,
            },
            sent={key: nbytes for key, nbytes in sent.items() if nbytes},
        )

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Leave gradients local while inside."""
        before, self._synchronizing = self._synchronizing, not enabled
        try:
            yield
        finally:
            self._synchronizing = before

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._ranks.close()

    def _note(self, parameter: Tensor) -> None:
        """Remember that gradients came: a script may call ``loss.backward()`` itself."""
        self._pending = self._pending or self._synchronizing

    @torch.no_grad()
    def _average(self) -> None:
        if not self._pending or self._ranks.size == 1:
            return
        self._pending = False
        for parameter in held_parameters(self._model):
            if parameter.requires_grad:
                parameter.grad = self._mean(parameter)
        replicate(self._model.buffers(), self._ranks, "buffers after backward")

    def _mean(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the mean of a parameter's gradients over the ranks; None where no rank has one."""
        rows = parameter.new_zeros(self._ranks.size, parameter.numel() + 1)
        if parameter.grad is not None:
            rows[self._ranks.rank, :-1] = parameter.grad.reshape(-1)
            rows[self._ranks.rank, -1] = 1
        self._ranks.all_gather(rows.view(-1), label="gradient").wait()
        if not rows[:, -1].any():
            return None
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros(parameter.numel(), dtype=wide, device=rows.device)
        for row in rows:
            total += row[:-1]
        mean = (total / self._ranks.size).to(rows.dtype).view(parameter.shape)
        if parameter.grad is None:
            return torch.empty_like(parameter).copy_(mean)
        return parameter.grad.copy_(mean)
