"""State-space models, and others that carry a state along the text."""

from functools import partial
from typing import Any

from families.batches import WORDS, text
from families.decoders import GROUPED
from families.family import hf

KIND = "state-space"

SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
STATES: dict[str, Any] = {**SIZES, "state_size": 8, "pad_token_id": 0}
HEADS: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
CONVOLVED = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
GATED = {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 4}
MIXED: dict[str, Any] = {
    "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_d_state": 8, "mamba_chunk_size": 4,
}  # fmt: skip

_family = partial(hf, KIND, batch=text)

RECURRENT = {
    "mamba": _family("MambaForCausalLM", **STATES),
    "falcon-mamba": _family("FalconMambaForCausalLM", **STATES),
    "mamba2": _family("Mamba2ForCausalLM", **STATES, **HEADS),
    "rwkv": _family("RwkvForCausalLM", **SIZES, context_length=32),
    "lfm2": _family("Lfm2ForCausalLM", **{**GROUPED, **CONVOLVED}),
    "recurrent-gemma": _family("RecurrentGemmaForCausalLM", **{**GROUPED, **GATED}),
    "bamba": _family("BambaForCausalLM", **GROUPED, **MIXED),
}
