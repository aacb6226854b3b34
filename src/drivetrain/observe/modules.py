"""The work and the time of modules: which one computes, on a rank and summed over ranks.

A module computes in its forward, in a recomputed forward, and in its backward, which begins with
the gradient of one of its results, and ends with that of one of its inputs, or where another
module's begins. Modules whose call is compiled are followed as one: hooks inside would compile them
anew.

The operations of one step are counted, and the times of the next one are taken: counting looks at
every operation of torch and would lengthen the times. Both are ordinary steps of the training. A
folder gets ``modules_RANK.json`` from each rank, and from rank 0 the sums: ``modules.txt``, a tree,
and ``modules.json``.

Counted are products of matrices, convolutions and attention, by torch's own formulas: a product of
(m, k) and (k, n) has 2 m k n. Attention counts as if no mask left anything out. Additions, norms
and activations are no work that a device's peak is about; they count nothing.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives.facts import gather_facts
from drivetrain.config.schema import dtype_word
from drivetrain.hardware.description import Peak, published_peak
from drivetrain.hardware.prices import TERA
from drivetrain.log import get_logger
from drivetrain.model.guard import Arguments, Keywords
from drivetrain.model.modules import (
    COMPILED_CALL,
    ModelSizes,
    UninheritedHook,
    compiles_inside,
    is_compiled_call,
    name_of,
    names_around,
)
from drivetrain.model.valueless import WORK, ValuelessTensor
from drivetrain.observe.history import in_short
from drivetrain.observe.recorder import StepClock
from drivetrain.parallel.backward import after_backward, in_backward
from drivetrain.strategy import Run

logger = get_logger(__name__)

TREE, SUMS = "modules.txt", "modules.json"

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"
"""The phases: ``again`` is a forward that is recomputed in backward."""

OUTSIDE = ""
"""The name of the module where no module computes."""


class ModulePlace(NamedTuple):
    """The part of a step at hand.

    Attributes:
        phase: ``forward``, ``again`` or ``backward``.
        module: name of the innermost module, after that of its model, such as ``GPT.blocks.3``.
    """

    phase: str
    module: str


@dataclass(frozen=True, slots=True, eq=False)
class _ModuleCall:
    """One call of a module, and the call around it."""

    module: str
    around: "_ModuleCall | None"


class ModuleTracker:
    """Follows the modules of some models from now until ``close``.

    Args:
        models: by name.
        turned: is told of each new place, when it begins.
        inside: whether the modules inside of these are followed, too.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        turned: Callable[[ModulePlace], None],
        *,
        inside: bool = True,
    ) -> None:
        self._turned, self._inside = turned, inside
        self._phase, self._call = FORWARD, _NO_CALL
        self._before: list[tuple[str, _ModuleCall]] = []  # each forward under way
        self._open = True
        self._ends_soon = False
        self._handles: list[RemovableHandle] = []
        self._compiled: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._names: dict[int, str] = {}
        for name, model in models.items():
            self._watch(name, model)

    @property
    def place(self) -> ModulePlace:
        """The place at hand."""
        if self._call is _NO_CALL:
            return ModulePlace(BACKWARD if in_backward() else FORWARD, OUTSIDE)
        return ModulePlace(self._phase, self._call.module)

    def close(self) -> None:
        """Take the hooks off."""
        self._open = False
        for handle in self._handles:
            handle.remove()
        for module, call in self._compiled:
            module.__dict__[COMPILED_CALL] = call
        self._handles.clear()
        self._compiled.clear()

    def enter(self, model: nn.Module) -> None:
        """Enter a model whose forward has begun before this trail."""
        name = self._names.get(id(model))
        if name is not None and not self._before:
            self._enter(name, (), {})

    # --- the hooks ---

    def _watch(self, name: str, module: nn.Module) -> None:
        if id(module) in self._names:
            return
        self._names[id(module)] = name
        if is_compiled_call(module):
            self._watch_compiled(name, module)
            return
        enter = UninheritedHook(lambda module, args, kwargs: self._enter(name, args, kwargs))
        leave = UninheritedHook(lambda module, args, outputs: self._leave(outputs))
        self._handles += [
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]
        if self._inside and not compiles_inside(module):
            for child, inner in module.named_children():
                self._watch(f"{name}.{child}", inner)

    def _watch_compiled(self, name: str, module: nn.Module) -> None:
        call = module.__dict__[COMPILED_CALL]

        def followed(*args: Any, **kwargs: Any) -> Any:
            outputs = None
            self._enter(name, args, kwargs)
            try:
                outputs = call(*args, **kwargs)
            finally:
                self._leave(outputs)
            return outputs

        self._compiled.append((module, call))
        module.__dict__[COMPILED_CALL] = followed

    def _enter(self, name: str, args: Arguments, kwargs: Keywords) -> None:
        if self._ends_soon and not in_backward():
            self._end_backward()  # an exception has cut it short
        self._before.append((self._phase, self._call))
        call = _ModuleCall(name, self._call)
        self._go(AGAIN if in_backward() else FORWARD, call)

        def end(gradient: Tensor) -> None:
            if self._is_inside(call):
                self._go_backward(call.around or _NO_CALL)

        self._when_gradient_comes((args, kwargs), end)

    def _leave(self, outputs: Any) -> None:
        if not (self._open and self._before):  # it was entered before the trail began
            return
        call = self._call
        self._go(*self._before.pop())

        def begin(gradient: Tensor) -> None:
            # A result of a module inside may be that of this one, too: the one inside comes first.
            if not (self._phase == BACKWARD and self._is_inside(call)):
                self._go_backward(call)

        self._when_gradient_comes(outputs, begin)

    def _is_inside(self, call: _ModuleCall) -> bool:
        here: _ModuleCall | None = self._call
        while here is not None and here is not call:
            here = here.around
        return here is call

    def _when_gradient_comes(self, values: Any, action: Callable[[Tensor], None]) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(values):
            if not isinstance(leaf, Tensor) or isinstance(leaf, ValuelessTensor):
                continue
            if leaf.requires_grad:
                handle = leaf.register_hook(action)  # type: ignore[no-untyped-call]
                if leaf.is_leaf:  # hooks on others die with the graph
                    self._handles.append(handle)

    def _go_backward(self, call: _ModuleCall) -> None:
        if not self._open:
            return
        if not self._ends_soon:
            self._ends_soon = True
            after_backward(self._end_backward)
        self._go(BACKWARD, call)

    def _end_backward(self) -> None:
        self._ends_soon = False
        if self._open:
            self._go(FORWARD, _NO_CALL)

    def _go(self, phase: str, call: _ModuleCall) -> None:
        self._phase, self._call = phase, call
        self._turned(self.place)


