"""Messages between the ranks of a pipeline: the outputs of stages one way, gradients the other.

Receiving stage, direction and micro-batch identify a message. Messages for one stage in one
direction arrive in the order in which they were sent, so each such stream has a tag of its own.
NCCL knows no tags, and lets a message wait for all earlier ones of its group: there each stream has
a group of its own. Sends do not wait; a tensor that is sent lives until the send is through.

A call's batch cut into micro-batches along dims that are known, and tensors of these joined.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from drivetrain.collectives.communicator import reason
from drivetrain.collectives.facts import FIRST_LOOK_S, Wait
from drivetrain.collectives.neighbors import Tag
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError, ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Keywords
from drivetrain.runtime.mesh import Axis, lines_along
from drivetrain.runtime.ranges import WAIT, named_range
from drivetrain.runtime.world import begin_meeting
from drivetrain.strategy import Run
from drivetrain_megatron.recording.phases import TensorMeta

# --- the mark of a gradient that backward does not make, in the tensor of a message ---

# A gradient of zeros would not do: in one process a parameter without a gradient is left alone, one
# with zeros decays.


_ABSENT = 0x7FFD
"""Two bytes; repeated over an element, a NaN of every floating point format of torch whose payload
no computation makes."""


def absent_like(tensor: Tensor) -> Tensor:
    """Return a message in a tensor's size for a gradient that backward does not make."""
    message = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    _first_element(message).fill_(_ABSENT)
    return message


def is_absent(message: Tensor) -> bool:
    """Whether a message stands for no gradient. On a GPU this waits until the message is there."""
    pieces = _first_element(message.detach())
    return bool(pieces.numel()) and bool((pieces == _ABSENT).all())


