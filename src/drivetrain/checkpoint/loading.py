"""Reads a checkpoint on any number of ranks: trusted first, then only the bytes that are needed.

Files are mapped into memory, so a part touches the pages it lies on and no others. Every file is
hashed once before anything is believed; the ranks share that work and hear one verdict.
Descriptions and verification of a checkpoint need neither the model nor a process group.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint import commit
from drivetrain.checkpoint.commit import check_same, together
from drivetrain.checkpoint.encoding import DTYPES, STATE_TENSORS, Scalars, copy_overlap
from drivetrain.checkpoint.manifest import (
    STATE_FILE,
    FileRecord,
    Manifest,
    SavedPart,
    SavedTensor,
    decode,
    file_record,
    first_overlap,
    fits,
    numel,
)
from drivetrain.errors import CheckpointError, in_words
from drivetrain.runtime.parts import Part, label
from drivetrain.runtime.world import World

_TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}


def open_checkpoint(directory: Path, world: World, verify: str = "full") -> "CheckpointReader":
    """Open a checkpoint that any number of ranks wrote. Collective.

    Args:
        directory: the checkpoint.
        world: all ranks.
        verify: ``full`` hashes every file, each on one rank; ``size`` looks at sizes only.

    Raises:
        CheckpointError: on every rank, when any finds no checkpoint, or a file missing or changed.
    """
    target = Path(directory).resolve()
    doing = f"load {target}"
    together(world, doing, lambda: commit.recover(target) if world.is_main else None)
    manifest = together(world, doing, lambda: Manifest.read(target))
    # Hosts may have copies in folders of their own, but of the same checkpoint.
    same = {"verify": verify, "the digest of its files": manifest.digest}
    check_same(world, "load a checkpoint", same)
    if verify not in ("full", "size"):
        raise CheckpointError(f"expected verify to be 'full' or 'size', found {verify!r}")
    together(world, doing, lambda: _check_files(target, manifest.files, hashed=False))
    if verify == "full":
        mine = _dealt_out(manifest.files, world)
        together(world, doing, lambda: _check_files(target, mine, hashed=True))
    together(world, doing, lambda: _check_headers(target, manifest, world))
    return together(world, doing, lambda: CheckpointReader(target, manifest))


class CheckpointReader:
    """An open checkpoint; a context manager, which lets go of the mapped files at the end.

    Attributes:
        directory: its place.
        world_size: number of ranks at the time of saving.
        state: the plain values that were saved, with their tensors.
        models: number of prepared models that were saved.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.world_size = manifest.world_size
        self._rank_files = manifest.rank_files
        self._listed = frozenset(manifest.files)
        self._files = _Files(directory)
        body = self._read_state(manifest)
        self.state: Mapping[str, Any] = body["state"]
        self.models = len(manifest.models)
        scalars = body["scalars"] or [{}] * self.models
        tensors = ({(each.name, each.state): each for each in one} for one in manifest.models)
        models = zip(tensors, scalars, manifest.aliases, strict=True)
        self._readers = tuple(ModelReader(self._files, *model) for model in models)

    def model(self, index: int) -> "ModelReader":
        """Return the reader of one prepared model, in the order of saving."""
        if not 0 <= index < self.models:
            raise CheckpointError(
                f"expected model {index} in {self.directory}, found {self.models} models; prepare "
                "the same models in the same order as the run that saved it"
            )
        return self._readers[index]

    def rank_state(self, rank: int) -> dict[str, Tensor] | None:
        """Return the tensors of one rank's own, None when that rank saved none."""
        name = self._rank_files.get(rank)
        return None if name is None else self._files.all_of(name)

    def encoded(self, name: str) -> bytes:
        """Return the content of a file that only the user can read."""
        if name not in self._listed:
            raise CheckpointError(
                f"expected the file {name!r} among those of {self.directory}, found "
                f"{', '.join(sorted(self._listed))}; the state is damaged"
            )
        return (self.directory / name).read_bytes()

    def close(self) -> None:
        """Let go of the mapped files; tensors read before stay valid."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_state(self, manifest: Manifest) -> dict[str, Any]:
        path = self.directory / STATE_FILE
        tensors = self._files.all_of(STATE_TENSORS) if STATE_TENSORS in manifest.files else {}
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            return {key: decode(body[key], tensors) for key in ("state", "scalars")}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {in_words(error)}; take another checkpoint"
            ) from error


@dataclass(eq=False)
class ModelReader:
    """Reads one model of a checkpoint: implements ``drivetrain.shards.Reader``.

    Every method raises a CheckpointError for a tensor that the checkpoint lacks.

    Attributes:
        aliases: further names of tied parameters -> the name they are saved under.
        partial: whether weights and buffers that the checkpoint lacks keep their values.
    """

    _files: "_Files"
    _tensors: Mapping[tuple[str, str], SavedTensor]
    _scalars: Scalars
    aliases: Mapping[str, str]
    partial: bool = False

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yield the (name, state) pairs that the checkpoint holds."""
        yield from self._tensors

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Return the global shape of one tensor."""
        return self._find(name, state).shape

    def dtype(self, name: str, state: str = "") -> torch.dtype:
        """Return the dtype in which a tensor was saved."""
        return _TORCH_DTYPES[self._find(name, state).dtype]

    def read(
        self,
        name: str,
        state: str = "",
        part: Part | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return one part of a tensor, on the CPU.

        Args:
            name: the parameter's or buffer's name.
            state: "" for the parameter or buffer itself, else the optimizer state.
            part: the wanted part; None means all of the tensor.
            dtype: converts on the way, without a second copy; None means the saved dtype.

        Raises:
            CheckpointError: the part lies outside of the tensor.
        """
        saved = self._find(name, state)
        wanted = part or Part.whole(saved.shape)
        if not fits(wanted, saved.shape):
            raise CheckpointError(
                f"expected a part of {label(name, state)} inside its shape {saved.shape}, "
                f"found {wanted}"
            )
        held = [self._files.tensor(one) for one in saved.parts]
        memory = torch.empty(numel(wanted), dtype=dtype or _TORCH_DTYPES[saved.dtype], device="cpu")
        copied = sum(
            copy_overlap(memory, wanted, tensor, one.part)
            for tensor, one in zip(held, saved.parts, strict=True)
        )
        if copied != len(memory):
            raise CheckpointError(
                f"expected {len(memory)} elements of {label(name, state)} in {wanted}, found "
                f"{copied}; the parts that were saved overlap or leave holes"
            )
        return memory.view(wanted.sizes) if wanted.flat is None else memory

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter without the tensors; perhaps empty."""
        return self._scalars.get(optimizer, {}).get(name, {})

    def _find(self, name: str, state: str) -> SavedTensor:
        found = self._tensors.get((name, state))
        if found is None:
            same = [other for other, kind in self._tensors if kind == state]
            near = difflib.get_close_matches(name, same, n=3)
            raise CheckpointError(
                f"the checkpoint lacks {label(name, state)}; "
                f"nearest of {len(same)} names: {', '.join(near) or 'none'}"
            )
        return found


class _Files:
    """The safetensors files of a checkpoint, mapped when first used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, Any] = {}

    def tensor(self, saved: SavedPart) -> Tensor:
        """Return a saved part's memory, 1-D: a view of the mapped file, not to be written."""
        tensor: Tensor = self._handle(saved.file).get_tensor(saved.key)
        return tensor.view(-1)

    def facts(self, saved: SavedPart) -> tuple[str, int] | None:
        """Return dtype and number of elements of a saved part; None if its file lacks it."""
        content = self._handle(saved.file)
        try:
            found = content.get_slice(saved.key)
        except SafetensorError:
            return None
        return found.get_dtype(), prod(found.get_shape())

    def all_of(self, name: str) -> dict[str, Tensor]:
        """Return copies of all tensors of a file."""
        content = self._handle(name)
        return {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118

    def close(self) -> None:
        """Unmap the files that nothing uses any more."""
        self._open.clear()

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.directory / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self.directory / name} is not a whole safetensors file: {error}"
                ) from error
        return self._open[name]


