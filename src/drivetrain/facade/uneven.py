"""Uneven inputs: metrics without repetitions, and ranks that stand in without batches.

Uneven inputs: a rank without further batches stands in until the last rank has finished.

Before each backward the ranks exchange one number: of which model it is, and whether it will
synchronise. A rank that left its loop keeps exchanging, and takes part in the others' collectives.
The first rank with a batch leads: the others have its gradients when a window begins, and its
buffers. In the end they take over the state of a rank that went on to the last batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import communication
from drivetrain.data.sources import Rows, count_rows
from drivetrain.errors import UsageError
from drivetrain.facade.prepared import PreparedModel, RunState
from drivetrain.log import get_logger
from drivetrain.nested import is_tensor, recursively_apply
from drivetrain.runtime.gradient_state import ActivePass, GradientState
from drivetrain.strategy import Joinable

# --- values that ranks exchange in a script ---

logger = get_logger(__name__)


def gather_for_metrics(state: RunState, data: Any, *, as_objects: bool) -> Any:
    """Gather tensors or objects, without what was made of samples that only repeat others."""
    # Ranks along other axes share a batch: they would count it several times.
    window, axis = state.window, state.run.mesh["dp"]
    objects = as_objects or not _all_tensors(data)
    mine, refusal = _without_repetitions(window, data, objects=objects)
    if not objects:
        return communication.gather_rows(mine, "gather_for_metrics", refusal, group=axis)
    held = communication.gather_object([(mine, refusal)], group=axis)
    if found := next((text for _, text in held if text), ""):
        raise UsageError(found)
    return [item for theirs, _ in held for item in theirs]


def _without_repetitions(window: GradientState, data: Any, *, objects: bool) -> tuple[Any, str]:
    """Return what is no repetition, or why that cannot be told; of objects, a list."""

    def kept(item: Any) -> Any:
        rows = _rows_of(window, item)
        return item if rows is None else rows.kept(item, objects=objects)

    try:
        found = kept(data) if objects else recursively_apply(kept, data)
    except UsageError as error:
        return data, str(error)
    if not objects:
        return found, ""
    if isinstance(found, list | tuple):
        return list(found), ""
    rows = _rows_of(window, data)
    return [found] if rows is None or rows.real or not rows.whole else [], ""


def _rows_of(window: GradientState, data: Any) -> Rows | None:
    """Return the rows of the batch, or of all batches, that a value was made of.

    A tensor of a batch tells by itself. Otherwise it is the batch at hand, or after a loop all
    of its batches; None where no sample was repeated.

    Raises:
        UsageError: it may be any batch of a loop that is over, or a piece of another batch.
    """
    count = count_rows(data, otherwise=0)
    rows: Rows | None = window.rows_of(data) if is_tensor(data) else None
    done = window.finished if rows is None else None
    if done is not None and (done.trains or done.rows is None):
        done = None
    if done is not None and _divides(done.total, count):
        total: Rows = done.total
        return total
    if rows is None and window.at_hand is not None:
        rows = window.at_hand.rows
        if rows is not None and window.piece is not None:
            rows = rows.part(*window.piece)
    if rows is not None and _divides(rows, count):
        window.use(trains=False)
    if rows is None and done is not None and _divides(done.rows, count):
        _check_told(window, done, count)
    return rows


def _check_told(window: GradientState, done: ActivePass, count: int) -> None:
    """Refuse, or tell of, what may be made of the last batch of a loop, or of another one."""
    if done.remainder < 0:
        return
    refused = UsageError(
        f"expected gather_for_metrics() inside of the loop over the loader, found it after the "
        f"loop, with {count} rows: the last batches only repeat samples in some of their rows, "
        "and nothing tells whether these belong to them; call it in the loop, or once for the "
        "rows of all batches, or take gather()"
    )
    if done.first is not done.rows and window.holds(done.first):
        raise refused
    logger.warning(str(refused))


def _divides(rows: Rows, count: int) -> bool:
    """Whether there are so many values for each row."""
    return rows.whole > 0 and count > 0 and count % rows.whole == 0


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return is_tensor(data) or bool(data)


# --- uneven inputs ---

_DONE, _ALONE = 0, 1
"""What a rank tells that has no batch, or a backward in which no such rank can take part."""


@dataclass(eq=False)
class UnevenInputs:
    """The loops of one Accelerator in which ranks have different numbers of batches.

    Attributes:
        state: of the run, with its models, and the schedules that follow their steps.
    """

    state: RunState
    _joined: Sequence[PreparedModel] = ()
    _last_round: Sequence[int] = ()
    _open: set[int] = field(default_factory=set)
    """Joined models by number, whose windows have begun, and have not been synchronised."""

    @contextmanager
    def joined(self, joinables: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
        """Context of one such loop over these models; see ``join_uneven_inputs``."""
        if self.state.scaler.enabled and self.state.world.size > 1:
            raise UsageError(
                "expected precision no or bf16 in join_uneven_inputs, found fp16, whose loss scale "
                "all ranks agree on in every step; take bf16, or loaders with even_batches=True"
            )
        models = [item for item in joinables if isinstance(item, nn.Module)]
        before = [loader.even_batches for loader in self.state.loaders]
        if even_batches is not None:
            for loader in self.state.loaders:
                loader.even_batches = even_batches
        self._joined, self._last_round = self.state.chosen(models), ()
        self._open.clear()
        self.state.window.uneven = True
        try:
            yield
            if self.state.world.size > 1:
                self._stand_in()
        finally:
            self._joined = ()
            self.state.window.uneven = False
            for loader, even in zip(self.state.loaders, before, strict=True):
                loader.even_batches = even

    def announce(self, entry: PreparedModel, loss: Tensor, *, weighted: bool) -> None:
        """Tell the other ranks of the loop that a backward of a model is about to run."""
        if self.state.world.size == 1:
            return
        if weighted or entry not in self._joined or self.state.reached(loss) - {entry}:
            self._exchange(_ALONE)
        else:
            joinable, window = entry.strategy.joinable, self.state.window
            synchronizes = window.sync_gradients or window.sync_each_batch
            if joinable is not None:  # the script may have its own windows, by no_sync()
                synchronizes = joinable.synchronizes
            self._exchange(2 * (self._joined.index(entry) + 1) + int(synchronizes))

    def _exchange(self, status: int) -> int:
        """Return the status of the ranks with a batch, or that all are done.

        Raises:
            UsageError: on every rank: they have different ones, or one cannot do without the other.
        """
        mine = torch.tensor([status], device=self.state.world.device)
        statuses = communication.gather(mine).tolist()
        busy = {each for each in statuses if each != _DONE}
        if len(busy) > 1:
            raise UsageError(
                "expected ranks in join_uneven_inputs with backwards of the same model, that end "
                "their accumulation windows at the same batches, found that some end theirs "
                "earlier, as where a loader's last batch ends a window; take "
                "gradient_accumulation_steps=1, even_batches=True, or "
                "GradientAccumulationPlugin(sync_with_dataloader=False)"
            )
        if not busy:
            return _DONE
        (doing,) = busy
        self._last_round = [rank for rank, each in enumerate(statuses) if each != _DONE]
        if _DONE in statuses:
            if doing == _ALONE:
                raise UsageError(
                    "expected backwards in join_uneven_inputs in which ranks without batches can "
                    "take part, found one with a weight, or of several models, or of one that is "
                    "not among the joined ones; take even_batches=True"
                )
            self._lead(doing // 2 - 1)
        if doing != _ALONE:
            (self._open.discard if doing % 2 else self._open.add)(doing // 2 - 1)
        return int(doing)

    def _lead(self, number: int) -> None:
        """Let the first rank with a batch lead the others in the next backward of a model."""
        leader, begins = self._last_round[0], number not in self._open
        _joinable(self._joined[number]).lead(leader, gradients=begins)

    def _stand_in(self) -> None:
        while (doing := self._exchange(_DONE)) != _DONE:
            if doing % 2:
                _joinable(self._joined[doing // 2 - 1]).stand_in()
        if len(self._last_round) in (0, self.state.world.size):
            return
        source = self._last_round[0]
        for number, entry in enumerate(self._joined):
            self._lead(number)
            _joinable(entry).catch_up(source)
        self._catch_up(source)

    def _catch_up(self, source: int) -> None:
        """Take over learning rates, schedules and the place in a window, which the others moved."""
        optimizers = [optimizer for entry in self._joined for optimizer in entry.optimizers]
        groups = [groups for entry in self._joined for groups in entry.param_groups()]
        schedules = [scheduler.state_dict() for scheduler in self.state.schedulers]
        steps = [optimizer.steps for optimizer in self.state.optimizers]
        window = self.state.window
        place = window.micro_batch, window.sync_gradients
        groups, schedules, steps, place = communication.broadcast_object_list(
            [groups, schedules, steps, place], source
        )
        window.micro_batch, window.sync_gradients = place
        for optimizer, theirs in zip(optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, theirs, strict=True):
                group.update(values)
        for scheduler, state in zip(self.state.schedulers, schedules, strict=True):
            scheduler.load_state_dict(state)
        for prepared, taken in zip(self.state.optimizers, steps, strict=True):
            prepared.steps = taken


def _joinable(entry: PreparedModel) -> Joinable:
    if (found := entry.strategy.joinable) is None:
        raise UsageError(
            f"{type(entry.strategy).__name__} cannot stand in for a rank without batches; give "
            "every rank as many batches with even_batches=True"
        )
    return found
