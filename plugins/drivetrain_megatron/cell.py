"""A cell: the ranks that share one replica, with a data-parallel strategy inside.

``DataParallelCell`` hands everything that ``Megatron`` does not do itself to that strategy;
``SameBatch`` checks that the ranks got the same batch: they compute one replica's step together.
With a loader that gives every process rows of its own, as data parallelism wants, a cell would
compute nonsense without a word. So the ranks compare digests of their batches in the first
forwards: an all-reduce of 16 bytes per axis, and one pass over the batch. Only ranks that differ
exchange more.
"""

import ctypes
import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError, RankMismatchError
from drivetrain.links.chosen import LinkMethods
from drivetrain.parts.guard import Elsewhere, refuse_transforms
from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.wrapping import UninheritedHook
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.shards import HeldPart, HeldTensors, Reader, Shard
from drivetrain.strategy import Run, Strategy, find_strategy
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.build import PipelinedModel
from drivetrain_megatron.shares import Shares, on_shares
from drivetrain_megatron.state import GlobalShards, LocalReader, Original
from drivetrain_megatron.tensor.partition import ShardingSpec, alike


def data_parallel(config: MegatronConfig) -> tuple[type[Strategy[Any]], Any]:
    """Return the class of the data-parallel strategy and its options.

    Raises:
        ConfigError: it is not installed, or is none: it lays ranks out on other axes than ``dp``.
    """
    name = config.data_parallel.name
    kind, options = find_strategy(name, config.data_parallel.options)
    axes = set(kind.axes(options, 1))
    if axes != {"dp"}:
        raise ConfigError(
            f"strategy.data_parallel: expected a strategy over the axis dp alone, found {name!r} "
            f"over {', '.join(sorted(axes))}; name one that replicates or shards a whole model"
        )
    return kind, options


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


class DataParallelCell(Strategy[MegatronConfig]):
    """The methods of a cell that its data-parallel strategy carries out."""

    _model: nn.Module
    _tp: Communicator
    _pp: Communicator
    _original: Original
    _facts: dict[str, ShardingSpec]
    _shares: Shares

    def __init__(self, config: MegatronConfig, run: Run) -> None:
        super().__init__(config, run)
        kind, options = data_parallel(config)
        self._inner: Strategy[Any] = kind(options, run)
        self._pipeline: PipelinedModel | None = None

    @classmethod
    def check_options(cls, config: MegatronConfig, precision: Precision) -> None:
        """Let the data-parallel strategy refuse options and dtypes."""
        kind, options = data_parallel(config)
        kind.check_options(options, precision)

    @classmethod
    def stages(cls, config: MegatronConfig) -> Sequence[str]:
        """Return the axis of the pipeline."""
        return ("pp",)

    @classmethod
    def channels(cls, config: MegatronConfig) -> frozenset[str]:
        """Return those of the data-parallel strategy, and activations with a pipeline."""
        kind, options = data_parallel(config)
        found = kind.channels(options)
        return found | {"activations"} if config.pp > 1 else found

    @classmethod
    def check_links(cls, config: MegatronConfig, links: LinkMethods, precision: Precision) -> None:
        """Let the data-parallel strategy refuse methods for gradients and parameters.

        Raises:
            ConfigError: the same, or activations shall be rounded and there is no pipeline.
        """
        if links.rounds_activations and config.pp == 1:
            raise ConfigError(
                "expected links.far.activations: exact without a pipeline, which alone sends "
                f"activations between hosts, found {links.activations!r} and pp: 1; leave it out, "
                "or set pp above 1"
            )
        kind, options = data_parallel(config)
        kind.check_links(options, links.with_exact_activations(), precision)

    @classmethod
    def changes_links(cls, config: MegatronConfig) -> bool:
        """Ask the data-parallel strategy; a pipeline mixes forwards and backwards."""
        kind, options = data_parallel(config)
        return config.pp == 1 and kind.changes_links(options)

    @contextmanager
    def uncounted(self, module: nn.Module) -> Iterator[None]:
        """Begin no backward through the stages of a pipeline; without one, add zeros."""
        if self._pipeline is None:
            with super().uncounted(module):
                yield
            return
        self._pipeline.counts = False
        try:
            yield
        finally:
            self._pipeline.counts = True

    def take_links(self, links: LinkMethods) -> None:
        """Let the data-parallel strategy go on with methods that were chosen between two steps."""
        super().take_links(links)
        self._inner.take_links(links)

    @property
    def draws_masks(self) -> bool:
        """True: masks count elements, and do not depend on a generator."""
        return True

    @property
    def _is_one_rank(self) -> bool:
        """Whether a cell has one rank, so that the strategy inside does everything."""
        return self.config.tp * self.config.pp == 1

    @contextmanager
    def inference(self, module: nn.Module) -> Iterator[None]:
        """Context for many forwards, which the ranks of a cell run together, on their shares."""
        with self._inner.inference(module) if self._is_one_rank else nullcontext():
            yield

    @property
    def held_tensors(self) -> HeldTensors:
        """The tensors that optimizers hold, of the data-parallel strategy."""
        return self._inner.held_tensors

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the pieces of gradient that this rank's optimizers read."""
        here = None if only is None else [p for p in only if not isinstance(p, Elsewhere)]
        with self._shares.open():
            return iter(list(self._inner.gradients(here)))

    def will_scale(self, factor: float) -> None:
        """Tell the strategy inside."""
        self._inner.will_scale(factor)

    @on_shares
    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients at hand."""
        self._inner.scale_gradients(factor)

    def step_decided(self, *, taken: bool) -> None:
        """Let the data-parallel strategy keep the errors of its sums, or go back."""
        self._inner.step_decided(taken=taken)

    @on_shares
    def stand_in(self, *, synchronize: bool) -> None:
        """Take part in one step of the other data-parallel ranks; a cell of several cannot."""
        if not self._is_one_rank:
            super().stand_in(synchronize=synchronize)
        self._inner.stand_in(synchronize=synchronize)

    @on_shares
    def catch_up(self, source: int) -> None:
        """Take over the training state of one rank."""
        self._inner.catch_up(source)

    def progress(self) -> Mapping[str, int]:
        """Return the counters of the data-parallel strategy."""
        return self._inner.progress()

    def resume(self, progress: Mapping[str, int]) -> None:
        """Go on counting where a saved run was."""
        self._inner.resume(progress)

    def names(self) -> Mapping[int, str]:
        """Return the names of the tensors that optimizers hold, by ``id``."""
        return self._inner.names()

    def held_parts(self) -> Mapping[str, HeldPart]:
        """Return this tensor-parallel rank's part of each divided parameter."""
        rank, found = self._tp.rank, {}
        for name, facts in self._facts.items():
            if (cut := facts.partition) is not None:
                holders = (str(r) for r in range(cut.ranks) if cut.ranges[r] == cut.ranges[rank])
                word = f"{'+'.join(holders)}of{cut.ranks}"
                found[name] = HeldPart(facts.local_shape(rank), word)
        return found

    @property
    def divides_states(self) -> bool:
        """Whether ranks hold parts of parameters, or some of the parameters."""
        return self._tp.size * self._pp.size > 1 or self._inner.divides_states

    @on_shares
    def check_load(self, reader: Reader) -> None:
        """Compare names and shapes of the whole model, and those of this cell's parts."""
        self._original.check_loads(reader, self._facts)
        self._inner.check_load(self._local(reader))

    @on_shares
    def load(self, reader: Reader) -> None:
        """Load this cell's parts of a checkpoint of the whole model."""
        self._original.check_loads(reader, self._facts)
        if self._pipeline is not None:
            self._pipeline.stages.outdate()
        self._inner.load(self._local(reader))
        self._shares.steps += 1

    def states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        """Yield this rank's share of an optimizer's state, in coordinates of the whole model."""
        return GlobalShards(self._facts, self._tp.rank).of(self._inner.states(index, names))

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Take this cell's parts of an optimizer's state."""
        self.check_load(reader)
        self._inner.load_states(index, self._local(reader), names)

    def _local(self, reader: Reader) -> LocalReader:
        """Return a reader of this cell's parts."""
        names = {**named_parameters(self._model), **persistent_buffers(self._model)}
        return LocalReader(reader, self._facts, names, self._tp.rank)

    def _know_shares(self, model: nn.Module) -> None:
        for name, parameter in named_parameters(model).items():
            facts, partition = self._facts[name], self._facts[name].partition
            if facts.partial and parameter.numel():  # all of it, and a part of the gradient
                partition = alike(facts.shape[0], self._tp.size) if facts.shape else None
            if partition is not None:
                self._shares.add(name, parameter, partition, facts.shape)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self._inner.unwrap(model)

    def _chosen(self, only: Collection[nn.Parameter] | None) -> Iterable[nn.Parameter]:
        chosen = named_parameters(self._model).values() if only is None else only
        return [p for p in chosen if not isinstance(p, Elsewhere)]


