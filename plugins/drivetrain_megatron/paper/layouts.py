"""The part of ``megatron`` that plans ask: its step on paper, and the divisions that are tried."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from drivetrain.cost import ModelSpec
from drivetrain.paper.bounds import PaperBound, UnitCosts
from drivetrain.paper.contract import OnPaper
from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import PaperStep
from drivetrain.paper.work import PaperUnit
from drivetrain.strategy import Run
from drivetrain_megatron.cell import data_parallel
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.cost import part_of
from drivetrain_megatron.paper.step import cell_bound, cell_step

LAYOUT_KEYS: Mapping[str, str] = {
    key: key for key in ("tp", "pp", "schedule", "chunks", "sequence_parallel")
}
CHUNKS = (2, 4, 8)
"""Stages per rank of the interleaved schedules that are tried."""


class CellOnPaper(OnPaper):
    """A cell of ranks in plans."""

    layout_keys: ClassVar[Mapping[str, str]] = LAYOUT_KEYS
    inner_option: ClassVar[str] = "data_parallel"

    @classmethod
    def step(cls, config: MegatronConfig, units: Sequence[PaperUnit], run: PaperRun) -> PaperStep:
        """Draw the step of a cell; the strategy inside draws that of each stage."""
        return cell_step(config, units, run)

    @classmethod
    def bound(
        cls,
        config: MegatronConfig,
        units: Sequence[PaperUnit],
        run: PaperRun,
        costs: UnitCosts,
    ) -> PaperBound:
        """Return a bound from the slowest stage and the fullest stage."""
        return cell_bound(config, units, run, costs)

    @classmethod
    def part(cls, config: MegatronConfig, model: ModelSpec, run: Run) -> ModelSpec:
        """Return this rank's part of each tensor of its stages."""
        return part_of(config, model, run)

    @classmethod
    def stepped(
        cls, config: MegatronConfig, model: ModelSpec, run: Run
    ) -> Mapping[str, tuple[int, int]]:
        """Return the elements that the data-parallel strategy steps, of this rank's parts."""
        kind, options = data_parallel(config)
        return kind.stepped(options, part_of(config, model, run), run)

    @classmethod
    def layouts(
        cls, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return the divisions that a search tries."""
        return cell_layouts(blocks, heads, ranks, per_host)


def cell_layouts(blocks: int, heads: int, ranks: int, per_host: int) -> Iterator[Mapping[str, Any]]:
    """Yield every division: ``tp`` inside of a host, ``pp`` that divides the blocks.

    Tensor parallelism over a network loses by an order of magnitude (Narayanan et al. 2021,
    arXiv 2104.04473, section 5.4.1), so it is not tried there.

    Args:
        blocks: repeated blocks of the model.
        heads: heads of attention.
        ranks: of all hosts.
        per_host: ranks of a host.
    """
    for tp in divisors(ranks):
        if tp > per_host or heads % tp:
            continue
        for pp in divisors(ranks // tp):
            if pp > blocks or blocks % pp or tp * pp == 1:
                continue
            for sequence in (False, True) if tp > 1 else (False,):
                common = {"tp": tp, "pp": pp, "sequence_parallel": sequence}
                yield {**common, "schedule": "1f1b", "chunks": 1}
                for chunks in CHUNKS if pp > 1 else ():
                    if blocks % (pp * chunks) == 0:
                        yield {**common, "schedule": "interleaved", "chunks": chunks}


def divisors(count: int) -> list[int]:
    """Return the numbers that divide a count, ascending."""
    return [each for each in range(1, count + 1) if count % each == 0]
