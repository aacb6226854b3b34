"""Numbers out of what scripts log: floats, and tensors and arrays of one element."""

from typing import Any


def as_number(value: Any) -> float | int | None:
    """Return a value as a plain number, and None for what is none."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | bytes):
        return None
    item = getattr(value, "item", None)
    if not callable(item):
        return None
    try:
        number = item()
    except (RuntimeError, ValueError, TypeError):  # more than one element
        return None
    return number if isinstance(number, int | float) else None
