"""A file to the pixels that the transforms take."""

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from project.core.decode import decode_jpeg, read_image


def read_pixels(path: str) -> Tensor:
    """The pixels of `read_image`, uint8 [3, h, w], in memory as [h, w, 3] where the file is a JPEG without a defect.

    Raises:
        BadImageError: as `read_image`.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            pixels = decode_jpeg(file.read())
    except OSError:
        pixels = None  # read_image says why
    return pil_to_tensor(read_image(path)) if pixels is None else torch.from_numpy(pixels).permute(2, 0, 1)
