"""What a checkpoint says of its training: written by both trainers, read by both and by the commands."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from project.runtime.errors import UserError

RECORD = "lockstep"  # its key in a checkpoint
VERSION = 1  # of its layout; files from before it was counted are of version 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRecord:
    """All that either trainer needs to go on, in plain values and tensors, so that `weights_only` loads it.

    Attributes:
        model: ModelConfig, as a dict.
        data: DataConfig, as a dict.
        classes: Names of the classes, in the order of the network's outputs.
        samples: Number of training images.
        images: Of `train` and `val` each the `count` and the `digest` of their list; None in files of version 0 that lack it.
        steps_per_epoch: Optimizer steps of a whole epoch.
        batches_per_epoch: Batches per rank of a whole epoch.
        accumulate: Batches per rank whose gradients make one step.
        world_size: Number of ranks.
        seed: Seed of weights, order and augmentation.
        epoch: The running epoch, from 0.
        step: Optimizer steps since the first epoch.
        batches: Batches of the running epoch that each rank has trained on.
        complete: Nothing of the epoch is left: all batches trained, its validation done or not due.
        pending: A validation after the newest batch is still to come.
        best: `path` and `top1` (a share from 0 to 1) of the best checkpoint so far; empty without one.
        history: Rows of `step`, `epoch` and values: `train/loss` (nats), `train/lr`, `train/images_per_s` (all ranks),
            `train/data_wait` (share of the time), `val/top1`, `val/loss` ...
        metrics: `val/...` of the newest validation; empty without one.
        optimizer: State dict of torch's optimizer.
        schedule: State dict of the learning-rate schedule, which counts optimizer steps.
        scaler: State dict of the gradient scaler; empty where there is none.
        ema: State dict of the moving average; empty where there is none.
        version: Version of this layout.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    classes: list[str]
    samples: int
    images: dict[str, dict[str, Any]] | None = None
    steps_per_epoch: int
    batches_per_epoch: int
    accumulate: int
    world_size: int
    seed: int
    epoch: int
    step: int
    batches: int
    complete: bool
    pending: bool
    best: dict[str, Any]
    history: list[dict[str, float]]
    metrics: dict[str, float]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    ema: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def inside_epoch(self) -> bool:
        """Batches of the running epoch are left to train on."""
        return self.batches < self.batches_per_epoch

    @property
    def known_images(self) -> dict[str, dict[str, Any]]:
        """`images`, or as much of them as a file of version 0 says."""
        return {"train": {"count": self.samples}} if self.images is None else self.images

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint. Tensors are not copied: the optimizer's are those of Lightning's own keys, stored once."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str) -> "TrainingRecord":
        """What `to_dict` made, of this version or an earlier one.

        Args:
            values: Of a checkpoint, under the key RECORD.
            source: How the user named the file, for the messages.

        Raises:
            UserError: a newer version has written it, or something that every version has is missing.
        """
        version = values.get("version", 0)
        if version > VERSION:
            raise UserError(
                f"{source} was written by a newer version of this program (its record has version {version}, this program reads "
                f"{VERSION} and older):\nuse that version, or a later one."
            )
        given = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        needed = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
        missing = [name for name in needed if name not in given and name != "pending"]
        if missing:
            raise UserError(f"{source} has a record without {', '.join(missing)}: use another checkpoint.")
        if "pending" not in given:  # written when a training was validated at the ends of epochs alone
            given["pending"] = given["batches"] >= given["batches_per_epoch"] and not given["complete"]
        return cls(**{**given, "version": version})
