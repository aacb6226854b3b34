"""SLURM's words: lists of nodes and of tasks per node, read without its programs.

Containers seldom have ``scontrol``.
"""

import re

from drivetrain.errors import ConfigError

_PART = re.compile(r"([^,\[\]]+|\[[^\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def node_names(text: str) -> list[str]:
    """Return the nodes of a list such as ``n[1-3,7],gpu-[01-02]``, in order.

    Raises:
        ConfigError: the text is no list of nodes.
    """
    parts = [match[0] for match in _PART.finditer(text)]
    if not parts or ",".join(parts) != text:
        raise ConfigError(
            f"expected a list of nodes such as n[1-3,7] from SLURM, found {text!r}; give --nnodes, "
            "--node-rank and --rdzv-endpoint instead"
        )
    return [name for part in parts for name in _expanded(part)]


def tasks_on(text: str, node: int) -> int:
    """Return the number of tasks on a node from a text such as ``4(x2),3``.

    Raises:
        ConfigError: the text is something else, or has no such node.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    if node >= len(counts):
        raise ConfigError(
            f"expected the tasks of node {node} in a list such as 4(x2),3 from SLURM, found "
            f"{text!r}; give --nnodes, --node-rank and --rdzv-endpoint instead"
        )
    return counts[node]


def _expanded(part: str) -> list[str]:
    """Return the names of a part, with every bracket replaced by its numbers."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"expected numbers such as 1-3,7 in a list of nodes from SLURM, found {inside!r}; "
                "give --nnodes, --node-rank and --rdzv-endpoint instead"
            )
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [before + number + tail for number in numbers for tail in _expanded(after)]
