"""Pieces of a batch that fit into memory: one micro-batch together, with the batch's gradient.

With ``micro_batch: auto`` the pieces are as large as fits. No rank runs out of memory to find out,
since the others would wait for it in a collective, and a control group of the kernel kills: the
peak of pieces is measured, beginning with one row, and larger ones are predicted from it.

Predictions err. Where a forward needs no other rank, a piece larger than all before is a try of
this rank alone: where an allocator fails, it is computed again in halves. The others meet the rank
where gradients are sent.

A pipeline cuts a piece again, into parts. What a stage keeps grows with the rows of a part, so the
prediction counts these: pieces are multiples of the parts, and the first has one row of each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.collectives.facts import by_itself, counts_of_everyone
from drivetrain.errors import UsageError
from drivetrain.facade.gradients import Before, PieceGradients, WindowGradients
from drivetrain.facade.prepared import PreparedModel, RunState
from drivetrain.log import get_logger
from drivetrain.memory import (
    Heap,
    device_room,
    host_room,
    is_out_of_memory,
    release_memory,
    tries_again,
)
from drivetrain.nested import slice_tensors
from drivetrain.runtime.gradient_state import BatchPiece

logger = get_logger(__name__)

ResultT = TypeVar("ResultT")

SHARE = 0.9
"""The part of the free memory that a prediction may fill."""

NOT_AGAIN = (
    "micro_batch: auto: expected a strategy whose ranks need each other only where gradients are "
    "sent, such as ddp, zero1 and zero2, to compute the piece again in smaller ones, found one "
    "where others wait within it for this rank"
)
"""The note of an allocator's error in a piece that ends the run."""

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Where Linux tells the largest memory of a process, and where ``5`` makes it the present one."""


@dataclass(slots=True)
class Measured:
    """What pieces have taken so far.

    Attributes:
        peaks: the most bytes above what was held before, by the elements of the largest tensor.
        longest: the elements of a row, the most so far.
        computed: pieces for which there was memory: all elements, and those of a row.
        opened: small pieces at the very beginning, as many on all ranks.
        announced: the rows that fit, as last said.
    """

    peaks: dict[int, int] = field(default_factory=dict)
    longest: int = 0
    computed: list[tuple[int, int]] = field(default_factory=list)
    opened: int = 0
    announced: int = 0

    def add(self, rows: int, per_row: int, peak: int) -> None:
        """Note the peak of a piece, if it is larger than all before or took more than predicted."""
        elements = rows * per_row
        if elements > max(self.peaks, default=0) or peak > self.need(rows, per_row):
            self.peaks[elements] = peak
        self.longest = max(self.longest, per_row)

    def note(self, rows: int, per_row: int) -> None:
        """Note that there was memory for a piece."""
        if not self.has(rows, per_row):
            size = rows * per_row
            others = [each for each in self.computed if each[0] > size or each[1] > per_row]
            self.computed = [*others, (size, per_row)]

    def has(self, rows: int, per_row: int) -> bool:
        """Return whether there was memory for a piece as large, with rows as long."""
        return any(size >= rows * per_row and row >= per_row for size, row in self.computed)

    def need(self, rows: int, per_row: int) -> float:
        """Return the bytes that a piece is predicted to take; infinite before the first.

        Beyond the largest known piece memory goes on to grow as steeply as it ever did; one piece
        alone counts as if all of it grew. Longer rows may take the square of their length, as
        attention does.
        """
        elements = rows * per_row
        if not self.peaks:
            return inf
        largest = max(self.peaks)
        peak = self.peaks[largest]
        slopes = [
            (peak - other) / (largest - smaller)
            for smaller, other in self.peaks.items()
            if smaller < largest
        ]
        slope = max(0.0, *slopes) if slopes else peak / largest
        known = max((most for size, most in self.peaks.items() if size <= elements), default=0)
        longer = max(1.0, per_row / self.longest)
        return longer * max(known, peak + slope * (elements - largest))

    def rows_that_fit(self, rows: int, per_row: int, room: float) -> int:
        """Return the most rows, of so many elements each, whose need is in the room; at least one.

        With nothing known, one row.
        """
        fitting = (count for count in range(rows, 1, -1) if self.need(count, per_row) <= room)
        return next(fitting, 1)


@dataclass(eq=False)
class Pieces:
    """Cuts the batches of one Accelerator.

    Attributes:
        state: of the run, with the models that train on the pieces.
        gradients: their window, of which the pieces of a batch are one micro-batch.
    """

    state: RunState
    gradients: WindowGradients
    _measured: defaultdict[int, Measured] = field(default_factory=partial(defaultdict, Measured))
    """By the rows that are cut alike."""
    _held: int = 0
    _per_row: int = 0
    """Of the piece at hand."""
    _tried: bool = False

    def each(
        self, function: Callable[[Any], ResultT], batch: Any, models: Sequence[nn.Module]
    ) -> list[ResultT]:
        """Call a function on each piece, on smaller ones where memory runs out."""
        results: list[ResultT] = []
        auto = self.state.config.run.micro_batch == "auto"
        alone = not auto or self._needs_no_other_rank()
        for part in self.of(batch, models):
            piece = self.state.window.piece if auto and alone else None
            try:
                with self.gradients.explained():
                    if piece and self._is_larger_than_all(piece):
                        self._try(function, part, results)
                    else:
                        results.append(function(part))
            except Exception as error:
                if not alone and is_out_of_memory(error):
                    error.add_note(NOT_AGAIN)
                raise
        return results

    def _is_larger_than_all(self, piece: BatchPiece) -> bool:
        return piece.rows > 1 and not self._measured[1].has(piece.rows, self._per_row)

    def _needs_no_other_rank(self) -> bool:
        """Whether no rank waits for another one within a forward and the backward of its graph."""
        strategies = [entry.strategy for entry in self.state.models]
        divided = any(
            each.run.mesh[axis].size > 1
            for each in strategies
            for axis in each.run.mesh
            if axis != "dp"
        )
        return not divided and not any(each.pipeline or each.pace.forwards for each in strategies)

    def _try(self, function: Callable[[Any], ResultT], part: Any, results: list[ResultT]) -> None:
        """Compute a piece, in as many parts as it takes, and send its gradients once."""
        state, world = self.state.window, self.state.world
        piece, whole, known = state.piece, PieceGradients(), self._measured[1]
        assert piece is not None
        waiting = [piece]
        self._tried = True
        while waiting:
            state.piece = now = waiting.pop(0)
            rows = slice_tensors(part, slice(now.start - piece.start, now.stop - piece.start))
            room, before = _room(world.device, world.local_size), Before(self.state.models)
            self.gradients.held_back = held_back = PieceGradients()
            token, own = tries_again.set(now.rows > 1), by_itself.set(True)
            try:
                results.append(function(rows))
                before.check_gradients()
            except Exception as error:
                if now.rows == 1 or not is_out_of_memory(error):
                    raise
            else:
                known.note(now.rows, self._per_row)
                whole.join(held_back)
                continue
            finally:
                tries_again.reset(token)
                by_itself.reset(own)
                self.gradients.held_back = None
            # Out of the except clause: there the traceback keeps the failed try's tensors alive.
            del held_back
            release_memory()
            before.check_gradients()
            before.restore()
            known.add(now.rows, self._per_row, int(room))
            middle = now.start + now.rows // 2
            waiting[:0] = [now._replace(stop=middle), now._replace(start=middle)]
            logger.warning(
                f"micro_batch: auto: memory ran out in {now.rows} rows of {self._per_row:,} "
                "elements, which are computed again in halves",
                main_process_only=False,
            )
        state.piece = piece
        whole.send(lambda loss, weight: self.gradients.backward(loss, weight, {}))

    def of(self, batch: Any, models: Sequence[nn.Module]) -> Iterator[Any]:
        """Yield the pieces of a batch; all ranks have as many, as even as possible."""
        option = self.state.config.run.micro_batch
        if option == "whole":
            with self.gradients.micro_batch(models):
                yield batch
            return
        self._check_run()
        parts = max((_parts(entry) for entry in self.state.chosen(models)), default=1)
        unit = parts if option == "auto" else 1
        leaves = [leaf for leaf in tree_leaves(batch) if leaf is not None]
        refusal = _refusal(leaves) or self._mixed()
        rows = 1 if refusal else len(leaves[0])
        per_row = 1 if refusal else ceil(max(map(Tensor.numel, leaves)) / rows)
        begin = 0
        known = self._measured[unit]
        if option == "auto" and (missing := 1 + (unit > 1) - known.opened) > 0:
            # One row of each part tells what the others will take; but the first call of a pipeline
            # tries how calls are cut, which takes memory of its own.
            begin = unit * (self._agreed(1 + missing, max(1, rows // unit), refusal) - 1)
        for start in range(0, begin, unit):
            with self._piece(models, BatchPiece(start, start + unit, rows), unit, per_row):
                yield slice_tensors(batch, slice(start, start + unit))
            known.opened += 1
        left = rows - begin
        units = ceil(left / unit)
        largest = self._largest(left, unit, per_row) if option == "auto" else int(option)
        wanted = ceil(units / largest)
        count = self._agreed(wanted, max(wanted, left // unit), refusal)
        bounds = [
            min(rows, begin + unit * (units * number // count)) for number in range(count + 1)
        ]
        for start, end in pairwise(bounds):
            with self._piece(models, BatchPiece(start, end, rows), unit, per_row):
                yield slice_tensors(batch, slice(start, end))

    @contextmanager
    def _piece(
        self, models: Sequence[nn.Module], piece: BatchPiece, unit: int, per_row: int
    ) -> Iterator[None]:
        """Context of the forward and backward of a piece, whose peak is measured."""
        first, last = piece.start == 0, piece.stop == piece.of
        measures = self.state.config.run.micro_batch == "auto"
        self._per_row, self._tried = per_row, False
        device = self.state.world.device
        if measures:
            if device.type == "cpu":
                # What a piece has freed lies in gaps that a larger one cannot use.
                Heap().relieve(kept=-1)
            if first and self.state.window.sync_gradients:  # gradients count as the window's
                self._held = _held(device)
            _begin_peak(device)
        with self.gradients.micro_batch(models, first=first, last=last, piece=piece):
            try:
                yield
            except GeneratorExit:
                self.state.window.left_early = not last
                raise
        known = self._measured[unit]
        if self._tried:  # what it took beside is no part of a usual piece
            return
        known.note(piece.rows, per_row)
        if measures and not piece.rows % unit and known.opened >= (unit > 1):
            known.add(piece.rows // unit, per_row, max(0, _peak(device) - self._held))

    def _largest(self, rows: int, unit: int, per_row: int) -> int:
        """Return the most units of rows that are predicted to fit on this rank, and say so."""
        world = self.state.world
        room = _room(world.device, world.local_size)
        known = self._measured[unit]
        found = known.rows_that_fit(ceil(rows / unit), per_row, SHARE * room)
        need = known.need(found, per_row)
        if not known.peaks:
            return found
        if need > SHARE * room:
            least = "a row" if unit == 1 else f"a piece of {unit} rows"
            logger.warning(
                f"micro_batch: auto: {least} of {per_row:,} elements is predicted to need "
                f"{need / 2**20:,.0f} MiB, and {room / 2**20:,.0f} MiB are free; it is tried: "
                "shorter rows, recompute or a strategy that divides more would need less"
            )
        elif found != known.announced:
            say = logger.info if known.announced else logger.announce
            say(
                f"micro_batch: auto: at most {min(rows, found * unit)} of {rows} rows at once, "
                f"predicted to need {need / 2**20:,.0f} of {room / 2**20:,.0f} MiB"
            )
            known.announced = found
        return found

    def _agreed(self, wanted: int, rows: int, refusal: str) -> int:
        """Return how many pieces all ranks make: as many as one wants, and each has rows for."""
        held = counts_of_everyone("micro_batches", "", [wanted, rows], refusal, None)
        return min(max(wanted for wanted, _ in held), *(rows for _, rows in held))

    def _check_run(self) -> None:
        """Refuse runs whose ranks could not agree.

        Raises:
            UsageError: ``join_uneven_inputs``.
        """
        if self.state.window.uneven and self.state.world.size > 1:
            raise UsageError(
                "micro_batches(): expected as many batches on all ranks, found join_uneven_inputs()"
                " around; leave micro_batch: whole, or let loaders even batches"
            )

    def _mixed(self) -> str:
        """Return why a model's result for a row depends on the others; empty where none does."""
        for entry in self.state.models:
            for name, module in entry.mixing.items():
                if module.training:
                    return (
                        "micro_batch: expected layers that treat each row by itself, found "
                        f"{type(module).__name__} {name!r}, whose results depend on all rows; take "
                        "GroupNorm or LayerNorm, put it into eval(), or leave micro_batch: whole"
                    )
        return ""


