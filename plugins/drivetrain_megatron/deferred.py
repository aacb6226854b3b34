"""Values for a model that was built without them: each rank keeps its share of each tensor."""

from collections.abc import Mapping

from torch import Tensor, nn

from drivetrain.building import Ranges, WeightSource, meta_tensors
from drivetrain_megatron.facts import ParameterFacts


class SharedSource:
    """A ``WeightSource`` of what a cell holds: it returns this rank's share of whole tensors.

    From a file only the share is read. Values that are made are whole, one tensor at a time, for
    as long as the share is taken.

    Args:
        source: knows the values of the whole model.
        model: on the meta device, before it is divided: the source knows tensors by their memory,
            and dividing gives them other memory.
    """

    def __init__(self, source: WeightSource, model: nn.Module) -> None:
        self._source = source
        self._whole = {name: tensor.detach() for name, tensor in meta_tensors(model).items()}
        self._facts: Mapping[str, ParameterFacts] = {}
        self._rank = 0

    def divide(self, facts: Mapping[str, ParameterFacts], rank: int) -> None:
        """Say how the model was divided, and which rank of the tensor-parallel axis this is."""
        self._facts, self._rank = facts, rank

    def value(self, name: str, tensor: Tensor, only: Ranges | None = None) -> Tensor:
        """Return this rank's share of the values, or part of it, on the CPU, in fresh memory."""
        whole = self._whole.get(name, tensor)
        facts = self._facts.get(name)
        if facts is None or facts.partition is None:
            return self._source.value(name, whole, only)
        partition = facts.partition
        mine = Ranges(partition.dim, partition.ranges[self._rank])
        share = self._source.value(name, whole, mine)
        return share if only is None else only.of(share)
