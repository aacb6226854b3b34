"""Automatic names: ``checkpoint_0``, ``checkpoint_1``, ... in one folder, and how many are kept.

These functions are for one rank at a time: the facade calls them on rank 0 and shares the answer.
"""

import re
import secrets
from pathlib import Path

from drivetrain.checkpoint import commit
from drivetrain.errors import CheckpointError

_NAME = re.compile(r"checkpoint_([0-9]+)")


def next_name(root: Path) -> str:
    """Return the name for the next checkpoint in a folder: numbered after the highest that exists.

    Args:
        root: the folder of checkpoints; it need not exist.
    """
    return f"checkpoint_{max(_numbered(root), default=-1) + 1}"


def latest(root: Path) -> Path:
    """Return the complete checkpoint with the highest number.

    Raises:
        CheckpointError: there is none.
    """
    numbered = _numbered(root)
    for number in sorted(numbered, reverse=True):
        if commit.is_checkpoint(numbered[number]):
            return numbered[number]
    found = ", ".join(path.name for path in numbered.values()) or "no folder of such a name"
    raise CheckpointError(
        f"expected a complete checkpoint named checkpoint_NUMBER in {root}, found {found}; "
        "save one first or name the directory to load"
    )


def prune(root: Path, limit: int) -> list[Path]:
    """Remove the oldest complete checkpoints until at most ``limit`` are left.

    Call it only after a save has returned, so that the newest good checkpoint is never at risk.

    Args:
        root: the folder of checkpoints.
        limit: how many to keep, at least 1.

    Returns:
        What was removed, oldest first.

    Raises:
        CheckpointError: the limit is below 1, or the disk refuses.
    """
    if limit < 1:
        raise CheckpointError(f"expected a limit of at least 1 checkpoint, found {limit}")
    numbered = _numbered(root)
    complete = [numbered[n] for n in sorted(numbered) if commit.is_checkpoint(numbered[n])]
    removed = complete[:-limit]
    for path in removed:
        try:
            commit.retire(path, secrets.token_hex(8))
        except OSError as error:
            raise CheckpointError(
                f"cannot remove the old checkpoint {path}: {error.strerror}; the new one is saved"
            ) from error
    return removed


def _numbered(root: Path) -> dict[int, Path]:
    """Return the folders named ``checkpoint_NUMBER`` by number."""
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return found