def _refusal(leaves: Sequence[Any]) -> str:
    """Return why a batch of these cannot be cut into rows; empty if it can."""
    rows = {
        len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else type(leaf).__name__
        for leaf in leaves
    }
    if len(rows) == 1 and all(isinstance(each, int) and each for each in rows):
        return ""
    found = ", ".join(sorted(map(str, rows))) or "nothing"
    return (
        "micro_batch: expected a batch of tensors whose first dimension counts the samples, found "
        f"sizes and types {found}; pass micro_batches() what has such a dimension, or leave "
        "micro_batch: whole"
    )


def _room(device: torch.device, ranks: int) -> float:
    """Return the bytes that this rank may still take, a share of the host's without a device."""
    if device.type == "cpu":
        return host_room() / ranks
    room = device_room(device)
    if room is None:
        raise UsageError(
            f"micro_batch: auto: expected a device that tells its free memory, found {device}; "
            "give a number"
        )
    return room


def _held(device: torch.device) -> int:
    """Return the bytes that this rank holds now."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return _of_process("VmRSS:")


def _begin_peak(device: torch.device) -> None:
    """Forget the peak until now."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    try:
        _RESET.write_text("5")
    except OSError as error:
        raise UsageError(
            f"micro_batch: auto: expected to measure the memory of this process by {_RESET}, found "
            f"that it cannot be written ({error}); give a number"
        ) from error


def _peak(device: torch.device) -> int:
    """Return the most bytes that were held since ``_begin_peak``."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return _of_process("VmHWM:")


def _of_process(name: str) -> int:
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return next(1024 * int(words[1]) for words in lines if words[0] == name)


def _parts(entry: PreparedModel) -> int:
    """Return into how many parts a model cuts each piece, and let it know that pieces come."""
    pipeline = entry.strategy.pipeline
    return 1 if pipeline is None else pipeline.in_pieces()
