"""Gives a model built without memory the values of an exported model, tensor by tensor."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drivetrain.building import Ranges, WeightSource
from drivetrain.checkpoint.export import INDEX, SINGLE
from drivetrain.checkpoint.manifest import basename
from drivetrain.errors import CheckpointError
from drivetrain.log import get_logger
from drivetrain.parts.naming import all_names, named_parameters, persistent_buffers

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


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
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
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.keys() if names is None else names:
                    yield name, content.get_tensor(name).clone()
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} is not whole: {error}; export the model again"
            ) from error


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
    names: dict[Path, list[str]] = {}
    for name, file in _weight_map(index).items():
        names.setdefault(index.parent / basename(file), []).append(name)
    absent = [file.name for file in names if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(absent)} are missing: "
            f"{', '.join(sorted(absent)[:4])}; export the model again"
        )
    return dict(names)


def _weight_map(index: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of an export: {error!r}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"expected weight_map in {index} to be a mapping, found {found!r}")
    return found
