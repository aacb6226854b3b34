"""Models whose tensors get their values later: how large models are built.

A ``ConstructionRecording`` constructs a model on the meta device and records how each value is
computed. A ``WeightSource`` returns the values of one tensor at a time, from recordings or files.
``fill`` gives values to tensors by name, ``become`` to a single tensor.
"""

from drivetrain.building.filling import become, fill, meta_tensors, stray_tensors
from drivetrain.building.recording import ConstructionRecording, RecordedWeights, unknown_values
from drivetrain.shards import Ranges, WeightSource

__all__ = [
    "ConstructionRecording",
    "Ranges",
    "RecordedWeights",
    "WeightSource",
    "become",
    "fill",
    "meta_tensors",
    "stray_tensors",
    "unknown_values",
]
