"""Logging and progress that know the rank: one voice by default, all of them when asked."""

import logging
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, TypeVar

import torch.distributed as dist

from drivetrain.availability import is_tqdm_available
from drivetrain.bars import Bar

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank; 0 before the ranks have joined."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks; 1 before they have joined."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank_prefix() -> str:
    """Return ``[r3] `` on rank 3 of several, and nothing where there is only one."""
    return f"[r{rank()}] " if size() > 1 else ""


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods take ``main_process_only`` and ``in_order``.

    ``main_process_only=True`` (the default) logs on rank 0; False logs on every rank. ``in_order``
    logs on every rank, one after another, whatever ``main_process_only`` says; all ranks must take
    part, whatever their levels.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[str] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message where ``main_process_only`` and ``in_order`` say."""
        main_only = kwargs.pop("main_process_only", True)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        if kwargs.pop("in_order", False):
            for turn in range(size()):
                if turn == rank():
                    super().log(level, msg, *args, **kwargs)
                if size() > 1:
                    dist.barrier()
        elif rank() == 0 or not main_only:
            super().log(level, msg, *args, **kwargs)

    def announce(self, msg: str) -> None:
        """Log at INFO on rank 0; where logging is not configured, write it to stderr."""
        if self.logger.hasHandlers():
            self.info(msg, stacklevel=2)
        elif rank() == 0:
            print(f"{rank_prefix()}{msg}", file=sys.stderr, flush=True)  # noqa: T201

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time that this logger is given this message."""
        if str(msg) not in self._said:
            self._said.add(str(msg))
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.warning(msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message when there are several."""
        prefix = rank_prefix()
        return (f"{prefix}{msg}" if prefix else msg), kwargs


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a rank-aware logger.

    Args:
        name: usually ``__name__``.
        log_level: name of a level such as ``INFO``; None leaves the level alone.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger)


def progress(
    iterable: Iterable[T], *, total: float | None = None, desc: str = "", disable: bool = False
) -> Bar[T]:
    """Return the iterable with a progress bar on the main process.

    Args:
        iterable: yields the items of the loop.
        total: its length, when it does not know it.
        desc: text before the bar.
        disable: iterate without a bar.
    """
    return Bar(iterable, total=total, desc=desc, disable=disable or rank() != 0)


def tqdm(
    iterable: Iterable[Any] | None = None,
    *args: Any,
    main_process_only: bool = True,
    **kwargs: Any,
) -> Any:
    """Return tqdm's bar when tqdm is installed, else ours, which has the same common methods.

    Args:
        iterable: yields the items of the loop; None for a bar that ``update`` moves.
        args: arguments of tqdm: desc, total, leave.
        main_process_only: show the bar on rank 0 only.
        kwargs: keyword arguments of tqdm; ours knows desc, total and disable, and lets the rest be.
    """
    hidden = bool(kwargs.pop("disable", False)) or (main_process_only and rank() != 0)
    if is_tqdm_available():
        from tqdm.auto import tqdm as real  # type: ignore[import-untyped, unused-ignore]

        return real(iterable, *args, disable=hidden, **kwargs)
    named = {**dict(zip(("desc", "total"), args, strict=False)), **kwargs}
    return Bar(iterable, total=named.get("total"), desc=named.get("desc"), disable=hidden)