def _check_files(directory: Path, files: Mapping[str, FileRecord], *, hashed: bool) -> None:
    for name, record in files.items():
        _refuse(_file_problem(directory / name, record, hashed=hashed))


def _dealt_out(files: Mapping[str, FileRecord], world: World) -> dict[str, FileRecord]:
    """Return this rank's part of the files: the largest are dealt out first."""
    order = sorted(files, key=lambda name: (-files[name].size, name))
    return {name: files[name] for name in order[world.rank :: world.size]}


def _refuse(problem: str) -> None:
    if problem:
        raise CheckpointError(f"{problem}; take another checkpoint")


def _check_headers(directory: Path, manifest: Manifest, world: World) -> None:
    """Find the tensors of this rank's part of the files: a load that has begun changes values."""
    files = _Files(directory)
    tensors = [tensor for tensors in manifest.models for tensor in tensors]
    parts = [(saved, tensor) for tensor in tensors for saved in tensor.parts]
    of_ranks = set(manifest.rank_files.values())
    mine = {*sorted(of_ranks.union(saved.file for saved, _ in parts))[world.rank :: world.size]}
    for name in of_ranks & mine:
        files.all_of(name)
    for saved, tensor in parts:
        if saved.file in mine:
            _refuse(_part_problem(files, saved, tensor))


