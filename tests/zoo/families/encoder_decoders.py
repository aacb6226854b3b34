"""Encoders and decoders of text in one model."""

from typing import Any

from families.batches import WORDS, translated_text
from families.family import Family, hf

KIND = "encoder-decoders"

ENDS: dict[str, Any] = {
    "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BOTH_HALVES: dict[str, Any] = {**ENDS, "d_model": 32, "max_position_embeddings": 32}
BOTH_HALVES |= {f"{half}_{key}": n for half in ("encoder", "decoder") for key, n in HALF.items()}
T5: dict[str, Any] = {
    **ENDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4
}  # fmt: skip


def _half(name: str, options: dict[str, Any], **more: Any) -> Family:
    return hf(KIND, name, translated_text, **{**options, **more})


ENCODER_DECODERS = {
    "t5": _half("T5ForConditionalGeneration", T5),
    "flan-t5": _half(
        "T5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "umt5": _half("UMT5ForConditionalGeneration", T5),
    "bart": _half("BartForConditionalGeneration", BOTH_HALVES),
    "mbart": _half("MBartForConditionalGeneration", BOTH_HALVES, scale_embedding=True),
    "pegasus": _half("PegasusForConditionalGeneration", BOTH_HALVES),
    "marian": _half("MarianMTModel", BOTH_HALVES),
    "m2m-100": _half("M2M100ForConditionalGeneration", BOTH_HALVES),
    "blenderbot": _half("BlenderbotForConditionalGeneration", BOTH_HALVES),
}
