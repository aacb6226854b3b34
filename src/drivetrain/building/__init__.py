"""Models whose tensors get their values later: what strategies and the facade build large ones on.

A ``Recording`` constructs a model on the meta device and knows how each value comes about. A
``WeightSource`` returns the values of one tensor at a time, from recordings or from a file.
``fill`` gives values to the tensors that a strategy names, ``become`` to one.
"""

from drivetrain.building.filling import become, fill, meta_tensors, stray_tensors
from drivetrain.building.recording import RecordedWeights, Recording, unknown_values
from drivetrain.building.source import Ranges, WeightSource

__all__ = [
    "Ranges",
    "RecordedWeights",
    "Recording",
    "WeightSource",
    "become",
    "fill",
    "meta_tensors",
    "stray_tensors",
    "unknown_values",
]
