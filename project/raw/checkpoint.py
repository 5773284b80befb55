"""Replaces ModelCheckpoint and Lightning's loop state: what a checkpoint holds, and how a training goes on from it."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import optim
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from project.data.image_list import describe_images
from project.model.checkpoint_file import copy_atomic, find_best
from project.model.ema import EMA
from project.model.nonfinite import scores
from project.model.optim import follow_recipe, recipe_of
from project.model.training_record import RECORD, TrainingRecord
from project.raw.data import ImageFolders
from project.raw.module import Classifier


@dataclass
class Place:
    """Where a training stands.

    Attributes:
        epoch: The running epoch, from 0.
        batches: Batches of this epoch that this rank has trained on.
        step: Optimizer steps since the first epoch.
        complete: Nothing of the epoch is left: all batches trained, its validation done or not due.
        metrics: Metrics of the newest validation.
        best: Path and top-1 of the best checkpoint so far; empty without one.
    """

    epoch: int = 0
    batches: int = 0
    step: int = 0
    complete: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)

    def next_epoch(self) -> None:
        self.epoch, self.batches, self.complete = self.epoch + 1, 0, False

    def is_best(self, path: Path) -> bool:
        """Whether the newest validation has the highest top-1, the first of equals; then `path` is the best checkpoint.

        One whose loss is NaN or infinite never has it.
        """
        top1 = self.metrics.get("val/top1", 0.0)
        better = scores(self.metrics) and (not self.best or top1 > self.best["top1"])
        if better:
            self.best = {"path": str(path), "top1": top1}
        return better


@dataclass
class State:
    """What training changes."""

    module: Classifier
    optimizer: optim.Optimizer
    schedule: LambdaLR
    scaler: GradScaler
    ema: EMA | None


def make_checkpoint(state: State, data: ImageFolders, place: Place, *, history: list[dict[str, float]]) -> dict[str, Any]:
    """The weights, and one record of plain values from which either trainer goes on."""
    record = TrainingRecord(
        model=asdict(state.module.config),
        data=asdict(data.config),
        classes=data.splits.classes,
        samples=len(data.splits.train),
        images=describe_images(data.splits),
        steps_per_epoch=data.plan.steps_per_epoch,
        batches_per_epoch=data.plan.batches,
        accumulate=data.plan.accumulate,
        world_size=data.ranks.world_size,
        seed=data.seed,
        epoch=place.epoch,
        step=place.step,
        batches=place.batches,
        complete=place.complete,
        pending=place.batches == data.plan.batches and not place.complete,
        metrics=place.metrics,
        best=dict(place.best),
        history=history,
        optimizer=state.optimizer.state_dict(),
        schedule=state.schedule.state_dict(),
        scaler=state.scaler.state_dict(),
        ema={} if state.ema is None else state.ema.state_dict(),
    )
    return {"state_dict": state.module.model.state_dict(), RECORD: record.to_dict()}


def restore(record: TrainingRecord, state: State) -> Place:
    """All as it was, with the rates of this run's recipe; returns the place to go on from."""
    recipe = recipe_of(state.optimizer)
    state.optimizer.load_state_dict(record.optimizer)
    state.schedule.load_state_dict(record.schedule)
    if state.scaler.is_enabled() and record.scaler:
        state.scaler.load_state_dict(record.scaler)
    if state.ema is not None and record.ema:
        state.ema.load_state_dict(record.ema)
    follow_recipe(state.optimizer, state.schedule, recipe)
    place = Place(**{each.name: getattr(record, each.name) for each in fields(Place)})
    if place.complete:
        place.next_epoch()
    return place


def inherit_best(best: dict[str, Any], folder: Path, *, ckpt_path: str) -> dict[str, Any]:
    """A resumed run begins with the best checkpoint of the run that it goes on from, in its own folder."""
    before = find_best(best["path"], ckpt_path=ckpt_path) if best else None
    if before is None:
        return {}
    own = folder / "checkpoints" / "best.ckpt"
    copy_atomic(before, own)
    return {"path": str(own), "top1": best["top1"]}
