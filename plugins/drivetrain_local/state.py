"""The state of all workers in one checkpoint, and a view of the checkpoint for each worker.

The weights of a checkpoint are the outer weights, so every strategy and every tool reads them. The
first worker's optimizer state has the keys of any optimizer; everything else has a key with a mark,
which strategies of other kinds leave alone::

    weight                        the outer weights
    weight, 0.exp_avg             of the first worker's optimizer
    weight, 0.exp_avg@1           of the second worker's
    weight, 0.local@1             the second worker's own weights
    weight, 0.outer_momentum@     of the outer weights
    running_mean                  of the first worker, as any buffer
    running_mean, local@1         the second worker's
    weight, links.error.int4.1.0@ of a method for slow links, see ``KeptReader``

Parameters without outer weights, as in a warm-up, are alike on all workers: the first one saves
them as any strategy does.

Another number of workers goes on from the mean of all saved workers: none of their steps is lost.
Buffers are then the first worker's, as after an exchange.
"""

from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.encoding import copy_overlap
from drivetrain.collectives import Communicator
from drivetrain.compression.error_feedback import take_kept
from drivetrain.log import get_logger
from drivetrain.runtime.parts import Part
from drivetrain.saved_state import AROUND, LINKS, OWN_MARK
from drivetrain.shards import Reader, Shard, TensorFacts
from drivetrain_local.outer import MOMENTUM, OUTER, UNDER_WAY

LOCAL = "local"
"""The key of a worker's own weights, and, without an optimizer's index, of its own buffers."""

_SHARED = (MOMENTUM, UNDER_WAY)


def shards_of_worker(
    shards: Iterable[Shard], outer: Mapping[str, int], worker: int, parameters: Container[str]
) -> Iterator[Shard]:
    """Yield the shards that a worker saves.

    Args:
        shards: of the strategy inside, with the outer state among the optimizers'.
        outer: the index of the optimizer of each parameter that has outer weights, by name.
        worker: number of the worker.
        parameters: names of all parameters; other tensors are buffers.
    """
    own = f"{OWN_MARK}{worker}" if worker else ""
    for shard in shards:
        key = shard.state.partition(".")[2]
        if shard.name in outer and not shard.state:
            yield replace(shard, state=f"{outer[shard.name]}.{LOCAL}{OWN_MARK}{worker}")
        elif shard.name not in outer and worker:
            if shard.name not in parameters:
                yield replace(shard, state=f"{LOCAL}{own}")
        elif key in AROUND:
            if worker == 0:
                yield replace(shard, state="" if key == OUTER else f"{shard.state}{OWN_MARK}")
        else:
            yield replace(shard, state=f"{shard.state}{own}")


def noting_weights(shards: Iterable[Shard], names: set[str]) -> Iterator[Shard]:
    """Yield shards, and add the names of weights and buffers to a set."""
    for shard in shards:
        if not shard.state:
            names.add(shard.name)
        yield shard


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


class MappedReader:
    """A checkpoint under other keys: implements ``drivetrain.shards.Reader``.

    Args:
        reader: of the checkpoint.

    Attributes:
        partial: whether weights that the checkpoint lacks keep their values.
    """

    def __init__(self, reader: Reader) -> None:
        self.partial = reader.partial
        self._reader = reader
        self._sources: dict[tuple[str, str], list[str]] = {}

    def keys(self) -> Iterable[tuple[str, str]]:
        """Return the (name, state) pairs."""
        return self._sources.keys()

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Global shape of one tensor."""
        return self._reader.shape(name, self._of(name, state)[0])

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of a tensor; of several sources, the mean in its own dtype."""
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


class WorkerReader(MappedReader):
    """A checkpoint as one worker loads it.

    Args:
        reader: of the checkpoint.
        saved: the workers in it.
        worker: which one to be; None to be the mean of all.
        outer: whether the reader goes on with the outer state; a worker without others has none.
    """

    def __init__(self, reader: Reader, saved: int, worker: int | None, *, outer: bool) -> None:
        super().__init__(reader)
        self._outer = outer
        self._apart = {name for name, _ in _own(reader)}
        chosen = range(saved) if worker is None else [worker]
        for name, state in reader.keys():  # noqa: SIM118 - no dict
            plain, marked, _ = state.partition(OWN_MARK)
            if marked and plain.rpartition(".")[2] == LOCAL:
                self._sort_own(name, state, chosen)
            elif not state.startswith(LINKS):  # about sums that the strategy inside does not take
                self._sort(name, state, chosen)

    def _sort_own(self, name: str, state: str, workers: Collection[int]) -> None:
        """Note a worker's own weights, which come in place of the outer ones, or own buffers."""
        plain, _, number = state.partition(OWN_MARK)
        index = plain.partition(".")[0]
        if plain == LOCAL:
            if [*workers] == [int(number)]:
                self._sources[name, ""] = [state]
            return
        if int(number) in workers:
            sources = self._sources.setdefault((name, ""), [])
            self._sources[name, ""] = [*(each for each in sources if each), state]
        if self._outer:
            self._sources[name, f"{index}.{OUTER}"] = [""]

    def _sort(self, name: str, state: str, workers: Collection[int]) -> None:
        """Note which of this worker's tensors any other saved tensor is a source of."""
        plain, marked, number = state.partition(OWN_MARK)
        key = plain.partition(".")[2]
        if not state:
            self._sources.setdefault((name, ""), [""])
        elif key in _SHARED:
            if self._outer:
                self._sources[name, plain] = [state]
        elif name not in self._apart:
            self._sources[name, plain] = [state]
        elif (int(number) if marked else 0) in workers:
            self._sources.setdefault((name, plain), []).append(state)


