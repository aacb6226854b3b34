"""The user's whole model, of which each stage of a pipeline has a part: who has what, and the way.

Stages have each parameter once: a tied one belongs to the first stage that uses it. A buffer that
several stages have counts on the first pipeline rank that has it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.shards import TensorFacts, state_tensors

_DTYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)
_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is, and what it is like there.

    Attributes:
        rank: of the pipeline axis.
        facts: in terms of the whole model.
    """

    rank: int
    facts: TensorFacts


class WholeState:
    """What the state dict of the whole model holds.

    Args:
        model: whole yet.
        axis: collectives over the axis ``pp``.
        device: of the model.
    """

    def __init__(self, model: nn.Module, axis: Communicator, device: torch.device) -> None:
        self._axis, self._device = axis, device
        first: dict[int, str] = {}
        self._whole = {
            name: replace(TensorFacts.of(name, t), identity=first.setdefault(id(t), name))
            for name, t in state_tensors(model).items()
        }

    def places(self, module: nn.Module) -> dict[str, Place]:
        """Return where each tensor is by now, by name. Collective over the pipeline."""
        state = state_tensors(module)
        shape = (self._axis.size, len(self._whole), 2)
        table = torch.zeros(shape, dtype=torch.int64, device=self._device)
        table[self._axis.rank] = torch.tensor(
            [_row(state.get(name)) for name in self._whole], dtype=torch.int64
        ).reshape(shape[1:])
        self._axis.all_reduce(table, label="what stages hold").wait()
        rows = table.transpose(0, 1).tolist()
        found = {}
        for facts, by_rank in zip(self._whole.values(), rows, strict=True):
            rank = next(r for r, (dtype, _) in enumerate(by_rank) if dtype != _ABSENT)
            dtype, trainable = by_rank[rank]
            known = replace(facts, dtype=_DTYPES[dtype], trainable=bool(trainable))
            found[facts.name] = Place(rank, known)
        return found

    def broadcast(self, place: Place, mine: Tensor | None) -> Tensor:
        """Return one whole tensor on every rank of the pipeline.

        Args:
            place: of the tensor.
            mine: the tensor, on the rank that has it.
        """
        if mine is None:
            whole = torch.empty(place.facts.shape, dtype=place.facts.dtype, device=self._device)
        else:
            whole = mine.detach().contiguous()
        self._axis.broadcast(whole, place.rank, label="whole state").wait()
        return whole


def _row(tensor: Tensor | None) -> tuple[int, int]:
    if tensor is None:
        return _ABSENT, 0
    return _DTYPES.index(tensor.dtype), int(tensor.requires_grad)
