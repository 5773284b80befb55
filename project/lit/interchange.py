"""A checkpoint of the raw trainer, as Lightning would have written it at the same place."""

import math
from typing import Any

import lightning
import torch

from project.lit.private_lightning import BATCHES_THAT_STEPPED
from project.model.training_record import RECORD, TrainingRecord


def as_lightning(content: dict[str, Any], *, best_key: str) -> dict[str, Any]:
    """Lightning's own keys, from the weights and the neutral record of any checkpoint of ours."""
    record = TrainingRecord.from_dict(content[RECORD], source="the checkpoint")
    best = record.best and {
        "best_model_path": record.best["path"],
        "best_model_score": torch.tensor(record.best["top1"]),
    }
    return {
        "epoch": record.epoch,
        "global_step": record.step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": {f"model.{name}": value for name, value in content["state_dict"].items()},
        "loops": {"fit_loop": fit_loop(record)},
        "callbacks": {"TrainMetrics": {"history": record.history}, **({best_key: best} if best else {})},
        "optimizer_states": [record.optimizer],
        "lr_schedulers": [record.schedule],
        **({"MixedPrecision": record.scaler} if record.scaler else {}),
        "ImageFolders": _place(record),
        RECORD: content[RECORD],
    }


def _place(record: TrainingRecord) -> dict[str, int]:
    return {"epoch": record.epoch, "batches": record.batches}


def _counts(*, total: int, current: int, completed_less: int = 0, processed_less: int = 0) -> dict[str, Any]:
    """Lightning counts four stages of each thing it does, over the whole training and in the running epoch."""
    return {
        span: {
            "ready": count,
            "started": count,
            "processed": count - processed_less,
            "completed": count - completed_less,
        }
        for span, count in (("total", total), ("current", current))
    }


def _without(counts: dict[str, Any], *stages: str) -> dict[str, Any]:
    return {span: {k: v for k, v in values.items() if k not in stages} for span, values in counts.items()}


def fit_loop(record: TrainingRecord) -> dict[str, Any]:
    """The loop's state after the record's batches of its epoch.

    Three places are told apart: inside the epoch, as in `on_train_batch_end`; at a batch with the validation after it still
    to come; and when all of the epoch is done, as in `on_train_epoch_end`.
    """
    epoch, batches, step, complete = record.epoch, record.batches, record.step, record.complete
    inside, pending = record.inside_epoch, record.pending
    steps = math.ceil(batches / record.accumulate)
    trained = _counts(
        total=epoch * record.batches_per_epoch + batches, current=batches, completed_less=1 if inside and not pending else 0
    )
    stepped = _counts(total=step, current=steps)
    validated = _counts(total=1, current=1, processed_less=1 if pending else 0, completed_less=1 if pending else 0)
    epochs = _counts(total=epoch + 1, current=epoch + 1, processed_less=0 if complete else 1, completed_less=1)
    return {
        "state_dict": {"combined_loader": [_place(record)]},
        "epoch_progress": epochs,
        "epoch_loop.state_dict": {BATCHES_THAT_STEPPED: step if complete else step - 1},
        "epoch_loop.batch_progress": {**trained, "is_last_batch": not inside},
        "epoch_loop.scheduler_progress": _without(stepped, "started", "processed"),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _without(stepped, "started", "processed"),
                "zero_grad": _without(stepped, "processed"),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _without(_counts(total=0, current=0), "started", "processed"),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {
            **(validated if pending or not inside else _counts(total=0, current=0)),
            "is_last_batch": complete,
        },
    }
