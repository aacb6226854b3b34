"""The planner in a run: the strategy ``auto``, and the change that fits where memory ran out.

Rank 0 looks at the model with the first batch of the loaders, predicts every data-parallel layout
of the installed strategies on the described hardware, and tells the others. Tensor and pipeline
parallelism leave fewer replicas, so that a step would see fewer samples: they are not chosen, and
an error says so where nothing else fits.

Where an allocator found no memory in a step, the account of who holds this rank's is measured,
beside what ``cost()`` promises. The smallest change is named for which the promise of state, the
activations of the planner, and what the process held beyond both, are no more than there was. All
this is of one rank, which may have failed alone: it does not communicate.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, product
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from drivetrain.collectives.facts import share_facts
from drivetrain.compression.methods import AUTO
from drivetrain.config.outline import EXACT
from drivetrain.cost import Cost, ModelSpec, states_of
from drivetrain.data.examples import (
    Candidate,
    ExampleBatch,
    batches_as_arguments,
    first_rows,
    guessed_inputs,
)
from drivetrain.errors import ConfigError, DrivetrainError, UsageError
from drivetrain.facade.prepared import PreparedModel, RunState
from drivetrain.hardware.description import (
    Hardware,
    load_hardware,
    name_of_device,
    names_a_device,
)
from drivetrain.hardware.sizes import GIB, size_text
from drivetrain.losses import LEAST_PIECES, language_model_in, restore_loss
from drivetrain.memory import device_room, host_room
from drivetrain.model.fp8 import GATHERED, restore_products
from drivetrain.model.modules import restore_forward, uncompiled
from drivetrain.model.recompute import restore
from drivetrain.nested import tensors_in
from drivetrain.planner import AutoConfig, AutoOutline
from drivetrain.planner.layout import RECOMPUTE, PlannedLayout, layout_of, plain
from drivetrain.planner.search import (
    FRAGMENTS,
    Prediction,
    Predictor,
    Task,
    fits,
    judged,
    more_hosts,
    permitted_methods,
    room_of,
)
from drivetrain.runtime.world import World
from drivetrain.simulator.step import FP8
from drivetrain.simulator.traced import ROWS, traced_model
from drivetrain.strategy import Planning, Run, Strategy, StrategyPick

PROCESSOR = "cpu"
"""The kind of device, and the description, of processes that compute on processors."""

DESCRIBED = " (described, unmeasured)"
"""Words about hardware of which only a description is known, links included."""

HINT = (
    "; {} is a description that nobody measured on this machine: `drivetrain hardware measure` "
    "writes one, for strategy: {{name: auto, hardware: FILE}}"
)
"""Words after a prediction for such hardware."""


class Auto(AutoOutline, Strategy[AutoConfig]):
    """Chooses another strategy at ``prepare``; no object of it is ever made."""

    @classmethod
    def cost(cls, config: AutoConfig, model: ModelSpec, run: Run) -> Cost:
        """Return that nothing is known yet."""
        return Cost(uncounted={"dp": "everything of the strategy that prepare() chooses"})

    @classmethod
    def planning(cls) -> Planning:
        """Return the search for a plan."""
        return ChoosesPlan(cls)


class ChoosesPlan(Planning):
    """Chooses a data-parallel strategy by the predictions of plans."""

    def variants(self, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return no form: the strategies that may be chosen have theirs."""
        return ()

    def choose(
        self, config: AutoConfig, model: nn.Module, run: Run, recompute: Sequence[str]
    ) -> StrategyPick:
        """Return the quickest data-parallel layout that fits, by the prediction of rank 0.

        Raises:
            ConfigError: no description of the hardware is known, the model cannot be looked at, or
                nothing fits; on every rank.
        """
        examples = run.examples.read()
        pick: StrategyPick | None = None
        problem = ""
        if run.world.rank == 0:
            try:
                pick = _chosen(config, model, run, recompute, examples)
            except Exception as error:  # the other ranks wait for an answer
                problem = str(error)
        if run.world.size > 1:
            kind: Any = tuple[StrategyPick | None, str]
            pick, problem = share_facts((pick, problem), kind, doing="the choice of a strategy")
        if pick is None:
            raise ConfigError(f"strategy auto: {problem}; or name a strategy yourself")
        return pick


