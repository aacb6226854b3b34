"""Models of peft in a pipeline: their own generate, which calls the model inside, works."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.build import AdaptedModel
from huggingface_models import llama
from stacks import Parts

# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def adapted_llama():
    torch.manual_seed(0)
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    return get_peft_model(llama(), LoraConfig(**options, task_type="CAUSAL_LM"))


def generated(model, words):
    with torch.no_grad():
        return model.generate(
            input_ids=words,
            attention_mask=torch.ones_like(words),
            max_new_tokens=2,
            do_sample=False,
            use_cache=False,  # blocks of other stages cannot fill a cache of the caller
        )


@pytest.mark.ranks(2)  # it imports peft and transformers
def test_generate_of_an_adapted_model_goes_through_the_pipeline():
    words = torch.arange(1, 9).view(2, 4)
    expected = generated(adapted_llama().eval(), words)
    accelerator = Accelerator(cpu=True, strategy={"name": "megatron", "pp": 2})
    model = accelerator.prepare(adapted_llama())
    with accelerator.inference(model) as whole:
        assert torch.equal(generated(whole, words), expected)
        inside = whole.base_model.model(words, use_cache=False).logits
        assert torch.equal(inside, whole(words, use_cache=False).logits)


def whole_with(prompts):
    inside = nn.Linear(2, 2)
    return Parts(
        lambda m, x: m.inside(x) + 1,
        inside=inside,
        active_peft_config=SimpleNamespace(is_prompt_learning=prompts),
        get_base_model=lambda: inside,
    )


def test_a_call_of_the_model_inside_is_one_of_the_whole_unless_it_has_learned_prompts():
    for prompts in (False, True):
        model, x = whole_with(prompts), torch.ones(1, 2)
        own, whole = model.inside(x), model(x)
        adapted = AdaptedModel(model)
        adapted.redirect()
        assert torch.equal(model(x), whole)
        if prompts:
            with pytest.raises(UsageError, match="with learned prompts the two differ"):
                model.inside(x)
        else:
            assert torch.equal(model.inside(x), whole)
        adapted.close()
        assert torch.equal(model.inside(x), own)
        assert torch.equal(model(x), whole)
