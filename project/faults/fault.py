"""What a fault is, where it must be found, and the settings in which faults matter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from project.parity.small_training import SMALL

# On 43 images for training and 11 for validation, two ranks have 22 and 6 each: one repeated, with another last batch.
_COMMON = (*SMALL, "--devices", "2")

# Three steps an epoch, of 8, 8 and 6 images on each rank; a validation and a checkpoint after each epoch.
PLAIN = (*_COMMON, "--data.global_batch_size", "16")

# Two steps an epoch: four batches of 4 images, then a tail of 4 and 2. Clipping binds. No validation after the first epoch.
ACCUMULATED = (
    *(*_COMMON, "--data.global_batch_size", "32", "--trainer.accumulate_grad_batches", "4"),
    *("--trainer.gradient_clip_val", "0.1", "--trainer.check_val_every_n_epoch", "2"),
)


# The steps of PLAIN with what recipes add: mixing, images that grow after the first epoch, BatchNorm without decay, an average.
RECIPE = (
    *(*PLAIN, "--data.mixup_alpha", "0.4", "--data.cutmix_alpha", "1", "--data.start_size", "32", "--data.train_size", "64"),
    *("--data.ramp_start", "0", "--data.ramp_end", "0.5", "--data.trivial_augment", "true", "--data.random_erasing", "0.5"),
    *("--model.norm_weight_decay", "0", "--model.ema_decay", "0.9", "--model.ema_every", "2", "--model.channels_last", "true"),
)


@dataclass(frozen=True)
class Patch:
    """One attribute of the raw trainer's modules or classes, and what to put in its place.

    Attributes:
        owner: Module or class that holds it.
        name: The attribute.
        make: From the original to its replacement.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]

    def apply(self) -> None:
        setattr(self.owner, self.name, self.make(getattr(self.owner, self.name)))


@dataclass(frozen=True)
class Fault:
    """A mistake, and where a comparison must find it.

    Attributes:
        name: How it is asked for.
        mistake: What a person did, in one sentence.
        flags: Settings of both trainers in which it matters.
        phase: Where the first difference must be, one of parity.run.PHASES.
        step: The first optimizer step at which, or after which, it must show.
        patches: What makes the raw trainer do it.
    """

    name: str
    mistake: str
    flags: tuple[str, ...]
    phase: str
    step: int
    patches: tuple[Patch, ...]

    def apply(self) -> None:
        for patch in self.patches:
            patch.apply()
