"""Encoders of text, each with the head of another task."""

from functools import partial
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

_padded = partial(hf, KIND, batch=padded_text)
_marked = partial(hf, KIND, batch=marked_words)
_classified = partial(hf, KIND, batch=classified_text)

DISTILLED = {"vocab_size": TEXT["vocab_size"], "max_position_embeddings": 32}
DISTILLED |= {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
PERMUTED = {"vocab_size": TEXT["vocab_size"], "d_model": 32, "d_inner": 48}
RELATIVE: dict[str, Any] = {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]
}  # fmt: skip

ENCODERS = {
    "bert": _padded("BertForMaskedLM", **TEXT),
    "bert-pretraining": hf(KIND, "BertForPreTraining", sentence_pairs, **TEXT),
    "roberta": _marked("RobertaForTokenClassification", **{**TEXT, "pad_token_id": 1}),
    "distilbert": hf(KIND, "DistilBertForQuestionAnswering", answered_text, **DISTILLED),
    "albert": _padded("AlbertForMaskedLM", **NARROW),
    "electra": _marked("ElectraForPreTraining", **NARROW),
    "deberta-v2": _classified("DebertaV2ForSequenceClassification", **TEXT, **RELATIVE),
    "modernbert": _padded("ModernBertForMaskedLM", **TEXT, cls_token_id=1, sep_token_id=2),
    "xlnet": _classified("XLNetForSequenceClassification", **PERMUTED, n_layer=2, n_head=4),
    "mpnet": _padded("MPNetForMaskedLM", **TEXT),
    "fnet": _marked("FNetForMaskedLM", **TEXT),
    "convbert": _padded("ConvBertForMaskedLM", **{**TEXT, "embedding_size": 32}, head_ratio=2),
    "rembert": _padded(
        "RemBertForMaskedLM", **TEXT, input_embedding_size=16, output_embedding_size=24
    ),
    "squeezebert": _padded("SqueezeBertForMaskedLM", **{**TEXT, "embedding_size": 32}),
    "esm": _padded("EsmForMaskedLM", **TEXT, position_embedding_type="rotary", mask_token_id=5),
}
