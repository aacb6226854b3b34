"""Models whose tensors get their values later: what strategies and the facade build large ones on.

A model that was built on the meta device has shapes and no values. A ``WeightSource`` knows the
values of each tensor; ``fill`` gives them to the tensors a strategy names, ``become`` to one.
"""

from drivetrain.parts.deferred.filling import become, fill, meta_tensors
from drivetrain.parts.deferred.source import WeightSource

__all__ = ["WeightSource", "become", "fill", "meta_tensors"]
