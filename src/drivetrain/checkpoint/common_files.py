"""The files of a checkpoint that all ranks have in common: state, encoded objects, manifest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.contents import Contents, merge_scalars
from drivetrain.checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    libraries,
    merge_tensors,
)
from drivetrain.checkpoint.plain import encode
from drivetrain.checkpoint.report import SCALARS, Report
from drivetrain.checkpoint.tensorfile import FileRecord, write_bytes, write_tensors

STATE_FILE = "state.json"
STATE_TENSORS = "state.safetensors"


def write_common(draft: Path, reports: list[Report], contents: Contents) -> dict[str, FileRecord]:
    """Write the files of all ranks in common, the manifest last, and return them; on rank 0."""
    files = {name: record for report in reports for name, record in report.files.items()}
    models = tuple(
        merge_tensors(tensor for piece in pieces for tensor in piece)
        for pieces in zip(*(report.models for report in reports), strict=True)
    )
    scalars = merge_scalars([report.scalars.decoded() for report in reports])
    common = _write_state(draft, contents.state, scalars)
    for name, data in contents.encoded.items():
        common[name] = write_bytes(draft / name, data)
    manifest = Manifest(
        world_size=len(reports),
        libraries=libraries(),
        files=files | common,
        models=models,
        aliases=_merge_aliases(reports, len(models)),
        finite=all(report.finite for report in reports),
        rank_files={
            rank: report.rank_file for rank, report in enumerate(reports) if report.rank_file
        },
    )
    common[FILE_NAME] = write_bytes(draft / FILE_NAME, manifest.to_text().encode())
    return common


def _merge_aliases(reports: Sequence[Report], models: int) -> tuple[dict[str, str], ...]:
    """Join the ranks' lists of tied names; a rank with only part of a model knows few."""
    merged: tuple[dict[str, str], ...] = tuple({} for _ in range(models))
    for report in reports:
        for names, more in zip(merged, report.aliases, strict=False):
            names.update(more)
    return merged


def _write_state(
    draft: Path, state: Mapping[str, Any], scalars: Sequence[Mapping[Any, Any]]
) -> dict[str, FileRecord]:
    tensors: dict[str, Tensor] = {}
    body = {
        "state": encode(dict(state), "state", tensors),
        SCALARS: encode(list(scalars), SCALARS, tensors),
    }
    text = json.dumps(body, indent=1) + "\n"
    files = {STATE_FILE: write_bytes(draft / STATE_FILE, text.encode())}
    if tensors:
        files[STATE_TENSORS] = write_tensors(draft / STATE_TENSORS, tensors)
    return files
