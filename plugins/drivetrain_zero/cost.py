"""What ZeRO costs, from the same plan of units that training uses.

With P parameter elements, N ranks, f = (N-1)/N and A micro-batches per step, in elements:

======  ==================  ==========================================
stage   sent per step       held
======  ==================  ==========================================
1       f P + f P           P + P gradients + states P/N
2       A f P + f P         P + P/N gradients + states P/N
3       A (f P + 2 f P)     P/N + P/N gradients + states P/N
======  ==================  ==========================================
"""

from collections.abc import Sequence

import torch

from drivetrain.cost import ModelSpec
from drivetrain.parts.collectives import sent_elements
from drivetrain.parts.collectives.volume import Operation
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.precision import Precision
from drivetrain.strategy import Run
from drivetrain_zero.layout import UnitLayout, is_block

_ADAM_STATES = 2
"""An optimizer with this many states is Adam, which also counts steps per fragment."""


class Estimate:
    """Adds up the units of one rank.

    Args:
        units: the plan.
        precision: dtypes of gradients.
        axis: the ranks that share the units.
    """

    def __init__(self, units: Sequence[UnitLayout], precision: Precision, axis: Axis) -> None:
        self._units = units
        self._trainable = [unit for unit in units if unit.trainable]
        self._precision = precision
        self._size = axis.size
        self._rank = axis.rank

    @classmethod
    def of(cls, units: Sequence[UnitLayout], run: Run) -> "Estimate":
        """Return the estimate of a run."""
        return cls(units, run.precision, run.mesh["dp"])

    def sent(
        self,
        model: ModelSpec,
        *,
        forwards: int,
        reductions: int,
        regathered_over: Axis | None,
        spared: int,
        buffers: bool,
    ) -> dict[tuple[str, str], int]:
        """Return the bytes of one optimizer step by (axis, operation).

        Args:
            model: has the buffers.
            forwards: micro-batches per step.
            reductions: backwards per step that reduce gradients.
            regathered_over: the ranks that sharded units are gathered over for backward; None: they
                are not freed after forward.
            spared: how many of them are not freed because forward ends and backward begins there.
            buffers: whether rank 0's buffers are sent before each forward.
        """
        flags = sum(len(unit.places) for unit in self._trainable)
        gathered = sum(self._gather(unit) for unit in self._trainable if not unit.sharded)
        sharded = [unit for unit in self._units if unit.sharded]
        gathered += forwards * sum(map(self._gather, sharded))
        broadcast = sum(spec.nbytes for spec in model.buffers) if buffers else 0
        sent = {
            ("dp", "reduce_scatter"): reductions * sum(map(self._reduce, self._trainable)),
            ("dp", "all_gather"): gathered,
            ("dp", "all_reduce"): reductions * self._operation("all_reduce", flags),
            ("dp", "broadcast"): reductions * self._operation("broadcast", broadcast),
        }
        if regathered_over is not None:
            key = (regathered_over.name, "all_gather")
            again = forwards * sum(_regather(unit, regathered_over) for unit in sharded[spared:])
            sent[key] = sent.get(key, 0) + again
        return {key: nbytes for key, nbytes in sent.items() if nbytes}

    def held(self, model: ModelSpec, *, lent_buffers: int) -> dict[str, int]:
        """Return the bytes between steps by kind.

        Args:
            model: parameters, buffers and states.
            lent_buffers: how many buffers gradients pass through; 0 keeps whole gradients.
        """
        placed = {place.name for unit in self._units for place in unit.places}
        rest = sum(spec.nbytes for spec in model.parameters if spec.name not in placed)
        sharded = [unit for unit in self._units if unit.sharded]
        whole = [unit for unit in self._units if not unit.sharded]
        steps = 4 * sum(map(self._fragments, self._trainable))
        states = model.states * sum(map(self._shard, self._trainable))
        return {
            "parameters": sum(unit.numel * unit.dtype.itemsize for unit in whole)
            + sum(map(self._shard, sharded))
            + rest,
            "masters": sum(self._shard(unit) for unit in whole if unit.master is not unit.dtype),
            "gradients": sum(
                self._gradients(unit, kept=not lent_buffers) for unit in self._trainable
            ),
            "lent": lent_buffers * self.lent_bytes(),
            "optimizer": states + (steps if model.states >= _ADAM_STATES else 0),
            "buffers": sum(spec.nbytes for spec in model.buffers),
        }

    def lent_bytes(self) -> int:
        """Return the bytes of one lent buffer: those of the largest unit but large single layers.

        A buffer for the gradients of an embedding would be too large for all others; it is
        allocated when it is needed.
        """
        sizes = [
            unit.numel * self._precision.reduce_dtype(unit.dtype).itemsize
            for unit in self._trainable
        ]
        usual = [
            size
            for size, unit in zip(sizes, self._trainable, strict=True)
            if not unit.sharded or is_block(unit.key)
        ]
        return max(usual or sizes, default=0)

    def _gather(self, unit: UnitLayout) -> int:
        return self._operation("all_gather", unit.numel, unit) * unit.dtype.itemsize

    def _reduce(self, unit: UnitLayout) -> int:
        itemsize = self._precision.reduce_dtype(unit.dtype).itemsize
        return self._operation("reduce_scatter", unit.numel, unit) * itemsize

    def _operation(self, name: Operation, numel: int, unit: UnitLayout | None = None) -> int:
        return sent_elements(
            name,
            numel,
            size=self._size,
            rank=self._rank,
            chunks=None if unit is None else unit.chunks,
        )

    def _shard(self, unit: UnitLayout) -> int:
        return unit.owned(self._rank) * unit.master.itemsize

    def _fragments(self, unit: UnitLayout) -> int:
        """Return how many parameters this rank owns a piece of."""
        start, stop = unit.chunks[self._rank]
        return sum(
            place.numel > 0 and place.offset < stop and place.offset + place.numel > start
            for place in unit.places
        )

    def _gradients(self, unit: UnitLayout, *, kept: bool) -> int:
        wire = self._precision.reduce_dtype(unit.dtype)
        total = self._precision.accumulate_dtype(unit.dtype)
        buffer = unit.numel * wire.itemsize if kept else 0
        own = 0 if kept and wire is total else unit.owned(self._rank) * total.itemsize
        return buffer + own + self._converted(unit, total)

    def _converted(self, unit: UnitLayout, total: torch.dtype) -> int:
        """Return the bytes of gradients in the fragments' dtype, when sums have another."""
        return 0 if total is unit.master else self._shard(unit)


def _regather(unit: UnitLayout, over: Axis) -> int:
    """Return the bytes that this rank sends when a unit's values come back for backward."""
    even = len(unit.chunks) != over.size
    chunks = None if even else unit.chunks
    return unit.dtype.itemsize * sent_elements(
        "all_gather", unit.numel, size=over.size, rank=over.rank, chunks=chunks
    )
