"""Logging and progress that know the rank: one voice by default, all of them when asked."""

import logging
from collections.abc import Iterable, Iterator, MutableMapping
from importlib.util import find_spec
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank; 0 before the ranks have joined."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks; 1 before they have joined."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods take ``main_process_only`` and ``in_order``.

    ``main_process_only=True`` (the default) logs on rank 0; False logs on every rank, with the rank
    before the message. ``in_order=True`` lets the ranks log one after another, which all of them
    must take part in.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message where ``main_process_only`` and ``in_order`` say."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if in_order and not main_only:
            for turn in range(size()):
                if turn == rank():
                    super().log(level, msg, *args, **kwargs)
                if size() > 1:
                    dist.barrier()
        elif rank() == 0 or not main_only:
            super().log(level, msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message when there are several."""
        return (f"[r{rank()}] {msg}" if size() > 1 else msg), kwargs


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a rank-aware logger.

    Args:
        name: usually ``__name__``.
        log_level: name of a level such as ``INFO``; None leaves the level alone.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger, {})


def progress(
    iterable: Iterable[T], *, total: float | None = None, desc: str = "", disable: bool = False
) -> Iterator[T]:
    """Iterate with a progress bar on the main process.

    Args:
        iterable: what to iterate over.
        total: its length, when it does not know it.
        desc: text before the bar.
        disable: iterate without a bar.
    """
    if disable or rank() != 0:
        yield from iterable
        return
    from rich.progress import track

    yield from track(iterable, description=desc or "Working", total=total)


def tqdm(iterable: Iterable[Any], *args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Iterate with tqdm's bar when tqdm is installed, else with ours.

    Args:
        iterable: what to iterate over.
        args: arguments of tqdm.
        main_process_only: show the bar on rank 0 only.
        kwargs: keyword arguments of tqdm; ours knows total, desc and disable.
    """
    hidden = bool(kwargs.pop("disable", False)) or (main_process_only and rank() != 0)
    if find_spec("tqdm") is not None:
        from tqdm.auto import tqdm as real  # type: ignore[import-untyped, unused-ignore]

        return real(iterable, *args, disable=hidden, **kwargs)
    return progress(
        iterable, total=kwargs.get("total"), desc=kwargs.get("desc") or "", disable=hidden
    )