def _chosen(
    config: AutoConfig,
    model: nn.Module,
    run: Run,
    recompute: Sequence[str],
    examples: Sequence[ExampleBatch],
) -> StrategyPick:
    world = run.world
    hardware, described = hardware_of(config.hardware, world)
    paper = traced_model(model, candidates_of(model, examples))
    rows = run.examples.rows(run.mesh["dp"].size) or 1
    hosts, per_host = len(set(world.islands)), world.island_size
    hardware.check_measured(hosts, per_host)
    task = Task(paper, rows * run.accumulation * world.size, hardware, hosts, per_host)
    found = list(_predicted(Predictor(task), run, rows, recompute if paper.layers else ("none",)))
    if not found:
        raise ConfigError("no installed strategy draws the step of such a run")
    room = room_of(task)
    fitting = [each for each in found if fits(task, each)]
    if not fitting:
        least = min(found, key=Prediction.needed)
        raise ConfigError(
            f"no data-parallel layout fits: {least.layout} needs "
            f"{size_text(least.needed())} of {size_text(room)}; take "
            f"{more_hosts(task, run.precision.name)}, or divide the model over ranks: see "
            "`drivetrain plan`"
        )
    best = min(fitting, key=lambda each: (judged(each), each.needed()))
    planned = best.planned
    section = {"name": planned.strategy, **plain(planned.values)}
    settings = {} if planned.recompute == "none" else {"recompute": {"mode": planned.recompute}}
    line = (
        f"{best.layout} of {len(found)} layouts: {best.step_seconds * 1e3:,.2f} ms a step planned, "
        f"{size_text(best.needed())} of {size_text(room)}, on {described}"
    )
    hint = HINT.format(hardware.name) if described.endswith(DESCRIBED) else ""
    return StrategyPick(section, settings, line, best.step_seconds, hint)


def hardware_of(source: str, world: World) -> tuple[Hardware, str]:
    """Return the description of a run's devices, and words about its origin.

    Args:
        source: name or file of a description; "" finds one by the devices' name.
        world: of the run.

    Raises:
        ConfigError: no description is known.
    """
    if source:
        words = DESCRIBED if names_a_device(source) else ""
        return load_hardware(source), f"{source}{words}"
    if world.device.type == PROCESSOR:
        hardware = load_hardware(PROCESSOR)
        memory = hardware.device.memory
        share = host_room() / world.local_size / GIB
        device = hardware.device.model_copy(
            update={"memory": memory.model_copy(update={"gib": share})}
        )
        return hardware.model_copy(update={"device": device}), f"{PROCESSOR}{DESCRIBED}"
    title = torch.get_device_module(world.device).get_device_name(world.device)
    name = name_of_device(title)
    if name is None:
        raise ConfigError(
            f"no description of {title!r} is known; write one with `drivetrain hardware measure` "
            "and name it: strategy: {name: auto, hardware: FILE}"
        )
    return load_hardware(name), f"{name}{DESCRIBED}"


def candidates_of(model: nn.Module, examples: Sequence[ExampleBatch]) -> Iterator[Candidate]:
    """Yield the script's own batches, then inputs of the model's class and guesses."""
    yield from batches_as_arguments(model, examples, cuts=False)
    yield from guessed_inputs(model)


def _predicted(
    predictor: Predictor, run: Run, rows: int, recompute: Sequence[str]
) -> Iterator[Prediction]:
    """Yield the prediction of every data-parallel layout that this run can have.

    Gradients cross hosts as ``links.far`` says; with ``auto``, by each method within
    ``links.allow``. Which one, ``drivetrain.compression.automatic`` decides by measurements.
    """
    task = predictor.task
    chosen = run.links.name_for("gradients")
    open_still = [EXACT, *permitted_methods(run.links)]
    methods = open_still if chosen == AUTO else [chosen]
    if not run.world.spans_hosts:
        methods = [EXACT]
    gathered = run.precision.recipe == GATHERED  # the other recipes send what bf16 sends
    for name, plan in predictor.installed.planned.items():
        for keys in plan.layouts(task.model.layers, task.model.heads, task.ranks, task.per_host):
            for mode, links in product(recompute, methods):
                own = {
                    "micro_batch": rows,
                    "recompute": mode,
                    "precision": FP8 if gathered else run.precision.compute or "no",
                }
                words = {**keys, **own, "data_parallel": name, "links": links}
                try:
                    texts = {key: str(value) for key, value in words.items()}
                    planned = layout_of(texts, predictor.installed)
                    planned.kind.check_options(planned.config, run.precision)
                    prediction = predictor.predict(planned)
                    if not prediction.stored_most("disk"):  # which directory, only users know
                        yield prediction
                except ConfigError:
                    continue  # this form is not for such a run


HEAD = "out of memory on rank"
"""How the note of an error begins."""

UNJUDGED = (
    "the usual changes, the smallest first: recompute: {mode: full}; a higher accumulation with "
    "smaller batches; loss: chunked; a strategy that divides more (`drivetrain estimate`); offload"
)
"""For models whose steps cannot be estimated."""

