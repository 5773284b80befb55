"""Drawn photographs, alike at every run: shades, shapes, textures and grain, in the kinds of files that ImageNet has."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIZES = ((500, 375), (375, 500), (500, 333), (640, 480), (300, 240), (200, 160), (160, 600), (513, 511))  # width, height
TINY = (10, 110, 10)  # classes; training and validation images of each
SAMPLE = 40  # photographs, one of each class


def draw(number: int, width: int, height: int) -> Image.Image:
    """A picture of its own for each number: a sky, shapes with edges, waves of leaves, and the grain of a film."""
    random = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width] / max(width, height)
    angle, rate = random.uniform(0, np.pi, 3), random.uniform(20, 150, 3)
    sky = np.dstack([random.uniform(60, 200) + 80 * (np.cos(a) * x + np.sin(a) * y) for a in angle])
    leaves = np.sin(rate[0] * x + 8 * np.sin(rate[1] * y / 10)) * np.sin(rate[2] * y + 5 * x)
    image = Image.fromarray((sky + 25 * leaves[..., None]).clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image, "RGBA")
    for _ in range(12):
        left, top = (int(random.integers(0, side)) for side in (width, height))
        box = (left, top, left + int(random.integers(2, width)), top + int(random.integers(2, height)))
        fill = (*map(int, random.integers(0, 256, 3)), 100)  # of 255: what is behind shines through
        (pen.ellipse if random.random() < 0.5 else pen.rectangle)(box, fill=fill)
    image = image.filter(ImageFilter.GaussianBlur(0.7))  # edges as a lens leaves them: a hard one of two colours is a drawing's
    grain = random.normal(0, 6, (height, width, 1))
    return Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))


def save(image: Image.Image, path: Path, *, kind: int) -> None:
    """As JPEG: of every eight, one is grey, one progressive, one in CMYK, and one is turned by its EXIF entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    turned = Image.Exif()
    turned[274] = 6
    mode, options = {
        1: ("L", {}),
        3: ("RGB", {"progressive": True}),
        5: ("CMYK", {}),
        7: ("RGB", {"exif": turned, "subsampling": "4:4:4"}),
    }.get(kind % 8, ("RGB", {}))
    image.convert(mode).save(path, "JPEG", quality=95, **options)


def write_sample(folder: Path) -> Path:
    """Whole photographs, as `imagenet-sample/<class>/*.JPEG`: one of each of SAMPLE classes."""
    for number in range(SAMPLE):
        # Each kind of file in every size, not always in the same one
        image = draw(number, *SIZES[(number + number // 8) % 8])
        save(image, folder / f"n{number:08}" / f"{number}.JPEG", kind=number)
    return folder


def write_tiny(folder: Path) -> Path:
    """Small ones, as `tinyimagenet10/{train,val}/<class>/*.JPEG`."""
    classes, train, val = TINY
    for number in range(classes * (train + val)):
        label, place = divmod(number, train + val)
        part = "train" if place < train else "val"
        save(draw(number, 64, 64), folder / part / f"n{label:08}" / f"{place}.JPEG", kind=number)
    return folder
