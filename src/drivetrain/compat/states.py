"""Questions that scripts ask Accelerate about processes and packages, answered by this process."""

import operator
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.torch_version import TorchVersion

from drivetrain import aliases, processes
from drivetrain.errors import UsageError
from drivetrain.parts.naming import uncompiled

COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


class Resettable:
    """A state that nobody shares, so that there is nothing to reset."""

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Do nothing, for tests of scripts, which call it between two runs."""


class ScriptPartialState(Resettable, processes.PartialState):
    """The processes of a run, for scripts without an Accelerator."""


class ScriptAcceleratorState(Resettable, aliases.AcceleratorState):
    """The processes of a run and its precision, for scripts without an Accelerator."""


def is_initialized() -> bool:
    """Whether ``AcceleratorState()`` can be asked: always here, for it finds the run itself."""
    return True


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model, compiled or not, is one of peft's."""
    if find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(uncompiled(model), PeftModel)


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed library, or a version itself, with another one.

    Args:
        library_or_version: the library's name, or a version.
        operation: ``<``, ``<=``, ``==``, ``!=``, ``>=`` or ``>``.
        requirement_version: the other version.

    Raises:
        UsageError: an unknown operation.
    """
    if operation not in COMPARISONS:
        raise UsageError(f"expected one of {', '.join(COMPARISONS)}, found {operation!r}")
    text = str(library_or_version)
    if not text[:1].isdigit():
        text = installed_version(text)
    return bool(COMPARISONS[operation](TorchVersion(text), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch with another one, as ``compare_versions`` does."""
    return compare_versions("torch", operation, version)
