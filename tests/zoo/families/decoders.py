"""Decoders of text."""

from typing import Any

from families.batches import PADDING, WORDS, text
from families.family import Family, hf

KIND = "decoders"

TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": PADDING,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
"""Two queries share a key."""

ENDS: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
OLDER: dict[str, Any] = {**ENDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
NEO: dict[str, Any] = {
    **ENDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
    "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32,
}  # fmt: skip
MPT = {"vocab_size": WORDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}
HEADS_OF_8 = {"head_dim": 8}


def _decoder(name: str, options: dict[str, Any], **more: Any) -> Family:
    return hf(KIND, name, text, **{**options, **more})


DECODERS = {
    "llama": _decoder("LlamaForCausalLM", GROUPED),
    "llama-tied": _decoder("LlamaForCausalLM", TEXT, tie_word_embeddings=True),
    "mistral": _decoder("MistralForCausalLM", GROUPED, sliding_window=4),
    "qwen2": _decoder("Qwen2ForCausalLM", GROUPED),
    "qwen3": _decoder("Qwen3ForCausalLM", GROUPED, **HEADS_OF_8),
    "phi": _decoder("PhiForCausalLM", TEXT),
    "phi3": _decoder("Phi3ForCausalLM", GROUPED),
    "gpt2": _decoder("GPT2LMHeadModel", OLDER),
    "gpt-neo": _decoder("GPTNeoForCausalLM", NEO),
    "gpt-neox": _decoder("GPTNeoXForCausalLM", TEXT),
    "gpt-j": _decoder("GPTJForCausalLM", OLDER, rotary_dim=4),
    "gpt-bigcode": _decoder("GPTBigCodeForCausalLM", OLDER),
    "codegen": _decoder("CodeGenForCausalLM", OLDER, rotary_dim=4),
    "opt": _decoder("OPTForCausalLM", TEXT, ffn_dim=48, word_embed_proj_dim=32),
    "opt-projected": _decoder("OPTForCausalLM", TEXT, ffn_dim=48, word_embed_proj_dim=16),
    "bloom": _decoder("BloomForCausalLM", TEXT, n_layer=2, n_head=4),
    "falcon": _decoder("FalconForCausalLM", TEXT),
    "falcon-new": _decoder(
        "FalconForCausalLM", TEXT, new_decoder_architecture=True, num_kv_heads=2, alibi=False
    ),
    "mpt": _decoder("MptForCausalLM", MPT),
    "gemma": _decoder("GemmaForCausalLM", GROUPED, **HEADS_OF_8),
    "gemma2": _decoder("Gemma2ForCausalLM", GROUPED, **HEADS_OF_8, sliding_window=4),
    "gemma3": _decoder("Gemma3ForCausalLM", GROUPED, **HEADS_OF_8, sliding_window=4),
    "cohere": _decoder("CohereForCausalLM", GROUPED),
    "cohere2": _decoder("Cohere2ForCausalLM", GROUPED, sliding_window=4),
    "stablelm": _decoder("StableLmForCausalLM", GROUPED),
    "olmo": _decoder("OlmoForCausalLM", GROUPED),
    "olmo2": _decoder("Olmo2ForCausalLM", GROUPED),
    "starcoder2": _decoder("Starcoder2ForCausalLM", GROUPED),
    "granite": _decoder("GraniteForCausalLM", GROUPED),
    "glm4": _decoder("Glm4ForCausalLM", GROUPED, **HEADS_OF_8),
    "smollm3": _decoder("SmolLM3ForCausalLM", GROUPED),
    "nemotron": _decoder("NemotronForCausalLM", GROUPED),
    "biogpt": _decoder("BioGptForCausalLM", TEXT),
}
