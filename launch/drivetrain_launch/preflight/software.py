"""The software of a host, which must be equal on all hosts of a run: versions, and the script."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from drivetrain import __version__

SHOWN_DIGITS = 12
"""Digits of a script's SHA-256 that a message shows: enough that two scripts never look alike."""

MOST_NAMED = 8
"""Hosts that a message names for one value."""


def software_facts(arguments: Sequence[str]) -> dict[str, str]:
    """Return the facts that all hosts must share, by their names in a message.

    Args:
        arguments: the words behind the launcher's options: ``(SCRIPT, ...)`` or
            ``("-m", MODULE, ...)``, perhaps behind an option of the worker.
    """
    return {
        "drivetrain's version": __version__,
        "torch's version": torch.__version__,
        "Python's version": "{}.{}".format(*sys.version_info),
        "the script": script_digest(arguments),
    }


def script_digest(arguments: Sequence[str]) -> str:
    """Return the first digits of the SHA-256 of a script, or of a module's file; "" without one."""
    words = [word for word in arguments if word == "-m" or not word.startswith("--")]
    if not words:
        return ""
    path = _module_file(words[1]) if words[0] == "-m" else Path(words[0])
    if path is None or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:SHOWN_DIGITS]


def differences(facts: Mapping[str, Mapping[str, str]]) -> str:
    """Return a sentence about the first fact in which hosts differ; "" if they agree.

    Args:
        facts: of each host, by the host's name in the message; the first host is host 0.
    """
    for name in next(iter(facts.values()), {}):
        hosts: dict[str, list[str]] = {}
        for host, theirs in facts.items():
            hosts.setdefault(theirs.get(name, ""), []).append(host)
        if len(hosts) > 1:
            found = "; ".join(f"{value!r} on {_listed(names)}" for value, names in hosts.items())
            return f"the hosts differ in {name}: {found}; {_way_out(name)}"
    return ""


def _way_out(name: str) -> str:
    if name == "the script":
        return "these are digests: copy the same file to every host, and start the run again"
    return "install the same versions on every host, and start the run again"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    left = len(names) - MOST_NAMED
    return f"{shown} and {left} more" if left > 0 else shown


def _module_file(name: str) -> Path | None:
    """Return the file of a module, which is not imported; None where there is none."""
    path: list[str] = [str(Path.cwd()), *sys.path]
    origin = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        origin, path = spec.origin, list(spec.submodule_search_locations or ())
    if path:  # a package runs its __main__
        spec = PathFinder.find_spec("__main__", path)
        origin = spec.origin if spec is not None else origin
    return Path(origin) if origin else None
