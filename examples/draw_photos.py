"""Draw folders of pictures to try `ccfa learn` with, where no photos are at hand.

    python examples/draw_photos.py photos

draws photos/first (5 classes) and photos/second (5 other ones), 40 pictures of each class, and photos/test (20 other
pictures of all ten classes), in a few seconds.
"""

import math
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 96
SHAPES = {
    "first": ["circle", "square", "triangle", "star", "ring"],
    "second": ["cross", "moon", "arrow", "wave", "grid"],
}


def outline(shape: str, radius: float) -> list[tuple[float, float]]:
    """The corners of a shape around the origin."""
    if shape == "square":
        return [(-radius, -radius), (radius, -radius), (radius, radius), (-radius, radius)]
    if shape == "arrow":
        return [(-radius, -6), (0, -6), (0, -radius), (radius, 0), (0, radius), (0, 6), (-radius, 6)]
    corners = 10 if shape == "star" else 3
    lengths = [radius if shape != "star" or corner % 2 == 0 else radius / 2.4 for corner in range(corners)]
    angles = [2 * math.pi * corner / corners for corner in range(corners)]
    return [
        (length * math.sin(angle), -length * math.cos(angle)) for length, angle in zip(lengths, angles, strict=True)
    ]


def picture(shape: str, chance: random.Random) -> Image.Image:
    """One picture: a shape of any size, place, angle and colour on a background with stripes."""
    dark = tuple(chance.randrange(0, 110) for _ in range(3))
    light = tuple(chance.randrange(150, 256) for _ in range(3))
    layer = Image.new("L", (SIZE, SIZE))
    draw = ImageDraw.Draw(layer)
    radius, middle = chance.uniform(20, 34), SIZE / 2
    box = [middle - radius, middle - radius, middle + radius, middle + radius]
    if shape in ("circle", "ring", "moon"):
        draw.ellipse(box, fill=255)
        shift = radius * 0.6 if shape == "moon" else 0
        if shape != "circle":
            inner = radius * (0.9 if shape == "moon" else 0.55)
            hole = [middle + shift - inner, middle - inner, middle + shift + inner, middle + inner]
            draw.ellipse(hole, fill=0)
    elif shape == "cross":
        draw.line([middle - radius, middle, middle + radius, middle], fill=255, width=14)
        draw.line([middle, middle - radius, middle, middle + radius], fill=255, width=14)
    elif shape == "wave":
        points = [(middle + x, middle + radius / 2 * math.sin(x / 6)) for x in range(-int(radius), int(radius))]
        draw.line(points, fill=255, width=8)
    elif shape == "grid":
        for step in (-0.8, 0.0, 0.8):
            draw.line([middle + step * radius, box[1], middle + step * radius, box[3]], fill=255, width=5)
            draw.line([box[0], middle + step * radius, box[2], middle + step * radius], fill=255, width=5)
    else:
        draw.polygon([(middle + x, middle + y) for x, y in outline(shape, radius)], fill=255)
    turn, move = chance.uniform(-25, 25), (chance.randint(-10, 10), chance.randint(-10, 10))
    layer = layer.rotate(turn, Image.Resampling.BILINEAR, translate=move)
    background = Image.new("RGB", (SIZE, SIZE), dark)
    stripes = ImageDraw.Draw(background)
    for place in range(0, SIZE, chance.randrange(9, 25)):
        stripes.line([place, 0, place + chance.randrange(-20, 20), SIZE], fill=tuple(part + 30 for part in dark))
    background.paste(light, mask=layer)
    return background


def draw(folder: Path, shapes: list[str], count: int, seed: str = "") -> None:
    """Draw a folder with one subfolder per class."""
    for shape in shapes:
        (folder / shape).mkdir(parents=True, exist_ok=True)
        chance = random.Random(shape + seed)
        for number in range(count):
            picture(shape, chance).save(folder / shape / f"{number:03d}.jpg", quality=85)
    print(f"Drew {count} pictures of each of {len(shapes)} classes in {folder}")


def main(place: Path, count: int = 40) -> None:
    """Draw all folders."""
    for part, shapes in SHAPES.items():
        draw(place / part, shapes, count)
    draw(place / "test", [*SHAPES["first"], *SHAPES["second"]], count // 2, "test")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "photos"))
