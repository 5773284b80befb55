"""Pixels on the way to the model: torchvision's v2 transforms on uint8 tensors, normalisation on the device."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

from project.runtime.errors import UserError
from project.settings.config import DataConfig

# torchvision's ImageClassification preset
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class TrainTransform:
    """uint8 [3, h, w], epoch -> uint8 [3, size, size], of that epoch's size; draws from torch's default generator only."""

    def __init__(self, config: DataConfig, *, epochs: float | None) -> None:
        self.config, self.epochs = config, epochs
        self.by_size: dict[int, v2.Compose] = {}

    def __call__(self, image: Tensor, epoch: int) -> Tensor:
        size = train_size(self.config, epoch=epoch, epochs=self.epochs)
        if size not in self.by_size:
            self.by_size[size] = _augment(self.config, size)
        pixels: Tensor = self.by_size[size](image)
        return pixels


def train_size(config: DataConfig, *, epoch: int, epochs: float | None) -> int:
    """Height and width of the training images of an epoch, pixels.

    From `start_size` to `train_size` on a straight line, rounded to multiples of `size_multiple`: the rule of FFCV's
    train_imagenet.py (github.com/libffcv/ffcv-imagenet), with the ramp given in shares of the training.
    """
    if config.start_size is None:
        return config.train_size
    assert epochs is not None
    begin, end = config.ramp_start * epochs, config.ramp_end * epochs
    if epoch >= end:
        return config.train_size
    if epoch <= begin:
        return config.start_size
    between = config.start_size + (config.train_size - config.start_size) * (epoch - begin) / (end - begin)
    rounded = round(between / config.size_multiple) * config.size_multiple
    return min(config.train_size, max(config.start_size, rounded))


def check_growth(config: DataConfig, *, epochs: float | None) -> None:
    """Refuse images that grow over a training without an end.

    Raises:
        UserError: `--data.start_size` was given, and `epochs` is None.
    """
    if config.start_size is not None and epochs is None:
        raise UserError("--data.start_size needs an end: give --trainer.max_epochs or --trainer.max_steps.")


class RandomResizedCrop(v2.RandomResizedCrop):
    """torchvision's, to the bit, in half of its time: the crop is copied before it is resized, as [h, w, 3].

    After a decoder has emptied a core's caches a call into torch takes several times as long as in a loop, so there are few.
    """

    def __init__(self, size: int, *, scale: tuple[float, float]) -> None:
        super().__init__(size, scale=scale)
        self._log_ratio = torch.log(torch.tensor(self.ratio)).tolist()  # its bounds as numbers, not read from a tensor each time
        self._number, self._place = torch.empty(1), torch.empty(1, dtype=torch.int64)  # which it draws into

    def forward(self, image: Tensor) -> Tensor:
        """uint8 [3, h, w] to uint8 [3, size, size]."""
        top, left, height, width = self.draw(*image.shape[1:])
        channel, row, column = image.stride()
        first = image.storage_offset() + top * row + left * column
        crop = image.as_strided((1, 3, height, width), (3 * channel, channel, row, column), first)
        crop = crop.contiguous(memory_format=torch.channels_last)
        return F.interpolate(crop, self.size, mode="bilinear", antialias=True)[0]

    def draw(self, rows: int, columns: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of the crop of an image, pixels, as `make_params` draws them."""
        area = rows * columns
        for _ in range(10):
            target = area * self._number.uniform_(*self.scale).item()
            aspect = self._number.uniform_(*self._log_ratio).exp_().item()
            width, height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < width <= columns and 0 < height <= rows:
                top = self._place.random_(0, rows - height + 1).item()
                return int(top), int(self._place.random_(0, columns - width + 1).item()), height, width
        low, high = self.ratio  # none fits: the centre, of as much as the ratio allows
        width, height = min(columns, round(rows * high)), min(rows, round(columns / low))
        return (rows - height) // 2, (columns - width) // 2, height, width


class RandomHorizontalFlip(v2.RandomHorizontalFlip):
    """torchvision's, of one tensor: without its search through nested inputs, which takes as long as the flip."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self._number = torch.empty(1)

    def forward(self, image: Tensor) -> Tensor:
        """uint8 [3, h, w], flipped with probability p."""
        return image if self._number.uniform_().item() >= self.p else image.flip(-1)


def _augment(config: DataConfig, size: int) -> v2.Compose:
    steps: list[nn.Module] = [
        RandomResizedCrop(size, scale=(config.min_crop_area, 1.0)),
        RandomHorizontalFlip(config.hflip),
    ]
    if config.trivial_augment:
        steps.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    if config.random_erasing:
        # torchvision erases after normalisation, with zeros: the mean, here to the nearest of 256 values
        steps.append(v2.RandomErasing(config.random_erasing, value=[round(255 * mean) for mean in MEAN]))
    return v2.Compose(steps)


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
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(values, device="cpu").view(1, 3, 1, 1) * 255, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [..., 3, h, w] to float32 of the same shape, normalised channel by channel."""
        return (images.to(self.mean.dtype) - self.mean) / self.std
