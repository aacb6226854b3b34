"""One checkpoint format for all strategies: shards, manifest, save, load, export.

Everything here works on plain data (shards, mappings, tensors) and knows neither the facade nor a
strategy. The format is described in ``docs/checkpoint-format.md``.
"""

from drivetrain.checkpoint.commit import (
    Resumption,
    complete,
    find,
    is_finite,
    latest,
    next_name,
    prune,
    saved_steps,
    sweep,
)
from drivetrain.checkpoint.encoding import Contents, check_plain, load, save
from drivetrain.checkpoint.export import (
    ExportedWeights,
    ExportPlan,
    StreamedWeights,
    export_checkpoint,
    plan_export,
    read_export,
    write_export,
)
from drivetrain.checkpoint.loading import (
    CheckpointReader,
    Description,
    ModelReader,
    describe,
    find_problems,
    open_checkpoint,
)
from drivetrain.checkpoint.saving import Background, Save, save_checkpoint

__all__ = [
    "Background",
    "CheckpointReader",
    "Contents",
    "Description",
    "ExportPlan",
    "ExportedWeights",
    "ModelReader",
    "Resumption",
    "Save",
    "StreamedWeights",
    "check_plain",
    "complete",
    "describe",
    "export_checkpoint",
    "find",
    "find_problems",
    "is_finite",
    "latest",
    "load",
    "next_name",
    "open_checkpoint",
    "plan_export",
    "prune",
    "read_export",
    "save",
    "save_checkpoint",
    "saved_steps",
    "sweep",
    "write_export",
]
