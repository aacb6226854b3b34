"""Layouts: how a step is spread over ranks, as text, options and YAML; the parts of its time."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import yaml

from drivetrain.collectives.volume import Route
from drivetrain.compression.compressor import Fidelity
from drivetrain.compression.methods import CrossingTensor, LinkMethods, crossing_pieces
from drivetrain.config import DtypesConfig, Layer, RunConfig, ValueOrigin
from drivetrain.config.outline import BF16, EXACT
from drivetrain.config.resolve import resolve
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.errors import ConfigError
from drivetrain.hardware.prices import HardwarePrices
from drivetrain.model.fp8 import GATHERED
from drivetrain.registry import strategies
from drivetrain.runtime.precision import Precision
from drivetrain.simulator.step import (
    COMPUTE,
    FP8,
    STATE_BYTES,
    STORE_LANES,
    AxisPlace,
    Collective,
    FarMethod,
    MatrixProduct,
    MemoryPass,
    PlayedStep,
    PlayedTask,
    SimulatedStep,
    widest,
)
from drivetrain.strategy import Planning, Strategy, find_strategy


class InstalledPlans:
    """What plans ask of strategies, by name, loaded once: a search reads thousands of layouts.

    A registry looks at the import path each time, so that it sees a plugin as soon as it is
    installed.

    Attributes:
        registry: from which they come.
        every: all of them.
        around: those that hold a data-parallel strategy.
        inner: those that hold none.
        planned: of these, the ones that a search tries.

    Raises:
        ConfigError: one of them cannot be imported.
    """

    def __init__(self) -> None:
        self.registry = registry = strategies()
        self.every = {name: registry.load(name).planning() for name in registry.names}
        self.around = {name: plan for name, plan in self.every.items() if plan.inner_option}
        self.inner = {name: plan for name, plan in self.every.items() if not plan.inner_option}
        self.planned = {
            name: plan
            for name, plan in self.inner.items()
            if name in registry.choices and plan.simulates
        }


# --- layout: how a step is spread over ranks, as text, as options of a strategy, and as YAML ---


RECOMPUTE = ("none", "selective", "full")
OWN = {
    "dp": "0",
    "micro_batch": "1",
    "recompute": "none",
    "precision": "bf16",
    "data_parallel": "",
    "links": EXACT,
    "activations": EXACT,
}
"""Keys that every layout has, with their defaults; dp 0 takes the ranks that are left."""

_WORDS: Mapping[str, Collection[str]] = {
    "recompute": RECOMPUTE,
    "precision": STATE_BYTES,
    "activations": (EXACT, BF16),
}
"""The values of some of them."""


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout.

    Attributes:
        strategy: the installed name.
        kind: its class.
        config: its options.
        values: the options that are not defaults, as the configuration has them.
        dp: data-parallel ranks; 0 for those that are left.
        micro_batch: sequences of a micro-batch.
        recompute: none, selective or full.
        precision: fp16, bf16, fp8 or no.
        links: the method that sums gradients between hosts.
        activations: the method for activations between stages on different hosts.
        keys: as ``--layout`` takes them.
    """

    strategy: str
    kind: type[Strategy[Any]]
    config: Any
    values: Mapping[str, Any]
    dp: int
    micro_batch: int
    recompute: str
    precision: str
    links: str
    activations: str
    keys: Mapping[str, str]

    @property
    def fidelity(self) -> Fidelity:
        """How far training may be from exact training, by the methods between hosts."""
        rounds = self.activations == BF16
        return methods_of(self.links, rounds_activations=rounds).fidelity

    def methods(self) -> str:
        """Return the methods between hosts and their class in words, such as int8 (theory)."""
        used = [] if self.links == EXACT else [self.links]
        used += [] if self.activations == EXACT else [f"activations {self.activations}"]
        return f"{', '.join(used)} ({self.fidelity})" if used else EXACT

    def yaml(self) -> str:
        """Return the strategy's section of a configuration file."""
        section = {"strategy": {"name": self.strategy, **plain(self.values)}}
        return yaml.safe_dump(section, sort_keys=False)

    def text(self, dp: int) -> str:
        """Return the layout in the form that ``--layout`` takes."""
        return ",".join(f"{key}={value}" for key, value in {**self.keys, "dp": dp}.items())


