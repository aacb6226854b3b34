"""Whole outer weights on every rank, joined from the parts of the worker's ranks."""

from collections.abc import Collection, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.shards import Shard, TensorFacts, boxes
from drivetrain_local.outer import OUTER


class JoinedWeights:
    """Joins the outer weights of some tensors of a model. Every rank of the worker joins the same.

    Args:
        ranks: of the worker.
        device: where whole tensors come to lie.
        facts: of all tensors of the model, alike on all ranks.
        names: of the tensors that are wanted, tied ones under any of their names.
    """

    def __init__(
        self,
        ranks: Communicator,
        device: torch.device,
        facts: Sequence[TensorFacts],
        names: Collection[str],
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._facts = {one.name: one for one in facts}
        first: dict[Hashable, str] = {}
        for one in facts:
            first.setdefault(one.identity, one.name)
        wanted = set(names)
        self._saved_as = {one.name: first[one.identity] for one in facts if one.name in wanted}

    @torch.no_grad()
    def joined(self, shards: Iterable[Shard], held: Collection[str]) -> dict[str, Tensor]:
        """Return the whole outer weights by name. Collective.

        Args:
            shards: of this rank, with those of outer weights.
            held: names of which this rank has some outer weights.
        """
        chosen = self._held_by_some(held)
        whole = {
            one.name: torch.zeros(one.shape, dtype=one.dtype, device=self._device)
            for one in (self._facts[name] for name in chosen)
        }
        for shard in shards:
            if shard.name in whole and shard.state.partition(".")[2] == OUTER:
                write(shard, whole[shard.name])
        for tensor in whole.values():  # other ranks' parts are zeros here
            self._ranks.all_reduce(tensor, label="outer weights").wait()
        return {name: whole[one] for name, one in self._saved_as.items() if one in whole}

    def _held_by_some(self, held: Collection[str]) -> list[str]:
        """Return the wanted tensors of which some rank of the worker has outer weights."""
        names = list(dict.fromkeys(self._saved_as.values()))
        if not names:
            return []
        flags = torch.tensor([name in held for name in names], dtype=torch.uint8)
        flags = flags.to(self._device)
        self._ranks.all_reduce(flags, reduction="max", label="outer weights").wait()
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]


def write(shard: Shard, whole: Tensor) -> None:
    """Write a shard in its place of the whole tensor."""
    flat = shard.tensor.detach().reshape(-1)
    for box in boxes(shard.part):
        place = whole
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            place = place.narrow(dim, start, size)
        place.copy_(flat[box.start : box.start + place.numel()].view(box.sizes))
