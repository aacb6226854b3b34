"""Models of words made of torch's own layers, and a model that makes its loss itself."""

from torch import nn
from torch.nn import functional as F

from huggingface_models import VOCABULARY, logits_of, token_batch


class PlainBlocks(nn.Module):
    """Residual blocks between an embedding and a head.

    Args:
        blocks: how many there are.
        width: of the hidden states.
        inner: of the layers inside of a block.

    Attributes:
        used: how many blocks run, the first ones; the gradients of the others are None.
    """

    def __init__(self, blocks=2, *, width=8, inner=6):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.used = blocks

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers[: self.used]:
            x = x + layer(x)
        return self.head(x)


class WithLoss(nn.Module):
    """A model that makes its loss itself, in fp64."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def dummy_inputs(self):
        return {"input_ids": token_batch(0)}

    def forward(self, input_ids):
        return {"loss": word_loss(self.model(input_ids), input_ids)}


def word_loss(output, ids):
    """Return the mean cross entropy of each word by its own logits."""
    logits = logits_of(output)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))
