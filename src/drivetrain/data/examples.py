"""Example inputs: batches of a script's own data, and the arguments of a model, or guesses of them.

An embedding takes tokens; a transformer takes sequences of its width; a convolution takes images of
its channels; a linear layer takes rows, or sequences of rows for models of sequences.

The first rows of a prepared loader are read as the loader would read them. Nobody notices: the
sampler is not asked, and generators, counters and lists of the dataset are afterwards as they were.
"""

import inspect
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import communication
from drivetrain.data.sources import collated, without_trace
from drivetrain.nested import send_to_device, tensors_in
from drivetrain.runtime import rng
from drivetrain.runtime.world import World

SEED = 20150501
"""Of the numbers that a dataset draws for an example: any would do."""


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """A few rows of a loader's dataset, collated, on the CPU.

    Attributes:
        origin: where it comes from, for messages.
        batch: as the loader's collate_fn returns it; None if there is a problem.
        problem: why there is no batch; else empty.
    """

    origin: str
    batch: Any = None
    problem: str = ""


@dataclass(eq=False)
class ExampleBatches:
    """The first rows of every prepared loader, the latest loaders first.

    Attributes:
        world: the ranks that need the same batches.
        split: whether ranks divide each batch of a loader.
        loaders: the latest first.
    """

    world: World = field(default_factory=World)
    split: bool = False
    loaders: list[DataLoader[Any]] = field(default_factory=list)

    def add(self, loaders: Sequence[DataLoader[Any]]) -> None:
        """Put loaders in front of the known loaders."""
        new = [one for one in loaders if all(one is not known for known in self.loaders)]
        self.loaders = [*new, *self.loaders]

    def rows(self, replicas: int) -> int:
        """Return the samples of a rank's batch in the latest loader; 0 where it does not say.

        Args:
            replicas: ranks over which loaders are divided.
        """
        for loader in self.loaders:
            size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            if isinstance(size, int):
                return max(1, size // replicas) if self.split else size
        return 0

    def forget(self) -> None:
        """Let go of all loaders."""
        self.loaders = []

    def read(self) -> Sequence[ExampleBatch]:
        """Return a batch, or a problem, for each loader: rank 0's on every rank. Collective."""
        if self.world.size == 1:
            return [first_rows(loader) for loader in self.loaders]
        sent: list[ExampleBatch] = []
        if self.world.rank == 0:  # others may have rows of their own, or other loaders
            sent = [_able_to_travel(first_rows(loader)) for loader in self.loaders]
        return communication.broadcast_object_list(sent)


def first_rows(loader: DataLoader[Any]) -> ExampleBatch:
    """Return rows 0 and 1 of a loader's dataset, or row 0 if two rows do not go together."""
    dataset = loader.dataset
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return ExampleBatch(kind, problem="an IterableDataset is not read ahead")
    problem = ""
    for rows in ([0, 1], [0]):
        origin = f"row{'s' * (len(rows) > 1)} {' and '.join(map(str, rows))} of {kind}"
        try:
            with rng.fork(SEED), without_trace(dataset, loader.collate_fn):
                return ExampleBatch(origin, send_to_device(collated(loader, rows), "cpu"))
        except Exception as error:  # whatever the user's code raises
            problem = problem or f"{type(error).__name__}: {error}"
    return ExampleBatch(f"rows 0 and 1 of {kind}", problem=problem)


def _able_to_travel(example: ExampleBatch) -> ExampleBatch:
    """Return a batch, or why other ranks cannot get it: not every object can be pickled."""
    try:
        pickle.dumps(example)
    except Exception as error:
        return ExampleBatch(example.origin, problem=f"{type(error).__name__}: {error}")
    return example


_ROWS, _LENGTH = 2, 8
_SIDE = 64
"""Pixels of an image whose model takes any size: five halvings leave two."""

_SAMPLES = 4000
"""Samples of a wave: a quarter of a second at the 16 kHz of speech models."""


class Candidate(NamedTuple):
    """Arguments with which a model can perhaps be called.

    Attributes:
        what: in a few words.
        args: by position.
        kwargs: by name.
        problem: why there are none; else empty.
    """

    what: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    problem: str = ""

    @classmethod
    def of(cls, what: str, given: Any) -> "Candidate":
        """Return arguments by name from a dict, several from a list or tuple, else one."""
        if isinstance(given, Mapping):
            return cls(what, (), dict(given))
        return cls(what, tuple(given) if isinstance(given, list | tuple) else (given,))


def guessed_inputs(model: nn.Module) -> Iterator[Candidate]:
    """Yield inputs on the CPU: 2 rows, sequences of length 8."""
    given = getattr(model, "dummy_inputs", None)
    if given is not None:
        yield Candidate.of(f"dummy_inputs of {type(model).__name__}", given)
    named = dict(_by_names(model))
    main = getattr(model, "main_input_name", None)
    if main in named:
        yield Candidate.of(f"{main} by its name", {main: named[main]})
    if named and set(named) != {main}:
        yield Candidate.of(f"{', '.join(named)} by their names", named)
    yield from _by_layers(model)


def _by_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the arguments of forward whose names say their kind, as in Hugging Face's models."""
    config = getattr(model, "config", None)
    if config is None:
        return
    arguments = inspect.signature(type(model).forward).parameters
    tokens = torch.arange(_ROWS * _LENGTH).view(_ROWS, _LENGTH)
    for name in ("input_ids", "decoder_input_ids"):
        if name in arguments and (words := _of(config, "text_config", "vocab_size")):
            yield name, tokens % words
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if "pixel_values" in arguments:
        channels = _of(config, "vision_config", "num_channels") or 3
        size = _of(config, "vision_config", "image_size") or _SIDE
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        yield "pixel_values", torch.zeros(_ROWS, channels, *sides, dtype=dtype)
    if "input_features" in arguments and (bins := _of(config, "audio_config", "num_mel_bins")):
        frames = 2 * (_of(config, "audio_config", "max_source_positions") or _SIDE)
        yield "input_features", torch.zeros(_ROWS, bins, frames, dtype=dtype)
    if "input_values" in arguments:
        yield "input_values", torch.zeros(_ROWS, _SAMPLES, dtype=dtype)


def _of(config: Any, part: str, name: str) -> Any:
    """Return an option of a configuration, or of its part for one kind of input."""
    return getattr(config, name, None) or getattr(getattr(config, part, None), name, None)


def _by_layers(model: nn.Module) -> Iterator[Candidate]:
    """Yield guesses for the layers that inputs may go into, first layers first."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        for what, guess in _for_layer(module):
            if what not in seen:
                seen.add(what)
                yield Candidate.of(f"{what} for {name!r}", guess)


def _for_layer(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, nn.Embedding):
        count = torch.arange(_ROWS * _LENGTH) % module.num_embeddings
        yield f"tokens below {module.num_embeddings}", count.view(_ROWS, _LENGTH)
    elif isinstance(module, nn.TransformerEncoderLayer):
        yield from _numbers(module.linear1.weight, (_ROWS, _LENGTH, module.linear1.in_features))
    elif isinstance(module, nn.MultiheadAttention):
        yield from _numbers(module.out_proj.weight, (_ROWS, _LENGTH, module.embed_dim))
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        space = (32,) * len(module.kernel_size)
        yield from _numbers(module.weight, (_ROWS, module.in_channels, *space))
    elif isinstance(module, nn.Linear):
        yield from _numbers(module.weight, (_ROWS, module.in_features))
        yield from _numbers(module.weight, (_ROWS, _LENGTH, module.in_features))


def _numbers(weight: Tensor, shape: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    yield f"{weight.dtype} of shape {shape}", torch.zeros(shape, dtype=weight.dtype)


# --- a batch of the script's loader: by name, by position, shorter ---

# Nobody says how the script calls its model with a batch, so the likely ways are tried in turn.
# Sequences are cut, if the model takes shorter ones: a plan does not depend on their length, and is
# tried in a fraction of the time.


LENGTH = 17
"""Of cut sequences: a prime, which is no model's number of heads or features."""


TARGETS = ("label", "target")
"""How the names of arguments begin that a forward may do without."""


def batches_as_arguments(
    model: nn.Module, examples: Iterable[ExampleBatch], *, cuts: bool = True
) -> Iterator[Candidate]:
    """Yield the ways to call a model with batches, the likely ones first.

    Args:
        model: the user's.
        examples: batches, or problems.
        cuts: whether sequences are cut, if the model takes shorter ones.
    """
    for example in examples:
        if example.problem:
            yield Candidate(example.origin, problem=example.problem)
            continue
        for how, args, kwargs in _calls(model, example.batch):
            what = f"{example.origin}{how}"
            for changed, (given, named) in _variants(model, (args, kwargs), cuts=cuts):
                yield Candidate(f"{what}{changed}", given, named)


_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _calls(model: nn.Module, batch: Any) -> Iterator[_Call]:
    """Yield how a batch may be handed over, the arguments by position, and those by name."""
    if isinstance(batch, Mapping):
        taken = {key: batch[key] for key in batch if key in _names(model)}
        inputs = {key: value for key, value in taken.items() if not key.startswith(TARGETS)}
        for named in (taken, inputs) if len(inputs) < len(taken) else (taken,):
            if named:
                yield f", {', '.join(named)} by name", (), named
        values = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        yield from _by_position(tuple(values.values()))
        for key in list(values)[1:]:
            yield f", {key} alone", (values[key],), {}
    elif isinstance(batch, list | tuple) and batch:
        yield from _by_position(tuple(batch))
        if not isinstance(batch[0], Tensor):  # ((image, words), target) or ({...}, target)
            for how, args, kwargs in _calls(model, batch[0]):
                yield f", its first item{how}", args, kwargs
    elif not isinstance(batch, list | tuple):
        yield "", (batch,), {}


def _by_position(items: tuple[Any, ...]) -> Iterator[_Call]:
    """Yield all items, then always one less: the last ones may be targets."""
    for count in range(len(items), 0, -1):
        yield f", {count} of {len(items)} items", items[:count], {}


def _names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a forward that can be given by name."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name for each in parameters if each.kind in by_name}


def _variants(model: nn.Module, call: Any, *, cuts: bool) -> Iterator[tuple[str, Any]]:
    """Yield a call in the model's dtype, and as it is; each with sequences cut, and whole."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    calls = [("", call)]
    if dtype is not None and {t.dtype for t in tensors_in(call) if t.is_floating_point()} - {dtype}:
        calls.insert(0, (f" in {dtype}", tree_map(lambda leaf: _cast(leaf, dtype), call)))
    for what, each in calls:
        short = _cut(each) if cuts else None
        if short is not None:
            yield f"{what}, cut to {LENGTH}", short
        yield what, each


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _cut(call: Any) -> Any:
    """Return a call with shorter sequences, where they have most content; None without any.

    Integers of shape (rows, length) are sequences; other tensors are cut where they are as long,
    as masks are.
    """
    counts: dict[int, Tensor] = {}
    for tensor in tensors_in(call):
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] > LENGTH:
            length = tensor.shape[1]
            filled = (tensor != 0).sum(0)
            counts[length] = counts.get(length, torch.zeros_like(filled)) + filled
    if not counts:
        return None
    starts = {length: _fullest(count) for length, count in counts.items()}

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            for dim in range(1, leaf.dim()):
                if leaf.shape[dim] in starts:
                    leaf = leaf.narrow(dim, starts[leaf.shape[dim]], LENGTH).contiguous()
        return leaf

    return tree_map(cut, call)


def _fullest(count: Tensor) -> int:
    """Return where the window with the highest sum begins, the first of several."""
    sums = count.unfold(0, LENGTH, 1).sum(1).tolist()
    return max(range(len(sums)), key=sums.__getitem__)
