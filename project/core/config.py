"""The settings that both trainers read from one YAML: `model.*`, `data.*` and `guard.*`.

The defaults are torchvision's ImageNet recipe.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from project.core.errors import UserError

DIGITS = "digits"  # the value of data.root that names the embedded data set

_HERE = Path(__file__).resolve().parents[1]
CONFIGS = _HERE / "configs" if (_HERE / "configs").is_dir() else _HERE.parent / "configs"  # in a wheel, in a checkout

Arch = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]


def _require(ok: bool, flag: str, value: object, rule: str) -> None:
    if not ok:
        raise UserError(f"--{flag} is {value}: {rule}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network and how it is optimised.

    Args:
        arch: One of torchvision's ResNets.
        num_classes: Size of the last layer; null takes the number of classes in the data.
        weights: Start from this file (.pt, .pth, .safetensors: a torchvision or timm state dict; .ckpt: one of ours).
        zero_init_residual: Start each residual block as the identity (arXiv:1706.02677, section 5.1).
        optimizer: torch's SGD, or AdamW with its own betas.
        lr: Peak learning rate, for data.global_batch_size images per step.
        momentum: SGD's momentum.
        nesterov: SGD with Nesterov's momentum.
        weight_decay: On all parameters: an L2 penalty in SGD, decoupled in AdamW (arXiv:1711.05101).
        label_smoothing: Share of the target spread over all classes (arXiv:1512.00567).
        schedule: Shape of the learning rate after warm-up.
        warmup_epochs: Epochs of linear warm-up; fractions are allowed.
        step_epochs: With schedule step, the epochs between two drops.
        step_gamma: With schedule step, the factor of each drop.
    """

    arch: Arch = "resnet50"
    num_classes: int | None = None
    weights: str | None = None
    zero_init_residual: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    label_smoothing: float = 0.0
    schedule: Literal["cosine", "step", "constant"] = "step"
    warmup_epochs: float = 0.0
    step_epochs: int = 30
    step_gamma: float = 0.1

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "warmup_epochs", "step_gamma"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"model.{name}", value, "give a number that is zero or more")
        _require(0 <= self.momentum < 1, "model.momentum", self.momentum, "give a number from 0 up to, not including, 1")
        _require(
            0 <= self.label_smoothing < 1,
            "model.label_smoothing",
            self.label_smoothing,
            "give a number from 0 up to, not including, 1",
        )
        _require(not self.nesterov or self.momentum > 0, "model.nesterov", True, "Nesterov needs --model.momentum above 0")
        _require(self.step_epochs >= 1, "model.step_epochs", self.step_epochs, "give 1 or more epochs")
        _require(
            self.num_classes is None or self.num_classes >= 2,
            "model.num_classes",
            self.num_classes,
            "a classifier has at least 2 classes; leave it out to take the number of classes in the data",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images and how they become batches.

    Args:
        root: Folder with train/<class>/ and val/<class>/ (or the Kaggle layout, or class folders alone, of which
            val_fraction is held out); `digits` is the embedded data set.
        global_batch_size: Images per optimizer step: ranks x per-rank batch x trainer.accumulate_grad_batches.
        num_workers: Loader processes per rank; null takes the cores that this rank may use, less one, at most 16.
        train_size: Height and width of training images, pixels.
        val_resize: Short side to which validation images are resized, pixels.
        val_size: Height and width of the centre crop for validation, pixels.
        min_crop_area: Smallest share of the area that a random training crop keeps (arXiv:1409.4842).
        hflip: Probability of a horizontal flip in training.
        shuffle: A new order of the training images in each epoch.
        drop_last: Leave out the last, incomplete training batch of an epoch.
        val_fraction: With class folders alone, the share of images held out for validation; 1 evaluates all.
        on_bad_image: An unreadable image ends the run, or is replaced by the next readable one and counted.
    """

    root: str | None = None
    global_batch_size: int = 256
    num_workers: int | None = None
    train_size: int = 224
    val_resize: int = 256
    val_size: int = 224
    min_crop_area: float = 0.08
    hflip: float = 0.5
    shuffle: bool = True
    drop_last: bool = True
    val_fraction: float = 0.1
    on_bad_image: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        size = self.global_batch_size
        _require(size >= 1, "data.global_batch_size", size, "give 1 or more images per step")
        workers = self.num_workers
        _require(workers is None or workers >= 0, "data.num_workers", workers, "give 0 or more processes")
        for name in ("train_size", "val_resize", "val_size"):
            value = getattr(self, name)
            _require(value >= 32, f"data.{name}", value, "a ResNet needs 32 pixels or more")
        _require(
            self.val_size <= self.val_resize,
            "data.val_size",
            self.val_size,
            f"the centre crop must fit in --data.val_resize {self.val_resize}",
        )
        area = self.min_crop_area
        _require(0 < area <= 1, "data.min_crop_area", area, "give a share above 0 and at most 1")
        _require(0 <= self.hflip <= 1, "data.hflip", self.hflip, "give a probability from 0 to 1")
        fraction = self.val_fraction
        _require(0 < fraction <= 1, "data.val_fraction", fraction, "give a share above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What watches that the ranks of a training stay replicas (project/guard).

    Args:
        every: Steps between two comparisons of weights and optimizer state; 0 switches the guard off.
        timeout: Seconds that a rank may wait for another one before the run ends.
    """

    every: int = 100
    timeout: float = 600.0

    def __post_init__(self) -> None:
        _require(self.every >= 0, "guard.every", self.every, "give a number of steps, or 0 for no guard")
        _require(self.timeout > 0, "guard.timeout", self.timeout, "give a number of seconds above 0")