_NO_CALL = _ModuleCall(OUTSIDE, None)


# --- the operations of a step ---


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
        formula = WORK.get(kind)
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


# --- sums over ranks, the table of a step, and the tree of modules ---

# A rank notes for each module what its own code did, without the modules inside of it. Rows of the
# tree are sums over everything inside; rows of the table are sums over modules at like places.


SHOWN = 10
"""Rows of the table."""

_PHASES = (FORWARD, AGAIN, BACKWARD)
_OUTSIDE_WORDS = "outside of modules"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(slots=True)
class ModuleWork:
    """The work of a module, in a step.

    Attributes:
        flops: operations by phase.
        seconds: by phase.
        ranks: which computed it.
    """

    flops: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Operations of all phases."""
        return sum(self.flops.values())

    @property
    def rate(self) -> float | None:
        """Operations per second of a rank, while it computed this; None without a time."""
        passed = sum(self.seconds.values())
        return self.total / passed if passed > 0 else None

    def add(self, other: "ModuleWork") -> None:
        """Add the work of another module, or of another rank."""
        for phase, count in other.flops.items():
            self.flops[phase] = self.flops.get(phase, 0) + count
        for phase, passed in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + passed
        self.ranks |= other.ranks


@dataclass(frozen=True, slots=True)
class RankWork:
    """The work of one rank in a step.

    Attributes:
        rank: its number.
        device: the name of its device.
        seconds: the wall time of the step that was timed.
        own: by name, the work of each module's own code.
        dtypes: operations by the dtype of their factors, as ``torch.bfloat16``.
        unknown: operations that torch's formulas failed on.
    """

    rank: int
    device: str
    seconds: float
    own: Mapping[str, ModuleWork]
    dtypes: Mapping[str, int]
    unknown: Sequence[str] = ()


_RANK_WORK = TypeAdapter(RankWork)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of all ranks in a step.

    Args:
        ranks: the work of each.
        parameters: elements of each module's parameters, with those inside, by name.
        peak: of a device; None where none is known.
        peak_words: where it comes from, or why there is none.
    """

    ranks: Sequence[RankWork]
    parameters: Mapping[str, int]
    peak: Peak | None
    peak_words: str

    def own(self) -> dict[str, ModuleWork]:
        """Return the work of each module's own code on all ranks."""
        return _summed((name, work) for rank in self.ranks for name, work in rank.own.items())

    def whole(self) -> dict[str, ModuleWork]:
        """Return the work of each module on all ranks, with the modules inside of it."""
        return _summed(
            (around, work) for name, work in self.own().items() for around in names_around(name)
        )

    def plain(self) -> dict[str, Any]:
        """Return the tree as JSON has it."""
        peak = None if self.peak is None else self.peak._asdict()
        rows = {
            name: {
                "parameters": self.parameters.get(name),
                "flops": work.flops,
                "seconds": work.seconds,
                "ranks": sorted(work.ranks),
                "flops_per_second": work.rate,
                "share_of_peak": self._share_of_peak(work),
            }
            for name, work in sorted(self.whole().items(), key=_by_place)
        }
        return {"ranks": len(self.ranks), "seconds": self._seconds, "peak": peak, "modules": rows}

    def table(self) -> str:
        """Return a line about the step, and the ten kinds of modules with the most work."""
        kinds = _summed((_NUMBER.sub("*", name), work) for name, work in self.own().items())
        largest = sorted(kinds.items(), key=lambda item: -item[1].total)
        rows = [(name, None, work) for name, work in largest[:SHOWN] if work.total]
        return "\n".join([self._headline(), *self._rows(rows)])

    def tree(self) -> str:
        """Return a line about the step, and a row for each module, with everything inside of it."""
        rows = [
            (f"{'  ' * name.count('.')}{name.rpartition('.')[2]}", self.parameters.get(name), work)
            for name, work in sorted(self.whole().items(), key=_by_place)
        ]
        return "\n".join([self._headline(), *self._rows(rows)])

    @property
    def _seconds(self) -> float:
        return sum(rank.seconds for rank in self.ranks) / len(self.ranks)

    def _headline(self) -> str:
        whole = ModuleWork()
        for work in self.own().values():
            whole.add(work)
        parts = [f"{in_short(whole.flops[p])} {p}" for p in _PHASES if whole.flops.get(p)]
        rate = whole.total / (self._seconds * len(self.ranks)) if self._seconds else 0.0
        line = (
            f"a step has {in_short(whole.total)} floating point operations on {len(self.ranks)} "
            f"ranks ({', '.join(parts)}) and takes {1e3 * self._seconds:.1f} ms: "
            f"{in_short(rate)}FLOP/s of a rank"
        )
        if self.peak is not None:
            line += f", {rate / self.peak.operations_per_second:.1%} of the peak"
        lines = [line, self.peak_words]
        unknown = sorted({name for rank in self.ranks for name in rank.unknown})
        if unknown:
            lines.append(f"not counted, since torch's formula fails: {', '.join(unknown)}")
        return "\n".join(lines)

    def _rows(self, rows: Iterable[tuple[str, int | None, ModuleWork]]) -> list[str]:
        """Return the heading and the rows of a table."""
        total = sum(work.total for work in self.own().values()) or 1
        lines = [
            f"{'share':>6} {'forward':>8} {'again':>8} {'backward':>8} {'ms/rank':>8} "
            f"{'FLOP/s':>8} {'of peak':>7} {'parameters':>10}  module"
        ]
        for name, parameters, work in rows:
            flops = [in_short(work.flops[p]) if work.flops.get(p) else "-" for p in _PHASES]
            ms = 1e3 * sum(work.seconds.values()) / max(1, len(work.ranks))
            peak = self._share_of_peak(work)
            cells = [
                f"{work.total / total:>6.1%}",
                *(f"{each:>8}" for each in flops),
                f"{ms:>8.2f}",
                f"{in_short(work.rate) if work.rate else '-':>8}",
                f"{'-' if peak is None else f'{peak:.1%}':>7}",
                f"{'' if parameters is None else in_short(parameters):>10}",
            ]
            lines.append(f"{' '.join(cells)}  {name or _OUTSIDE_WORDS}")
        return lines

    def _share_of_peak(self, work: ModuleWork) -> float | None:
        if self.peak is None or not work.rate:
            return None
        return work.rate / self.peak.operations_per_second


