"""Models for workers whose ranks share a replica: tied, frozen, 0-d and uneven parameters, fp64."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, INNER, LENGTH, ROWS = 13, 8, 6, 6, 2


class WordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class TiedWords(nn.Module):
    """Blocks between an embedding and a head with its weights; positions are frozen."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(WordBlock() for _ in range(blocks))
        self.last = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.double()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"ids": word_batch(0, 0)}

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.last(hidden) * self.scale)


def word_batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=generator)


def word_loss(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, WORDS), ids.roll(-1, 1).reshape(-1))


def loss_by_hand(model: nn.Module, ids: Tensor) -> Tensor:
    return word_loss(model(ids), ids)


def word_fragment(name: str, fragments: int = 2) -> int:
    """Return the fragment of a parameter of ``TiedWords``."""
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) % fragments
    return 0 if first in ("words", "positions", "scale") else fragments - 1
