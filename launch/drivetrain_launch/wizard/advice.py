"""The strategy that the wizard proposes, and the reason, from the promises of all strategies.

Every installed strategy promises the bytes that it holds and sends for the user's model on the
user's ranks (``Strategy.cost``); the proposal compares these numbers, and knows no strategy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.config.resolve import Resolved
from drivetrain.cost import ModelSpec
from drivetrain.hardware.sizes import DEVICES, GIB, parameter_count, size_text
from drivetrain.registry import Registry
from drivetrain_launch.forecast.models import of_size
from drivetrain_launch.forecast.planning import Promise, promises_for

BILLION = 10**9
"""Parameters of the model for which strategies are compared when its size is not known."""

LEFT_FOR_ACTIVATIONS = 0.25
"""Share of a device that a proposal leaves free: promises do not count activations."""

ALIKE = 0.01
"""Forms whose bytes differ by no larger share send the same, as far as time is concerned."""


SMALLEST = min(DEVICES.values()) * GIB
"""Bytes that every device has, also one of which nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The user's answers before the strategy.

    Attributes:
        resolved: the core's keys, with a number of ranks.
        on_accelerators: whether ranks compute there, and not on the CPU.
        room: bytes for a rank, of its device or of its share of a host's memory; None: unknown.
        beside: bytes of host memory for a rank beside its device; None: unknown, or no device.
        model: number of parameters, or a path; "" is unknown.
        spec: the facts of the model, where a path names it.
        slow: whether the link between hosts is slow.
        approximate: whether gradients may be approximated there by a method without a proof.
    """

    resolved: Resolved
    on_accelerators: bool
    room: int | None
    beside: int | None
    model: str
    spec: ModelSpec | None = None
    slow: bool = False
    approximate: bool = False

    @property
    def size(self) -> str:
        """The size of the model in words."""
        if not self.model:
            return "each billion of parameters"
        return f"{self.model} parameters" if self.spec is None else f"the model of {self.model}"

    def lacking(self, promise: Promise) -> tuple[int, int]:
        """Return the bytes that lack for a form: of a device, and of host memory for a rank."""
        pairs = ((_needed(promise), self.room), (promise.cost.in_host_memory, self.beside))
        device, host = (0 if room is None else max(0, need - room) for need, room in pairs)
        return (device, host) if self.model else (0, 0)

    def memory(self, promise: Promise) -> str:
        """Say what a form holds on a device, and whether that fits."""
        held = f"holds {_gib(promise.cost.on_device)} {self.where}"
        if self.room is not None and self.model:
            return f"{held}, and fits in {_gib(self.room)} with room for activations"
        return f"{held}, and needs {self.needed(promise)} with room for activations"

    def needed(self, promise: Promise) -> str:
        """Say which device a form needs."""
        size = _gib(_needed(promise))
        return f"devices of {size}" if self.on_accelerators else f"{size} {self.where}"

    @property
    def where(self) -> str:
        """The memory of a rank in words."""
        return "on a device" if self.on_accelerators else "of host memory for each rank"


def propose(situation: Situation, registry: Registry) -> tuple[Promise, str]:
    """Compare the promises of all strategies; return one, and the reason without a full stop."""
    run, on_accelerators = situation.resolved.run, situation.on_accelerators
    ranks = int(run.launch.nproc_per_node) * run.launch.nnodes
    promises = promises_for(
        situation.spec or of_size(parameter_count(situation.model) or BILLION),
        situation.resolved,
        ranks,
        on_accelerators=on_accelerators,
    )
    candidates = [promise for promise in promises if not promise.refusal]
    chosen, why = _choose(candidates, situation, registry.default())
    where = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return chosen, f"{why}, for {situation.size} on {where}"


def _needed(promise: Promise) -> int:
    """Return the bytes that a device must have, with those that are left for activations."""
    return int(promise.cost.on_device / (1 - LEFT_FOR_ACTIVATIONS))


def _choose(
    candidates: Sequence[Promise], situation: Situation, default: str
) -> tuple[Promise, str]:
    """Return the best candidate, and why, without the situation that the numbers hold for."""
    fitting = [each for each in candidates if not sum(situation.lacking(each))]
    if not fitting:
        return _closest(candidates, situation)
    known = [each for each in fitting if not each.cost.uncounted] or fitting
    near = [each for each in known if each.cost.on_device == each.cost.total_held] or known
    exact = [each for each in near if each.exact] or near
    allowed = near if situation.approximate else exact
    if situation.slow and any(each.between_hosts for each in allowed):
        return _least_between_hosts(allowed, exact, situation, default)
    usual = next((each for each in exact if each.name == default), None)
    unknown = situation.room is None and situation.model
    if usual is not None and (not unknown or _needed(usual) <= SMALLEST):
        return usual, f"it is the usual strategy, {situation.memory(usual)}"
    if unknown:
        least = min(exact, key=lambda each: each.cost.on_device)
        return least, (
            "of all forms that keep nothing elsewhere it fits on the smallest devices: it "
            f"{situation.memory(least)}"
        )
    best = _fewest(exact, lambda each: each.cost.total_sent, default)
    return best, (
        f"it sends the fewest bytes of all forms that fit, {_gib(best.cost.total_sent)} in a step, "
        f"{situation.memory(best)}"
    )


def _closest(candidates: Sequence[Promise], situation: Situation) -> tuple[Promise, str]:
    """Return the form that lacks the fewest bytes, and how many."""
    least = min(candidates, key=lambda each: sum(situation.lacking(each)))
    device, host = situation.lacking(least)
    lacking = [f"{_gib(device)} {situation.where}"] if device else []
    lacking += [f"{_gib(host)} of host memory for each rank"] if host else []
    return least, (
        f"nothing fits, and this form comes closest: it needs {situation.needed(least)} with room "
        f"for activations, and lacks {' and '.join(lacking)}"
    )


def _least_between_hosts(
    allowed: Sequence[Promise], exact: Sequence[Promise], situation: Situation, default: str
) -> tuple[Promise, str]:
    """Return the form with the fewest bytes between hosts."""
    best = _fewest(allowed, lambda each: each.between_hosts, default)
    why = (
        f"it sends the fewest bytes from a host to the others, {_gib(best.between_hosts)} in a "
        f"step, {situation.memory(best)}"
    )
    if best.exact:
        return best, why
    other = _fewest(exact, lambda each: each.between_hosts, default)
    return best, (
        f"{why}; gradients are approximated, and the best form without that is "
        f"{other.form}, which sends {_gib(other.between_hosts)}"
    )


def _fewest(
    candidates: Sequence[Promise], count: Callable[[Promise], int], default: str
) -> Promise:
    """Return who has the fewest bytes; of those alike the default, or who holds least."""
    fewest = min(map(count, candidates))
    quick = [each for each in candidates if count(each) <= fewest * (1 + ALIKE)]
    return min(quick, key=lambda each: (each.name != default, each.cost.on_device))


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else size_text(count)
