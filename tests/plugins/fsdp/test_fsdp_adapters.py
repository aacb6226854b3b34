"""LoRA by ``peft``: frozen shards are gathered and cost nothing else; adapters train as alone."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file

from drivetrain import Accelerator, communication
from huggingface_models import gpt2, llama, logits_of, token_batch

# peft asks transformers for an attribute by its old name.
OLD_NAME = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
pytestmark = pytest.mark.filterwarnings(OLD_NAME)

EXACT = {"rtol": 1e-10, "atol": 1e-12}
STEPS, RANK = 3, 4

FSDP = {"name": "fsdp", "unit_from": 1}
STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero2": {"name": "zero2", "bucket_mib": 0.001},
    "zero3": {"name": "zero3", "keep_below": 0},
    "fsdp": FSDP,
    "fsdp-grad": {"name": "fsdp", "sharding": "grad"},
    "fsdp-local": {**FSDP, "accumulate": "local"},
}


def adapted(base, **options):
    """Return a model with adapters at its attention; their second factors are no zeros."""
    torch.manual_seed(3)
    targets = ["q_proj", "v_proj"] if base is llama else ["c_attn"]
    config = LoraConfig(
        r=RANK, lora_alpha=8, target_modules=targets, fan_in_fan_out=base is gpt2, **options
    )
    model = get_peft_model(base(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.double()


def loss_of(model, ids):
    return F.cross_entropy(logits_of(model(input_ids=ids)).flatten(0, 1), ids.flatten())


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


class Run:
    """A model under a strategy, and its twin in one process."""

    def __init__(self, strategy, model, **options):
        self.accelerator = Accelerator(strategy=copy.deepcopy(strategy), cpu=True, **options)
        self.twin = copy.deepcopy(model)
        self.other = optimizer_of(self.twin)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer_of(model))

    def step(self, number, tolerance=None):
        axis = self.accelerator.mesh["dp"]
        loss = loss_of(self.model, token_batch(10 * number + axis.rank))
        self.accelerator.backward(loss)
        losses = [loss_of(self.twin, token_batch(10 * number + r)) for r in range(axis.size)]
        (sum(losses) / axis.size).backward()
        torch.testing.assert_close(loss, losses[axis.rank], **(tolerance or EXACT))
        for optimizer in (self.optimizer, self.other):
            optimizer.step()
            optimizer.zero_grad()

    def check(self, tolerance=None):
        found = self.accelerator.get_state_dict(self.model)
        expected = self.twin.state_dict()
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, **(tolerance or EXACT), msg=lambda m, name=name: f"{name} {m}"
            )

    @property
    def units(self):
        return self.accelerator.strategy_of(self.model).placement.units

    def sent(self, operation):
        entry = self.accelerator.traffic.entries().get(("dp", operation))
        return (entry.calls, entry.bytes) if entry else (0, 0)

    def close(self):
        self.accelerator.free_memory()


@pytest.mark.parametrize("strategy", list(STRATEGIES.values()), ids=list(STRATEGIES))
@pytest.mark.parametrize("base", [llama, gpt2])
@pytest.mark.ranks(2)
def test_trains_as_in_one_process(strategy, base):
    run = Run(strategy, adapted(base))
    for number in range(STEPS):
        run.step(number)
    run.check()
    run.close()


@pytest.mark.ranks(2)
def test_frozen_shards_cost_their_gathers_alone():
    """No byte of them is reduced or kept as a gradient or state; one all-gather brings a unit."""
    run = Run(FSDP, adapted(llama))
    run.step(0)
    run.step(1)
    gathers, (reductions, reduced) = run.sent("all_gather")[0], run.sent("reduce_scatter")
    run.step(2)
    trained = [p for p in run.model.parameters() if p.requires_grad]
    elements = sum(p.numel() for p in trained)
    blocks = [unit for unit in run.units if ".layers." in unit.layout.key]
    assert [unit for unit in run.units if unit.layout.trainable] == blocks
    # Backward begins with the last two units, the norm and the head, and reads both blocks again.
    assert run.sent("all_gather")[0] - gathers == len(run.units) + len(blocks)
    now = run.sent("reduce_scatter")
    assert now[0] - reductions == len(blocks)
    assert now[1] - reduced == elements * 8 // 2

    strategy = run.accelerator.strategy_of(run.model)
    assert strategy.reduce.buffers.nbytes == 2 * elements * 8 // len(blocks)
    held = [p for group in run.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in held) == elements // 2
    states = [v for state in run.optimizer.state.values() for v in state.values() if v.dim()]
    assert sum(v.numel() for v in states) == 2 * elements // 2
    for slot in strategy.placement:
        assert slot.parameter.requires_grad or strategy.placement.fragment_of(slot) is None
    run.close()


@pytest.mark.ranks(2)
def test_gradients_in_memory_are_those_of_adapters():
    """While backward runs no gradient of a frozen parameter exists, whole or in part."""
    run = Run(FSDP, adapted(llama))
    run.step(0)
    seen = []

    def count(parameter):
        seen.append(sum(p.grad.nbytes for p in run.model.parameters() if p.grad is not None))

    trained = [p for p in run.model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(count)
    run.step(1)
    assert len(seen) == len(trained)
    assert max(seen) <= max(p.nbytes for p in trained)
    run.close()


@pytest.mark.ranks(2)
def test_adapters_alone_are_saved(tmp_path):
    """By save_model, and by peft itself where parameters are gathered; a plain model takes both."""
    folder = Path(communication.broadcast_object_list([str(tmp_path)])[0])
    run = Run(FSDP, adapted(llama))
    run.step(0)
    run.accelerator.save_model(run.model, folder, only_trainable=True)
    with run.accelerator.gathered(run.model):
        by_peft = {k: v.clone() for k, v in get_peft_model_state_dict(run.model).items()}
    expected = {n: p for n, p in run.twin.named_parameters() if p.requires_grad}
    saved = load_file(folder / "model.safetensors")
    assert set(saved) == set(expected)
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[name].detach(), **EXACT)
    plain = adapted(llama)
    set_peft_model_state_dict(plain, by_peft)
    for name, tensor in get_peft_model_state_dict(run.twin).items():
        torch.testing.assert_close(get_peft_model_state_dict(plain)[name], tensor, **EXACT)
    with run.accelerator.gathered(run.model):  # and back: every rank's shards follow
        set_peft_model_state_dict(run.model, {k: v * 2 for k, v in by_peft.items()})
    again = run.accelerator.get_state_dict(run.model)
    for name, tensor in expected.items():
        torch.testing.assert_close(again[name], 2 * tensor.detach(), **EXACT)
    run.close()


@pytest.mark.ranks(2)
def test_adapters_merged_into_shards():
    """peft writes into frozen weights; what rank 0 made of them is everybody's."""
    run = Run(FSDP, adapted(llama))
    run.step(0)
    ids = token_batch(7)
    with run.accelerator.gathered(run.model):
        run.model.merge_adapter()
    run.twin.merge_adapter()
    run.check()
    with torch.no_grad():
        found, expected = (logits_of(model(input_ids=ids)) for model in (run.model, run.twin))
    torch.testing.assert_close(found, expected, **EXACT)
    run.close()


@pytest.mark.parametrize("strategy", [FSDP, STRATEGIES["zero3"]], ids=["fsdp", "zero3"])
@pytest.mark.ranks(2)
def test_trained_copies_of_whole_modules(strategy):
    """modules_to_save: the head is trained beside a frozen original."""
    run = Run(strategy, adapted(llama, modules_to_save=["lm_head"]))
    for number in range(STEPS):
        run.step(number)
    run.check()
    run.close()


@pytest.mark.ranks(2)
def test_low_precision_base():
    """A frozen base in bf16 and adapters in fp32 come in one all-gather; both keep their dtype."""
    model = adapted(llama).float()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    run = Run(FSDP, model)
    close = {"rtol": 2e-2, "atol": 2e-3}
    with torch.autocast("cpu", torch.bfloat16):
        run.step(0, close)
        run.step(1, close)
        before = run.sent("all_gather")[0]
        run.step(2, close)
    assert run.sent("all_gather")[0] - before == len(run.units) + 2
    run.check(close)
    found = run.accelerator.get_state_dict(run.model)
    dtypes = {name: p.dtype for name, p in run.twin.named_parameters()}
    assert all(tensor.dtype is dtypes[name] for name, tensor in found.items() if name in dtypes)
    run.close()
