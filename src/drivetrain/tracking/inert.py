"""What processes that do not log get in place of a tracker."""

from collections.abc import Iterator
from typing import Any, Self


class Inert:
    """Takes every attribute, call, item and ``with``, does nothing, and is false.

    A script may say ``tracker.run.summary["best"] = 1`` on every process.
    """

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # copy, pickle and numpy ask for protocols by name
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        del name, value

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing."""
        del args, kwargs
        return self

    def __getitem__(self, key: object) -> Self:
        del key
        return self

    def __setitem__(self, key: object, value: object) -> None:
        del key, value

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del error
