"""What loggers of the product say inside of a context."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def said(name: str, words: str = "", level: int = logging.INFO) -> Iterator[list[str]]:
    """Yield the list of the lines that a logger says from now on, of those with these words."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(lambda record: words in record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
