"""The model for which costs are shown where no script is run."""

import torch

from drivetrain.cost import ModelSpec, TensorSpec

LAYERS = 1000
LAYER_SHAPE = (1000, 1000)
EXAMPLE = "1e9 parameters in fp32 (1000 tensors of 1000 x 1000) with Adam"
"""The model in words: a dry run does not load the user's model."""


def example_model() -> ModelSpec:
    """Describe the model for which a strategy's cost is shown."""
    return ModelSpec(
        tuple(
            TensorSpec(f"layers.{index}.weight", LAYER_SHAPE, torch.float32, True)
            for index in range(LAYERS)
        ),
        states=2,
    )
