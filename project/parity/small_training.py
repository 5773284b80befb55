"""A training that is over in seconds, for what is run many times: a few digits, odd in number, and a resnet18 at 32 pixels."""

import shutil
from pathlib import Path

from project.data.index import ImageIndex
from project.data.splits import load_splits
from project.settings.config import CONFIGS, DIGITS, DataConfig

TRAIN, VAL = 43, 11  # images: odd numbers, so that several ranks need padding, and the last batch of a rank is a smaller one

SMALL = (
    *("--config", str(CONFIGS / "digits.yaml"), "--accelerator", "cpu", "--max_epochs", "2"),
    *("--model.arch", "resnet18", "--model.zero_init_residual", "false", "--data.num_workers", "0"),
    *("--model.optimizer", "sgd", "--model.lr", "0.05", "--model.momentum", "0.9", "--model.weight_decay", "0.01"),
    *("--data.drop_last", "false", "--data.min_crop_area", "0.5", "--data.hflip", "0.5"),
)


def small_digits(folder: Path) -> Path:
    """A few of the digits as class folders."""
    splits = load_splits(DataConfig(root=DIGITS))
    _copy(splits.train, folder / "train", TRAIN)
    _copy(splits.val, folder / "val", VAL)
    return folder


def _copy(index: ImageIndex, folder: Path, count: int) -> None:
    """`count` images, of each class in turn."""
    by_class = [[i for i, target in enumerate(index.targets) if target == k] for k in range(len(index.classes))]
    for number in range(count):
        k = number % len(by_class)
        source = Path(index.path(by_class[k][number // len(by_class)]))
        target = folder / index.classes[k]
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target / source.name)
