"""Stands in for ``torchvision.transforms``, with what Accelerate's examples take of it."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class Compose:
    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self._steps = steps

    def __call__(self, image: Any) -> Any:
        for step in self._steps:
            image = step(image)
        return image


class Resize:
    def __init__(self, size: Sequence[int]) -> None:
        self._size = (size[1], size[0])

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.resize(self._size)


class RandomResizedCrop(Resize):
    def __init__(self, size: Sequence[int], scale: tuple[float, float]) -> None:
        super().__init__(size)
        self._scale = scale

    def __call__(self, image: Image.Image) -> Image.Image:
        side = random.uniform(*self._scale) ** 0.5
        width, height = (max(1, int(length * side)) for length in image.size)
        left, top = (
            random.randint(0, b - s) for b, s in zip(image.size, (width, height), strict=True)
        )
        return super().__call__(image.crop((left, top, left + width, top + height)))


class ToTensor:
    def __call__(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