def converted(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous message in another dtype of two bytes or more; a mark stays a mark.

    A conversion makes an ordinary NaN of the mark's, so the mark is set anew: by the device, and
    nobody waits for the answer.
    """
    made = message.to(dtype)
    is_marked = (_first_element(message) == _ABSENT).all()
    _first_element(made).masked_fill_(is_marked, _ABSENT)
    return made


def _first_element(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor's first element, in pieces of two bytes."""
    return tensor.reshape(-1)[:1].view(torch.int16)


# --- the links: their names, and the dtype in which tensors cross ---

# Two ranks of the axis are neighbors of one host, or a link between hosts lies between them. With
# ``links.far.activations: bf16`` activations and their gradients cross such a link in bfloat16,
# each number rounded once. The receiving stage goes on in the dtype of the sender. Within a host,
# all is sent as it is.


logger = get_logger(__name__)

_ROUNDED = torch.bfloat16


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The links of one line of the axis ``pp``.

    Attributes:
        axis: the line, and the host of each of its ranks.
        rounds: whether activations are rounded between hosts.
    """

    axis: Axis
    rounds: bool = False

    @classmethod
    def of(cls, run: Run) -> "StageLinks":
        """Return the links of this rank's line; the mesh gets to know their names."""
        run.mesh.name_links("pp")
        return cls(run.mesh["pp"], run.links.rounds_activations)

    def is_far(self, one: int, other: int) -> bool:
        """Whether two ranks of the axis are on different hosts."""
        return self.axis.hosts[one] != self.axis.hosts[other]

    def name(self, one: int, other: int) -> str:
        """Return the name in the ledger of the link between two ranks of the axis."""
        if not self.axis.spans_hosts:
            return self.axis.name
        return f"{self.axis.name}.{'far' if self.is_far(one, other) else 'near'}"

    def wire_dtype(self, one: int, other: int, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which an activation, or its gradient, goes from rank to rank."""
        is_wide = dtype.is_floating_point and dtype.itemsize > _ROUNDED.itemsize
        return _ROUNDED if self.rounds and is_wide and self.is_far(one, other) else dtype


def announce_idle_rounding(run: Run) -> None:
    """Say that no activation is rounded, where hosts hold whole pipelines.

    Where the whole run is on one host, ``prepare()`` says so itself.
    """
    if not (run.links.rounds_activations and run.world.spans_hosts):
        return
    sizes = {name: axis.size for name, axis in run.mesh.items()}
    hosts = run.world.hosts
    if all(len({hosts[rank] for rank in line}) == 1 for line in lines_along("pp", sizes)):
        logger.announce(
            f"links.far.activations: {run.links.activations} rounds nothing: all stages of each "
            "pipeline are on one host"
        )


# --- the messages ---


class Direction(IntEnum):
    """The content of a message; the value tells the tags of one stage apart."""

    FORWARD = 0
    """Outputs, to the next stage."""
    BACKWARD = 1
    """Gradients of outputs, to the stage before."""
    TIED = 2
    """Gradients of a copy of a parameter, to its owner, or its owner's values."""


@dataclass(frozen=True, slots=True)
class Message:
    """The address of a message.

    Attributes:
        direction: its content.
        source: the stage that sends.
        stage: the stage that receives.
        number: of the micro-batch, or of the parameter that stages share.
    """

    direction: Direction
    source: int
    stage: int
    number: int

    @classmethod
    def input_of(cls, stage: int, micro_batch: int) -> "Message":
        """Return the message with a stage's input."""
        return cls(Direction.FORWARD, stage - 1, stage, micro_batch)

    @classmethod
    def gradient_of(cls, stage: int, micro_batch: int) -> "Message":
        """Return the message with the gradient of a stage's output."""
        return cls(Direction.BACKWARD, stage + 1, stage, micro_batch)

    def __str__(self) -> str:
        what = _WORDS[self.direction].format(self.stage)
        kind = "parameter" if self.direction is Direction.TIED else "micro-batch"
        return f"{what} for {kind} {self.number}"


def streams(stages: int) -> int:
    """Return how many streams of messages a pipeline has."""
    return stages * len(Direction)


def stream_of(message: Message) -> int:
    """Return the number of the stream in which a message keeps its place."""
    return len(Direction) * message.stage + message.direction


_WORDS = {
    Direction.FORWARD: "input of stage {}",
    Direction.BACKWARD: "gradient of the output of stage {}",
    Direction.TIED: "values that stage {} shares with another",
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tensors on their way to this rank, with a receive under way for each.

    Attributes:
        message: their address.
        tensors: where they arrive, in the dtypes in which they are sent.
        dtypes: in which the stage wants them.
        works: the receives.
        link: this rank's end of the pipeline.
    """

    message: Message
    tensors: Sequence[Tensor]
    dtypes: Sequence[torch.dtype]
    works: Sequence[Any]
    link: "Link"

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors when they are there.

        Raises:
            CollectiveError: the sender ended or did not send in time.
        """
        for work in self.works:
            self.link.finish(work, self.message)
        return tuple(
            tensor if tensor.dtype == dtype else converted(tensor, dtype)
            for tensor, dtype in zip(self.tensors, self.dtypes, strict=True)
        )


class MessageWait(Wait):
    """A wait of the main thread in gloo, for a message between two stages."""

    spoken_for = True


class LinkWatch(threading.Thread):
    """Looks around while the main thread waits for a message, which gloo lets nobody poll.

    The calls and backwards of a pipeline come in one order on all stages: a stage that has begun
    less of them than the one that waits, and waits for that one itself, will not send.

    Args:
        place: name of the order, the same on all ranks.
        alarm: ends the waits of this rank.

    Attributes:
        begun: how many calls and backwards.
        found: why a wait was in vain, "" as long as none was.
    """

    def __init__(self, place: str, alarm: Callable[[], None]) -> None:
        super().__init__(name=f"drivetrain-pipeline-{place}", daemon=True)
        self.place, self.begun = place, 0
        self._alarm = alarm
        self._lock = threading.Lock()
        self._wait: MessageWait | None = None
        self._since = 0.0
        self._ended = threading.Event()
        self.found = ""

    def run(self) -> None:
        """Look around until the end."""
        while not self._ended.wait(FIRST_LOOK_S):
            with self._lock:
                if self._wait is not None and not self.found:
                    self.found = self._wait.look(time.monotonic() - self._since)
                    if self.found:
                        self._alarm()

    @contextmanager
    def over(self, wait: MessageWait) -> Iterator[None]:
        """Context of a wait."""
        self._wait, self._since = wait, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._wait = None
                if not self.found:  # else the others are to read why this rank ends
                    wait.over()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()


class Link:
    """This rank's end of the pipeline, whose stage ``s`` is on rank ``s`` modulo the axis' size.

    So no message is from a rank to itself. The axis has a started group, and one message may take
    until the timeout.

    Args:
        links: between the ranks of the axis.
        groups: one for every stream, by ``stream_of``; none where tags tell the streams apart.
    """

    def __init__(
        self,
        links: StageLinks,
        traffic: Traffic,
        device: torch.device,
        timeout: timedelta,
        stages: int,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        axis = self._axis = links.axis
        self._links = links
        self._traffic = traffic
        self._device = device
        self._timeout = timeout
        self._groups = groups
        self._sending: deque[tuple[Any, Tensor, Message]] = deque()
        # Each number stands for a block of tags of this group that nobody else uses.
        numbers = [next(axis.streams) for _ in range(-(-streams(stages) // len(Tag)))]
        self._first_tag = numbers[0] * len(Tag)
        self._watch: LinkWatch | None = None

    @classmethod
    def of(cls, run: Run, stages: int) -> "Link":
        """Return this rank's end of a run's pipeline. Collective over all ranks of the run.

        Raises:
            ConfigError: gloo, which cannot send from a GPU's memory, shall carry a GPU's tensors.
        """
        axis, device = run.mesh["pp"], run.world.device
        here = (StageLinks.of(run), run.traffic, device, run.world.timeout, stages)
        if device.type == "cpu":
            return cls(*here)
        if str(dist.get_backend(axis.group)) == "gloo":
            raise ConfigError(
                f"expected a backend that sends from {device.type} to {device.type} for a "
                "pipeline, found gloo, which sends from the memory of the CPU alone; leave the "
                "backend of the process group out, or train on the CPU with device: cpu"
            )
        link = cls(*here, run.mesh.start_again("pp", streams(stages), run.world))
        for stage in range(1, stages):
            link._connect(Message.input_of(stage, 0))
            link._connect(Message.gradient_of(stage - 1, 0))
        return link

    def _connect(self, message: Message) -> None:
        """Send a byte: the first message between two ranks holds the sender up until its receive.

        Later, in the middle of a schedule, the receiver might be waiting for the sender.
        """
        sender, receiver = self._rank_of(message.source), self._rank_of(message.stage)
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        group, tag = self._group_of(message), self._tag(message)
        with self._telling(message):
            if self._axis.rank == sender:
                group.send([token], receiver, tag).wait()
            elif self._axis.rank == receiver:
                group.recv([token], sender, tag).wait()

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors; they must not be written until the step is over."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dtype = self._wire_dtype(message, whole.dtype)
            if dtype != whole.dtype:
                whole = converted(whole, dtype)
            self._traffic.add(self._link_name(message), "send", whole.nbytes)
            if whole.numel():
                with self._telling(message):
                    work = self._group_of(message).send(
                        [whole], self._rank_of(message.stage), self._tag(message)
                    )
                self._sending.append((work, whole, message))

    def receive(self, message: Message, metas: Sequence[TensorMeta]) -> Arrival:
        """Start to receive tensors."""
        dtypes = [meta.dtype for meta in metas]
        tensors = [
            torch.empty(m.shape, dtype=self._wire_dtype(message, m.dtype), device=self._device)
            for m in metas
        ]
        with self._telling(message):
            group = self._group_of(message)
            works = [
                group.recv([tensor], self._rank_of(message.source), self._tag(message))
                for tensor in tensors
                if tensor.numel()
            ]
        return Arrival(message, tensors, dtypes, works, self)

    def begin(self) -> None:
        """Count a call of the model, or a backward, which all stages begin in one order."""
        if self._groups:  # NCCL's waits are the device's
            return
        group, order = cast(dist.ProcessGroup, self._axis.group), f"/{self._first_tag}"
        if self._watch is None:
            self._watch = LinkWatch(f"{group.group_name}{order}", self.alarm)
            self._watch.start()
        # Counted by the group, which outlives this end: the last message may still be on its way.
        self._watch.begun = begin_meeting(group, order)

    def close(self) -> None:
        """Look around no more."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def flush(self, *, but: Direction | None = None) -> None:
        """Return when all that was sent is through, but for one direction.

        Raises:
            CollectiveError: a receiver ended or did not receive in time.
        """
        left: deque[tuple[Any, Tensor, Message]] = deque()
        while self._sending:
            work, _, message = self._sending[0]
            if message.direction is but:
                left.append(self._sending[0])
            else:
                self.finish(work, message)
            self._sending.popleft()
        self._sending = left

    def finish(self, work: Any, message: Message) -> None:
        """Wait for a send or a receive.

        Raises:
            CollectiveError: it failed.
        """
        start = time.perf_counter()
        with self._telling(message), named_range(WAIT, message):
            if self._groups:
                work.wait()  # the device waits, and this process goes on; NCCL watches the time
            else:
                with self._watched(message):
                    work.wait(self._timeout)
        self._traffic.waited(self._link_name(message), time.perf_counter() - start)

    def _watched(self, message: Message) -> AbstractContextManager[None]:
        """Return the context of a wait in gloo."""
        if self._watch is None:
            return nullcontext()
        ranks, rank = self._axis.ranks, self._axis.ranks[self._axis.rank]
        other = ranks[self._other_rank(message)]
        place, number = self._watch.place, self._watch.begun
        return self._watch.over(MessageWait(str(message), place, number, ranks, rank, [other]))

    def _other_rank(self, message: Message) -> int:
        sender, receiver = self._rank_of(message.source), self._rank_of(message.stage)
        return receiver if sender == self._axis.rank else sender

    @contextmanager
    def _telling(self, message: Message) -> Iterator[None]:
        """Name the message in an error: at once if a connection is closed, or later."""
        try:
            yield
        except RuntimeError as error:
            if self._watch is not None and self._watch.found:
                raise CollectiveError(self._watch.found) from error
            sender, receiver = (self._rank_of(s) for s in (message.source, message.stage))
            other = self._other_rank(message)
            raise CollectiveError(
                f"expected the {message} to go from rank {self._axis.ranks[sender]} to rank "
                f"{self._axis.ranks[receiver]} on axis {self._axis.name!r} within "
                f"{self._timeout.total_seconds():g} s, found: {reason(error)}; look at what "
                f"rank {self._axis.ranks[other]} on host {self._axis.hosts[other]} printed last"
            ) from error

    def alarm(self) -> None:
        """Close this rank's connections, so that its neighbors do not wait until the timeout.

        gloo closes all connections of a group when one wait times out: so let one time out. Ranks
        that wait in NCCL are ended by the launcher, as soon as this rank ends.
        """
        if self._groups:
            return
        whole: Any = self._axis.group
        for neighbor in {(self._axis.rank + 1), (self._axis.rank - 1)}:
            token = torch.empty(1, dtype=torch.uint8, device=self._device)
            with suppress(RuntimeError):
                work = whole.recv([token], neighbor % self._axis.size, self._first_tag)
                work.wait(timedelta(milliseconds=1))

    def _link_name(self, message: Message) -> str:
        return self._links.name(self._rank_of(message.source), self._rank_of(message.stage))

    def _wire_dtype(self, message: Message, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a message: values and gradients of shared parameters keep theirs."""
        if message.direction is Direction.TIED:
            return dtype
        ends = self._rank_of(message.source), self._rank_of(message.stage)
        return self._links.wire_dtype(*ends, dtype)

    def _group_of(self, message: Message) -> dist.ProcessGroup:
        whole: Any = self._axis.group
        return self._groups[stream_of(message)] if self._groups else whole

    def _rank_of(self, stage: int) -> int:
        return stage % self._axis.size

    def _tag(self, message: Message) -> int:
        return self._first_tag + stream_of(message)


# --- a call's batch cut into micro-batches along dims that are known ---

Dims: TypeAlias = tuple[int | None, ...]
"""Of several tensors, the dim along which each is cut; None for one that is no part of a batch."""

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one pass through the pipeline, and the targets for a loss function.

    The number is that of this forward of the model, counted over all calls, also for its dropouts.
    """

    args: tuple[Any, ...]
    kwargs: Keywords
    rows: int = 0
    targets: Any = None
    number: int = 0

    def flat(self) -> tuple[list[Any], TreeSpec]:
        """Return the leaves of args, kwargs and targets, and their tree."""
        return tree_flatten((self.args, dict(self.kwargs), self.targets))


@dataclass(frozen=True, slots=True)
class Division:
    """How the calls of one kind are cut.

    Attributes:
        dims: for each leaf of (args, kwargs, targets), the dim along which it is cut; None where
            the call must stay whole.
        joins: for each block, the dims along which its tensors are joined; empty for whole calls.
        kept: the blocks whose tensors the rest of the model reads, by index.
        failure: the first error that parts of the batch raised on this rank, in words, where the
            call stays whole; "" without any.
    """

    dims: Dims | None
    joins: tuple[Dims, ...]
    kept: frozenset[int]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class DividedCall:
    """A call of the model of one kind, and its micro-batches.

    Attributes:
        kind: of the call.
        whole: its inputs and targets.
        parts: the micro-batches.
        division: how it was cut.
    """

    kind: Hashable
    whole: MicroBatch
    parts: Sequence[MicroBatch]
    division: Division


def first_rows(leaves: Sequence[Any]) -> int:
    """Return the extent of dim 0 of the first tensor.

    Raises:
        UsageError: there is no tensor with dims, or the first one is empty.
    """
    rows = next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()), 0)
    if not rows:
        raise UsageError(
            f"expected a batch with rows to cut into micro-batches, found inputs of "
            f"{[tuple(x.shape) for x in leaves if isinstance(x, Tensor)]}; pass tensors that are "
            "not empty"
        )
    return rows


def rows_of(leaves: Sequence[Any], dims: Dims) -> int | None:
    """Return the rows of a batch whose leaves are cut along dims; None if they do not agree."""
    pairs = zip(leaves, dims, strict=True)
    found = {x.shape[dim] for x, dim in pairs if dim is not None}
    return found.pop() if len(found) == 1 else None


def cut_batch(whole: MicroBatch, count: int, dims: Dims | None = None) -> list[MicroBatch]:
    """Return at most ``count`` micro-batches, of as even a number of rows as can be.

    Args:
        whole: the inputs of a call, and the targets, which are cut as the inputs are.
        count: how many micro-batches are wanted.
        dims: for each leaf of the batch, the dim along which it is cut; other inputs go with each
            micro-batch. Without dims, dim 0 of tensors with the first one's rows.

    Raises:
        UsageError: there is no tensor with rows, or the batch is empty.
    """
    leaves, _ = whole.flat()
    first = first_rows(leaves)
    dims = dims or tuple(
        0 if isinstance(x, Tensor) and x.dim() and x.shape[0] == first else None for x in leaves
    )
    rows = rows_of(leaves, dims) or first
    pieces = min(count, rows)
    edges = [rows * index // pieces for index in range(pieces + 1)]
    return cut_at(whole, dims, edges)


def cut_at(whole: MicroBatch, dims: Dims, edges: Sequence[int]) -> list[MicroBatch]:
    """Return the micro-batches between given rows."""
    leaves, tree = whole.flat()
    found = []
    for start, stop in pairwise(edges):
        some = [
            x if dim is None else x.narrow(dim, start, stop - start)
            for x, dim in zip(leaves, dims, strict=True)
        ]
        given, named, wanted = tree_unflatten(some, tree)
        found.append(MicroBatch(given, named, stop - start, wanted))
    return found


def joined_dim(whole: Shape, parts: Sequence[Shape]) -> int | None:
    """Return the dim along which tensors are parts of a whole one; None if all are as large.

    Raises:
        ValueError: they are neither.
    """
    if all(part == whole for part in parts):
        return None
    for dim, extent in enumerate(whole):
        alike = all(
            len(part) == len(whole)
            and (*part[:dim], *part[dim + 1 :]) == (*whole[:dim], *whole[dim + 1 :])
            for part in parts
        )
        if alike and sum(part[dim] for part in parts) == extent:
            return dim
    raise ValueError(f"expected parts of a tensor of shape {whole}, found {list(parts)}")


def join(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    """Return the tensor of the whole batch; of tensors that are all alike, the first."""
    return parts[0] if dim is None or len(parts) == 1 else torch.cat(list(parts), dim)


def is_same(found: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal up to rounding in their dtype, by their norms."""
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    distance = torch.linalg.vector_norm((found - expected).double())
    limit = torch.linalg.vector_norm(expected.double()) * tolerance(expected.dtype)
    return bool(distance <= limit)  # no number is not equal


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error below which a difference is rounding: half of the digits."""
    return float(torch.finfo(dtype).eps ** 0.5)
