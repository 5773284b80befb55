"""A file to an RGB image: grey, CMYK, palette, alpha and 16-bit images included, whatever the file is called."""

import warnings

import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from project.core.errors import BadImageError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's

# Pillow reads EXIF through its TIFF reader and warns about harmless oddities in many ImageNet files.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: convert("RGB") would clip 65535 levels at 255
        return image.convert("I").point(lambda v: v / 257).convert("L").convert("RGB")
    if image.mode == "P" and "transparency" in image.info:  # the same pixels as convert("RGB"), without a warning
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def read_image(path: str) -> Image.Image:
    """An image file, decoded, as 8-bit RGB. Alpha is dropped and EXIF orientation ignored, as in torchvision.

    Raises:
        BadImageError: the file is missing, truncated or no image; the message names it.
    """
    try:
        with Image.open(path) as image:
            return _to_rgb(image)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:  # what Pillow raises
        raise BadImageError(
            f"cannot read the image {path}: {error}\n"
            "Repair or remove the file, or replace unreadable images as they come: --data.on_bad_image skip"
        ) from error


def read_pixels(path: str) -> Tensor:
    """The pixels of `read_image`, uint8 [3, h, w], in memory as [h, w, 3].

    JPEG files are decoded by simplejpeg: by libjpeg-turbo as in Pillow, without Pillow's copies. All others are Pillow's,
    and so are files with a defect and CMYK, which differ in a few levels.

    Raises:
        BadImageError: as `read_image`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
        if simplejpeg.decode_jpeg_header(data)[2] in ("YCbCr", "Gray", "RGB"):
            return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
    except (OSError, ValueError):  # missing, no JPEG, cut off
        pass  # or read_image says why
    return pil_to_tensor(read_image(path))
