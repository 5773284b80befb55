"""What cannot work is refused before the first step, and where possible before any other process is started."""

from pathlib import Path

import torch
from lightning.pytorch import Trainer

from project.core.checkpoint import RECORD, read_checkpoint
from project.core.errors import UserError
from project.core.index import Splits, load_splits
from project.core.model import check_num_classes, last_map_size, new_model
from project.core.plan import BatchPlan
from project.core.weights import match_weights
from project.lit.data import ImageFolders, plan_batches
from project.lit.module import Classifier


def check_device(trainer: Trainer) -> None:
    """Precision and SyncBatchNorm that the device lacks; Lightning itself refuses more devices than there are."""
    device = trainer.strategy.root_device.type


def check_fit(trainer: Trainer, model: Classifier, data: ImageFolders, *, ckpt_path: str | None) -> None:
    splits = load_splits(data.config)
    plan = plan_batches(data.config, splits, trainer)
    num_classes = check_num_classes(model.config, classes=splits.classes)
