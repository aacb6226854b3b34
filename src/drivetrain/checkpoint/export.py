"""Exports a model as Hugging Face style safetensors, and reads exports, one tensor at a time.

A plan is made from names, shapes and dtypes alone: which tensor goes to which file. Then the files
are written in order, and the caller yields the tensors one by one, as sharded parameters are
gathered. Loaders that know ``model.safetensors`` and ``model.safetensors.index.json`` read the
result. A checkpoint of any strategy and number of ranks is exported in one process in the same way.
A model built without memory takes its values from an export in the same pieces.
"""

import json
import re
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drivetrain.checkpoint.commit import share, together
from drivetrain.checkpoint.encoding import TensorFile
from drivetrain.checkpoint.loading import ModelReader, open_checkpoint
from drivetrain.checkpoint.manifest import basename, sync_directory, write_bytes
from drivetrain.errors import CheckpointError, ConfigError, in_words
from drivetrain.log import get_logger
from drivetrain.model.modules import all_names, named_parameters, persistent_buffers
from drivetrain.runtime.world import World
from drivetrain.shards import Ranges, TensorFacts, WeightSource

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?B|B?)\s*", re.IGNORECASE)
_EXPORTED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_DRAFT = re.compile(rf"\.{_EXPORTED.pattern}\.tmp-[0-9a-f]{{16}}")


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Which tensor goes to which file, in the order of writing.

    Attributes:
        files: file name -> its tensors.
        aliases: names that are left out -> the name their tensor is stored under.
    """

    files: dict[str, tuple[TensorFacts, ...]]
    aliases: dict[str, str]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors)

    def index(self) -> str:
        """Return the text of the index file: the file of every tensor."""
        weight_map = {t.name: file for file, tensors in self.files.items() for t in tensors}
        body = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        return json.dumps(body, indent=2) + "\n"


Fetch = Callable[[Sequence[str]], Iterable[tuple[str, Tensor]]]
"""Yields (name, whole tensor) for the given names, in their order."""


def plan_export(tensors: Iterable[TensorFacts], max_shard_size: int | str = "10GB") -> ExportPlan:
    """Divide tensors over files, in order; a tensor above the limit gets a file of its own.

    Args:
        tensors: all parameters and persistent buffers, tied ones under each of their names.
        max_shard_size: bytes per file: a number, or text such as ``10GB`` or ``512MiB``.
    """
    limit = parse_size(max_shard_size)
    kept: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    groups: list[list[TensorFacts]] = [[]]
    filled = 0
    for tensor in tensors:
        first = kept.setdefault(tensor.identity, tensor.name)
        if first != tensor.name:
            aliases[tensor.name] = first
            continue
        if groups[-1] and filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    files: dict[str, tuple[TensorFacts, ...]] = {}
    for index, group in enumerate(groups, 1):
        name = f"model-{index:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else SINGLE
        files[name] = tuple(sorted(group, key=lambda each: -each.dtype.itemsize))  # as TensorFile
    return ExportPlan(files, aliases)


def write_export(directory: Path, plan: ExportPlan, fetch: Fetch, *, world: World) -> None:
    """Write an export. Collective: every rank fetches every tensor, rank 0 writes.

    Files of an earlier export in the directory are replaced only when all new files are whole;
    surplus files of the earlier export are removed.

    Args:
        directory: made when it is missing.
        plan: the same on all ranks.
        fetch: called once per file with its names, on all ranks; each tensor is dropped before the
            next is asked for.
        world: all ranks.

    Raises:
        CheckpointError: on every rank: a tensor without data or unlike the plan, or the disk
            refuses. An earlier export is untouched then.
    """
    doing = f"export the model to {directory}"
    token = share(world, secrets.token_hex(8), str)
    drafts = {name: directory / f".{name}.tmp-{token}" for name in (*plan.files, INDEX)}
    try:
        together(world, doing, lambda: _prepare(directory) if world.is_main else None)
        for name, tensors in plan.files.items():
            write = partial(_write_file, drafts[name], tensors, fetch, writes=world.is_main)
            together(world, doing, write)
        publish = partial(_publish, directory, plan, drafts)
        together(world, doing, lambda: publish() if world.is_main else None)
    finally:
        if world.is_main:
            _discard(drafts.values())


def export_checkpoint(
    directory: Path,
    output: Path,
    *,
    model: int = 0,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "10GB",
    verify: str = "full",
) -> ExportPlan:
    """Write one model of a checkpoint as Hugging Face style safetensors, and return the plan.

    Args:
        directory: the checkpoint.
        output: gets the files, in place of an earlier export.
        model: index of the prepared model, in the order of ``prepare()``.
        dtype: of floating-point weights in the export; None keeps each as it was saved.
        max_shard_size: bytes per file, as a number or a text such as ``"5GB"``.
        verify: ``full`` checks the checksum of every file first, ``size`` its size only.

    Raises:
        CheckpointError: not a checkpoint, damaged, without this model, values too large for the
            dtype, or the output cannot be written; an earlier export is untouched then.
    """
    world = World()
    with open_checkpoint(directory, world, verify=verify) as reader:
        source = reader.model(model)
        names = [name for name, state in source.keys() if not state]  # noqa: SIM118
        dtypes = {name: source.dtype(name) for name in names}
        if dtype is not None:
            dtypes = {name: dtype if d.is_floating_point else d for name, d in dtypes.items()}
        described = [
            TensorFacts(name, source.shape(name), dtypes[name], source.aliases.get(name, name))
            for name in names
        ]
        plan = plan_export(described, max_shard_size)

        def fetch(wanted: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            for name in wanted:
                yield name, _read(source, name, dtypes[name])

        write_export(output, plan, fetch, world=world)
    return plan


def parse_size(size: int | str) -> int:
    """Return a size in bytes; GB is 10**9 bytes, GiB 2**30. Other texts raise a ConfigError."""
    match = _SIZE.fullmatch(str(size))
    unit = match[2].upper() if match else ""
    value = int(float(match[1]) * _UNITS["" if unit == "B" else unit]) if match else 0
    if value < 1:
        raise ConfigError(
            f"expected a file size such as '10GB', '512MiB' or a positive number of bytes, "
            f"found {size!r}"
        )
    return value


def _prepare(directory: Path) -> None:
    """Make the directory and sweep the files of a killed export."""
    directory.mkdir(parents=True, exist_ok=True)
    _discard(path for path in directory.iterdir() if _DRAFT.fullmatch(path.name))


def _write_file(path: Path, tensors: Sequence[TensorFacts], fetch: Fetch, *, writes: bool) -> None:
    """Fetch the tensors of one file; the writing rank puts them into the file.

    After a failure the rank goes on fetching: fetching communicates, and the others would wait.
    """
    fetched = iter(fetch([tensor.name for tensor in tensors]))
    try:
        if writes:
            announced = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
            with TensorFile(path, announced, METADATA) as file:
                for name, tensor in fetched:
                    file.add(name, tensor)
                    del tensor  # before the next one is made
    finally:
        for _ in fetched:
            pass


def _publish(directory: Path, plan: ExportPlan, drafts: dict[str, Path]) -> None:
    """Put the finished files in place.

    The old index goes first: an export that is killed half way does not load, and is never a
    mixture of two models.
    """
    used = [*plan.files, INDEX] if len(plan.files) > 1 else [*plan.files]
    if INDEX in used:
        write_bytes(drafts[INDEX], plan.index().encode())
        (directory / SINGLE).unlink(missing_ok=True)
    (directory / INDEX).unlink(missing_ok=True)
    for name in used:  # the index last: it is what makes the files a model
        drafts[name].replace(directory / name)
    for name in exported_in(directory):
        if name not in used:
            (directory / name).unlink()
    sync_directory(directory)


def exported_in(directory: Path) -> list[str]:
    """Return the names of the files of an export in a folder, which need not exist."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(path.name for path in found if _EXPORTED.fullmatch(path.name))


