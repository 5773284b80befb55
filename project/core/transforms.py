"""Pixels on the way to the model: torchvision's v2 transforms on uint8 tensors, normalisation on the device."""

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from project.core.config import DataConfig

# torchvision's ImageClassification preset
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def train_transform(config: DataConfig) -> v2.Compose:
    """RGB image -> uint8 [3, train_size, train_size]; draws from torch's default generator only."""
    return v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomResizedCrop(config.train_size, scale=(config.min_crop_area, 1.0), antialias=True),
            v2.RandomHorizontalFlip(config.hflip),
        ]
    )


def val_transform(*, val_resize: int, val_size: int) -> v2.Compose:
    """RGB image -> uint8 [3, val_size, val_size]: short side to val_resize, centre crop.

    On the decoded image, not on a tensor, which rounds a few pixels in a thousand differently: so the pixels are those of
    torchvision's published evaluations.
    """
    return v2.Compose([v2.Resize(val_resize, antialias=True), v2.CenterCrop(val_size), v2.PILToTensor()])


class Normalize(nn.Module):
    """uint8 [n, 3, h, w] -> the floating type of its buffers: (x / 255 - mean) / std, once per batch on the device."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        # not persistent: a checkpoint holds what was learned
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1) * 255, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.dtype) - self.mean) / self.std
