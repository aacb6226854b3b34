"""The state of all workers in one checkpoint, and a view of the checkpoint for each worker.

The weights of a checkpoint are the outer weights, so every strategy and every tool reads them. The
first worker's optimizer state has the keys of any optimizer; everything else has a key with a mark,
which strategies of other kinds leave alone::

    weight                        the outer weights
    weight, 0.exp_avg             of the first worker's optimizer
    weight, 0.exp_avg@1           of the second worker's
    weight, 0.local@1             the second worker's own weights
    weight, 0.outer_momentum@     of the outer weights
    weight, links.error.int4.1.0@ of a method for slow links, see ``kept``

Parameters without outer weights, as in a warm-up, are alike on all workers: the first one saves
them as any strategy does.

Another number of workers goes on from the mean of all saved workers: none of their steps is lost.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.parts.saved_state import LINKS, OWN_MARK
from drivetrain.shards import Part, Reader, Shard
from drivetrain_local.outer import MOMENTUM, OUTER, UNDER_WAY

LOCAL = "local"
"""The key of a worker's own weights."""

_SHARED = (MOMENTUM, UNDER_WAY)


def shards_of_worker(
    shards: Iterable[Shard], outer: Mapping[str, int], worker: int
) -> Iterator[Shard]:
    """Yield the shards that a worker saves.

    Args:
        shards: of the strategy inside, with the outer state among the optimizers'.
        outer: the index of the optimizer of each parameter that has outer weights, by name.
        worker: number of the worker.
    """
    for shard in shards:
        index, _, key = shard.state.partition(".")
        if shard.name not in outer:
            if worker == 0:
                yield shard
        elif not shard.state:
            yield _renamed(shard, f"{outer[shard.name]}.{LOCAL}{OWN_MARK}{worker}")
        elif key == OUTER:
            if worker == 0:
                yield _renamed(shard, "")
        elif key in _SHARED:
            if worker == 0:
                yield _renamed(shard, f"{shard.state}{OWN_MARK}")
        elif worker == 0:
            yield shard
        else:
            yield _renamed(shard, f"{index}.{key}{OWN_MARK}{worker}")


def noting_weights(shards: Iterable[Shard], names: set[str]) -> Iterator[Shard]:
    """Yield shards, and add the names of weights and buffers to a set."""
    for shard in shards:
        if not shard.state:
            names.add(shard.name)
        yield shard


def _renamed(shard: Shard, state: str) -> Shard:
    return Shard(shard.name, state, shard.tensor, shard.shape, shard.part, shard.fresh)


def saved_workers(reader: Reader) -> int:
    """Return how many workers a checkpoint holds the state of; 0 for one of another strategy."""
    marks = (state.rpartition(f".{LOCAL}{OWN_MARK}")[2] for _, state in _own(reader))
    return max((int(mark) + 1 for mark in marks if mark.isdecimal()), default=0)


def optimizers_apart(reader: Reader) -> set[int]:
    """Return the indices of optimizers with which workers had taken steps by themselves."""
    return {int(state.partition(".")[0]) for _, state in _own(reader)}


def _own(reader: Reader) -> Iterator[tuple[str, str]]:
    for name, state in reader.keys():  # noqa: SIM118 - no dict
        if f".{LOCAL}{OWN_MARK}" in state:
            yield name, state


class WorkerReader:
    """A checkpoint as one worker loads it: implements ``drivetrain.shards.Reader``.

    Args:
        reader: of the checkpoint.
        saved: the workers in it.
        worker: which one to be; None to be the mean of all.
        outer: whether the reader goes on with the outer state; a worker without others has none.

    Attributes:
        partial: whether weights that the checkpoint lacks keep their values.
    """

    def __init__(self, reader: Reader, saved: int, worker: int | None, *, outer: bool) -> None:
        self.partial = reader.partial
        self._reader = reader
        self._outer = outer
        self._apart = {name for name, _ in _own(reader)}
        self._sources: dict[tuple[str, str], list[str]] = {}
        chosen = range(saved) if worker is None else [worker]
        for name, state in reader.keys():  # noqa: SIM118 - no dict
            self._sort(name, state, chosen)

    def _sort(self, name: str, state: str, workers: Iterable[int]) -> None:
        """Note which of this worker's tensors a saved tensor is a source of."""
        if state.startswith(LINKS):  # about sums that the strategy inside does not take
            return
        plain, marked, number = state.partition(OWN_MARK)
        index, _, key = plain.partition(".")
        if key == LOCAL:
            if int(number) in workers:
                # In place of the outer weights, which came as the weights of the checkpoint.
                sources = self._sources.setdefault((name, ""), [])
                self._sources[name, ""] = [*(each for each in sources if each), state]
            if self._outer:
                self._sources[name, f"{index}.{OUTER}"] = [""]
        elif not state:
            self._sources.setdefault((name, ""), [""])
        elif key in _SHARED:
            if self._outer:
                self._sources[name, plain] = [state]
        elif name not in self._apart:
            self._sources[name, plain] = [state]
        elif (int(number) if marked else 0) in workers:
            self._sources.setdefault((name, plain), []).append(state)

    def keys(self) -> Iterable[tuple[str, str]]:
        """Return the (name, state) pairs of this worker."""
        return self._sources.keys()

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Global shape of one tensor."""
        return self._reader.shape(name, self._of(name, state)[0])

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of a tensor; of several workers, the mean in its own dtype."""
        first, *others = self._of(name, state)
        found = self._reader.read(name, first, part)
        if not others or not found.is_floating_point():
            return found
        total = found.to(torch.float64)
        for other in others:
            total += self._reader.read(name, other, part)
        return found.copy_(total / (1 + len(others)))

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter that is no tensor, alike for all workers."""
        return self._reader.scalars(name, optimizer)

    def _of(self, name: str, state: str) -> list[str]:
        # A tensor that nobody saved: the reader itself says so, with the nearest names.
        return self._sources.get((name, state), [state])
