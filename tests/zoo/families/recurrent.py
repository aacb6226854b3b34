"""State-space models, and others that carry a state along the text."""

from typing import Any

from families.batches import WORDS, text
from families.decoders import GROUPED
from families.family import hf

KIND = "state-space"

STATES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}

RECURRENT = {
    "mamba": hf(KIND, "MambaForCausalLM", text, **STATES),
    "falcon-mamba": hf(KIND, "FalconMambaForCausalLM", text, **STATES),
    "mamba2": hf(KIND, "Mamba2ForCausalLM", text, **STATES, **HEADS),
    "rwkv": hf(
        KIND,
        "RwkvForCausalLM",
        text,
        vocab_size=WORDS,
        context_length=32,
        hidden_size=32,
        num_hidden_layers=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "lfm2": hf(
        KIND,
        "Lfm2ForCausalLM",
        text,
        **{**GROUPED, "num_hidden_layers": 4},
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    ),
    "recurrent-gemma": hf(
        KIND,
        "RecurrentGemmaForCausalLM",
        text,
        **{**GROUPED, "num_hidden_layers": 3},
        lru_width=32,
        attention_window_size=4,
    ),
    "bamba": hf(
        KIND,
        "BambaForCausalLM",
        text,
        **GROUPED,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=4,
    ),
}
