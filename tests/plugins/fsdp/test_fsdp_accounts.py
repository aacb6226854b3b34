"""Bytes sent and held under fsdp: ledger, kernel and live tensors against ``cost()`` and formulas.

The conformance suite compares them for its awkward models and default options, where few units are
freed. Here small language models are cut into many units, under every option that changes when
these are gathered; nothing may grow.
"""

import gc
import importlib.util
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec

SMALL = {"name": "fsdp", "unit_from": 100}
HYBRID = {**SMALL, "sharding": "hybrid", "shard_size": 2}
MASTERS = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}
RECOMPUTED = {"config": {"recompute": {"mode": "full"}}}
TINY = Namespace(dim=16, heads=2, layers=3, seq=9, vocab=53)


# --- models ---


def gpt(options=TINY):
    """Return the model of the benchmark: a table of positions that its own forward reads."""
    path = Path(__file__).parents[3] / "benchmarks" / "ddp_step.py"
    spec = importlib.util.spec_from_file_location("ddp_step", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Gpt(options)


def tied():
    model = gpt()
    model.head.weight = model.token.weight
    return model


def hugging_face(name, **options):
    import huggingface_models

    return getattr(huggingface_models, name)(**options).float()


def frozen_embedding():
    model = gpt()
    model.token.requires_grad_(False)
    model.position.requires_grad_(False)
    return model


def frozen_start():
    """Freeze all that comes before the last block: nothing there is read in backward."""
    model = frozen_embedding()
    model.blocks[:-1].requires_grad_(False)
    return model


class LowRank(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def low_rank():
    """Train corrections of the blocks' projections alone."""
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        block.qkv = LowRank(block.qkv)
    return model


MODELS = {
    "untied": gpt,
    "tied": tied,
    "gpt2": lambda: hugging_face("gpt2"),
    "llama": lambda: hugging_face("llama"),
    "frozen embedding": frozen_embedding,
    "frozen start": frozen_start,
    "low rank": low_rank,
}


def forward(model, tokens):
    outputs = model(tokens)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


# --- training ---


class Run:
    """A model under a strategy, with AdamW."""

    def __init__(self, strategy, build=gpt, **options):
        self.before = live_bytes()
        self.accelerator = Accelerator(strategy=strategy, cpu=True, **options)
        self.window = self.accelerator.gradient_accumulation_steps
        self.described = build()
        self.elements = sum(p.numel() for p in self.described.parameters())
        torch.manual_seed(0)
        built = build()
        trained = [p for p in built.parameters() if p.requires_grad]
        self.model, self.optimizer = self.accelerator.prepare(
            built, torch.optim.AdamW(trained, lr=1e-3)
        )
        self.strategy = self.accelerator.strategy_of(self.model)
        self.tokens = torch.randint(50, (2, 8))

    def step(self, *, zero_grad=True):
        for _ in range(self.window):
            with self.accelerator.accumulate(self.model):
                loss = forward(self.model, self.tokens).float().square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                if zero_grad:
                    self.optimizer.zero_grad()

    @property
    def cost(self):
        spec = ModelSpec.of(self.described, states=2)
        return type(self.strategy).cost(self.strategy.config, spec, self.strategy.run)

    def sent_in(self, steps):
        """Return the ledger's bytes of some steps by (axis, operation)."""
        before = self.accelerator.traffic.sent()
        for _ in range(steps):
            self.step()
        after = self.accelerator.traffic.sent()
        growth = {key: count - before.get(key, 0) for key, count in after.items()}
        return {key: count for key, count in growth.items() if count}

    @property
    def units(self):
        return self.strategy.placement.units

    def close(self):
        self.accelerator.free_memory()

    def held(self):
        """Return the bytes of live tensors by kind."""
        parameters = list(self.model.parameters())
        flats = [flat for unit in self.units for flat in unit.flats]
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        fragments = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [*self.strategy.gradients(), *(p.grad for p in parameters)]
        shards = [flat.shard.tensor for flat in flats]
        return {
            "parameters": storage_bytes([*parameters, *fragments, *shards]),
            "gradients": storage_bytes(gradients),
            "optimizer": storage_bytes(states),
        }


def storage_bytes(tensors):
    """Return the bytes of the storages behind tensors, shared ones once."""
    storages = {}
    for tensor in tensors:
        if issubclass(type(tensor), Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            with suppress(RuntimeError):  # of another test: a tensor that has facts and no memory
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def live_bytes():
    """Return the bytes of all tensors that Python can reach."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return storage_bytes([*tensors, *(t.grad for t in tensors if t.is_leaf)])


# --- the ledger and the promise ---


def check_ledger(pairs, **options):
    """Train each model of {(title of options): models}; compare ``cost()`` and ledger exactly."""
    wrong = []
    for title, models in pairs.items():
        for name in models:
            run = Run({**SMALL, **STRATEGIES[title]}, MODELS[name], **options)
            run.sent_in(1)  # finds out in which order units are used
            found, promised = run.sent_in(1), run.cost.sent
            if found != promised:
                wrong.append(f"{title}, {name}: cost() promised {promised}, the ledger has {found}")
            run.close()
    assert not wrong, "\n".join(wrong)


STRATEGIES = {
    "full": {},
    "one live": {"live_units": 1},
    "three live": {"live_units": 3},
    "kept": {"reshard_after_forward": False},
    "neighbors": {"reshard_after_forward": 2},
    "grad": {"sharding": "grad"},
    "hybrid": HYBRID,
    "local": {"accumulate": "local"},
    "hybrid local": {**HYBRID, "accumulate": "local"},
}


@pytest.mark.ranks(2)
def test_ledger_of_models_and_options():
    """What is read in backward, when units are freed, how many are live, dtypes, and windows."""
    check_ledger({"full": MODELS, "kept": ["tied"], "grad": ["untied", "low rank"]})
    check_ledger({"one live": ["tied", "low rank"], "three live": ["tied"]})
    check_ledger({"full": ["tied", "frozen start"]}, **RECOMPUTED)
    check_ledger({"full": ["low rank"], "grad": ["tied"]}, **MASTERS)
    check_ledger({"local": ["untied"], "grad": ["tied"]}, gradient_accumulation_steps=3)


@pytest.mark.ranks(4)
def test_ledger_of_groups():
    """Groups of neighbors between forward and backward, and replicas, in windows too."""
    check_ledger({"neighbors": ["tied"], "hybrid": ["tied", "frozen embedding"]})
    check_ledger(
        {"neighbors": ["untied"], "hybrid": ["untied"], "hybrid local": ["tied"]},
        gradient_accumulation_steps=2,
    )
    check_ledger({"hybrid": ["untied"]}, **MASTERS)


# --- the formulas ---


# --- memory ---
