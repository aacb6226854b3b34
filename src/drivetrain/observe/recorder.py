"""The record of each optimizer step on one rank; shown live, and the load of slow links.

A step lasts until the next one begins: the script's own work after ``optimizer.step()`` belongs
to the step that it follows. Every moment belongs to one section, or to waiting for other ranks.

The figures of a run while it goes on: in the bar of its loop, and as means for its trackers.

The link between hosts: the bytes of a step and their seconds, and the choice of methods.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.collectives.facts import gather_facts
from drivetrain.compression.automatic import COUNTED, WARM_UP, Sender, settle_links
from drivetrain.cost import Traffic
from drivetrain.facade.exchange import LateNumbers
from drivetrain.facade.prepared import Observer, PreparedModel, RunState
from drivetrain.log import Bar, get_logger
from drivetrain.nested import tensors_in
from drivetrain.observe.figures import StepFigures, StepSums
from drivetrain.observe.trackers import Trackers
from drivetrain.runtime.board import board
from drivetrain.strategy import Run

# --- the record of each optimizer step on one rank ---


class StepClock:
    """Sums up the seconds of each section since the last cut.

    Args:
        traffic: knows the seconds that this process has waited for collectives so far; they do not
            count for the section in which they passed.

    Attributes:
        section: the name of the section at hand; "" before the first one.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._sections: dict[str, float] = {}
        self._marked: tuple[float, dict[str, float]] | None = None
        self.section = ""
        self._cut_at = self._entered_at = time.perf_counter()
        self._waited_at = traffic.waited_s

    def enter(self, section: str) -> None:
        """Leave the section at hand, and enter another one; time before the first is nobody's."""
        now, waited = time.perf_counter(), self._traffic.waited_s
        if self.section:
            # Threads besides the program's own may wait, too: never less than nothing is left.
            passed = max(0.0, now - self._entered_at - (waited - self._waited_at))
            self._sections[self.section] = self._sections.get(self.section, 0.0) + passed
        else:
            self._cut_at = now
        if section != self.section:
            board.enter(section)
        self.section, self._entered_at, self._waited_at = section, now, waited

    def mark(self) -> None:
        """Let the next cut be where the section at hand was entered."""
        if self._marked is None:
            self._marked = self._entered_at, self._sections
            self._sections = {}

    def unmark(self) -> None:
        """Let the next cut be where it is made."""
        if self._marked is not None:
            _, before = self._marked
            added = self._sections.items()
            self._sections = before | {name: before.get(name, 0.0) + each for name, each in added}
            self._marked = None

    def cut(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last cut, in all and by section; the next step begins."""
        if self._marked is None:
            self.enter(self.section or "other")
            self.mark()
        assert self._marked is not None
        (end, sections), self._marked = self._marked, None
        seconds, self._cut_at = end - self._cut_at, end
        return seconds, sections


# --- the recorder ---


MEMORY_PAUSE_S = 0.2
"""The system and an accelerator's allocator are asked for memory no more often: it takes long."""


MOST_LOSSES = 4096
"""Losses of a step that are kept, the newest: without a prepared optimizer no step ends."""


class StepRecorder(Observer):
    """Makes records; does not communicate, and waits for no device.

    Args:
        state: of the run.
        deliver: gets each record, in order; late where numbers come from a device.
        fail: is told what made a record impossible; then there are no more.

    Attributes:
        clock: the sections of the step at hand.
        step: number of the last recorded step.
    """

    def __init__(
        self,
        state: RunState,
        deliver: Callable[[StepFigures], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._state, self._traffic = state, state.run.traffic
        self.clock = StepClock(self._traffic)
        self.step = 0
        self._deliver = deliver
        self._fail = fail
        self._late: deque[tuple[dict[str, Any], LateNumbers, Collection[float]]] = deque()
        self._training: set[int] = set()
        self._loader = 0
        self._stepped = False
        self._fetched: tuple[Mapping[tuple[str, str], int], Mapping[str, float]] | None = None
        self._process = psutil.Process()
        self._memory: dict[str, int] = {}
        self._memory_at = -MEMORY_PAUSE_S
        self._sent: Mapping[tuple[str, str], int] = {}
        self._waits: Mapping[str, float] = {}
        self._pending = (0, 0)
        self._begin()

    def _begin(self) -> None:
        """Forget the values of the step before."""
        self._losses: deque[Tensor] = deque(maxlen=MOST_LOSSES)
        self._weights: deque[float] = deque(maxlen=MOST_LOSSES)
        self._norm: Tensor | None = None
        self._lr: float | Tensor | None = None
        self._own: dict[str, float | Tensor] = {}
        self._arrived = self._samples = self._tokens = self._skipped = 0

    # --- the events ---

    def fetching(self, loader: DataLoader[Any]) -> None:
        """Enter the data section; that of evaluation for a loader that no backward has followed."""
        self._loader = id(loader)
        trains = not self._training or self._loader in self._training
        self.clock.enter("data" if trains else "evaluation")
        if not trains:
            self._stay()
        elif self._stepped and self._fetched is None:
            self.clock.mark()
            self._fetched = self._traffic.sent(), self._traffic.waits()

    def _stay(self) -> None:
        """Stay in the step at hand: the batch that was asked for begins none."""
        self._fetched = None
        self.clock.unmark()

    def exhausted(self) -> None:
        """Leave the section of the loader."""
        self._stay()
        self.clock.enter("other")

    def delivered(self, batch: Any) -> Any:
        """Count a batch, which a backward may follow; its step began when it was asked for."""
        if self.clock.section == "data":
            self.clock.enter("other")
        self._pending = _size(batch)
        return batch

    def handed_over(self, args: Any, kwargs: Mapping[str, Any], targets: Any) -> None:
        """Count a batch that came from no prepared loader; the strategy computes."""
        if self._stepped and self._fetched is None:
            self._pending = (0, 0)  # of an evaluation
        self._turn()
        if self._pending == (0, 0):
            self._pending = _size(kwargs or args)
        self.clock.enter("forward")

    def before_forward(self, entry: PreparedModel) -> None:
        """Enter the forward; that of an evaluation belongs to the step before."""
        if self.clock.section != "evaluation":
            self._turn()
            self.clock.enter("forward")

    def before_backward(self) -> None:
        """Enter the backward."""
        self._turn()
        self.clock.enter("backward")

    def after_backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Keep the loss of a micro-batch; its value is read later."""
        self._losses.append(loss.detach())
        self._weights.append(1.0 if weight is None else float(weight))
        samples, tokens = self._pending
        self._samples, self._tokens = self._samples + samples, self._tokens + tokens
        self._pending = (0, 0)
        if self._loader:
            self._training.add(self._loader)
        self.clock.enter("other")

    def before_update(self) -> None:
        """Enter the section of the optimizer."""
        self.clock.enter("optimizer")

    def clipped(self, norm: Tensor) -> None:
        """Keep the norm; its value is read later."""
        self._norm = norm.detach()

    def after_step(self) -> None:
        """Note the learning rate of the step, and whether it was skipped."""
        self.clock.enter("other")
        optimizers = self._state.optimizers
        self._lr = next((each.param_groups[0].get("lr") for each in optimizers), None)
        self._skipped = int(any(each.step_was_skipped for each in optimizers))
        self._stepped = True

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Context whose time belongs to one section, whatever was there before."""
        before = self.clock.section
        self.clock.enter(name)
        try:
            yield
        finally:
            self.clock.enter(before or "other")

    def add(self, figures: Mapping[str, float | Tensor]) -> None:
        """Add the script's own figures to the step at hand."""
        self._own.update(figures)

    def finish(self) -> None:
        """Deliver the last step, and all that waits for a device."""
        self._stay()
        self._turn()
        self._deliver_all(wait=True)

    # --- the record ---

    def _turn(self) -> None:
        """Complete the record of a step that has ended, where the next one begins."""
        if not self._stepped:
            return
        self._stepped = False
        number = max((each.steps for each in self._state.optimizers), default=self.step + 1)
        if number == self.step:  # another optimizer of the same step
            return
        self.step = number
        try:
            self._record()
        except Exception as error:  # whatever a script gave: its training goes on
            self._late.clear()
            self._fail(error)
        self._begin()
        self._deliver_all(wait=False)

    def _record(self) -> None:
        """Keep the record of the step at hand until its values are there."""
        numbers: dict[tuple[str, Any], float | Tensor | None] = {
            **{("loss", i): loss for i, loss in enumerate(self._losses)},
            **{("own", name): value for name, value in self._own.items()},
            ("step", "grad_norm"): self._norm,
            ("step", "lr"): self._lr,
        }
        late = LateNumbers({key: value for key, value in numbers.items() if value is not None})
        seconds, sections = self.clock.cut()
        sent, waits = self._fetched or (self._traffic.sent(), self._traffic.waits())
        self._fetched = None
        scaler = self._state.scaler
        figures = {  # whose values do not come late
            "step": self.step,
            "time": time.time(),
            "seconds": seconds,
            "sections": sections,
            "waiting": _growth(self._waits, waits),
            "loss_scale": scaler.get_scale() if scaler.enabled else None,
            "samples": self._samples,
            "tokens": self._tokens,
            "skipped": self._skipped,
            "memory": self._measured_memory(),
            "sent": {"/".join(key): count for key, count in _growth(self._sent, sent).items()},
        }
        self._sent, self._waits = sent, waits
        self._late.append((figures, late, self._weights))

    def _deliver_all(self, *, wait: bool) -> None:
        """Deliver the records whose values are there; ``wait`` for the others as well."""
        try:
            while self._late and (wait or self._late[0][1].ready()):
                self._deliver_first()
        except Exception as error:
            self._late.clear()
            self._fail(error)

    def _deliver_first(self) -> None:
        figures, late, weights = self._late.popleft()
        numbers = late.read()
        losses = [numbers["loss", i] for i in range(len(weights))]
        own = {name: value for (kind, name), value in numbers.items() if kind == "own"}
        counts: dict[str, Any] = {
            name: int(own.pop(name)) for name in ("samples", "tokens") if name in own
        }
        self._deliver(
            StepFigures(
                loss=_mean(losses, weights) if any(weights) else None,
                grad_norm=numbers.get(("step", "grad_norm")),
                lr=numbers.get(("step", "lr")),
                own=own,
                **(figures | counts),
            )
        )

    def _measured_memory(self) -> Mapping[str, int]:
        now = time.monotonic()
        if now - self._memory_at >= MEMORY_PAUSE_S:
            self._memory_at = now
            self._memory = {"resident": self._process.memory_info().rss}
            if (device := self._state.world.device).type != "cpu":
                self._memory |= {
                    "device": torch.accelerator.memory_allocated(device),
                    "device_peak": torch.accelerator.max_memory_allocated(device),
                }
        return self._memory


def _mean(losses: Sequence[float], weights: Collection[float]) -> float:
    """Return the weighted mean; what counts nothing may be no number."""
    counted = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return sum(counted) / sum(weights)


def _growth(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return by how much sums have grown; a ledger that was cleared has grown from nothing."""
    growth = {key: count - before.get(key, 0) for key, count in after.items()}
    return {key: each if each > 0 else after[key] for key, each in growth.items() if each}


def _size(batch: Any) -> tuple[int, int]:
    """Return the rows of a batch, and its tokens where it says which of its tensors these are."""
    words = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(words, Tensor) and words.dim():
        return words.shape[0], words.numel()
    first = next((tensor for tensor in tensors_in(batch) if tensor.dim()), None)
    return (0 if first is None else first.shape[0]), 0


# --- the figures of a run while it goes on ---

T = TypeVar("T")

RECORDS = 20
"""Rates are means over so many records: over single steps they jump."""

_MEMORY = {"device": "device", "resident": "memory"}
"""Kinds of memory and their words; the first that a record has is shown."""


@dataclass(eq=False)
class LiveFigures:
    """Takes the records of rank 0.

    Attributes:
        replicas: how many ranks have other samples; their rates are taken to be alike.
    """

    replicas: int
    _records: deque[StepFigures] = field(default_factory=partial(deque, maxlen=RECORDS))
    _count: int = 0

    def add(self, figures: StepFigures) -> None:
        """Take the next record."""
        self._records.append(figures)
        self._count += 1

    def bar(
        self, iterable: Iterable[T], total: float | None, desc: str, every: int, disable: bool
    ) -> Bar[T]:
        """Return the iterable with a bar; see ``Accelerator.progress``."""
        figures = str if isinstance(iterable, range) else self.since_now()
        return Bar(iterable, total=total, desc=desc, disable=disable, every=every, figures=figures)

    def since_now(self) -> Callable[[], str]:
        """Return a function that gives the words, "" until the next record has come.

        So the bar of an evaluation does not show the figures of the training before it.
        """
        begun = self._count
        return lambda: self.text() if self._count > begun else ""

    def text(self) -> str:
        """Return ``loss=2.31 (rank 0), 5,120 tokens/s, memory 1.2 GiB``, or what is known."""
        last = self._records[-1]
        whose = " (rank 0)" if self.replicas > 1 else ""
        parts = [] if last.loss is None else [f"loss={last.loss:.4g}{whose}"]
        seconds = sum(record.seconds for record in self._records)
        for unit in ("tokens", "samples"):
            count = sum(getattr(record, unit) for record in self._records)
            if count and seconds:
                rate = self.replicas * count / seconds
                parts.append(f"{rate:{',.0f' if rate >= 100 else '.3g'}} {unit}/s")
                break
        kind = next((kind for kind in _MEMORY if last.memory.get(kind)), None)
        if kind is not None:
            parts.append(f"{_MEMORY[kind]} {last.memory[kind] / 2**30:.3g} GiB")
        return ", ".join(parts)


# --- for trackers ---


STEPS = 10
"""Trackers get a mean over so many optimizer steps: services limit the rate of values."""

PREFIX = "run/"


class RunFigures:
    """Collects the records of the main process's rank, and logs their means.

    Args:
        trackers: those of the run; nothing is collected before they are started.
        replicas: ranks with a batch of their own, for rates of the whole run.
    """

    def __init__(self, trackers: Trackers, replicas: int) -> None:
        self._trackers = trackers
        self._sums = StepSums(
            lambda each: each.steps >= STEPS,
            lambda each: trackers.log_run(values_of(each, replicas), each.step),
        )

    def take(self, figures: StepFigures) -> None:
        """Log the mean of the steps since the last one, if they are enough."""
        if self._trackers.active:
            self._sums.add(figures)


def values_of(figures: StepFigures, replicas: int) -> dict[str, float]:
    """Return the figures by the names that trackers know them by.

    Args:
        figures: of one rank; times and bytes become those of one step.
        replicas: ranks with a batch of their own; rates are theirs together.
    """
    steps = figures.steps
    values: dict[str, float | None] = {
        "step": float(figures.step),
        "loss": figures.loss,
        "learning_rate": figures.lr,
        "gradient_norm": figures.grad_norm,
        "loss_scale": figures.loss_scale,
        "step_seconds": figures.seconds / steps,
        "samples_per_second": figures.samples_per_second * replicas or None,
        "tokens_per_second": figures.tokens_per_second * replicas or None,
        "memory_bytes": figures.memory.get("resident"),
        "device_memory_bytes": figures.memory.get("device"),
        "sent_bytes": sum(figures.sent.values()) / steps,
        "skipped_steps": float(figures.skipped),
    }
    values |= {f"time/{name}": seconds / steps for name, seconds in figures.sections.items()}
    values |= {f"waiting/{axis}": seconds / steps for axis, seconds in figures.waiting.items()}
    values |= {name: value for name, value in figures.own.items() if name not in values}
    return {PREFIX + name: value for name, value in values.items() if value is not None}


# --- the link between hosts ---


class LinkLoad:
    """Warns once where the link takes longer than the work of a step: then steps wait for it.

    The time of the link is the bytes over the measured bandwidth. Where a rank's waiting is not
    known, because its device waits, the time of the link is taken for it.

    Args:
        run: the run of the strategy.
        link: bytes per second between hosts, as the launchers measured it.
        warn: shows a line.
    """

    def __init__(self, run: Run, link: float, warn: Callable[[str], None]) -> None:
        self._run, self._link, self._warn = run, link, warn
        self._judged = False
        self._sums = StepSums(lambda each: each.steps >= COUNTED, self._judge, skip=WARM_UP)

    def take(self, figures: StepFigures) -> None:
        """Take the record of a step."""
        if not self._judged:
            self._sums.add(figures)

    def _judge(self, figures: StepFigures) -> None:
        self._judged = True
        parts = ((key.partition("/"), count) for key, count in figures.sent.items())
        sent = {(axis, operation): count for (axis, _, operation), count in parts}
        nbytes = self._run.bytes_between_hosts(sent)
        link_s = nbytes / self._link
        waiting_s = sum(figures.waiting.values()) or min(link_s, figures.seconds)
        working_s = figures.seconds - waiting_s
        if link_s <= working_s:
            return
        self._warn(
            f"the link between hosts is too slow for this strategy: a step sends "
            f"{nbytes / COUNTED / 1e6:,.1f} MB from each host, {link_s / COUNTED:.3g} s at "
            f"the measured {self._link / 1e6:,.4g} MB/s, and works for {working_s / COUNTED:.3g} "
            "s; accumulate more micro-batches per step, keep sharding inside of hosts, or send "
            "less: 'drivetrain estimate' lists the bytes of every strategy"
        )


# --- an allocator's error in a step ---


@dataclass(eq=False)
class ExplainsShortage(Observer):
    """Lets an allocator's error say who holds this rank's memory, and what would fit."""

    state: RunState
    _resident: int = 0

    def after_prepare(self, entry: PreparedModel) -> None:
        """Note the memory of the process before a step."""
        self._resident = psutil.Process().memory_info().rss

    def out_of_memory(self, error: Exception) -> None:
        """Add a note to the error."""
        from drivetrain.planner.auto import explain  # a run without one needs no planner

        explain(error, self.state, self._resident)


# --- the seconds of a backward in the first steps, by which methods are chosen ---

# ``links.far: auto`` lets traffic hide behind compute, so the choice needs the seconds of a
# backward. Ranks time the first steps, in which all traffic is exact; then they agree on one
# figure, and take methods for the rest of the run. The figure is that of the slowest rank: all
# others wait for it.


logger = get_logger(__name__)


@dataclass(slots=True)
class TimedModel:
    """A model whose methods are chosen when its backward has been timed.

    Attributes:
        entry: the prepared model.
        has_run: whether its forward ran since the last step, so that a backward may reach it.
        last_s: seconds of the last backward since the last step; None before one.
        steps: seconds of the last backward of each step.
    """

    entry: PreparedModel
    has_run: bool = False
    last_s: float | None = None
    steps: list[float] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the choice is still to come: a checkpoint may have brought it."""
        links = self.entry.strategy.run.links
        return any(links.is_open(use) for use in links.awaited)


@dataclass(eq=False)
class LinkChoice(Observer):
    """Times backwards until the methods of each model are chosen.

    Attributes:
        state: of the run: whether ranks take equally many steps, and how long this rank has waited
            for others.
    """

    state: RunState
    _timed: list[TimedModel] = field(default_factory=list)
    _begun: float = 0.0

    def after_prepare(self, entry: PreparedModel) -> None:
        """Time a model whose choice is open."""
        timed = TimedModel(entry)
        if timed.is_open:
            self._timed.append(timed)

    def before_forward(self, entry: PreparedModel) -> None:
        """Note a forward of training."""
        for each in self._timed:
            each.has_run |= each.entry is entry

    def before_backward(self) -> None:
        """Note the time."""
        if self._timed:
            self._begun = time.perf_counter() - self.state.run.traffic.waited_s

    def after_backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Note the seconds of a backward, without its waiting for other ranks.

        Where gradients accumulate, the last backward of a window counts: sums cross beside it. A
        loss may reach several models; a strategy may run a model without calling it.
        """
        for each in self._timed:
            if each.has_run or each.entry is self.state.running():
                now = time.perf_counter() - self.state.run.traffic.waited_s
                each.last_s = max(0.0, now - self._begun)

    def after_step(self) -> None:
        """Count a step of each model with a backward; choose after enough steps."""
        for each in self._timed:
            if each.last_s is not None and not self.state.window.uneven:
                each.steps.append(each.last_s)
            each.last_s, each.has_run = None, False
            if each.is_open and len(each.steps) == WARM_UP + COUNTED:
                _settle(each)
        known = self.state.models
        self._timed = [each for each in self._timed if each.is_open and each.entry in known]


def _settle(timed: TimedModel) -> None:
    """Choose the methods of a model, by the slowest rank's usual backward. Collective."""
    mine = median(timed.steps[WARM_UP:])
    slowest = max(gather_facts(mine, float, doing="the seconds of a backward"))
    strategy = timed.entry.strategy
    sender = Sender(type(strategy), strategy.config, strategy.run.precision)
    links, lines = settle_links(strategy.run.links, sender, timed.entry.given.parameters, slowest)
    strategy.take_links(links)
    for line in lines:
        logger.announce(line)