FORWARDS = 2
"""How many forwards of each kind are checked: a loader that is wrong is wrong at once."""

_TEXT_BYTES = 8192
"""Length of a rank's description of its batch when batches differ; the rest is cut off."""


class SameBatch(UninheritedHook):
    """A forward pre-hook that compares the batches of the ranks of a cell in the first forwards."""

    def __init__(self, cell: Sequence[Communicator], world: World) -> None:
        super().__init__(self._check)
        self._cell = [axis for axis in cell if axis.size > 1]
        self._world = world
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
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:7], "little")  # positive, and so is its negative in range
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self._world.device)
        for axis in self._cell:
            axis.all_reduce(bounds, reduction="max", label="digest of a batch").wait()
        if bounds[0] != -bounds[1]:
            raise RankMismatchError(_message(self._texts(lines)))

    def _texts(self, lines: Sequence[str]) -> dict[int, list[str]]:
        """Return the lines of every rank of the cell, by the rank."""
        mine = "\n".join([str(self._world.rank), *lines]).encode()[:_TEXT_BYTES]
        known = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=self._world.device)
        known[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        for axis in self._cell:
            everyone = known.new_zeros(axis.size, len(known))
            everyone[axis.rank] = known
            known = everyone.view(-1)
            axis.all_gather(known, label="what differs in a batch").wait()
        texts = {}
        for text in known.view(-1, _TEXT_BYTES).tolist():
            rank, *theirs = bytes(text).rstrip(b"\0").decode(errors="replace").split("\n")
            texts[int(rank)] = theirs
        return texts


def _place(path: Sequence[Any]) -> str:
    kind, name, *rest = path
    first = f"argument {name.idx}" if kind.idx == 0 else str(name.key)
    return f"{first}{keystr(tuple(rest))}"


def _content(leaf: Any) -> str:
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


def _message(texts: dict[int, list[str]]) -> str:
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
