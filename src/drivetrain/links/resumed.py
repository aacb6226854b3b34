"""The choice of methods in a checkpoint, so that a resumed run goes on with the same ones.

For each use whose method the first steps have chosen, a checkpoint has the method and the figures
that say for which tensors the method pays. The figures of another start would differ a little.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from drivetrain.links.automatic import Sender, candidates_for, limit_of, uses_of
from drivetrain.links.chosen import EXACT, LinkMethods
from drivetrain.links.rule import EncodingTime, MethodOnLink

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
            honesty = method.honesty_of(kind.name)
            chosen[use] = MethodOnLink(name, method, honesty, time, link, kind)
    return (links.decided(chosen, decided), lines) if decided else (links, lines)
