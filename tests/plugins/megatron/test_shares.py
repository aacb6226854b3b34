"""What stands under the name of a divided parameter; the ways of scripts are in ``tests/loops``."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from drivetrain import Accelerator
from drivetrain.errors import CollectiveError, UsageError
from huggingface_models import ARCHITECTURES, token_batch

pytestmark = pytest.mark.ranks(2)


def build(name):
    torch.manual_seed(0)
    return ARCHITECTURES[name](2)


def prepared(model, **options):
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2, **options}, cpu=True)
    model.example_inputs = {"input_ids": token_batch(0)}
    trained = [p for p in model.parameters() if p.requires_grad]
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))


def same(found, expected):
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_adapters_are_whole_and_merged():
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(build("llama-gqa"), config)
    one = copy.deepcopy(model)
    model = prepared(model)[1]
    same(get_peft_model_state_dict(model), get_peft_model_state_dict(one))
    for each in (model, one):
        each.merge_adapter()
    same(model.state_dict(), one.state_dict())
    ids = token_batch(1)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, one(ids).logits)
    for each in (model, one):
        each.unmerge_adapter()
    merged, expected = model.merge_and_unload(), one.merge_and_unload()
    same(merged.state_dict(), expected.state_dict())


def test_copies_pickles_and_values_after_the_end():
    one = build("gpt2").eval()
    accelerator, model, _ = prepared(build("gpt2").eval())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(token_batch(0)).logits, one(token_batch(0)).logits)
    same(twin.state_dict(), one.state_dict())
    with pytest.raises(UsageError, match="save state_dict"):
        pickle.dumps(model)
    weight = model.transformer.wte.weight
    detached = weight.detach()
    for refused in (
        lambda: weight.set_(detached.clone()),
        lambda: weight.resize_(weight.shape),
        weight.t_,
        detached.storage,
        lambda: torch.from_dlpack(detached),
    ):
        with pytest.raises(UsageError, match="memory"), torch.no_grad():
            refused()
    with pytest.raises(ValueError, match="read-only"):
        detached.numpy()[0] = 0.0
    accelerator.free_memory()
    assert weight.shape == one.transformer.wte.weight.shape
    with pytest.raises(UsageError, match="before"):
        weight.norm()


def test_a_penalty_counts_parameters_once_under_sequence_parallelism():
    one, model = build("llama-gqa"), build("llama-gqa")
    accelerator, model, optimizer = prepared(model, sequence_parallel=True)
    lone = torch.optim.SGD(one.parameters(), lr=0.1)
    ids = token_batch(0)
    for each, backward in ((model, accelerator.backward), (one, lambda loss: loss.backward())):
        loss = each(ids, labels=ids).loss
        backward(loss + 0.1 * sum(p.pow(2).sum() for p in each.parameters()))
    for each in (optimizer, lone):
        each.step()
    torch.testing.assert_close(model.state_dict(), one.state_dict(), rtol=1e-4, atol=1e-6)


def test_one_rank_alone_is_told():
    accelerator, model, _ = prepared(build("gpt2"))
    with pytest.raises(CollectiveError):
        if accelerator.is_main_process:
            model.state_dict()
        else:
            accelerator.wait_for_everyone()


def test_a_gathered_parameter_shows_its_whole_gradient():
    """A sharpness-aware move, as it must be written for strategies that divide parameters."""
    one, ids = build("gpt2"), token_batch(0)
    accelerator, model, _ = prepared(build("gpt2"))
    one(ids, labels=ids).loss.backward()
    accelerator.backward(model(ids, labels=ids).loss)
    weight, expected = (each.transformer.h[0].mlp.c_fc.weight for each in (model, one))
    with accelerator.gathered(model), torch.no_grad():
        torch.testing.assert_close(weight.grad.norm(), expected.grad.norm())
        weight.add_(weight.grad * 0.1)
        assert type(copy.deepcopy(weight)) is torch.nn.Parameter
        model.lm_head.weight.grad = None
    torch.testing.assert_close(weight.detach(), expected.detach() + expected.grad * 0.1)
    assert model.transformer.wte.weight.grad is None
