"""The user's model and optimizers before the cell divided them: names, shapes, holders.

A rank has a part of them only. A checkpoint is compared with this record of the whole: a difference
in a part that other ranks hold is found too.
"""

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError, UsageError
from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.saved_state import check_fits
from drivetrain.parts.suitability import steps_each_alone, steps_pieces
from drivetrain.shards import Reader
from drivetrain_megatron.cell import ParameterFacts


class Original:
    """The whole model of one ``prepare``.

    Args:
        model: with all its parameters, of their global shapes; they may be on the meta device.
        optimizers: in the order of ``prepare``.

    Attributes:
        names: of the distinct parameters, by the parameter.
        shapes: global shapes of parameters and persistent buffers, by name.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        parameters = named_parameters(model)
        self.names: Mapping[nn.Parameter, str] = {p: name for name, p in parameters.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(tensor.shape)
            for name, tensor in {**parameters, **persistent_buffers(model)}.items()
        }
        self._held: set[tuple[int, str]] = set()
        self._optimizers = 0
        for optimizer in optimizers:
            self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Note which parameters one more optimizer holds."""
        self._held |= {(self._optimizers, name) for name in self._held_by(optimizer)}
        self._optimizers += 1

    def check_steps_parts(self, optimizer: Optimizer, facts: Mapping[str, ParameterFacts]) -> None:
        """Refuse an optimizer whose step of a parameter needs more of it than a rank has.

        Raises:
            UsageError: it holds parameters of which ranks have parts, and is not element-wise.
        """
        divided = [n for n in self._held_by(optimizer) if facts[n].partition is not None]
        if divided and not (steps_each_alone(optimizer) and steps_pieces(optimizer)):
            raise UsageError(
                "expected an element-wise optimizer under tensor parallelism, such as AdamW, "
                f"found {type(optimizer).__name__}, whose step needs whole matrices or all "
                f"parameters at once, and holds {divided[0]!r}, of which each rank has a part; "
                "take another optimizer, or set tp: 1"
            )

    def check_loads(self, reader: Reader, facts: Mapping[str, ParameterFacts]) -> None:
        """Refuse a checkpoint of another model, or state that cannot be divided.

        Raises:
            CheckpointError: lists the first differences.
        """
        check_fits(reader, {(name, ""): s for name, s in self.shapes.items()}, self._held)
        for name, state in sorted(reader.keys()):
            known = facts.get(name)
            if not state or known is None or known.partition is None:
                continue
            shape = tuple(reader.shape(name, state))
            if shape not in ((), known.shape):
                raise CheckpointError(
                    f"expected state {state!r} of {name!r} to have the parameter's shape "
                    f"{known.shape}, or none, found {shape}: an optimizer saved it that keeps "
                    "state of whole matrices, of which a rank has a part; set tp: 1"
                )

    def _held_by(self, optimizer: Optimizer) -> list[str]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return [self.names[p] for p in held if p in self.names]
