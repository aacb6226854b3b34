"""The methods of a run whose configuration leaves their choice to drivetrain.

``links: {far: auto, allow: theory}`` permits methods up to a class of fidelity. For each model, the
ranks agree on the figures, and ``drivetrain.compression.methods`` chooses. Methods that the
strategy or the precision cannot take are no candidates.

Traffic may hide behind compute. Without declared seconds of a backward, the first steps are exact
and tell them, and the choice comes then (``drivetrain.observe.recorder``)::

    prepare()                 figures of the link and of the methods; what no compute hides
    steps 1 to 5              exact, while ranks time their backward
    after step 5              all ranks take the methods of the same figures
    a checkpoint after that   has the choice: a resumed run goes on with it
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from drivetrain.collectives import connect, sent_elements
from drivetrain.collectives.facts import gather_facts, share_facts
from drivetrain.compression.compressor import Compressor, Fidelity
from drivetrain.compression.methods import (
    NO_TIME,
    AutomaticLinks,
    CrossingTensor,
    EncodingTime,
    LinkFigures,
    LinkMethods,
    LinkUse,
    MethodOnLink,
    Outlook,
    SlowLink,
    choose,
    permitted,
)
from drivetrain.config.outline import EXACT
from drivetrain.cost import TensorSpec, Traffic
from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World, host_link

if TYPE_CHECKING:
    from drivetrain.hardware.measure import Clock

FIRST, LARGEST, GROWTH = 2**14, 2**24, 4
"""Numbers of the smallest and of the largest sum that measures a link: 64 KiB and 64 MiB."""

LONG_ENOUGH_S = 0.2
"""Seconds of a sum that says the rate: latencies and bursts are a small part of it."""

ROWS, COLUMNS = (2, 1024), 1024
"""Rows of the two matrices that are encoded for a measurement, and columns of both: the smallest
size that methods encode, and a size at which memory, not the call, takes the time."""


def rate_between_hosts(declared_mbit: float, world: World) -> tuple[float, str]:
    """Return the rate between hosts in bytes per second, and its source. Collective.

    Args:
        declared_mbit: Mbit/s from the configuration; 0 where it has none.
        world: all ranks, on several hosts.

    Raises:
        ConfigError: hosts have different numbers of ranks, or not in a row.
        PreflightError: the launcher's figure is no number.
    """
    if declared_mbit:
        return declared_mbit * 1e6 / 8, "as links.mbit_per_s says"
    launched = 0.0 if world.declared else host_link()  # of launchers, whatever lies between islands
    if link := share_facts(launched, float, doing="the launcher's rate between hosts"):
        return link, "as the launcher measured"
    return _measured_rate(world), "measured now"


def slowest_times(
    methods: Mapping[str, Compressor[Any]], device: torch.device
) -> dict[str, EncodingTime]:
    """Return the time that each method takes on the slowest rank. Collective where ranks run."""
    from drivetrain.hardware.measure import Clock  # loaded by who measures

    mine = _times(methods, Clock(device))
    every = gather_facts(
        mine, dict[str, tuple[float, float]], doing="the time of methods for slow links"
    )
    slowest = {}
    for name in methods:
        small_s, large_s = (max(each[name][index] for each in every) for index in range(2))
        small, large = (rows * COLUMNS for rows in ROWS)
        per_number_s = max(0.0, large_s - small_s) / (large - small)
        slowest[name] = EncodingTime(max(0.0, small_s - per_number_s * small), per_number_s)
    return slowest


def _times(
    methods: Mapping[str, Compressor[Any]], clock: "Clock"
) -> dict[str, tuple[float, float]]:
    """Return the seconds of each method for the small and the large matrix on this rank."""
    found = {}
    for name, method in methods.items():
        small_s, large_s = (
            clock.time(
                f"{name} of {rows} rows",
                partial(method.rehearse, torch.randn(rows, COLUMNS, device=clock.device)),
            )
            for rows in ROWS
        )
        found[name] = small_s, large_s
    return found


def _measured_rate(world: World) -> float:
    """Return the bytes per second that a host sends in sums over hosts. Collective."""
    name = "links"
    mesh = Mesh.build({name: world.size}, world)
    per_host = mesh.per_host(name, world)
    axis = mesh.start_across(name, per_host, world)
    ranks = connect(axis, Traffic(), world.device, world.timeout)
    try:
        numel, seconds = FIRST, 0.0
        ranks.all_reduce(torch.zeros(numel, device=world.device)).wait()  # opens connections
        while True:
            tensor = torch.zeros(numel, device=world.device)
            gather_facts(numel, int, doing="the measurement of the link between hosts")
            start = time.perf_counter()
            ranks.all_reduce(tensor).wait()
            if world.device.type != "cpu":
                torch.accelerator.synchronize(world.device)
            mine = time.perf_counter() - start
            seconds = max(gather_facts(mine, float, doing="the time between hosts"))
            if seconds >= LONG_ENOUGH_S or numel >= LARGEST:
                break
            numel *= GROWTH
    finally:
        ranks.close()
    sent = sent_elements("all_reduce", numel, size=axis.size) * torch.float32.itemsize
    return sent * per_host / seconds


# --- the choice ---


FORWARD = 0.5
"""Seconds of a forward for each second of the backward, which computes two gradients."""

WARM_UP, COUNTED = 2, 3
"""Steps whose backward does not count, because allocators and connections begin, and steps whose
does; the choice comes after them."""


class Sender(NamedTuple):
    """Who sends: a strategy with its options, and the precision."""

    kind: Any  # a class of strategies, whose contract is above this folder
    config: Any
    precision: Precision


def choose_links(
    links: LinkMethods, sender: Sender, tensors: Sequence[TensorSpec], world: World
) -> tuple[LinkMethods, list[str]]:
    """Return methods in place of ``auto``, and a line for each choice.

    Collective where ranks run. Without them, as in a dry run, this process alone times encodings,
    and the configuration must declare the rate. On one host nothing is measured or chosen. Where
    the first steps decide, ``auto`` is left for ``settle_links``.

    Args:
        links: the methods of the configuration.
        sender: the strategy of the model.
        tensors: the parameters of the model.
        world: all ranks.

    Raises:
        ConfigError: hosts have different numbers of ranks.
    """
    wish = links.auto
    if wish is None or not world.spans_hosts:
        return links, []
    uses = uses_of(wish, sender, wish.backward_s)
    methods = {name: candidates_for(wish, name, use, sender) for name, use in uses.items()}
    every = {name: each for found in methods.values() for name, each in found.items()}
    if not every:
        line = f"{limit_of(wish)}: all exact, since no other method can be taken here"
        return links.decided({}), [line]
    rate, source = rate_between_hosts(wish.mbit_per_s, world)
    hosts = len(set(world.islands))
    link = SlowLink(bytes_per_s=rate, hosts=hosts, per_host=world.size // hosts)
    figures = LinkFigures(link=link, source=source, times=slowest_times(every, world.device))
    awaited = [
        name
        for name, use in uses.items()
        if methods[name] and use.beside_compute and _waits(wish, sender, world)
    ]
    promised = [
        f"{_begin(wish, figures)}{_promised(_on_link(use, methods[name], figures), tensors)}"
        for name, use in uses.items()
        if name in awaited
    ]
    now = {name: use for name, use in uses.items() if name not in awaited}
    decided, told = _decided(links.awaiting(awaited, figures), now, sender, tensors)
    return decided, [*promised, *told]


def settle_links(
    links: LinkMethods, sender: Sender, tensors: Sequence[TensorSpec], backward_s: float
) -> tuple[LinkMethods, list[str]]:
    """Return methods in place of ``auto`` after the first steps, and a line for each choice.

    A function of its arguments alone: ranks with the same seconds choose alike.

    Args:
        links: of ``choose_links``.
        sender: the strategy of the model.
        tensors: the parameters of the model.
        backward_s: seconds of a backward, the same on all ranks.
    """
    assert links.auto is not None
    uses = uses_of(links.auto, sender, backward_s)
    return _decided(links, uses, sender, tensors, f", as {COUNTED} steps tell")


def _decided(
    links: LinkMethods,
    uses: Mapping[str, LinkUse],
    sender: Sender,
    tensors: Sequence[TensorSpec],
    source: str = "",
) -> tuple[LinkMethods, list[str]]:
    """Choose the methods for some uses; all is exact that the strategy never sends.

    Args:
        links: the figures are known.
        uses: for which a method is chosen.
        sender: the strategy of the model.
        tensors: its parameters.
        source: of the seconds of compute, in words.
    """
    wish, crossing = links.auto, _crossing(tensors)
    assert wish is not None
    assert wish.figures is not None
    lines, chosen = [], {}
    for name, use in uses.items():
        exact, *others = _on_link(use, candidates_for(wish, name, use, sender), wish.figures)
        outlook, outlooks = choose(exact, others, crossing)
        told = _told(outlook, outlooks, len(crossing), source)
        lines.append(f"{_begin(wish, wish.figures)}{told}")
        if outlook.candidate.method is not None:
            chosen[name] = outlook.candidate
    left = [name for name in wish.uses if name in links.awaited and name not in uses]
    return links.decided(chosen, [name for name in wish.uses if name not in left]), lines


def _waits(wish: AutomaticLinks, sender: Sender, world: World) -> bool:
    """Return whether the first steps tell the seconds of a backward.

    Ranks time the work of processors: an accelerator may still compute when its host goes on.
    """
    declared = bool(wish.backward_s)
    changes = sender.kind.planning().changes_links(sender.config)
    return not declared and changes and world.device.type == "cpu"


def _on_link(
    use: LinkUse, methods: Mapping[str, Compressor[Any]], figures: LinkFigures
) -> list[MethodOnLink]:
    """Return exact traffic and the methods on the link."""
    link, times = figures.link, figures.times
    exact = MethodOnLink(EXACT, None, Fidelity.EXACT, NO_TIME, link, use)
    others = [
        MethodOnLink(name, method, method.fidelity_of(use.name), times[name], link, use)
        for name, method in methods.items()
    ]
    return [exact, *others]


def uses_of(wish: AutomaticLinks, sender: Sender, backward_s: float) -> dict[str, LinkUse]:
    """Return the tensors of the strategy for whose traffic the configuration says auto, by key."""
    channels = sender.kind.channels(sender.config)
    divided = channels & {"parameters", "updates"}
    found = {}
    if "gradients" in wish.uses and "gradients" in channels:
        found["gradients"] = LinkUse("gradients", everywhere=not divided, hidden_s=backward_s)
    if "parameters" in wish.uses and "parameters" in channels:
        hidden_s = FORWARD * backward_s
        found["parameters"] = LinkUse("parameters", everywhere=True, hidden_s=hidden_s)
    elif "parameters" in wish.uses and "updates" in channels:
        found["parameters"] = LinkUse("updates", everywhere=True, hidden_s=0.0)
    return found


def candidates_for(
    wish: AutomaticLinks, key: str, use: LinkUse, sender: Sender
) -> dict[str, Compressor[Any]]:
    """Return the methods that the user permits, and that the strategy can take and work with."""
    return {
        name: method
        for name, method in permitted(wish.methods, use.name, wish.allow).items()
        if _fits(key, name, method, sender)
        and not (
            key == "gradients" and sender.kind.planning().advises_against(sender.config, method)
        )
    }


def _fits(key: str, name: str, method: Compressor[Any], sender: Sender) -> bool:
    links = (
        LinkMethods(gradients=method, names=(name, EXACT))
        if key == "gradients"
        else LinkMethods(parameters=method, names=(EXACT, name))
    )
    try:
        sender.kind.check_links(sender.config, links, sender.precision)
    except ConfigError:
        return False
    return True


def _crossing(tensors: Sequence[TensorSpec]) -> list[CrossingTensor]:
    """Return the trainable parameters; a vector is one row."""
    found = []
    for each in tensors:
        if each.trainable and each.numel:
            rows = each.shape[each.outer_dim] if each.shape else 1
            found.append(CrossingTensor(rows, each.numel // rows, each.dtype))
    return found


# --- the lines ---


def limit_of(wish: AutomaticLinks) -> str:
    """Return the first words of each line about a choice."""
    return f"between hosts, auto, {wish.allow} at most"


def _begin(wish: AutomaticLinks, figures: LinkFigures) -> str:
    return f"{limit_of(wish)}, {figures.link.bytes_per_s / 1e6:.4g} MB/s {figures.source}: "


def _promised(candidates: Sequence[MethodOnLink], tensors: Sequence[TensorSpec]) -> str:
    """Return that the first steps decide, with the times between which they do."""
    crossing = _crossing(tensors)
    compared = ", ".join(str(each.outlook(crossing)) for each in candidates)
    return (
        f"{candidates[0].use.name} {EXACT} for {WARM_UP + COUNTED} steps, which time the compute "
        f"beside them; then one of {compared}"
    )


def _told(chosen: Outlook, outlooks: Sequence[Outlook], count: int, source: str) -> str:
    """Return a choice among so many parameters, with its arithmetic."""
    candidate, hidden_s = chosen.candidate, chosen.candidate.use.hidden_s
    compared = ", ".join(map(str, outlooks))
    compute = f"{hidden_s:.3g} s of compute{source}"
    beside = f"beside {compute}" if hidden_s else "with no compute beside it"
    much = (
        f", for {chosen.tensors} of {count} parameters ({chosen.numel:,} numbers)"
        if candidate.method is not None
        else ""
    )
    fidelity = f" ({candidate.fidelity})"
    return f"{candidate.use.name} {candidate.name}{fidelity}{much}; of {compared}, {beside}"


# --- the choice in a checkpoint, so that a resumed run goes on with the same methods ---

# For each use whose method the first steps have chosen, a checkpoint has the method and the figures
# that say for which tensors the method pays. The figures of another start would differ a little.


SavedChoice: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By use: ``method``, and but for exact traffic ``bytes_per_s``, ``fixed_s``, ``per_number_s``."""


