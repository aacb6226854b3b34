"""Keeps secrets out of what trackers store."""

import re
from collections.abc import Mapping
from typing import Any

from drivetrain.nested import honor_type

_SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)


def without_secrets(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings without those whose names look secret, and the names left out.

    Args:
        config: settings by name; mappings inside, also in lists, are searched as well.

    Returns:
        A new mapping, and the dotted names that it lacks.
    """
    dropped: list[str] = []

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            dropped.extend(f"{path}{key}" for key in value if _SECRET.search(str(key)))
            kept = {key: item for key, item in value.items() if not _SECRET.search(str(key))}
            return {key: clean(item, f"{path}{key}.") for key, item in kept.items()}
        if isinstance(value, list | tuple):
            items = (clean(item, f"{path}{index}.") for index, item in enumerate(value))
            return honor_type(value, items)
        return value

    return clean(config, ""), dropped
