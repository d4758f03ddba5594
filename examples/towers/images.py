"""Images for the example: drawn ones, and the patches of any as Qwen's towers take them.

A size is rounded to whole tokens and kept between bounds, pixels are normalised, and rows are the
patches of one token after the other, each pixel twice, since a patch of an image is two frames.
"""

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

SIDES = (96, 640)  # pixels, of what is drawn
MEAN, DEVIATION = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)  # of CLIP's images


def drawn_image(source: random.Random, sides: tuple[int, int] = SIDES) -> Image.Image:
    """Circles and boxes on a plain colour, of any size and shape."""

    def colour() -> tuple[int, int, int]:
        return source.randrange(256), source.randrange(256), source.randrange(256)

    width, height = source.randint(*sides), source.randint(*sides)
    image = Image.new("RGB", (width, height), colour())
    pen = ImageDraw.Draw(image)
    for number in range(12):
        left, top = source.randrange(width), source.randrange(height)
        box = (left, top, left + source.randrange(8, width), top + source.randrange(8, height))
        (pen.ellipse if number % 2 else pen.rectangle)(box, fill=colour())
    return image


def rounded_size(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """The nearest size in multiples of ``unit`` whose pixels are between two bounds.

    Args:
        height: of the image.
        width: of the image.
        unit: pixels of a token's side.
        least: tokens.
        most: tokens.
    """
    tokens = height * width / unit**2
    scale = math.sqrt(min(max(tokens, least), most) / tokens)
    rows, columns = height * scale / unit, width * scale / unit
    rows, columns = max(1, round(rows)), max(1, round(columns))
    while rows * columns > most:
        rows, columns = (rows - 1, columns) if rows > columns else (rows, columns - 1)
    return rows * unit, columns * unit


def patches(
    image: Image.Image, patch: int, merge: int, most: int
) -> tuple[torch.Tensor, list[int]]:
    """[rows, 3 * 2 * patch * patch], and the grid (1, h, w).

    Args:
        image: any.
        patch: pixels of a patch's side.
        merge: patches of a token's side.
        most: tokens; a larger image is made smaller.
    """
    height, width = rounded_size(image.height, image.width, patch * merge, 4, most)
    pixels = torch.tensor(np.asarray(image.convert("RGB").resize((width, height))))
    scaled = (pixels / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    h, w = height // patch, width // patch
    split = scaled.view(h // merge, merge, patch, w // merge, merge, patch, 3)
    rows = split.permute(0, 3, 1, 4, 6, 2, 5).reshape(h * w, 3, 1, patch, patch)
    return rows.expand(-1, -1, 2, -1, -1).reshape(h * w, -1), [1, h, w]


def image_call(
    images: Sequence[Image.Image], patch: int, merge: int, most: int, device: str
) -> dict[str, torch.Tensor]:
    """What the tower takes for some images: patches on the device, grids on the CPU."""
    patched = [patches(image, patch, merge, most) for image in images]
    pixels = torch.cat([rows for rows, _ in patched]).to(device)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid for _, grid in patched])}
