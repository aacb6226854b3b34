"""Models of images."""

from functools import partial
from typing import Any

from families.batches import IMAGE, images, large_images, segmented_images
from families.family import hf

KIND = "vision"

ENCODER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48
}  # fmt: skip
PATCHES: dict[str, Any] = {"image_size": IMAGE, "patch_size": 4}
LEVELS: dict[str, Any] = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
OF_EQUAL_DEPTHS: dict[str, Any] = {**LEVELS, "depths": [1, 1, 1, 1]}
SEGFORMER: dict[str, Any] = {
    **OF_EQUAL_DEPTHS, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16
}  # fmt: skip
STAGES: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}
WINDOWS: dict[str, Any] = {
    "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "image_size": IMAGE, "patch_size": 2,
    "window_size": 2,
}  # fmt: skip
MOBILE = {"image_size": 64, "depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4}
LEVIT: dict[str, Any] = {
    "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2],
    "depths": [1, 1, 1], "key_dim": [4, 4, 4],
}  # fmt: skip
PYRAMID: dict[str, Any] = {
    "image_size": 64, "depths": [2, 2, 2, 2], "hidden_sizes": [8, 16, 24, 32],
    "num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [2, 2, 2, 2],
}  # fmt: skip

_family = partial(hf, KIND)
_large = partial(hf, KIND, batch=large_images)

VISION = {
    "vit": _family("ViTForImageClassification", images, **ENCODER, **PATCHES),
    "deit": _family("DeiTForImageClassification", images, **ENCODER, **PATCHES),
    "beit": _family("BeitForImageClassification", images, **ENCODER, **PATCHES),
    "dinov2": _family("Dinov2ForImageClassification", images, **ENCODER, **PATCHES),
    "swin": _family("SwinForImageClassification", images, **WINDOWS),
    "swinv2": _family("Swinv2ForImageClassification", images, **WINDOWS),
    "convnext": _large("ConvNextForImageClassification", **LEVELS),
    "convnextv2": _large("ConvNextV2ForImageClassification", **LEVELS),
    "resnet": _large("ResNetForImageClassification", **STAGES, layer_type="basic"),
    "regnet": _large("RegNetForImageClassification", **STAGES, groups_width=4),
    "segformer": _large("SegformerForImageClassification", **SEGFORMER),
    "segformer-pixels": _family("SegformerForSemanticSegmentation", segmented_images, **SEGFORMER),
    "poolformer": _large("PoolFormerForImageClassification", **OF_EQUAL_DEPTHS),
    "mobilenet-v2": _large("MobileNetV2ForImageClassification", **MOBILE),
    "levit": _large("LevitForImageClassification", **LEVIT),
    "pvt": _large("PvtForImageClassification", **PYRAMID),
}
