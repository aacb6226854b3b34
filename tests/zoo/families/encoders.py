"""Encoders of text, each with the head of another task."""

from typing import Any

from families.batches import (
    answered_text,
    classified_text,
    marked_words,
    padded_text,
    sentence_pairs,
)
from families.decoders import TEXT
from families.family import hf

KIND = "encoders"
NARROW: dict[str, Any] = {**TEXT, "embedding_size": 16}

ENCODERS = {
    "bert": hf(KIND, "BertForMaskedLM", padded_text, **TEXT),
    "bert-pretraining": hf(KIND, "BertForPreTraining", sentence_pairs, **TEXT),
    "roberta": hf(
        KIND, "RobertaForTokenClassification", marked_words, **{**TEXT, "pad_token_id": 1}
    ),
    "distilbert": hf(
        KIND,
        "DistilBertForQuestionAnswering",
        answered_text,
        vocab_size=TEXT["vocab_size"],
        dim=32,
        hidden_dim=48,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=32,
    ),
    "albert": hf(KIND, "AlbertForMaskedLM", padded_text, **NARROW),
    "electra": hf(KIND, "ElectraForPreTraining", marked_words, **NARROW),
    "deberta-v2": hf(
        KIND,
        "DebertaV2ForSequenceClassification",
        classified_text,
        **TEXT,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
    ),
    "modernbert": hf(
        KIND, "ModernBertForMaskedLM", padded_text, **TEXT, cls_token_id=1, sep_token_id=2
    ),
    "xlnet": hf(
        KIND,
        "XLNetForSequenceClassification",
        classified_text,
        vocab_size=TEXT["vocab_size"],
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=48,
    ),
    "mpnet": hf(KIND, "MPNetForMaskedLM", padded_text, **TEXT),
    "fnet": hf(KIND, "FNetForMaskedLM", marked_words, **TEXT),
    "convbert": hf(
        KIND, "ConvBertForMaskedLM", padded_text, **{**TEXT, "embedding_size": 32}, head_ratio=2
    ),
    "rembert": hf(
        KIND,
        "RemBertForMaskedLM",
        padded_text,
        **TEXT,
        input_embedding_size=16,
        output_embedding_size=24,
    ),
    "squeezebert": hf(
        KIND, "SqueezeBertForMaskedLM", padded_text, **{**TEXT, "embedding_size": 32}
    ),
    "esm": hf(
        KIND,
        "EsmForMaskedLM",
        padded_text,
        **TEXT,
        position_embedding_type="rotary",
        mask_token_id=5,
    ),
}
