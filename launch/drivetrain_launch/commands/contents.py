"""A model's saved tensors for people: the layers that repeat are one row.

``model.layers.0.mlp.weight`` to ``model.layers.31.mlp.weight`` become
``model.layers.{0..31}.mlp.weight``, where they have one shape, one dtype and one optimizer state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from drivetrain.checkpoint.loading import tensor_bytes
from drivetrain.checkpoint.manifest import SavedTensor
from drivetrain.hardware.sizes import size_text

COLUMNS = ("name", "shape", "dtype", "tensors", "size", "optimizer state", "its size")


@dataclass(slots=True)
class Parameter:
    """One parameter or buffer of a checkpoint.

    Attributes:
        name: as the user's model has it.
        values: its values; None where a checkpoint has the optimizer's state alone.
        states: the tensors of optimizers for it.
    """

    name: str
    values: SavedTensor | None = None
    states: list[SavedTensor] = field(default_factory=list)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for parameters that may share a row."""
        values = self.values
        states = tuple(sorted((one.state, one.dtype, one.shape) for one in self.states))
        facts = None if values is None else (values.shape, values.dtype)
        return len(self.name.split(".")), _pattern(self.name), facts, states


def summary(tensors: Iterable[SavedTensor]) -> list[tuple[str, ...]]:
    """Return rows of ``COLUMNS``, in the order in which the tensors come, and one with the sums."""
    parameters: dict[str, Parameter] = {}
    for tensor in tensors:
        parameter = parameters.setdefault(tensor.name, Parameter(tensor.name))
        if tensor.state:
            parameter.states.append(tensor)
        else:
            parameter.values = tensor
    ordered = sorted(parameters.values(), key=lambda one: _natural(one.name))
    kinds: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in ordered:
        kinds.setdefault(parameter.kind, []).append(parameter)
    rows = [_row(_joined([one.name for one in alike]), alike) for alike in kinds.values()]
    return [*rows, _row("all", ordered)] if len(rows) > 1 else rows


def _row(name: str, parameters: Sequence[Parameter]) -> tuple[str, ...]:
    values = [one.values for one in parameters if one.values is not None]
    states = [state for one in parameters for state in one.states]
    shapes = {shape_text(one.shape) for one in values}
    kinds = dict.fromkeys(f"{state.state.partition('.')[2]} {state.dtype}" for state in states)
    return (
        name,
        shapes.pop() if len(shapes) == 1 else "",
        ", ".join(dict.fromkeys(one.dtype for one in values)),
        str(len(values)),
        size_text(sum(map(tensor_bytes, values))),
        ", ".join(kinds),
        size_text(sum(map(tensor_bytes, states))) if states else "",
    )


def shape_text(shape: tuple[int, ...]) -> str:
    """Return ``64 x 64``, or ``scalar``."""
    return " x ".join(map(str, shape)) or "scalar"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 behind layer 9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in name.split(".")]


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _joined(names: Sequence[str]) -> str:
    """Return one name for several that differ in numbers."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_numbers(dict.fromkeys(parts)) for parts in columns)


def _numbers(parts: Iterable[str]) -> str:
    """Return one part as it is, and several as ``{0..31}`` or ``{0..3,5}``."""
    found = list(parts)
    if len(found) == 1:
        return found[0]
    numbers = sorted(map(int, found))
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{{{','.join(texts)}}}"
