"""Models of images together with text."""

from functools import partial
from typing import Any

import torch

from families.batches import IMAGE, LENGTH, WORDS, captioned_images, numbers, partly_ignored, words
from families.decoders import GROUPED, TEXT
from families.family import ROWS, Batch, hf, plain
from families.vision import ENCODER, PATCHES

KIND = "multimodal"

PROJECTED = {"projection_dim": 16}
SHORT: dict[str, Any] = {**TEXT, "max_position_embeddings": 16}
CLIP: dict[str, Any] = {
    "text_config": {**SHORT, "eos_token_id": WORDS - 1, **PROJECTED},
    "vision_config": {**ENCODER, **PATCHES, **PROJECTED},
    **PROJECTED,
}
SIGLIP: dict[str, Any] = {
    "text_config": {**SHORT, "projection_size": 32}, "vision_config": {**ENCODER, **PATCHES}
}  # fmt: skip
LLAVA: dict[str, Any] = {
    "text_config": {"model_type": "llama", **GROUPED},
    "vision_config": {"model_type": "clip_vision_model", **ENCODER, **PATCHES},
}
SIGHTED = {"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False}
PALIGEMMA: dict[str, Any] = {
    "text_config": {"model_type": "gemma", **GROUPED, "head_dim": 8},
    "vision_config": {**ENCODER, **PATCHES, **SIGHTED},
    **{"projection_dim": 32, "hidden_size": 32},
}
PICTURE = WORDS - 1
"""The word in whose place a patch of an image stands."""

PATCHES_OF_IMAGE = (IMAGE // PATCHES["patch_size"]) ** 2
LLAVA |= {"image_token_index": PICTURE, "image_seq_length": PATCHES_OF_IMAGE}
PALIGEMMA |= {"image_token_index": PICTURE}


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


_family = partial(hf, KIND)

MULTIMODAL = {
    "clip": _family("CLIPModel", captioned_images, **CLIP),
    "siglip": _family("SiglipModel", captioned_images, **SIGLIP),
    "llava": _family("LlavaForConditionalGeneration", _illustrated_text, **LLAVA),
    "paligemma": _family("PaliGemmaForConditionalGeneration", _illustrated_text, **PALIGEMMA),
    "vilt": _family("ViltForQuestionAnswering", _answered_images, **TEXT, **PATCHES, num_labels=3),
    "vision-encoder-decoder": plain(KIND, _vision_encoder_decoder, _described),
}
