"""The parts of a model that are exchanged in turn, and the steps at which each of them is.

Streaming DiLoCo (Douillard et al. 2025, section 2.1) exchanges groups of blocks that are not
neighbors: block i is of fragment i mod P. Parameters outside of blocks are of the first fragment,
such as embeddings, or of the last, such as a head, by their place before or behind the blocks.
"""

from collections.abc import Iterable, Mapping

from torch import nn

from drivetrain.parts.blocks import repeated_blocks
from drivetrain.parts.naming import named_parameters
from drivetrain_local.options import LocalOptions


def fragment_of_each(model: nn.Module | None, names: Iterable[str], count: int) -> dict[str, int]:
    """Return the fragment of each parameter by name.

    Args:
        model: the user's model; None where only names are known, which then take turns.
        names: of the parameters.
        count: of the fragments.
    """
    if count == 1:
        return dict.fromkeys(names, 0)
    blocks = [] if model is None else repeated_blocks(model)
    if not blocks:
        return {name: index % count for index, name in enumerate(names)}
    found: Mapping[str, int] = {
        f"{prefix}.{name}": index % count
        for index, (prefix, block) in enumerate(blocks)
        for name in named_parameters(block)
    }
    fragments, reached = {}, False
    for name in names:
        reached = reached or name in found
        fragments[name] = found.get(name, count - 1 if reached else 0)
    return fragments


def first_step(options: LocalOptions, fragment: int) -> int:
    """Return the place in a round at which a fragment is exchanged, from 0."""
    return fragment * options.every // options.fragments


def is_exchanged(options: LocalOptions, fragment: int, steps: int) -> bool:
    """Return whether a fragment's exchange starts after so many steps."""
    return (steps - first_step(options, fragment)) % options.every == 0


def steps_since(options: LocalOptions, fragment: int, steps: int) -> int:
    """Return how many steps ago the latest exchange of a fragment started."""
    return (steps - first_step(options, fragment)) % options.every