def read_pairs(text: str, option: str) -> dict[str, str]:
    """Return the keys and values of a text such as ``tp=8,pp=4``.

    Raises:
        ConfigError: a part is no assignment, or a key comes twice.
    """
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        key, sign, value = part.partition("=")
        key = key.strip()
        if not sign or not key or not value.strip():
            raise ConfigError(f"{option}: expected KEY=VALUE between commas, found {part!r}")
        if key in found:
            raise ConfigError(f"{option}: found {key} twice; keep one")
        found[key] = value.strip()
    return found


def read_layout(text: str) -> PlannedLayout:
    """Read a layout.

    Raises:
        ConfigError: a key or a value is wrong, or they do not fit together.
    """
    return layout_of(read_pairs(text, "--layout"), InstalledPlans())


def layout_of(keys: Mapping[str, str], installed: InstalledPlans) -> PlannedLayout:
    """Return the layout of keys as ``--layout`` has them.

    Args:
        keys: texts.
        installed: the strategies.

    Raises:
        ConfigError: see ``read_layout``.
    """
    own = {**OWN, **{key: value for key, value in keys.items() if key in OWN}}
    inner_name, inside = _data_parallel(own["data_parallel"], installed)
    rest = {key: value for key, value in keys.items() if key not in OWN}
    inner = {key: rest.pop(key) for key in list(rest) if key in inside.layout_keys}
    outer = _around(rest, installed)
    inner_options = inside.options_of_layout(inner)
    if outer is None:
        name, values = inner_name, dict(inner_options)
    else:
        name, around = outer
        nested = {"name": inner_name, **inner_options}
        values = {**around.options_of_layout(rest), around.inner_option: nested}
    kind, config = _resolved(name, json.dumps(values, sort_keys=True), installed)
    for key, words in _WORDS.items():
        if own[key] not in words:
            raise ConfigError(f"--layout: expected {key} of {', '.join(words)}, found {own[key]!r}")
    methods = methods_of(own["links"], rounds_activations=own["activations"] == BF16)
    kind.check_links(config, methods, Precision.of(own["precision"]))
    return PlannedLayout(
        name, kind, config, values, _count(own, "dp", 0), _count(own, "micro_batch", 1),
        own["recompute"], own["precision"], own["links"], own["activations"],
        {**keys, "data_parallel": inner_name},
    )  # fmt: skip


def _data_parallel(name: str, installed: InstalledPlans) -> tuple[str, Planning]:
    name = name or installed.registry.default()
    # The registry refuses unknown names.
    plan = installed.every.get(name) or installed.registry.load(name).planning()
    if plan.inner_option:
        raise ConfigError(
            f"--layout: expected data_parallel to name a data-parallel strategy, found {name!r}, "
            "which holds one itself"
        )
    return name, plan


def _around(keys: Mapping[str, str], installed: InstalledPlans) -> tuple[str, Planning] | None:
    """Return the strategy that the keys are about; None where they are all at 1 or left out.

    Raises:
        ConfigError: no installed strategy knows the keys.
    """
    known = {key for plan in installed.around.values() for key in plan.layout_keys}
    if unknown := sorted(set(keys) - known):
        raise _unknown(unknown, known, installed)
    for name, plan in installed.around.items():
        if keys and set(keys) <= set(plan.layout_keys) and not _trivial(plan, keys):
            return name, plan
    return None


def _unknown(unknown: Sequence[str], known: set[str], installed: InstalledPlans) -> ConfigError:
    """Return the error for keys of no strategy around the data-parallel strategy."""
    inner = {key for plan in installed.inner.values() for key in plan.layout_keys}
    if elsewhere := sorted(set(unknown) & inner):
        fitting = ", ".join(
            name for name, plan in installed.inner.items() if elsewhere[0] in plan.layout_keys
        )
        return ConfigError(
            f"--layout: expected {elsewhere[0]} beside a data_parallel strategy with such a "
            f"key, {fitting}, found another strategy; change data_parallel, or leave "
            f"{elsewhere[0]} out"
        )
    every = sorted({*OWN, *known, *inner})
    return ConfigError(
        f"--layout: unknown key {', '.join(map(repr, unknown))}; known: {', '.join(every)}"
    )