_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": GIB, "tib": 2**40}

_PROMISED = {
    "parameters": ("parameters", "masters", "secondary"),
    "gradients": ("gradients", "lent"),
    "optimizer states": ("optimizer",),
    "buffers": ("buffers",),
}
"""Kinds of the account, and the kinds of ``cost()`` that they are."""

_MADE_FIRST = ("parameters", "buffers")
"""Kinds that are there before a step."""

_GATHERED, _REST = "gathered for use", "activations and all else"


def explain(error: Exception, state: RunState, resident: int) -> None:
    """Add the account of this rank's memory to an allocator's error, once, as a note.

    Args:
        error: of an allocator.
        state: of the run.
        resident: bytes of the process after ``prepare``.
    """
    known: Sequence[str] = getattr(error, "__notes__", ())
    if any(note.startswith(HEAD) for note in known):
        return
    lines: list[str] = []
    try:
        lines.extend(_lines(str(error), state, resident))
    except Exception as problem:  # whatever happens here, the script must see its own error
        lines.append(f"{HEAD} {state.world.rank}: no more is known: {problem}")
    error.add_note("\n".join(lines))


def _lines(error: str, state: RunState, resident: int) -> Iterator[str]:
    world, entries = state.world, state.models
    held, promised = _account(entries, world.device), _promised(entries)
    match = _ASKED.search(error)
    asked = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    left = (host_room() if world.device.type == "cpu" else device_room(world.device)) or 0
    words = f", {size_text(asked)} more asked for" if asked else ""
    yield (
        f"{HEAD} {world.rank} ({world.device}): {size_text(held.total())} held{words}, "
        f"{size_text(left)} left"
    )
    for kind, count in held.items():
        beside = f", cost() promises {size_text(promised[kind])}" if kind in promised else ""
        yield f"  {kind}: {size_text(count)}{beside}"
    if (path := _snapshot(state)) is not None:
        yield f"  every block of the allocator: {path}, for pytorch.org/memory_viz"
    entry = state.last_run or next(iter(entries), None)
    if entry is None:
        return
    # What a process on processors has beside its tensors, the interpreter and its libraries.
    others = resident - sum(promised.get(kind, 0) for kind in _MADE_FIRST)
    others = max(0, others) if world.device.type == "cpu" else 0
    try:
        ladder = Ladder(entry, state, held.total(), asked, others)
        yield from ladder.lines(held.total() + left)
    except ConfigError as problem:
        yield f"{UNJUDGED}; nobody knows which fits: {problem}"


def _snapshot(state: RunState) -> Path | None:
    """Write the file of torch's allocator, if the run has a folder for it; return its path."""
    world, folder = state.world, state.config.run.memory_snapshot
    if not folder or world.device.type != "cuda":
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"rank-{world.rank}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    return path


# --- the account ---


def _account(entries: Sequence[PreparedModel], device: torch.device) -> "Counter[str]":
    """Return the bytes that this process holds by kind, each storage once."""
    found = Counter(dict.fromkeys([*_PROMISED, _GATHERED, _REST], 0))
    seen: set[int] = set()
    for kind, tensors in chain.from_iterable(map(_tensors, entries)):
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == device.type:
                storage = tensor.untyped_storage()
                found[kind] += 0 if storage._cdata in seen else storage.nbytes()
                seen.add(storage._cdata)
    if device.type == "cpu":
        whole = psutil.Process().memory_info().rss
    else:
        whole = torch.accelerator.memory_allocated(device)
    found[_REST] = max(0, whole - found.total())
    return found


def _tensors(entry: PreparedModel) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield a model's tensors on this rank by kind; those of a kind before may share memory."""
    groups = [group for optimizer in entry.optimizers for group in optimizer.param_groups]
    stepped = [each for group in groups for each in group["params"]]
    states = [each for optimizer in entry.optimizers for each in optimizer.state.values()]
    with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter would be gathered
        own = list(entry.model.parameters())
        # Where ranks hold pieces, what stands at p.grad is no plain tensor, and has no memory.
        gradients = [each.grad for each in (*stepped, *own) if type(each.grad) is Tensor]
        yield "gradients", gradients
        yield "parameters", stepped
        yield _GATHERED if entry.strategy.pace.forwards else "parameters", own
        yield "buffers", list(entry.model.buffers())
        mappings = (state for state in states if isinstance(state, Mapping))
        yield "optimizer states", [value for state in mappings for value in state.values()]