# --- errors that methods for slow links keep, in the checkpoint of all workers ---

# Their keys are those of ``drivetrain.compression.error_feedback`` with the mark of ``local``:
# these are errors of outer gradients, which no other strategy may add to its gradients. Before the
# mark is the word of the part that a rank steps, where a replica is divided over ranks::
#
#     weight, links.error.int4.1.0@          of the second worker
#     weight, links.error.int4.1.0@0of2@     of its first tensor-parallel rank
#
# A strategy inside that cuts parameters into pieces steps ranges of parts, each with its own key.


logger = get_logger(__name__)


def marked(shards: Iterable[Shard], parts: Mapping[str, str]) -> Iterator[Shard]:
    """Yield the kept state of parameters, under the keys of ``local``.

    Args:
        shards: of the communicator between workers.
        parts: the parameters of which this rank steps a part or a range: the word of each part by
            name.
    """
    for shard in shards:
        if shard.name in parts:
            yield replace(shard, state=f"{shard.state}{_mark(parts[shard.name])}")


def _mark(word: str) -> str:
    return f"{OWN_MARK}{word}{OWN_MARK}" if word else OWN_MARK


def go_on_with_kept(
    workers: Communicator,
    ranks: Communicator,
    device: torch.device,
    reader: Reader,
    parts: Mapping[str, str],
    method: str,
) -> None:
    """Let the exchanges of this run go on with the kept state, and say if some is left out.

    Collective.

    Args:
        workers: all of them; the channels of their exchanges are there.
        ranks: of this worker; stages of a pipeline go on with different parameters.
        device: of messages.
        reader: the checkpoint.
        parts: the parameters of which this rank steps a part or a range: the word of each part by
            name.
        method: for gradients, in this run.
    """
    mine = KeptReader(reader, parts)
    take_kept([workers], mine, method)
    kept = sorted({name for name, state in reader.keys() if _is_kept(state)})  # noqa: SIM118
    if not kept:
        return
    taken = {name for name, _ in mine.keys()}  # noqa: SIM118
    go_on = named_by_any(ranks, device, kept, taken, "kept errors that go on")
    if left_out := len(kept) - len(go_on):
        logger.announce(
            f"local: the checkpoint has errors of links.far.gradients for {left_out} "
            "parameters that no rank of this run exchanges in the same parts; these errors are "
            "left out"
        )


def _is_kept(state: str) -> bool:
    return state.startswith(LINKS) and state.endswith(OWN_MARK)


class KeptReader(MappedReader):
    """The kept state in a checkpoint of ``local``, without the marks.

    ``drivetrain.compression.error_feedback`` reads it.

    Args:
        reader: of the checkpoint.
        parts: the parameters of which this rank steps a part or a range: the word of each part by
            name.
    """

    def __init__(self, reader: Reader, parts: Mapping[str, str]) -> None:
        super().__init__(reader)
        marks = {name: _mark(word) for name, word in parts.items()}
        for name, state in reader.keys():  # noqa: SIM118 - no dict
            plain, marked, rest = state.partition(OWN_MARK)
            if _is_kept(state) and marks.get(name) == f"{marked}{rest}":
                self._sources[name, plain] = [state]


# --- whole outer weights on every rank, joined from the parts of the worker's ranks ---


@torch.no_grad()
def joined_weights(
    ranks: Communicator,
    device: torch.device,
    facts: Sequence[TensorFacts],
    names: Collection[str],
    shards: Iterable[Shard],
    held: Collection[str],
) -> dict[str, Tensor]:
    """Return the whole outer weights of some tensors of a model, by name. Collective.

    Args:
        ranks: of the worker, which all join the same.
        device: where whole tensors come to lie.
        facts: of all tensors of the model, alike on all ranks.
        names: of the tensors that are wanted, tied ones under any of their names.
        shards: of this rank, with those of outer weights.
        held: names of which this rank has some outer weights.
    """
    first: dict[Hashable, str] = {}
    for one in facts:
        first.setdefault(one.identity, one.name)
    wanted = set(names)
    saved_as = {one.name: first[one.identity] for one in facts if one.name in wanted}
    chosen = named_by_any(
        ranks, device, list(dict.fromkeys(saved_as.values())), held, "outer weights"
    )
    whole = {
        one.name: torch.zeros(one.shape, dtype=one.dtype, device=device)
        for one in facts
        if one.name in chosen
    }
    for shard in shards:
        if shard.name in whole and shard.state.partition(".")[2] == OUTER:
            target, flat = whole[shard.name].view(-1), shard.tensor.detach().reshape(-1)
            copy_overlap(target, Part.whole(shard.shape), flat, shard.part)
    for tensor in whole.values():  # other ranks' parts are zeros here
        ranks.all_reduce(tensor, label="outer weights").wait()
    return {name: whole[one] for name, one in saved_as.items() if one in whole}


def named_by_any(
    ranks: Communicator, device: torch.device, names: Sequence[str], mine: Container[str], what: str
) -> list[str]:
    """Return those of the names that some of the ranks has among its own. Collective.

    Args:
        ranks: who takes part.
        device: of this rank.
        names: the same on all ranks.
        mine: those of this rank.
        what: the label of the operation.
    """
    flags = torch.tensor([name in mine for name in names], dtype=torch.uint8).to(device)
    ranks.all_reduce(flags, reduction="max", label=what).wait()
    return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
