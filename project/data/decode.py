"""An image file to 8-bit RGB, without torch: grey, CMYK, palette, alpha and 16-bit images included, whatever it is called."""

from typing import IO

import numpy as np
import simplejpeg
from PIL import Image

from project.runtime.errors import BadImageError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)  # what Pillow raises


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: convert("RGB") would clip 65535 levels at 255
        return image.convert("I").point(lambda v: v / 257).convert("L").convert("RGB")
    if image.mode == "P" and "transparency" in image.info:  # the same pixels as convert("RGB"), without a warning
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def open_rgb(file: str | IO[bytes]) -> Image.Image:
    """An image, decoded whole, as 8-bit RGB. Alpha is dropped and EXIF orientation ignored, as in torchvision.

    Raises:
        UNREADABLE: one of these, if the file is missing, truncated or no image.
    """
    with Image.open(file) as image:
        return _to_rgb(image)


def read_image(path: str) -> Image.Image:
    """`open_rgb` of a file.

    Raises:
        BadImageError: the file is missing, truncated or no image; the message names it.
    """
    try:
        return open_rgb(path)
    except UNREADABLE as error:
        raise BadImageError(
            f"cannot read the image {path}: {error}\n"
            "Repair or remove the file, or replace unreadable images as they come: --data.on_bad_image skip"
        ) from error


def decode_jpeg(data: bytes) -> np.ndarray | None:
    """The pixels of a JPEG file without a defect, uint8 [h, w, 3], by simplejpeg: those of Pillow, without its copies.

    None where Pillow has to read it: no JPEG, a defect, or CMYK, which differs in a few levels.
    """
    try:
        if simplejpeg.decode_jpeg_header(data)[2] in ("YCbCr", "Gray", "RGB"):
            return simplejpeg.decode_jpeg(data)
    except ValueError:  # no JPEG, cut off
        pass
    return None