def _promised(entries: Iterable[PreparedModel]) -> Mapping[str, int]:
    """Return the promised bytes by kind of the account; {} where a strategy makes no promise."""
    try:
        costs = [entry.promised(_states(entry)) for entry in entries]
    except DrivetrainError:  # sizes alone may not be enough for a strategy
        return {}
    return {
        kind: sum(cost.held.get(each, 0) for cost in costs for each in kinds)
        for kind, kinds in _PROMISED.items()
    }


def _states(entry: PreparedModel) -> int:
    """Return how many tensors the optimizers keep for a parameter, or will after a first step."""
    usual = [states_of(each, group) for each in entry.optimizers for group in each.param_groups]
    return entry.states or max(usual, default=0)


# --- the smallest change that fits ---


class Change(NamedTuple):
    """A change of the configuration.

    Attributes:
        words: the line to write, and what else to change.
        planned: the layout with it.
        spared: bytes of activations that the planner does not know to be gone.
    """

    words: str
    planned: PlannedLayout
    spared: float = 0.0


class Ladder:
    """Changes that take less memory, the smallest first, and whether each of them fits.

    Args:
        entry: the model that ran.
        state: see ``explain``.
        now: bytes that the process holds.
        asked: bytes of the request that failed.
        beside: bytes of the process before any step, beside tensors.

    Raises:
        ConfigError: the model cannot be looked at, or the step of its strategy is not drawn.
    """

    def __init__(
        self, entry: PreparedModel, state: RunState, now: int, asked: int, beside: int
    ) -> None:
        self._entry, self._state = entry, state
        self._run = run = entry.strategy.run
        if any(size.size > 1 for name, size in run.mesh.items() if name != "dp"):
            raise ConfigError("ranks divide the model itself: `drivetrain plan` compares layouts")
        model = _bare(entry.model)
        world, settings = run.world, state.config.run
        examples = [first_rows(loader) for loader in run.examples.loaders]
        candidates = candidates_of(model, examples)
        rows = run.examples.rows(run.mesh["dp"].size)
        if (call := state.last_call) is not None:  # else the loaders know better
            rows = next((each.shape[0] for each in tensors_in(call) if each.dim()), rows)
            few = tree_map(partial(_first_rows, of=rows), call)
            candidates = chain([Candidate("the batch", *few)], candidates)
        if not rows:
            raise ConfigError("the samples of a batch are not known; prepare the loader as well")
        self._paper = traced_model(model, candidates)
        hosts = len(set(world.islands))
        batch = rows * run.accumulation * world.size
        task = Task(self._paper, batch, hardware_of("", world)[0], hosts, world.island_size)
        self._predictor = Predictor(task)
        keys = {
            "micro_batch": str(rows),
            "recompute": settings.recompute.mode,
            "precision": run.precision.compute or "no",
        }
        self._now = PlannedLayout(
            "", type(entry.strategy), entry.strategy.config, {}, 0, rows, settings.recompute.mode,
            run.precision.compute or "no", EXACT, EXACT, keys,
        )  # fmt: skip
        self._beyond = 0.0
        needed = self._needs(Change("", self._now))
        if asked > needed + now:
            raise ConfigError("one request is larger than the whole step is estimated to be")
        self._beyond = max(beside, now + asked - needed)

    def lines(self, room: int) -> Iterator[str]:
        """Yield lines about the step, and the smallest change that fits into so many bytes."""
        needed = self._needs(Change("", self._now))
        whole = f"a whole step needs {size_text(round(needed))} of {size_text(room)}, estimated"
        if needed <= room:
            yield (
                f"{whole}, and fits: look for another process that takes memory, a limit of this "
                "one, or gaps between blocks (PYTORCH_ALLOC_CONF=expandable_segments:True)"
            )
            return
        yield whole
        least = needed
        for change in chain(self._single(), self._several()):
            with suppress(ConfigError):  # steps with a store are drawn for some hardware alone
                needed = self._needs(change)
                if needed <= room and self._host_has(change.planned):
                    yield f"the smallest change that fits, with {size_text(round(needed))}:"
                    yield from (f"  {line}" for line in change.words.split("\n"))
                    return
                least = min(least, needed)
        yield (
            f"no known change fits, the least needs {size_text(round(least))}: take more ranks "
            "that divide the state, or a smaller model"
        )

    def _single(self) -> Iterator[Change]:
        """Yield changes of one thing."""
        now, accumulation = self._now, self._run.accumulation
        if self._paper.layers:
            for mode in RECOMPUTE[RECOMPUTE.index(now.recompute) + 1 :]:
                if mode == "selective" and self._state.config.run.compile != "none":
                    continue  # refused beside compiled blocks
                yield Change(f"recompute: {{mode: {mode}}}", replace(now, recompute=mode))
        whole = now.micro_batch
        small = [each for each in range(1, isqrt(whole) + 1) if whole % each == 0]
        for pieces in sorted({*small, *(whole // each for each in small)} - {1}):
            words = f"accumulation: {accumulation * pieces}"
            words += f"\nand batches of a rank with {whole // pieces} in place of {whole} samples"
            yield Change(words, replace(now, micro_batch=whole // pieces))
        with suppress(UsageError):
            yield self._chunked()
        yield from self._strategies(now)

    def _several(self) -> Iterator[Change]:
        """Yield a strategy together with the fewest activations."""
        *_, last = RECOMPUTE
        least = replace(self._now, recompute=last if self._paper.layers else "none", micro_batch=1)
        words = f"recompute: {{mode: {last}}}\n" if self._paper.layers else ""
        words += f"accumulation: {self._run.accumulation * self._now.micro_batch}\n"
        words += f"and batches of a rank with 1 in place of {self._now.micro_batch} samples"
        yield Change(words, least)
        for change in self._strategies(least):
            yield change._replace(words=f"{change.words}\n{words}")

    def _chunked(self) -> Change:
        """Return the loss in pieces.

        Raises:
            UsageError: the model has no such loss.
        """
        if self._state.config.run.loss != "whole":
            raise UsageError("it is already")
        _, head = language_model_in(self._entry.model)
        elements = self._paper.logits(self._now.micro_batch)
        logits = (4 + self._paper.width) * elements * (1 - 1 / LEAST_PIECES)
        return Change("loss: chunked", self._now, logits - 4 * head.weight.numel())

    def _strategies(self, now: PlannedLayout) -> Iterator[Change]:
        """Yield data-parallel strategies that hold less, that which holds most first."""
        installed = self._predictor.installed
        found: list[tuple[bool, int, Change]] = []
        for name, plan in installed.planned.items():
            for own in plan.layouts(1, 1, 1, 1):
                keys = {**now.keys, "data_parallel": name, **{k: str(v) for k, v in own.items()}}
                with suppress(ConfigError):
                    other = layout_of(keys, installed)
                    other.kind.check_options(other.config, self._run.precision)
                    planned = replace(other, micro_batch=now.micro_batch, recompute=now.recompute)
                    change = Change(planned.yaml().strip(), planned)
                    found.append((bool(own), -self._on_device(planned), change))
        held = self._on_device(now)
        order = sorted(found, key=lambda each: each[:2])
        yield from (change for _, nbytes, change in order if -nbytes < held)

    # --- bytes ---

    def _needs(self, change: Change) -> float:
        """Return the bytes of a step, by the promise of state and the planner's activations."""
        predicted = self._predictor.predict(change.planned)
        passing = max(0.0, predicted.peak_bytes - sum(predicted.held.values()))
        spared = max(0.0, min(change.spared, passing))
        held = self._on_device(change.planned)
        return (held + passing - spared) * FRAGMENTS + self._beyond

    def _on_device(self, planned: PlannedLayout) -> int:
        return self._cost(planned).on_device

    def _host_has(self, planned: PlannedLayout) -> bool:
        """Whether the host has room for what does not lie on the devices of its ranks."""
        return self._cost(planned).in_host_memory * self._run.world.local_size <= host_room()

    def _cost(self, planned: PlannedLayout) -> Cost:
        given = replace(self._entry.given, states=_states(self._entry))
        return planned.kind.cost(planned.config, given, self._run)


def _first_rows(leaf: Any, of: int) -> Any:
    batched = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == of
    return leaf[: max(ROWS)] if batched else leaf


def _bare(module: nn.Module) -> nn.Module:
    """Return a copy without values of parameters, and without what the run has put on the model.

    To look at the model itself would gather what ranks divide.

    Raises:
        ConfigError: the model cannot be copied.
    """
    with torch._C.DisableTorchFunctionSubclass():
        memo: dict[int, Any] = {
            id(each): nn.Parameter(
                torch.empty(each.shape, dtype=each.dtype, device="meta"), each.requires_grad
            )
            for each in module.parameters()
        }
        memo |= {id(each): each for each in module.buffers()}
        try:
            copied = copy.deepcopy(uncompiled(module), memo)
        except Exception as problem:  # whatever the user's objects raise
            raise ConfigError(f"{type(module).__name__} cannot be copied: {problem}") from problem
    restore_loss(copied)
    restore_products(copied)
    restore_forward(copied)
    restore(copied)
    return copied