def _summed(items: Iterable[tuple[str, ModuleWork]]) -> dict[str, ModuleWork]:
    sums: defaultdict[str, ModuleWork] = defaultdict(ModuleWork)
    for name, work in items:
        sums[name].add(work)
    return dict(sums)


def _by_place(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Return the order of a tree: numbers by size, and the rest of the step last."""
    parts = item[0].split(".")
    keys = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
    return (item[0] == OUTSIDE, *keys)


# --- the two steps ---


MOSTLY = 0.99
"""Where fewer of the operations are in the dtype of the peak, a line says how many."""


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
        self._trail = ModuleTracker(named, self._turned)
        self._counter = FlopCounter(lambda: self._trail.place)
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def enter(self, model: nn.Module) -> None:
        """See that the forward of a model has begun, perhaps before the hooks were there."""
        self._trail.enter(model)

    def next_step(self) -> bool:
        """Go on from the counted step to the timed one; return False after both."""
        if self._clock is None:
            self._counter.stop()
            self._clock = StepClock(self._run.traffic)
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
        """Write this rank's part; on rank 0 also add up all parts, and print them. Collective."""
        seconds, sections = (0.0, {}) if self._clock is None else self._clock.cut()
        rank = self._run.world.rank
        modules: defaultdict[str, ModuleWork] = defaultdict(lambda: ModuleWork(ranks={rank}))
        for (phase, name), count in self._counter.counts.items():
            modules[name].flops[phase] = count
        for section, passed in sections.items():
            phase, _, name = section.partition(" ")
            modules[name].seconds[phase] = passed
        work = RankWork(
            rank,
            self._run.world.device_name,
            seconds,
            modules,
            {str(dtype): count for dtype, count in self._counter.dtypes.items()},
            sorted(self._counter.unknown),
        )
        text = _RANK_WORK.dump_json(work, indent=1).decode()
        (self._folder / f"modules_{rank}.json").write_text(text, encoding="utf-8")
        texts = gather_facts(text, str, doing="the work of modules")
        if self._run.world.is_main:
            ranks = [_RANK_WORK.validate_json(each) for each in texts]
            step = StepWork(ranks, self._sizes.by_module(), *self._peak(ranks))
            (self._folder / TREE).write_text(f"{step.tree()}\n", encoding="utf-8")
            (self._folder / SUMS).write_text(json.dumps(step.plain(), indent=1), encoding="utf-8")
            logger.announce(f"{step.table()}\nall modules: {self._folder / TREE}")

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
        counts = sum((Counter(rank.dtypes) for rank in ranks), Counter[str]())
        device = self._run.world.device
        name = self._run.world.device_name
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
