"""The settings that both trainers read from one YAML: `model.*`, `data.*`, `checkpoint.*` and `guard.*`.

The defaults are torchvision's ImageNet recipe.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from project.runtime.errors import UserError

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
        weight_decay: An L2 penalty in SGD, decoupled in AdamW (arXiv:1711.05101).
        norm_weight_decay: That of normalisation layers; null for weight_decay.
        bias_weight_decay: That of the biases of other layers; null for weight_decay.
        label_smoothing: Share of the target spread over all classes (arXiv:1512.00567).
        schedule: Shape of the learning rate after warm-up.
        interval: The rate changes at each step, or at the start of each epoch.
        end_lr: Where cosine and linear end: the rate after the last step.
        warmup_epochs: Epochs of linear warm-up; fractions are allowed.
        warmup_start: Share of the peak at which warm-up begins.
        step_epochs: With schedule step, the epochs between two drops.
        step_gamma: With schedule step, the factor of each drop.
        ema_decay: Keep a moving average of weights and buffers, which this share of the old one enters at each update, and
            evaluate it beside the model; null for none.
        ema_every: Optimizer steps from one update of the average to the next. Until warm-up ends an update copies.
        channels_last: Store images and activations as [n, h, w, c], which most convolutions are faster in; null for what
            the hardware is fast in.
        compile: Compile the network with torch.compile; checkpoints are the same as without.
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
    norm_weight_decay: float | None = None
    bias_weight_decay: float | None = None
    label_smoothing: float = 0.0
    schedule: Literal["cosine", "linear", "step", "constant"] = "step"
    interval: Literal["step", "epoch"] = "step"
    end_lr: float = 0.0
    warmup_epochs: float = 0.0
    warmup_start: float = 0.01
    step_epochs: int = 30
    step_gamma: float = 0.1
    ema_decay: float | None = None
    ema_every: int = 1
    channels_last: bool | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        decays = ("weight_decay", "norm_weight_decay", "bias_weight_decay")
        for name in ("lr", *decays, "warmup_epochs", "step_gamma", "end_lr"):
            value = getattr(self, name)
            ok = value is None or (math.isfinite(value) and value >= 0)
            _require(ok, f"model.{name}", value, "give a number that is zero or more")
        _require(self.end_lr <= self.lr, "model.end_lr", self.end_lr, f"the rate falls, from --model.lr {self.lr:g}")
        _require(0 <= self.warmup_start <= 1, "model.warmup_start", self.warmup_start, "give a share from 0 to 1")
        decay = self.ema_decay
        _require(decay is None or 0 < decay < 1, "model.ema_decay", decay, "give a share between 0 and 1, such as 0.999")
        _require(self.ema_every >= 1, "model.ema_every", self.ema_every, "give 1 or more steps")
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
        start_size: Begin with images of this size, which then grow to train_size; null for one size throughout.
        ramp_start: With start_size, the share of the epochs after which images begin to grow.
        ramp_end: With start_size, the share of the epochs from which they have train_size.
        size_multiple: With start_size, sizes in between are multiples of this, pixels.
        val_resize: Short side to which validation images are resized, pixels.
        val_size: Height and width of the centre crop for validation, pixels.
        min_crop_area: Smallest share of the area that a random training crop keeps (arXiv:1409.4842).
        hflip: Probability of a horizontal flip in training.
        trivial_augment: One random change of colour or shape per image (arXiv:2103.10158).
        random_erasing: Probability of replacing a rectangle by the mean colour (arXiv:1708.04896).
        mixup_alpha: Blend each image with another of its rank's batch, by a share from Beta(alpha, alpha)
            (arXiv:1710.09412); 0 for never.
        cutmix_alpha: Paste a rectangle of another image of its rank's batch, of such a share (arXiv:1905.04899); 0 for
            never. With both, each batch gets one of the two.
        shuffle: A new order of the training images in each epoch.
        drop_last: Leave out the last, incomplete training batch of an epoch.
        val_fraction: With class folders alone, the share of images held out for validation; 1 evaluates all.
        on_bad_image: An unreadable image ends the run, or is replaced by the next readable one and counted.
    """

    root: str | None = None
    global_batch_size: int = 256
    num_workers: int | None = None
    train_size: int = 224
    start_size: int | None = None
    ramp_start: float = 0.0
    ramp_end: float = 1.0
    size_multiple: int = 32
    val_resize: int = 256
    val_size: int = 224
    min_crop_area: float = 0.08
    hflip: float = 0.5
    trivial_augment: bool = False
    random_erasing: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    shuffle: bool = True
    drop_last: bool = True
    val_fraction: float = 0.1
    on_bad_image: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        size = self.global_batch_size
        _require(size >= 1, "data.global_batch_size", size, "give 1 or more images per step")
        workers = self.num_workers
        _require(workers is None or workers >= 0, "data.num_workers", workers, "give 0 or more processes")
        for name in ("train_size", "start_size", "val_resize", "val_size"):
            value = getattr(self, name)
            _require(value is None or value >= 32, f"data.{name}", value, "a ResNet needs 32 pixels or more")
        if self.start_size is not None:
            rule = f"images grow, to --data.train_size {self.train_size}"
            _require(self.start_size <= self.train_size, "data.start_size", self.start_size, rule)
        ordered = 0 <= self.ramp_start <= self.ramp_end <= 1
        _require(ordered, "data.ramp_start", self.ramp_start, f"give shares of 1 in order, up to --data.ramp_end {self.ramp_end}")
        _require(self.size_multiple >= 1, "data.size_multiple", self.size_multiple, "give 1 or more pixels")
        _require(
            self.val_size <= self.val_resize,
            "data.val_size",
            self.val_size,
            f"the centre crop must fit in --data.val_resize {self.val_resize}",
        )
        area = self.min_crop_area
        _require(0 < area <= 1, "data.min_crop_area", area, "give a share above 0 and at most 1")
        for name in ("hflip", "random_erasing"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"data.{name}", value, "give a probability from 0 to 1")
        for name in ("mixup_alpha", "cutmix_alpha"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"data.{name}", value, "give a number that is zero or more")
        fraction = self.val_fraction
        _require(0 < fraction <= 1, "data.val_fraction", fraction, "give a share above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When last.ckpt is written besides the end of each epoch, and before a signal ends the run.

    Args:
        every_steps: After so many optimizer steps; 0 for never.
        every_minutes: After the first step by which so many minutes have gone by since the last time; 0 for never.
    """

    every_steps: int = 0
    every_minutes: float = 30.0

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "give a number of steps, or 0 for never")
        minutes = self.every_minutes
        _require(minutes >= 0, "checkpoint.every_minutes", minutes, "give a number of minutes, or 0 for never")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What watches that the ranks of a training stay replicas (project/guard).

    Args:
        every: Steps between two comparisons of weights and optimizer state; 0 switches the guard off.
        timeout: Seconds that a rank may wait for another one before the run ends; at most 0.8 of the process group's timeout.
    """

    every: int = 100
    timeout: float = 600.0

    def __post_init__(self) -> None:
        _require(self.every >= 0, "guard.every", self.every, "give a number of steps, or 0 for no guard")
        _require(self.timeout > 0, "guard.timeout", self.timeout, "give a number of seconds above 0")
