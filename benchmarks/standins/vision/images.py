"""Writes images under names that carry their class, as the Oxford-IIIT Pet data have them."""

import random
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES, SIDE = 80, 32


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for number in range(IMAGES):
        kind = ("Abyssinian", "beagle", "Birman")[number % 3]
        pixels = np.full((SIDE, SIDE, 3), draw.randrange(256), dtype=np.uint8)
        pixels[..., number % 3] //= 2
        Image.fromarray(pixels).save(folder / f"{kind}_{number}.jpg")
