"""Mixtures of experts."""

from typing import Any

from families.batches import text, translated_text
from families.decoders import GROUPED
from families.encoder_decoders import T5
from families.family import Family, hf

KIND = "mixtures of experts"

LOCAL: dict[str, Any] = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **GROUPED, "num_key_value_heads": 4, "num_hidden_layers": 3, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    **ROUTED, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
    "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}  # fmt: skip
SWITCH: dict[str, Any] = {
    **T5, "num_experts": 4, "expert_capacity": 64, "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0,
}  # fmt: skip


def _mixture(name: str, options: dict[str, Any], batch: Any = text, **more: Any) -> Family:
    # Grouped products have no kernel for fp64.
    more = {"experts_implementation": "eager", **more}
    return hf(KIND, name, batch, **{**options, **more})


EXPERTS = {
    "mixtral": _mixture("MixtralForCausalLM", LOCAL),
    "mixtral-batched": _mixture("MixtralForCausalLM", LOCAL, experts_implementation="batched_mm"),
    "mixtral-auxiliary": _mixture("MixtralForCausalLM", LOCAL, output_router_logits=True),
    "qwen2-moe": _mixture("Qwen2MoeForCausalLM", ROUTED, shared_expert_intermediate_size=16),
    "qwen3-moe": _mixture("Qwen3MoeForCausalLM", ROUTED, head_dim=8),
    "deepseek-v2": _mixture("DeepseekV2ForCausalLM", DEEPSEEK),
    "deepseek-v3": _mixture("DeepseekV3ForCausalLM", DEEPSEEK),
    "gpt-oss": _mixture("GptOssForCausalLM", LOCAL, head_dim=8, sliding_window=4),
    "olmoe": _mixture("OlmoeForCausalLM", ROUTED),
    "phimoe": _mixture("PhimoeForCausalLM", LOCAL),
    "granite-moe": _mixture("GraniteMoeForCausalLM", LOCAL),
    "jamba": _mixture("JambaForCausalLM", JAMBA),
    "switch": _mixture("SwitchTransformersForConditionalGeneration", SWITCH, translated_text),
}
