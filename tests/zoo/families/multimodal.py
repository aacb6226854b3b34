"""Models of images together with text."""

from typing import Any

import torch

from families.batches import IMAGE, LENGTH, WORDS, captioned_images, numbers, partly_ignored, words
from families.decoders import GROUPED, TEXT
from families.family import ROWS, Batch, hf, plain
from families.vision import ENCODER, PATCHES

KIND = "multimodal"

CLIP: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "max_position_embeddings": 16,
        "eos_token_id": WORDS - 1,
        "projection_dim": 16,
    },
    "vision_config": {**ENCODER, **PATCHES, "projection_dim": 16},
    "projection_dim": 16,
}
PICTURE = WORDS - 1
"""The word in whose place a patch of an image stands."""

PATCHES_OF_IMAGE = (IMAGE // PATCHES["patch_size"]) ** 2


def _illustrated_text(seed: int) -> Batch:
    picture = torch.full((ROWS, PATCHES_OF_IMAGE), PICTURE)
    found = torch.cat([picture, words(seed)], dim=1)
    labels = torch.cat([torch.full_like(picture, -100), partly_ignored(words(seed))], dim=1)
    return {
        "input_ids": found,
        "attention_mask": torch.ones_like(found),
        "pixel_values": numbers(seed, 3, IMAGE, IMAGE),
        "labels": labels,
    }


def _answered_images(seed: int) -> Batch:
    return {
        "input_ids": words(seed),
        "pixel_values": numbers(seed, 3, IMAGE, IMAGE),
        "labels": (words(seed)[:, :3] % 2).double(),
    }


def _described(seed: int) -> Batch:
    return {"pixel_values": numbers(seed, 3, IMAGE, IMAGE), "labels": words(seed, LENGTH)}


def _vision_encoder_decoder():
    import transformers

    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**ENCODER, **PATCHES, hidden_dropout_prob=0.0),
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        decoder_start_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.VisionEncoderDecoderModel(config)


MULTIMODAL = {
    "clip": hf(KIND, "CLIPModel", captioned_images, **CLIP),
    "siglip": hf(
        KIND,
        "SiglipModel",
        captioned_images,
        text_config={**TEXT, "max_position_embeddings": 16, "projection_size": 32},
        vision_config={**ENCODER, **PATCHES},
    ),
    "llava": hf(
        KIND,
        "LlavaForConditionalGeneration",
        _illustrated_text,
        text_config={"model_type": "llama", **GROUPED},
        vision_config={"model_type": "clip_vision_model", **ENCODER, **PATCHES},
        image_token_index=PICTURE,
        image_seq_length=PATCHES_OF_IMAGE,
    ),
    "paligemma": hf(
        KIND,
        "PaliGemmaForConditionalGeneration",
        _illustrated_text,
        text_config={"model_type": "gemma", **GROUPED, "head_dim": 8},
        vision_config={
            "model_type": "siglip_vision_model",
            **ENCODER,
            **PATCHES,
            "projection_dim": 32,
            "vision_use_head": False,
        },
        image_token_index=PICTURE,
        projection_dim=32,
        hidden_size=32,
    ),
    "vilt": hf(KIND, "ViltForQuestionAnswering", _answered_images, **TEXT, **PATCHES, num_labels=3),
    "vision-encoder-decoder": plain(KIND, _vision_encoder_decoder, _described),
}
