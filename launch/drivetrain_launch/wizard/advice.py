"""The strategy that the wizard proposes, and the reason, from the promises of all strategies.

Every installed strategy promises the bytes that it holds and sends for the user's model on the
user's ranks (``Strategy.cost``); the proposal compares these numbers, and knows no strategy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from drivetrain.config.resolve import Resolved
from drivetrain.cost import Cost, ModelSpec
from drivetrain.hardware.sizes import GIB, device_bytes, parameter_count, size_text
from drivetrain.registry import Registry
from drivetrain_launch.forecast.models import of_size
from drivetrain_launch.forecast.planning import Promise, promises_for
from drivetrain_launch.ranks.placement import accelerators, cores, local_ranks

BILLION = 10**9
"""Parameters of the model for which strategies are compared when its size is not known."""

LEFT_FOR_ACTIVATIONS = 0.25
"""Share of a device that a proposal leaves free: promises do not count activations."""

ALIKE = 0.01
"""Forms whose bytes differ by no larger share send the same, as far as time is concerned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The user's answers before the strategy.

    Attributes:
        resolved: the core's keys.
        memory: of a device, or of a host where ranks compute on the CPU; "" is unknown.
        model: number of parameters, or a path; "" is unknown.
        need: what hurts: nothing, memory, speed or link.
        spec: the facts of the model, where a path names it.
    """

    resolved: Resolved
    memory: str
    model: str
    need: str
    spec: ModelSpec | None = None

    @property
    def size(self) -> str:
        """The size of the model in words."""
        if not self.model:
            return "each billion of parameters"
        return f"{self.model} parameters" if self.spec is None else f"the model of {self.model}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A strategy with its reason.

    Attributes:
        strategy: its name.
        options: its options where they are not the default.
        form: name and options as text.
        reason: one sentence without a full stop.
    """

    strategy: str
    options: Mapping[str, Any]
    form: str
    reason: str


def propose(situation: Situation, registry: Registry) -> Proposal:
    """Compare the promises of all strategies and propose one."""
    launch = situation.resolved.run.launch
    available = 0 if launch.device == "cpu" else accelerators()
    on_accelerators = launch.device != "cpu" and bool(available or situation.memory)
    per_host = launch.nproc_per_node
    left_open = per_host == "auto"
    if per_host == "auto":
        per_host = local_ranks(launch, accelerators=available, cores=cores())
    ranks = per_host * launch.nnodes
    room = device_bytes(situation.memory) if situation.memory else None
    if room is not None and not on_accelerators:
        room //= per_host
    promises = promises_for(
        situation.spec or of_size(parameter_count(situation.model) or BILLION),
        situation.resolved,
        ranks,
        on_accelerators=on_accelerators,
    )
    # Forms with sizes for this number of ranks would not do for another number.
    candidates = [
        Contender(promise, on_accelerators=on_accelerators)
        for promise in promises
        if promise.cost is not None and not (left_open and promise.cost.uncounted)
    ]
    chosen, why = _choose(candidates, situation.need, room, registry.default())
    machine = ", as many as this machine starts" if left_open else ""
    where = f"{situation.size} on {ranks} rank{'s' if ranks > 1 else ''}{machine}"
    return Proposal(
        strategy=chosen.promise.name,
        options=chosen.promise.options,
        form=chosen.promise.form,
        reason=f"{why}, for {where}",
    )


class Contender:
    """One form of a strategy, by the numbers that decide.

    Args:
        promise: with a cost.
        on_accelerators: whether host memory is another memory than that of the ranks' device.

    Attributes:
        held: bytes in the memory of the device.
        elsewhere: bytes that travel between the device and another memory in every step.
        sent: bytes that a rank sends in a step, as far as they are known.
        counted: whether they are known.
        between_hosts: bytes that leave a host in a step, as far as they are known.
    """

    def __init__(self, promise: Promise, *, on_accelerators: bool) -> None:
        cost = promise.cost or Cost()
        in_host_memory = promise.in_host_memory
        self.promise = promise
        self.held = promise.on_device + (0 if on_accelerators else in_host_memory)
        self.elsewhere = promise.on_disk + (in_host_memory if on_accelerators else 0)
        self.sent = cost.total_sent
        self.counted = not cost.uncounted
        self.between_hosts = promise.between_hosts


def _choose(
    candidates: Sequence[Contender], need: str, room: int | None, default: str
) -> tuple[Contender, str]:
    """Return the best candidate, and why, without the situation that the numbers hold for."""
    usable = inf if room is None else room * (1 - LEFT_FOR_ACTIVATIONS)
    least = min(candidates, key=lambda each: each.held)
    fitting = [each for each in candidates if each.held <= usable]
    if not fitting:
        return least, (
            f"nothing fits in {_gib(room or 0)} with room for activations, and this form comes "
            f"closest with {_gib(least.held)}"
        )
    known = [each for each in fitting if each.counted] or fitting
    fits = "" if room is None else f", and fits in {_gib(room)} with room for activations"
    if need == "memory":
        least = min(known, key=lambda each: each.held)
        return least, f"it holds the fewest bytes on a device, {_gib(least.held)}{fits}"
    near = [each for each in known if not each.elsewhere] or known
    usual = next((each for each in near if each.promise.name == default), None)
    if need == "nothing" and usual is not None:
        return usual, f"it is the usual strategy, holds {_gib(usual.held)} on a device{fits}"
    among = "" if room is None else f" of all forms that fit in {_gib(room)}"
    exact = [each for each in near if each.promise.exact] or near
    if need == "link" and any(each.between_hosts for each in near):
        return _least_between_hosts(near, exact, among, default)
    best = _fewest(exact, lambda each: each.sent, default)
    return best, (
        f"it sends the fewest bytes{among}, {_gib(best.sent)} in a step, and holds "
        f"{_gib(best.held)} on a device"
    )


def _least_between_hosts(
    near: Sequence[Contender], exact: Sequence[Contender], among: str, default: str
) -> tuple[Contender, str]:
    """Return the form with the fewest bytes between hosts; an approximation is no obstacle."""
    best = _fewest(near, lambda each: each.between_hosts, default)
    why = (
        f"it sends the fewest bytes from a host to the others{among}, "
        f"{_gib(best.between_hosts)} in a step, and holds {_gib(best.held)} on a device"
    )
    if best.promise.exact:
        return best, why
    other = _fewest(exact, lambda each: each.between_hosts, default)
    return best, (
        f"{why}; gradients are approximated, and the best form without that is "
        f"{other.promise.form}, which sends {_gib(other.between_hosts)}"
    )


def _fewest(
    candidates: Sequence[Contender], count: Callable[[Contender], int], default: str
) -> Contender:
    """Return who has the fewest bytes; of those alike the default, or who holds least."""
    fewest = min(map(count, candidates))
    quick = [each for each in candidates if count(each) <= fewest * (1 + ALIKE)]
    return min(quick, key=lambda each: (each.promise.name != default, each.held))


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else size_text(int(count))