# --- looks at a checkpoint from outside of a run ---


def find_problems(directory: Path) -> list[str]:
    """Return all faults of a checkpoint: an empty list when the checkpoint can be loaded.

    Checked are the manifest, the size and SHA-256 of every file, that every part is in its file
    with its dtype and length, and that the parts of a tensor hold each element exactly once.
    """
    try:
        manifest = Manifest.read(directory)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot read the manifest of {directory}: {in_words(error)}"]
    problems = {
        name: _file_problem(directory / name, record, hashed=True)
        for name, record in manifest.files.items()
    }
    found = [problem for problem in problems.values() if problem]
    files = _Files(directory)
    for tensor in (tensor for tensors in manifest.models for tensor in tensors):
        # the manifest has seen that the sizes add up
        if pair := first_overlap([saved.part for saved in tensor.parts]):
            found.append(
                f"{label(tensor.name, tensor.state)}: expected each element in one part, found "
                f"some in both {pair[0]} and {pair[1]}"
            )
        if not any(problems[part.file] for part in tensor.parts):
            found += filter(None, (_part_problem(files, saved, tensor) for saved in tensor.parts))
    return found


def _part_problem(files: "_Files", saved: SavedPart, tensor: SavedTensor) -> str:
    """Return how a part is not in its file as the manifest says, "" for one that is."""
    try:
        expected, found = (tensor.dtype, numel(saved.part)), files.facts(saved)
    except CheckpointError as error:
        return str(error)
    if found == expected:
        return ""
    return (
        f"{files.directory / saved.file}: expected {expected[1]} elements of {expected[0]} as "
        f"{saved.key!r}, found {found or 'nothing'}"
    )


def _file_problem(path: Path, record: FileRecord, *, hashed: bool) -> str:
    """Return how a file is not as it was written, "" for one that is."""
    changed = "the file was changed after it was written"
    if not path.is_file():
        return f"expected the file {path} of {record.size} bytes, found none"
    if (size := path.stat().st_size) != record.size:
        return f"expected {record.size} bytes in {path}, found {size}; {changed}"
    if hashed and (digest := file_record(path).sha256) != record.sha256:
        return f"expected sha256 {record.sha256} of {path}, found {digest}; {changed}"
    return ""
