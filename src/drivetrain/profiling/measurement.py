"""Measures the modules of a run: their operations in one step, their times in the next one.

Two steps, since counting looks at every operation of torch and would lengthen the times. Both are
ordinary steps of the training. A folder gets ``modules_RANK.json`` from each rank, and from rank 0
the sums: ``modules.txt``, a tree, and ``modules.json``.

Counted are products of matrices, convolutions and attention, by torch's own formulas: a product of
(m, k) and (k, n) has 2 m k n. Attention counts as if no mask left anything out. Additions, norms
and activations are no work that a device's peak is about; they count nothing.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from drivetrain.hardware.catalog import Peak, published_peak
from drivetrain.hardware.prices import TERA
from drivetrain.log import get_logger
from drivetrain.parts.guard import Keywords
from drivetrain.parts.naming import clean_name, uncompiled
from drivetrain.profiling.modules import (
    ModulePlace,
    ModuleTrail,
    ModuleWork,
    RankWork,
    StepWork,
    module_sizes,
)
from drivetrain.runtime.precision import dtype_word
from drivetrain.strategy import Run
from drivetrain.telemetry.facts import device_name
from drivetrain.telemetry.recorder import StepClock

_aten = torch.ops.aten
_FLASH = _aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward

_FORMULAS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        # Attention of processors, which torch has no formulas for.
        _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_FLASH],
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[_FLASH_BACKWARD],
        **flop_registry,
    }
)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered, and changes nothing.

    Args:
        place: tells which module computes.

    Attributes:
        counts: operations by place.
        dtypes: operations by the dtype of their factors.
        unknown: names of operations whose formula failed; they count nothing.
    """

    supports_higher_order_operators = True

    def __init__(self, place: Callable[[], ModulePlace]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[ModulePlace] = Counter()
        self.dtypes: Counter[torch.dtype] = Counter()
        self.unknown: set[str] = set()
        self._place = place
        self._counting = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code as it is; its calls of torch are counted."""
        return True

    def stop(self) -> None:
        """Count no more. A mode that a script has entered since, and not left, keeps its place."""
        self._counting = False
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Keywords | None = None
    ) -> Any:
        """Run an operation, and count it."""
        named = dict(kwargs or {})
        result = func(*args, **named)
        kind = getattr(func, "_overloadpacket", func)
        formula = _FORMULAS.get(kind)
        if formula is not None and self._counting:
            try:
                count = formula(*args, **named, out_val=result)
            except Exception:  # an overload that torch's formula does not know: training goes on
                self.unknown.add(str(kind))
                return result
            self.counts[self._place()] += count
            factors = (each.dtype for each in args if isinstance(each, Tensor))
            self.dtypes[next(factors, torch.get_default_dtype())] += count
        return result


# --- the two steps ---


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
