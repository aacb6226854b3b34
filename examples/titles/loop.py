"""The training loop of pretraining and of fine-tuning, and its state in checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from data import IGNORED
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import Accelerator

WARMUP_STEPS = 20
MAX_NORM = 1.0


class Parts(NamedTuple):
    """The prepared objects of a training."""

    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any


@dataclass(slots=True)
class Course:
    """How far a training has come; part of every checkpoint.

    Attributes:
        step: optimizer steps taken.
        best: lowest held-out loss so far.
        stale: validations since then.
        seconds: time of the steps, without validations.
        sent: bytes that this rank sent in the steps.
        memory: most bytes of this rank's process, or of its device, after a step.
    """

    step: int = 0
    best: float = math.inf
    stale: int = 0
    seconds: float = 0.0
    sent: int = 0
    memory: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Return a schedule that rises for some steps, and falls to a tenth along a cosine."""

    def factor(step: int) -> float:
        falling = 0.55 + 0.45 * math.cos(math.pi * min(step / max(steps, 1), 1.0))
        return min((step + 1) / WARMUP_STEPS, falling)

    return LambdaLR(optimizer, factor)


def optimizer_steps(
    accelerator: Accelerator, parts: Parts, course: Course
) -> Iterator[Callable[[], float]]:
    """Train without an end, and yield after each optimizer step.

    Yields:
        A function for the mean loss over the batches of all ranks; collective.
    """
    model, optimizer, scheduler, loader = parts
    while True:
        for batch in loader:
            started, sent = time.perf_counter(), accelerator.traffic.total()
            counted = (batch["labels"] != IGNORED).sum()
            with accelerator.accumulate(model):
                loss = model(**batch, use_cache=False).loss
                # Ranks have batches with more and with fewer tokens: each token counts alike.
                accelerator.backward(loss, weight=counted)
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            course.seconds += time.perf_counter() - started
            course.sent += accelerator.traffic.total() - sent
            newest = accelerator.report.latest()
            if newest is not None:
                now = newest.memory.get("device_peak", newest.memory.get("resident", 0))
                course.memory = max(course.memory, now)
            if accelerator.sync_gradients:
                course.step += 1
                yield partial(accelerator.metric_mean, loss.detach(), int(counted))