def saved_choice(links: LinkMethods) -> dict[str, dict[str, Any]]:
    """Return the choice after the first steps of a run, as plain values; empty before."""
    found: dict[str, dict[str, Any]] = {}
    for use in links.awaited:
        if links.is_open(use):
            continue
        found[use] = {"method": links.name_for(use)}
        if use in links.paying:
            each = links.paying[use]
            found[use]["bytes_per_s"] = each.link.bytes_per_s
            found[use]["fixed_s"] = each.time.fixed_s
            found[use]["per_number_s"] = each.time.per_number_s
    return found


def resume_links(
    links: LinkMethods, sender: Sender, saved: SavedChoice
) -> tuple[LinkMethods, list[str]]:
    """Return the methods of a checkpoint in place of ``auto``, and a line for each use.

    A method that the user permits no more, or that the strategy cannot take, is not taken: the
    steps to come decide about the use. A choice that this run has made stays.

    Args:
        links: of the run.
        sender: the strategy of the model.
        saved: of ``saved_choice``.
    """
    wish = links.auto
    if wish is None or wish.figures is None:
        return links, []
    lines, chosen, decided = [], {}, []
    for use, kind in uses_of(wish, sender, wish.backward_s).items():
        if use not in saved:
            continue
        facts, methods = saved[use], candidates_for(wish, use, kind, sender)
        name = facts["method"]
        begin = f"{limit_of(wish)}: {kind.name}"
        if name != EXACT and name not in methods:
            lines.append(f"{begin} not {name} as in the checkpoint, which is no candidate here")
            continue
        decided.append(use)
        lines.append(f"{begin} {name}, as in the checkpoint")
        if name != EXACT:
            link = replace(wish.figures.link, bytes_per_s=facts["bytes_per_s"])
            time = EncodingTime(facts["fixed_s"], facts["per_number_s"])
            method = methods[name]
            fidelity = method.fidelity_of(kind.name)
            chosen[use] = MethodOnLink(name, method, fidelity, time, link, kind)
    return (links.decided(chosen, decided), lines) if decided else (links, lines)
