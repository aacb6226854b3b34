"""Writes the times of every rank's actions, step by step, as Chrome traces."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError
from drivetrain_megatron.pipeline.schedules import Action, ActionKind
from drivetrain_megatron.pipeline.timeline import Span, Timeline, save_trace

_KINDS = list(ActionKind)

_COLUMNS = 5  # kind, stage, micro-batch, start, stop


class StepTrace:
    """Collects the spans of all ranks of a pipeline after a step, and writes one file.

    Times of ranks on several hosts are as comparable as the wall clocks of these hosts. The folder
    is made if it is not there. Names of files begin with ``name``; the first pipeline rank writes.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path, name: str, axis: Communicator, device: torch.device) -> None:
        self._folder, self._name, self._axis, self._device = folder, name, axis, device
        self._step = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"strategy.trace_dir: cannot make {str(folder)!r}: {error.strerror or error}; "
                "choose another folder"
            ) from error

    def save(self, spans: Sequence[Span]) -> None:
        """Write the step that has just ended; a collective over the pipeline."""
        timeline = Timeline(tuple(_spans(rows) for rows in self._gathered(spans)))
        self._step += 1
        if self._axis.rank == 0:
            name = f"{self._name}-step{self._step:05d}"
            save_trace(timeline, self._folder / f"{name}.json", name=name)

    def _gathered(self, spans: Sequence[Span]) -> list[Tensor]:
        """Return a row for each span of each rank."""
        counts = torch.zeros(self._axis.size, dtype=torch.int64, device=self._device)
        counts[self._axis.rank] = len(spans)
        self._axis.all_reduce(counts, label="trace").wait()
        most = int(counts.max())
        table = torch.zeros(
            self._axis.size, most, _COLUMNS, dtype=torch.float64, device=self._device
        )
        if spans:
            since_epoch = time.time() - time.perf_counter()  # counters of hosts begin anywhere
            rows = torch.tensor([_row(span, since_epoch) for span in spans], dtype=torch.float64)
            table[self._axis.rank, : len(spans)] = rows
        self._axis.all_reduce(table, label="trace").wait()
        return [rows[:count] for rows, count in zip(table.cpu(), counts.tolist(), strict=True)]


def _row(span: Span, moved: float) -> list[float]:
    action = span.action
    numbers = (_KINDS.index(action.kind), action.stage, action.micro_batch)
    return [*map(float, numbers), span.start + moved, span.stop + moved]


def _spans(rows: Tensor) -> tuple[Span, ...]:
    return tuple(
        Span(Action(_KINDS[int(kind)], int(stage), int(number)), start, stop)
        for kind, stage, number, start, stop in rows.tolist()
    )
