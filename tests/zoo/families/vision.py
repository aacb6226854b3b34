"""Models of images."""

from typing import Any

from families.batches import IMAGE, images, large_images, segmented_images
from families.family import hf

KIND = "vision"

ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
PATCHES: dict[str, Any] = {"image_size": IMAGE, "patch_size": 4}
LEVELS: dict[str, Any] = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
SEGFORMER: dict[str, Any] = {
    **LEVELS,
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 16,
}
WINDOWS: dict[str, Any] = {
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "image_size": IMAGE,
    "patch_size": 2,
    "window_size": 2,
}

VISION = {
    "vit": hf(KIND, "ViTForImageClassification", images, **ENCODER, **PATCHES),
    "deit": hf(KIND, "DeiTForImageClassification", images, **ENCODER, **PATCHES),
    "beit": hf(KIND, "BeitForImageClassification", images, **ENCODER, **PATCHES),
    "dinov2": hf(KIND, "Dinov2ForImageClassification", images, **ENCODER, **PATCHES),
    "swin": hf(KIND, "SwinForImageClassification", images, **WINDOWS),
    "swinv2": hf(KIND, "Swinv2ForImageClassification", images, **WINDOWS),
    "convnext": hf(KIND, "ConvNextForImageClassification", large_images, **LEVELS),
    "convnextv2": hf(KIND, "ConvNextV2ForImageClassification", large_images, **LEVELS),
    "resnet": hf(
        KIND,
        "ResNetForImageClassification",
        large_images,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
    ),
    "regnet": hf(
        KIND,
        "RegNetForImageClassification",
        large_images,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        groups_width=4,
    ),
    "segformer": hf(KIND, "SegformerForImageClassification", large_images, **SEGFORMER),
    "segformer-pixels": hf(KIND, "SegformerForSemanticSegmentation", segmented_images, **SEGFORMER),
    "poolformer": hf(
        KIND,
        "PoolFormerForImageClassification",
        large_images,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
    ),
    "mobilenet-v2": hf(
        KIND,
        "MobileNetV2ForImageClassification",
        large_images,
        image_size=64,
        depth_multiplier=0.1,
        min_depth=4,
        depth_divisible_by=4,
    ),
    "levit": hf(
        KIND,
        "LevitForImageClassification",
        large_images,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
    ),
    "pvt": hf(
        KIND,
        "PvtForImageClassification",
        large_images,
        image_size=64,
        depths=[2, 2, 2, 2],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2],
    ),
}
