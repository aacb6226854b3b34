"""A checkpoint of tensors in memory, for tests of what reads one."""

from collections.abc import Mapping

from torch import Tensor

from drivetrain.runtime.parts import Part


class InMemory:
    """Implements ``drivetrain.shards.Reader`` over tensors by (name, state)."""

    partial = False

    def __init__(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        self.tensors = tensors

    def keys(self) -> list[tuple[str, str]]:
        return list(self.tensors)

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        return tuple(self.tensors[name, state].shape)

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        found = self.tensors[name, state].clone()
        return found if part is None else found[slice(*part.range)]

    def scalars(self, name: str, optimizer: int) -> dict[str, object]:
        return {}
