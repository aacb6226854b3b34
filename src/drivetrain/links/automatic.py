"""The methods of a run whose configuration leaves their choice to drivetrain.

``links: {far: auto, allow: theory}`` permits methods up to a class of honesty. For each model, the
ranks agree on the figures, and ``drivetrain.links.rule`` chooses. Methods that the strategy or the
precision cannot take are no candidates.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from drivetrain.cost import TensorSpec
from drivetrain.errors import ConfigError
from drivetrain.links.chosen import EXACT, AutomaticLinks, LinkMethods
from drivetrain.links.compressor import Compressor, Honesty
from drivetrain.links.contract import OverLinks
from drivetrain.links.figures import rate_between_hosts, slowest_times
from drivetrain.links.rule import (
    NO_TIME,
    CrossingTensor,
    LinkUse,
    MethodOnLink,
    Outlook,
    SlowLink,
    choose,
    permitted,
)
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World

FORWARD = 0.5
"""Seconds of a forward for each second of the backward, which computes two gradients."""


class Sender(NamedTuple):
    """Who sends: a strategy with its options, and the precision."""

    kind: type[OverLinks]
    config: Any
    precision: Precision


def choose_links(
    links: LinkMethods, sender: Sender, tensors: Sequence[TensorSpec], world: World
) -> tuple[LinkMethods, list[str]]:
    """Return methods in place of ``auto``, and a line for each choice.

    Collective where ranks run. Without them, as in a dry run, this process alone times encodings,
    and the configuration must declare the rate. On one host nothing is measured or chosen.

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
    uses = _uses(wish, sender)
    methods = {name: _candidates(wish, name, use, sender) for name, use in uses.items()}
    every = {name: each for found in methods.values() for name, each in found.items()}
    limit = f"between hosts, auto, {wish.allow} at most"
    if not every:
        return links.decided({}), [f"{limit}: all exact, since no other method can be taken here"]
    rate, source = rate_between_hosts(wish.mbit_per_s, world)
    times = slowest_times(every, world.device)
    link = SlowLink(
        bytes_per_s=rate,
        hosts=len(set(world.islands)),
        per_host=world.size // len(set(world.islands)),
    )
    crossing = _crossing(tensors)
    lines, chosen = [], {}
    for name, use in uses.items():
        exact = MethodOnLink(EXACT, None, Honesty.EXACT, NO_TIME, link, use)
        others = [
            MethodOnLink(each, method, method.honesty_of(use.name), times[each], link, use)
            for each, method in methods[name].items()
        ]
        outlook, outlooks = choose(exact, others, crossing)
        lines.append(
            f"{limit}, {rate / 1e6:.4g} MB/s {source}: {_told(outlook, outlooks, len(crossing))}"
        )
        if outlook.candidate.method is not None:
            chosen[name] = outlook.candidate
    return links.decided(chosen), lines


def _uses(wish: AutomaticLinks, sender: Sender) -> dict[str, LinkUse]:
    """Return the tensors of the strategy for whose traffic the configuration says auto, by key."""
    channels = sender.kind.channels(sender.config)
    divided = channels & {"parameters", "updates"}
    found = {}
    if "gradients" in wish.uses and "gradients" in channels:
        found["gradients"] = LinkUse("gradients", everywhere=not divided, hidden_s=wish.backward_s)
    if "parameters" in wish.uses and "parameters" in channels:
        hidden_s = FORWARD * wish.backward_s
        found["parameters"] = LinkUse("parameters", everywhere=True, hidden_s=hidden_s)
    elif "parameters" in wish.uses and "updates" in channels:
        found["parameters"] = LinkUse("updates", everywhere=True, hidden_s=0.0)
    return found


def _candidates(
    wish: AutomaticLinks, key: str, use: LinkUse, sender: Sender
) -> dict[str, Compressor[Any]]:
    """Return the methods that the user permits, and that the strategy can take."""
    return {
        name: method
        for name, method in permitted(wish.methods, use.name, wish.allow).items()
        if _fits(key, name, method, sender)
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


def _told(chosen: Outlook, outlooks: Sequence[Outlook], count: int) -> str:
    """Return a choice among so many parameters, with its arithmetic."""
    candidate, hidden_s = chosen.candidate, chosen.candidate.use.hidden_s
    compared = ", ".join(map(str, outlooks))
    beside = f"beside {hidden_s:.3g} s of compute" if hidden_s else "with no compute beside it"
    much = (
        f", for {chosen.tensors} of {count} parameters ({chosen.numel:,} numbers)"
        if candidate.method is not None
        else ""
    )
    honesty = f" ({candidate.honesty})"
    return f"{candidate.use.name} {candidate.name}{honesty}{much}; of {compared}, {beside}"
