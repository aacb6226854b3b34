"""Embeddings cut over ranks by words (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

A rank looks its own words up and gives zeros for the words of others, so that the sum over ranks
has every word once. The cut may be uneven, and a rank may have no word.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drivetrain.errors import ConfigError
from drivetrain_megatron.tensor.behavior import Behavior, attach, original_class
from drivetrain_megatron.tensor.operators import Edges, is_outline
from drivetrain_megatron.tensor.partition import Partition, check_words


@dataclass(frozen=True)
class VocabularyEmbedding(Behavior):
    """An embedding with this rank's words, the rows of the weight."""

    edges: Edges
    words: Partition

    def forward(self, module: Any, words: Tensor) -> Tensor:
        """Return the features of words (...) as (..., features), or a shard of their sequence."""
        if is_outline(words, module.weight):
            return self.edges.leave(nn.functional.embedding(words, module.weight))
        check_words(words, self.words.size, "words")
        return self.edges.leave(self._own(module, words))

    def _own(self, module: Any, words: Tensor) -> Tensor:
        """Return the features of this rank's words, zeros for others."""
        weight: Tensor = module.weight
        rank = self.edges.ranks.rank
        if weight.shape[0] == 0:
            # A sum over no rows: zeros that still need a gradient, as on the other ranks.
            return weight.sum(0).expand(*words.shape, -1)
        local, elsewhere = self.words.here(words, rank)
        start, stop = self.words.range_of(rank)
        padding = module.padding_idx
        is_here = padding is not None and start <= padding < stop
        found = nn.functional.embedding(local, weight, padding - start if is_here else None)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def attach_vocabulary(module: nn.Module, edges: Edges, words: Partition) -> None:
    """Let an embedding with this rank's rows compute as such.

    Raises:
        ConfigError: the module is no embedding, or has an option that needs the whole weight.
    """
    words.range_of(edges.ranks.rank)
    if reason := reason_against(module):
        raise ConfigError(f"{reason}; leave it out of the plan, or make it without")
    attach(module, VocabularyEmbedding(edges, words))


def reason_against(module: nn.Module) -> str:
    """Return why a module cannot compute with a part of its rows; empty if it can."""
    kind = type(module)
    if (
        not isinstance(module, nn.Embedding)
        or original_class(module).forward is not nn.Embedding.forward
    ):
        return (
            f"expected an embedding that computes as nn.Embedding does, found {module!r} "
            f"({kind.__module__}.{kind.__qualname__})"
        )
    found = {
        "max_norm": module.max_norm is not None,  # changes rows in forward, by their whole norm
        "scale_grad_by_freq": module.scale_grad_by_freq,  # counts the words of others as word 0
        "sparse": module.sparse,  # a sparse gradient cannot be summed by our collectives
    }
    if options := [name for name, is_set in found.items() if is_set]:
        return (
            f"expected an embedding without {', '.join(options)}, which a rank cannot do with its "
            f"part of the weight, found {module!r}"
        )
    return ""
