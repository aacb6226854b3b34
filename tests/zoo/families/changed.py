"""Models that a library or the script has changed: adapters, compiled, recomputed."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from families.batches import padded_text, text
from families.decoders import GROUPED, TEXT
from families.family import Family, plain, transformers_model
from families.sequences import Decoder, continued, texts
from stacks import Residual

KIND = "changed models"


def _adapted(**options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = transformers_model("LlamaForCausalLM", **GROUPED)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros hide the gradients of the other half
                parameter.normal_(std=0.02)
    return adapted


def _recomputed(reentrant: bool) -> nn.Module:
    model = transformers_model("LlamaForCausalLM", **GROUPED)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


class RecomputedBlock(Residual):
    """Computes its activations again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def _compiled() -> nn.Module:
    return torch.compile(transformers_model("LlamaForCausalLM", **GROUPED), backend="eager")


def _compiled_blocks() -> nn.Module:
    model = Decoder()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def _half_frozen() -> nn.Module:
    model = transformers_model("BertForMaskedLM", **TEXT)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    return model


CHANGED: dict[str, Family] = {
    "lora": plain(KIND, lambda: _adapted(target_modules=["q_proj", "v_proj"]), text),
    "lora-everywhere": plain(
        KIND, lambda: _adapted(target_modules="all-linear", modules_to_save=["lm_head"]), text
    ),
    "dora": plain(
        KIND, lambda: _adapted(target_modules=["q_proj", "down_proj"], use_dora=True), text
    ),
    "checkpointed": plain(KIND, lambda: _recomputed(False), text),
    "checkpointed-reentrant": plain(KIND, lambda: _recomputed(True), text),
    "own-checkpointed": plain(KIND, lambda: Decoder(block=RecomputedBlock), texts, continued),
    "compiled": plain(KIND, _compiled, text),
    "compiled-blocks": plain(KIND, _compiled_blocks, texts, continued),
    "bert-frozen-half": plain(KIND, _half_frozen, padded_text),
}
"""By name; each needs ``transformers`` or ``peft``, or is compiled or recomputed."""