def _discard(paths: Iterable[Path]) -> None:
    """Remove drafts; the next export sweeps a draft that resists."""
    for path in list(paths):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _read(source: ModelReader, name: str, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the wanted dtype; refuse one whose finite values become infinite."""
    tensor = source.read(name, dtype=dtype)
    saved = source.dtype(name)
    narrowed = dtype.is_floating_point and torch.finfo(dtype).max < torch.finfo(saved).max
    if narrowed and tensor.numel() and _has_infinity(*torch.aminmax(tensor)):
        del tensor  # never two at a time
        low, high = torch.aminmax(source.read(name))
        if not _has_infinity(low, high):
            raise CheckpointError(
                f"expected the values of {name!r} to fit {dtype}, which ends at "
                f"{torch.finfo(dtype).max:g}, found values from {float(low):g} to "
                f"{float(high):g}; export as bf16 or fp32"
            )
        return source.read(name, dtype=dtype)
    return tensor


def _has_infinity(low: Tensor, high: Tensor) -> bool:
    return bool(low.isinf() or high.isinf())


# --- reads exports ---


logger = get_logger(__name__)


class ExportedWeights:
    """The files of one exported model in Hugging Face's layout: a folder, its index, or one file.

    Raises:
        CheckpointError: nothing to read is there, or a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file, names in export_files(path).items():
            with _opened(file) as content:
                for name in content.keys() if names is None else names:
                    self._files[name] = file
                    self.shapes[name] = _shape(content, file, name)

    def read(self, name: str, only: Ranges | None = None) -> Tensor:
        """Return one tensor, or part of it, on the CPU, in fresh memory and the file's dtype."""
        with _opened(self._files[name]) as content:
            if only is None:
                whole: Tensor = content.get_tensor(name).clone()
                return whole
            stored = content.get_slice(name)
            before = (slice(None),) * (only.dim % len(self.shapes[name]))
            pieces = [stored[(*before, slice(*each))] for each in only.ranges or ((0, 0),)]
        return torch.cat(pieces, only.dim)


class StreamedWeights:
    """The values of one model from an export: a ``WeightSource``.

    Values are converted to the dtype of the model. Tied tensors are found under any of their names.
    Buffers that are absent from the export, or from every state dict, come from the other source.

    Args:
        weights: the export.
        model: its tensors may be on the meta device.
        others: the other source.

    Raises:
        CheckpointError: the export lacks parameters, or shapes differ.
    """

    def __init__(self, weights: ExportedWeights, model: nn.Module, others: WeightSource) -> None:
        self._weights = weights
        self._others = others
        self._tensors = {**named_parameters(model), **persistent_buffers(model)}
        names = {name: each for name, each in all_names(model).items() if name in self._tensors}
        self._sources = {
            name: next((alias for alias in names[name] if alias in weights.shapes), None)
            for name in self._tensors
        }
        self._check()
        known = {alias for aliases in names.values() for alias in aliases}
        unused = [name for name in weights.shapes if name not in known]
        if unused:
            logger.warning(
                f"{weights.path} has {len(unused)} tensors that {type(model).__name__} has not, "
                f"and that are not read: {', '.join(unused[:4])}"
            )

    def value(self, name: str, tensor: Tensor, only: Ranges | None = None) -> Tensor:
        """Return values of one parameter or buffer, on the CPU, in fresh memory."""
        source = self._sources.get(name)
        if source is None:
            return self._others.value(name, tensor, only)
        return self._weights.read(source, only).to(tensor.dtype)

    def remaining(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensors without values in the export."""
        return [tensor for name, tensor in tensors.items() if self._sources.get(name) is None]

    @torch.no_grad()
    def fill_real(self) -> None:
        """Copy the export's values into the tensors that have memory already."""
        for name, tensor in self._tensors.items():
            if not tensor.is_meta and self._sources[name] is not None:
                tensor.copy_(self.value(name, tensor))

    def _check(self) -> None:
        absent = [
            name
            for name, tensor in self._tensors.items()
            if self._sources[name] is None and isinstance(tensor, nn.Parameter)
        ]
        if absent:
            found = ", ".join(list(self._weights.shapes)[:4])
            raise CheckpointError(
                f"expected all parameters of the model in {self._weights.path}, found that "
                f"{len(absent)} are missing: {', '.join(absent[:4])}; it holds {found}, ...; give "
                "the export of this model, with the same names"
            )
        for name, tensor in self._tensors.items():
            source = self._sources[name]
            if source is not None and self._weights.shapes[source] != tuple(tensor.shape):
                raise CheckpointError(
                    f"expected {source!r} in {self._weights.path} to have shape "
                    f"{tuple(tensor.shape)}, found {self._weights.shapes[source]}; build the model "
                    "with the configuration of the export"
                )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not whole: {error}; export the model again") from error


def _shape(content: Any, file: Path, name: str) -> tuple[int, ...]:
    try:
        return tuple(content.get_slice(name).get_shape())
    except SafetensorError as error:
        raise CheckpointError(f"expected {name!r} in {file}, found: {error}") from error


def read_export(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of an export, on the CPU, one tensor in memory at a time.

    Args:
        path: the directory, its index, or a single safetensors file.

    Raises:
        CheckpointError: nothing to read is there, a file is missing or damaged, or the index names
            a file outside the directory.
    """
    for file, names in export_files(path).items():
        with _opened(file) as content:
            for name in content.keys() if names is None else names:
                yield name, content.get_tensor(name).clone()


def export_files(path: Path) -> dict[Path, list[str] | None]:
    """Return the files to read with the names each must give, None for all names of a file.

    Errors are those of ``read_export``.
    """
    if path.is_dir():
        found = [path / name for name in (SINGLE, INDEX) if (path / name).is_file()]
        if not found:
            raise CheckpointError(f"expected {SINGLE} or {INDEX} in {path}, found neither")
        path = found[0]
    if not path.is_file():
        raise CheckpointError(f"there is no exported model {path}; check the path")
    return _indexed(path) if path.suffix == ".json" else {path: None}


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    try:
        found = dict(json.loads(index.read_text(encoding="utf-8")))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: expected the index of an export, with weight_map: {in_words(error)}; export "
            "the model again"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"expected weight_map in {index} to be a mapping, found {found!r}")
    names: dict[Path, list[str]] = {}
    for name, file in found.items():
        names.setdefault(index.parent / basename(file), []).append(name)
    absent = [file.name for file in names if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(absent)} are missing: "
            f"{', '.join(sorted(absent)[:4])}; export the model again"
        )
    return dict(names)
