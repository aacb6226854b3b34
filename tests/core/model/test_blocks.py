"""Repeated blocks are found wherever they stand."""

import torch
from torch import nn

from drivetrain.model.modules import repeated_blocks
from stacks import Parts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))


def raw():
    return Parts(weight=nn.Parameter(torch.ones(2)))


def names(model):
    return [name for name, _ in repeated_blocks(model)]


def test_lists_at_any_depth_and_nothing_inside_of_blocks():
    decoder = nn.Sequential(nn.Linear(2, 2), Block(), nn.Linear(2, 2), Block(), raw())
    layers = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    model = nn.ModuleDict({"encoder": layers, "decoder": decoder})
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.1", "decoder.3"]
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]
    pairs = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))
    assert names(pairs) == ["0", "1"]


def test_single_layers_are_no_blocks_and_a_shared_or_compiled_block_comes_once():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())) == []
    assert names(nn.ModuleList([Block(), raw()])) == ["0.experts.0", "0.experts.1"]
    assert names(nn.ModuleList([raw(), raw()])) == ["0", "1"]
    assert names(nn.ModuleList([nn.Module(), nn.Module()])) == []
    shared = raw()
    assert names(nn.ModuleList([shared, shared, raw()])) == ["0", "2"]
    model = nn.ModuleList([raw(), torch.compile(raw(), backend="eager"), nn.Module()])
    assert names(torch.compile(model, backend="eager")) == ["0", "1"]
