"""Measures the modules of a run: their operations in one step, their times in the next one.

Two steps, since counting looks at every operation of torch and would lengthen the times. Both are
ordinary steps of the training. A folder gets ``modules_RANK.json`` from each rank, and from rank 0
the sums: ``modules.txt``, a tree, and ``modules.json``.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from drivetrain.hardware.peaks import Peak, published_peak
from drivetrain.hardware.prices import TERA
from drivetrain.log import get_logger
from drivetrain.parts.naming import clean_name, uncompiled
from drivetrain.profiling.flops import FlopCounter
from drivetrain.profiling.modules import ModuleWork, RankWork, StepWork, module_sizes
from drivetrain.profiling.trail import ModulePlace, ModuleTrail
from drivetrain.runtime.precision import dtype_word
from drivetrain.strategy import Run
from drivetrain.telemetry.folder import device_name
from drivetrain.telemetry.recorder import StepClock

logger = get_logger(__name__)

TREE, SUMS = "modules.txt", "modules.json"
MOSTLY = 0.99
"""Where fewer of the operations are in the dtype of the peak, a line says how many."""


class ModelSizes:
    """The parameters of all models of a run, as the script made them."""

    def __init__(self) -> None:
        self._parameters: list[tuple[str, int, int]] = []
        self._names: list[str] = []

    def add(self, model: nn.Module) -> None:
        """Note a model that is about to be prepared."""
        name = name_of(model, len(self._names))
        self._names.append(name)
        self._parameters += [
            (f"{name}.{clean_name(parameter)}", id(tensor), tensor.numel())
            for parameter, tensor in model.named_parameters(remove_duplicate=False)
        ]

    def by_module(self) -> dict[str, int]:
        """Return the elements of the parameters inside each module."""
        return module_sizes(self._parameters)


class ModuleMeasurement:
    """Measures two steps, from now on.

    Args:
        folder: for the files; it exists.
        models: prepared, in the order of ``ModelSizes``.
        sizes: of the models.
        run: the ranks.
        teraflops: peak of a device; 0 takes the published one.
    """

    def __init__(
        self,
        folder: Path,
        models: Sequence[nn.Module],
        sizes: ModelSizes,
        run: Run,
        teraflops: float = 0.0,
    ) -> None:
        self._folder, self._sizes, self._run = folder, sizes, run
        self._teraflops = teraflops
        self._clock: StepClock | None = None
        named = {name_of(model, number): model for number, model in enumerate(models)}
        self._trail = ModuleTrail(named, self._turned)
        self._counter = FlopCounter(lambda: self._trail.place)
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def enter(self, model: nn.Module) -> None:
        """See that the forward of a model has begun, perhaps before the hooks were there."""
        self._trail.enter(model)

    def next_step(self) -> bool:
        """Go on from the counted step to the timed one; return False after both."""
        if self._clock is None:
            self._counter.stop()
            traffic = self._run.traffic
            self._clock = StepClock(lambda: traffic.waited_s)
            self._turned(self._trail.place)
            return True
        self._trail.close()
        return False

    def close(self) -> None:
        """Take everything off; nothing is written."""
        if self._clock is None:
            self._counter.stop()
        self._trail.close()

    def write(self) -> None:
        """Write this rank's part."""
        seconds, sections = (0.0, {}) if self._clock is None else self._clock.cut()
        rank = self._run.world.rank
        modules: defaultdict[str, ModuleWork] = defaultdict(ModuleWork)
        for (phase, name), count in self._counter.counts.items():
            modules[name].flops[phase] = count
        for section, passed in sections.items():
            phase, _, name = section.partition(" ")
            modules[name].seconds[phase] = passed
        work = RankWork(
            rank,
            device_name(self._run.world.device),
            seconds,
            modules,
            {str(dtype): count for dtype, count in self._counter.dtypes.items()},
            sorted(self._counter.unknown),
        )
        self._file(rank).write_text(json.dumps(work.plain(), indent=1), encoding="utf-8")

    def merge(self) -> None:
        """Add up the parts of all ranks, and print the largest; on rank 0, after all wrote."""
        files = [self._file(rank) for rank in range(self._run.world.size)]
        there = [each for each in files if each.exists()]
        ranks = [RankWork.read(json.loads(each.read_text(encoding="utf-8"))) for each in there]
        peak, words = self._peak(ranks)
        work = StepWork(ranks, self._sizes.by_module(), peak, words)
        (self._folder / TREE).write_text(f"{work.tree()}\n", encoding="utf-8")
        (self._folder / SUMS).write_text(json.dumps(work.plain(), indent=1), encoding="utf-8")
        lines = [work.table(), f"all modules: {self._folder / TREE}"]
        if len(there) < len(files):
            missing = [rank for rank, each in enumerate(files) if each not in there]
            lines.append(f"ranks {missing} are missing: the folder must be shared by all hosts")
        logger.announce("\n".join(lines))

    def _turned(self, place: ModulePlace) -> None:
        """Let the clock know the place at hand."""
        if self._clock is None:
            return
        device = self._run.world.device
        if device.type != "cpu":  # what the device still computes belongs to the place before
            torch.accelerator.current_stream(device).synchronize()
        self._clock.enter(f"{place.phase} {place.module}")

    def _peak(self, ranks: Iterable[RankWork]) -> tuple[Peak | None, str]:
        """Return the peak of rank 0's device in the dtype of most operations, and its origin."""
        if self._teraflops:
            words = f"the peak of {self._teraflops:g} TFLOP/s is that of profile.peak_teraflops"
            return Peak(self._teraflops * TERA, "", "profile.peak_teraflops"), words
        counts = _added(rank.dtypes for rank in ranks)
        device = self._run.world.device
        name = device_name(device)
        if not counts:
            return None, "no product was counted"
        key, most = counts.most_common(1)[0]
        dtype = getattr(torch, key.removeprefix("torch."))
        found = published_peak(name, dtype) if device.type != "cpu" else None
        if found is None:
            return None, (
                f"no published peak is known for {name} in {dtype_word(dtype)}; give yours with "
                "--set profile.peak_teraflops=NUMBER"
            )
        words = (
            f"peak of {name} in {found.precision}: {found.operations_per_second / TERA:g} TFLOP/s "
            f"({found.source})"
        )
        share = most / counts.total()
        return found, words if share >= MOSTLY else f"{words}; {share:.0%} are in this dtype"

    def _file(self, rank: int) -> Path:
        return self._folder / f"modules_{rank}.json"


def name_of(model: nn.Module, number: int) -> str:
    """Return the name of a model in tables: its class, and a number where it is not the first."""
    name = type(uncompiled(model)).__name__
    return f"{name}-{number}" if number else name


def _added(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    return sums
