"""A record of a training that never was, for tests of what reads one."""

from dataclasses import asdict
from typing import Any

from project.model.training_record import TrainingRecord
from project.settings.config import DataConfig, ModelConfig


def a_record(**changes: Any) -> TrainingRecord:
    """Of resnet18 after 3 of 3 batches in the first of its epochs, one step each, with its validation done."""
    values: dict[str, Any] = {
        "model": asdict(ModelConfig(arch="resnet18")),
        "data": asdict(DataConfig(root="photos", global_batch_size=4, train_size=32, val_resize=32, val_size=32)),
        "classes": ["ant", "bee"],
        "samples": 12,
        "images": {"train": {"count": 12, "digest": "a"}, "val": {"count": 4, "digest": "b"}},
        "steps_per_epoch": 3,
        "batches_per_epoch": 3,
        "accumulate": 1,
        "world_size": 1,
        "seed": 1,
        "epoch": 0,
        "step": 3,
        "batches": 3,
        "complete": True,
        "pending": False,
        "best": {"path": "runs/0/checkpoints/best.ckpt", "top1": 0.5},
        "history": [{"step": 3, "epoch": 0, "val/top1": 0.5}],
        "metrics": {"val/top1": 0.5},
        "optimizer": {"state": {}, "param_groups": []},
        "schedule": {"last_epoch": 3},
        "scaler": {},
    }
    return TrainingRecord(**{**values, **changes})
