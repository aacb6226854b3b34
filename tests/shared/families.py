"""Tiny random models of families that take more than tokens, or embed them in their own way.

Each comes with a batch of four rows that gives a loss; in evaluation mode nothing is drawn. Needs
the extra ``huggingface``.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WORDS, WIDTH, HEADS, INNER, ROWS = 61, 32, 4, 48, 4

Batch = dict[str, Any]


class Family(NamedTuple):
    """A class of ``transformers``, the options of its configuration, and its batch."""

    model: str
    config: str
    options: Mapping[str, Any]
    batch: Callable[[], Batch]

    def build(self) -> nn.Module:
        """Return the model in fp64 and evaluation mode, with the same weights on every call."""
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return getattr(transformers, self.model)(config).double().eval()


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)


def _words() -> Tensor:
    return torch.randint(3, WORDS - 1, (ROWS, 8), generator=torch.Generator().manual_seed(0))


def _text() -> Batch:
    return {"input_ids": _words(), "labels": _words()}


def _marked_text() -> Batch:
    return {"input_ids": _words(), "labels": _words() % 2}


def _images() -> Batch:
    return {"pixel_values": _numbers(3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])}


def _large_images() -> Batch:
    return {"pixel_values": _numbers(3, 64, 64), "labels": torch.tensor([0, 1, 1, 0])}


def _pairs() -> Batch:
    return {"input_ids": _words(), "pixel_values": _numbers(3, 16, 16), "return_loss": True}


def _spectrograms() -> Batch:
    return {"input_features": _numbers(8, 32), "labels": _words()}


def _waves() -> Batch:
    return {"input_values": _numbers(4000), "labels": torch.tensor([0, 1, 1, 0])}


ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
IMAGES: dict[str, Any] = {"image_size": 16, "patch_size": 4}
BOTH_HALVES: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

FAMILIES = {
    "vit": Family("ViTForImageClassification", "ViTConfig", {**ENCODER, **IMAGES}, _images),
    "dinov2": Family(
        "Dinov2ForImageClassification", "Dinov2Config", {**ENCODER, **IMAGES}, _images
    ),
    "swin": Family(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "image_size": 16,
            "patch_size": 2,
            "window_size": 2,
        },
        _images,
    ),
    "convnext": Family(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]},
        _large_images,
    ),
    "segformer": Family(
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 24, 32],
            "num_attention_heads": [1, 2, 2, 4],
        },
        _large_images,
    ),
    "clip": Family(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {
                **ENCODER,
                "vocab_size": WORDS,
                "max_position_embeddings": 16,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": WORDS - 1,
                "projection_dim": 16,
            },
            "vision_config": {**ENCODER, **IMAGES, "projection_dim": 16},
            "projection_dim": 16,
        },
        _pairs,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **BOTH_HALVES,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
        },
        _spectrograms,
    ),
    "wav2vec2": Family(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            **ENCODER,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "classifier_proj_size": 16,
        },
        _waves,
    ),
    "pegasus": Family(
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        {**BOTH_HALVES, "max_position_embeddings": 16},
        _text,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {**BOTH_HALVES, "max_position_embeddings": 16},
        _text,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**ENCODER, "vocab_size": WORDS, "num_key_value_heads": 2, "head_dim": 8},
        _text,
    ),
    "electra": Family(
        "ElectraForPreTraining",
        "ElectraConfig",
        {
            **ENCODER,
            "vocab_size": WORDS,
            "embedding_size": 16,
            "max_position_embeddings": WIDTH,  # as many positions as features
        },
        _marked_text,
    ),
}
"""Families by name."""
