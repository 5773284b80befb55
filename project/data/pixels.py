"""A file to the pixels that the transforms take."""

import os

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from project.data.decode import decode_jpeg, read_image


def _read(path: str) -> bytes:
    """A whole file, in fewer system calls than a file object makes."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        return os.read(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def read_pixels(path: str) -> Tensor:
    """The pixels of `read_image`, uint8 [3, h, w], in memory as [h, w, 3] where the file is a JPEG without a defect.

    Raises:
        BadImageError: as `read_image`.
    """
    try:
        pixels = decode_jpeg(_read(path))
    except OSError:
        pixels = None  # read_image says why
    return pil_to_tensor(read_image(path)) if pixels is None else torch.from_numpy(pixels).permute(2, 0, 1)
