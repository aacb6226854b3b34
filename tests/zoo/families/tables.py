"""Models of tables, graphs and pairs in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import ROWS, Batch, integers, numbers, plain

KIND = "tables"
FEATURES, WIDTH, OUT = 7, 16, 3
ITEMS = (23, 11)
"""Rows of each embedding table."""

NODES = 6


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, OUT),
    )


def _rows(seed: int) -> Batch:
    return {"inputs": numbers(seed, FEATURES), "targets": numbers(seed + 500, OUT)}


def _squared(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["inputs"]), batch["targets"])


class Recommender(nn.Module):
    """Bags of items and numbers, each with all others multiplied, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(items, WIDTH) for items in ITEMS)
        self.below = nn.Linear(FEATURES, WIDTH)
        self.above = nn.Sequential(nn.Linear(WIDTH + 3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, inputs: Tensor, items: Tensor) -> Tensor:
        """Return one number per row; items have shape (rows, tables, items of a bag)."""
        found = [self.below(inputs).relu()]
        found += [bag(items[:, table] % ITEMS[table]) for table, bag in enumerate(self.bags)]
        stacked = torch.stack(found, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        left, right = torch.triu_indices(3, 3, 1)
        pairs = products[:, left, right]
        result: Tensor = self.above(torch.cat([found[0], pairs], dim=1))
        return result.squeeze(1)


def _choices(seed: int) -> Batch:
    return {
        "inputs": numbers(seed, FEATURES),
        "items": integers(seed, 0, 100, 2, 3),
        "clicks": integers(seed, 0, 2).double(),
    }


def _clicked(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["inputs"], batch["items"])
    return F.binary_cross_entropy_with_logits(found, batch["clicks"])


class GraphNet(nn.Module):
    """Sends messages along edges: gathers by node, adds up by node."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, WIDTH)
        self.messages = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return (rows, OUT), the mean over nodes; edges have shape (rows, 2, edges)."""
        x = self.into(nodes)
        start, end = (edges[:, side, :, None].expand(-1, -1, WIDTH) for side in (0, 1))
        for layer in self.messages:
            along = torch.cat([x.gather(1, start), x.gather(1, end)], dim=-1)
            x = x + torch.zeros_like(x).scatter_add(1, end, layer(along).tanh())
        result: Tensor = self.out(x).mean(1)
        return result


def _graphs(seed: int) -> Batch:
    return {
        "nodes": numbers(seed, NODES, FEATURES),
        "edges": integers(seed, 0, NODES, 2, 9),
        "targets": numbers(seed + 500, OUT),
    }


def _graph_error(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["nodes"], batch["edges"]), batch["targets"])


class TwoTowers(nn.Module):
    """Two perceptrons into one space."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _perceptron(), _perceptron()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the similarity of every left row with every right row, shape (rows, rows)."""
        both = [
            F.normalize(tower(x), dim=-1) for tower, x in ((self.left, left), (self.right, right))
        ]
        return both[0] @ both[1].t() * self.scale.exp()


def _pairs(seed: int) -> Batch:
    return {"left": numbers(seed, FEATURES), "right": numbers(seed + 500, FEATURES)}


def _told_apart(model: nn.Module, batch: Batch) -> Tensor:
    found, right = model(batch["left"], batch["right"]), torch.arange(ROWS)
    return (F.cross_entropy(found, right) + F.cross_entropy(found.t(), right)) / 2


TABLES = {
    "perceptron": plain(KIND, _perceptron, _rows, _squared),
    "recommender": plain(KIND, Recommender, _choices, _clicked),
    "graph-net": plain(KIND, GraphNet, _graphs, _graph_error),
    "two-towers": plain(KIND, TwoTowers, _pairs, _told_apart),
}
