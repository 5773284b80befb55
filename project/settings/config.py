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
        num_classes: Number of outputs. `null` takes the number of classes in the data.
        weights: File with initial weights: a state dict of torchvision or timm (.pt, .pth, .safetensors), or a .ckpt of ours.
        zero_init_residual: Start each residual block as the identity (arXiv:1706.02677, section 5.1).
        optimizer: torch's SGD, or AdamW with torch's default betas.
        lr: Peak learning rate, for data.global_batch_size images per step.
        momentum: SGD's momentum.
        nesterov: Use Nesterov's momentum in SGD.
        weight_decay: Weight decay: an L2 penalty in SGD, decoupled in AdamW (arXiv:1711.05101).
        norm_weight_decay: Weight decay of normalisation layers. `null` takes weight_decay.
        bias_weight_decay: Weight decay of the biases of all other layers. `null` takes weight_decay.
        label_smoothing: Share of the target spread over all classes (arXiv:1512.00567).
        schedule: Shape of the learning rate after warm-up.
        interval: Change the learning rate at each step, or at the start of each epoch.
        end_lr: Learning rate after the last step, for the schedules cosine and linear.
        warmup_epochs: Epochs of linear warm-up. Fractions are allowed.
        warmup_start: Learning rate at the start of warm-up, as a share of the peak.
        step_epochs: Epochs between two drops of the learning rate, for the schedule step.
        step_gamma: Factor of each drop, for the schedule step.
        ema_decay: Decay of the moving average of weights and buffers: `average = decay * average + (1 - decay) * weights`.
            The average is evaluated beside the model. `null` disables it.
        ema_every: Optimizer steps between two updates of the average. Until warm-up ends, an update copies the weights.
        channels_last: Store images and activations as [n, h, w, c]. `null` takes the layout that the hardware is fast in.
        compile: Compile the network with torch.compile. Checkpoints are the same as without.
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
        root: Folder with train/<class>/ and val/<class>/, or in Kaggle's layout, or with class folders alone, of which
            val_fraction is held out. `digits` is the embedded data set.
        global_batch_size: Images per optimizer step: ranks x per-rank batch x trainer.accumulate_grad_batches.
        num_workers: Loader processes per rank. `null` takes the cores that a rank may use, less one, at most 16.
        train_size: Height and width of training images, in pixels.
        start_size: Size of the training images in the first epochs, in pixels; they grow to train_size. `null` keeps one size.
        ramp_start: Share of the epochs after which images begin to grow, with start_size.
        ramp_end: Share of the epochs after which images have train_size, with start_size.
        size_multiple: Sizes between start_size and train_size are multiples of this, in pixels.
        val_resize: Short side to which validation images are resized, in pixels.
        val_size: Height and width of the centre crop for validation, in pixels.
        min_crop_area: Smallest share of the area that a random training crop keeps (arXiv:1409.4842).
        hflip: Probability of a horizontal flip in training.
        trivial_augment: Apply one random change of colour or shape to each training image (arXiv:2103.10158).
        random_erasing: Probability of replacing a rectangle by the mean colour (arXiv:1708.04896).
        mixup_alpha: Blend each image with another one of its rank's batch; the share is drawn from Beta(alpha, alpha)
            (arXiv:1710.09412). 0 disables it.
        cutmix_alpha: Paste a rectangle of another image of its rank's batch; its share is drawn from Beta(alpha, alpha)
            (arXiv:1905.04899). 0 disables it. With both, each batch gets one of the two.
        shuffle: Give the training images a new order in each epoch.
        drop_last: Leave out the last, incomplete training batch of an epoch.
        val_fraction: Share of the images held out for validation, with class folders alone. 1 evaluates all images.
        on_bad_image: End the run at an unreadable image, or replace it by the next readable one and count it.
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
    """When last.ckpt is written, besides the end of each epoch and the arrival of a signal.

    Args:
        every_steps: Write after this many optimizer steps. 0 disables it.
        every_minutes: Write at the first step after this many minutes since the last checkpoint. 0 disables it.
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
        every: Steps between two comparisons of weights and optimizer state. 0 disables the guard.
        timeout: Seconds that a rank may wait for another one before the run ends. At most 0.8 of the process group's timeout.
    """

    every: int = 100
    timeout: float = 600.0

    def __post_init__(self) -> None:
        _require(self.every >= 0, "guard.every", self.every, "give a number of steps, or 0 for no guard")
        _require(self.timeout > 0, "guard.timeout", self.timeout, "give a number of seconds above 0")
