"""The secret of a run over several hosts, without which no launcher joins.

It comes from the environment, from a file that a scheduler mounts, or from the user's own file,
which the first launch over several hosts makes. Most clusters have one home folder for all hosts.
"""

import os
import secrets
import tempfile
from pathlib import Path

from drivetrain.errors import ConfigError

SECRET_VARIABLE = "DRIVETRAIN_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable with the secret itself; ranks do not get it."""

FILE_VARIABLE = "DRIVETRAIN_SECRET_FILE"
"""Environment variable with the path of a file that holds the secret."""

SHORTEST = 16
"""Characters of a secret, at least: an attacker may try as many as the network carries."""

WAY_OUT = (
    f"set {SECRET_VARIABLE} to the same text on every host, for example from "
    "'openssl rand -hex 16', or name a file that holds it in "
    f"{FILE_VARIABLE} (Kubernetes: a mounted Secret)"
)


def shared_secret() -> bytes:
    """Return the secret of this user's runs.

    Raises:
        ConfigError: it is too short, others can read its file, or no file can be made.
    """
    if text := os.environ.get(SECRET_VARIABLE, ""):
        return _checked(text, SECRET_VARIABLE)
    if path := os.environ.get(FILE_VARIABLE, ""):
        try:
            return _checked(Path(path).read_text(encoding="utf-8"), f"{FILE_VARIABLE}: {path}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{FILE_VARIABLE}: cannot read {path!r}: {error}; {WAY_OUT}"
            ) from error
    return _own_file()


def _own_file() -> bytes:
    root = os.environ.get("XDG_CONFIG_HOME", "") or "~/.config"
    try:
        path = Path(root).expanduser() / "drivetrain" / "secret"
        if not path.exists():
            _make(path)
        status = path.stat()
        text = path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"several hosts share a secret, and there is none: {error}; {WAY_OUT}"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"expected the secret in {path} to be yours and readable by you alone, found "
            f"mode {status.st_mode & 0o777:o} and owner {status.st_uid}; remove the file, and the "
            "next launch makes another one"
        )
    return _checked(text, str(path))


def _make(path: Path) -> None:
    """Write a new secret, unless another host is quicker: a link never replaces a file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32) + "\n")
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        Path(draft).unlink()


def _checked(text: str, where: str) -> bytes:
    found = text.strip()
    if len(found) < SHORTEST:
        raise ConfigError(
            f"{where}: expected a secret of at least {SHORTEST} characters, found {len(found)}; "
            f"{WAY_OUT}"
        )
    return found.encode()
