"""Bytes sent under fsdp: the ledger against ``cost()``.

The conformance suite compares them for its awkward models and default options, where few units are
freed. Here small language models are cut into many units, under every option that changes when
these are gathered.
"""

from argparse import Namespace
from collections import Counter

import pytest
import torch
from side_by_side import Gpt
from torch import Tensor

from drivetrain.cost import ModelSpec
from huggingface_models import gpt2
from stacks import LowRank
from zero_stages import MASTERS, start

SMALL = {"name": "fsdp", "unit_from": 100}
HYBRID = {"sharding": "hybrid", "shard_size": 2}
RECOMPUTED = {"config": {"recompute": {"mode": "full"}}}
TINY = Namespace(dim=16, heads=2, layers=3, seq=9, vocab=53)


def gpt(*, tied=False, frozen=0):
    """Return the model of the benchmark: a table of positions that its own forward reads.

    Its embedding may be frozen, with the first blocks: nothing there is read in backward.
    """
    model = Gpt(TINY)
    if tied:
        model.head.weight = model.token.weight
    if frozen:
        for part in (model.token, model.position, model.blocks[: frozen - 1]):
            part.requires_grad_(False)
    return model


def low_rank():
    """Train corrections of the blocks' projections alone."""
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        block.qkv = LowRank(block.qkv, 2)
    return model


def tied_blocks():
    """Tie a layer of the last block to the first block's, which reads its values in backward."""
    model = gpt()
    model.blocks[-1].qkv.weight = model.blocks[0].qkv.weight
    return model


MODELS = {
    "untied": gpt,
    "tied": lambda: gpt(tied=True),
    "tied blocks": tied_blocks,
    "gpt2": lambda: gpt2().float(),
    "frozen embedding": lambda: gpt(frozen=1),
    "frozen start": lambda: gpt(frozen=3),
    "low rank": low_rank,
}
STRATEGIES = {
    "full": {},
    "one live": {"live_units": 1},
    "three live": {"live_units": 3},
    "all live": {"live_units": 9},
    "kept": {"reshard_after_forward": False},
    "neighbors": {"reshard_after_forward": 2},
    "grad": {"sharding": "grad"},
    "hybrid": HYBRID,
    "local": {"accumulate": "local"},
    "hybrid local": {**HYBRID, "accumulate": "local"},
}


def check_ledger(pairs, **options):
    """Train each model of {(title of options): models}; compare ``cost()`` and ledger exactly."""
    for title, name in ((title, name) for title, names in pairs.items() for name in names):
        accelerator = start({**SMALL, **STRATEGIES[title]}, **options)
        spec = ModelSpec.of(MODELS[name](), states=2)
        model = MODELS[name]()
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
        tokens = torch.randint(50, (2, 8))
        for _ in range(2):  # the first step finds out in which order units are used
            before = Counter(accelerator.traffic.sent())
            for _ in range(accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(model):
                    outputs = model(tokens)
                    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
                    accelerator.backward(logits.float().square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        strategy = accelerator.strategy_of(model)
        promised = type(strategy).cost(strategy.config, spec, strategy.run).sent
        assert Counter(accelerator.traffic.sent()) - before == promised, (title, name)


@pytest.mark.ranks(2)
def test_ledger_of_models_and_options():
    """What is read in backward, when units are freed, how many are live, dtypes, and windows."""
    check_ledger({"full": list(MODELS), "all live": ["tied blocks"]})
    check_ledger({"kept": ["tied", "tied blocks", "low rank", "frozen start"]})
    check_ledger({"grad": ["untied", "low rank"]})
    check_ledger({"one live": ["tied", "low rank"], "three live": ["tied"]})
    check_ledger({"full": ["tied", "frozen start"]}, **RECOMPUTED)
    check_ledger({"full": ["low rank"], "grad": ["tied"]}, **MASTERS)
    check_ledger({"local": ["untied"], "grad": ["tied"]}, gradient_accumulation_steps=3)


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_ledger_of_groups():
    """Groups of neighbors between forward and backward, and replicas, in windows too."""
    check_ledger({"neighbors": ["tied"], "hybrid": ["tied", "frozen embedding"]})
    windows = {"neighbors": ["untied"], "hybrid": ["untied"], "hybrid local": ["tied"]}
    check_ledger(windows, gradient_accumulation_steps=2)
    check_ledger({"hybrid": ["untied"]}, **MASTERS)
