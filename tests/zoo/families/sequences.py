"""Models of text in plain torch: recurrent ones, torch's transformers, and blocks in odd places."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.batches import LENGTH, WORDS, words
from families.family import Batch, integers, plain
from stacks import Residual, Stack

KIND = "sequences"
WIDTH, HEADS, INNER = 32, 4, 48


def texts(seed: int) -> Batch:
    """Return words."""
    return {"words": words(seed)}


def continued(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of each word with the logits in its place."""
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["words"].flatten())


class Lstm(nn.Module):
    """Two recurrent layers between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (rows, length, words)."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return logits


class Translator(nn.Module):
    """``nn.Transformer``, with both its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, INNER, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits, shape (rows, length, words)."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], dtype=self.head.weight.dtype
        )
        found = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
        logits: Tensor = self.head(found)
        return logits


def _both_texts(seed: int) -> Batch:
    return {"source": words(seed), "target": words(seed + 500, 6)}


def _translated(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["source"], batch["target"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["target"][:, 1:].flatten())


class SequenceFirst(nn.Module):
    """``nn.TransformerEncoder`` in torch's default layout: words by rows."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (length, rows, words)."""
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def _columns(seed: int) -> Batch:
    return {"words": words(seed).t().contiguous()}


class Decoder(Stack):
    """Embedding, blocks and head."""

    def __init__(self, layers: int = 2, block: Callable[..., nn.Module] = Residual) -> None:
        kinds = {"act": nn.GELU, "norm": nn.LayerNorm}
        first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        blocks = (block(WIDTH, INNER, **kinds) for _ in range(layers))
        super().__init__(blocks, first=first, last=last)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def encode(self, tokens: Tensor) -> Tensor:
        """Return features, shape (rows, length, width)."""
        return self.body(self.first(tokens) + self.positions[: tokens.shape[1]])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (rows, length, words)."""
        return self.last(self.encode(tokens))


class Inner(Residual):
    """A block to which whoever calls it adds its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


class OuterResidual(Decoder):
    """The input of a block goes around it outside of the block."""

    def __init__(self) -> None:
        super().__init__(block=Inner)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class TiedByUse(Decoder):
    """The head is a product with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.encode(tokens), self.first.weight) / WIDTH


def _shared() -> nn.Module:
    """Return a stack whose blocks share one layer."""
    model = Decoder(3)
    for block in model.blocks[1:]:
        block.up = model.blocks[0].up
    return model


class Supervised(Decoder):
    """A head after every block; the loss counts all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS, bias=False) for _ in range(1))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(tokens)
        early = None
        for block in self.blocks:
            x = block(x)
            early = self.heads[0](x) if early is None else early
        return self.last(x), early


def _supervised(model: nn.Module, batch: Batch) -> Tensor:
    targets = batch["words"].flatten()
    last, early = model(batch["words"])
    return F.cross_entropy(last.flatten(0, 1), targets) + 0.5 * F.cross_entropy(
        early.flatten(0, 1), targets
    )


def _frozen() -> nn.Module:
    model = Decoder(3)
    for part in (model.first, model.blocks[0]):
        part.requires_grad_(False)
    return model


class Unused(Decoder):
    """Some parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__(3)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].extra = nn.Linear(WIDTH, 3)


class ClampedBlock(Residual):
    """Bounds its own weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamped(Decoder):
    """Bounds weights in forward: those of a block from outside, and inside of the block."""

    def __init__(self) -> None:
        super().__init__(block=ClampedBlock)

    def encode(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks:
                block.up.weight.clamp_(-0.1, 0.1)
        return super().encode(tokens)


def _padded(seed: int) -> Batch:
    found = words(seed)
    for row in range(len(found)):
        found[row, LENGTH - row :] = 0
    return {"words": found}


def _without_padding(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["words"])
    return F.cross_entropy(logits.flatten(0, 1), batch["words"].flatten(), ignore_index=0)


def _weighted(model: nn.Module, batch: Batch) -> Tensor:
    weight = torch.linspace(0.2, 2.0, WORDS, dtype=torch.float64)
    return F.cross_entropy(
        model(batch["words"]).flatten(0, 1), batch["words"].flatten(), weight=weight
    )


def _masked_mean(model: nn.Module, batch: Batch) -> Tensor:
    mask = (batch["words"] != 0).double()
    errors = (model(batch["words"]) - batch["words"][..., None] / WORDS).square().mean(-1)
    return (errors * mask).sum() / mask.sum()


def _methods(model: nn.Module, batch: Batch) -> Tensor:
    logits = model.last(model.encode(batch["words"]))
    return F.cross_entropy(logits.flatten(0, 1), batch["words"].flatten())


class Chosen(Decoder):
    """Blocks in an order that each batch names: the flow depends on values."""

    def forward(self, tokens: Tensor, skip: Tensor) -> Tensor:
        x = self.first(tokens)
        for index, block in enumerate(self.blocks):
            if index != int(skip.max()):
                x = block(x)
        return self.last(x)


def _skipping(seed: int) -> Batch:
    return {"words": words(seed), "skip": integers(seed, 0, 2)}


def _chosen(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["words"], batch["skip"])
    return F.cross_entropy(logits.flatten(0, 1), batch["words"].flatten())


SEQUENCES = {
    "lstm": plain(KIND, Lstm, texts, continued),
    "nn-transformer": plain(KIND, Translator, _both_texts, _translated),
    "sequence-first": plain(KIND, SequenceFirst, _columns, continued, dim=1),
    "own-decoder": plain(KIND, Decoder, texts, continued),
    "own-method": plain(KIND, Decoder, texts, _methods),
    "outer-residual": plain(KIND, OuterResidual, texts, continued),
    "tied-by-use": plain(KIND, TiedByUse, texts, continued),
    "shared-sublayer": plain(KIND, _shared, texts, continued),
    "deep-supervision": plain(KIND, Supervised, texts, _supervised),
    "frozen-parts": plain(KIND, _frozen, texts, continued),
    "clamped-weights": plain(KIND, Clamped, texts, continued),
    "unused-parts": plain(KIND, Unused, texts, continued),
    "skipped-blocks": plain(KIND, Chosen, _skipping, _chosen),
    "loss-ignored-class": plain(KIND, Decoder, _padded, _without_padding),
    "loss-class-weights": plain(KIND, Decoder, texts, _weighted),
    "loss-masked-mean": plain(KIND, Decoder, _padded, _masked_mean),
}
