"""Names the case of a loop in which a test fails."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Add the case to an error that is raised inside of the context."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {', '.join(map(str, what))}")
        raise
