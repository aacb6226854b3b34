"""A cell: the ranks that share one replica, with a data-parallel strategy inside.

``SameBatch`` checks that the ranks got the same batch: they compute one replica's step together.
With a loader that gives every process rows of its own, as data parallelism wants, a cell would
compute nonsense without a word. So the ranks compare digests of their batches in the first
forwards: eight bytes per axis, and one pass over the batch. Only ranks that differ exchange more.

Between a cell and the user's whole model: checkpoints, state dicts, initial values.

``Original`` is a record of the whole model, with which a checkpoint is compared: a difference in
another rank's part is found too.
"""

import ctypes
import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from drivetrain.collectives import Communicator
from drivetrain.collectives.facts import differing, gather_facts
from drivetrain.errors import CheckpointError, RankMismatchError, UsageError
from drivetrain.model.guard import Elsewhere, refuse_transforms
from drivetrain.model.modules import UninheritedHook, named_parameters, persistent_buffers
from drivetrain.model.valueless import ValuelessTensor
from drivetrain.parallel.replicated import replicate
from drivetrain.parallel.suitability import misfit
from drivetrain.parallel.whole_state import copied_state
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.parts import Part, boxes
from drivetrain.runtime.world import World
from drivetrain.saved_state import LINKS, OWN_MARK, TrainingState, check_fits
from drivetrain.shards import (
    Ranges,
    Reader,
    Shard,
    TensorFacts,
    WeightSource,
    state_tensors,
)
from drivetrain.strategy import Strategy, find_strategy
from drivetrain_megatron.config import MegatronConfig, outline_inside
from drivetrain_megatron.tensor.operators import gathered
from drivetrain_megatron.tensor.partition import Partition, ShardingSpec

# --- between a cell and the user's whole model ---


class Original:
    """The whole model of one ``prepare``, also on the meta device, and its optimizers, in order.

    Attributes:
        names: of the distinct parameters, by the parameter.
        shapes: global shapes of parameters and persistent buffers, by name.
        optimizers: how many there are.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        parameters = named_parameters(model)
        self.names: Mapping[nn.Parameter, str] = {p: name for name, p in parameters.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(tensor.shape)
            for name, tensor in {**parameters, **persistent_buffers(model)}.items()
        }
        self.optimizers = len(list(optimizers))

    def check_steps_parts(
        self, optimizers: Iterable[Optimizer], facts: Mapping[str, ShardingSpec], stages: int
    ) -> None:
        """Refuse optimizers whose step needs more than a rank has, or will have.

        Args:
            optimizers: left as they are.
            facts: of the parameters that they hold.
            stages: of the pipeline.

        Raises:
            UsageError: one is not element-wise, and holds parameters of which ranks have parts; or
                it needs all parameters at once, of which stages have some.
        """

        def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
            name = self.names.get(parameter)  # None: of another model
            return tuple(parameter.shape) if name is None else facts[name].shape

        for optimizer in optimizers:
            held = self._held_by(optimizer)
            divided = [name for name in held if facts[name].partition is not None]
            if not held or not (divided or stages > 1):
                continue
            found = misfit(optimizer, "flat" if divided else "whole", shape_of)
            if found is None:
                continue
            name = type(optimizer).__name__
            if divided:
                raise UsageError(
                    "expected an element-wise optimizer under tensor parallelism, such as AdamW, "
                    f"found {name}, whose step {found.why}, and holds {divided[0]!r}, of which "
                    "each rank has a part; take another optimizer, or set tp: 1"
                )
            raise UsageError(
                "expected an optimizer that steps each parameter by itself in a pipeline, found "
                f"{name}, whose step {found.why}, and each stage has some parameters; take another "
                "optimizer, or set pp: 1"
            )

    def cut_states(
        self, optimizers: Iterable[Optimizer], facts: Mapping[str, ShardingSpec], rank: int
    ) -> None:
        """Cut the existing state of divided parameters to this rank's part, in place."""
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                held: Any = parameter
                known = facts.get(self.names.get(held, ""))
                if known is None or known.partition is None:
                    continue
                for key, value in state.items():
                    if isinstance(value, Tensor) and tuple(value.shape) == known.shape:
                        state[key] = known.partition.take(value, rank)

    def check_loads(self, reader: Reader, facts: Mapping[str, ShardingSpec]) -> None:
        """Refuse a checkpoint of another model, or state that cannot be divided.

        Raises:
            CheckpointError: lists the first differences.
        """
        # Which of them an optimizer holds, the strategy inside knows: groups are added later.
        held = {(i, name) for i in range(self.optimizers) for name in self.names.values()}
        check_fits(reader, {(name, ""): s for name, s in self.shapes.items()}, held)
        for name, state in sorted(reader.keys()):
            known = facts.get(name)
            if not state or known is None or known.partition is None:
                continue
            if state.startswith(LINKS):  # each part of a parameter has its own
                continue
            shape = tuple(reader.shape(name, state))
            if shape not in ((), known.shape):
                raise CheckpointError(
                    f"expected state {state!r} of {name!r} to have the parameter's shape "
                    f"{known.shape}, or none, found {shape}: an optimizer saved it that keeps "
                    "state of whole matrices, of which a rank has a part; set tp: 1"
                )

    def _held_by(self, optimizer: Optimizer) -> list[str]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return [self.names[p] for p in held if p in self.names]


