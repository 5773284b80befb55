"""Mixup and cutmix: images of one batch on one rank, and their targets, put together by torchvision's transforms."""

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from project.settings.config import DataConfig
from project.settings.seed import mix, seeded


class Mixing:
    """What a batch is mixed to depends on (seed, epoch, batch, rank): on the world size, then, unlike all else in the data."""

    def __init__(self, config: DataConfig, *, num_classes: int, seed: int) -> None:
        self.seed = seed
        self.choices: list[nn.Module] = []
        with torch.device("cpu"):  # they hold a distribution; a number drawn on a GPU would make the host wait for it
            if config.mixup_alpha:
                self.choices.append(v2.MixUp(alpha=config.mixup_alpha, num_classes=num_classes))
            if config.cutmix_alpha:
                self.choices.append(v2.CutMix(alpha=config.cutmix_alpha, num_classes=num_classes))

    def __call__(self, images: Tensor, target: Tensor, *, epoch: int, batch: int, rank: int) -> tuple[Tensor, Tensor]:
        """Normalised images and int64 [n] targets, mixed to float32 [n, classes]; both as they are where nothing mixes.

        Args:
            images: float [n, 3, h, w].
            target: int64 [n].
            epoch: From 0.
            batch: Number of the batch in its epoch on this rank, from 0.
            rank: Rank of this process.
        """
        if not self.choices:
            return images, target
        with seeded(mix(self.seed, epoch, batch, rank)):
            choice = self.choices[int(torch.randint(len(self.choices), ()))]
            mixed: tuple[Tensor, Tensor] = choice(images, target)
        return mixed