def _trivial(plan: Planning, keys: Mapping[str, str]) -> bool:
    """Whether all keys name defaults of the strategy, which then changes nothing."""
    defaults = plan.kind.Config()
    values = plain(plan.options_of_layout(keys))
    return all(getattr(defaults, name, None) == value for name, value in values.items())


@lru_cache(maxsize=4096)
def _resolved(name: str, values: str, installed: InstalledPlans) -> tuple[type[Strategy[Any]], Any]:
    typed = plain(json.loads(values))
    origin = ValueOrigin("command line", "--layout")
    layer = Layer({"strategy": {"name": name, **typed}}, {"strategy": origin})
    resolved = resolve(layer, find_config=installed.registry.find_config)
    return find_strategy(resolved.strategy, resolved.strategy_config)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with their texts as the values that YAML would read."""
    return {key: _value(value) for key, value in values.items()}


def _value(value: Any) -> Any:
    """Return a value as YAML would have it."""
    if isinstance(value, dict):
        return {key: _value(each) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False}
    return words.get(value.lower(), int(value) if value.isdigit() else value)


def _count(keys: Mapping[str, str], name: str, least: int) -> int:
    text = keys[name]
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"--layout: expected {name} of {least} or more, found {text!r}")
    return int(text)


# --- parts of a predicted step: the busiest stage's kernels and waits, and a host's messages ---


PRODUCTS, PASSES = "products", "memory passes"
STARTS = "kernel starts"
STAGES = "other stages"
BESIDE = "slowed by messages"


def link_part(axis: str) -> str:
    """Return the name of the part in which a rank waits for an axis, or for a store's lane."""
    return f"offloaded state: {axis}" if axis in STORE_LANES else f"messages over {axis}"


def parts_of(
    step: SimulatedStep, played: PlayedStep, prices: HardwarePrices
) -> Mapping[str, float]:
    """Return the seconds of a step on its busiest stage, by part.

    They add up to the step: products, memory passes, the starts of kernels where the host's
    processor is slower than the device, messages that the rank waits for, and other stages of a
    pipeline.
    """
    stage = max(range(len(played.computing)), key=played.computing.__getitem__)
    parts: Counter[str] = Counter()
    before = 0.0
    for each in played.tasks:
        if each.task.stage == stage and each.task.lane == COMPUTE:
            ends = (played.tasks[index] for index in each.task.after)
            awaited = max(ends, key=lambda one: one.stop, default=None)
            _add_wait(parts, each.start - before, awaited)
            _add_work(parts, each, prices)
            before = each.stop
    last = max(played.tasks, key=lambda each: each.stop, default=None)
    if last is not None:
        _add_wait(parts, played.seconds - before, last)
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _add_wait(parts: "Counter[str]", seconds: float, awaited: PlayedTask | None) -> None:
    """Add a wait: for a message as long as it was under way, for another stage the rest."""
    if seconds <= 0:
        return
    if awaited is None or awaited.task.lane == COMPUTE:
        parts[STAGES] += seconds  # type: ignore[assignment]
        return
    messages = (each for each in awaited.task.operations if isinstance(each, Collective))
    alone = any(each.operation == "send" for each in messages)
    travel = min(seconds, awaited.stop - awaited.start) if alone else seconds
    parts[link_part(awaited.task.lane)] += travel  # type: ignore[assignment]
    parts[STAGES] += seconds - travel  # type: ignore[assignment]


def _add_work(parts: "Counter[str]", each: PlayedTask, prices: HardwarePrices) -> None:
    task, total = each.task, each.stop - each.start
    spent = 0.0
    for operation in task.operations:
        seconds = prices.price(operation) * task.repeat
        match operation:
            case MatrixProduct():
                parts[PRODUCTS] += seconds  # type: ignore[assignment]
            case MemoryPass():
                parts[PASSES] += seconds  # type: ignore[assignment]
            case Collective():
                parts[link_part(operation.axis)] += seconds  # type: ignore[assignment]
        spent += seconds
    alone = prices.seconds(task)
    parts[STARTS] += alone - spent  # type: ignore[assignment]
    parts[BESIDE] += total - alone  # type: ignore[assignment]


