"""One checkpoint format for all strategies: shards, manifest, save, load, export.

Everything here works on plain data (shards, mappings, tensors) and knows neither the facade nor a
strategy. The format is described in ``docs/checkpoint-format.md``.
"""

from drivetrain.checkpoint.background import Background
from drivetrain.checkpoint.commit import complete, find, is_finite, latest, next_name, prune, sweep
from drivetrain.checkpoint.contents import Contents
from drivetrain.checkpoint.export import ExportPlan, export_checkpoint, plan_export, write_export
from drivetrain.checkpoint.inspection import Description, describe, find_problems
from drivetrain.checkpoint.loading import CheckpointReader, ModelReader, open_checkpoint
from drivetrain.checkpoint.objects import load, save
from drivetrain.checkpoint.plain import check_plain
from drivetrain.checkpoint.resumption import Resumption, saved_steps
from drivetrain.checkpoint.saving import Save, save_checkpoint
from drivetrain.checkpoint.streaming import ExportedWeights, StreamedWeights, read_export

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