@dataclass(frozen=True, slots=True)
class SharedSource:
    """A ``WeightSource`` of this rank's share of whole tensors.

    From a file only the share is read. Initial values are made whole, one tensor at a time.

    Attributes:
        source: knows the values of the whole model.
        whole: the model's tensors, by name, from before it is divided: the source knows them by
            their memory, and dividing gives them other memory.
        facts: how the model was divided.
        rank: of the tensor-parallel axis.
    """

    source: WeightSource
    whole: Mapping[str, Tensor]
    facts: Mapping[str, ShardingSpec]
    rank: int

    def value(self, name: str, tensor: Tensor, only: Ranges | None = None) -> Tensor:
        """Return this rank's share of the values, or part of it, on the CPU, in fresh memory."""
        whole = self.whole.get(name, tensor)
        facts = self.facts.get(name)
        if facts is None or facts.partition is None:
            return self.source.value(name, whole, only)
        partition = facts.partition
        mine = Ranges(partition.dim, partition.ranges[self.rank])
        share = self.source.value(name, whole, mine)
        return share if only is None else only.of(share)


@contextmanager
def joined(
    ranks: Communicator, partitions: Mapping[nn.Parameter, Partition | None], *, modify: bool
) -> Iterator[None]:
    """Context in which parameters have their global shape and values on every rank. Collective.

    Args:
        ranks: the axis ``tp``.
        partitions: of each parameter; None where every rank has the whole.
        modify: whether changes inside are kept: those of the axis's first rank, for all of them.
    """
    if ranks.size == 1:
        yield
        return
    cut = {p: (p.data, partition) for p, partition in partitions.items() if partition is not None}
    for parameter, (share, partition) in cut.items():
        parameter.data = gathered(share, ranks, partition)
    try:
        yield
        if modify:
            replicate(partitions, ranks, "changed parameters")
            for parameter, (share, partition) in cut.items():
                share.copy_(partition.take(parameter.data, ranks.rank))
    finally:
        for parameter, (share, _) in cut.items():
            parameter.data = share


