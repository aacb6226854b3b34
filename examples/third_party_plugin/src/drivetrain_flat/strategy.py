"""Averages all gradients of one dtype with one all-reduce when backward has ended."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import Cost, ModelSpec, Prepared, Reader, Run, Shard, Strategy, option
from drivetrain.collectives import connect, sent_elements
from drivetrain.paper.data_parallel import data_parallel_step
from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import PaperStep, PaperTask
from drivetrain.paper.work import Collective, PaperUnit
from drivetrain.parts.norms import clip_, global_norm
from drivetrain.parts.replicate import replicate
from drivetrain.parts.rounds import on_gradient
from drivetrain.parts.saved_state import ReplicatedState


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatConfig:
    """The knobs of ``flat``: the wizard asks for those with a question."""

    mean: bool = option(
        True,
        help="True averages gradients over ranks, False sums them.",
        question="Average gradients over ranks?",
    )


class Flat(Strategy[FlatConfig]):
    """One object per prepared model; ``prepare`` returns the very objects it was given."""

    summary: ClassVar[str] = "one all-reduce of all gradients after backward (example plugin)"
    Config: ClassVar[type] = FlatConfig

    def __init__(self, config: FlatConfig, run: Run) -> None:
        super().__init__(config, run)
        # What a strategy does not honour it refuses: nothing may be ignored silently.
        run.precision.refuse(
            "flat", "param", "reduce", "master", instead="leave it out, or take another strategy"
        )
        world = run.world
        self._axis = connect(run.mesh["dp"], run.traffic, world.device, world.timeout)
        self._synchronizing = True
        self._pending = False
        self._hooks: list[Any] = []

    @classmethod
    def axes(cls, config: FlatConfig, world_size: int) -> Mapping[str, int]:
        """Ask for one axis over all ranks."""
        return {"dp": world_size}

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Make the ranks equal, and settle gradients at the latest before a step."""
        self._model = model
        self._state = ReplicatedState(model, optimizers)
        replicate([*model.parameters(), *model.buffers()], self._axis, "replicate model")
        self._hooks = [o.register_step_pre_hook(lambda *_: self._settle()) for o in optimizers]
        self._hooks += [on_gradient(p, self._note) for p in model.parameters() if p.requires_grad]
        return Prepared(model, tuple(optimizers))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward, then average; also when the loss reaches no parameter on this rank."""
        loss.backward(**options)
        if self._synchronizing:
            self._pending = True
            self._settle()

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield every gradient there is."""
        self._settle()
        chosen = self._model.parameters() if only is None else only
        return (p.grad for p in chosen if p.grad is not None)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Clip; every rank has the whole gradients, so nothing is sent."""
        self._settle()
        chosen = list(self._model.parameters()) if only is None else list(only)
        pieces = [p.grad for p in chosen if p.grad is not None]
        norm = global_norm(pieces, norm_type, device=self.run.world.device)
        clip_(pieces, norm, max_norm)
        return norm

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's share of the replicated state."""
        return self._state.shards(self._axis.rank, self._axis.size)

    def load(self, reader: Reader) -> None:
        """Load all of it on every rank."""
        self._state.load(reader)

    @classmethod
    def cost(cls, config: FlatConfig, model: ModelSpec, run: Run) -> Cost:
        """Return the bytes of the formulas in the module's docstring."""
        size = run.mesh["dp"].size
        trainable = [spec for spec in model.parameters if spec.trainable]
        elements: dict[torch.dtype, int] = defaultdict(int)
        for spec in trainable:
            elements[spec.dtype] += spec.numel
        buffers = sum(spec.nbytes for spec in model.buffers)
        sent = {
            ("dp", "all_reduce"): sent_elements("all_reduce", len(trainable), size=size)
            + sum(
                sent_elements("all_reduce", numel, size=size) * dtype.itemsize
                for dtype, numel in elements.items()
            ),
            ("dp", "broadcast"): sent_elements("broadcast", buffers, size=size),
        }
        held = sum(spec.nbytes for spec in trainable)
        return Cost(
            held={
                "parameters": sum(spec.nbytes for spec in model.parameters),
                "gradients": held,
                "optimizer": model.states * held,
                "buffers": buffers,
            },
            sent={key: count for key, count in sent.items() if count},
        )

    @classmethod
    def step(cls, config: FlatConfig, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Draw the step on paper: one all-reduce of all gradients, behind the last backward."""
        step = data_parallel_step(units, replace(run, axes={**run.axes, "dp": 1}))
        nbytes = sum(unit.elements for unit in units) * run.bytes.gradient
        message = Collective("dp", "all_reduce", nbytes)  # beside nothing
        *computed, update = step.tasks
        average = PaperTask("average", (message,), during=nbytes)  # in a flat copy
        return PaperStep([*computed, average, update], step.held, run.axes)

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Iterator[None]:
        """Leave gradients local while inside."""
        before, self._synchronizing = self._synchronizing, not enabled
        try:
            yield
        finally:
            self._synchronizing = before

    def close(self) -> None:
        """Take the hooks off and end the communicator."""
        for hook in self._hooks:
            hook.remove()
        self._axis.close()

    def _note(self, parameter: Tensor) -> None:
        """Remember that gradients changed: a script may call ``loss.backward()`` itself."""
        self._pending = self._pending or self._synchronizing

    def _settle(self) -> None:
        if not self._pending or self._axis.size == 1:
            return
        self._pending = False
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        if not trainable:
            return
        device = trainable[0].device
        used = torch.tensor(
            [p.grad is not None for p in trainable], dtype=torch.uint8, device=device
        )
        self._axis.all_reduce(used, reduction="max", label="flags").wait()
        groups: dict[torch.dtype, list[tuple[nn.Parameter, bool]]] = defaultdict(list)
        for parameter, flag in zip(trainable, used.tolist(), strict=True):
            groups[parameter.dtype].append((parameter, bool(flag)))
        for members in groups.values():
            self._average(members)
        # Statistics of batches differ; with those of rank 0 every rank evaluates alike.
        replicate(self._model.buffers(), self._axis, "buffers")

    def _average(self, members: Sequence[tuple[nn.Parameter, bool]]) -> None:
        """Reduce the gradients of one dtype; a gradient missing on all ranks stays None.

        Args:
            members: parameters, and whether any rank has a gradient for it.
        """
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p, _ in members]
        )
        scale = 1 / self._axis.size if self.config.mean else 1.0
        self._axis.all_reduce(flat, scale=scale, label="gradients").wait()
        pieces = flat.split([parameter.numel() for parameter, _ in members])
        for (parameter, used), piece in zip(members, pieces, strict=True):
            average = piece.view(parameter.shape)
            if parameter.grad is not None:
                parameter.grad.copy_(average)
            elif used:
                parameter.grad = torch.empty_like(parameter).copy_(average)
