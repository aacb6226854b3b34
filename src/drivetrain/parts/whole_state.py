"""A model's whole state, some tensors at a time, however its strategy divides them."""

from collections.abc import Hashable, Iterable, Iterator

from torch import Tensor, nn

from drivetrain.shards import Readable, TensorFacts

GATHERED_BYTES = 32 * 2**20
"""Parameters are gathered together while they fit into this: small ones share a collective."""


def whole_state_dict(owner: Readable, module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole state on every rank's CPU, by the user's names. Collective.

    Args:
        owner: reads whole tensors.
        module: as ``unwrap`` returns it.
    """
    facts = owner.state_facts(module)
    copies: dict[Hashable, Tensor] = {}
    for batch in in_batches({one.identity: one for one in facts}.values()):
        with owner.whole_state(module, [one.name for one in batch]) as state:
            for one in batch:
                copies[one.identity] = state[one.name].to("cpu", copy=True)
    return {one.name: copies[one.identity] for one in facts}


def in_batches(facts: Iterable[TensorFacts]) -> Iterator[list[TensorFacts]]:
    """Yield tensors in order, as many at a time as fit into ``GATHERED_BYTES``."""
    batch: list[TensorFacts] = []
    filled = 0
    for one in facts:
        if batch and filled + one.nbytes > GATHERED_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(one)
        filled += one.nbytes
    if batch:
        yield batch