@contextmanager
def refusing_forwards(model: nn.Module) -> Iterator[None]:
    """Context in which a model must not be called: its layers compute with shares of parameters.

    Raises:
        UsageError: in a forward inside.
    """

    def refuse(module: nn.Module, args: Any) -> None:
        raise UsageError(
            f"expected {type(model).__name__} not to be called while its parameters are gathered, "
            "found a forward: its layers compute with this rank's share of them; leave gathered() "
            "first, and use accelerator.inference(model) for evaluation and generation"
        )

    handle = model.register_forward_pre_hook(UninheritedHook(refuse), prepend=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def computing_in_copies(model: nn.Module) -> Iterator[None]:
    """Context of trials, in which copies of a model compute with values of their own.

    Raises:
        UsageError: at the end, if the model itself got gradients: a forward keeps the module.
    """
    parameters = named_parameters(model)
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    yield
    found = [name for name, parameter in parameters.items() if parameter.grad is not None]
    for name, parameter in parameters.items():
        parameter.grad = before[name]
    if found:
        raise UsageError(
            f"expected a copy of {type(model).__name__} to compute with values of its own, found "
            f"that it computes with {found[0]!r} of the model: a forward was replaced by a "
            "function that keeps its module. Let a copy have a copy: module.forward = "
            "types.MethodType(function, module), where the function takes the module first"
        )


def shows_whole(module: nn.Module, owner: TrainingState) -> None:
    """Let ``state_dict()`` of a module be whole, on the CPU: a collective of the cell's ranks.

    With ``keep_vars=True`` it has the parameters themselves.
    """

    def fill(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        own = [value for name, value in state.items() if name.startswith(prefix)]
        if any(isinstance(value, nn.Parameter) for value in own):
            return
        for name, value in copied_state(module, owner).items():
            state.pop(prefix + name, None)
            state[prefix + name] = value

    module.register_state_dict_post_hook(UninheritedHook(fill))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class TensorHome:
    """The pipeline rank that has a tensor, and the tensor's facts in the whole model."""

    rank: int
    facts: TensorFacts


class WholeState:
    """The state dict of the whole model, of which each pipeline stage holds some tensors.

    Attributes:
        copies: names of the tensors here that count on another stage.
    """

    def __init__(self, model: nn.Module, axis: Communicator, device: torch.device) -> None:
        self._axis, self._device = axis, device
        self.copies: Collection[str] = ()
        first: dict[int, str] = {}
        self._whole = {
            name: replace(TensorFacts.of(name, t), identity=first.setdefault(id(t), name))
            for name, t in state_tensors(model).items()
        }

    def places(self, module: nn.Module) -> dict[str, TensorHome]:
        """Return where each tensor is by now, by name. Collective over the pipeline.

        Raises:
            UsageError: no stage has one of them by its name.
        """
        state = state_tensors(module)
        here = {name: state[name] for name in self._whole if name in state}
        mine = {
            name: [str(tensor.dtype).removeprefix("torch."), str(tensor.requires_grad)]
            for name, tensor in here.items()
            if name not in self.copies and not isinstance(tensor, Elsewhere)
        }
        held = gather_facts(
            mine, dict[str, list[str]], doing="the places of tensors", group=self._axis.axis
        )
        found = {}
        for name, facts in self._whole.items():
            rank = next((r for r, names in enumerate(held) if name in names), None)
            if rank is None:
                raise UsageError(
                    f"expected the tensors of the prepared model, found none that is {name!r}"
                    " on any stage: modules were renamed or taken away since prepare(), as by "
                    "merge_and_unload() of peft; save the model as it is, and merge in one process"
                )
            dtype, trainable = held[rank][name]
            known = replace(facts, dtype=getattr(torch, dtype), trainable=trainable == "True")
            found[name] = TensorHome(rank, known)
        return found

    def broadcast(self, place: TensorHome, mine: Tensor | None) -> Tensor:
        """Return one whole tensor on every rank; the rank that has the tensor gives ``mine``."""
        if mine is None:
            whole = torch.empty(place.facts.shape, dtype=place.facts.dtype, device=self._device)
        else:
            whole = mine.detach().contiguous()
        self._axis.broadcast(whole, place.rank, label="whole state").wait()
        return whole


# --- between a rank's parts and whole tensors: shards of a checkpoint, saved and loaded ---

# A rank holds a part of some tensors, a pipeline stage holds some of the tensors. The data-parallel
# strategy inside of a cell knows these local tensors only. ``global_shards`` puts the shards that
# this strategy saves into global coordinates, and ``LocalReader`` cuts parts to be loaded out of
# whole tensors: a checkpoint does not show how the ranks shared the model.


def globally(
    part: Part, tensor: Tensor, partition: Partition, rank: int
) -> Iterator[tuple[Part, Tensor]]:
    """Yield the pieces of a part of a local tensor, in coordinates of the global one.

    Args:
        part: of the local tensor of a rank.
        tensor: the part's values: of shape ``part.sizes``, or 1-D for a flat range.
        partition: of the global tensor.
        rank: the one with the local tensor.

    Yields:
        (global part, view of the values that belong there).
    """
    ranges = partition.ranges[rank]
    if len(ranges) == 1:  # the local tensor is one box, and a flat range of it stays one
        offsets = list(part.offsets)
        offsets[partition.dim] += ranges[0][0]
        yield Part(tuple(offsets), part.sizes, part.flat), tensor
        return
    flat = tensor.reshape(-1)
    for box in boxes(part):
        values = flat[box.start : box.start + prod(box.sizes)].view(box.sizes)
        for offset, size, to in _cut(ranges, box.offsets[partition.dim], box.sizes[partition.dim]):
            piece = values.narrow(partition.dim, offset - box.offsets[partition.dim], size)
            at = list(box.offsets)
            at[partition.dim] = to
            yield Part(tuple(at), tuple(piece.shape)), piece


def global_shards(
    shards: Iterable[Shard], facts: Mapping[str, ShardingSpec], rank: int
) -> Iterator[Shard]:
    """Yield the shards that a rank saves in global coordinates; what several ranks hold comes once.

    Args:
        shards: those that a cell's strategy saves.
        facts: of parameters; tensors without facts are replicated.
        rank: of the tensor-parallel axis.

    Raises:
        CheckpointError: an optimizer keeps state of a divided parameter that has neither its shape
            nor is a single number.
    """
    for shard in shards:
        known = facts.get(shard.name)
        if known is not None and known.partition and shard.state.startswith(LINKS):
            yield replace(shard, state=f"{shard.state}{_mark(known, rank)}")
        elif known is None or known.partition is None or not shard.shape:  # a count of steps
            if rank == 0:
                yield shard
        elif shard.shape != known.local_shape(rank):
            raise CheckpointError(
                f"expected state of {shard.name!r} with the shape of its part, "
                f"{known.local_shape(rank)}, found {shard.state!r} with {shard.shape}; "
                "this optimizer cannot be saved under tensor parallelism"
            )
        elif known.saves(rank):
            for part, piece in globally(shard.part, shard.tensor, known.partition, rank):
                yield replace(shard, tensor=piece, shape=known.shape, part=part)


class LocalReader:
    """Shows a checkpoint of the whole model as if it had this rank's part of each tensor only.

    Only the cell's parameters and buffers (``names``) are shown; and of the state that sums over
    slow links keep, for parts of a parameter, the state for parts cut like this rank's.
    """

    def __init__(
        self, reader: Reader, facts: Mapping[str, ShardingSpec], names: Iterable[str], rank: int
    ) -> None:
        self._reader, self._facts, self._rank = reader, facts, rank
        self.partial = reader.partial
        self._names = frozenset(names)

    def keys(self) -> Iterable[tuple[str, str]]:
        """The (name, state) pairs of this cell."""
        found = []
        for name, state in self._reader.keys():  # noqa: SIM118 - no dict
            plain, marked, _ = state.partition(OWN_MARK)
            of_part = marked and state.startswith(LINKS)
            if name in self._names and (not of_part or self._saved(name, plain) == state):
                found.append((name, plain if of_part else state))
        return found

    def _saved(self, name: str, state: str) -> str:
        """Return the key of a state in the checkpoint."""
        facts = self._facts.get(name)
        of_part = facts is not None and facts.partition and state.startswith(LINKS)
        return f"{state}{_mark(facts, self._rank)}" if facts and of_part else state

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Shape of the part that this cell holds."""
        state = self._saved(name, state)
        shape = self._reader.shape(name, state)
        facts = self._divided(name, shape)
        return shape if facts is None else facts.local_shape(self._rank)

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of the cell's tensor, on the CPU, in the saved dtype."""
        state = self._saved(name, state)
        shape = self._reader.shape(name, state)
        facts = self._divided(name, shape)
        if facts is None or facts.partition is None:
            return self._reader.read(name, state, part)
        wanted = part or Part.whole(facts.local_shape(self._rank))
        if len(facts.partition.ranges[self._rank]) == 1:
            ((where, _),) = globally(wanted, torch.empty(0), facts.partition, self._rank)
            return self._reader.read(name, state, where)
        nothing = Part((0,) * len(shape), (0,) * len(shape))
        dtype = self._reader.read(name, state, nothing).dtype
        sizes = wanted.sizes if wanted.flat is None else (wanted.flat[1] - wanted.flat[0],)
        values = torch.empty(sizes, dtype=dtype, device="cpu")
        for where, piece in globally(wanted, values, facts.partition, self._rank):
            piece.copy_(self._reader.read(name, state, where))
        return values

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter that is no tensor."""
        return self._reader.scalars(name, optimizer)

    def _divided(self, name: str, shape: tuple[int, ...]) -> ShardingSpec | None:
        facts = self._facts.get(name)
        return facts if facts is not None and facts.partition and shape == facts.shape else None


def _mark(facts: ShardingSpec, rank: int) -> str:
    """Return the end of the keys of state for one part of a parameter."""
    ranges = () if facts.partition is None else facts.partition.ranges
    return f"{OWN_MARK}{rank}of{len(ranges)}"


def _cut(
    ranges: Iterable[tuple[int, int]], offset: int, size: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (local offset, size, global offset) of each intersection of an interval and a range."""
    begin = 0
    for start, stop in ranges:
        end = begin + stop - start
        low, high = max(offset, begin), min(offset + size, end)
        if low < high:
            yield low, high - low, start + low - begin
        begin = end


# --- a cell ---


def data_parallel(config: MegatronConfig) -> tuple[type[Strategy[Any]], Any]:
    """Return the class of the data-parallel strategy and its options.

    Raises:
        ConfigError: as ``outline_inside``.
    """
    outline_inside(config)
    return find_strategy(config.data_parallel.name, config.data_parallel.options)


def advice(mesh: Mesh) -> str:
    """Return why the order of axes makes tensor-parallel ranks wait for a network; else "".

    Tensor parallelism waits for its neighbors several times in each block, pipelines once per
    stage, data parallelism once per step: the first belongs inside of a host (Narayanan et al.
    2021, section 3.2, takeaway 1).
    """
    line = mesh["tp"]
    if not line.spans_hosts:
        return ""
    hosts = {host: line.hosts.count(host) for host in line.hosts}
    where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    return (
        f"tensor-parallel ranks lie on {len(hosts)} hosts ({where}): every block waits for the "
        "network between them; put tp first in order, and set tp to at most the ranks of a host"
    )


FORWARDS = 2
"""How many forwards of each kind are checked: a loader that is wrong is wrong at once."""


class SameBatch(UninheritedHook):
    """A forward pre-hook that compares the batches of the ranks of a cell in the first forwards."""

    def __init__(self, cell: Sequence[Communicator], world: World) -> None:
        super().__init__(self._check)
        self._cell = [communicator.axis for communicator in cell]
        self._rank = world.rank
        self._left = dict.fromkeys((True, False), FORWARDS)

    def _check(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare the mode and the arguments of the first forwards, in training and in evaluation.

        Raises:
            RankMismatchError: ranks of the cell got different ones; on each of them.
            UsageError: the forward is part of a transform of ``torch.func``.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # a backward that computes once more
        refuse_transforms()
        trains = module.training and torch.is_grad_enabled()
        if self._left[trains]:
            self._left[trains] -= 1
            mode = f"training: {module.training}", f"gradients enabled: {torch.is_grad_enabled()}"
            leaves, _ = tree_flatten_with_path((tuple(args), dict(kwargs)))
            self._compare([*mode, *(f"{_place(path)}: {_content(leaf)}" for path, leaf in leaves)])

    def _compare(self, lines: Sequence[str]) -> None:
        """Compare along one axis after the other; who knows of a difference tells it on."""
        known = {self._rank: lines}
        for axis in self._cell:
            facts = lines if len(known) == 1 else [json.dumps(known)]
            told = differing(facts, axis, doing="the same batch", notes=[json.dumps(known)])
            for *_, texts in told:
                known |= {int(rank): theirs for rank, theirs in json.loads(texts).items()}
        if len(known) > 1:
            raise RankMismatchError(_message(known))


def _place(path: Sequence[Any]) -> str:
    kind, name, *rest = path
    first = f"argument {name.idx}" if kind.idx == 0 else str(name.key)
    return f"{first}{keystr(tuple(rest))}"


def _content(leaf: Any) -> str:
    if isinstance(leaf, ValuelessTensor):
        return (
            "an output of a pipelined model (of another, or of this one's earlier batch), whose "
            "last stage alone has its values: put both into one module, or take zero3 or fsdp"
        )
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} with digest {_digest(leaf)}"
    plain = leaf is None or isinstance(leaf, bool | int | float | str)
    return repr(leaf)[:80] if plain else f"an object of class {type(leaf).__name__}"


@torch.no_grad()
def _digest(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return str(tensor.layout)
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    content = ctypes.string_at(values.data_ptr(), values.nbytes) if values.numel() else b""
    return hashlib.sha256(content).hexdigest()[:12]


def _message(texts: Mapping[int, Sequence[str]]) -> str:
    first = min(texts)
    other = next(rank for rank in sorted(texts) if texts[rank] != texts[first])
    pairs = itertools.zip_longest(texts[first], texts[other], fillvalue="nothing")
    mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"expected ranks {', '.join(map(str, sorted(texts)))}, which share the layers of one "
        f"replica, to get the same batch, found that rank {first} has {mine}, and rank {other} "
        f"has {theirs}; let accelerator.prepare() divide the loader, or choose rows by "
        "accelerator.mesh['dp'].rank, seed random changes of the data alike on these ranks, and "
        "train or evaluate on all of them together"
    )
