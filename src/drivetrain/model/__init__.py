"""One look at a user's model: its forward runs once without values, and is written down.

``look_at`` returns a ``Look``: every operation with its floating point work and bytes, every call
of a module and of a repeated block, and which tensor follows from which. Plans (which layers are
divided, where a pipeline is cut, which functions drop elements) are made from it, without another
run.

- ``look``: the record itself; read this file first
- ``recorder``: the one pass over the model
- ``valueless``: the tensors in it, which have a shape and no values
- ``results``: results of functions of torch, by torch's fake tensors; remembered
- ``untouched``: lets code run on a model that must leave no trace, or that has no values
- ``first_batch``: the arguments of a model, from a batch of a loader or guessed
"""

from drivetrain.model.look import BlockCall, Look, ModelOperation, ModuleCall, SeenTensor, TensorRef
from drivetrain.model.recorder import look_at
from drivetrain.model.results import ValuesNeededError
from drivetrain.model.untouched import PLANNING, LeftBehind, is_left_equal, untouched
from drivetrain.model.valueless import ValuelessTensor

__all__ = [
    "PLANNING",
    "BlockCall",
    "LeftBehind",
    "Look",
    "ModelOperation",
    "ModuleCall",
    "SeenTensor",
    "TensorRef",
    "ValuelessTensor",
    "ValuesNeededError",
    "is_left_equal",
    "look_at",
    "untouched",
]