def leaving_hosts(sent: Mapping[tuple[str, str], float], places: Mapping[str, AxisPlace]) -> float:
    """Return the bytes that a host sends to others: one rank of each line that crosses the host.

    Args:
        sent: by a rank, by axis and operation.
        places: how the lines of each axis lie on hosts.
    """
    crossing = {name: place for name, place in places.items() if place.spans_hosts}
    return sum(
        nbytes * crossing[axis].beside for (axis, _), nbytes in sent.items() if axis in crossing
    )


def difference(parts: Mapping[str, float], others: Mapping[str, float]) -> tuple[str, float]:
    """Return the part in which a step loses most against another step, and its seconds."""
    lost = {name: seconds - others.get(name, 0.0) for name, seconds in parts.items()}
    name = max(lost, key=lost.__getitem__)
    return name, lost[name]


# --- the methods for slow links that a layout names, in the numbers of a simulated step ---


SIDE = 4096
"""Rows and columns of the matrix for which a method tells its bytes: those of large models."""


@lru_cache(maxsize=64)
def far_method(name: str, hosts: int) -> FarMethod | None:
    """Return a method between so many hosts; None for exact sums, and on one host.

    Raises:
        ConfigError: no such method is installed, or it sums no gradients.
    """
    methods = methods_of(name)
    if methods.gradients is None or hosts == 1:
        return None
    matrix = CrossingTensor(SIDE, SIDE, torch.float32)
    far, pieces = crossing_pieces(matrix, hosts)
    nbytes = matrix.numel * torch.float32.itemsize
    sent, divided = (
        methods.gradients.sent(Route(far), pieces, everywhere=everywhere).total() / nbytes
        for everywhere in (True, False)
    )
    held = methods.gradients.held(far, pieces, everywhere=True) / nbytes
    return FarMethod(name, sent, divided, held)


@lru_cache(maxsize=64)
def methods_of(gradients: str, *, rounds_activations: bool = False) -> LinkMethods:
    """Return the methods of a run whose gradients and activations cross hosts so.

    Raises:
        ConfigError: see ``far_method``.
    """
    far = FarConfig(gradients=gradients, activations=BF16 if rounds_activations else EXACT)
    return LinkMethods.configured(LinksConfig(far=far))


# --- the configuration of a layout, as ``drivetrain launch --config`` reads it ---


def run_file(planned: PlannedLayout, micro_batches: int, hosts: int, per_host: int) -> str:
    """Return the YAML of a layout: strategy, precision, recompute, accumulation, ranks.

    Args:
        planned: the layout.
        micro_batches: of a step, on each data-parallel rank.
        hosts: of the run.
        per_host: ranks of a host.
    """
    values: dict[str, Any] = {
        "strategy": {"name": planned.strategy, **plain(planned.values)},
        **run_settings(planned, micro_batches),
        "launch": {"nproc_per_node": per_host, "nnodes": hosts},
    }
    first = f"# A batch of the loader has {planned.micro_batch} samples: the plan's micro_batch.\n"
    return first + yaml.safe_dump(values, sort_keys=False)


def run_settings(planned: PlannedLayout, micro_batches: int) -> dict[str, Any]:
    """Return the keys of a configuration that a layout decides beside its strategy."""
    found: dict[str, Any] = {"precision": planned.precision}
    fp8 = planned.precision == FP8
    dtypes = {"param": widest(planned.precision)} if _converts(planned) else {}
    if dtypes := {**dtypes, **({FP8: GATHERED} if fp8 else {})}:
        found["dtypes"] = dtypes
    found["accumulation"] = micro_batches
    if planned.recompute != "none":
        found["recompute"] = {"mode": planned.recompute}
    methods = {"gradients": planned.links, "activations": planned.activations}
    if far := {use: name for use, name in methods.items() if name != EXACT}:
        found["links"] = {"far": far}
    return found


def _converts(planned: PlannedLayout) -> bool:
    """Whether forward reads parameters of two bytes: not where a strategy keeps no masters."""
    if planned.precision == "no":
        return False
    dtypes = DtypesConfig(param=widest(planned.precision))  # type: ignore[arg-type]
    run = RunConfig(precision=planned.precision, dtypes=dtypes)  # type: ignore[arg-type]
    try:
        planned.kind.check_options(planned.config, Precision.configured(run))
    except ConfigError:
        return False
    return True
